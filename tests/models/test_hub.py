"""A hub id resolves to the folder that the hub's client keeps; tested on a cache made by hand, without a network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from drawbar.errors import CheckpointError
from drawbar.models.loading import resolve_checkpoint
from drawbar.models.resident import ResidentModel
from tests.support.checkpoints import make_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    return tmp_path


def test_a_hub_id_is_found_in_the_cache_and_loads(hub: Path) -> None:
    repository = hub / "models--somebody--tiny"
    snapshot = make_checkpoint("llama", repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    assert resolve_checkpoint("somebody/tiny") == snapshot
    assert ResidentModel.from_pretrained("somebody/tiny").vocab_size == 320


@pytest.mark.usefixtures("hub")
def test_an_id_that_cannot_be_had_is_named() -> None:
    with pytest.raises(CheckpointError, match="nobody/nothing"):
        resolve_checkpoint("nobody/nothing")


@pytest.mark.parametrize("name", ["nowhere", "./nowhere/at-all", "/nowhere/at-all", "a/b/c"])
def test_what_looks_like_a_path_is_not_asked_of_the_hub(name: str) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve_checkpoint(name)
