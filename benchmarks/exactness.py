"""The exactness matrix: every way of drafting must give, bit for bit in bfloat16, the tokens of one-token decoding."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoints import fetch_smollm2, random_checkpoint
from drawbar.config import SamplingParams, SpeculationConfig
from drawbar.decoder import SpeculativeDecoder
from drawbar.drafting.base import Drafter
from drawbar.drafting.model import ModelDrafter
from drawbar.models.resident import ResidentModel
from drawbar.text import encode_chat, load_tokenizer

PROMPTS = (
    "Why is the sky blue?",
    "Write a Python function that computes the factorial of a number.",
    "Tell me a short story about a lighthouse keeper.",
    "List five tips for better sleep.",
    "If a train travels 60 miles in 1.5 hours, what is its average speed? Think step by step.",
    "Rewrite in plain words: The mitochondrion is the principal site of adenosine triphosphate synthesis.",
    "Summarize: The Industrial Revolution began in Great Britain in the 18th century and later spread all over, "
    "replacing hand production by machines, and changing how people lived and worked.",
    "Translate to French: The weather is nice today, and we are going to the beach.",
)

SAMPLINGS = {
    "greedy": SamplingParams(seed=1),
    "T=1": SamplingParams(temperature=1.0, seed=1),
    "T=0.7 top-p 0.95": SamplingParams(temperature=0.7, top_p=0.95, seed=1),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One way of drafting under one way of sampling.

    Attributes:
        draft: which way of drafting.
        sampling: which way of sampling.
        differing: prompts whose tokens differ from those of one-token decoding.
        tokens: tokens compared.
        tokens_per_pass: mean over all prompts.
        seconds: how long it took.
    """

    draft: str
    sampling: str
    differing: int
    tokens: int
    tokens_per_pass: float
    seconds: float


def drafters(folder: Path) -> Mapping[str, tuple[Drafter | None, SpeculationConfig]]:
    """Every way of drafting: none, right, wrong and in between."""
    random = random_checkpoint(folder, folder.with_name("SmolLM2-random"))
    int4 = ResidentModel.from_pretrained(folder, quantize="int4")
    return {
        "no draft": (None, SpeculationConfig.default()),
        "chain of 5": (ModelDrafter(int4), SpeculationConfig.chain(5)),
        "tree of 64": (ModelDrafter(int4), SpeculationConfig(tree_size=64, tree_width=16, tree_depth=16)),
        "tree of 256": (
            ModelDrafter(int4),
            SpeculationConfig(tree_size=256, tree_width=24, tree_depth=24, branching=6),
        ),
        "random weights": (
            ModelDrafter(ResidentModel.from_pretrained(random)),
            SpeculationConfig(tree_size=16, tree_width=4, tree_depth=6),
        ),
        "the target itself": (ModelDrafter(ResidentModel.from_pretrained(folder)), SpeculationConfig.chain(9)),
    }


def matrix(folder: Path, prompts: Sequence[str], max_new_tokens: int) -> Iterator[Cell]:
    """Fill the matrix cell by cell; the first of each sampling is the reference of the others."""
    tokenizer = load_tokenizer(folder)
    target = ResidentModel.from_pretrained(folder)
    encoded = [encode_chat(tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]
    ways = drafters(folder)
    for sampling_name, sampling in SAMPLINGS.items():
        reference: list[tuple[int, ...]] = []
        for draft_name, (drafter, config) in ways.items():
            decoder, started = SpeculativeDecoder(target, drafter, config), time.perf_counter()
            answers = [decoder.generate(prompt, max_new_tokens, sampling=sampling).token_ids for prompt in encoded]
            reference = reference or answers
            yield Cell(
                draft_name,
                sampling_name,
                sum(ours != theirs for ours, theirs in zip(answers, reference, strict=True)),
                sum(len(answer) for answer in answers),
                decoder.stats.tokens_per_pass,
                time.perf_counter() - started,
            )


def main() -> None:
    """Run the matrix on SmolLM2 and print it; exit 1 if anything differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactness", description=main.__doc__)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=200)
    arguments = parser.parse_args()
    differing = 0
    for cell in matrix(fetch_smollm2(), PROMPTS[: arguments.prompts], arguments.tokens):
        differing += cell.differing
        verdict = "identical" if not cell.differing else f"{cell.differing} prompts DIFFER"
        print(
            f"{cell.sampling:18} {cell.draft:18} {cell.tokens:6} tokens {verdict:18} "
            f"{cell.tokens_per_pass:5.2f} tokens per pass  {cell.seconds:6.1f} s",
            flush=True,
        )
    raise SystemExit(1 if differing else 0)


if __name__ == "__main__":
    main()
