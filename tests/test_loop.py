"""The decoding loop against models whose next token depends on the whole path, so that any fault of a cache shows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import ceil

import pytest
import torch

from drawbar.config import SamplingParams, SpeculationConfig
from drawbar.decoder import SpeculativeDecoder
from drawbar.drafting.base import Drafter, DraftRequest
from drawbar.drafting.model import ModelDrafter
from drawbar.errors import ConfigurationError, GenerationError, NumericalError, PromptError, ReadError
from drawbar.models.base import PathCache, Rows, SequenceCache
from drawbar.tree import TokenTree

VOCABULARY = 24
PROMPT = (3, 1, 4)


class PathModel:
    """Logits are drawn from a generator seeded by every token up to the row."""

    vocab_size = VOCABULARY

    def __init__(self, seed: int = 0, max_context: int = 500) -> None:
        self.seed = seed
        self.max_context = max_context
        self.fed: list[int] = []
        self.calls = 0
        self.fail_at: int | None = None
        self.cache = PathCache()

    def new_cache(self, capacity: int) -> PathCache:
        self.cache = PathCache()
        return self.cache

    def logits(self, path: Sequence[int]) -> torch.Tensor:
        seed = hash((self.seed, *path)) % 2**31
        return torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(seed)) * 3

    def forward(self, batch: Sequence[Rows], caches: Sequence[SequenceCache]) -> list[torch.Tensor]:
        if self.calls == self.fail_at:
            raise ReadError("the disk is gone")
        self.calls += 1
        return [self._one(rows, cache) for rows, cache in zip(batch, caches, strict=True)]

    def _one(self, rows: Rows, cache: SequenceCache) -> torch.Tensor:
        assert isinstance(cache, PathCache)
        earlier = list(cache.nodes)
        cache.append(rows)
        self.fed.extend(rows.tokens)
        nodes, results = earlier + list(rows.tree), []
        if rows.chain:
            results.append(self.logits(cache.context))
        for row in range(len(rows.tree)):
            assert rows.visible is not None
            seen = [nodes[column] for column in rows.visible[row].nonzero().flatten().tolist()]
            results.append(self.logits(cache.context + seen))
        return torch.stack(results)


class Scripted:
    """Proposes what it is told: the continuation it is given (right), another (wrong), or every few tokens right."""

    def __init__(self, answer: Sequence[int], right: float, seed: int = 0) -> None:
        self.answer = list(answer)
        self.right = right
        self.passes = 0
        self.generator = torch.Generator().manual_seed(seed)
        self.asked: list[int] = []

    def propose(self, request: DraftRequest) -> TokenTree:
        self.passes += 1
        self.asked.append(request.config.tree_depth)
        start = len(request.context) - len(PROMPT)
        chain = []
        for token in self.answer[start : start + request.config.tree_depth]:
            lucky = float(torch.rand((), generator=self.generator)) < self.right
            chain.append(token if lucky else (token + 1) % VOCABULARY)
        return TokenTree.chain(chain)

    def commit(self, path: Sequence[int]) -> None:
        return None


def reference(count: int, sampling: SamplingParams | None = None) -> tuple[int, ...]:
    return SpeculativeDecoder(PathModel()).generate(PROMPT, count, sampling=sampling).token_ids


SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.7, top_p=0.95, seed=5),
]
CONFIGS = [
    SpeculationConfig.chain(5),
    SpeculationConfig(tree_size=64, tree_width=8, tree_depth=8),
    SpeculationConfig(tree_size=256, tree_width=16, tree_depth=12, branching=8),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "T=1", "T=0.7 top-p"])
@pytest.mark.parametrize("config", CONFIGS, ids=["chain", "tree 64", "tree 256"])
@pytest.mark.parametrize("draft", ["itself", "another", "never", "always", "sometimes"])
def test_no_draft_changes_a_token(draft: str, config: SpeculationConfig, sampling: SamplingParams) -> None:
    expected = reference(25, sampling)
    drafters: dict[str, Drafter] = {
        "itself": ModelDrafter(PathModel()),
        "another": ModelDrafter(PathModel(seed=9)),
        "never": Scripted(expected, right=0.0),
        "always": Scripted(expected, right=1.0),
        "sometimes": Scripted(expected, right=0.6),
    }
    decoder = SpeculativeDecoder(PathModel(), drafters[draft], config)
    first, second = (decoder.generate(PROMPT, 25, sampling=sampling) for _ in range(2))
    assert first.token_ids == second.token_ids == expected
    if draft in ("never", "always"):
        assert first.stats.acceptance_rate == (1.0 if draft == "always" else 0.0)


def test_caches_hold_the_context_but_for_its_last_token_after_every_round() -> None:
    target, draft = PathModel(), PathModel(seed=9)
    decoder = SpeculativeDecoder(target, ModelDrafter(draft), CONFIGS[1])
    generation = decoder.open(PROMPT, 20)
    for _ in generation:
        context = [*PROMPT, *generation.output.token_ids]
        assert target.cache.context == context[:-1] and not target.cache.nodes
        assert draft.cache.context == context[: len(draft.cache.context)] and not draft.cache.nodes


def test_every_context_token_is_fed_to_the_target_once_without_a_draft() -> None:
    target = PathModel()
    tokens = SpeculativeDecoder(target).generate(PROMPT, 10).token_ids
    assert target.fed == [*PROMPT, *tokens[:-1]]


@pytest.mark.parametrize("depth", [1, 5])
@pytest.mark.parametrize("count", [1, 2, 6, 7, 12, 13])
def test_a_draft_that_is_the_target_is_always_right(depth: int, count: int) -> None:
    decoder = SpeculativeDecoder(PathModel(), ModelDrafter(PathModel()), SpeculationConfig.chain(depth))
    out = decoder.generate(PROMPT, count)
    assert out.stats.target_passes == out.stats.rounds == ceil(count / (depth + 1))
    assert out.stats.rejected_tokens == 0
    assert out.stats.acceptance_rate == (1.0 if count > 1 else 0.0)


@pytest.mark.parametrize("count", range(14))
def test_no_more_tokens_than_asked_for(count: int) -> None:
    for config in CONFIGS[:2]:
        target, drafter = PathModel(), Scripted(reference(30), right=1.0)
        out = SpeculativeDecoder(target, drafter, config).generate(PROMPT, count)
        assert out.token_ids == reference(30)[:count] and out.finish_reason == "length"
        assert all(depth >= 1 for depth in drafter.asked)
        if count == 0:
            assert target.calls == 0
        if count == 1:
            assert drafter.passes == 0


def test_an_end_token_inside_an_accepted_path_ends_there() -> None:
    tokens = reference(30)
    for where in (0, 2, 5, 6):
        end = tokens[where]
        expected = tokens[: tokens.index(end) + 1]
        decoder = SpeculativeDecoder(PathModel(), Scripted(tokens, right=1.0), SpeculationConfig.chain(5))
        out = decoder.generate(PROMPT, 30, eos_token_ids=[end, VOCABULARY + 5])
        assert (out.token_ids, out.finish_reason) == (expected, "stop")
        stats = out.stats
        assert stats.tokens == len(expected) == stats.accepted_tokens + stats.bonus_tokens
        assert stats.bonus_tokens == stats.target_passes - int(len(expected) % 6 != 0)
    assert SpeculativeDecoder(PathModel()).generate(PROMPT, 30, eos_token_ids=tokens[2]).finish_reason == "stop"


def test_the_context_of_target_and_draft_end() -> None:
    full = reference(60)
    out = SpeculativeDecoder(PathModel(max_context=20), ModelDrafter(PathModel()), CONFIGS[1]).generate(PROMPT, 60)
    assert (out.token_ids, out.finish_reason) == (full[:17], "context")
    short = SpeculativeDecoder(PathModel(), ModelDrafter(PathModel(max_context=10)), CONFIGS[1]).generate(PROMPT, 30)
    assert short.token_ids == full[:30]
    assert 0 < short.stats.accepted_tokens < 30


def test_figures_of_a_hand_counted_run() -> None:
    tokens = reference(12)
    wrong = list(tokens)
    wrong[2] = (wrong[2] + 1) % VOCABULARY
    decoder = SpeculativeDecoder(PathModel(), Scripted(wrong, right=1.0), SpeculationConfig.chain(4))
    stats = decoder.generate(PROMPT, 12).stats
    # Drafted 0-3: two accepted, one judged wrong, one never judged; bonus is token 2. Then 3-6 and 7; then 8-10 and 11.
    assert (stats.rounds, stats.target_passes, stats.draft_passes) == (3, 3, 3)
    assert (stats.draft_tokens, stats.accepted_tokens, stats.rejected_tokens, stats.bonus_tokens) == (11, 9, 1, 3)
    assert stats.tokens == 12 and stats.tokens_per_pass == 4 and stats.acceptance_rate == 0.9
    assert stats.prompt_tokens == 3 and stats.prefill_s > 0 and stats.verify_s > 0 and stats.draft_s > 0
    assert stats.total_s >= stats.prefill_s + stats.verify_s + stats.draft_s > 0
    assert decoder.stats.as_dict() == stats.as_dict()
    decoder.generate(PROMPT, 12)
    assert decoder.stats.tokens == 24 and decoder.stats.requests == 2
    decoder.reset_stats()
    assert decoder.stats.tokens == 0


def test_bad_input_is_refused_before_any_work() -> None:
    target = PathModel(max_context=10)
    decoder = SpeculativeDecoder(target)
    for prompt, error in (
        ((), PromptError),
        ((1,) * 10, PromptError),
        ((VOCABULARY,), PromptError),
        ((-1,), PromptError),
    ):
        with pytest.raises(error):
            decoder.stream(prompt)
    with pytest.raises(ConfigurationError):
        decoder.generate(PROMPT, -1)
    assert target.calls == 0


def test_an_error_half_way_keeps_what_was_produced() -> None:
    target = PathModel()
    decoder = SpeculativeDecoder(target)
    target.fail_at = 4
    with pytest.raises(GenerationError, match="the disk is gone") as caught:
        decoder.generate(PROMPT, 9)
    assert caught.value.output.token_ids == reference(4)
    assert caught.value.output.finish_reason is None
    target.fail_at = target.calls
    with pytest.raises(ReadError):
        decoder.generate(PROMPT, 9)
    target.fail_at = None
    assert decoder.generate(PROMPT, 9).token_ids == reference(9)


def test_logits_that_are_not_numbers_give_no_token() -> None:
    class Overflowing(PathModel):
        def logits(self, path: Sequence[int]) -> torch.Tensor:
            return torch.full((VOCABULARY,), torch.nan)

    with pytest.raises(NumericalError):
        SpeculativeDecoder(Overflowing()).generate(PROMPT, 5)
    with pytest.raises(NumericalError, match="draft"):
        SpeculativeDecoder(PathModel(), ModelDrafter(Overflowing())).generate(PROMPT, 5)


class Wide(PathModel):
    """A draft whose table is padded, with its best id always in the padding."""

    vocab_size = VOCABULARY + 8

    def logits(self, path: Sequence[int]) -> torch.Tensor:
        return torch.cat((PathModel.logits(PathModel(), path)[:VOCABULARY], torch.full((8,), 99.0)))


def test_padding_of_either_vocabulary_changes_nothing() -> None:
    expected = reference(20)
    out = SpeculativeDecoder(PathModel(), ModelDrafter(Wide()), CONFIGS[1]).generate(PROMPT, 20)
    assert out.token_ids == expected and out.stats.acceptance_rate > 0.5


def test_streams_interleave_and_may_be_closed_early() -> None:
    decoder = SpeculativeDecoder(PathModel(), ModelDrafter(PathModel(seed=9)), CONFIGS[0])
    first, second = decoder.stream(PROMPT, 15), decoder.stream((7, 7), 15)
    mixed = list(zip(first, second, strict=True))
    assert tuple(a for a, _ in mixed) == reference(15)
    assert tuple(b for _, b in mixed) == SpeculativeDecoder(PathModel()).generate((7, 7), 15).token_ids
    early = decoder.stream(PROMPT, 15)
    next(early)
    del early
    assert decoder.generate(PROMPT, 15).token_ids == reference(15)


def test_threads_get_what_they_would_get_alone(capsys: pytest.CaptureFixture[str]) -> None:
    decoder = SpeculativeDecoder(PathModel(), ModelDrafter(PathModel(seed=9)), CONFIGS[0])
    results: dict[int, tuple[int, ...]] = {}

    def work(number: int) -> None:
        results[number] = decoder.generate((number, 2), 20, sampling=SamplingParams(1.0, seed=number)).token_ids

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, tokens in results.items():
        alone = SpeculativeDecoder(PathModel()).generate((number, 2), 20, sampling=SamplingParams(1.0, seed=number))
        assert tokens == alone.token_ids
    assert decoder.stats.tokens == 80 and decoder.stats.requests == 4
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_seeds() -> None:
    hot = SamplingParams(temperature=1.0)
    drawn = SpeculativeDecoder(PathModel()).generate(PROMPT, 20, sampling=hot)
    again = SpeculativeDecoder(PathModel()).generate(PROMPT, 20, sampling=SamplingParams(1.0, seed=drawn.seed))
    other = SpeculativeDecoder(PathModel()).generate(PROMPT, 20, sampling=SamplingParams(1.0, seed=drawn.seed + 1))
    assert drawn.token_ids == again.token_ids != other.token_ids
