"""From a model's name to an empty skeleton: the checkpoint folder, its config, and transformers' modules on meta."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from drawbar.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from drawbar.models.activations import replace_activations
from drawbar.models.attention import ATTENTION_NAME, exact_attention
from drawbar.models.experts import EXPERTS_NAME, exact_experts

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
# Rotary embeddings whose frequencies follow the length of the call: beyond the original length, keys in the cache and
# keys of the pass would differ, so the context ends there.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer*", "*.model", "*.jinja", "*.txt"]


def resolve_checkpoint(name: str | Path) -> Path:
    """The folder of a checkpoint: `name` itself if it exists, else the hub repository of that id, fetched if need be.

    Raises:
        CheckpointError: neither a folder nor a hub id that can be had.
    """
    path = Path(name).expanduser()
    if path.exists() or path.is_absolute() or str(name).startswith((".", "~")) or str(name).count("/") != 1:
        if not path.exists():
            raise CheckpointError(f"{name}: no such folder (a hub id has the form owner/name)")
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(str(name), allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{name}: no such folder here, and the hub did not give it: {reason}") from error


def load_config(folder: Path) -> PreTrainedConfig:
    """The model's config, checked for what drawbar cannot run.

    Raises:
        CheckpointError: config.json is missing or damaged.
        UnsupportedModelError: the architecture, its layers or its quantisation are refused.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: there is no config.json, so this is not a model checkpoint") from error
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: holds no JSON object")
    _refuse_raw(raw, path)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each config class checks its values in its own way
        kind = raw.get("model_type", "of no model_type")
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UnsupportedModelError(f"{path}: transformers cannot make a {kind!r} config of it: {reason}") from error
    _refuse_config(config, path)
    return config


def _refuse_raw(raw: Mapping[str, Any], path: Path) -> None:
    if "auto_map" in raw and not raw.get("model_type"):
        raise UnsupportedModelError(f"{path}: the model needs its own Python code, which drawbar never runs")
    quantisation = raw.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else quantisation
        raise UnsupportedModelError(
            f"{path}: the checkpoint is quantised ({method}); drawbar reads bfloat16, float16 and float32 weights"
        )


def _refuse_config(config: PreTrainedConfig, path: Path) -> None:
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{path}: {kind} is an encoder-decoder model; drawbar runs decoder-only models")
    if getattr(config, "add_cross_attention", False):
        raise UnsupportedModelError(f"{path}: {kind} uses cross-attention, which drawbar cannot stream")
    try:
        for name in ("head_dim", "num_key_value_heads", "num_attention_heads", "intermediate_size"):
            getattr(config, name, None)
    except Exception as error:  # transformers' own, for configs whose layers differ
        raise UnsupportedModelError(
            f"{path}: the layers of {kind} differ in {name}, which drawbar cannot plan"
        ) from error
    layer_types = set(getattr(config, "layer_types", None) or ())
    if foreign := sorted(layer_types - _ATTENTION_LAYERS):
        raise UnsupportedModelError(
            f"{path}: {kind} has layers of type {', '.join(foreign)}, whose state cannot be rolled back"
        )


def max_context(config: PreTrainedConfig) -> int:
    """Positions that the model may use."""
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # some have one for each layer type
    limit = int(getattr(config, "max_position_embeddings", 0) or 0)
    if limit <= 0:
        raise UnsupportedModelError(f"{config.model_type}: the config names no max_position_embeddings")
    for rope in ropes:
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            limit = min(limit, int(rope.get("original_max_position_embeddings") or limit))
    return limit


def resolve_dtype(dtype: str, config: PreTrainedConfig) -> torch.dtype:
    """The dtype to compute in: the checkpoint's own for `auto`.

    Raises:
        ConfigurationError: not one of auto, bfloat16, float16, float32.
    """
    if dtype == "auto":
        own = config.dtype
        return own if isinstance(own, torch.dtype) else DTYPES.get(str(own), torch.bfloat16)
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype must be auto, {', '.join(DTYPES)}, not {dtype!r}")
    return DTYPES[dtype]


class _EmptyOnMeta(TorchFunctionMode):
    """Uninitialised tensors, as weights are born, go to meta; computed ones, as buffers are, stay real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def build_skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model with its weights on meta and its computed buffers real, attention and experts replaced by exact ones.

    Raises:
        UnsupportedModelError: transformers has no causal model for it, or none that takes an attention function.
    """
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, exact_attention)
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, exact_experts)
    try:
        with _EmptyOnMeta():
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=ATTENTION_NAME, trust_remote_code=False
            )
    except Exception as error:  # transformers' classes raise all kinds for what they were not made for
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UnsupportedModelError(
            f"{config.model_type}: not a causal language model drawbar can run: {reason}"
        ) from error
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{config.model_type}: its layers take no attention function, so they cannot run a tree"
        )
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(f"{config.model_type}: keeps a recurrent state, which cannot be rolled back")
    if not isinstance(getattr(model.base_model, "layers", None), nn.ModuleList):
        raise UnsupportedModelError(f"{config.model_type}: its layers are not a plain list of decoder layers")
    if model._can_set_experts_implementation():
        model.set_experts_implementation(EXPERTS_NAME)
    elif any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise UnsupportedModelError(
            f"{config.model_type}: its experts take no experts function, so they cannot be exact"
        )
    _refuse_foreign_products(model)
    replace_activations(model)
    model.eval().requires_grad_(False)
    return model


def _refuse_foreign_products(model: PreTrainedModel) -> None:
    """Products outside layers and head run on rows that nobody pads, so they could not be exact."""
    inside = set(model.base_model.layers.modules()) | {model.get_output_embeddings()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module not in inside:
            raise UnsupportedModelError(
                f"{model.config.model_type}: {name} is a matrix product outside the layers, which drawbar cannot pad"
            )
