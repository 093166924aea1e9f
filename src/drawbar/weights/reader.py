"""Fill a buffer from a file range: around the page cache where the file system allows it, through it where not."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from drawbar.errors import CheckpointError, ReadError

PAGE = 4096  # what O_DIRECT asks of offsets, addresses and lengths on every common file system
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)  # how a file system says that it has no direct reads


class Reader(Protocol):
    """Reads ranges of files into buffers. Used by several threads at once."""

    @property
    def alignment(self) -> int:
        """File offsets, and the addresses and lengths of buffers, must be multiples of this many bytes."""

    def read_into(self, buffer: memoryview, file: Path, offset: int, needed: int) -> None:
        """Fill `buffer` from `file`, `offset` bytes from its start. At least `needed` bytes must arrive; what is behind
        them may lie past the end of the file.

        Raises:
            ReadError: the read failed or came back short; names file and offset.
        """

    def close(self) -> None:
        """Close all files. May be called again."""


class _Descriptors:
    """One descriptor for each file, opened once; closed when asked to and no read uses them any more.

    A descriptor closed under a read could be given to another file at once, which would then be read in its place.
    """

    def __init__(self, flags: int) -> None:
        self._flags = flags | os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
        self._open: dict[Path, int] = {}
        self._users = 0
        self._closed = False
        self._lock = threading.Lock()

    @contextmanager
    def use(self, file: Path) -> Iterator[int]:
        """The file's descriptor, which stays open until the block exits."""
        with self._lock:
            if self._closed:
                raise ReadError(f"{file}: cannot be read: the reader is closed")
            if file not in self._open:
                self._open[file] = os.open(file, self._flags)
            descriptor = self._open[file]
            self._users += 1
        try:
            yield descriptor
        finally:
            with self._lock:
                self._users -= 1
                self._close_if_unused()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._closed and not self._users:
            while self._open:
                os.close(self._open.popitem()[1])


class DirectReader:
    """Reads with O_DIRECT: at the disk's own speed, and without filling the page cache, which a memory cap counts."""

    alignment: int = PAGE

    def __init__(self) -> None:
        self._files = _Descriptors(os.O_DIRECT)

    def read_into(self, buffer: memoryview, file: Path, offset: int, needed: int) -> None:
        """See `Reader.read_into`.

        Raises:
            ValueError: offset or length of buffer are not aligned.
        """
        if offset % PAGE or len(buffer) % PAGE:
            raise ValueError(f"direct reads need multiples of {PAGE}, not offset {offset} and {len(buffer)} bytes")
        with _named(file, offset), self._files.use(file) as descriptor:
            _fill(descriptor, buffer, file, offset, needed, PAGE)

    def close(self) -> None:
        """See `Reader.close`."""
        self._files.close()


class BufferedReader:
    """Reads through the page cache, and asks for each range to be dropped from it, so that the cache stays small."""

    alignment: int = 1

    def __init__(self) -> None:
        self._files = _Descriptors(0)

    def read_into(self, buffer: memoryview, file: Path, offset: int, needed: int) -> None:
        """See `Reader.read_into`."""
        with _named(file, offset), self._files.use(file) as descriptor:
            _fill(descriptor, buffer, file, offset, needed, 1)
            _drop_from_cache(descriptor, offset, len(buffer))

    def close(self) -> None:
        """See `Reader.close`."""
        self._files.close()


def open_reader(files: Iterable[Path]) -> DirectReader | BufferedReader:
    """A direct reader if the file systems of all these files take an aligned direct read, else a buffered one.

    Raises:
        CheckpointError: a file cannot be read either way; names it.
    """
    files = tuple(files)
    if hasattr(os, "O_DIRECT"):
        direct = DirectReader()
        if all(_takes(direct, file) for file in files):
            return direct
        direct.close()
    buffered = BufferedReader()
    for file in files:
        _takes(buffered, file)
    return buffered


def _takes(reader: Reader, file: Path) -> bool:
    """Whether a first read of a page (or of all of a shorter file) works; False if the file system refuses its kind."""
    page = memoryview(mmap.mmap(-1, PAGE))
    try:
        reader.read_into(page, file, 0, min(file.stat().st_size, PAGE))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except ReadError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _REFUSALS and reader.alignment > 1:
            return False
        raise CheckpointError(str(error)) from error
    return True


@contextmanager
def _named(file: Path, offset: int) -> Iterator[None]:
    """Errors of the operating system become a ReadError that says where."""
    try:
        yield
    except OSError as error:
        raise ReadError(f"{file}: reading at offset {offset} failed: {error.strerror}") from error


def _fill(descriptor: int, buffer: memoryview, file: Path, offset: int, needed: int, alignment: int) -> None:
    """Read until `needed` bytes have arrived.

    After a part that ends between two multiples of the alignment, the next read starts at the lower one and fetches the
    bytes between again.
    """
    if not 0 <= needed <= len(buffer):
        raise ValueError(f"{needed} bytes do not fit a buffer of {len(buffer)}")
    arrived = 0
    while arrived < needed:
        start = arrived - arrived % alignment
        count = os.preadv(descriptor, [buffer[start:]], offset + start)
        if start + count <= arrived:
            raise ReadError(
                f"{file}: only {arrived} of {needed} bytes could be read at offset {offset}: "
                "the file was cut or replaced after it had been checked"
            )
        arrived = start + count


def _drop_from_cache(descriptor: int, offset: int, length: int) -> None:
    """Widened to whole pages, since the kernel keeps a page that is dropped only in part."""
    if not hasattr(os, "posix_fadvise"):
        return
    first = offset - offset % PAGE
    end = -(-(offset + length) // PAGE) * PAGE
    with suppress(OSError):  # advice: a file system that has no use for it has read the bytes all the same
        os.posix_fadvise(descriptor, first, end - first, os.POSIX_FADV_DONTNEED)
