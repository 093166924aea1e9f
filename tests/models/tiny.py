"""Tiny random checkpoints of every architecture that is tested, and what tests do with models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from drawbar.models.base import CausalModel, Rows, SequenceCache
from drawbar.tree import TokenTree

VOCABULARY = 160

# The random weights are large, so that the logits spread as those of a trained model do.
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MIXED = ["sliding_attention", "full_attention"] * 2
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24}

_CONFIGS: dict[str, tuple[Callable[..., PreTrainedConfig], dict[str, object]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "mistral": (MistralConfig, {"sliding_window": 8}),
    "gemma2": (Gemma2Config, {"sliding_window": 8}),
    "gemma3_text": (Gemma3TextConfig, {"sliding_window": 8, "layer_types": _MIXED}),
    "phi3": (Phi3Config, {"sliding_window": 8}),
    "qwen2_moe": (Qwen2MoeConfig, {**_MOE, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": (Qwen3MoeConfig, _MOE),
    "gpt_oss": (GptOssConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "deepseek_v3": (
        DeepseekV3Config,
        {
            **_LATENT,
            "head_dim": None,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "olmo2": (Olmo2Config, {}),
    "granite": (GraniteConfig, {}),
    "glm4": (Glm4Config, {}),
}
ARCHITECTURES = tuple(_CONFIGS)


def make_config(architecture: str, **overrides: object) -> PreTrainedConfig:
    """The config of a tiny model."""
    kind, own = _CONFIGS[architecture]
    settings = {**_COMMON, **own, **overrides}
    return kind(**{name: value for name, value in settings.items() if value is not None})


def make_checkpoint(architecture: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **overrides: object) -> Path:
    """Write a tiny checkpoint with random weights, the same at every call."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(architecture, **overrides), dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms, biases and sinks, which start as ones and zeros
            parameter.data.add_(torch.randn(parameter.shape).to(dtype), alpha=0.2)
    model.save_pretrained(folder)
    return folder


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model as transformers runs it, unmodified."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite the tensors of a checkpoint of one file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    """Token ids of a prompt."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, VOCABULARY, (count,), generator=generator).tolist())


def run(model: CausalModel, rows: Rows, cache: SequenceCache) -> torch.Tensor:
    """One pass of one sequence."""
    (logits,) = model.forward([rows], [cache])
    return logits


def one_by_one(model: CausalModel, context: Sequence[int]) -> list[torch.Tensor]:
    """The logits behind each token, of passes of one token each."""
    cache = model.new_cache(len(context))
    return [run(model, Rows((token,)), cache)[0] for token in context]


def tree_of(parents: Sequence[int], seed: int = 1) -> TokenTree:
    """A tree of this shape; no two nodes carry the same token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(VOCABULARY - 3, generator=generator)[: len(parents)] + 3
    return TokenTree(tuple(ids.tolist()), tuple(parents), (0.0,) * len(parents))


def leaves(tree: TokenTree) -> list[int]:
    """Nodes without children."""
    return [node for node in range(len(tree)) if not tree.children(node)]
