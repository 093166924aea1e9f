from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from drawbar.config import SamplingParams
from drawbar.errors import ConfigurationError
from drawbar.sampling import DRAFT_NOISE, Sampler
from drawbar.tree import ROOT, TokenTree
from drawbar.verify import Verification, verify_exact, verify_rejection, verify_threshold

#       root
#      /    \
#     5      6      nodes 0, 1
#    / \     |
#   7   8    7      nodes 2, 3, 4
#   |
#   9               node 5
TREE = TokenTree((5, 6, 7, 8, 7, 9), (-1, -1, 0, 0, 1, 2), (0.0,) * 6)


class Told:
    """Chooses what it was told to, by node, and notes the nodes that it was asked for."""

    def __init__(self, tokens: dict[int, int]) -> None:
        self.tokens = tokens
        self.asked: list[int] = []

    def __call__(self, node: int) -> int:
        self.asked.append(node)
        return self.tokens[node]


def distribution(*chances: float) -> torch.Tensor:
    return torch.tensor(chances, dtype=torch.float64)


class Residuals:
    """Draws always the same token, and notes what it was to draw from."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.seen: list[torch.Tensor] = []

    def __call__(self, node: int, residual: torch.Tensor) -> int:
        self.seen.append(residual)
        return self.token


def not_asked(*_: object) -> int:
    raise AssertionError("nothing is to be drawn here")


# Exact


@pytest.mark.parametrize(
    ("tokens", "path", "next_token", "rejected"),
    [
        ({ROOT: 1}, (), 1, True),  # never right
        ({ROOT: 7}, (), 7, True),  # right only further down
        ({ROOT: 5, 0: 7, 2: 9, 5: 3}, (0, 2, 5), 3, False),  # right to the end
        ({ROOT: 6, 1: 7, 4: 9}, (1, 4), 9, False),  # the same token elsewhere does not help
        ({ROOT: 5, 0: 9}, (0,), 9, True),  # right once
        ({ROOT: 5, 0: 8, 3: 9}, (0, 3), 9, False),
    ],
)
def test_exact_follows_the_targets_own_tokens(
    tokens: dict[int, int], path: tuple[int, ...], next_token: int, rejected: bool
) -> None:
    choose = Told(tokens)
    assert verify_exact(TREE, choose) == Verification(path, next_token, rejected)
    assert choose.asked == [ROOT, *path]


def test_exact_without_a_draft_is_one_token() -> None:
    assert verify_exact(TokenTree(), Told({ROOT: 4})) == Verification((), 4, False)


VOCABULARY = 5


class Table:
    """Logits that depend on the last two tokens; ties and impossible tokens among them."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = (torch.randn((VOCABULARY, VOCABULARY, VOCABULARY), generator=generator) * 2).round() / 2
        self.rows[:, :, 1:][
            torch.rand((VOCABULARY, VOCABULARY, VOCABULARY - 1), generator=generator) < 0.2
        ] = -torch.inf

    def __call__(self, context: Sequence[int]) -> torch.Tensor:
        return self.rows[context[-2], context[-1]]


PROMPT = [0, 1]
LENGTH = 12


@st.composite
def drafts(draw: st.DrawFn) -> TokenTree:
    """Any tree over the small vocabulary, often right."""
    nodes: dict[tuple[int, int], None] = {}
    for node in range(draw(st.integers(0, 12))):
        pair = (draw(st.integers(ROOT, node - 1)), draw(st.integers(0, VOCABULARY - 1)))
        if pair[0] < len(nodes):
            nodes.setdefault(pair)
    return TokenTree(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes), (0.0,) * len(nodes))


@given(
    st.integers(0, 50),
    st.sampled_from(
        [SamplingParams(), SamplingParams(1.0), SamplingParams(0.7, top_k=3, top_p=0.9), SamplingParams(2.0, min_p=0.1)]
    ),
    st.integers(0, 2**64 - 1),
    st.lists(drafts(), min_size=LENGTH, max_size=LENGTH),
)
def test_exact_tokens_are_those_of_one_at_a_time_whatever_was_drafted(
    table: int, params: SamplingParams, seed: int, trees: list[TokenTree]
) -> None:
    model, sampler = Table(table), Sampler(params, seed)
    one_by_one = list(PROMPT)
    for _ in range(LENGTH):
        one_by_one.append(sampler.choose(model(one_by_one), len(one_by_one)))

    context = list(PROMPT)
    for tree in trees:
        branches = {node: context + [tree.tokens[step] for step in tree.path(node)] for node in range(ROOT, len(tree))}
        result = verify_exact(
            tree,
            lambda node, branches=branches: sampler.choose(model(branches[node]), len(branches[node])),  # type: ignore[misc]
        )
        assert result.rejected == bool(tree.children(result.path[-1] if result.path else ROOT))
        context += [*(tree.tokens[node] for node in result.path), result.next_token]
    assert len(context) >= len(one_by_one)
    assert context[: len(one_by_one)] == one_by_one


# Rejection

TARGET = distribution(0.5, 0.3, 0.2, 0.0)
PROPOSAL = torch.tensor([0.2, 0.5, 0.3, 0.0])


def siblings(tokens: Sequence[int], proposal: torch.Tensor) -> TokenTree:
    count = len(tokens)
    return TokenTree(tuple(tokens), (ROOT,) * count, (0.0,) * count, {ROOT: proposal})


@pytest.mark.parametrize(("uniform", "accepted"), [(0.59, True), (0.61, False)])
def test_rejection_accepts_with_the_ratio_of_probabilities(uniform: float, accepted: bool) -> None:
    draw = Residuals(0)
    result = verify_rejection(siblings([1], PROPOSAL), lambda _: TARGET, lambda *_: uniform, draw)
    assert result == Verification((0,) if accepted else (), 0, rejected=not accepted)
    # After a rejection: what the target gives more of than the proposal.
    torch.testing.assert_close(draw.seen, [TARGET if accepted else distribution(1, 0, 0, 0)])


def test_rejection_renormalises_the_proposal_over_the_siblings_that_are_left() -> None:
    target, proposal = distribution(0.1, 0.4, 0.5), torch.tensor([0.5, 0.25, 0.25])
    tree = siblings([0, 1], proposal)
    # Token 0 is accepted below 0.2. What is left is (0, 0.15, 0.25) / 0.4 against (0, 0.5, 0.5): accepted below 0.75.
    for uniforms, accepted in (((0.21, 0.74), True), ((0.21, 0.76), False)):
        draw = Residuals(2)
        result = verify_rejection(tree, lambda _: target, lambda _, index, draws=uniforms: draws[index], draw)  # type: ignore[misc]
        assert result == Verification((1,) if accepted else (), 2, rejected=not accepted)
        torch.testing.assert_close(draw.seen, [target if accepted else distribution(0, 0, 1)])


@pytest.mark.parametrize("uniform", [2.0**-53, 1e-300, 5e-324, 0.0])
def test_what_the_target_rules_out_is_never_accepted(uniform: float) -> None:
    target = distribution(0.0, 1.0, 0.0)
    for proposal in ([0.9, 0.05, 0.05], [1.0, 0.0, 0.0], [1e-30, 1.0, 1e-30]):
        tree = siblings([0, 2], torch.tensor(proposal))
        result = verify_rejection(tree, lambda _: target, lambda *_: uniform, lambda _, left: int(left.argmax()))
        assert result == Verification((), 1, True)


@given(st.permutations(range(5)), st.integers(0, 5), st.integers(0, 4), st.floats(2.0**-53, 1 - 2.0**-53), st.data())
def test_rejection_of_a_greedy_target_accepts_exactly_its_token(
    order: list[int], count: int, best: int, uniform: float, data: st.DataObject
) -> None:
    weights = torch.tensor([data.draw(st.floats(1e-6, 1.0)) for _ in range(5)])
    tree = siblings(order[:count], weights / weights.sum())
    target = torch.zeros(5, dtype=torch.float64)
    target[best] = 1.0
    asked = []

    def draw(node: int, left: torch.Tensor) -> int:
        asked.append(node)
        return Sampler(SamplingParams(), 0).draw(left, 0)

    result = verify_rejection(tree, lambda _: target, lambda *_: uniform, draw)
    child = tree.child(ROOT, best)
    assert result == Verification(() if child is None else (child,), best, rejected=child is None and count > 0)
    assert asked == [ROOT if child is None else child]


def test_a_draft_that_is_the_target_is_always_accepted() -> None:
    chances = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    rows = {node - 1: row for node, row in enumerate(chances)}
    tree = TokenTree((4, 9), (-1, 0), (0.0, 0.0), rows)
    result = verify_rejection(tree, lambda node: rows[node].double(), lambda *_: 1 - 2.0**-53, lambda *_: 7)
    assert result == Verification((0, 1), 7, False)


@given(st.data())
def test_a_token_that_was_turned_down_is_not_drawn_again(data: st.DataObject) -> None:
    size = 6
    chances = st.lists(st.integers(0, 20), min_size=size, max_size=size).filter(any)
    target = torch.tensor(data.draw(chances), dtype=torch.float64)
    target /= target.sum()
    proposal = torch.tensor(data.draw(chances), dtype=torch.float64)
    proposal /= proposal.sum()
    support = proposal.nonzero().flatten().tolist()
    tokens = data.draw(st.permutations(support))[: data.draw(st.integers(1, size))]
    draws = [data.draw(st.floats(2.0**-53, 1 - 2.0**-53)) for _ in tokens]
    tree = siblings(tokens, proposal)

    def draw(node: int, left: torch.Tensor) -> int:
        assert left.dtype == torch.float64
        assert not left.isnan().any() and (left >= 0).all()
        torch.testing.assert_close(left.sum(), torch.tensor(1.0, dtype=torch.float64))
        if node == ROOT:
            assert not left[tokens].any() or (proposal - target).abs().max() < 1e-12
        assert not left[target == 0].any()
        return int(left.argmax())

    before = target.clone(), proposal.clone()
    result = verify_rejection(tree, lambda _: target, lambda node, index: draws[index], draw)
    assert result.rejected == (result.path == ())
    if result.path:
        assert target[tree.tokens[result.path[0]]] > 0
    assert torch.equal(before[0], target) and torch.equal(before[1], proposal)


def test_rejection_asks_only_for_what_it_visits() -> None:
    rows = {node: torch.full((10,), 0.1) for node in (ROOT, 0, 1, 2)}
    tree = TokenTree(TREE.tokens, TREE.parents, TREE.scores, rows)
    asked: list[tuple[int, int]] = []
    visited: list[int] = []

    def uniform(node: int, index: int) -> float:
        asked.append((node, index))
        return 0.5

    def target(node: int) -> torch.Tensor:
        visited.append(node)
        # The first sibling is turned down at node 0.
        return distribution(*[0.0] * 8, 1.0, 0.0) if node == 0 else torch.full((10,), 0.1, dtype=torch.float64)

    assert verify_rejection(tree, target, uniform, lambda *_: 2) == Verification((0, 3), 2, False)
    assert visited == [ROOT, 0, 3]
    assert asked == [(ROOT, 0), (0, 0), (0, 1)]


def test_a_draft_of_a_smaller_vocabulary_gives_the_rest_no_chance() -> None:
    tree = siblings([0], torch.tensor([0.75, 0.25]))
    draw = Residuals(2)
    verify_rejection(tree, lambda _: distribution(0.25, 0.25, 0.5), lambda *_: 0.9, draw)
    torch.testing.assert_close(draw.seen, [distribution(0, 0, 1)])


def test_rejection_without_proposals_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="rejection"):
        verify_rejection(TokenTree.chain([1]), lambda _: TARGET, lambda *_: 0.5, not_asked)
    assert verify_rejection(TokenTree(), lambda _: TARGET, lambda *_: 0.5, lambda *_: 3) == Verification((), 3, False)


# Threshold


def log(*chances: float) -> torch.Tensor:
    return distribution(*chances).log()


@pytest.mark.parametrize(
    ("tokens", "threshold", "path"),
    [
        ([1], 0.59, (0,)),  # 0.3 / 0.5 is 0.6
        ([1], 0.61, ()),
        ([2, 1], 0.3, (1,)),  # the likelier of two that would do
        ([1, 2], 0.3, (0,)),
        ([2, 1], 0.59, (1,)),  # the one that will do
        ([2, 3], 0.59, ()),
        ([2, 3], 0.39, (0,)),
        ([3], 5e-324, ()),  # never what has no probability
        ([0], 1.0, (0,)),
        ([1, 2, 3], 1.0, ()),
        ([], 0.1, ()),
    ],
)
def test_threshold_accepts_the_best_child_that_is_likely_enough(
    tokens: list[int], threshold: float, path: tuple[int, ...]
) -> None:
    choose = Told({ROOT: 0, 0: 2, 1: 3})
    result = verify_threshold(siblings(tokens, PROPOSAL), lambda _: log(0.5, 0.3, 0.2, 0.0), choose, threshold)
    last = path[-1] if path else ROOT
    assert result == Verification(path, choose.tokens[last], rejected=bool(tokens) and not path)
    assert choose.asked == [last]


def test_threshold_walks_on() -> None:
    rows = {ROOT: log(*[0.1] * 10), 0: log(*[0.05] * 7, 0.3, 0.3, 0.05), 2: log(*[0.11] * 9, 0.01)}
    visited: list[int] = []

    def target(node: int) -> torch.Tensor:
        visited.append(node)
        return rows[node]

    assert verify_threshold(TREE, target, Told({2: 4}), 0.5) == Verification((0, 2), 4, True)
    assert visited == [ROOT, 0, 2]


@given(st.integers(0, 2**32), st.lists(drafts(), min_size=6, max_size=6))
def test_threshold_one_is_greedy(seed: int, trees: list[TokenTree]) -> None:
    # Without ties: which of two tied tokens was drafted is the draft's affair.
    logits = torch.randn((VOCABULARY, VOCABULARY), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for tree in trees:
        scores = {node: logits[tree.tokens[node] if node != ROOT else 0] for node in range(ROOT, len(tree))}

        def choose(node: int, scores: dict[int, torch.Tensor] = scores) -> int:
            return int(scores[node].argmax())

        lossy = verify_threshold(tree, lambda node, scores=scores: scores[node].log_softmax(-1), choose, 1.0)  # type: ignore[misc]
        assert lossy == verify_exact(tree, choose)


def test_threshold_may_differ_from_the_target() -> None:
    tree = siblings([1], PROPOSAL)
    choose = Told({ROOT: 0, 0: 0})
    lossy = verify_threshold(tree, lambda _: TARGET.log(), choose, 0.1)
    assert lossy.path == (0,)
    assert verify_exact(tree, choose).path == ()


def test_threshold_accepts_nothing_on_nan() -> None:
    # The target's own token is asked for, which is where NaN is refused.
    choose = Told({ROOT: 3, 0: 1})
    tree = siblings([0], PROPOSAL)
    rows = [log(0.5, 0.3, 0.2, torch.nan), log(*[torch.nan] * 4)]
    for row in rows:
        assert verify_threshold(tree, dict.fromkeys([ROOT, 0], row).__getitem__, choose, 0.1) == Verification(
            (), 3, True
        )


# Distributions

WIDTH = 8
DRAWS = 4_000
Rule = Callable[
    [TokenTree, Callable[[int], torch.Tensor], Callable[[int, int], float], Callable[[int, torch.Tensor], int]],
    Verification,
]


@dataclass(frozen=True)
class Case:
    """How the target samples, and the number of children that a drafted node has at each depth."""

    params: SamplingParams
    shape: tuple[int, ...]
    length: int
    seed: int

    @cached_property
    def target(self) -> torch.Tensor:
        """Logits by the last token."""
        return torch.randn((WIDTH, WIDTH), generator=torch.Generator().manual_seed(1)) * 1.5

    @cached_property
    def draft(self) -> torch.Tensor:
        """Logits by the last token, far from the target's."""
        return torch.randn((WIDTH, WIDTH), generator=torch.Generator().manual_seed(2)) * 1.5

    @cached_property
    def sampler(self) -> Sampler:
        return Sampler(self.params, self.seed)

    @cached_property
    def chances(self) -> torch.Tensor:
        return self.sampler.processed(self.target).double().softmax(dim=-1)

    @cached_property
    def processed(self) -> torch.Tensor:
        return self.sampler.processed(self.draft)

    @cached_property
    def proposals(self) -> torch.Tensor:
        return self.processed.softmax(dim=-1)

    def tree(self, last: int, position: int) -> TokenTree:
        """Children drawn from the draft's distribution without replacement: Gumbel top-k."""
        tokens: list[int] = []
        parents: list[int] = []
        proposals: dict[int, torch.Tensor] = {}
        level = [ROOT]
        for depth, count in enumerate(self.shape):
            noise = self.sampler.noise(position + depth, WIDTH, DRAFT_NOISE)
            following = []
            for node in level:
                token = last if node == ROOT else tokens[node]
                proposals[node] = self.proposals[token]
                best = (self.processed[token] + noise).topk(count)
                for value, child in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                    if value > -torch.inf:
                        following.append(len(tokens))
                        tokens.append(child)
                        parents.append(node)
            level = following
        return TokenTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens), proposals)

    def round(self, rule: Rule, last: int, position: int) -> list[int]:
        """The tokens that one round produces after `last`, the first of them at `position`."""
        tree = self.tree(last, position)

        def at(node: int) -> int:
            return position if node == ROOT else position + tree.depths[node]

        def token(node: int) -> int:
            return last if node == ROOT else tree.tokens[node]

        if rule is exact:
            result = verify_exact(tree, lambda node: self.sampler.choose(self.target[token(node)], at(node)))
        else:
            result = rule(
                tree,
                lambda node: self.chances[token(node)],
                lambda node, index: self.sampler.uniform(at(node), index),
                lambda node, left: self.sampler.draw(left, at(node)),
            )
        return [*(tree.tokens[node] for node in result.path), result.next_token]

    def sequence(self, rule: Rule, start: int) -> tuple[int, ...]:
        """`length` tokens after token 0, the first at position `start`, in as many rounds as it takes."""
        produced = [0]
        while len(produced) <= self.length:
            produced += self.round(rule, produced[-1], start + len(produced) - 1)
        return tuple(produced[1 : self.length + 1])

    def chi_square(self, rule: Rule) -> tuple[float, int]:
        """Statistic and degrees of freedom of `DRAWS` sequences against the target's own; rare ones pooled."""
        counts = Counter(self.sequence(rule, draw * 8) for draw in range(DRAWS))
        statistic, cells, seen, rest = 0.0, 0, 0, 0.0
        for tokens in itertools.product(range(WIDTH), repeat=self.length):
            chance = 1.0
            for last, token in itertools.pairwise((0, *tokens)):
                chance *= float(self.chances[last, token])
            if chance == 0:
                assert counts[tokens] == 0, "a sequence of probability 0 was drawn"
            elif chance * DRAWS < 5:
                rest += chance * DRAWS
            else:
                statistic += (counts[tokens] - chance * DRAWS) ** 2 / (chance * DRAWS)
                cells += 1
                seen += counts[tokens]
        if rest >= 5:
            statistic += (DRAWS - seen - rest) ** 2 / rest
            cells += 1
        return statistic, cells - 1


CASES = [
    Case(SamplingParams(0.5), (1,), 2, 11),
    Case(SamplingParams(1.0, top_p=0.9), (1, 1), 2, 12),
    Case(SamplingParams(2.0, top_k=5), (1, 1, 1), 3, 13),
    Case(SamplingParams(1.0), (3, 2), 2, 14),
    Case(SamplingParams(0.5, top_k=6), (4,), 2, 15),
    Case(SamplingParams(2.0, top_p=0.8), (2, 2), 3, 16),
]


def exact(*_: object) -> Verification:
    """Stands for `verify_exact`, which asks for draws and not for distributions."""
    raise AssertionError


def generous(
    tree: TokenTree,
    target: Callable[[int], torch.Tensor],
    uniform: Callable[[int, int], float],
    draw: Callable[[int, torch.Tensor], int],
) -> Verification:
    """Wrong: compares with the target's largest probability in place of the proposal's."""
    node = ROOT
    path: list[int] = []
    while True:
        chances = target(node)
        for index, child in enumerate(tree.children(node)):
            if uniform(node, index) < float(chances[tree.tokens[child]] / chances.max()):
                break
        else:
            return Verification(tuple(path), draw(node, chances), bool(tree.children(node)))
        path.append(child)
        node = child


def without_residual(
    tree: TokenTree,
    target: Callable[[int], torch.Tensor],
    uniform: Callable[[int, int], float],
    draw: Callable[[int, torch.Tensor], int],
) -> Verification:
    """Wrong: accepts by the right ratio, but draws from the target itself after a rejection."""
    return verify_rejection(tree, target, uniform, lambda node, left: draw(node, target(node)))


def chi_square(rule: Rule, cases: Sequence[Case]) -> list[float]:
    """The p-value of each case, and that of all together."""
    found = [case.chi_square(rule) for case in cases]
    found.append((sum(statistic for statistic, _ in found), sum(freedom for _, freedom in found)))
    return [float(chi2.sf(statistic, freedom)) for statistic, freedom in found]


@pytest.mark.parametrize("rule", [exact, verify_rejection])
def test_lossless_rules_follow_the_targets_distribution(rule: Rule) -> None:
    assert len(CASES) * DRAWS >= 20_000
    assert min(chi_square(rule, CASES)) > 1e-4


@pytest.mark.parametrize("rule", [generous, without_residual])
def test_the_same_test_finds_a_biased_rule_out(rule: Rule) -> None:
    assert max(chi_square(rule, [CASES[0], CASES[3]])) < 1e-6
