"""Direct and buffered reads: the same bytes, and never fewer than were asked for."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from drawbar.errors import CheckpointError, ReadError
from drawbar.weights.reader import PAGE, BufferedReader, DirectReader, Reader, open_reader

SIZE = 10 * PAGE + 123


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture(params=[DirectReader, BufferedReader])
def reader(request: pytest.FixtureRequest, file: Path) -> Iterator[Reader]:
    opened: Reader = request.param()
    if opened.alignment > 1 and not isinstance(open_reader([file]), DirectReader):
        pytest.skip("this file system takes no direct reads")
    yield opened
    opened.close()


def buffer(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))


def test_reads_every_aligned_range(reader: Reader, file: Path) -> None:
    content = file.read_bytes()
    for first in range(11):
        for pages in range(1, 12 - first):
            room, offset = buffer(pages * PAGE), first * PAGE
            needed = min(pages * PAGE, SIZE - offset)
            reader.read_into(room, file, offset, needed)
            assert room[:needed] == content[offset : offset + needed]


def test_buffered_reads_any_range(file: Path) -> None:
    content, reader = file.read_bytes(), BufferedReader()
    for offset, nbytes in (0, 1), (1, PAGE), (PAGE - 1, 2), (5, SIZE - 5), (SIZE, 0):
        room = buffer(nbytes or 1)[:nbytes]
        reader.read_into(room, file, offset, nbytes)
        assert room == content[offset : offset + nbytes]
    reader.close()


@pytest.mark.parametrize("left", [0, 1, PAGE, 3 * PAGE + 17])
def test_short_read_names_file_and_offset(reader: Reader, file: Path, left: int) -> None:
    reader.read_into(buffer(PAGE), file, 0, PAGE)  # opened while it was whole
    os.truncate(file, PAGE + left)
    with pytest.raises(ReadError, match=rf"{file}: only {left} of {4 * PAGE} bytes could be read at offset {PAGE}:"):
        reader.read_into(buffer(4 * PAGE), file, PAGE, 4 * PAGE)


def test_bytes_that_are_not_needed_may_lie_past_the_end(reader: Reader, file: Path) -> None:
    room = buffer(8 * PAGE)
    reader.read_into(room, file, 8 * PAGE, SIZE - 8 * PAGE)
    assert room[: SIZE - 8 * PAGE] == file.read_bytes()[8 * PAGE :]
    with pytest.raises(ReadError):
        reader.read_into(room, file, 8 * PAGE, SIZE - 8 * PAGE + 1)


@pytest.mark.parametrize("pieces", [[1], [PAGE + 1], [PAGE], [PAGE - 1, 2 * PAGE, 5000]])
def test_goes_on_after_partial_reads(
    reader: Reader, file: Path, pieces: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel may give less than was asked for, even a part that ends between two pages."""
    real, left = os.preadv, list(pieces)

    def partial(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        assert offset % reader.alignment == 0
        count = real(descriptor, buffers, offset)
        if not left:
            return count
        given = min(count, left.pop(0))
        buffers[0][given:] = bytes(len(buffers[0]) - given)
        return given

    monkeypatch.setattr(os, "preadv", partial)
    room = buffer(4 * PAGE)
    reader.read_into(room, file, PAGE, 4 * PAGE)
    assert room == file.read_bytes()[PAGE : 5 * PAGE]


def test_parts_that_never_grow_are_an_error(reader: Reader, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset: 0)
    with pytest.raises(ReadError, match="only 0 of"):
        reader.read_into(buffer(PAGE), file, 0, PAGE)


def test_failure_of_the_disk_names_file_and_offset(reader: Reader, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(ReadError, match=rf"{file}: reading at offset {PAGE} failed: Input/output error") as caught:
        reader.read_into(buffer(PAGE), file, PAGE, PAGE)
    assert isinstance(caught.value.__cause__, OSError)


def test_absent_file(reader: Reader, tmp_path: Path) -> None:
    with pytest.raises(ReadError, match=r"absent.*offset 0.*No such file"):
        reader.read_into(buffer(PAGE), tmp_path / "absent", 0, PAGE)


def test_arguments_that_cannot_be_honoured(reader: Reader, file: Path) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        reader.read_into(buffer(PAGE), file, 0, PAGE + 1)
    if reader.alignment > 1:
        for offset, nbytes in (1, PAGE), (0, PAGE - 1):
            with pytest.raises(ValueError, match="multiples"):
                reader.read_into(buffer(PAGE)[:nbytes], file, offset, 1)


def test_many_threads(reader: Reader, file: Path) -> None:
    content = file.read_bytes()

    def read(number: int) -> bool:
        room, offset = buffer(2 * PAGE), number % 8 * PAGE
        reader.read_into(room, file, offset, 2 * PAGE)
        return bool(room == content[offset : offset + 2 * PAGE])

    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(400)))
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_closed_reader_reads_no_more(reader: Reader, file: Path) -> None:
    reader.read_into(buffer(PAGE), file, 0, 1)
    reader.close()
    reader.close()
    with pytest.raises(ReadError, match="closed"):
        reader.read_into(buffer(PAGE), file, 0, 1)


def test_close_leaves_reads_under_way_their_descriptor(
    reader: Reader, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, begun, go_on = os.preadv, threading.Event(), threading.Event()

    def slow(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        begun.set()
        assert go_on.wait(10)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    room, before = buffer(PAGE), len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(reader.read_into, room, file, 0, PAGE)
        assert begun.wait(10)
        reader.close()
        go_on.set()
        reading.result(10)
    assert room == file.read_bytes()[:PAGE]
    assert len(os.listdir("/proc/self/fd")) == before


def test_open_reader_falls_back_where_direct_reads_are_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuses(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags)

    monkeypatch.setattr(os, "open", refuses)
    assert isinstance(open_reader([file]), BufferedReader)


def test_open_reader_takes_short_files(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"abc")
    opened = open_reader([tmp_path / "short"])
    room = buffer(PAGE)
    opened.read_into(room, tmp_path / "short", 0, 3)
    assert bytes(room[:3]) == b"abc"
    opened.close()


def test_open_reader_names_a_file_that_cannot_be_read(file: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent: cannot be read"):
        open_reader([file, tmp_path / "absent"])


def test_open_reader_without_direct_reads_on_this_platform(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    assert isinstance(open_reader([file]), BufferedReader)
