from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from drawbar.config import SamplingParams
from drawbar.errors import NumericalError
from drawbar.sampling import (
    ACCEPTANCE,
    DRAFT_NOISE,
    RESIDUAL_NOISE,
    TARGET_NOISE,
    Sampler,
    draw_seed,
    gumbel,
    uniforms,
)

PURPOSES = (TARGET_NOISE, DRAFT_NOISE, RESIDUAL_NOISE, ACCEPTANCE)
INFINITY = torch.inf

# The largest seeds differ by one in float64's blind spot.
seeds = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1])
keys = st.tuples(seeds, st.integers(0, 2**40), st.sampled_from(PURPOSES))


def random_logits(rows: int, width: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn((rows, width), generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)


# Noise


@given(keys, st.integers(0, 300), st.integers(0, 300))
def test_noise_is_a_function_of_its_key_and_begins_alike(key: tuple[int, int, int], short: int, long: int) -> None:
    short, long = sorted((short, long))
    assert np.array_equal(uniforms(*key, short), uniforms(*key, long)[:short])
    assert torch.equal(gumbel(*key, short), gumbel(*key, long)[:short])


@given(keys, keys)
def test_different_keys_give_different_noise(first: tuple[int, int, int], second: tuple[int, int, int]) -> None:
    same = np.array_equal(uniforms(*first, 4), uniforms(*second, 4))
    assert same == (first == second)


def test_every_neighbouring_key_has_noise_of_its_own() -> None:
    near = [*range(20), *range(2**63 - 10, 2**63 + 10), *range(2**64 - 20, 2**64)]
    streams = {
        tuple(uniforms(seed, position, purpose, 2))
        for seed, position, purpose in itertools.product(near, range(20), PURPOSES)
    }
    assert len(streams) == len(near) * 20 * len(PURPOSES)


def test_a_seed_gives_the_same_noise_in_every_release() -> None:
    # Pinned: a seed that was written down must keep its meaning.
    assert uniforms(0, 0, TARGET_NOISE, 2).tolist() == [0.011546754286331562, 0.24154919656271823]
    assert uniforms(7, 11, RESIDUAL_NOISE, 2).tolist() == [0.8148338467013428, 0.8051817258734636]


@given(keys)
def test_uniforms_lie_strictly_inside(key: tuple[int, int, int]) -> None:
    values = uniforms(*key, 1000)
    assert values.dtype == np.float64
    assert ((values > 0) & (values < 1)).all()


def test_the_outermost_raw_numbers_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    class Outermost:
        def __init__(self, **_: Any) -> None:
            pass

        def random_raw(self, count: int) -> np.ndarray:
            return np.array([0, 2**64 - 1], dtype=np.uint64)

    monkeypatch.setattr(np.random, "Philox", Outermost)
    low, high = uniforms(0, 0, 0, 2)
    assert 0 < low < high < 1
    noise = gumbel(0, 0, 0, 2)
    assert noise.dtype == torch.float32
    assert torch.isfinite(noise).all()


def test_noise_is_standard_gumbel_along_both_axes() -> None:
    along_ids = gumbel(3, 5, TARGET_NOISE, 20_000).double().numpy()
    along_positions = np.array([float(gumbel(3, position, TARGET_NOISE, 1)[0]) for position in range(5_000)])
    along_seeds = np.array([float(gumbel(seed, 5, TARGET_NOISE, 1)[0]) for seed in range(5_000)])
    for values in (along_ids, along_positions, along_seeds):
        assert kstest(values, "gumbel_r").pvalue > 1e-4


def test_purposes_are_uncorrelated() -> None:
    rows = np.stack([uniforms(3, 5, purpose, 20_000) for purpose in PURPOSES])
    correlation = np.corrcoef(rows) - np.eye(len(PURPOSES))
    assert np.abs(correlation).max() < 0.05


def test_a_sampler_hands_out_its_seeds_noise() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, seed=9))
    for position in (*range(100), *range(100)):  # more than are cached, twice
        assert torch.equal(sampler.noise(position, 5), gumbel(9, position, TARGET_NOISE, 5))
    assert torch.equal(sampler.noise(3, 5, DRAFT_NOISE), gumbel(9, 3, DRAFT_NOISE, 5))
    assert [sampler.uniform(4, index) for index in range(5)] == uniforms(9, 4, ACCEPTANCE, 5).tolist()


def test_where_the_seed_comes_from() -> None:
    assert Sampler(SamplingParams(seed=5)).seed == 5
    assert Sampler(SamplingParams(seed=5), seed=0).seed == 0
    fresh = {Sampler(SamplingParams()).seed for _ in range(20)}
    assert len(fresh) > 1
    assert all(0 <= seed < 2**32 for seed in fresh | {draw_seed()})


# Processing


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10**6},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 1.0},
    {"min_p": 0.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.9},
    {"top_k": 20, "min_p": 0.1},
    {"top_p": 0.7, "min_p": 0.02},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


def of_transformers(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What `generate` samples from, built from its own processors in its own order."""
    processors = LogitsProcessorList()
    if params.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k is not None:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p is not None and params.top_p < 1.0:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p is not None:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors(torch.zeros((len(logits), 1), dtype=torch.long), logits.float())


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_what_is_kept_is_what_transformers_keeps(temperature: float, filters: dict[str, Any]) -> None:
    params = SamplingParams(temperature, seed=0, **filters)
    for dtype, width in itertools.product((torch.float32, torch.bfloat16), (5, 300)):
        logits = random_logits(100, width, seed=width, dtype=dtype)
        logits[::7, 2] = -INFINITY
        ours, theirs = Sampler(params).processed(logits), of_transformers(logits, params)
        assert ours.dtype == torch.float32
        assert torch.equal(ours.isfinite(), theirs.isfinite())
        torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_row_is_processed_as_if_alone(filters: dict[str, Any]) -> None:
    for temperature, dtype in itertools.product((0.0, 0.7), (torch.float32, torch.bfloat16)):
        sampler = Sampler(SamplingParams(temperature, seed=0, **filters))
        logits = random_logits(11, 5_003, dtype=dtype)
        logits[3] = logits[3].round()  # many ties
        logits[5, 100:] = -INFINITY
        together = sampler.processed(logits)
        alone = torch.cat([sampler.processed(row[None]) for row in logits])
        assert torch.equal(together, alone)
        assert torch.equal(sampler.processed(logits[::2]), alone[::2])


def test_processing_leaves_the_logits_alone() -> None:
    logits = random_logits(3, 50)
    before = logits.clone()
    Sampler(SamplingParams(0.7, top_k=3, top_p=0.9, seed=0)).processed(logits)
    Sampler(SamplingParams()).choose(logits[0], 0)
    assert torch.equal(logits, before)


def test_no_rows_are_no_rows() -> None:
    for params in (SamplingParams(), SamplingParams(1.0, top_k=2, top_p=0.9, min_p=0.1)):
        assert Sampler(params).processed(torch.zeros((0, 8))).shape == (0, 8)


def test_a_draft_may_have_a_temperature_of_its_own() -> None:
    logits = random_logits(3, 50)
    sampler = Sampler(SamplingParams(0.7, top_k=5, seed=0))
    hot = Sampler(SamplingParams(1.9, top_k=5, seed=0))
    assert torch.equal(sampler.processed(logits, 1.9), hot.processed(logits))
    assert torch.equal(sampler.processed(logits, 0.0), Sampler(SamplingParams()).processed(logits))


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-9, 1e-6, 1e-5, 0.7, 1e30, 1e39, 1e300])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_no_temperature_makes_nan(temperature: float, filters: dict[str, Any]) -> None:
    largest = torch.finfo(torch.float32).max
    logits = torch.tensor(
        [
            [1.0, -INFINITY, 2.0, -1.0],
            [largest, -largest, 0.0, -INFINITY],
            [1e-40, 0.0, -1e-40, -INFINITY],
            [-largest, -INFINITY, -INFINITY, -INFINITY],
            [5.0, 5.0, 5.0, 5.0],
        ]
    )
    sampler = Sampler(SamplingParams(temperature, seed=0, **filters))
    scores = sampler.processed(logits)
    assert not scores.isnan().any()
    assert (scores <= 0).all()
    assert (scores.amax(dim=-1) == 0).all()
    assert (scores[logits == -INFINITY] == -INFINITY).all()
    chances = scores.double().softmax(dim=-1)
    torch.testing.assert_close(chances.sum(dim=-1), torch.ones(len(logits), dtype=torch.float64))


@pytest.mark.parametrize(
    "row",
    [
        [torch.nan, 0.0, 1.0],
        [0.0, 1.0, torch.nan],
        [0.0, INFINITY, 1.0],
        [-INFINITY, -INFINITY, -INFINITY],
        [-INFINITY, torch.nan, -INFINITY],
        [INFINITY, -INFINITY, 0.0],
    ],
)
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(1.0, seed=0), SamplingParams(1.0, top_k=1, seed=0)]
)
def test_logits_without_a_finite_peak_are_refused(row: list[float], params: SamplingParams) -> None:
    sampler = Sampler(params)
    with pytest.raises(NumericalError, match="not finite"):
        sampler.choose(torch.tensor(row), 0)
    with pytest.raises(NumericalError, match="not finite"):
        sampler.processed(torch.stack([torch.zeros(3), torch.tensor(row), torch.zeros(3)]))


# Drawing


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-9, 1e-6])
def test_next_to_zero_is_greedy(temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature, top_k=50, top_p=0.9, min_p=0.1, seed=3))
    assert sampler.greedy
    # bfloat16 logits of little spread tie a lot.
    logits = random_logits(200, 1_000, dtype=torch.bfloat16)
    peaks = logits.amax(dim=-1, keepdim=True)
    assert ((logits == peaks).sum(dim=-1) > 1).any()
    for position, (row, peak) in enumerate(zip(logits, peaks, strict=True)):
        first = int((row == peak).nonzero()[0])
        assert sampler.choose(row, position) == first
    # Not half a chance for each of two tied tokens: the distribution is as greedy as the choice.
    assert torch.equal(sampler.processed(logits), Sampler(SamplingParams()).processed(logits))
    assert (sampler.processed(logits).isfinite().sum(dim=-1) == 1).all()
    assert sampler.choose(torch.tensor([0.0, 3.0, 3.0, 3.0]), 0) == 1
    assert sampler.choose(torch.zeros(4), 0) == 0


def chi_square(draws: Sequence[int], chances: torch.Tensor) -> float:
    counts = Counter(draws)
    possible = [token for token in range(len(chances)) if chances[token] > 0]
    assert set(counts) <= set(possible)
    expected = np.array([float(chances[token]) for token in possible]) * len(draws)
    assert expected.min() > 5
    return float(chisquare([counts[token] for token in possible], expected).pvalue)


@pytest.mark.parametrize(
    ("params", "seed"),
    [
        (SamplingParams(1.0), 1),
        (SamplingParams(0.6, top_k=4), 2),
        (SamplingParams(2.0, top_p=0.8), 3),
        (SamplingParams(1.0, min_p=0.1), 2**64 - 1),
    ],
)
def test_choices_follow_the_softmax(params: SamplingParams, seed: int) -> None:
    sampler = Sampler(params, seed)
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, -INFINITY, 1.0, -0.5])
    chances = of_transformers(logits[None], params)[0].double().softmax(dim=-1)
    draws = [sampler.choose(logits, position) for position in range(20_000)]
    assert chi_square(draws, chances) > 1e-4
    # The same test finds a distribution out that is a little off.
    assert chi_square(draws, 0.75 * chances + 0.25 * (chances > 0) / (chances > 0).sum()) < 1e-2


def test_choices_over_seeds_follow_the_softmax() -> None:
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0])
    params = SamplingParams(1.0)
    draws = [Sampler(params, seed).choose(logits, 3) for seed in range(5_000)]
    assert chi_square(draws, logits.double().softmax(dim=-1)) > 1e-4


def test_choices_next_to_each_other_are_independent() -> None:
    sampler = Sampler(SamplingParams(1.0), 4)
    logits = torch.tensor([0.0, 0.5, 1.0])
    draws = [sampler.choose(logits, position) for position in range(20_000)]
    chances = logits.double().softmax(dim=-1)
    pairs = [3 * first + second for first, second in zip(draws[::2], draws[1::2], strict=True)]
    assert chi_square(pairs, torch.outer(chances, chances).flatten()) > 1e-4


def test_a_choice_depends_on_its_own_row_and_position_alone() -> None:
    params = SamplingParams(1.0, top_p=0.95, seed=8)
    logits = random_logits(50, 400)
    forwards, backwards = Sampler(params), Sampler(params)
    first = [forwards.choose(logits[position], position) for position in range(50)]
    second = [backwards.choose(logits[position], position) for position in reversed(range(50))]
    assert first == second[::-1]
    assert len(set(first)) > 10


def test_removed_tokens_are_never_chosen() -> None:
    # Every token is nearly as likely as any other, and half of them are removed.
    logits = random_logits(1, 64)[0] * 1e-3
    logits[::2] = -INFINITY
    sampler = Sampler(SamplingParams(1e30, seed=2))
    chosen = {sampler.choose(logits, position) for position in range(2_000)}
    assert chosen == set(range(1, 64, 2))
    kept = Sampler(SamplingParams(1.0, top_k=3, seed=2))
    assert {kept.choose(logits, position) for position in range(500)} == set(logits.topk(3).indices.tolist())


def test_draws_follow_the_probabilities() -> None:
    sampler = Sampler(SamplingParams(1.0), 5)
    chances = torch.tensor([0.0, 0.4, 0.1, 0.0, 0.25, 0.25], dtype=torch.float64)
    draws = [sampler.draw(chances, position) for position in range(20_000)]
    assert chi_square(draws, chances) > 1e-4


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32), st.sets(st.integers(0, 19), min_size=1), st.data())
def test_a_token_of_no_probability_is_never_drawn(
    seed: int, position: int, support: set[int], data: st.DataObject
) -> None:
    chances = torch.zeros(20, dtype=torch.float64)
    for token in support:
        chances[token] = data.draw(st.sampled_from([1.0, 1e-3, 1e-12, 1e-300, 5e-324]))
    assert Sampler(SamplingParams(1.0), seed).draw(chances, position) in support


@pytest.mark.parametrize("chances", [[0.0, 0.0], [torch.nan, 1.0], []])
def test_nothing_to_draw_is_an_error(chances: list[float]) -> None:
    with pytest.raises(NumericalError, match="no token"):
        Sampler(SamplingParams(1.0), 0).draw(torch.tensor(chances, dtype=torch.float64), 0)


def test_a_draw_has_noise_of_its_own() -> None:
    # Were it the noise of the choice, a token drawn after a rejection would follow the rejected one.
    sampler = Sampler(SamplingParams(1.0), 6)
    flat = torch.full((8,), 1 / 8, dtype=torch.float64)
    pairs = [8 * sampler.choose(flat, p) + sampler.draw(flat, p) for p in range(5_000)]
    assert chi_square(pairs, torch.outer(flat, flat).flatten()) > 1e-4
