"""Where the weights go: a pure function of sizes and budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drawbar.config import format_bytes
from drawbar.errors import BudgetError

# One buffer is computed on, one is full, one is being filled: more only lengthens the reading done while the draft
# works, and the same memory saves more as a resident layer.
READ_AHEAD_SLOTS = 3


@dataclass(frozen=True, slots=True)
class LayerSize:
    """Bytes of one layer.

    Attributes:
        staged: in a staging buffer.
        held: resident.
        copied: made while it is bound (dtype, experts).
        loading: needed besides `held` while it is made resident, at most `staged` and `copied` together.
    """

    staged: int
    held: int
    copied: int = 0
    loading: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """What is resident and what is streamed.

    Attributes:
        resident: indices of the layers held in memory.
        streamed: indices of the layers read on every pass.
        slots: staging buffers; 0 where nothing is streamed.
        bytes_per_pass: bytes read by each pass.
        total: bytes of memory that all of it takes.
    """

    resident: tuple[int, ...]
    streamed: tuple[int, ...]
    slots: int
    bytes_per_pass: int
    total: int


def place(budget: int, fixed: int, layers: Sequence[LayerSize]) -> Placement:
    """Hold what fits, stream the rest.

    Args:
        budget: bytes that may be used.
        fixed: bytes needed whatever is streamed (embedding, head, caches, workspace, draft).
        layers: the size of each layer.

    Raises:
        BudgetError: not even one layer at a time fits; says how much would.
    """
    everything = fixed + sum(layer.held for layer in layers) + max((layer.loading for layer in layers), default=0)
    if everything <= budget:
        return Placement(tuple(range(len(layers))), (), 0, 0, everything)
    largest = max((layer.staged for layer in layers), default=0)
    copied = max((layer.copied for layer in layers), default=0)
    least = fixed + copied + largest
    if least > budget:
        raise BudgetError(
            f"a memory budget of {format_bytes(budget)} is too small for one layer of this model: "
            f"{format_bytes(least)} are needed ({format_bytes(fixed)} beside the layer's "
            f"{format_bytes(largest + copied)}); "
            f"raise --memory to at least {-(-least // (1 << 20))}MiB, or use a smaller draft or none"
        )
    slots = min(READ_AHEAD_SLOTS, (budget - fixed - copied) // largest, len(layers))
    spare = budget - fixed - copied - slots * largest
    resident = _spread(layers, spare)
    streamed = tuple(index for index in range(len(layers)) if index not in set(resident))
    total = fixed + copied + slots * largest + sum(layers[index].held for index in resident)
    return Placement(resident, streamed, slots, sum(layers[index].staged for index in streamed), total)


def _spread(layers: Sequence[LayerSize], spare: int) -> tuple[int, ...]:
    """Layers to hold in `spare` bytes, spread over the depth so that reading stays even."""
    count = 0
    while count < len(layers) - 1 and sum(layers[i].held for i in _evenly(count + 1, len(layers))) <= spare:
        count += 1
    return _evenly(count, len(layers))


def _evenly(count: int, total: int) -> tuple[int, ...]:
    return tuple(sorted({(2 * step + 1) * total // (2 * count) for step in range(count)}))
