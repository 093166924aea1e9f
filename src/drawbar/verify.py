"""Walk a token tree with the target's judgement: pure functions, one for each acceptance rule.

Each takes callables that are asked only for the nodes that the walk visits (`ROOT` first), so the cost follows the
accepted path and not the size of the tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from drawbar.errors import ConfigurationError
from drawbar.tree import ROOT, TokenTree


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome of one pass for one sequence.

    Attributes:
        path: accepted nodes, from a child of the root downwards.
        next_token: the token that the target itself gives after the path (the bonus).
        rejected: whether the walk ended at a node whose drafted children were all turned down.
    """

    path: tuple[int, ...]
    next_token: int
    rejected: bool


def verify_exact(tree: TokenTree, choose: Callable[[int], int]) -> Verification:
    """Follow the target's own draws for as long as the tree holds them (SpecExec, arXiv 2406.02532).

    Args:
        tree: what was drafted.
        choose: the token that the target draws after a node; a function of the node's path and position alone.
    """
    node = ROOT
    path: list[int] = []
    while True:
        token = choose(node)
        child = tree.child(node, token)
        if child is None:
            return Verification(tuple(path), token, rejected=bool(tree.children(node)))
        path.append(child)
        node = child


def verify_rejection(
    tree: TokenTree,
    target: Callable[[int], torch.Tensor],
    uniform: Callable[[int, int], float],
    draw: Callable[[int, torch.Tensor], int],
) -> Verification:
    """Speculative sampling (arXiv 2211.17192, 2302.01318), recursive over siblings drawn without replacement.

    Args:
        tree: drafted with `proposals` for every node that has children.
        target: the target's processed distribution after a node, float64 [vocabulary], summing to 1.
        uniform: a number in (0, 1) for (node, index of the sibling).
        draw: a token from a distribution, for a node.

    Raises:
        ConfigurationError: the drafter gave no proposal for a node that has children.
    """
    node = ROOT
    path: list[int] = []
    while True:
        residual = target(node)
        accepted = None
        if tree.children(node):
            accepted, residual = _accept_sibling(tree, node, residual, uniform)
        if accepted is None:
            return Verification(tuple(path), draw(node, residual), rejected=bool(tree.children(node)))
        path.append(accepted)
        node = accepted


def _accept_sibling(
    tree: TokenTree, node: int, target: torch.Tensor, uniform: Callable[[int, int], float]
) -> tuple[int | None, torch.Tensor]:
    """The accepted child of `node`, or None with what is left of the target's distribution."""
    if node not in tree.proposals:
        raise ConfigurationError("acceptance='rejection' needs a drafter that says what it drew its tokens from")
    proposal = torch.zeros_like(target)
    drafted = tree.proposals[node].double()
    proposal[: len(drafted)] = drafted[: len(target)]
    for index, child in enumerate(tree.children(node)):
        token = tree.tokens[child]
        # Strict: a token that the target gives no probability is never accepted.
        if uniform(node, index) * float(proposal[token]) < float(target[token]):
            return child, target
        left = (target - proposal).clamp_(min=0)
        if float(left.sum()) <= 0:
            return None, target
        target = left / left.sum()
        proposal[token] = 0
        remaining = proposal.sum()
        if float(remaining) <= 0:
            return None, target
        proposal /= remaining
    return None, target


def verify_threshold(
    tree: TokenTree,
    target: Callable[[int], torch.Tensor],
    choose: Callable[[int], int],
    threshold: float,
) -> Verification:
    """Lossy: take the likeliest drafted child that is at least `threshold` times as likely as the target's best.

    Args:
        tree: what was drafted.
        target: the target's log-probabilities after a node, before temperature and filters, [vocabulary].
        choose: the target's own token after a node, for where no child will do.
        threshold: fraction of the largest probability, in (0, 1].
    """
    node = ROOT
    path: list[int] = []
    floor = float(torch.tensor(threshold, dtype=torch.float64).log())
    while True:
        children = tree.children(node)
        if not children:
            return Verification(tuple(path), choose(node), rejected=False)
        scores = target(node)
        best = max(children, key=lambda child: float(scores[tree.tokens[child]]))
        # Written so that NaN accepts nothing, and `choose` gets to refuse it.
        if not float(scores[tree.tokens[best]]) >= float(scores.max()) + floor:
            return Verification(tuple(path), choose(node), rejected=True)
        path.append(best)
        node = best
