"""Probes of the machine: memory, and which row counts make matrix products row invariant."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

MAX_ROWS = 256  # rows that a layer computes at a time
_CANDIDATES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, MAX_ROWS)
_PROBE_ELEMENTS = 4 << 20  # weights of a probe: outputs are cut to this, inputs are not
_PROBES = 16  # products compared for each row count


@dataclass(frozen=True, slots=True)
class RowBuckets:
    """Row counts at which a row's result does not depend on how many rows there are.

    A pass is padded to the smallest of these that holds it. The largest is always `MAX_ROWS`, so where no other
    count agrees with it, every pass has that one size.
    """

    sizes: tuple[int, ...] = (MAX_ROWS,)

    def pad(self, rows: int) -> int:
        """The rows that a pass of `rows` is padded to: full slices of `MAX_ROWS`, then a bucket for the rest."""
        full, rest = divmod(rows, MAX_ROWS)
        return full * MAX_ROWS + (next(size for size in self.sizes if size >= rest) if rest else 0)


@dataclass(frozen=True, slots=True)
class ProductShape:
    """A matrix product that a model computes: [rows, inputs] times [inputs, outputs]."""

    inputs: int
    outputs: int
    dtype: torch.dtype
    transposed: bool = False  # whether the weight is stored as [inputs, outputs]


def row_buckets(shapes: Iterable[ProductShape], device: torch.device | str = "cpu") -> RowBuckets:
    """Measure, on this machine, which row counts are row invariant for all of these products.

    Every candidate's rows are compared, bit for bit, with the same rows of a product of `MAX_ROWS`.
    """
    good = set(_CANDIDATES)
    generator = torch.Generator().manual_seed(0)
    for shape in sorted(set(shapes), key=repr):
        good &= _invariant_rows(shape, sorted(good), generator, device)
    return RowBuckets(tuple(sorted(good | {MAX_ROWS})))


def _invariant_rows(
    shape: ProductShape, candidates: Sequence[int], generator: torch.Generator, device: torch.device | str
) -> set[int]:
    # Never more than the model has: products of few outputs (routers, gates) take other paths than wide ones.
    outputs = min(shape.outputs, max(16, _PROBE_ELEMENTS // shape.inputs))
    rows, weight = _cancelling(shape.inputs, outputs, generator)
    rows, weight = rows.to(device, shape.dtype), weight.to(device, shape.dtype)
    weight = weight.t().contiguous().t() if shape.transposed else weight
    reference = torch.nn.functional.linear(rows[None], weight)[0]
    return {count for count in candidates if _agrees(rows, weight, reference, count)}


def _cancelling(inputs: int, outputs: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and weights whose products are sums of terms that cancel, in a random order.

    What such a sum comes to is its rounding errors, so that two orders of summation hardly ever agree; on other data
    most of the difference would be rounded away, and a few rows in a hundred would show it.
    """
    half = inputs // 2
    order = torch.randperm(2 * half, generator=generator)
    rows, weight = torch.zeros((MAX_ROWS, inputs)), torch.zeros((outputs, inputs))
    left = torch.randn((MAX_ROWS, half), generator=generator)
    right = torch.randn((outputs, half), generator=generator)
    rows[:, order] = torch.cat((left, -left), dim=1)
    weight[:, order] = torch.cat((right, right), dim=1)
    return rows, weight


def _agrees(rows: torch.Tensor, weight: torch.Tensor, reference: torch.Tensor, count: int) -> bool:
    """Whether products of `count` rows, wherever those rows stood, have the bits of the product of all rows."""
    starts = range(0, MAX_ROWS - count + 1, count)
    picked = starts[:: max(1, len(starts) // _PROBES)]
    return all(
        torch.equal(
            torch.nn.functional.linear(rows[None, start : start + count].clone(), weight)[0],
            reference[start : start + count],
        )
        for start in picked
    )


def available_memory() -> int:
    """Bytes that this process may still use: the machine's available memory, or less where a cgroup caps it."""
    limits = [_meminfo_available()]
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        cap, used = _read_number(limit), _read_number(usage)
        if cap is not None and used is not None and cap < 1 << 60:
            limits.append(max(cap - used, 0))
    return min(limits)


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _read_number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def keep_freed_memory(largest: int = 64 << 20, total: int = 256 << 20) -> None:
    """Let the C library reuse freed buffers instead of handing them back to the system after every operation.

    A pass makes and drops hundreds of activations of some ten MiB; by default each is mapped and zeroed anew, which
    took 0.8 s of system time in a pass over 8 GB. Concerns the whole process, so programs call it and the library does
    not. Does nothing where the C library is not glibc.

    Args:
        largest: bytes up to which a buffer is kept for reuse.
        total: bytes that are kept at the end of the heap.
    """
    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, largest)
        mallopt(trim_threshold, total)
