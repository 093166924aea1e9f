"""Trees that a model drafts: their limits, their order, and when the draft steps aside."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from drawbar.config import SamplingParams, SpeculationConfig
from drawbar.decoder import SpeculativeDecoder
from drawbar.drafting.base import DraftRequest, NoDraft
from drawbar.drafting.model import ModelDrafter
from drawbar.sampling import Sampler
from drawbar.tree import ROOT
from tests.test_loop import PROMPT, VOCABULARY, PathModel, reference


def request(config: SpeculationConfig, sampling: SamplingParams | None = None, **more: object) -> DraftRequest:
    fields = {"context": list(PROMPT), "end_tokens": frozenset(), "vocab_size": VOCABULARY, **more}
    return DraftRequest(config=config, sampler=Sampler(sampling or SamplingParams(), seed=1), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0), SamplingParams(0.7, top_p=0.95)])
@pytest.mark.parametrize("acceptance", ["exact", "rejection"])
def test_a_tree_keeps_to_its_limits(sampling: SamplingParams, acceptance: str) -> None:
    config = SpeculationConfig(tree_size=20, tree_width=3, tree_depth=4, branching=3, acceptance=acceptance)  # type: ignore[arg-type]
    tree = ModelDrafter(PathModel()).propose(request(config, sampling))
    assert 0 < len(tree) <= 20 and max(tree.depths) <= 4
    assert all(len(tree.children(node)) <= 3 for node in range(-1, len(tree)))
    assert all(
        tree.scores[node] <= tree.scores[tree.parents[node]] for node in range(len(tree)) if tree.parents[node] != ROOT
    )


def test_a_greedy_tree_holds_the_best_paths() -> None:
    """Against every path of two tokens, counted out."""
    model, size = PathModel(), 12
    config = SpeculationConfig(tree_size=size, tree_width=VOCABULARY, tree_depth=2, branching=VOCABULARY)
    tree = ModelDrafter(model).propose(request(config))
    first = model.logits(PROMPT).log_softmax(0)
    scores = {(a,): float(first[a]) for a in range(VOCABULARY)}
    for a in range(VOCABULARY):
        second = model.logits([*PROMPT, a]).log_softmax(0)
        scores |= {(a, b): float(first[a] + second[b]) for b in range(VOCABULARY)}
    best = set(sorted(scores, key=scores.__getitem__, reverse=True)[:size])
    assert {tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree))} == best


def test_nothing_follows_an_end_token() -> None:
    config = SpeculationConfig(tree_size=40, tree_width=8, tree_depth=5)
    free = ModelDrafter(PathModel()).propose(request(config))
    end = free.tokens[0]
    assert free.children(0)
    tree = ModelDrafter(PathModel()).propose(request(config, end_tokens=frozenset({end})))
    assert end in tree.tokens
    assert not any(tree.children(node) for node, token in enumerate(tree.tokens) if token == end)


class Narrow(PathModel):
    """A table with fewer rows than the target's; like an embedding, it has none for higher ids."""

    vocab_size = VOCABULARY - 6

    def logits(self, path: Sequence[int]) -> torch.Tensor:
        assert max(path) < self.vocab_size
        return super().logits(path)


def test_a_draft_steps_aside_where_the_context_holds_an_id_it_does_not_know() -> None:
    drafter = ModelDrafter(Narrow(seed=3))
    config = SpeculationConfig.chain(3)
    known = [1, 2, 3]
    assert len(drafter.propose(request(config, context=known))) == 3
    assert max(drafter.propose(request(config, context=known)).tokens) < Narrow.vocab_size
    passes = drafter.passes
    assert len(drafter.propose(request(config, context=[*known, VOCABULARY - 1]))) == 0
    assert drafter.passes == passes
    assert len(drafter.propose(request(config, context=known))) == 3
    decoder = SpeculativeDecoder(PathModel(), ModelDrafter(Narrow(seed=3)), config)
    assert max(reference(40)) >= Narrow.vocab_size
    assert decoder.generate(PROMPT, 40).token_ids == reference(40)


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 1e-6, 0.0, 1e30, 1e300])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0, seed=2)], ids=["greedy", "T=1"])
def test_no_draft_temperature_makes_scores_that_are_no_numbers(temperature: float, sampling: SamplingParams) -> None:
    config = SpeculationConfig(tree_size=9, tree_width=3, tree_depth=3, draft_temperature=temperature)
    tree = ModelDrafter(PathModel()).propose(request(config, sampling))
    assert len(tree) > 0 and all(score <= 0 and abs(score) < float("inf") for score in tree.scores)
    decoder = SpeculativeDecoder(PathModel(), ModelDrafter(PathModel()), config)
    assert decoder.generate(PROMPT, 12, sampling=sampling).token_ids == reference(12, sampling)


def test_a_draft_near_the_end_of_its_context_drafts_what_fits() -> None:
    for room in range(-1, 4):
        draft = PathModel(max_context=len(PROMPT) + room)
        tree = ModelDrafter(draft).propose(request(SpeculationConfig.chain(8)))
        assert len(tree) == max(0, room + 1)
        assert draft.cache.context_length + len(draft.cache.nodes) <= draft.max_context


def test_an_error_of_the_draft_leaves_it_usable() -> None:
    draft = PathModel(seed=4)
    drafter = ModelDrafter(draft)
    config = SpeculationConfig(tree_size=16, tree_width=4, tree_depth=4)
    whole = drafter.propose(request(config))
    drafter.commit([])
    draft.fail_at = draft.calls + 2
    with pytest.raises(Exception, match="the disk is gone"):
        drafter.propose(request(config))
    draft.fail_at = None
    assert drafter.propose(request(config)) == whole
    drafter.commit(whole.path(len(whole) - 1))
    assert draft.cache.context[: len(PROMPT)] == list(PROMPT) and not draft.cache.nodes


def test_no_draft_drafts_nothing() -> None:
    drafter = NoDraft()
    assert len(drafter.propose(request(SpeculationConfig.default()))) == drafter.passes == 0
    drafter.commit([])
