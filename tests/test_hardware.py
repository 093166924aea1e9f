"""The self-test of row invariance, on this machine's products and on products that are made to fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drawbar import hardware
from drawbar.hardware import MAX_ROWS, ProductShape, RowBuckets, available_memory, row_buckets

LINEAR = torch.nn.functional.linear
SHAPES = [
    ProductShape(64, 128, torch.bfloat16),
    ProductShape(576, 192, torch.float32),
    ProductShape(64, 8, torch.float32, transposed=True),
    ProductShape(2048, 1, torch.bfloat16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_what_was_found_holds_on_other_data(shape: ProductShape) -> None:
    buckets = row_buckets([shape])
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn((MAX_ROWS, shape.inputs), generator=generator).to(shape.dtype)
    weight = torch.randn((shape.outputs, shape.inputs), generator=generator).to(shape.dtype)
    weight = weight.t().contiguous().t() if shape.transposed else weight
    reference = LINEAR(rows, weight)
    for count in buckets.sizes:
        for start in (0, MAX_ROWS - count, (MAX_ROWS - count) // 2):
            assert torch.equal(LINEAR(rows[start : start + count].clone(), weight), reference[start : start + count])


def test_pads_to_the_smallest_bucket_and_keeps_full_slices() -> None:
    buckets = RowBuckets((2, 16, 64, 256))
    expected = {0: 0, 1: 2, 2: 2, 3: 16, 16: 16, 17: 64, 65: 256, 256: 256, 257: 258, 300: 320, 512: 512, 600: 768}
    assert {rows: buckets.pad(rows) for rows in expected} == expected


def test_without_any_measure_every_pass_has_one_size() -> None:
    assert [RowBuckets().pad(rows) for rows in (1, 255, 256, 257)] == [256, 256, 256, 512]


def fake_linear(bad: set[int]):  # type: ignore[no-untyped-def]
    def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        # Exact here: float64 products of few bits, then a difference in the last row alone, for certain row counts.
        result = LINEAR(rows.double(), weight.double())
        if rows.shape[-2] in bad:
            result[..., -1, -1] += 1
        return result

    return linear


def test_row_counts_that_change_a_result_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", fake_linear({1, 4, 96}))
    monkeypatch.setattr(hardware, "_cancelling", whole_numbers)
    sizes = row_buckets([ProductShape(64, 32, torch.float32)]).sizes
    assert sizes == tuple(count for count in hardware._CANDIDATES if count not in {1, 4, 96})


def test_where_no_row_count_holds_only_the_full_slice_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", fake_linear(set(range(1, MAX_ROWS))))
    monkeypatch.setattr(hardware, "_cancelling", whole_numbers)
    assert row_buckets([ProductShape(64, 32, torch.float32)]).sizes == (MAX_ROWS,)


def test_one_bad_product_spoils_a_row_count_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return fake_linear({8} if rows.shape[-1] == 64 else {16})(rows, weight)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    monkeypatch.setattr(hardware, "_cancelling", whole_numbers)
    sizes = row_buckets([ProductShape(64, 32, torch.float32), ProductShape(128, 32, torch.float32)]).sizes
    assert not {8, 16} & set(sizes) and {1, 2, 4, 32} <= set(sizes)


def whole_numbers(inputs: int, outputs: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Data whose sums are exact in any order."""
    rows = torch.randint(-8, 8, (MAX_ROWS, inputs), generator=generator).float()
    return rows, torch.randint(-8, 8, (outputs, inputs), generator=generator).float()


@pytest.mark.parametrize("outputs", [1, 8, 15, 40])
def test_narrow_products_are_probed_at_their_own_width(monkeypatch: pytest.MonkeyPatch, outputs: int) -> None:
    widths: set[int] = set()

    def linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        widths.add(weight.shape[0])
        return LINEAR(rows, weight)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    row_buckets([ProductShape(64, outputs, torch.bfloat16)])
    assert widths == {outputs}


def test_wide_products_are_cut_but_inputs_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[int, ...]] = set()

    def linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.add(tuple(weight.shape))
        return LINEAR(rows[:, :, :8], weight[:, :8])

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    row_buckets([ProductShape(1 << 16, 1 << 18, torch.float32)])
    assert seen == {(64, 1 << 16)}


def test_no_products_at_all_leave_every_row_count() -> None:
    assert row_buckets([]).sizes == hardware._CANDIDATES


def test_a_cgroup_caps_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"/sys/fs/cgroup/memory.max": 10 << 20, "/sys/fs/cgroup/memory.current": 4 << 20}
    monkeypatch.setattr(hardware, "_read_number", numbers.get)
    assert available_memory() == 6 << 20
    numbers["/sys/fs/cgroup/memory.current"] = 11 << 20
    assert available_memory() == 0


def test_without_a_cap_the_free_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_read_number", lambda path: None)
    free = available_memory()
    assert 0 < free < 1 << 50
    v1 = "/sys/fs/cgroup/memory/memory"
    uncapped = {f"{v1}.limit_in_bytes": 1 << 62, f"{v1}.usage_in_bytes": 1}
    monkeypatch.setattr(hardware, "_read_number", uncapped.get)
    assert abs(available_memory() - free) < 8 << 30


@pytest.mark.parametrize(("text", "number"), [("123\n", 123), ("max\n", None), (None, None)])
def test_reads_numbers_of_cgroup_files(tmp_path: Path, text: str | None, number: int | None) -> None:
    if text is not None:
        (tmp_path / "file").write_text(text)
    assert hardware._read_number(str(tmp_path / "file")) == number
