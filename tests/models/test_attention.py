"""Exact attention against attention along each row's own path."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drawbar.errors import UnsupportedModelError
from drawbar.kv_cache import KVCache
from drawbar.models import attention
from drawbar.models.attention import PassCache, Slice, Span, exact_attention
from drawbar.models.base import Rows
from tests.models.tiny import tree_of

HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH, SCALE = 4, 2, 6, 3, 0.4
PARENTS = (-1, -1, 0, 0, 2, 4, 5, 1)


def draw(heads: int, rows: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn((1, heads, rows, width), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Sequence:
    """One sequence of a pass: its cache (after a first chain), its rows, and each row's path of keys."""

    def __init__(self, context: int, chain: int, parents: tuple[int, ...], seed: int) -> None:
        self.cache, total = KVCache(1, 8), context + chain + len(parents)
        self.rows = Rows.of((5,) * chain, tree_of(parents))
        self.keys, self.values = draw(KEY_HEADS, total, WIDTH, seed), draw(KEY_HEADS, total, VALUE_WIDTH, seed + 1)
        if context:
            self.cache.write(0, 0, self.keys[:, :, :context], self.values[:, :, :context], context)
            self.cache.commit(context, ())
        tree = tree_of(parents)
        self.new = chain + len(parents)
        self.context = context
        base = list(range(context + chain))
        self.paths = [base[: context + row + 1] for row in range(chain)]
        self.paths += [base + [len(base) + step for step in tree.path(node)] for node in range(len(parents))]


def compute(sequences: list[Sequence], query: torch.Tensor, pieces: int = 256, **options: object) -> torch.Tensor:
    spans, start = [], 0
    for sequence in sequences:
        spans.append(Span(sequence.rows, sequence.cache, start))
        start += sequence.new
    new_keys = torch.cat([s.keys[:, :, s.context :] for s in sequences], dim=2)
    new_values = torch.cat([s.values[:, :, s.context :] for s in sequences], dim=2)
    results = []
    for first in range(0, start, pieces):
        last = min(first + pieces, start)
        layout = Slice(spans, first, last, last - first)
        cut = slice(first, last)
        keys, values = PassCache(layout, lambda count: count + 3).update(new_keys[:, :, cut], new_values[:, :, cut], 0)
        result, _ = exact_attention(
            nn.Module(),
            query[:, :, cut],
            keys,
            values,
            None,
            SCALE,
            layout=layout,
            **options,  # type: ignore[arg-type]
        )
        results.append(result)
    return torch.cat(results, dim=1)


def naive(
    sequences: list[Sequence],
    query: torch.Tensor,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    output, row = [], 0
    for sequence in sequences:
        for path in sequence.paths:
            seen = path[-window:] if window else path  # a path's keys lie one position apart
            heads = []
            for head in range(HEADS):
                key = sequence.keys[0, head // (HEADS // KEY_HEADS), seen]
                value = sequence.values[0, head // (HEADS // KEY_HEADS), seen]
                scores = key @ query[0, head, row] * SCALE
                scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                scores = scores if sinks is None else torch.cat((scores, sinks[head : head + 1]))
                heads.append(scores.softmax(0)[: len(seen)] @ value)
            output.append(torch.stack(heads))
            row += 1
    return torch.stack(output)[None]


CASES = {
    "chain": [Sequence(0, 9, (), 1)],
    "tree": [Sequence(7, 2, PARENTS, 2)],
    "tree alone": [Sequence(7, 0, PARENTS, 3)],
    "batch": [Sequence(5, 1, PARENTS, 4), Sequence(0, 12, (), 6), Sequence(9, 0, (-1, 0, 0), 8)],
}
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 3},
    "softcap": {"softcap": 0.7},
    "sinks": {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("score_bytes", "pieces"), [(48 << 20, 256), (1, 256), (2000, 256), (48 << 20, 4)])
def test_rows_see_their_own_path(
    case: str, option: str, score_bytes: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SCORE_BYTES", score_bytes)
    sequences, options = CASES[case], OPTIONS[option]
    query = draw(HEADS, sum(sequence.new for sequence in sequences), WIDTH, 99)
    names = {"sliding_window": "window", "s_aux": "sinks"}
    expected = naive(sequences, query, **{names.get(name, name): value for name, value in options.items()})  # type: ignore[arg-type]
    torch.testing.assert_close(compute(sequences, query, pieces, **options), expected, atol=1e-12, rtol=1e-12)


def test_a_window_counts_positions_also_of_nodes_that_earlier_passes_left() -> None:
    cache = KVCache(1, 8)
    cache.write(0, 0, draw(1, 5, 2, 0), draw(1, 5, 2, 0), 5)
    cache.commit(3, (1, 1))
    visible = torch.tensor([[False, True, True]])
    span = Span(Rows((), (7,), (2,), visible), cache, 0)
    assert span.positions().tolist() == [4] and span.key_positions().tolist() == [0, 1, 2, 3, 3, 4]
    assert span.mask(0, 1, None).tolist() == [[True, True, True, False, True, True]]
    assert span.mask(0, 1, 3).tolist() == [[False, False, True, False, True, True]]


@pytest.mark.parametrize("name", ["head_mask", "cu_seq_lens_q", "position_bias"])
def test_what_is_not_known_is_refused_by_name(name: str) -> None:
    query = draw(HEADS, 9, WIDTH, 1)
    with pytest.raises(UnsupportedModelError, match=name):
        compute(CASES["chain"], query, **{name: torch.ones(1)})


def test_a_mask_or_keys_on_both_sides_are_refused() -> None:
    query = draw(HEADS, 1, WIDTH, 1)
    with pytest.raises(UnsupportedModelError, match="mask of its own"):
        exact_attention(nn.Module(), query, query, query, torch.ones(1), SCALE)
    with pytest.raises(UnsupportedModelError, match="both sides"):
        compute(CASES["chain"], draw(HEADS, 9, WIDTH, 1), is_causal=False)


def test_masks_of_long_prompts_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MASK_BYTES", 100)
    span = Span(Rows((1,) * 40), KVCache(1), 0)
    small, large = (span.blocked(0, n, None, torch.device("cpu")) for n in (5, 40))
    assert span.blocked(0, 5, None, torch.device("cpu")) is small
    assert span.blocked(0, 40, None, torch.device("cpu")) is not large
