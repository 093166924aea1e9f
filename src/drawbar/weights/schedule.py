"""What is read next, and into which slot. Bookkeeping only: no threads, no lock, no reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from drawbar.weights.buffers import StagingRing
from drawbar.weights.extents import Extent


@dataclass(eq=False)
class Load:
    """A unit on its way into a slot, or in it.

    Attributes:
        unit: its index.
        slot: where it goes.
        chunks: reads not begun yet.
        reading: reads under way.
        error: the first failure; no further read of this unit is begun after it.
        failed: the read that failed.
        dropped: nobody wants it any more; its slot is free when the reads under way are over.
    """

    unit: int
    slot: int
    chunks: deque[Extent]
    reading: int = 0
    error: BaseException | None = None
    failed: Extent | None = None
    dropped: bool = False

    @property
    def settled(self) -> bool:
        """Whole, or failed."""
        return self.error is not None or not (self.chunks or self.reading)


class Schedule:
    """Loads units 0, 1, ..., n - 1, 0, 1, ... into free slots, in the order in which they will be asked for.

    Args:
        chunks: for each unit, the reads that bring it.
        ring: the slots.
    """

    def __init__(self, chunks: Sequence[Sequence[Extent]], ring: StagingRing) -> None:
        self._chunks = chunks
        self._ring = ring
        self._queue: deque[Load] = deque()
        self._next: int | None = 0  # the unit that the next free slot is for; None: wait until one is asked for
        self._fill()

    def begin_read(self) -> tuple[Load, Extent] | None:
        """The next read, now under way; None if every free slot is spoken for."""
        for load in self._queue:
            if load.error is not None:
                return None  # what is behind it will be dropped
            if load.chunks:
                load.reading += 1
                return load, load.chunks.popleft()
        return None

    def end_read(self, load: Load, extent: Extent, error: BaseException | None) -> None:
        """A read is over."""
        load.reading -= 1
        if error is not None and load.error is None:
            load.error, load.failed = error, extent
            load.chunks.clear()
        if load.dropped and not load.reading:
            self._release(load)

    def aim(self, unit: int) -> None:
        """This unit is wanted now: drop what is queued before it, or all if it is not queued, and start there."""
        if all(load.unit != unit for load in self._queue):
            self._drop_all()
            self._next = unit
        while self._queue and self._queue[0].unit != unit:
            self._drop(self._queue.popleft())
        self._fill()

    @property
    def head_settled(self) -> bool:
        """Whether the unit aimed at is whole or has failed."""
        return bool(self._queue) and self._queue[0].settled

    def pop_head(self) -> Load:
        """The settled head. If it failed, its slot is free again and nothing is loaded until the next `aim`."""
        load = self._queue.popleft()
        if load.error is not None:
            self._drop_all()
            self._drop(load)
        return load

    def give_back(self, load: Load) -> None:
        """The head's slot is not used any more."""
        self._release(load)

    def _fill(self) -> None:
        while self._next is not None and (slot := self._ring.acquire()) is not None:
            self._queue.append(Load(self._next, slot, deque(self._chunks[self._next])))
            self._next = (self._next + 1) % len(self._chunks)

    def _drop_all(self) -> None:
        """Leaves the slots empty until `_next` is set again."""
        # Before slots are released: `_release` fills them again, and these would be dropped in their turn.
        self._next = None
        while self._queue:
            self._drop(self._queue.popleft())

    def _drop(self, load: Load) -> None:
        load.chunks.clear()
        load.dropped = True
        if not load.reading:
            self._release(load)

    def _release(self, load: Load) -> None:
        self._ring.release(load.slot)
        self._fill()
