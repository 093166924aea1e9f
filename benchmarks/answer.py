"""One answer of drawbar in a process of its own: text to stdout as it is verified, figures to a file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from drawbar.config import SpeculationConfig
from drawbar.engine import Engine
from drawbar.hardware import keep_freed_memory
from drawbar.text import TextStream

PROMPT = "Write a Python function that computes the factorial of a number."


def command(target: Path, draft: Path | None, tokens: int, memory: str, *more: str) -> list[str]:
    """The command line that answers `PROMPT`; it still wants a `--record`."""
    words = [sys.executable, "-m", "benchmarks.answer", "--target", str(target), "--tokens", str(tokens)]
    return [*words, "--memory", memory, *(["--draft", str(draft)] if draft else []), *more]


def answer(arguments: argparse.Namespace) -> None:
    """Answer the prompt, greedily, with the default tree."""
    keep_freed_memory()
    with Engine.from_pretrained(
        arguments.target,
        draft=arguments.draft or "none",
        draft_quantize="int4" if arguments.draft else None,
        memory=arguments.memory,
        config=SpeculationConfig.default(),
        context=arguments.context,
    ) as engine:
        prompt = engine.encode([{"role": "user", "content": PROMPT}])
        ends = () if arguments.ignore_end else engine.end_tokens
        before = engine.target.counters()
        generation, text = engine.decoder.open(prompt, arguments.tokens, ends), TextStream(engine.tokenizer)
        for tokens in generation:
            print(text.push(tokens), end="", flush=True)
        print(text.finish(), flush=True)
        output, after = generation.output, engine.target.counters()
        busy = after.busy_s - before.busy_s
        figures = {
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            **output.stats.as_dict(),
            "load_s": engine.load_s,
            "read_bytes_per_s": (after.bytes_read - before.bytes_read) / busy if busy else 0.0,
            "reading_share": busy / output.stats.total_s if output.stats.total_s else 0.0,
        }
        arguments.record.write_text(json.dumps(figures))


def main() -> None:
    """Answer one prompt for a benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.answer", description=main.__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, help="quantised to int4; none without it")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--memory", required=True)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--ignore-end", action="store_true", help="go on behind the model's end token")
    parser.add_argument("--record", type=Path, required=True)
    answer(parser.parse_args())


if __name__ == "__main__":
    main()
