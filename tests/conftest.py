"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints import fetch_smollm2
from tests.support.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real SmolLM2-135M-Instruct in bfloat16; for tests marked slow."""
    return fetch_smollm2()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_checkpoint` without a path: each kind is made once for all tests, which only read it."""
    made: dict[str, Path] = {}

    def checkpoint(architecture: str, **options: Any) -> Path:
        key = repr((architecture, sorted(options.items())))
        if key not in made:
            made[key] = make_checkpoint(architecture, tmp_path_factory.mktemp(architecture), **options)
        return made[key]

    return checkpoint
