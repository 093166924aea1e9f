"""The token tree: what one pass verifies.

A tree hangs below the *root*, the last token of the context, which is no node of the tree. Nodes are numbered so that
a parent comes before its children. (SpecInfer, arXiv 2305.09781.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

ROOT = -1


@dataclass(frozen=True)
class TokenTree:
    """Drafted continuations of one context.

    Attributes:
        tokens: token id of each node.
        parents: index of each node's parent, `ROOT` (-1) for children of the last context token.
        scores: the drafter's estimate of the log-probability that the target's path goes through the node.
        proposals: for rejection sampling alone: the distribution, float [vocabulary], from which the children of a
            node (or of `ROOT`) were drawn, in node order and without replacement.

    Raises:
        ValueError: lengths differ, a parent does not come before its child, or two siblings carry the same token.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    # Left out of comparison and hash, which tensors do not have.
    proposals: Mapping[int, torch.Tensor] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.parents) == len(self.scores):
            raise ValueError("tokens, parents and scores must have the same length")
        if any(not ROOT <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError("a parent must come before its children")
        if len(self._children) != len(self.tokens):
            raise ValueError("siblings must carry different tokens")

    @classmethod
    def chain(cls, tokens: Sequence[int], scores: Iterable[float] | None = None) -> TokenTree:
        """A single path."""
        count = len(tokens)
        return cls(tuple(tokens), tuple(range(-1, count - 1)), tuple(scores) if scores is not None else (0.0,) * count)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        return {
            (parent, token): node for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True))
        }

    @cached_property
    def _children_of(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        return children

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root; a child of the root has depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` (or of `ROOT`) that carries `token`, if there is one."""
        return self._children.get((node, token))

    def children(self, node: int) -> Sequence[int]:
        """The children of `node` (or of `ROOT`), in node order."""
        return self._children_of.get(node, [])

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from a child of the root down to `node`, inclusive; empty for `ROOT`."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def ancestor_mask(self) -> torch.Tensor:
        """Bool [nodes, nodes]: row i is True at i and at each of i's ancestors."""
        return ancestor_mask(self.parents)

    def subset(self, nodes: Sequence[int]) -> TokenTree:
        """The tree of `nodes` alone, renumbered in the order given.

        Raises:
            ValueError: a node is kept whose parent is not, or comes later.
        """
        renumbered = {ROOT: ROOT} | {node: index for index, node in enumerate(nodes)}
        if any(self.parents[node] not in renumbered for node in nodes):
            raise ValueError("a node is kept without its parent")
        return TokenTree(
            tuple(self.tokens[node] for node in nodes),
            tuple(renumbered[self.parents[node]] for node in nodes),
            tuple(self.scores[node] for node in nodes),
            {renumbered[node]: proposal for node, proposal in self.proposals.items() if node in renumbered},
        )


def ancestor_mask(parents: Sequence[int]) -> torch.Tensor:
    """Bool [n, n] for nodes with these parents (before their children; -1 for the root's)."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent != ROOT:
            mask[node] |= mask[parent]
    return mask
