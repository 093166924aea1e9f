"""Fixtures that every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checkpoints import fetch_smollm2


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real SmolLM2-135M-Instruct in bfloat16; for tests marked slow."""
    return fetch_smollm2()
