"""The ring of staging buffers into which the disk is read."""

from __future__ import annotations

import mmap
from collections import deque

from drawbar.errors import ConfigurationError
from drawbar.weights.reader import PAGE


class StagingRing:
    """Page-aligned buffers of one size, handed out and given back. The caller guards it against other threads.

    Args:
        slots: how many.
        slot_bytes: bytes of each, rounded up to whole pages.

    Raises:
        ConfigurationError: fewer than one slot.
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        if slots < 1:
            raise ConfigurationError(f"streaming needs at least one staging buffer, not {slots}")
        size = max(-(-slot_bytes // PAGE), 1) * PAGE
        self.slots = slots
        self.nbytes = slots * size
        self._maps = [mmap.mmap(-1, size) for _ in range(slots)]
        self._views = [memoryview(held) for held in self._maps]
        self._free = deque(range(slots))

    def acquire(self) -> int | None:
        """A free slot, or None."""
        return self._free.popleft() if self._free else None

    def release(self, slot: int) -> None:
        """Give a slot back."""
        self._free.append(slot)

    def view(self, slot: int) -> memoryview:
        """The memory of a slot."""
        return self._views[slot]

    def close(self) -> None:
        """Let go of the memory. A slot that a tensor still looks at is freed with the last such tensor."""
        for view in self._views:
            view.release()
        for held in self._maps:
            try:
                held.close()
            except BufferError:
                continue
        self._views, self._maps = [], []
        self._free.clear()
