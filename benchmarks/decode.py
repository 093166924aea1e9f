"""Side by side in one run: drawbar with a draft and without, transformers with disk offload, AirLLM, and the disk.

Every program runs in a process of its own, on the same inflated SmolLM2, the same prompt, greedy, and in a memory
cgroup of 3 GiB where one can be made (page cache counted). transformers gets the same int4 copy as its assistant.
Decoding alone is timed: opening the model, and AirLLM's writing of a second copy, are not in the seconds per token.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import answer
from benchmarks.checkpoints import cache_folder
from benchmarks.measure import fio_speed, forget, machine, prepare, run_recorded, weight_files

CAP = 3 << 30
PEERS = ("transformers", "airllm")
FEW_TOKENS = {"drawbar-none": 6, "airllm": 3}  # one pass a token, so that the seconds of each stand for the rest
AIRLLM = ("torch==2.13.0", "transformers==5.24.0", "airllm==4.0.0")


def airllm_python() -> Path:
    """An interpreter with AirLLM in an environment of its own, made in the cache folder."""
    venv = cache_folder() / "airllm-venv"
    python, done = venv / "bin" / "python", venv / ".installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *AIRLLM], check=True)
        done.touch()
    return python


def commands(target: Path, draft: Path, arguments: argparse.Namespace) -> dict[str, Callable[[], list[str]]]:
    """What is run, by name; a command is made when its turn comes."""
    tokens, memory = arguments.tokens, arguments.memory
    on, place = ["--target", str(target)], ["--scratch", str(cache_folder())]

    def transformers(confidence: float) -> list[str]:
        words = [sys.executable, "-m", "benchmarks.peers.transformers_offload", *on, "--draft", str(draft), *place]
        return [*words, "--tokens", str(tokens), "--confidence", str(confidence)]

    def airllm() -> list[str]:
        words = [str(airllm_python()), "-m", "benchmarks.peers.airllm_layers", *on, "--prompt", answer.PROMPT, *place]
        return [*words, "--tokens", str(FEW_TOKENS["airllm"])]

    chosen: dict[str, Callable[[], list[str]]] = {
        "drawbar": lambda: answer.command(target, draft, tokens, memory, "--ignore-end"),
        "drawbar-none": lambda: answer.command(target, None, FEW_TOKENS["drawbar-none"], memory, "--ignore-end"),
    }
    if "transformers" in arguments.peers:
        chosen["transformers"] = lambda: transformers(0.0)
        chosen["transformers-0.4"] = lambda: transformers(0.4)
    if "airllm" in arguments.peers:
        chosen["airllm"] = airllm
    return chosen


def compare(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run everything that was asked for, one after the other."""
    draft, target = prepare("smollm2"), prepare("inflate", "--gb", f"{arguments.gb:g}")
    results: dict[str, Any] = {
        "machine": machine(),
        "prompt": answer.PROMPT,
        "target_bytes": sum(file.stat().st_size for file in weight_files(target)),
        "memory": arguments.memory,
        "runs": {},
        "fio": [fio_speed(target)],
    }
    for name, command in commands(target, draft, arguments).items():
        console.print(f"running {name}")
        forget(target)
        record = run_recorded(command(), CAP)
        results["runs"][name] = record
        if name == "drawbar":
            results["fio"].append(fio_speed(target))  # the disk's speed wanders: before and after
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1))
    ours = results["runs"]["drawbar"]
    for record in results["runs"].values():
        if "error" not in record and "error" not in ours:
            shared = min(len(record["token_ids"]), len(ours["token_ids"]))
            record["tokens_equal"] = record["token_ids"][:shared] == ours["token_ids"][:shared]
            record["drawbar_times_faster"] = record["seconds_per_token"] / ours["seconds_per_token"]
    return results


def row(name: str, record: dict[str, Any]) -> list[str]:
    """One program's line in the table."""
    if "error" in record:
        return [name, record["error"]]
    tokens = str(len(record["token_ids"]))
    speeds = [f"{record['seconds_per_token']:.3f}", f"{record['tokens_per_pass']:.2f}"]
    peaks = [f"{record[peak] / 2**20:.0f}" if record[peak] else "" for peak in ("peak_rss", "peak_cgroup")]
    same = record.get("tokens_equal")
    factor = f"{record['drawbar_times_faster']:.1f}" if "drawbar_times_faster" in record else ""
    return [name, tokens, *speeds, *peaks, "" if same is None else "yes" if same else "no", factor]


def show(results: dict[str, Any], console: Console) -> None:
    """Print the comparison."""
    table = Table(
        "", "tokens", "s/token", "tokens/pass", "RSS MiB", "cgroup MiB", "same tokens", "drawbar is faster by"
    )
    for name, record in results["runs"].items():
        table.add_row(*row(name, record))
    console.print(table)
    few = " and ".join(f"{name} {count}" for name, count in FEW_TOKENS.items() if name in results["runs"])
    console.print(f"seconds per token from few tokens: {few}; same tokens: as far as both went")
    if "transformers-0.4" in results["runs"]:
        console.print("transformers: always 16 drafted tokens; transformers-0.4: its default, fewer where unsure")
    if any(record["cap"] is None for record in results["runs"].values()):
        console.print("no memory cgroup could be made: nothing was capped, the page cache is not counted")
    disk = [speed for speed in results["fio"] if speed]
    if disk:
        console.print("fio before and after drawbar: " + ", ".join(f"{speed / 1e9:.2f} GB/s" for speed in disk))
    for name in ("drawbar", "drawbar-none"):
        record = results["runs"][name]
        if disk and "error" not in record:
            speed = record["read_bytes_per_s"]
            console.print(
                f"{name}: {speed / 1e9:.2f} GB/s while reading, {speed / (sum(disk) / len(disk)):.0%} of fio's mean; "
                f"reading {record['reading_share']:.0%} of the time"
            )
    console.print_json(data=results["machine"])


def main() -> None:
    """Compare decoders on a target larger than the memory cap."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=main.__doc__)
    parser.add_argument("--gb", type=float, default=8.0, help="size of the target in 10**9 bytes")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--memory", default="2GiB", help="drawbar's budget")
    parser.add_argument("--peers", default=",".join(PEERS), help="any of transformers,airllm; empty for none")
    parser.add_argument("--json", type=Path, help="write everything measured here, also while it runs")
    arguments = parser.parse_args()
    arguments.peers = [peer for peer in arguments.peers.split(",") if peer]
    if unknown := set(arguments.peers) - set(PEERS):
        parser.error(f"unknown peer {', '.join(sorted(unknown))}: choose among {', '.join(PEERS)}")
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=120)
    results = compare(arguments, console)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    show(results, console)
    failed = any("error" in results["runs"][name] for name in ("drawbar", "drawbar-none"))
    raise SystemExit(1 if failed or not results["runs"]["drawbar-none"]["tokens_equal"] else 0)


if __name__ == "__main__":
    main()
