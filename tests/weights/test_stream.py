"""The stream with real files, and with a fake reader that is slow, stuck or broken at will."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drawbar.errors import ConfigurationError, ReadError
from drawbar.weights import stream as module
from drawbar.weights.header import TensorEntry
from drawbar.weights.index import CheckpointIndex
from drawbar.weights.reader import BufferedReader, Reader, open_reader
from drawbar.weights.stream import StreamCounters, Unit, WeightStream, plan_extents

FILE = Path("fake")
UNIT_BYTES = 256
TIMEOUT = 10.0


class FakeReader:
    """Byte number n of its one file is n // 256. Reads wait while `gate` is shut and fail where `broken` says so."""

    alignment = 1

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.broken: dict[int, BaseException] = {}
        self.offsets: list[int] = []
        self.under_way = 0
        self._lock = threading.Lock()

    def read_into(self, buffer: memoryview, file: Path, offset: int, needed: int) -> None:
        with self._lock:
            self.offsets.append(offset)
            self.under_way += 1
        try:
            assert self.gate.wait(60)
            if offset in self.broken:
                raise self.broken[offset]
            buffer[:needed] = bytes((offset + n) // UNIT_BYTES for n in range(needed))
        finally:
            with self._lock:
                self.under_way -= 1

    def close(self) -> None: ...


def fake_units(count: int) -> list[Unit]:
    return [
        Unit(f"unit {n}", (TensorEntry("t", FILE, torch.uint8, (UNIT_BYTES,), n * UNIT_BYTES, UNIT_BYTES),))
        for n in range(count)
    ]


def value(tensors: dict[str, torch.Tensor]) -> int:
    """Which unit these are the tensors of."""
    (tensor,) = tensors.values()
    assert int(tensor.min()) == int(tensor.max())
    return int(tensor[0])


def use(stream: WeightStream, index: int) -> int:
    with stream.unit(index) as tensors:
        return value(tensors)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.002)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


@pytest.fixture
def reader() -> Iterator[FakeReader]:
    fake = FakeReader()
    yield fake
    fake.gate.set()


# --- real files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[CheckpointIndex, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for n in range(5):
        tensors[f"{n}.matrix"] = torch.randn(63 + n, 130).bfloat16()
        tensors[f"{n}.bias"] = torch.randn(7)
        tensors[f"{n}.flags"] = torch.randn(13) > 0
        tensors[f"{n}.double"] = torch.randn(3, 1, dtype=torch.float64)
        tensors[f"{n}.none"] = torch.empty(4, 0)
        tensors[f"{n}.scalar"] = torch.tensor(n)
        tensors[f"{n}.eight"] = torch.randn(33).to(torch.float8_e4m3fn)
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, tmp_path / "x.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, tmp_path / "y.safetensors")
    # As old writers left it: a header of odd length, so that no address suits its dtype.
    whole = (tmp_path / "y.safetensors").read_bytes()
    header = int.from_bytes(whole[:8], "little")
    text = whole[8 : 8 + header].rstrip()
    text += b" " * ((len(text) + 1) % 2)
    (tmp_path / "y.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + header :])
    return CheckpointIndex.from_folder(tmp_path), tensors


def units_of(index: CheckpointIndex) -> list[Unit]:
    return [Unit(f"layer {n}", tuple(e for name, e in index.items() if name.startswith(f"{n}."))) for n in range(5)]


@pytest.mark.parametrize("slots", [1, 2, 7])
@pytest.mark.parametrize("open_it", [open_reader, lambda files: BufferedReader()], ids=["direct", "buffered"])
def test_many_passes_give_the_bytes_of_the_files(
    checkpoint: tuple[CheckpointIndex, dict[str, torch.Tensor]],
    open_it: Callable[[Sequence[Path]], Reader],
    slots: int,
) -> None:
    index, expected = checkpoint
    reader = open_it(index.files)
    with WeightStream(units_of(index), reader, slots=slots, threads=3, chunk_bytes=4096) as stream:
        for _ in range(6):
            for n in range(5):
                with stream.unit(n) as tensors:
                    assert set(tensors) == {name for name in expected if name.startswith(f"{n}.")}
                    for name, tensor in tensors.items():
                        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
                        assert tensor.data_ptr() % tensor.itemsize == 0
                        assert tensor.flatten().view(torch.uint8).equal(expected[name].flatten().view(torch.uint8))
    reader.close()


def test_tensors_are_views_of_the_slot(checkpoint: tuple[CheckpointIndex, dict[str, torch.Tensor]]) -> None:
    index, _ = checkpoint
    aligned = [entry for entry in index.values() if entry.offset % 8 == 0 and entry.nbytes]
    reader = open_reader(index.files)
    unit = Unit("all", tuple(aligned))
    with WeightStream([unit], reader, slots=1) as stream, stream.unit(0) as tensors:
        addresses = [tensors[entry.name].data_ptr() for entry in aligned]
        assert max(addresses) - min(addresses) <= plan_extents(unit, reader.alignment).nbytes == stream.nbytes
    reader.close()


@pytest.mark.parametrize("open_it", [open_reader, lambda files: BufferedReader()], ids=["direct", "buffered"])
def test_file_cut_after_it_was_checked(tmp_path: Path, open_it: Callable[[Sequence[Path]], Reader]) -> None:
    file = tmp_path / "model.safetensors"
    save_file({f"{n}.t": torch.full((100_000,), n, dtype=torch.uint8) for n in range(3)}, file)
    index = CheckpointIndex.from_folder(tmp_path)
    reader = open_it(index.files)
    os.truncate(file, index["2.t"].offset + 50_000)
    units = [Unit(f"layer {n}", (index[f"{n}.t"],)) for n in range(3)]
    with WeightStream(units, reader, slots=3) as stream:
        assert [use(stream, n) for n in (0, 1)] == [0, 1]
        offset = index["2.t"].offset // reader.alignment * reader.alignment
        with pytest.raises(ReadError, match=rf"layer 2 could not be read: {file}: only .* at offset {offset}: "):
            use(stream, 2)
        assert use(stream, 0) == 0
    reader.close()


# --- order and reading ahead ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_walk_wraps_around_and_reads_every_unit_in_every_pass(reader: FakeReader, slots: int, count: int) -> None:
    with WeightStream(fake_units(count), reader, slots=slots, threads=2, chunk_bytes=100) as stream:
        assert [use(stream, n) for _ in range(4) for n in range(count)] == [*range(count)] * 4
        eventually(lambda: reader.under_way == 0 and stream.bytes_read == (4 * count + slots) * UNIT_BYTES)
        for offset in set(reader.offsets):
            assert reader.offsets.count(offset) >= 4


def test_reads_ahead_while_nobody_asks_as_far_as_slots_go(reader: FakeReader) -> None:
    with WeightStream(fake_units(4), reader, slots=6) as stream:
        eventually(lambda: stream.bytes_read == 6 * UNIT_BYTES)
        time.sleep(0.05)
        assert stream.bytes_read == 6 * UNIT_BYTES
        assert sorted(reader.offsets) == sorted(n % 4 * UNIT_BYTES for n in range(6))
        with stream.unit(0):
            time.sleep(0.05)
            assert stream.bytes_read == 6 * UNIT_BYTES
        eventually(lambda: stream.bytes_read == 7 * UNIT_BYTES)
        assert reader.offsets[-1] == 2 * UNIT_BYTES


def test_no_thread_idles_while_a_slot_is_free(reader: FakeReader) -> None:
    """Two chunks a unit and five threads: two units and a half are under way at once."""
    reader.gate.clear()
    with WeightStream(fake_units(4), reader, slots=4, threads=5, chunk_bytes=UNIT_BYTES // 2):
        eventually(lambda: reader.under_way == 5)
        assert sorted(reader.offsets) == [n * UNIT_BYTES // 2 for n in range(5)]
        reader.gate.set()


def test_a_pass_broken_off_starts_over(reader: FakeReader) -> None:
    with WeightStream(fake_units(6), reader, slots=2) as stream:
        for wanted in 0, 1, 2, 0, 1, 5, 0, 3, 3, 3, 4, 2, 1, 0, 5, 0:
            assert use(stream, wanted) == wanted


def test_a_block_that_raises_gives_its_slot_back(reader: FakeReader) -> None:
    with WeightStream(fake_units(3), reader, slots=1) as stream:
        for n in 0, 1, 2, 0:
            with pytest.raises(KeyError), stream.unit(n):
                raise KeyError
        assert use(stream, 1) == 1


def test_units_without_bytes(reader: FakeReader) -> None:
    empty = TensorEntry("none", FILE, torch.float32, (3, 0), 8, 0)
    units = [Unit("empty", (empty,)), *fake_units(2)[1:], Unit("nothing", ())]
    with WeightStream(units, reader, slots=2) as stream, within(2):
        for _ in range(3):
            with stream.unit(0) as tensors:
                assert tensors["none"].shape == (3, 0)
                assert tensors["none"].dtype == torch.float32
            assert use(stream, 1) == 1
            with stream.unit(2) as tensors:
                assert tensors == {}


# --- holding several units -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_asking_while_holding_all_slots_is_an_error(reader: FakeReader, slots: int) -> None:
    with WeightStream(fake_units(5), reader, slots=slots) as stream:
        blocks = [stream.unit(n) for n in range(slots)]
        for n, block in enumerate(blocks):
            assert value(block.__enter__()) == n
        with pytest.raises(ConfigurationError, match=f"all {slots} staging buffers are in use"):
            stream.unit(slots).__enter__()
        for block in blocks:
            block.__exit__(None, None, None)
        assert use(stream, slots) == slots


def test_another_thread_waits_for_the_slot(reader: FakeReader) -> None:
    with WeightStream(fake_units(3), reader, slots=1) as stream, ThreadPoolExecutor(1) as pool:
        with stream.unit(0):
            other = pool.submit(use, stream, 1)
            time.sleep(0.02)
            assert not other.done()
        assert other.result(TIMEOUT) == 1


def test_many_consumers_each_get_what_they_ask_for(reader: FakeReader) -> None:
    with WeightStream(fake_units(7), reader, slots=2, chunk_bytes=50) as stream, ThreadPoolExecutor(6) as pool:
        wanted = [n * 5 % 7 for n in range(300)]
        assert list(pool.map(lambda n: use(stream, n), wanted, timeout=TIMEOUT)) == wanted


# --- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [OSError(5, "bad disk"), ZeroDivisionError(), SystemExit(3)])
def test_failure_surfaces_when_its_unit_is_asked_for(reader: FakeReader, failure: BaseException) -> None:
    reader.broken[2 * UNIT_BYTES + 64] = failure
    with WeightStream(fake_units(4), reader, slots=4, chunk_bytes=64) as stream:
        eventually(lambda: 2 * UNIT_BYTES + 64 in reader.offsets)
        assert [use(stream, n) for n in (0, 1)] == [0, 1]
        for _ in range(2):
            with pytest.raises(ReadError, match=rf"unit 2 .*{FILE}.*offset {2 * UNIT_BYTES + 64}") as caught:
                use(stream, 2)
            assert caught.value.__cause__ is failure
        reader.broken.clear()
        assert [use(stream, n) for n in (2, 3, 0, 1, 2)] == [2, 3, 0, 1, 2]


def test_a_failure_is_no_obstacle_to_other_units(reader: FakeReader) -> None:
    reader.broken[UNIT_BYTES] = ReadError("fake: at offset 256: gone")
    with WeightStream(fake_units(3), reader, slots=2) as stream:
        for _ in range(3):
            assert use(stream, 0) == 0
            with pytest.raises(ReadError, match=r"unit 1 could not be read: fake: at offset 256: gone"):
                use(stream, 1)
            assert use(stream, 2) == 2


def test_nothing_is_read_between_a_failure_and_the_next_request(reader: FakeReader) -> None:
    reader.broken[0] = OSError()
    with WeightStream(fake_units(3), reader, slots=2, threads=1) as stream:
        with pytest.raises(ReadError):
            use(stream, 0)
        count = len(reader.offsets)
        time.sleep(0.05)
        assert len(reader.offsets) == count == 1


def test_ctrl_c_while_waiting_leaves_the_stream_usable(reader: FakeReader) -> None:
    reader.gate.clear()
    with WeightStream(fake_units(3), reader, slots=1) as stream:
        timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with within(5), pytest.raises(KeyboardInterrupt):
            use(stream, 0)
        timer.join()
        reader.gate.set()
        assert [use(stream, n) for n in (0, 1, 2, 0)] == [0, 1, 2, 0]


@pytest.mark.parametrize("option", [{"slots": 0}, {"slots": -1}, {"threads": 0}, {"chunk_bytes": 0}])
def test_options_that_cannot_be_honoured(reader: FakeReader, option: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="at least one"):
        WeightStream(fake_units(1), reader, **({"slots": 1} | option))
    with pytest.raises(ConfigurationError, match="at least one unit"):
        WeightStream([], reader, slots=1)


@pytest.mark.parametrize("index", [-1, 3])
def test_no_such_unit(reader: FakeReader, index: int) -> None:
    with WeightStream(fake_units(3), reader, slots=1) as stream, pytest.raises(ConfigurationError, match="no unit"):
        use(stream, index)


# --- counters ------------------------------------------------------------------------------------------------------


def test_counters(reader: FakeReader) -> None:
    reader.gate.clear()
    with WeightStream(fake_units(2), reader, slots=1) as stream:
        before = stream.counters()
        threading.Timer(0.1, reader.gate.set).start()
        assert use(stream, 0) == 0
        eventually(lambda: stream.bytes_read == 2 * UNIT_BYTES)
        eventually(lambda: reader.under_way == 0)
        after = stream.counters()
        assert before.bytes_read == 0
        assert before.io_wait_s == 0.0
        assert 0.08 < after.io_wait_s < 5
        assert 0.08 < after.busy_s < 5
        assert (stream.io_wait_s, stream.busy_s) == (after.io_wait_s, after.busy_s)
        time.sleep(0.02)
        assert stream.counters() == after  # nothing is read, so nothing grows
    assert StreamCounters() == StreamCounters(0, 0.0, 0.0)


# --- the end -------------------------------------------------------------------------------------------------------


def reader_threads() -> int:
    return sum(thread.name.startswith("drawbar-reader") for thread in threading.enumerate())


def test_close_joins_the_threads_and_may_be_repeated(reader: FakeReader) -> None:
    stream = WeightStream(fake_units(3), reader, slots=2, threads=3)
    assert reader_threads() == 3
    assert all(t.daemon for t in threading.enumerate() if t.name.startswith("drawbar-reader"))
    with within(2):
        stream.close()
        stream.close()
    assert reader_threads() == 0
    with pytest.raises(ConfigurationError, match="closed"):
        use(stream, 0)


def test_close_while_reads_are_under_way_waits_for_them(reader: FakeReader) -> None:
    reader.gate.clear()
    stream = WeightStream(fake_units(3), reader, slots=2, threads=3)
    eventually(lambda: reader.under_way > 0)
    threading.Timer(0.05, reader.gate.set).start()
    with within(2):
        stream.close()
    assert reader_threads() == 0


def test_close_does_not_wait_for_ever_for_a_stuck_disk(reader: FakeReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_JOIN_S", 0.05)
    reader.gate.clear()
    stream = WeightStream(fake_units(3), reader, slots=2)
    eventually(lambda: reader.under_way > 0)
    with within(2):
        stream.close()
    reader.gate.set()  # the reads that were stuck end now, in memory that is still theirs
    eventually(lambda: reader_threads() == 0)


def test_close_wakes_a_consumer_that_waits(reader: FakeReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_JOIN_S", 0.05)
    reader.gate.clear()
    stream = WeightStream(fake_units(3), reader, slots=2)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(use, stream, n) for n in (0, 1)]
        time.sleep(0.02)
        with within(2):
            stream.close()
            for consumer in waiting:
                with pytest.raises(ConfigurationError, match="closed"):
                    consumer.result(TIMEOUT)


def test_tensors_stay_readable_memory_after_close(reader: FakeReader) -> None:
    stream = WeightStream(fake_units(3), reader, slots=1)
    with stream.unit(0) as tensors:
        stream.close()
        kept = tensors["t"]
    del stream
    gc.collect()
    assert kept.sum() == 0


def test_a_forgotten_stream_stops_reading(reader: FakeReader) -> None:
    stream = WeightStream(fake_units(3), reader, slots=1)
    assert use(stream, 0) == 0
    assert reader_threads() > 0
    del stream
    gc.collect()
    eventually(lambda: reader_threads() == 0)


def test_close_at_any_moment(reader: FakeReader) -> None:
    for moment in range(40):
        stream = WeightStream(fake_units(3), reader, slots=2, threads=2, chunk_bytes=40)
        for n in range(moment % 7):
            assert use(stream, n % 3) == n % 3
        with within(2):
            stream.close()
    assert reader_threads() == 0
