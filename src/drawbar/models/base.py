"""The contract of a language model in drawbar: rows in, logits out, over a cache that can roll back.

Whoever brings their own target or draft implements `CausalModel` and, for its caches, `SequenceCache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from drawbar.tree import TokenTree, ancestor_mask


@dataclass(frozen=True)
class Rows:
    """What one pass computes for one sequence: new context tokens, then tree nodes below the last of the context.

    Attributes:
        chain: ids of new context tokens, in order. They join the context for good. May be empty.
        tree: ids of tree nodes.
        depths: depth of each tree node; its position is that of the last context token plus its depth.
        visible: bool [tree, earlier + tree]: which tree nodes (those that earlier calls left in the cache, then
            these) each node sees. The whole context is visible to every node.
    """

    chain: tuple[int, ...]
    tree: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    visible: torch.Tensor | None = None

    @classmethod
    def of(cls, chain: Sequence[int], tree: TokenTree | None = None) -> Rows:
        """New context tokens and a whole tree below the last of them."""
        if not tree:
            return cls(tuple(chain))
        return cls(tuple(chain), tree.tokens, tree.depths, ancestor_mask(tree.parents))

    def __len__(self) -> int:
        return len(self.chain) + len(self.tree)

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        return self.chain + self.tree

    @property
    def wanted(self) -> range:
        """Rows whose logits are returned: the last chain row, if there is one, and every tree row."""
        return range(max(len(self.chain) - 1, 0), len(self))


class SequenceCache(Protocol):
    """What a model remembers of one sequence: its context, and behind it the tree nodes of the round."""

    @property
    def context_length(self) -> int:
        """Tokens of the context that are held."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    def keep(self, path: Sequence[int]) -> None:
        """Let the nodes at these indices (a path, in order of their arrival since the last `keep`) join the context,
        and forget the other nodes."""

    def truncate(self, length: int) -> None:
        """Forget every node, and the context from `length` on."""


class CausalModel(Protocol):
    """A language model that computes rows of several sequences in one pass."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def max_context(self) -> int:
        """Positions that the model can attend over."""

    def new_cache(self, capacity: int) -> SequenceCache:
        """An empty cache for one sequence of up to `capacity` rows, tree nodes included."""

    def forward(self, batch: Sequence[Rows], caches: Sequence[SequenceCache]) -> list[torch.Tensor]:
        """One pass. Returns for each sequence the logits of its wanted rows, [len(rows.wanted), vocab_size].

        The caches then hold the rows. After an error they hold what they held before.
        """


@dataclass
class PathCache:
    """A cache for models that need nothing but the tokens: it stores the ids themselves."""

    context: list[int]
    nodes: list[int]

    def __init__(self) -> None:
        self.context = []
        self.nodes = []

    @property
    def context_length(self) -> int:
        return len(self.context)

    @property
    def nbytes(self) -> int:
        return 8 * (len(self.context) + len(self.nodes))

    def append(self, rows: Rows) -> None:
        """Take in the rows of a pass."""
        self.context.extend(rows.chain)
        self.nodes.extend(rows.tree)

    def keep(self, path: Sequence[int]) -> None:
        self.context.extend(self.nodes[index] for index in path)
        self.nodes = []

    def truncate(self, length: int) -> None:
        del self.context[length:]
        self.nodes = []
