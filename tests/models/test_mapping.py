"""From tensors to parameters: ties, shapes, dtypes, experts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drawbar.errors import CheckpointError
from drawbar.models.base import Rows
from drawbar.models.checkpoint import OpenCheckpoint, _owned
from drawbar.models.mapping import Recipe
from drawbar.models.resident import ResidentModel, resident_bytes
from tests.models.tiny import edit_tensors, make_checkpoint, reference, run, tokens

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(("flag", "head", "embedding", "equal"), [*itertools.product((True, False), repeat=4)])
def test_ties_are_what_transformers_makes_of_them(
    flag: bool, head: bool, embedding: bool, equal: bool, tmp_path: Path
) -> None:
    make_checkpoint("llama", tmp_path, torch.float32)
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": flag}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        if equal:
            tensors[HEAD] = tensors[EMBEDDING].clone()
        for name, kept in ((HEAD, head), (EMBEDDING, embedding)):
            if not kept:
                del tensors[name]

    edit_tensors(tmp_path, edit)
    if not (head and embedding) and not (flag and (head or embedding)):
        with pytest.raises(CheckpointError, match="missing"):
            ResidentModel.from_pretrained(tmp_path)
        return
    model = ResidentModel.from_pretrained(tmp_path)
    assert model.nbytes == pytest.approx(resident_bytes(OpenCheckpoint.open(tmp_path), None), rel=0.01)
    prompt = tokens(6)
    with torch.no_grad():
        expected = reference(tmp_path)(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(run(model, Rows(prompt), model.new_cache(8))[0], expected, atol=2e-4, rtol=2e-4)


NORM = "model.layers.1.input_layernorm.weight"


def _without(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[NORM]


def _surplus(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.extra.weight"] = torch.ones(3)


def _shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NORM] = torch.ones(63)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without, [NORM, "missing"]),
        (_surplus, ["model.layers.0.extra.weight", "no place"]),
        (_shape, [NORM, "[63]", "[64]"]),
    ],
)
def test_faults_of_a_checkpoint_name_the_tensor(
    change: Callable[[dict[str, torch.Tensor]], None], words: list[str], tmp_path: Path
) -> None:
    make_checkpoint("llama", tmp_path)
    edit_tensors(tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        OpenCheckpoint.open(tmp_path)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_missing_expert_is_not_filled_in(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.experts.3.down_proj.weight"]

    edit_tensors(tmp_path, drop)
    with pytest.raises(CheckpointError, match="experts"):
        OpenCheckpoint.open(tmp_path)


def test_frequencies_that_old_versions_saved_are_left_out(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    OpenCheckpoint.open(tmp_path)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_parameters_are_those_of_transformers(architecture: str, checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(architecture, torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        model = ResidentModel.from_pretrained(folder, dtype=str(dtype).removeprefix("torch."))
        ours = {
            name.replace(".layer.", ".").replace("lm_head.head.", "lm_head."): tensor
            for name, tensor in model._model.state_dict().items()
        }
        theirs = reference(folder, dtype).state_dict()
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


def test_parts_of_a_split_tensor_do_not_stay_in_the_staging_buffer() -> None:
    staging = torch.arange(12.0).view(4, 3)

    class Split(Recipe):
        def build(self, tensors: object) -> dict[str, torch.Tensor]:
            return {"top": staging[:2], "bottom": staging[2:], "same": staging[:2]}

    made = _owned([Split({})], {"both": staging})
    staging.fill_(-1)
    assert made["top"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert made["bottom"].flatten().tolist() == [6, 7, 8, 9, 10, 11]
    assert made["same"] is made["top"]
