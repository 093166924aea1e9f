"""The schedule under random interleavings of reads and requests: the orders that threads make, without threads."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from drawbar.weights.buffers import StagingRing
from drawbar.weights.extents import Extent
from drawbar.weights.schedule import Load, Schedule


def chunks(unit: int, count: int) -> list[Extent]:
    return [Extent(Path(str(unit)), number, 0, 1, 1) for number in range(count)]


class Harness:
    """Plays threads and consumer, and keeps its own account of what each slot holds."""

    def __init__(self, counts: list[int], slots: int) -> None:
        self.counts = counts
        self.slots = slots
        self.ring = StagingRing(slots, 1)
        self.schedule = Schedule([chunks(unit, count) for unit, count in enumerate(counts)], self.ring)
        self.reading: list[tuple[Load, Extent]] = []
        self.held: list[Load] = []
        self.arrived: dict[Load, set[int]] = {}

    def begin(self) -> bool:
        read = self.schedule.begin_read()
        if read is None:
            return False
        load, extent = read
        assert extent.file == Path(str(load.unit))
        assert not load.dropped
        # Nobody else reads into this slot or uses it.
        others = [other for other, _ in self.reading if other is not load] + self.held
        assert all(other.slot != load.slot for other in others)
        self.reading.append(read)
        return True

    def end(self, which: int, error: BaseException | None = None) -> None:
        load, extent = self.reading.pop(which % len(self.reading))
        if error is None:
            self.arrived.setdefault(load, set()).add(extent.offset)
        self.schedule.end_read(load, extent, error)

    def obtain(self, unit: int) -> Load:
        """As a consumer that waits until every thread has done what there is to do."""
        self.schedule.aim(unit)
        for _ in range(1000):
            if self.schedule.head_settled:
                break
            assert self.begin() or self.reading, "nothing to read and nothing settled: a consumer would wait for ever"
            if self.reading:
                self.end(0)
        load = self.schedule.pop_head()
        assert load.unit == unit
        if load.error is None:
            assert self.arrived.get(load, set()) == set(range(self.counts[unit]))
            self.held.append(load)
        return load

    def give_back(self, which: int) -> None:
        self.schedule.give_back(self.held.pop(which % len(self.held)))


@settings(max_examples=300, deadline=None)
@given(
    counts=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    slots=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(["begin", "end", "fail", "ask", "back"]), st.integers(0, 9)), max_size=60),
)
def test_any_interleaving(counts: list[int], slots: int, steps: list[tuple[str, int]]) -> None:
    harness = Harness(counts, slots)
    for step, number in steps:
        if step == "begin":
            harness.begin()
        elif step in ("end", "fail") and harness.reading:
            harness.end(number, OSError() if step == "fail" else None)
        elif step == "ask" and len(harness.held) < slots:
            harness.obtain(number % len(counts))
        elif step == "back" and harness.held:
            harness.give_back(number)
    while harness.held:
        harness.give_back(0)
    for _ in range(2):  # a first request may still find a failure from before
        for unit in range(len(counts)):
            if harness.obtain(unit).error is None:
                harness.give_back(0)
    for unit in [*range(len(counts))] * 2:
        assert harness.obtain(unit).error is None
        harness.give_back(0)
    while harness.begin() or harness.reading:
        if harness.reading:
            harness.end(0)
    # Everything is loaded ahead now: no slot was lost on the way.
    assert harness.ring.acquire() is None
    for unit in range(slots):
        assert harness.schedule.head_settled
        assert harness.schedule.pop_head().unit == unit % len(counts)
        assert harness.ring.acquire() is None


def test_a_later_unit_that_is_queued_is_kept() -> None:
    harness = Harness([1] * 5, 3)
    while harness.begin():
        harness.end(0)
    assert set(harness.arrived) and {load.unit for load in harness.arrived} == {0, 1, 2}
    harness.schedule.aim(2)
    assert harness.schedule.head_settled
    assert harness.schedule.pop_head().unit == 2


def test_no_read_is_begun_behind_a_failure_or_after_it_was_reported() -> None:
    harness = Harness([1, 2, 1], 3)
    assert harness.begin() and harness.begin()
    harness.end(1, OSError())
    assert not harness.begin()
    harness.end(0)
    assert harness.obtain(0).error is None
    harness.give_back(0)
    assert harness.obtain(1).error is not None
    assert not harness.begin()
    assert harness.obtain(1).error is None
