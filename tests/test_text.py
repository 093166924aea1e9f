"""Text that grows token by token, and prompts of every kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from drawbar.errors import CheckpointError, ConfigurationError, PromptError, VocabularyError
from drawbar.text import TextStream, check_same_vocabulary, decode, encode, encode_chat, load_tokenizer
from tests.support.checkpoints import tiny_tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def metaspace() -> PreTrainedTokenizerBase:
    """Like Llama 2's: a space is part of the word, the first one is dropped, unknown characters are bytes."""
    words = [
        "<s>",
        "</s>",
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁the",
        "▁sky",
        "n",
        "'",
        "t",
        ".",
    ]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def stream(tokenizer: PreTrainedTokenizerBase, tokens: list[int], step: int) -> list[str]:
    text = TextStream(tokenizer)
    pieces = [text.push(tokens[start : start + step]) for start in range(0, len(tokens), step)]
    return [*pieces, text.finish()]


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.sampled_from("ab .,é—重🐎👩‍🚀\n'"), max_size=20), step=st.integers(1, 4))
def test_pieces_of_text_join_and_never_break_a_character(
    byte_level: PreTrainedTokenizerBase, text: str, step: int
) -> None:
    tokens = list(byte_level(text)["input_ids"])
    pieces = stream(byte_level, tokens, step)
    assert "".join(pieces) == decode(byte_level, tokens) == text
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=150, deadline=None)
@given(tokens=st.lists(st.integers(0, 319), max_size=24), step=st.integers(1, 4))
def test_pieces_of_any_tokens_join_to_their_text(
    byte_level: PreTrainedTokenizerBase, tokens: list[int], step: int
) -> None:
    assert "".join(stream(byte_level, tokens, step)) == decode(byte_level, tokens)


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(st.sampled_from([[0], [1], [259], [260], [261], [262], [264], [3 + 0xC3, 3 + 0xA9]]), max_size=16),
    step=st.integers(1, 3),
)
def test_pieces_join_where_the_first_word_loses_its_space(
    metaspace: PreTrainedTokenizerBase, parts: list[list[int]], step: int
) -> None:
    tokens = [token for part in parts for token in part]
    assert "".join(stream(metaspace, tokens, step)) == decode(metaspace, tokens)


def test_a_special_token_within_the_text_takes_no_space_with_it(metaspace: PreTrainedTokenizerBase) -> None:
    the, end, sky = 260, 1, 261
    assert "".join(stream(metaspace, [the, end, end, sky], 1)) == "the sky"


def test_characters_of_several_byte_tokens_follow_each_other(metaspace: PreTrainedTokenizerBase) -> None:
    assert stream(metaspace, [3 + byte for byte in "éé".encode()], 1) == ["", "é", "", "é", ""]


def test_spaces_before_punctuation_stay(byte_level: PreTrainedTokenizerBase) -> None:
    byte_level.clean_up_tokenization_spaces = True
    try:
        text = "if ( a ) : b , c . d n't ?"
        assert decode(byte_level, encode(byte_level, text)) == text
    finally:
        byte_level.clean_up_tokenization_spaces = False


def test_special_tokens_are_hidden(byte_level: PreTrainedTokenizerBase) -> None:
    tokens = [
        byte_level.bos_token_id,
        *byte_level("ab", add_special_tokens=False)["input_ids"],
        byte_level.eos_token_id,
    ]
    assert decode(byte_level, tokens) == "".join(stream(byte_level, tokens, 1)) == "ab"


def test_a_conversation_has_one_bos(byte_level: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "why?"}]
    tokens = encode_chat(byte_level, messages)
    assert tokens.count(byte_level.bos_token_id) == 1 and tokens[0] == byte_level.bos_token_id
    assert byte_level.decode(tokens, skip_special_tokens=True) == "system: short\nuser: why?\nassistant:"


@pytest.mark.parametrize("content", ["", " \n", None, 3, ["text"]])
def test_messages_without_text_are_refused(byte_level: PreTrainedTokenizerBase, content: Any) -> None:
    with pytest.raises(PromptError):
        encode_chat(byte_level, [{"role": "user", "content": content}])
    for messages in ([], [{"role": "user"}], ["why?"]):
        with pytest.raises(PromptError):
            encode_chat(byte_level, messages)  # type: ignore[arg-type]


def test_prompts_that_are_no_text_are_refused(byte_level: PreTrainedTokenizerBase) -> None:
    for text in ("", "\udcff"):
        with pytest.raises(PromptError):
            encode(byte_level, text)
    with pytest.raises(PromptError, match="UTF-8"):
        encode_chat(byte_level, [{"role": "user", "content": "a \udcff"}])


def test_templates_that_will_not_do(metaspace: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "why?"}]
    with pytest.raises(ConfigurationError, match="--raw"):
        encode_chat(metaspace, messages)
    metaspace.chat_template = "{{ raise_exception('only after dark') }}"
    with pytest.raises(ConfigurationError, match="only after dark"):
        encode_chat(metaspace, messages)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer"):
        load_tokenizer(tmp_path)


def test_vocabularies(byte_level: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    def changed(name: str, change: Callable[[dict[str, int]], object]) -> PreTrainedTokenizerBase:
        path = tiny_tokenizer(tmp_path / name)
        data = json.loads((path / "tokenizer.json").read_text())
        change(data["model"]["vocab"])
        (path / "tokenizer.json").write_text(json.dumps(data))
        return load_tokenizer(path)

    def swap(vocabulary: dict[str, int]) -> None:
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    check_same_vocabulary(byte_level, load_tokenizer(tiny_tokenizer(tmp_path / "same")), "same")
    with pytest.raises(VocabularyError, match="token 'a' is"):
        check_same_vocabulary(byte_level, changed("swapped", swap), "swapped")
    with pytest.raises(VocabularyError, match=r"absent for the target and 320|319"):
        check_same_vocabulary(byte_level, load_tokenizer(tiny_tokenizer(tmp_path / "larger", 330)), "larger")
