from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drawbar.weights.extents import MERGE_GAP, Unit, cut, plan_extents
from drawbar.weights.header import TensorEntry

FILES = [Path("a"), Path("b")]


def entry(name: str, file: Path, offset: int, nbytes: int) -> TensorEntry:
    return TensorEntry(name, file, torch.uint8, (nbytes,), offset, nbytes)


@st.composite
def units(draw: st.DrawFn) -> Unit:
    """Tensors of two files that do not overlap, with gaps of all sizes between them, in any order."""
    tensors = []
    for file in FILES:
        position = draw(st.integers(0, 100_000))
        for number in range(draw(st.integers(0, 6))):
            position += draw(st.sampled_from([0, 0, 1, 7, 4096, MERGE_GAP - 1, MERGE_GAP, MERGE_GAP + 1, 300_000]))
            nbytes = draw(st.sampled_from([0, 1, 2, 64, 4095, 4096, 4097, 200_000]))
            tensors.append(entry(f"{file}{number}", file, position, nbytes))
            position += nbytes
    return Unit("unit", tuple(draw(st.permutations(tensors))))


@settings(deadline=None)
@given(unit=units(), alignment=st.sampled_from([1, 512, 4096, 65536]), chunk=st.integers(1, 40))
def test_every_tensor_lands_whole_where_the_plan_says(unit: Unit, alignment: int, chunk: int) -> None:
    plan = plan_extents(unit, alignment)
    memory: dict[int, tuple[Path, int]] = {}  # a few bytes of the buffer, and which byte of which file they are
    pieces = [piece for extent in plan.extents for piece in cut(extent, chunk * max(alignment, 512))]
    for tensor, place in zip(unit.tensors, plan.places, strict=True):
        for byte in {0, tensor.nbytes // 2, tensor.nbytes - 1} if tensor.nbytes else ():
            inside = [p for p in pieces if p.start <= place + byte < p.start + p.needed]
            assert len(inside) == 1
            piece = inside[0]
            assert (piece.file, piece.offset + place + byte - piece.start) == (tensor.file, tensor.offset + byte)
            assert memory.setdefault(place + byte, (tensor.file, tensor.offset + byte)) == (
                tensor.file,
                tensor.offset + byte,
            )


@settings(deadline=None)
@given(unit=units(), alignment=st.sampled_from([1, 512, 4096, 65536]), chunk=st.integers(1, 40))
def test_reads_are_aligned_disjoint_and_within_the_slot(unit: Unit, alignment: int, chunk: int) -> None:
    plan = plan_extents(unit, alignment)
    step = chunk * max(alignment, 512)
    end = 0
    for extent in plan.extents:
        pieces = list(cut(extent, step))
        assert sum(piece.needed for piece in pieces) == extent.needed
        for piece in pieces:
            assert piece.offset % alignment == piece.start % alignment == piece.room % alignment == 0
            assert 0 < piece.needed <= piece.room <= step
            assert piece.room - piece.needed < alignment
            assert piece.start >= end
            end = piece.start + piece.room
    assert end == plan.nbytes == unit.slot_bytes(alignment)


@settings(deadline=None)
@given(unit=units(), alignment=st.sampled_from([1, 4096]))
def test_few_bytes_are_read_beside_the_tensors(unit: Unit, alignment: int) -> None:
    plan = plan_extents(unit, alignment)
    wanted = sum(tensor.nbytes for tensor in unit.tensors)
    assert plan.read_bytes - wanted <= len(unit.tensors) * (MERGE_GAP + alignment)
    assert plan.nbytes <= plan.read_bytes + len(plan.extents) * (alignment + 64)


def test_neighbours_make_one_read_and_distant_tensors_two() -> None:
    near = [entry("x", FILES[0], 100, 50), entry("y", FILES[0], 150, 10), entry("z", FILES[0], 160 + MERGE_GAP, 10)]
    far = entry("far", FILES[0], 170 + 2 * MERGE_GAP + 1, 1)
    assert len(plan_extents(Unit("u", tuple(near)), 4096).extents) == 1
    assert len(plan_extents(Unit("u", (far, *near)), 4096).extents) == 2


def test_a_unit_without_bytes_reads_nothing() -> None:
    plan = plan_extents(Unit("u", (entry("x", FILES[0], 8, 0),)), 4096)
    assert (plan.extents, plan.places, plan.nbytes) == ((), (0,), 0)


def test_unaligned_data_lands_aligned_when_the_reader_needs_no_alignment() -> None:
    unit = Unit("u", (entry("x", FILES[0], 13, 50), entry("y", FILES[1], 99, 50)))
    assert [place % 64 for place in plan_extents(unit, 1).places] == [0, 0]
