"""The ring of staging buffers into which the disk is read."""

from __future__ import annotations

import mmap
from collections import deque
from contextlib import suppress

from drawbar.errors import ConfigurationError

_HUGE_PAGE = 2 << 20


class StagingRing:
    """Page-aligned buffers of one size, handed out and given back. The caller guards it against other threads.

    Args:
        slots: how many buffers.
        slot_bytes: bytes of each, rounded up to whole pages.

    Attributes:
        slots: how many buffers.
        nbytes: bytes of all of them. Memory is taken from the system as it is first written to.

    Raises:
        ConfigurationError: fewer than one slot.
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        if slots < 1:
            raise ConfigurationError(f"streaming needs at least one staging buffer, not {slots}")
        size = max(-(-slot_bytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        self.slots = slots
        self.nbytes = slots * size
        self._buffers = [memoryview(_anonymous(size)) for _ in range(slots)]
        self._free = deque(range(slots))

    def acquire(self) -> int | None:
        """A free slot, or None; never waits."""
        return self._free.popleft() if self._free else None

    def release(self, slot: int) -> None:
        """Give a slot back. After `close` this does nothing."""
        if self._buffers:
            self._free.append(slot)

    def view(self, slot: int) -> memoryview:
        """The memory of a slot."""
        return self._buffers[slot]

    def close(self) -> None:
        """Let go of the memory. May be called again.

        Nothing is unmapped by force: a tensor made by `torch.frombuffer` refers to its buffer but holds no export of
        it, so closing the mapping would succeed under it. A slot is freed with the last object that looks at it.
        """
        self._free.clear()
        self._buffers.clear()


def _anonymous(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A direct read pins each page of its buffer and hands it to the disk as a segment of its own: with huge pages reads
    # were 1.4 times as fast, at a third of the processor time.
    if hasattr(mmap, "MADV_HUGEPAGE") and size >= _HUGE_PAGE:
        with suppress(OSError):  # advice, which kernels without huge pages refuse
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
