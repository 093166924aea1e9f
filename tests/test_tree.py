from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawbar.tree import ROOT, TokenTree, ancestor_mask

VOCABULARY = 12


@st.composite
def trees(draw: st.DrawFn, max_size: int = 24) -> TokenTree:
    """Any tree: siblings differ, proposals at some of the nodes."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(draw(st.integers(0, max_size))):
        parent = draw(st.integers(ROOT, node - 1))
        taken = {tokens[other] for other in range(node) if parents[other] == parent}
        free = [token for token in range(VOCABULARY) if token not in taken]
        if not free:
            break
        tokens.append(draw(st.sampled_from(free)))
        parents.append(parent)
    scores = draw(st.lists(st.floats(-20, 0), min_size=len(tokens), max_size=len(tokens)))
    with_proposal = draw(st.sets(st.integers(ROOT, len(tokens) - 1)))
    proposals = {node: torch.full((VOCABULARY,), float(node)) for node in with_proposal}
    return TokenTree(tuple(tokens), tuple(parents), tuple(scores), proposals)


def words(tree: TokenTree) -> list[tuple[int, ...]]:
    """The tokens from the root to each node: what a node means, however it is numbered."""
    return [tuple(tree.tokens[step] for step in tree.path(node)) for node in range(len(tree))]


@given(trees())
def test_paths_depths_and_mask_agree(tree: TokenTree) -> None:
    mask = tree.ancestor_mask()
    assert mask.dtype == torch.bool
    assert mask.shape == (len(tree), len(tree))
    assert tree.path(ROOT) == ()
    for node in range(len(tree)):
        path = tree.path(node)
        assert path[-1] == node
        assert [tree.parents[step] for step in path] == [ROOT, *path[:-1]]
        assert tree.depths[node] == len(path)
        assert mask[node].nonzero().flatten().tolist() == sorted(path)
    assert torch.equal(mask, ancestor_mask(tree.parents))


@given(trees())
def test_no_two_nodes_mean_the_same(tree: TokenTree) -> None:
    assert len(set(words(tree))) == len(tree)


@given(trees())
def test_children_are_found_by_token(tree: TokenTree) -> None:
    found = []
    for parent in range(ROOT, len(tree)):
        children = list(tree.children(parent))
        assert children == [node for node in range(len(tree)) if tree.parents[node] == parent]
        by_token = {tree.tokens[child]: child for child in children}
        for token in range(-1, VOCABULARY + 1):
            assert tree.child(parent, token) == by_token.get(token)
        found += children
    assert sorted(found) == list(range(len(tree)))


@given(trees(), st.data())
def test_a_subset_keeps_what_its_nodes_mean(tree: TokenTree, data: st.DataObject) -> None:
    picked = data.draw(st.sets(st.integers(0, len(tree) - 1)) if len(tree) else st.just(set()))
    kept = sorted({step for node in picked for step in tree.path(node)})
    # Any order in which parents come first.
    ranks = data.draw(st.permutations(range(len(tree))))
    order = sorted(kept, key=lambda node: (tree.depths[node], ranks[node]))
    part = tree.subset(order)
    assert words(part) == [words(tree)[node] for node in order]
    assert part.scores == tuple(tree.scores[node] for node in order)
    assert part.depths == tuple(tree.depths[node] for node in order)
    assert part.ancestor_mask().equal(tree.ancestor_mask()[order][:, order])
    expected = {ROOT: tree.proposals.get(ROOT)} | {i: tree.proposals.get(node) for i, node in enumerate(order)}
    assert {node: part.proposals.get(node) for node in expected} == expected
    assert set(part.proposals) <= set(expected)


@given(trees())
def test_the_subset_of_all_nodes_is_the_tree(tree: TokenTree) -> None:
    assert tree.subset(range(len(tree))) == tree
    assert len(tree.subset(())) == 0


@given(trees(), st.data())
def test_a_subset_without_a_parent_is_refused(tree: TokenTree, data: st.DataObject) -> None:
    inner = [node for node in range(len(tree)) if tree.parents[node] != ROOT]
    if not inner:
        return
    node = data.draw(st.sampled_from(inner))
    path = tree.path(node)
    with pytest.raises(ValueError, match="parent"):
        tree.subset([*path[:-2], node])
    with pytest.raises(ValueError, match="parent"):
        tree.subset([*path[:-2], node, path[-2]])
    with pytest.raises(ValueError, match="siblings"):
        tree.subset([*path, node])


@given(st.lists(st.integers(0, 3), max_size=20))
def test_a_chain_is_one_path(tokens: list[int]) -> None:
    tree = TokenTree.chain(tokens)
    count = len(tokens)
    assert len(tree) == count
    assert tree.tokens == tuple(tokens)
    assert tree.scores == (0.0,) * count
    assert tree.depths == tuple(range(1, count + 1))
    assert torch.equal(tree.ancestor_mask(), torch.ones(count, count).tril().bool())
    assert tree.path(count - 1) == tuple(range(count))


def test_a_chain_takes_scores() -> None:
    assert TokenTree.chain([5, 5], iter([-0.5, -1.0])).scores == (-0.5, -1.0)
    with pytest.raises(ValueError, match="same length"):
        TokenTree.chain([5, 5], [0.0])


def test_the_empty_tree() -> None:
    tree = TokenTree()
    assert len(tree) == 0
    assert tree == TokenTree.chain([])
    assert tree.depths == ()
    assert list(tree.children(ROOT)) == []
    assert tree.child(ROOT, 0) is None
    assert tree.ancestor_mask().shape == (0, 0)


@pytest.mark.parametrize(
    ("tokens", "parents", "scores", "message"),
    [
        ((1,), (), (0.0,), "same length"),
        ((1,), (-1,), (), "same length"),
        ((), (-1,), (0.0,), "same length"),
        ((1,), (0,), (0.0,), "come before"),
        ((1, 2), (1, -1), (0.0, 0.0), "come before"),
        ((1, 2), (-1, 2), (0.0, 0.0), "come before"),
        ((1, 2), (-1, -2), (0.0, 0.0), "come before"),
        ((1, 1), (-1, -1), (0.0, 0.0), "siblings"),
        ((1, 2, 2), (-1, 0, 0), (0.0, 0.0, 0.0), "siblings"),
    ],
)
def test_what_is_no_tree_is_refused(
    tokens: tuple[int, ...], parents: tuple[int, ...], scores: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree(tokens, parents, scores)


def test_cousins_may_carry_the_same_token() -> None:
    tree = TokenTree((1, 2, 3, 3, 1), (-1, -1, 0, 1, 2), (0.0,) * 5)
    assert tree.child(0, 3) == 2
    assert tree.child(1, 3) == 3
    assert tree.child(ROOT, 3) is None
    assert tree.child(2, 1) == 4


def test_trees_with_proposals_compare_and_hash() -> None:
    first, second = (TokenTree((1,), (-1,), (0.0,), {ROOT: torch.ones(4)}) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != TokenTree.chain([2])
