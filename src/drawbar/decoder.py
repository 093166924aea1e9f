"""The loop: propose, forward, verify, keep. Token ids in, token ids out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from operator import index
from typing import Literal, Protocol, runtime_checkable

import torch

from drawbar.config import DEFAULT_MAX_NEW_TOKENS, SamplingParams, SpeculationConfig
from drawbar.drafting.base import Drafter, DraftRequest, NoDraft
from drawbar.errors import ConfigurationError, DrawbarError, GenerationError, PromptError
from drawbar.models.base import CausalModel, Rows, SequenceCache
from drawbar.sampling import Sampler
from drawbar.stats import Stats
from drawbar.tree import ROOT, TokenTree
from drawbar.verify import Verification, verify_exact, verify_rejection, verify_threshold

FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """What a call produced.

    Attributes:
        token_ids: new tokens, an end token included.
        finish_reason: `stop` (an end token), `length` (`max_new_tokens`), `context` (the model's context is full),
            or None if the call did not come to its end.
        seed: what the noise was keyed by.
        stats: counters of this call alone.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    seed: int
    stats: Stats


class ReadingCounters(Protocol):
    """How much was read, and how long computing waited for it."""

    bytes_read: int
    io_wait_s: float


@runtime_checkable
class ReadsWeights(Protocol):
    """A model that can say what it read."""

    def counters(self) -> ReadingCounters: ...


@dataclass
class _Sequence:
    """One request on its way."""

    context: list[int]
    prompt_length: int
    max_new_tokens: int
    end_tokens: frozenset[int]
    sampler: Sampler
    cache: SequenceCache
    finish_reason: FinishReason | None = None
    stats: Stats = field(default_factory=Stats)

    @property
    def produced(self) -> int:
        return len(self.context) - self.prompt_length


class SpeculativeDecoder:
    """Decodes with a target and a drafter. May be called from several threads: rounds never interleave.

    Args:
        target: the model whose tokens are produced.
        drafter: guesses ahead; None drafts nothing.
        config: how much is drafted, and by which rule the target accepts.
    """

    def __init__(
        self, target: CausalModel, drafter: Drafter | None = None, config: SpeculationConfig | None = None
    ) -> None:
        self.target = target
        self.drafter: Drafter = NoDraft() if drafter is None else drafter
        self.config = SpeculationConfig.default() if config is None else config
        self._stats = Stats()
        self._round = threading.Lock()
        self._call = threading.Lock()

    @property
    def stats(self) -> Stats:
        """Counters over all calls so far: a copy."""
        with self._round:
            return replace(self._stats)

    def reset_stats(self) -> None:
        """Set the counters over all calls to zero."""
        with self._round:
            self._stats = Stats()

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        eos_token_ids: int | Iterable[int] = (),
        sampling: SamplingParams | None = None,
    ) -> DecoderOutput:
        """Produce tokens until an end token, `max_new_tokens`, or the end of the context.

        Args:
            prompt_token_ids: the prompt, at least one id.
            max_new_tokens: tokens to produce at the most; 0 does nothing at all.
            eos_token_ids: tokens that end the answer; the one that did is its last.
            sampling: how tokens are drawn; None is greedy.

        Raises:
            PromptError, ConfigurationError, BudgetError: before anything is computed.
            GenerationError: something failed after tokens were produced; they are in its `output`.
            Exception: what failed before any was.
        """
        with self._call:
            generation = self.open(prompt_token_ids, max_new_tokens, eos_token_ids, sampling)
            try:
                for _ in generation:
                    pass
            except Exception as error:
                if generation.output.token_ids:
                    message = str(error) if isinstance(error, DrawbarError) else f"{type(error).__name__}: {error}"
                    raise GenerationError(message, generation.output) from error
                raise
            return generation.output

    def stream(
        self,
        prompt_token_ids: Sequence[int],
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        eos_token_ids: int | Iterable[int] = (),
        sampling: SamplingParams | None = None,
    ) -> Iterator[int]:
        """The same, one token at a time as they are verified. Arguments are checked at once, before the first token.

        The iterator may be closed early; the decoder stays usable.
        """
        generation = self.open(prompt_token_ids, max_new_tokens, eos_token_ids, sampling)
        return (token for tokens in generation for token in tokens)

    def open(
        self,
        prompt_token_ids: Sequence[int],
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        eos_token_ids: int | Iterable[int] = (),
        sampling: SamplingParams | None = None,
    ) -> Generation:
        """The same as an iterator over rounds that can be asked for its `output` at any time."""
        prompt = self._checked_prompt(prompt_token_ids)
        if not isinstance(max_new_tokens, Integral) or max_new_tokens < 0:
            raise ConfigurationError(f"max_new_tokens must be a whole number, 0 or more, not {max_new_tokens!r}")
        ends = frozenset((eos_token_ids,) if isinstance(eos_token_ids, Integral) else eos_token_ids)
        room = min(max_new_tokens, self.target.max_context - len(prompt))
        rows = len(prompt) + room + (self.config.tree_size if room > 1 else 0)
        sequence = _Sequence(
            context=prompt,
            prompt_length=len(prompt),
            max_new_tokens=max_new_tokens,
            end_tokens=ends,
            sampler=Sampler(sampling or SamplingParams()),
            cache=self.target.new_cache(rows),
        )
        if max_new_tokens == 0:
            sequence.finish_reason = "length"
        return Generation(self, sequence)

    def _checked_prompt(self, prompt: Sequence[int]) -> list[int]:
        try:
            tokens = [index(token) for token in prompt]
        except TypeError as error:
            raise PromptError("the prompt must be a sequence of token ids, whole numbers") from error
        if not tokens:
            raise PromptError("the prompt is empty: it must hold at least one token")
        for token in tokens:
            if not 0 <= token < self.target.vocab_size:
                raise PromptError(
                    f"token id {token} in the prompt lies outside the vocabulary of {self.target.vocab_size}"
                )
        if len(tokens) >= self.target.max_context:
            raise PromptError(
                f"the prompt has {len(tokens)} tokens, and the model's context of {self.target.max_context} "
                "leaves no room for an answer; shorten the prompt"
            )
        return tokens

    def _advance(self, batch: Sequence[_Sequence]) -> list[list[int]]:
        """One round for these sequences: one pass over the target's weights. Returns the new tokens of each."""
        with self._round:
            before = [replace(sequence.stats) for sequence in batch]
            started = time.perf_counter()
            try:
                return self._advance_locked(batch)
            except BaseException:
                # A round that failed half way leaves no row behind, so that it can be tried again.
                for sequence in batch:
                    sequence.cache.truncate(min(sequence.cache.context_length, len(sequence.context) - 1))
                raise
            finally:
                elapsed = time.perf_counter() - started
                for sequence, earlier in zip(batch, before, strict=True):
                    sequence.stats.total_s += elapsed
                    self._stats.add(sequence.stats.since(earlier))

    def _advance_locked(self, batch: Sequence[_Sequence]) -> list[list[int]]:
        trees = [self._propose(sequence) for sequence in batch]
        started, counters = time.perf_counter(), self._counters()
        chains = [tuple(sequence.context[sequence.cache.context_length :]) for sequence in batch]
        rows = [Rows.of(chain, tree) for chain, tree in zip(chains, trees, strict=True)]
        logits = self.target.forward(rows, [sequence.cache for sequence in batch])
        after = self._counters()
        produced = []
        for sequence, tree, scores in zip(batch, trees, logits, strict=True):
            result = self._verify(sequence, tree, scores)
            produced.append(self._take(sequence, tree, result))
            stats = sequence.stats
            stats.bytes_read += after[0] - counters[0]
            stats.io_wait_s += after[1] - counters[1]
            seconds = time.perf_counter() - started
            if stats.target_passes == 0:
                stats.prefill_s += seconds
            else:
                stats.verify_s += seconds
            stats.target_passes += 1
            stats.rounds += 1
            stats.requests, stats.prompt_tokens = 1, sequence.prompt_length
        return produced

    def _propose(self, sequence: _Sequence) -> TokenTree:
        """A tree that cannot produce more tokens than may still come; the pass itself gives one."""
        room = self._room(sequence)
        if room <= 1 or isinstance(self.drafter, NoDraft):
            return TokenTree()
        started, passes = time.perf_counter(), self.drafter.passes
        try:
            request = DraftRequest(
                context=sequence.context,
                config=replace(self.config, tree_depth=min(self.config.tree_depth, room - 1)),
                sampler=sequence.sampler,
                end_tokens=sequence.end_tokens,
                vocab_size=self.target.vocab_size,
            )
            return _within(request, self.drafter.propose(request), type(self.drafter).__name__)
        finally:
            sequence.stats.draft_s += time.perf_counter() - started
            sequence.stats.draft_passes += self.drafter.passes - passes

    def _room(self, sequence: _Sequence) -> int:
        return min(sequence.max_new_tokens - sequence.produced, self.target.max_context - len(sequence.context))

    def _verify(self, sequence: _Sequence, tree: TokenTree, logits: torch.Tensor) -> Verification:
        """Walk the tree; `logits` [1 + nodes, vocabulary] belong to the root and then to each node."""
        sampler, config = sequence.sampler, self.config

        def position(node: int) -> int:
            return len(sequence.context) + (0 if node == ROOT else tree.depths[node])

        def choose(node: int) -> int:
            return sampler.choose(logits[node + 1], position(node))

        if config.acceptance == "rejection":
            return verify_rejection(
                tree,
                lambda node: sampler.processed(logits[node + 1][None])[0].double().softmax(dim=-1),
                lambda node, index: sampler.uniform(position(node), index),
                lambda node, left: sampler.draw(left, position(node)),
            )
        if config.acceptance == "threshold":
            assert config.acceptance_threshold is not None
            return verify_threshold(
                tree, lambda node: logits[node + 1].double().log_softmax(dim=-1), choose, config.acceptance_threshold
            )
        return verify_exact(tree, choose)

    def _take(self, sequence: _Sequence, tree: TokenTree, result: Verification) -> list[int]:
        """Let the accepted path and the bonus join the context, up to an end token; both caches follow."""
        path = list(result.path)
        tokens = [tree.tokens[node] for node in path] + [result.next_token]
        ended = next((i for i, token in enumerate(tokens) if token in sequence.end_tokens), None)
        if ended is not None:
            tokens, path = tokens[: ended + 1], path[: ended + 1]
        sequence.cache.keep(path)
        self.drafter.commit(path)
        sequence.context.extend(tokens)
        if ended is not None:
            sequence.finish_reason = "stop"
        elif sequence.produced >= sequence.max_new_tokens:
            sequence.finish_reason = "length"
        elif len(sequence.context) >= self.target.max_context:
            sequence.finish_reason = "context"
        stats = sequence.stats
        bonus = len(tokens) - len(path)
        stats.tokens += len(tokens)
        stats.draft_tokens += len(tree)
        stats.accepted_tokens += len(path)
        stats.bonus_tokens += bonus
        stats.rejected_tokens += int(result.rejected and bonus == 1)
        return tokens

    def _counters(self) -> tuple[int, float]:
        if not isinstance(self.target, ReadsWeights):
            return 0, 0.0
        counters = self.target.counters()
        return counters.bytes_read, counters.io_wait_s


def _within(request: DraftRequest, tree: TokenTree, drafter: str) -> TokenTree:
    """The tree, if it keeps to the request: one too deep would produce more tokens than were asked for.

    Raises:
        ConfigurationError: it does not.
    """
    config = request.config
    if len(tree) > config.tree_size or max(tree.depths, default=0) > config.tree_depth:
        raise ConfigurationError(
            f"{drafter} proposed {len(tree)} tokens, {max(tree.depths)} deep, where at most {config.tree_size}, "
            f"{config.tree_depth} deep, were asked for"
        )
    if not all(0 <= token < request.vocab_size for token in tree.tokens):
        raise ConfigurationError(f"{drafter} proposed a token outside the vocabulary of {request.vocab_size}")
    return tree


class Generation:
    """A request being decoded: iterates over rounds, each a list of new tokens."""

    def __init__(self, decoder: SpeculativeDecoder, sequence: _Sequence) -> None:
        self._decoder = decoder
        self._sequence = sequence

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        if self._sequence.finish_reason is not None:
            raise StopIteration
        return self._decoder._advance([self._sequence])[0]

    @property
    def output(self) -> DecoderOutput:
        """What has been produced so far."""
        sequence = self._sequence
        tokens = tuple(sequence.context[sequence.prompt_length :])
        return DecoderOutput(tokens, sequence.finish_reason, sequence.sampler.seed, replace(sequence.stats))
