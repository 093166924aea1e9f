"""Whole generations follow the target's distribution: chi-square over thousands of seeded runs of the real loop."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch
from scipy.stats import chisquare

from drawbar.config import SamplingParams, SpeculationConfig
from drawbar.decoder import SpeculativeDecoder
from drawbar.drafting.model import ModelDrafter
from drawbar.models.base import PathCache, Rows, SequenceCache
from drawbar.sampling import Sampler

VOCABULARY = 8
LENGTH = 2
DRAWS = 1_500  # for each case; tests/test_verify.py draws more, without the loop around it
PROMPT = (0,)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Eight numbers at a time are not worth a second thread, and waiting for one takes most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Bigram:
    """Logits that depend on the last token alone."""

    max_context = 64
    vocab_size = VOCABULARY

    def __init__(self, seed: int, scale: float) -> None:
        self.table = torch.randn((VOCABULARY, VOCABULARY), generator=torch.Generator().manual_seed(seed)) * scale

    def new_cache(self, capacity: int) -> PathCache:
        return PathCache()

    def forward(self, batch: Sequence[Rows], caches: Sequence[SequenceCache]) -> list[torch.Tensor]:
        logits = []
        for rows, cache in zip(batch, caches, strict=True):
            assert isinstance(cache, PathCache)
            cache.append(rows)
            logits.append(self.table[[rows.tokens[row] for row in rows.wanted]])
        return logits


TARGET, DRAFT = Bigram(1, 1.5), Bigram(2, 1.5)

CONFIGS = {
    "chain": SpeculationConfig.chain(3),
    "tree": SpeculationConfig(tree_size=12, tree_width=4, tree_depth=3, branching=3),
}


def expected(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of every sequence of `LENGTH` tokens, by the chain rule."""
    sampler = Sampler(params, seed=0)
    step = sampler.processed(TARGET.table).double().softmax(dim=-1)
    chances = {}
    for tokens in itertools.product(range(VOCABULARY), repeat=LENGTH):
        chance = 1.0
        for last, token in zip((*PROMPT, *tokens[:-1]), tokens, strict=True):
            chance *= float(step[last, token])
        chances[tokens] = chance
    return chances


def p_value(draws: Sequence[tuple[int, ...]], params: SamplingParams) -> float:
    """How likely draws as far from the expected distribution as these are; rare sequences are pooled."""
    counts, chances = Counter(draws), expected(params)
    assert all(chances[tokens] > 0 for tokens in counts), "a sequence of probability 0 was drawn"
    usual = [tokens for tokens, chance in chances.items() if chance * len(draws) >= 5]
    observed = [counts[tokens] for tokens in usual]
    wanted = [chances[tokens] * len(draws) for tokens in usual]
    if (left := len(draws) - sum(wanted)) > 1e-6 * len(draws):
        observed.append(len(draws) - sum(observed))
        wanted.append(left)
    return float(chisquare(observed, [w * sum(observed) / sum(wanted) for w in wanted]).pvalue)


def generate(params: SamplingParams, config: SpeculationConfig, draws: int) -> list[tuple[int, ...]]:
    decoder = SpeculativeDecoder(TARGET, ModelDrafter(DRAFT), config)
    results = []
    for seed in range(draws):
        keyed = SamplingParams(params.temperature, params.top_k, params.top_p, seed=seed)
        # One token more than is looked at, so that a draft runs before the last one.
        results.append(decoder.generate(PROMPT, LENGTH + 1, sampling=keyed).token_ids[:LENGTH])
    return results


@pytest.mark.parametrize("acceptance", ["exact", "rejection"])
@pytest.mark.parametrize(
    ("shape", "params"),
    [
        ("chain", SamplingParams(temperature=1.0)),
        ("tree", SamplingParams(temperature=1.0, top_p=0.9)),
        ("chain", SamplingParams(temperature=0.5, top_k=5)),
        ("tree", SamplingParams(temperature=2.0)),
    ],
    ids=["chain T=1", "tree T=1 top-p", "chain T=0.5 top-k", "tree T=2"],
)
def test_generations_follow_the_target(acceptance: str, shape: str, params: SamplingParams) -> None:
    base = CONFIGS[shape]
    config = SpeculationConfig(base.tree_size, base.tree_width, base.tree_depth, base.branching, acceptance=acceptance)  # type: ignore[arg-type]
    assert p_value(generate(params, config, DRAWS), params) > 1e-3


def test_a_lossy_rule_is_found_out() -> None:
    config = SpeculationConfig(3, 1, 3, 1, acceptance="threshold", acceptance_threshold=0.3)
    params = SamplingParams(temperature=1.0)
    assert p_value(generate(params, config, DRAWS), params) < 1e-6
