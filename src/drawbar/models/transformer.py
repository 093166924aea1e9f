"""A transformers model run by drawbar: its own layer code, over drawbar's cache, rows and weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from drawbar.errors import ConfigurationError, PromptError, UnsupportedModelError
from drawbar.hardware import MAX_ROWS, ProductShape, RowBuckets
from drawbar.kv_cache import KVCache
from drawbar.models.attention import SCORE_BYTES
from drawbar.models.base import Rows, SequenceCache
from drawbar.models.loading import max_context
from drawbar.models.units import HeadUnit, LayerUnit, LayerWeights, PassPlan


class TransformersModel:
    """A causal language model whose layers are units of a chain. Subclasses bring the weights.

    Args:
        skeleton: transformers' model, every layer and the head about to be wrapped.
        buckets: row counts that are row invariant here.
        weights: for each layer, where its weights come from.
        device: where to compute.
        precision: what attention computes in; anything but float64 is not exact.
    """

    def __init__(
        self,
        skeleton: PreTrainedModel,
        buckets: RowBuckets,
        weights: Sequence[LayerWeights],
        device: torch.device,
        precision: torch.dtype = torch.float64,
    ) -> None:
        self._model = skeleton
        self._buckets = buckets
        self._device = device
        self._precision = precision
        self._max_context = max_context(skeleton.config)
        self.passes = 0
        layers = skeleton.base_model.layers
        for index, source in enumerate(weights):
            layers[index] = LayerUnit(layers[index], source)
        self._layers = len(weights)
        skeleton.set_output_embeddings(HeadUnit(skeleton.get_output_embeddings(), buckets))

    @property
    def config(self) -> PreTrainedConfig:
        return self._model.config

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def max_context(self) -> int:
        return self._max_context

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for one sequence of up to `capacity` rows."""
        return KVCache(self._layers, capacity)

    @torch.no_grad()
    def forward(self, batch: Sequence[Rows], caches: Sequence[SequenceCache]) -> list[torch.Tensor]:
        """One pass: for each sequence, the logits of its wanted rows, [len(rows.wanted), vocabulary].

        Raises:
            ConfigurationError: a cache that `new_cache` did not make.
            PromptError: a row lies beyond the context.
            UnsupportedModelError: the model's layers did not run the way drawbar needs.
            ReadError: weights could not be read.
        """
        own = [_own_cache(cache) for cache in caches]
        _check_batch(batch, own)
        plan = PassPlan.of(batch, own, self._buckets, self._precision)
        tokens, positions, wanted = self._inputs(plan)
        output = self._model(
            input_ids=tokens, position_ids=positions, cache=plan, use_cache=True, logits_to_keep=wanted
        )
        if plan.updates != self._layers * len(plan.slices):
            raise UnsupportedModelError(
                f"{self.config.model_type}: {plan.updates} cache writes in a pass of {self._layers} layers; "
                "its layers share or skip their caches, which drawbar cannot do"
            )
        for rows, cache in zip(batch, own, strict=True):
            cache.commit(len(rows.chain), rows.depths)
        self.passes += 1
        # Sampling happens on the CPU, whose noise and order of operations do not depend on the device.
        return list(output.logits[0].cpu().split([len(rows.wanted) for rows in batch]))

    def _inputs(self, plan: PassPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids and positions, int64 [1, padded rows], and the wanted rows, int64 [wanted]."""
        spans = plan.slices[0].spans
        tokens = torch.tensor([token for span in spans for token in span.rows.tokens])
        positions = torch.cat([span.positions() for span in spans])
        wanted = torch.tensor([span.start + row for span in spans for row in span.rows.wanted])
        if int(positions.max()) >= self._max_context:
            raise PromptError(f"position {int(positions.max())} lies beyond the model's context of {self._max_context}")
        filler = plan.padded - len(tokens)
        tokens, positions = (torch.cat((rows, rows[-1:].expand(filler))) for rows in (tokens, positions))
        device = self._device
        return tokens[None].to(device), positions[None].to(device), wanted.to(device)


def _check_batch(batch: Sequence[Rows], caches: Sequence[KVCache]) -> None:
    """Before anything is written, so that no cache is left ahead of another."""
    if len(batch) != len(caches) or len({id(cache) for cache in caches}) != len(caches):
        raise ConfigurationError(f"a batch of {len(batch)} sequences needs as many caches, each its own")
    for rows, cache in zip(batch, caches, strict=True):
        if not len(rows):
            raise ConfigurationError("a sequence without rows cannot be part of a pass")
        if rows.chain and cache.node_depths:
            raise ConfigurationError("the context cannot grow behind tree nodes: keep or truncate the cache first")
    if not batch:
        raise ConfigurationError("a pass needs at least one sequence")


def _own_cache(cache: SequenceCache) -> KVCache:
    if not isinstance(cache, KVCache):
        raise ConfigurationError(f"a {type(cache).__name__} is no cache of this model: use its new_cache()")
    return cache


def set_parameter(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor in the place of the parameter or buffer of this name."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    else:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)


def product_shapes(model: PreTrainedModel, dtype: torch.dtype) -> set[ProductShape]:
    """The matrix products of the model's layers and head, for the row-invariance self-test."""
    shapes = set()
    for module in model.modules():
        transposed = bool(getattr(module, "is_transposed", False))
        for parameter in module.parameters(recurse=False):
            if isinstance(module, nn.Embedding) or parameter.dim() < 2:
                continue
            outputs, inputs = parameter.shape[-1:-3:-1] if transposed else parameter.shape[-2:]
            shapes.add(ProductShape(inputs, outputs, dtype, transposed))
            if not isinstance(module, nn.Linear) and parameter.dim() == 2:
                # Routers multiply in float32, some of them, whatever the weights are held in.
                shapes.add(ProductShape(inputs, outputs, torch.float32))
    return shapes


def attach_buckets(model: nn.Module, buckets: RowBuckets) -> int:
    """Tell the expert layers which row counts are invariant, and say how many there are; see `exact_experts`."""
    experts = [m for m in model.modules() if hasattr(m, "_apply_gate") and hasattr(m, "has_gate")]
    for module in experts:
        module.row_buckets = buckets  # type: ignore[assignment]
    return len(experts)


def workspace_bytes(config: PreTrainedConfig, dtype: torch.dtype, context: int) -> int:
    """Bytes of activations, attention scores and logits that a pass holds at a time, from above."""
    width, inner = config.hidden_size, getattr(config, "intermediate_size", 0) or 0
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head_width = getattr(config, "head_dim", None) or width // heads
    rows = MAX_ROWS * (8 * width + 4 * inner) * dtype.itemsize
    attention = 3 * SCORE_BYTES + 2 * context * key_heads * head_width * 8
    logits = 2 * MAX_ROWS * config.vocab_size * dtype.itemsize + 4 * config.vocab_size * 8
    return int(rows + attention + logits)


def cache_bytes_per_row(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes that one token takes in the caches of all layers."""
    if getattr(config, "kv_lora_rank", None):
        width = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = 2 * key_heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return int(config.num_hidden_layers * width * dtype.itemsize)


def total_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of these tensors, a shared storage counted once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
