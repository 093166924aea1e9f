"""Around the loop: drafters that misbehave, rounds that fail, input of the wrong kind, real layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drawbar.config import SamplingParams, SpeculationConfig
from drawbar.decoder import SpeculativeDecoder
from drawbar.drafting.base import DraftRequest
from drawbar.drafting.model import ModelDrafter
from drawbar.errors import ConfigurationError, GenerationError, PromptError
from drawbar.models.base import Rows, SequenceCache
from drawbar.models.resident import ResidentModel
from drawbar.tree import ROOT, TokenTree
from tests.test_loop import PROMPT, VOCABULARY, PathModel, Scripted, reference


class RandomTrees:
    """Trees of any shape, through which the right continuation runs as far as chance lets it."""

    passes = 0

    def __init__(self, answer: Sequence[int], seed: int) -> None:
        self.answer = answer
        self.random = np.random.default_rng(seed)

    def propose(self, request: DraftRequest) -> TokenTree:
        right = self.answer[len(request.context) - len(PROMPT) :]
        tokens: list[int] = []
        parents: list[int] = []
        depths = {ROOT: 0}
        for _ in range(self.random.integers(0, request.config.tree_size + 1)):
            parent = int(self.random.integers(-1, len(tokens)))
            depth = depths[parent] + 1
            lucky = depth <= len(right) and self.random.random() < 0.7
            token = right[depth - 1] if lucky else int(self.random.integers(VOCABULARY))
            if depth <= request.config.tree_depth and (parent, token) not in set(zip(parents, tokens, strict=True)):
                depths[len(tokens)] = depth
                tokens.append(token)
                parents.append(parent)
        return TokenTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens))

    def commit(self, path: Sequence[int]) -> None:
        return None


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 20), temperature=st.sampled_from([0.0, 1.0]))
def test_no_tree_changes_a_token(seed: int, count: int, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3)
    expected = reference(count, sampling)
    target = PathModel()
    decoder = SpeculativeDecoder(target, RandomTrees(expected, seed), SpeculationConfig(tree_size=12, tree_depth=6))
    generation = decoder.open(PROMPT, count, sampling=sampling)
    for _ in generation:
        assert target.cache.context == [*PROMPT, *generation.output.token_ids][:-1] and not target.cache.nodes
    assert generation.output.token_ids == expected


def test_after_a_full_acceptance_the_draft_is_fed_its_last_token_once() -> None:
    draft = PathModel()
    decoder = SpeculativeDecoder(PathModel(), ModelDrafter(draft), SpeculationConfig.chain(3))
    tokens = decoder.generate(PROMPT, 16).token_ids
    # Four rounds of 3 + 1; the last may draft 3 too. Its last drafted token and the last bonus are never fed.
    assert draft.fed == [*PROMPT, *tokens[:-2]]


def test_a_generation_inherits_nothing_from_the_one_before() -> None:
    target, draft = PathModel(), PathModel()
    decoder = SpeculativeDecoder(target, ModelDrafter(draft), SpeculationConfig.chain(3))
    decoder.generate(PROMPT, 9)
    fed = len(target.fed)
    other = decoder.generate((7, 7, 7, 7), 9)
    assert target.fed[fed : fed + 4] == [7] * 4
    assert other.token_ids == SpeculativeDecoder(PathModel()).generate((7, 7, 7, 7), 9).token_ids
    assert other.stats.acceptance_rate == 1 and other.stats.tokens == 9 and decoder.stats.tokens == 18


class OnceWrong(ModelDrafter):
    """Its second chain begins with a wrong token."""

    rounds = 0

    def propose(self, request: DraftRequest) -> TokenTree:
        tree = super().propose(request)
        self.rounds += 1
        if self.rounds != 2:
            return tree
        return TokenTree.chain([(tree.tokens[0] + 1) % request.vocab_size, *tree.tokens[1:]])


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_real_layers_as_their_own_draft_are_always_right(
    tiny_checkpoint: Callable[..., Path], architecture: str
) -> None:
    """Across the edge of the sliding window (8), and after a rejection, where a cache left wrong would show."""
    path = tiny_checkpoint(architecture)
    target, draft = ResidentModel.from_pretrained(path), ResidentModel.from_pretrained(path)
    plain = SpeculativeDecoder(target).generate((5, 6, 7), 32)
    assert len(set(plain.token_ids)) > 4
    config = SpeculationConfig.chain(3)
    out = SpeculativeDecoder(target, ModelDrafter(draft), config).generate((5, 6, 7), 32)
    assert out.token_ids == plain.token_ids
    assert out.stats.target_passes == ceil(32 / 4) and out.stats.acceptance_rate == 1
    out = SpeculativeDecoder(target, OnceWrong(draft), config).generate((5, 6, 7), 32)
    assert out.token_ids == plain.token_ids
    assert out.stats.rejected_tokens == 1 and out.stats.accepted_tokens == 23
    assert out.stats.target_passes == out.stats.bonus_tokens == 9


def test_an_end_token_as_the_bonus_counts_as_one() -> None:
    tokens = reference(30)
    where = next(i for i in (3, 7, 11) if tokens.index(tokens[i]) == i)
    decoder = SpeculativeDecoder(PathModel(), Scripted(tokens, right=1.0), SpeculationConfig.chain(3))
    out = decoder.generate(PROMPT, 30, eos_token_ids=np.int64(tokens[where]))
    assert out.token_ids == tokens[: where + 1] and out.finish_reason == "stop"
    assert out.stats.bonus_tokens == out.stats.target_passes == (where + 1) // 4
    assert out.stats.rejected_tokens == 0


class Misbehaving:
    passes = 0

    def __init__(self, tree: TokenTree) -> None:
        self.tree = tree

    def propose(self, request: DraftRequest) -> TokenTree:
        return self.tree

    def commit(self, path: Sequence[int]) -> None:
        return None


@pytest.mark.parametrize("tokens", [[1] * 9, [VOCABULARY], [-1]], ids=["too deep", "past the end", "negative"])
def test_a_tree_that_was_not_asked_for_is_refused_by_the_name_of_its_drafter(tokens: list[int]) -> None:
    target = PathModel()
    decoder = SpeculativeDecoder(target, Misbehaving(TokenTree.chain(tokens)), SpeculationConfig.chain(8))
    with pytest.raises(ConfigurationError, match="Misbehaving proposed"):
        decoder.generate(PROMPT, 20)
    assert target.calls == 0
    with pytest.raises(ConfigurationError, match="at most 8, 2 deep"):
        SpeculativeDecoder(PathModel(), Misbehaving(TokenTree.chain([1] * 3)), decoder.config).generate(PROMPT, 3)


def test_rejection_sampling_refuses_a_drafter_that_gives_no_proposals() -> None:
    config = SpeculationConfig.chain(4, acceptance="rejection")
    with pytest.raises(ConfigurationError, match="rejection"):
        SpeculativeDecoder(PathModel(), Scripted(reference(9), right=1.0), config).generate(PROMPT, 9)


def test_any_error_half_way_keeps_what_was_produced() -> None:
    class OutOfMemory(PathModel):
        def forward(self, batch: Sequence[Rows], caches: Sequence[SequenceCache]) -> list[torch.Tensor]:
            if self.calls == 3:
                raise RuntimeError("out of memory")
            return super().forward(batch, caches)

    with pytest.raises(GenerationError, match="RuntimeError: out of memory") as caught:
        SpeculativeDecoder(OutOfMemory()).generate(PROMPT, 9)
    assert caught.value.output.token_ids == reference(3)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_round_that_failed_can_be_tried_again() -> None:
    class Interrupted(PathModel):
        """Breaks off behind the pass, when the cache already holds its rows."""

        def forward(self, batch: Sequence[Rows], caches: Sequence[SequenceCache]) -> list[torch.Tensor]:
            logits = super().forward(batch, caches)
            if self.calls in (1, 3):
                raise KeyboardInterrupt
            return logits

    target = Interrupted()
    decoder = SpeculativeDecoder(target, ModelDrafter(PathModel(seed=9)), SpeculationConfig.chain(5))
    generation = decoder.open(PROMPT, 20)
    interruptions = 0
    while generation.output.finish_reason is None:
        try:
            next(generation)
        except KeyboardInterrupt:
            interruptions += 1
        assert target.cache.context_length <= len(PROMPT) + len(generation.output.token_ids) - 1
    assert interruptions == 2 and generation.output.token_ids == reference(20)


@pytest.mark.parametrize("prompt", ["12", [1.5], [None], [[1, 2]]])
def test_a_prompt_of_something_else_is_refused(prompt: Any) -> None:
    with pytest.raises(PromptError, match="token ids"):
        SpeculativeDecoder(PathModel()).generate(prompt)


@pytest.mark.parametrize("count", [5.0, float("nan"), float("inf"), "5", None, -1])
def test_a_number_of_tokens_that_is_none_is_refused(count: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_new_tokens"):
        SpeculativeDecoder(PathModel()).generate(PROMPT, count)


def test_ids_may_be_of_any_integer_type() -> None:
    for prompt in (np.array(PROMPT), torch.tensor(PROMPT)):
        out = SpeculativeDecoder(PathModel()).generate(prompt, np.int64(5))  # type: ignore[arg-type]
        assert out.token_ids == reference(5)


def test_what_drafting_costs_is_in_the_net_figure_alone() -> None:
    decoder = SpeculativeDecoder(PathModel(), ModelDrafter(PathModel()), SpeculationConfig.chain(3))
    stats = decoder.generate(PROMPT, 16).stats
    assert stats.speedup == stats.tokens_per_pass == 4
    assert 0 < stats.net_speedup < stats.speedup
