"""Configs: what is refused, by name, and what a skeleton costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from drawbar.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from drawbar.models.loading import build_skeleton, load_config, max_context, resolve_checkpoint, resolve_dtype
from tests.models.tiny import make_config


def write(folder: Path, content: object) -> Path:
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def build(folder: Path) -> None:
    build_skeleton(load_config(folder), torch.bfloat16)


REFUSED = {
    "t5": "encoder-decoder",
    "bart": "encoder-decoder",
    "whisper": "encoder-decoder",
    "mamba": "layers of type",
    "jamba": "layers of type",
    "qwen3_next": "layers of type linear_attention",
    "gpt2": "not a plain list",
    "bert": "not a plain list",
    "falcon": "falcon",
    "bloom": "no attention function",
}


@pytest.mark.parametrize(("kind", "reason"), REFUSED.items())
def test_what_cannot_run_is_refused_by_name(kind: str, reason: str, tmp_path: Path) -> None:
    small = {"model_type": kind, "vocab_size": 64, "is_decoder": True}
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        build(write(tmp_path, small))
    assert kind in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "quantised .gptq"),
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "its own Python code"),
        ({"architectures": ["X"]}, "of no model_type"),
        ({"model_type": "llama", "hidden_size": "wide"}, "llama"),
    ],
)
def test_configs_that_name_something_else_are_refused(content: object, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        build(write(tmp_path, content))


@pytest.mark.parametrize("content", ["{", "[1]", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), ""])
def test_a_damaged_config_is_named(content: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_config(write(tmp_path, content))


def test_missing_folders_and_configs_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no config"):
        load_config(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve_checkpoint(tmp_path / "nowhere")
    assert resolve_checkpoint(tmp_path) == tmp_path


def test_dtypes() -> None:
    config = make_config("llama")
    assert resolve_dtype("float32", config) == torch.float32
    config.dtype = torch.float16
    assert resolve_dtype("auto", config) == torch.float16
    with pytest.raises(ConfigurationError, match="int8"):
        resolve_dtype("int8", config)


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
        "rope_theta": 1e4,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_buffers_that_no_checkpoint_holds_are_those_of_transformers(kind: str) -> None:
    config = make_config("llama", rope_parameters=ROPES[kind])
    ours = dict(build_skeleton(config, torch.bfloat16).named_buffers())
    theirs = dict(AutoModelForCausalLM.from_config(make_config("llama", rope_parameters=ROPES[kind])).named_buffers())
    assert ours.keys() == theirs.keys() and ours
    for name, buffer in theirs.items():
        assert torch.equal(ours[name], buffer), name


def test_where_frequencies_follow_the_length_the_context_ends_at_the_original_length() -> None:
    long = [1.0] * 8
    rope = {"rope_type": "longrope", "short_factor": long, "long_factor": long, "rope_theta": 1e4}
    config = make_config("phi3", rope_parameters=rope, original_max_position_embeddings=128)
    assert max_context(config) == 128
    assert max_context(make_config("llama", rope_parameters=ROPES["yarn"])) == 512
    config.rope_parameters = {"full_attention": {**rope, "original_max_position_embeddings": 64}}
    assert max_context(config) == 64


def test_a_skeleton_takes_almost_no_memory() -> None:
    config = make_config("llama", hidden_size=8192, intermediate_size=28672, num_hidden_layers=8, head_dim=128)
    model = build_skeleton(config, torch.bfloat16)
    # Norms are born as ones, not empty; they are small.
    assert sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta) < 1 << 20
    assert sum(parameter.nbytes for parameter in model.parameters()) > 10 << 30
    assert sum(buffer.nbytes for buffer in model.buffers()) < 1 << 16


def test_configs_are_read_without_weights(checkpoint: Callable[..., Path]) -> None:
    assert load_config(checkpoint("llama", torch.bfloat16)).model_type == "llama"
