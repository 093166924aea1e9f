"""Walk the units of a model in a circle, always reading ahead: the disk never idles while a buffer is free."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from drawbar.errors import ConfigurationError, DrawbarError, ReadError
from drawbar.weights.buffers import StagingRing
from drawbar.weights.index import TensorEntry
from drawbar.weights.reader import Reader

MERGE_GAP = 64 << 10  # bytes between two tensors that are cheaper to read than to skip
_POLL_S = 0.2  # waits end this often, so that Ctrl-C is heard


@dataclass(frozen=True, slots=True)
class Unit:
    """What is read and used as a whole: the tensors of a layer.

    Attributes:
        name: for messages.
        tensors: what it holds.
    """

    name: str
    tensors: tuple[TensorEntry, ...]


@dataclass(frozen=True, slots=True)
class Extent:
    """One contiguous read: `needed` bytes of `file` from `offset` on go to `start` in the buffer, whose room is `room`."""

    file: Path
    offset: int
    start: int
    needed: int
    room: int


@dataclass(frozen=True, slots=True)
class ExtentPlan:
    """Where a unit lands in its buffer.

    Attributes:
        extents: the reads.
        places: for each tensor of the unit, in order, its first byte in the buffer.
        nbytes: bytes of buffer that it takes.
        read_bytes: bytes that are read.
    """

    extents: tuple[Extent, ...]
    places: tuple[int, ...]
    nbytes: int
    read_bytes: int


def plan_extents(unit: Unit, alignment: int) -> ExtentPlan:
    """Merge neighbouring tensors into aligned reads and lay the reads out behind each other."""
    order = sorted(range(len(unit.tensors)), key=lambda i: (str(unit.tensors[i].file), unit.tensors[i].offset))
    places = [0] * len(order)
    extents: list[Extent] = []
    for index in order:
        tensor = unit.tensors[index]
        end = tensor.offset + tensor.nbytes
        last = extents[-1] if extents else None
        if last and last.file == tensor.file and tensor.offset <= last.offset + last.needed + MERGE_GAP:
            needed = max(last.needed, end - last.offset)
            extents[-1] = replace(last, needed=needed, room=_round_up(needed, alignment))
        else:
            offset = tensor.offset // alignment * alignment
            start = _round_up(last.start + last.room, max(alignment, 64)) if last else 0
            extents.append(Extent(tensor.file, offset, start, end - offset, _round_up(end - offset, alignment)))
        places[index] = extents[-1].start + tensor.offset - extents[-1].offset
    nbytes = extents[-1].start + extents[-1].room if extents else 0
    return ExtentPlan(tuple(extents), tuple(places), nbytes, sum(extent.needed for extent in extents))


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True, slots=True)
class StreamCounters:
    """What was read so far.

    Attributes:
        bytes_read: bytes that arrived.
        io_wait_s: seconds in which the consumer waited for them.
        busy_s: seconds in which at least one read was under way.
    """

    bytes_read: int = 0
    io_wait_s: float = 0.0
    busy_s: float = 0.0


@dataclass
class _Load:
    """A unit on its way into a slot."""

    unit: int
    slot: int
    waiting: int
    error: BaseException | None = None
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class _Chunk:
    load: _Load
    file: Path
    offset: int
    start: int
    needed: int
    room: int


@dataclass
class _State:
    """All that the threads share; only touched under the condition."""

    next_unit: int = 0
    loads: deque[_Load] = field(default_factory=deque)
    chunks: deque[_Chunk] = field(default_factory=deque)
    in_use: int = 0
    reading: int = 0
    busy_since: float = 0.0
    closed: bool = False
    counters: StreamCounters = field(default_factory=StreamCounters)


class WeightStream:
    """Reads units 0, 1, ..., n - 1, 0, 1, ... ahead of their use, with a few threads, into a ring of buffers.

    Args:
        units: what is walked.
        reader: reads file ranges; stays the caller's to close, after the stream.
        slots: staging buffers, each large enough for the largest unit.
        threads: reads under way at once.
        chunk_bytes: bytes of one read.

    Raises:
        ConfigurationError: no units, no slot, no thread.
    """

    def __init__(
        self, units: Sequence[Unit], reader: Reader, *, slots: int, threads: int = 4, chunk_bytes: int = 16 << 20
    ) -> None:
        if not units or threads < 1:
            raise ConfigurationError("streaming needs at least one unit and one reader thread")
        self._units = tuple(units)
        self._reader = reader
        self._chunk_bytes = max(_round_up(chunk_bytes, reader.alignment), reader.alignment)
        self._plans = [plan_extents(unit, reader.alignment) for unit in units]
        self._ring = StagingRing(slots, max(plan.nbytes for plan in self._plans))
        self._state = _State()
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"drawbar-reader-{number}", daemon=True)
            for number in range(threads)
        ]
        with self._changed:
            self._schedule()
        for thread in self._threads:
            thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes of staging memory."""
        return self._ring.nbytes

    def counters(self) -> StreamCounters:
        """What was read so far."""
        with self._changed:
            state = self._state
            running = time.perf_counter() - state.busy_since if state.reading else 0.0
            return replace(state.counters, busy_s=state.counters.busy_s + running)

    @contextmanager
    def unit(self, index: int) -> Iterator[dict[str, torch.Tensor]]:
        """Wait for a unit and yield its tensors by name: views of a buffer, valid until the block exits.

        Asked for another unit than the one that follows, the stream drops what it has read ahead and starts over
        from there.

        Raises:
            ReadError: the unit could not be read; asking again tries again.
            ConfigurationError: no such unit, all buffers are held by the caller, or the stream is closed.
        """
        load = self._take(index)
        try:
            yield self._tensors(load)
        finally:
            with self._changed:
                self._state.in_use -= 1
                if not self._state.closed:
                    self._ring.release(load.slot)
                    self._schedule()

    def _take(self, index: int) -> _Load:
        if not 0 <= index < len(self._units):
            raise ConfigurationError(f"there is no unit {index} among {len(self._units)}")
        started = time.perf_counter()
        with self._changed:
            state = self._state
            self._check_open()
            if state.in_use >= self._ring.slots:
                raise ConfigurationError("every staging buffer is in use by the caller: leave a unit before the next")
            if not (state.loads and state.loads[0].unit == index):
                self._restart(index)
            load = self._wait_for_head(index)
            state.loads.popleft()
            state.counters = replace(
                state.counters, io_wait_s=state.counters.io_wait_s + time.perf_counter() - started
            )
            if load.error is not None:
                self._ring.release(load.slot)
                self._restart(index)
                raise _as_read_error(load.error, self._units[index])
            state.in_use += 1
            return load

    def _wait_for_head(self, index: int) -> _Load:
        """The load at the head of the queue, once it is whole or has failed."""
        state = self._state
        while True:
            self._check_open()
            if not state.loads:
                self._schedule()
            elif state.loads[0].waiting == 0:
                return state.loads[0]
            self._changed.wait(_POLL_S)

    def _check_open(self) -> None:
        if self._state.closed:
            raise ConfigurationError("the weight stream is closed")

    def _tensors(self, load: _Load) -> dict[str, torch.Tensor]:
        unit, plan = self._units[load.unit], self._plans[load.unit]
        view = self._ring.view(load.slot)
        return {
            tensor.name: _view(tensor, view, place) for tensor, place in zip(unit.tensors, plan.places, strict=True)
        }

    # Everything below runs under the condition, but for the reads themselves.

    def _restart(self, index: int) -> None:
        """Drop what was read ahead. Slots with reads under way come back when those end."""
        state = self._state
        for load in state.loads:
            load.cancelled = True
            load.waiting -= sum(chunk.load is load for chunk in state.chunks)
        state.chunks.clear()
        for load in state.loads:
            if load.waiting == 0:
                self._ring.release(load.slot)
        state.loads.clear()
        state.next_unit = index
        self._schedule()

    def _schedule(self) -> None:
        """Put the next units on their way for as long as slots are free."""
        state = self._state
        while not state.closed and (slot := self._ring.acquire()) is not None:
            load = _Load(state.next_unit, slot, 0)
            for extent in self._plans[load.unit].extents:
                for begin in range(0, extent.room, self._chunk_bytes):
                    needed = min(self._chunk_bytes, extent.needed - begin)
                    if needed > 0:
                        room = min(self._chunk_bytes, extent.room - begin)
                        state.chunks.append(
                            _Chunk(load, extent.file, extent.offset + begin, extent.start + begin, needed, room)
                        )
                        load.waiting += 1
            state.loads.append(load)
            state.next_unit = (state.next_unit + 1) % len(self._units)
        self._changed.notify_all()

    def _work(self) -> None:
        while (chunk := self._next_chunk()) is not None:
            error: BaseException | None = None
            try:
                view = self._ring.view(chunk.load.slot)[chunk.start : chunk.start + chunk.room]
                self._reader.read_into(view, chunk.file, chunk.offset, chunk.needed)
            except BaseException as failure:  # handed to the consumer, which raises it
                error = failure
            self._finish(chunk, error)

    def _next_chunk(self) -> _Chunk | None:
        with self._changed:
            state = self._state
            while not state.closed and not state.chunks:
                self._changed.wait()
            if state.closed:
                return None
            if state.reading == 0:
                state.busy_since = time.perf_counter()
            state.reading += 1
            return state.chunks.popleft()

    def _finish(self, chunk: _Chunk, error: BaseException | None) -> None:
        with self._changed:
            state, load = self._state, chunk.load
            state.reading -= 1
            counters = state.counters
            if state.reading == 0:
                counters = replace(counters, busy_s=counters.busy_s + time.perf_counter() - state.busy_since)
            if error is None:
                counters = replace(counters, bytes_read=counters.bytes_read + chunk.needed)
            state.counters = counters
            load.waiting -= 1
            load.error = load.error or error
            if load.cancelled and load.waiting == 0 and not state.closed:
                self._ring.release(load.slot)
                self._schedule()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop reading, wait for reads under way, and free the buffers. May be called again."""
        with self._changed:
            self._state.closed = True
            self._state.chunks.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._ring.close()

    def __enter__(self) -> WeightStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _view(tensor: TensorEntry, buffer: memoryview, place: int) -> torch.Tensor:
    """The tensor in the buffer; a copy only where its address does not suit its dtype."""
    if tensor.nbytes == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    raw = torch.frombuffer(buffer, dtype=torch.uint8, count=tensor.nbytes, offset=place)
    if place % tensor.dtype.itemsize:
        raw = raw.clone()
    return raw.view(tensor.dtype).view(tensor.shape)


def _as_read_error(error: BaseException, unit: Unit) -> BaseException:
    if isinstance(error, DrawbarError):
        return error
    failure = ReadError(f"reading {unit.name} failed: {error or type(error).__name__}")
    failure.__cause__ = error
    return failure
