"""Fill a buffer from a file range: around the page cache where the file system allows it, through it where not."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from drawbar.errors import ReadError

PAGE = 4096


class Reader(Protocol):
    """Reads byte ranges of files into buffers; used by several threads at once."""

    @property
    def alignment(self) -> int:
        """File offsets, and the addresses and lengths of buffers, must be multiples of this."""

    def read_into(self, buffer: memoryview, file: Path, offset: int, needed: int) -> None:
        """Fill `buffer` from `file` at `offset`. At least `needed` bytes must arrive; what lies behind may be past the
        end of the file.

        Raises:
            ReadError: the read failed or came back short; names file and offset.
        """

    def close(self) -> None:
        """Close every file. No read may be under way."""


class _FileReader:
    """Keeps one descriptor for each file."""

    _flags = os.O_RDONLY | os.O_CLOEXEC

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._files:
                try:
                    self._files[file] = os.open(file, self._flags)
                except OSError as error:
                    raise ReadError(f"{file}: cannot be opened: {error.strerror}") from error
            return self._files[file]

    def _read(self, buffer: memoryview, file: Path, offset: int, needed: int, step: int) -> None:
        """Read until `needed` bytes are there. After a partial read it goes on from a multiple of `step`."""
        descriptor = self._descriptor(file)
        done = 0
        while done < needed:
            try:
                count = os.preadv(descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise ReadError(f"{file}: reading {needed} bytes at offset {offset} failed: {error.strerror}") from error
            arrived = done + count
            if arrived >= needed:
                return
            done = arrived // step * step
            if count == 0 or arrived - done == count:
                raise ReadError(
                    f"{file}: only {arrived} of {needed} bytes at offset {offset} could be read; "
                    "the file was changed or cut after it was checked"
                )

    def close(self) -> None:
        with self._lock:
            for descriptor in self._files.values():
                os.close(descriptor)
            self._files.clear()


class DirectReader(_FileReader):
    """Reads with O_DIRECT: at the disk's own speed, and without filling the page cache."""

    _flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT

    @property
    def alignment(self) -> int:
        return PAGE

    def read_into(self, buffer: memoryview, file: Path, offset: int, needed: int) -> None:
        self._read(buffer, file, offset, needed, PAGE)


class BufferedReader(_FileReader):
    """Reads through the page cache, and asks for each range to be dropped from it again: a memory cap counts it."""

    @property
    def alignment(self) -> int:
        return 1

    def read_into(self, buffer: memoryview, file: Path, offset: int, needed: int) -> None:
        self._read(buffer[:needed], file, offset, needed, 1)
        os.posix_fadvise(self._descriptor(file), offset, needed, os.POSIX_FADV_DONTNEED)


def open_reader(files: Iterable[Path]) -> DirectReader | BufferedReader:
    """A direct reader if the file systems of all these files take an aligned direct read, else a buffered one.

    Raises:
        ReadError: a file cannot be read at all.
    """
    direct = DirectReader()
    with mmap.mmap(-1, PAGE) as page, memoryview(page) as buffer:
        for file in files:
            try:
                direct.read_into(buffer, file, 0, 1)
            except ReadError as error:
                cause = error.__cause__
                direct.close()
                if isinstance(cause, OSError) and cause.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                    return BufferedReader()
                raise
    return direct
