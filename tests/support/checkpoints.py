"""Tiny checkpoints with random weights, for every architecture that drawbar is tested with.

They are written by transformers itself, so that a test reads what a user's folder holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_TRAINING_TEXT = (
    "A drawbar is the bar by which a small draft animal pulls a load far heavier than itself.",
    "user: Why is the sky blue? assistant: The light of the sun is scattered by the air, and blue light most.",
    "The quick brown fox jumps over the lazy dog, and then the dog sleeps in the shade of the old tree.",
)

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    # Ten times the usual range: narrow layers with usual weights give logits that are nearly all the same.
    "initializer_range": 0.2,
}
_MIXTURE = {"num_local_experts": 8, "num_experts_per_tok": 2}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": 8},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 4},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 4},
    "phi3": {"original_max_position_embeddings": 512},
    "qwen3_moe": {"head_dim": 16, "moe_intermediate_size": 32, "norm_topk_prob": True, **_MIXTURE},
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": 8,
        "num_hidden_layers": 4,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
        **_MIXTURE,
    },
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.75,
        "attention_multiplier": 0.125,
        "logits_scaling": 0.5,
    },
    "glm4": {"head_dim": 16},
}
_ALTERNATING = {"gemma2", "gemma3_text", "gpt_oss"}


def make_checkpoint(
    architecture: str,
    path: Path,
    *,
    dtype: str = "bfloat16",
    seed: int = 0,
    vocab_size: int = 320,
    tokenizer: bool = False,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a tiny random checkpoint to the folder `path` and return it.

    Args:
        architecture: a key of `ARCHITECTURES`.
        dtype: type of the weights on disk.
        seed: the same seed gives the same weights.
        vocab_size: rows of the embedding.
        tokenizer: also write a tokenizer of that many tokens; it needs at least 259.
        max_shard_size: as for `save_pretrained`; a small size gives several files and an index.
        **overrides: fields of the config, for example `tie_word_embeddings=True` or `num_hidden_layers=1`.
    """
    fields = {**_COMMON, **ARCHITECTURES[architecture], "vocab_size": vocab_size, **overrides}
    if architecture in _ALTERNATING:
        kinds = ("sliding_attention", "full_attention")
        fields.setdefault("layer_types", [kinds[layer % 2] for layer in range(fields["num_hidden_layers"])])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = CONFIG_MAPPING[architecture](**fields)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        _disturb_vectors(model)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if tokenizer:
        tiny_tokenizer(path, vocab_size)
    return path


def _disturb_vectors(model: torch.nn.Module) -> None:
    """Norms of one and biases of zero would hide that they are not applied.

    The last norm gets factors of mean zero: otherwise a model with tied embeddings repeats its last token for ever.
    """
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.ndim == 1 and tensor.is_floating_point():
                noise = torch.randn(tensor.shape)
                # Gemma stores what is added to one and the others the factor itself: both start as a factor of one.
                last = name == "model.norm.weight"
                tensor.add_((2 * (noise - noise.mean()) - 1 if last else 0.1 * noise).to(tensor.dtype))


def tiny_tokenizer(path: Path, vocab_size: int = 320) -> Path:
    """Write a byte-level BPE tokenizer with a chat template to the folder `path` and return it.

    Ids 0 to 2 are `PAD`, `BOS` and `EOS`; plain text is encoded with `BOS` before it.

    Raises:
        ValueError: fewer tokens than the three special ones and the 256 bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < 3 + len(alphabet):
        raise ValueError(f"a byte-level vocabulary needs {3 + len(alphabet)} tokens, not {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, 1)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)
    return path
