"""The chain of layer units that a pass walks: each computes its rows in slices, on weights streamed or resident."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.func import functional_call

from drawbar.errors import UnsupportedModelError
from drawbar.hardware import MAX_ROWS, RowBuckets
from drawbar.kv_cache import KVCache
from drawbar.models.attention import PassCache, Slice, Span
from drawbar.models.base import Rows
from drawbar.models.mapping import Recipe
from drawbar.weights.stream import WeightStream


@dataclass
class PassPlan:
    """A whole pass as the layer units need it; travels through transformers' model as its cache.

    Attributes:
        slices: the pass's rows in pieces of at most `MAX_ROWS`.
        pad: rounds a row count up to a row-invariant one.
        updates: cache writes so far; one per layer and slice when the pass is over.
    """

    slices: Sequence[Slice]
    pad: Callable[[int], int]
    updates: int = 0

    @classmethod
    def of(
        cls,
        batch: Sequence[Rows],
        caches: Sequence[KVCache],
        buckets: RowBuckets,
        precision: torch.dtype = torch.float64,
    ) -> PassPlan:
        """The plan for these rows, sequence behind sequence."""
        spans, start = [], 0
        for rows, cache in zip(batch, caches, strict=True):
            spans.append(Span(rows, cache, start))
            start += len(rows)
        padded = buckets.pad(start)
        slices = [
            Slice(spans, first, min(first + MAX_ROWS, start), min(MAX_ROWS, padded - first), precision)
            for first in range(0, start, MAX_ROWS)
        ]
        return cls(slices, buckets.pad)

    @property
    def padded(self) -> int:
        """Rows of the pass with padding."""
        return sum(piece.padded for piece in self.slices)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Asked by some models only to make positions, which drawbar always gives."""
        return 0


class LayerWeights(Protocol):
    """Where a layer's weights are while it computes."""

    def bound(self) -> AbstractContextManager[Mapping[str, torch.Tensor] | None]:
        """The layer's parameters by local name, valid until the block exits; None if the layer holds its own."""


class HeldWeights:
    """The layer itself holds its weights."""

    def bound(self) -> AbstractContextManager[None]:
        return nullcontext()


class StreamedWeights:
    """The weights come from the stream, for as long as the layer computes.

    Args:
        stream: the stream.
        unit: the layer's place in it.
        prefix: what the layer's parameters are called in the model, up to their local names.
        recipes: how the parameters are made.
        device: where the layer computes.
    """

    def __init__(
        self, stream: WeightStream, unit: int, prefix: str, recipes: Sequence[Recipe], device: torch.device
    ) -> None:
        self._stream = stream
        self._unit = unit
        self._prefix = prefix
        self._recipes = recipes
        self._device = device

    @contextmanager
    def bound(self) -> Iterator[Mapping[str, torch.Tensor]]:
        with self._stream.unit(self._unit) as tensors:
            made = {
                name.removeprefix(self._prefix): tensor.to(self._device)
                for recipe in self._recipes
                for name, tensor in recipe.build(tensors).items()
            }
            yield made
            made.clear()


class LayerUnit(nn.Module):
    """A decoder layer of the chain. Takes transformers' arguments for all rows and computes them slice by slice."""

    def __init__(self, layer: nn.Module, weights: LayerWeights) -> None:
        super().__init__()
        self.layer = layer
        self._weights = weights

    def forward(
        self, hidden_states: torch.Tensor, *positional: Any, cache: PassPlan | None = None, **arguments: Any
    ) -> torch.Tensor:
        """[1, padded rows, width] -> the same shape."""
        if cache is None or any(value is not None for value in positional):
            raise UnsupportedModelError(f"{type(self.layer).__name__} is called in a way that drawbar does not know")
        total = hidden_states.shape[1]
        with self._weights.bound() as tensors:
            pieces = []
            for piece in cache.slices:
                stored = PassCache(piece, cache.pad)
                window = slice(piece.first, piece.first + piece.padded)
                call = {name: _cut(name, value, window, total) for name, value in arguments.items()}
                call.update(cache=stored, layout=piece)
                rows = hidden_states[:, window]
                if tensors is None:
                    result = self.layer(rows, **call)
                else:
                    result = functional_call(self.layer, dict(tensors), (rows,), call)
                pieces.append(result[0] if isinstance(result, tuple) else result)
                cache.updates += stored.updates
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def _cut(name: str, value: Any, window: slice, total: int) -> Any:
    """The part of a layer's argument that belongs to the slice's rows."""
    if isinstance(value, tuple):
        return tuple(_cut(name, part, window, total) for part in value)
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() < 2 or value.shape[1] != total:
        raise UnsupportedModelError(f"layers take an argument {name} of shape {tuple(value.shape)}, unknown to drawbar")
    return value[:, window]


class HeadUnit(nn.Module):
    """The output projection, computed in slices whose row counts are row invariant."""

    def __init__(self, head: nn.Module, buckets: RowBuckets) -> None:
        super().__init__()
        self.head = head
        self._buckets = buckets

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[1, rows, width] -> [1, rows, vocabulary]."""
        rows = hidden_states.shape[1]
        padded = self._buckets.pad(rows)
        if padded != rows:
            filler = hidden_states[:, -1:].expand(-1, padded - rows, -1)
            hidden_states = torch.cat((hidden_states, filler), dim=1)
        pieces = [self.head(part) for part in torch.split(hidden_states, MAX_ROWS, dim=1)]
        logits = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        return logits[:, :rows]
