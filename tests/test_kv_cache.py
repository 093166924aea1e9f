"""The cache against a model of it in plain lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drawbar.kv_cache import GRANULE, KVCache

LAYERS, HEADS, KEY_WIDTH, VALUE_WIDTH = 2, 3, 4, 2


def rows(numbers: list[int], layer: int, width: int) -> torch.Tensor:
    """[1, heads, rows, width]: each row filled with a number of its own, told apart by layer, head and column."""
    base = torch.tensor(numbers, dtype=torch.float64)[None, None, :, None]
    head = torch.arange(HEADS)[None, :, None, None] / 16
    column = torch.arange(width)[None, None, None, :] / 256
    return base + head + column + layer / 4096


def write(cache: KVCache, start: int, numbers: list[int], padded: int | None = None) -> list[torch.Tensor]:
    held = []
    for layer in range(LAYERS):
        keys, values = rows(numbers, layer, KEY_WIDTH), rows(numbers, layer, VALUE_WIDTH)
        held += cache.write(layer, start, keys, values, start + len(numbers) if padded is None else padded)
    return held


def check(held: list[torch.Tensor], numbers: list[int]) -> None:
    for index, tensor in enumerate(held):
        width = VALUE_WIDTH if index % 2 else KEY_WIDTH
        assert torch.equal(tensor[:, :, : len(numbers)], rows(numbers, index // 2, width))


def read(cache: KVCache, numbers: list[int]) -> None:
    """What the cache holds, seen by writing one more row behind it (and not committing it)."""
    check(write(cache, cache.length, [-7]), [*numbers, -7])


OPERATIONS = st.one_of(
    st.tuples(st.just("chain"), st.integers(1, 90), st.booleans()),
    st.tuples(st.just("nodes"), st.integers(1, 90), st.booleans()),
    st.tuples(st.just("keep"), st.integers(0, 2**32), st.booleans()),
    st.tuples(st.just("truncate"), st.integers(0, 2**32), st.booleans()),
)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 200), st.lists(OPERATIONS, max_size=12))
def test_behaves_like_two_lists(capacity: int, operations: list[tuple[str, int, bool]]) -> None:
    cache = KVCache(LAYERS, capacity)
    context: list[int] = []
    nodes: list[int] = []
    count = 0
    for kind, amount, flag in operations:
        if kind in ("chain", "nodes"):
            if kind == "chain" and nodes:
                with pytest.raises(ValueError, match="keep or truncate"):
                    cache.commit(1, ())
                continue
            new = list(range(count, count + amount))
            count += amount
            held = write(cache, len(context) + len(nodes), new, len(context) + len(nodes) + amount + 5)
            check(held, context + nodes + new)
            if flag:  # the pass was broken off
                read(cache, context + nodes)
                continue
            if kind == "chain":
                cache.commit(amount, ())
                context += new
            else:
                cache.commit(0, [1] * amount)
                nodes += new
        elif kind == "keep":
            generator = torch.Generator().manual_seed(amount)
            picked = torch.randperm(len(nodes), generator=generator).tolist()[: amount % (len(nodes) + 1)]
            path = sorted(picked) if flag else picked
            cache.keep(path)
            context += [nodes[node] for node in path]
            nodes = []
        else:
            length = amount % (len(context) + 1)
            cache.truncate(length)
            del context[length:]
            nodes = []
        assert (cache.context_length, cache.length) == (len(context), len(context) + len(nodes))
        assert len(cache.node_depths) == len(nodes)
        read(cache, context + nodes)


def test_storage_is_reserved_at_the_first_write_and_grows_in_steps() -> None:
    cache = KVCache(LAYERS, 100)
    assert cache.nbytes == 0
    per_row = LAYERS * HEADS * (KEY_WIDTH + VALUE_WIDTH) * 8
    write(cache, 0, [1])
    assert cache.nbytes == 2 * GRANULE * per_row
    cache.commit(1, ())
    write(cache, 1, list(range(200)))
    assert cache.nbytes == 4 * GRANULE * per_row


def test_padding_grows_the_storage_too() -> None:
    cache = KVCache(1, 8)
    keys, values = cache.write(0, 0, rows([1], 0, KEY_WIDTH), rows([1], 0, VALUE_WIDTH), 130)
    assert keys.shape == (1, HEADS, 130, KEY_WIDTH) and values.shape == (1, HEADS, 130, VALUE_WIDTH)


def test_scattered_paths_are_compacted_behind_the_context() -> None:
    cache = KVCache(LAYERS, 16)
    write(cache, 0, [1, 2])
    cache.commit(2, ())
    write(cache, 2, [10, 11, 12, 13, 14])
    cache.commit(0, [1, 1, 2, 2, 3])
    assert list(cache.node_depths) == [1, 1, 2, 2, 3]
    cache.keep([1, 3, 4])
    assert (cache.context_length, cache.length) == (5, 5)
    read(cache, [1, 2, 11, 13, 14])


def test_nodes_may_come_in_several_passes() -> None:
    cache = KVCache(LAYERS, 16)
    write(cache, 0, [1])
    cache.commit(1, ())
    write(cache, 1, [10, 11])
    cache.commit(0, [1, 1])
    write(cache, 3, [12])
    cache.commit(0, [2])
    cache.keep([1, 2])
    read(cache, [1, 11, 12])


def test_a_pass_that_is_broken_off_between_layers_changes_nothing() -> None:
    cache = KVCache(LAYERS, 16)
    write(cache, 0, [1, 2])
    cache.commit(2, ())
    cache.write(0, 2, rows([8, 9], 0, KEY_WIDTH), rows([8, 9], 0, VALUE_WIDTH), 4)
    assert cache.length == 2
    read(cache, [1, 2])


@pytest.mark.parametrize("path", [[2], [-1], [0, 5]])
def test_a_node_that_is_not_held_is_refused_and_nothing_is_lost(path: list[int]) -> None:
    cache = KVCache(LAYERS, 16)
    write(cache, 0, [1, 2, 3])
    cache.commit(1, [1, 1])
    with pytest.raises(IndexError, match="not all among the 2 held"):
        cache.keep(path)
    read(cache, [1, 2, 3])


@pytest.mark.parametrize("length", [-1, 2])
def test_truncating_to_more_than_is_held_is_refused(length: int) -> None:
    cache = KVCache(LAYERS, 16)
    write(cache, 0, [1, 2, 3])
    cache.commit(1, [1, 1])
    with pytest.raises(ValueError, match="cannot truncate 1 context rows"):
        cache.truncate(length)
    assert cache.length == 3
