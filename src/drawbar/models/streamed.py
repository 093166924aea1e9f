"""The target: a model whose layers are read from disk on every pass, but for those that the budget can hold."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from drawbar.config import parse_bytes
from drawbar.errors import BudgetError
from drawbar.hardware import MAX_ROWS, RowBuckets, available_memory
from drawbar.kv_cache import KVCache
from drawbar.models.checkpoint import OpenCheckpoint, read_once
from drawbar.models.loading import max_context
from drawbar.models.transformer import (
    TransformersModel,
    cache_bytes_per_row,
    set_parameter,
    workspace_bytes,
)
from drawbar.models.units import HeldWeights, LayerWeights, StreamedWeights
from drawbar.planner import LayerSize, Placement, place
from drawbar.weights.reader import PAGE, Reader
from drawbar.weights.stream import StreamCounters, WeightStream, plan_extents

DEFAULT_CONTEXT = 4096  # rows that caches are planned for, prompt and answer together
MEMORY_MARGIN = 0.85  # of what is free, where no budget is named


def default_budget() -> int:
    """What is free on this machine, less a margin for the rest of it."""
    return int(available_memory() * MEMORY_MARGIN)


class StreamedModel(TransformersModel):
    """A causal language model under a memory budget; close it, or use it as a context manager, to stop its reading."""

    def __init__(
        self,
        skeleton: PreTrainedModel,
        buckets: RowBuckets,
        weights: Sequence[LayerWeights],
        device: torch.device,
        placement: Placement,
        reading: tuple[Reader, WeightStream | None],
        cache_rows: int,
    ) -> None:
        super().__init__(skeleton, buckets, weights, device)
        self.placement = placement
        self._reader, self._stream = reading
        self._cache_rows = cache_rows
        self._caches: weakref.WeakKeyDictionary[KVCache, int] = weakref.WeakKeyDictionary()

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        memory: str | int | None = None,
        dtype: str = "auto",
        device: str = "cpu",
        context: int | None = None,
    ) -> StreamedModel:
        """Check a checkpoint, decide what is resident, and start reading.

        Args:
            name: checkpoint folder or hub id.
            memory: the budget, as bytes or such as `3GiB`; None takes what is free less a margin.
            dtype: auto, bfloat16, float16 or float32.
            device: where to compute.
            context: rows that the caches are planned for; None plans for 4,096, or the model's context if shorter.

        Raises:
            DrawbarError: the checkpoint, an option or the budget will not do. No token has been produced then.
        """
        budget = default_budget() if memory is None else parse_bytes(memory)
        return cls.load(OpenCheckpoint.open(name, dtype), budget, device, context)

    @classmethod
    def load(
        cls, checkpoint: OpenCheckpoint, budget: int, device: str = "cpu", context: int | None = None
    ) -> StreamedModel:
        """The same from a checkpoint that is already open, with the budget in bytes."""
        model, compute = checkpoint.model, torch.device(device)
        placement = place(budget, _fixed_bytes(checkpoint, context), _layer_sizes(checkpoint))
        buckets = checkpoint.measure_buckets()
        reader = checkpoint.reader()
        try:
            stream = _fill(checkpoint, placement, reader, compute)
        except BaseException:
            reader.close()
            raise
        weights: list[LayerWeights] = [HeldWeights() for _ in checkpoint.layers]
        for place_in_stream, index in enumerate(placement.streamed):
            assert stream is not None
            weights[index] = StreamedWeights(
                stream, place_in_stream, checkpoint.layer_prefix(index), checkpoint.layers[index], compute
            )
        return cls(model, buckets, weights, compute, placement, (reader, stream), _rows(checkpoint, context))

    @staticmethod
    def least_budget(checkpoint: OpenCheckpoint, context: int | None = None) -> int:
        """Bytes below which `load` refuses."""
        sizes = _layer_sizes(checkpoint)
        return _fixed_bytes(checkpoint, context) + max(size.staged + size.copied for size in sizes)

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for one sequence of up to `capacity` rows.

        Raises:
            BudgetError: with the caches still in use, it would take more than was planned; says what to do.
        """
        in_use = sum(self._caches.values())
        if in_use + capacity > self._cache_rows:
            others = f" beside the {in_use} of requests under way" if in_use else ""
            raise BudgetError(
                f"{capacity} rows of cache are needed{others}, but the budget was planned for {self._cache_rows}: "
                f"open the model with a context of {in_use + capacity}, or ask for fewer new tokens or a shorter prompt"
            )
        cache = super().new_cache(capacity)
        self._caches[cache] = capacity
        return cache

    def counters(self) -> StreamCounters:
        """Bytes read and seconds waited so far."""
        return StreamCounters() if self._stream is None else self._stream.counters()

    def close(self) -> None:
        """Stop reading. The model cannot be used afterwards."""
        if self._stream is not None:
            self._stream.close()
        self._reader.close()

    def __enter__(self) -> StreamedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _fill(
    checkpoint: OpenCheckpoint, placement: Placement, reader: Reader, device: torch.device
) -> WeightStream | None:
    """Read what is resident into the skeleton, and start the stream of the rest."""
    resident = [checkpoint.layers[index] for index in placement.resident]
    for parameters in read_once([[recipe] for recipe in checkpoint.rest] + resident, reader):
        for name, tensor in parameters.items():
            set_parameter(checkpoint.model, name, tensor.to(device))
    if not placement.streamed:
        return None
    units = checkpoint.layer_units()
    return WeightStream([units[index] for index in placement.streamed], reader, slots=placement.slots)


def _layer_sizes(checkpoint: OpenCheckpoint) -> list[LayerSize]:
    pairs = zip(checkpoint.layer_units(), checkpoint.layers, strict=True)
    return [
        LayerSize(
            plan_extents(unit, PAGE).nbytes,
            sum(recipe.held_bytes for recipe in recipes),
            sum(recipe.copied_bytes for recipe in recipes),
            plan_extents(unit, PAGE).nbytes + sum(recipe.copied_bytes for recipe in recipes),
        )
        for unit, recipes in pairs
    ]


def _rows(checkpoint: OpenCheckpoint, context: int | None) -> int:
    return min(context or DEFAULT_CONTEXT, max_context(checkpoint.model.config)) + MAX_ROWS


def _fixed_bytes(checkpoint: OpenCheckpoint, context: int | None) -> int:
    """What is needed whatever is streamed: embedding, norms, head, caches and workspace."""
    rest = sum(recipe.held_bytes for recipe in checkpoint.rest)
    config, rows = checkpoint.model.config, _rows(checkpoint, context)
    caches = rows * cache_bytes_per_row(config, checkpoint.dtype)
    return rest + caches + workspace_bytes(config, checkpoint.dtype, rows)
