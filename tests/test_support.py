"""The tiny checkpoints must be worth testing with: loadable, repeatable, and with answers that vary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.checkpoints import ARCHITECTURES, make_checkpoint, tiny_tokenizer


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_varies(architecture: str, tied: bool, tiny_checkpoint: Callable[..., Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint(architecture, tie_word_embeddings=tied), dtype=torch.float32
    )
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    prompt = torch.arange(3, 15)[None]
    answer = model.generate(prompt, max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert len(set(answer[0, 12:].tolist())) > 4


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gemma3_text", "gpt_oss"])
def test_windows_are_shorter_than_prompts_of_tests(architecture: str, tiny_checkpoint: Callable[..., Path]) -> None:
    config = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(architecture)).config
    assert config.sliding_window == 8
    if architecture != "mistral":
        assert set(config.layer_types) == {"sliding_attention", "full_attention"}


def test_same_seed_same_weights_and_shards(tmp_path: Path) -> None:
    one = make_checkpoint("llama", tmp_path / "one", dtype="float32", seed=5)
    two = make_checkpoint("llama", tmp_path / "two", dtype="float32", seed=5, max_shard_size="100KB")
    whole = load_file(one / "model.safetensors")
    assert (two / "model.safetensors.index.json").exists()
    parts = {name: tensor for file in two.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert {tensor.dtype for tensor in parts.values()} == {torch.float32}


@pytest.mark.parametrize("text", ["Why is the sky blue?", "naïve 日本語 🙂\n\ttabs", " two  spaces "])
def test_tokenizer_keeps_any_text(text: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path, 300))
    assert len(tokenizer) == 300
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_id == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    ).endswith(f"user: {text}\nassistant:")


def test_tokenizer_needs_every_byte(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs 259 tokens, not 128"):
        tiny_tokenizer(tmp_path, 128)
