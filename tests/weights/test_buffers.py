from __future__ import annotations

import mmap

import pytest
import torch

from drawbar.errors import ConfigurationError
from drawbar.weights.buffers import StagingRing


def test_slots_are_page_aligned_and_rounded_up() -> None:
    ring = StagingRing(3, mmap.PAGESIZE + 1)
    assert ring.nbytes == 3 * 2 * mmap.PAGESIZE
    addresses = {torch.frombuffer(ring.view(slot), dtype=torch.uint8).data_ptr() for slot in range(3)}
    assert len(addresses) == 3
    assert all(address % mmap.PAGESIZE == 0 for address in addresses)


@pytest.mark.parametrize("slots", [0, -1])
def test_no_slot_is_an_error(slots: int) -> None:
    with pytest.raises(ConfigurationError, match=f"at least one staging buffer, not {slots}"):
        StagingRing(slots, 1)


def test_each_slot_is_handed_out_once() -> None:
    ring = StagingRing(2, 0)
    slots = {ring.acquire(), ring.acquire()}
    assert slots == {0, 1}
    assert ring.acquire() is None
    ring.release(1)
    assert ring.acquire() == 1


def test_close_copes_with_tensors_that_still_look_at_a_slot() -> None:
    ring = StagingRing(1, 3 << 20)
    tensor = torch.frombuffer(ring.view(0), dtype=torch.uint8)
    tensor.fill_(7)
    part = ring.view(0)[5:9]
    slot = ring.acquire()
    ring.close()
    ring.close()
    assert slot is not None
    ring.release(slot)
    assert ring.acquire() is None
    assert int(tensor[-1]) == 7
    assert part[0] == 7
