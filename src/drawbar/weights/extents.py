"""Which reads bring a unit's tensors into a buffer, and where each tensor lands in it. Pure functions of offsets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from drawbar.weights.header import TensorEntry

MERGE_GAP = 64 << 10  # bytes between two tensors that are cheaper to read than to skip
TENSOR_ALIGNMENT = 64  # a cache line, and what torch gives its own tensors


@dataclass(frozen=True, slots=True)
class Unit:
    """What is read and used as a whole, such as the tensors of a layer.

    Attributes:
        name: for messages.
        tensors: what it holds, in any order and from any files.
    """

    name: str
    tensors: tuple[TensorEntry, ...]

    def slot_bytes(self, alignment: int) -> int:
        """Bytes of buffer that it takes when read with this alignment."""
        return plan_extents(self, alignment).nbytes


@dataclass(frozen=True, slots=True)
class Extent:
    """One contiguous read.

    Attributes:
        file: where from.
        offset: first byte in the file; a multiple of the alignment.
        start: where it goes in the buffer, in bytes; a multiple of the alignment.
        needed: bytes up to the end of the last tensor.
        room: bytes of buffer for it: `needed`, rounded up to the alignment.
    """

    file: Path
    offset: int
    start: int
    needed: int
    room: int


@dataclass(frozen=True, slots=True)
class ExtentPlan:
    """Where a unit lands in its buffer.

    Attributes:
        extents: the reads, none overlapping another in the buffer.
        places: for each tensor of the unit, in the unit's order, its first byte in the buffer.
        nbytes: bytes of buffer.
    """

    extents: tuple[Extent, ...]
    places: tuple[int, ...]
    nbytes: int

    @property
    def read_bytes(self) -> int:
        """Bytes that are read: the tensors, small gaps between them, and what alignment adds in front."""
        return sum(extent.needed for extent in self.extents)


def plan_extents(unit: Unit, alignment: int) -> ExtentPlan:
    """Merge neighbouring tensors into reads that start and end at multiples of the alignment.

    Tensors are taken in the order of their bytes; one that starts at most 64 KiB behind the one before joins its read.
    """
    tensors = unit.tensors
    places = [0] * len(tensors)
    extents: list[Extent] = []
    filled = [index for index in range(len(tensors)) if tensors[index].nbytes]
    for index in sorted(filled, key=lambda index: (tensors[index].file, tensors[index].offset)):
        tensor = tensors[index]
        if extents and _is_near(extents[-1], tensor):
            extents[-1] = _extend(extents[-1], tensor, alignment)
        else:
            behind = extents[-1].start + extents[-1].room if extents else 0
            extents.append(_begin(tensor, _round_up(behind, max(alignment, TENSOR_ALIGNMENT)), alignment))
        places[index] = extents[-1].start + tensor.offset - extents[-1].offset
    nbytes = extents[-1].start + extents[-1].room if extents else 0
    return ExtentPlan(tuple(extents), tuple(places), nbytes)


def cut(extent: Extent, chunk_bytes: int) -> Iterator[Extent]:
    """The extent in pieces of at most `chunk_bytes`, which must be a multiple of the alignment."""
    for done in range(0, extent.needed, chunk_bytes):
        yield Extent(
            extent.file,
            extent.offset + done,
            extent.start + done,
            min(chunk_bytes, extent.needed - done),
            min(chunk_bytes, extent.room - done),
        )


def _is_near(extent: Extent, tensor: TensorEntry) -> bool:
    return extent.file == tensor.file and tensor.offset <= extent.offset + extent.needed + MERGE_GAP


def _begin(tensor: TensorEntry, start: int, alignment: int) -> Extent:
    offset = tensor.offset - tensor.offset % alignment
    needed = tensor.offset + tensor.nbytes - offset
    return Extent(tensor.file, offset, start, needed, _round_up(needed, alignment))


def _extend(extent: Extent, tensor: TensorEntry, alignment: int) -> Extent:
    needed = max(extent.needed, tensor.offset + tensor.nbytes - extent.offset)
    return Extent(extent.file, extent.offset, extent.start, needed, _round_up(needed, alignment))


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
