"""Between text and token ids: the chat template, and text that grows without ever showing half a character."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from drawbar.errors import CheckpointError, ConfigurationError, PromptError, VocabularyError

_REPLACEMENT = "\ufffd"

Message = Mapping[str, str]


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{folder}: there is no usable tokenizer (tokenizer.json and tokenizer_config.json): {reason}"
        ) from error


def check_same_vocabulary(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, name: str) -> None:
    """A draft's ids must mean what the target's mean; how many rows each model pads its table to does not matter.

    Raises:
        VocabularyError: names a token that differs.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    for token in sorted(ours.keys() | theirs.keys(), key=lambda token: ours.get(token, theirs.get(token, 0))):
        if ours.get(token) != theirs.get(token):
            raise VocabularyError(
                f"the draft {name} has another vocabulary than the target: token {token!r} is "
                f"{ours.get(token, 'absent')} for the target and {theirs.get(token, 'absent')} for the draft; "
                "use a draft of the same family, or --draft self-int4"
            )


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Plain text to ids, with the special tokens that the tokenizer puts around it.

    Raises:
        PromptError: there is nothing to encode, or it is no valid text.
    """
    tokens = _ids(tokenizer, text)
    if not text or not tokens:
        raise PromptError("the prompt is empty")
    return tokens


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """A conversation to ids, up to where the assistant speaks; special tokens come from the template alone.

    Raises:
        ConfigurationError: the model has no chat template, or its template refuses the messages.
        PromptError: no message, or an empty one from the user.
    """
    if not all(isinstance(m, Mapping) and isinstance(m.get("content"), str) for m in messages):
        raise PromptError("each message must be a mapping whose content is a text")
    if not messages or not messages[-1]["content"].strip():
        raise PromptError("the prompt is empty")
    if not tokenizer.chat_template:
        raise ConfigurationError("the model has no chat template: use --raw, or give a plain prompt")
    from jinja2.exceptions import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
        )
    except TemplateError as error:
        raise ConfigurationError(f"the model's chat template refuses these messages: {error}") from error
    return _ids(tokenizer, str(text), add_special_tokens=False)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, **options: bool) -> list[int]:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise PromptError("the prompt is not valid text: it holds bytes that are not UTF-8")
    return list(tokenizer(text, **options)["input_ids"])


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Ids to text, special tokens hidden. Spaces before punctuation stay: tidying them up would change the text."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class TextStream:
    """Text of a growing sequence, piece by piece. All pieces together are the text of all tokens.

    What a token adds can depend on the token before it, so each piece is the difference between two decodings that
    start at the same, earlier token. (Byte-fallback tokenizers take back a whole run of bytes if one of them is
    malformed; characters that were shown by then stay shown.)
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0
        self._shown = 0

    def push(self, tokens: Sequence[int]) -> str:
        """Take in tokens and return the text that is certain now."""
        self._tokens.extend(tokens)
        text = self._window(len(self._tokens))
        if text.endswith(_REPLACEMENT):
            return ""
        return self._emit(text)

    def finish(self) -> str:
        """What is left, also if the last character never became whole."""
        return self._emit(self._window(len(self._tokens)))

    def _window(self, end: int, start: int | None = None) -> str:
        return decode(self._tokenizer, self._tokens[self._start if start is None else start : end])

    def _emit(self, text: str) -> str:
        shown = self._window(self._shown)
        piece = text[len(shown) :]
        self._shown = len(self._tokens)
        # Some of what was shown stays in the window, from where it reads as it did: what comes first loses its space,
        # and a run of bytes that begins within a character is malformed.
        start = max(self._shown - 1, self._start)
        while start > self._start and self._window(self._shown, start)[:1] in ("", _REPLACEMENT):
            start -= 1
        self._start = start
        return piece
