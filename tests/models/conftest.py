"""Tiny checkpoints and models that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from drawbar.hardware import RowBuckets, row_buckets
from drawbar.models import checkpoint as checkpoint_module
from drawbar.models.resident import ResidentModel
from tests.models.tiny import make_checkpoint


@pytest.fixture(scope="session", autouse=True)
def _measure_once() -> Iterator[None]:
    """The row-invariance self-test depends on the products alone: measure each set of them once for all tests."""
    known: dict[frozenset[object], RowBuckets] = {}

    def remembered(shapes: set[object], device: str = "cpu") -> RowBuckets:
        key = frozenset(shapes)
        if key not in known:
            known[key] = row_buckets(shapes, device)  # type: ignore[arg-type]
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_module, "row_buckets", remembered)
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, torch.dtype], Path]:
    """Makes the tiny checkpoint of an architecture and dtype; not to be changed by tests."""

    @cache
    def made(architecture: str, dtype: torch.dtype = torch.bfloat16) -> Path:
        return make_checkpoint(architecture, tmp_path_factory.mktemp(architecture), dtype)

    return made


@pytest.fixture(scope="session")
def resident(checkpoint: Callable[[str, torch.dtype], Path]) -> Callable[[str, torch.dtype], ResidentModel]:
    """Loads the resident model of an architecture and dtype."""

    @cache
    def loaded(architecture: str, dtype: torch.dtype = torch.bfloat16) -> ResidentModel:
        return ResidentModel.from_pretrained(checkpoint(architecture, dtype))

    return loaded
