"""The contract of a drafter: a context in, a token tree out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from drawbar.config import SpeculationConfig
from drawbar.sampling import Sampler
from drawbar.tree import TokenTree


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a drafter is asked for.

    Attributes:
        context: every token so far, prompt included; the last one is the tree's root.
        config: the tree's limits; `tree_depth` is already cut to what may still be produced.
        sampler: how the target will draw; rank candidates with its noise.
        end_tokens: tokens behind which nothing follows.
        vocab_size: ids from here on do not exist for the target.
    """

    context: Sequence[int]
    config: SpeculationConfig
    sampler: Sampler
    end_tokens: frozenset[int]
    vocab_size: int


class Drafter(Protocol):
    """Guesses how the target will go on. A wrong guess costs time, never a token."""

    passes: int
    """Forward calls made so far, for the statistics."""

    def propose(self, request: DraftRequest) -> TokenTree:
        """A tree of at most `tree_size` nodes and `tree_depth` levels; empty if there is nothing to guess."""

    def commit(self, path: Sequence[int]) -> None:
        """The nodes of the last tree that were accepted, from the root's child down."""


class NoDraft:
    """Proposes nothing: one token a pass."""

    def __init__(self) -> None:
        self.passes = 0

    def propose(self, request: DraftRequest) -> TokenTree:
        return TokenTree()

    def commit(self, path: Sequence[int]) -> None:
        return None
