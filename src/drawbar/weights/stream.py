"""Walk the units of a model in a circle, always reading ahead: the disk never idles while a slot is free."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch

from drawbar.errors import ConfigurationError, ReadError
from drawbar.weights.buffers import StagingRing
from drawbar.weights.extents import Extent, ExtentPlan, Unit, cut, plan_extents
from drawbar.weights.header import TensorEntry
from drawbar.weights.reader import Reader
from drawbar.weights.schedule import Load, Schedule

__all__ = ["Extent", "ExtentPlan", "StreamCounters", "Unit", "WeightStream", "plan_extents"]

DEFAULT_THREADS = 4
DEFAULT_CHUNK_BYTES = 16 << 20
_POLL_S = 0.1  # waits of the consumer end this often, so that Ctrl-C is heard
_JOIN_S = 5.0  # how long `close` waits for reads under way; a disk that hangs must not hang the program


@dataclass(frozen=True, slots=True)
class StreamCounters:
    """What was read so far. Rates derive from these: `bytes_read / busy_s` is the speed while reading.

    Attributes:
        bytes_read: bytes that arrived, with what alignment and merged gaps add.
        io_wait_s: seconds in which the consumer waited for a unit.
        busy_s: seconds in which at least one read was under way.
    """

    bytes_read: int = 0
    io_wait_s: float = 0.0
    busy_s: float = 0.0


class WeightStream:
    """Reads units 0, 1, ..., n - 1, 0, 1, ... ahead of their use, with a few threads, into a ring of slots.

    Reading starts at once and goes on whenever a slot is free, also while nobody asks: the first units of the next pass
    are read after the last of this one. Every unit is read anew in each pass. To be closed after use, or used as a
    context manager.

    Args:
        units: what is walked.
        reader: reads file ranges. It stays the caller's, to be closed after the stream.
        slots: staging buffers, each large enough for the largest unit. With one, reading and use take turns.
        threads: reads under way at once.
        chunk_bytes: bytes of one read, rounded up to the reader's alignment.

    Raises:
        ConfigurationError: no unit, no slot, no thread, or no byte in a chunk.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        reader: Reader,
        *,
        slots: int,
        threads: int = DEFAULT_THREADS,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        for name, value in ("unit", len(units)), ("reader thread", threads), ("byte in a chunk", chunk_bytes):
            if value < 1:
                raise ConfigurationError(f"streaming needs at least one {name}, not {value}")
        self._units = tuple(units)
        self._plans = [plan_extents(unit, reader.alignment) for unit in units]
        self._ring = StagingRing(slots, max(plan.nbytes for plan in self._plans))
        chunk_bytes = -(-chunk_bytes // reader.alignment) * reader.alignment
        chunks = [[piece for extent in plan.extents for piece in cut(extent, chunk_bytes)] for plan in self._plans]
        self._prefetch = _Prefetch(Schedule(chunks, self._ring), self._ring, reader)
        self._threads = [
            threading.Thread(target=self._prefetch.run, name=f"drawbar-reader-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        # The threads know the prefetch, not the stream: one that is forgotten stops reading and frees its memory.
        weakref.finalize(self, self._prefetch.stop)

    @property
    def nbytes(self) -> int:
        """Bytes of staging memory."""
        return self._ring.nbytes

    @property
    def bytes_read(self) -> int:
        """See `StreamCounters`."""
        return self.counters().bytes_read

    @property
    def io_wait_s(self) -> float:
        """See `StreamCounters`."""
        return self.counters().io_wait_s

    @property
    def busy_s(self) -> float:
        """See `StreamCounters`."""
        return self.counters().busy_s

    def counters(self) -> StreamCounters:
        """What was read so far, reads under way included in `busy_s` only."""
        return self._prefetch.counters()

    @contextmanager
    def unit(self, index: int) -> Iterator[dict[str, torch.Tensor]]:
        """Wait for a unit and yield its tensors by name, on the CPU: views of a slot, valid until the block exits.

        Asked for another unit than the one that follows (a pass was broken off), the stream drops what it has read
        ahead up to that unit, and starts over from there if it had not got that far.

        Raises:
            ReadError: the unit could not be read; names file and offset. Asking again tries again.
            ConfigurationError: no such unit; every slot is held by blocks that have not exited; the stream is closed.
        """
        if not 0 <= index < len(self._units):
            raise ConfigurationError(f"there is no unit {index} among {len(self._units)}")
        load, slot = self._prefetch.obtain(index)
        try:
            if load.error is not None:
                raise _read_error(self._units[index], load) from load.error
            yield self._tensors(index, slot)
        finally:
            self._prefetch.give_back(load)

    def _tensors(self, index: int, slot: memoryview) -> dict[str, torch.Tensor]:
        tensors, places = self._units[index].tensors, self._plans[index].places
        return {tensor.name: _view(tensor, slot, place) for tensor, place in zip(tensors, places, strict=True)}

    def close(self) -> None:
        """Stop reading and free the slots; who waits for a unit gets a ConfigurationError. May be called again."""
        self._prefetch.stop()
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        # A thread still in a read keeps the memory that it reads into alive, so this is safe even then.
        self._prefetch.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Prefetch:
    """What the reader threads and the consumer share: the schedule and the counters, under one condition."""

    def __init__(self, schedule: Schedule, ring: StagingRing, reader: Reader) -> None:
        self._schedule = schedule
        self._ring = ring
        self._reader = reader
        self._changed = threading.Condition()
        self._closed = False
        self._asking = False  # one consumer at a time aims the schedule
        self._holders: dict[Load, int] = {}  # loads that are being used, and by which thread
        self._reading = 0
        self._busy_since = 0.0
        self._bytes_read = 0
        self._io_wait_s = 0.0
        self._busy_s = 0.0

    def run(self) -> None:
        """A reader thread: read until the stream is closed."""
        while (work := self._begin()) is not None:
            load, extent, buffer = work
            error: BaseException | None = None
            try:
                self._reader.read_into(buffer, extent.file, extent.offset, extent.needed)
            except BaseException as failure:
                error = failure
            self._end(load, extent, error)
            del load, buffer, work, error  # an idle thread must not keep a slot's memory alive

    def _begin(self) -> tuple[Load, Extent, memoryview] | None:
        with self._changed:
            while not self._closed:
                if (read := self._schedule.begin_read()) is not None:
                    load, extent = read
                    if not self._reading:
                        self._busy_since = time.perf_counter()
                    self._reading += 1
                    return load, extent, self._ring.view(load.slot)[extent.start : extent.start + extent.room]
                self._changed.wait()
            return None

    def _end(self, load: Load, extent: Extent, error: BaseException | None) -> None:
        with self._changed:
            self._reading -= 1
            if not self._reading:
                self._busy_s += time.perf_counter() - self._busy_since
            if error is None:
                self._bytes_read += extent.needed
            self._schedule.end_read(load, extent, error)
            self._changed.notify_all()

    def obtain(self, index: int) -> tuple[Load, memoryview]:
        """The unit and its slot's memory, once it is whole or has failed. To be given back."""
        started = time.perf_counter()
        with self._changed:
            try:
                self._wait_until(lambda: not self._asking)
                self._asking = True
                try:
                    self._schedule.aim(index)
                    self._changed.notify_all()
                    self._wait_until(lambda: self._schedule.head_settled)
                    return self._hold(self._schedule.pop_head())
                finally:
                    self._asking = False
                    self._changed.notify_all()
            finally:
                self._io_wait_s += time.perf_counter() - started

    def _hold(self, load: Load) -> tuple[Load, memoryview]:
        if load.error is None:
            self._holders[load] = threading.get_ident()
        return load, self._ring.view(load.slot)

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        while True:
            if self._closed:
                raise ConfigurationError("the weight stream is closed")
            if len(self._holders) >= self._ring.slots and threading.get_ident() in self._holders.values():
                raise ConfigurationError(
                    f"all {self._ring.slots} staging buffers are in use: leave the block of one unit before asking for "
                    "the next, or allow more buffers"
                )
            if ready():
                return
            self._changed.wait(_POLL_S)

    def give_back(self, load: Load) -> None:
        """The consumer is done with a unit."""
        with self._changed:
            if self._holders.pop(load, None) is not None:
                self._schedule.give_back(load)
                self._changed.notify_all()

    def counters(self) -> StreamCounters:
        with self._changed:
            under_way = time.perf_counter() - self._busy_since if self._reading else 0.0
            return StreamCounters(self._bytes_read, self._io_wait_s, self._busy_s + under_way)

    def stop(self) -> None:
        """Begin no further read, and wake everyone who waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def free(self) -> None:
        with self._changed:
            self._ring.close()


def _view(tensor: TensorEntry, slot: memoryview, place: int) -> torch.Tensor:
    """The tensor in its slot; a copy only where its address would not suit its dtype."""
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    raw = torch.frombuffer(slot, dtype=torch.uint8, count=tensor.nbytes, offset=place)
    if place % tensor.dtype.itemsize:  # the slot itself starts at a page
        raw = raw.clone()
    return raw.view(tensor.dtype).view(tensor.shape)


def _read_error(unit: Unit, load: Load) -> ReadError:
    reason = str(load.error) or type(load.error).__name__
    if not isinstance(load.error, ReadError):  # those say where they happened
        assert load.failed is not None
        reason = f"{load.failed.file}: reading at offset {load.failed.offset} failed: {reason}"
    return ReadError(f"{unit.name} could not be read: {reason}")
