"""Does the budget hold? The 8 GB target in a memory cgroup of 3 GiB, measured from outside against budget + 300 MiB."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from benchmarks import answer
from benchmarks.measure import forget, prepare, run_recorded
from drawbar.config import format_bytes, parse_bytes

CAP = 3 << 30
MARGIN = 300 << 20  # the interpreter and its libraries


def main() -> None:
    """Answer under a cap and compare what was used with the budget; 1 if it did not hold, or did not end."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=main.__doc__)
    parser.add_argument("--gb", type=float, default=8.0, help="size of the target in 10**9 bytes")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    draft, target = prepare("smollm2"), prepare("inflate", "--gb", f"{arguments.gb:g}")
    console = Console(highlight=False)
    forget(target)
    record = run_recorded(answer.command(target, draft, arguments.tokens, arguments.memory), CAP)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1))
    if "error" in record:
        raise SystemExit(f"it did not run to its end: {record['error']}")
    allowed = parse_bytes(arguments.memory) + MARGIN
    capped = "in a cgroup of 3 GiB" if record["cap"] else "no cgroup could be made"
    console.print(f"{len(record['token_ids'])} tokens, finished by {record['finish_reason']}; {capped}")
    console.print(f"budget {arguments.memory}, allowed {format_bytes(allowed)}")
    peaks = {"cgroup, page cache included": record["peak_cgroup"], "RSS, shared libraries included": record["peak_rss"]}
    for label, peak in peaks.items():
        if peak is not None:
            console.print(
                f"peak of {label}: {format_bytes(peak)}, {'within' if peak <= allowed else 'MORE THAN ALLOWED'}"
            )
    raise SystemExit(any(peak is not None and peak > allowed for peak in peaks.values()))


if __name__ == "__main__":
    main()
