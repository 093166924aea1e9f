"""Drafting with a small model: a tree grown best first, one batched call a step (SpecExec, arXiv 2406.02532)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from drawbar.config import GREEDY_TEMPERATURE, SpeculationConfig
from drawbar.drafting.base import DraftRequest
from drawbar.errors import NumericalError
from drawbar.models.base import CausalModel, Rows, SequenceCache
from drawbar.sampling import DRAFT_NOISE, Sampler
from drawbar.tree import ROOT, TokenTree

# In rejection sampling a tree's shape must not depend on which tokens were drawn. Chance that the target accepts the
# first, second, ... sibling, as measured for an int4 copy of the target; only their order of size matters.
_RANK_ACCEPTANCE = (0.72, 0.12, 0.05, 0.03, 0.02, 0.015, 0.01, 0.008)


class ModelDrafter:
    """Drafts with a resident model, whose cache never holds a token that the context does not.

    Args:
        model: the draft.
    """

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self.passes = 0
        self._cache: SequenceCache | None = None
        self._cached: list[int] = []
        self._growth: _Growth | None = None

    def propose(self, request: DraftRequest) -> TokenTree:
        """See `Drafter.propose`. Drafts nothing where the draft's own context or its vocabulary ends.

        Raises:
            NumericalError: the draft's logits are NaN or infinite.
        """
        context, config = request.context, request.config
        room = self.model.max_context - len(context)
        self._growth = None
        if room < 0 or max(context) >= self.model.vocab_size:
            return TokenTree()
        cache = self._synchronise(context, config)
        growth = _Growth(request, max_depth=min(config.tree_depth, room + 1))
        logits = self._forward(Rows(tuple(context[cache.context_length :])), cache)
        self._cached = list(context)
        growth.expand([ROOT], logits)
        while frontier := growth.frontier():
            logits = self._forward(growth.rows(frontier), cache)
            growth.expand(frontier, logits)
        self._growth = growth
        return growth.finish()

    def commit(self, path: Sequence[int]) -> None:
        """Keep the accepted nodes that were forwarded; the next proposal forwards what is missing."""
        growth, cache = self._growth, self._cache
        if growth is None or cache is None:
            return
        kept = growth.forwarded(path)
        cache.keep([growth.arrival[node] for node in kept])
        self._cached += [growth.tokens[node] for node in kept]
        self._growth = None

    def _synchronise(self, context: Sequence[int], config: SpeculationConfig) -> SequenceCache:
        """A cache that holds a true prefix of the context, the last token left out."""
        if self._cache is None:
            self._cache = self.model.new_cache(len(context) + config.tree_size)
        shared = 0
        for held, token in zip(self._cached, context[:-1], strict=False):
            if held != token:
                break
            shared += 1
        self._cache.truncate(min(shared, self._cache.context_length))
        self._cached = list(context[: self._cache.context_length])
        return self._cache

    def _forward(self, rows: Rows, cache: SequenceCache) -> torch.Tensor:
        self.passes += 1
        (logits,) = self.model.forward([rows], [cache])
        return logits


@dataclass
class _Growth:
    """A tree while it grows. Nodes are numbered in order of birth; scores fall along every path."""

    request: DraftRequest
    max_depth: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    arrival: dict[int, int] = field(default_factory=dict)
    proposals: dict[int, torch.Tensor] = field(default_factory=dict)
    chosen: list[int] = field(default_factory=list)
    _seen: torch.Tensor = field(default_factory=lambda: torch.zeros((0, 0), dtype=torch.bool))

    def frontier(self) -> list[int]:
        """The nodes to forward next: the best of those whose children could still enter the tree."""
        config = self.request.config
        floor = self._floor()
        ready = [node for node in self.open if self.scores[node] > floor]
        ready.sort(key=lambda node: (-self.scores[node], node))
        ready = ready[: config.tree_width]
        if sum(math.exp(self.scores[node]) for node in ready) < config.min_gain:
            return []
        return ready

    def _floor(self) -> float:
        """The score that a node must beat to be among the best of the tree."""
        size = self.request.config.tree_size
        if len(self.scores) < size:
            return -math.inf
        return sorted(self.scores, reverse=True)[size - 1]

    def rows(self, frontier: Sequence[int]) -> Rows:
        """The frontier as rows behind the nodes that were forwarded before; counts them as forwarded."""
        start, end = len(self.arrival), len(self.arrival) + len(frontier)
        seen = torch.zeros((end, end), dtype=torch.bool)
        seen[:start, :start] = self._seen
        for row, node in enumerate(frontier, start):
            self.arrival[node] = row
            if self.parents[node] != ROOT:
                seen[row] = seen[self.arrival[self.parents[node]]]
            seen[row, row] = True
        self._seen = seen
        picked = set(frontier)
        self.open = [node for node in self.open if node not in picked]
        return Rows(
            (),
            tuple(self.tokens[node] for node in frontier),
            tuple(self.depths[node] for node in frontier),
            seen[start:],
        )

    def expand(self, nodes: Sequence[int], logits: torch.Tensor) -> None:
        """Add the children of these nodes, given the logits behind each, [nodes, vocabulary]."""
        config = self.request.config
        depths = [self._depth(node) + 1 for node in nodes]
        width = min(logits.shape[-1], self.request.vocab_size)
        count = min(config.branching, config.tree_size, width)
        if config.acceptance == "rejection":
            scores, tokens = self._draw(nodes, logits[:, :width], depths, count)
        else:
            scores, tokens = self._rank(logits[:, :width], depths, count)
        floor = self._floor()
        for node, depth, node_scores, node_tokens in zip(nodes, depths, scores, tokens, strict=True):
            base = 0.0 if node == ROOT else self.scores[node]
            for score, token in zip(node_scores, node_tokens, strict=True):
                total = base + min(score, 0.0)
                if total <= floor or math.isinf(total):
                    break
                self._add(node, depth, token, total)

    def _depth(self, node: int) -> int:
        return 0 if node == ROOT else self.depths[node]

    def _add(self, parent: int, depth: int, token: int, score: float) -> None:
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(depth)
        self.scores.append(score)
        if depth < self.max_depth and token not in self.request.end_tokens:
            self.open.append(node)

    def _rank(
        self, logits: torch.Tensor, depths: Sequence[int], count: int
    ) -> tuple[list[list[float]], list[list[int]]]:
        """The likeliest children, as the target is expected to draw them: with the noise it will draw with."""
        sampler, config = self.request.sampler, self.request.config
        if sampler.greedy or config.acceptance == "threshold":
            temperature = max(config.draft_temperature or 1.0, GREEDY_TEMPERATURE)
            scores = checked(logits.float()) / temperature
        else:
            scores = sampler.processed(logits, config.draft_temperature)
            scores = scores + self._noise(depths, logits.shape[-1], purpose=None)
        best = scores.log_softmax(dim=-1).topk(count, dim=-1)
        return best.values.tolist(), best.indices.tolist()

    def _draw(
        self, nodes: Sequence[int], logits: torch.Tensor, depths: Sequence[int], count: int
    ) -> tuple[list[list[float]], list[list[int]]]:
        """Children drawn from the draft's distribution without replacement (Gumbel top-k), scored by rank alone."""
        processed = self.request.sampler.processed(logits, self.request.config.draft_temperature)
        for node, row in zip(nodes, processed, strict=True):
            self.proposals[node] = row.softmax(dim=-1)
        noisy = processed + self._noise(depths, logits.shape[-1], purpose=DRAFT_NOISE)
        best = noisy.topk(min(count, len(_RANK_ACCEPTANCE)), dim=-1)
        ranks = [math.log(chance) for chance in _RANK_ACCEPTANCE[: best.values.shape[-1]]]
        scores = [
            [rank if math.isfinite(value) else -math.inf for rank, value in zip(ranks, row, strict=True)]
            for row in best.values.tolist()
        ]
        return scores, best.indices.tolist()

    def _noise(self, depths: Sequence[int], width: int, purpose: int | None) -> torch.Tensor:
        sampler: Sampler = self.request.sampler
        position = len(self.request.context) - 1
        rows = [
            sampler.noise(position + depth, width)
            if purpose is None
            else sampler.noise(position + depth, width, purpose)
            for depth in depths
        ]
        return torch.stack(rows)

    def finish(self) -> TokenTree:
        """The best nodes as a tree."""
        size = self.request.config.tree_size
        best = sorted(range(len(self.scores)), key=lambda node: (-self.scores[node], node))[:size]
        self.chosen = sorted(best)
        whole = TokenTree(tuple(self.tokens), tuple(self.parents), tuple(self.scores), self.proposals)
        return whole.subset(self.chosen)

    def forwarded(self, path: Sequence[int]) -> list[int]:
        """The nodes of an accepted path of the finished tree that were forwarded: a beginning of it."""
        nodes = [self.chosen[node] for node in path]
        return [node for node in nodes if node in self.arrival]


def checked(logits: torch.Tensor) -> torch.Tensor:
    """The logits, if each row has a finite peak.

    Raises:
        NumericalError: a row holds NaN or +inf, or nothing but -inf.
    """
    if not bool(torch.isfinite(logits.amax(dim=-1)).all()):
        raise NumericalError("the draft's logits are not finite; use another draft, or --draft none")
    return logits
