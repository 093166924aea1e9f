"""Keys and values of one sequence: the context, and behind it the tree nodes of the current round."""

from __future__ import annotations

from collections.abc import Sequence

import torch

GRANULE = 64  # rows by which storage grows


class KVCache:
    """Per layer, two tensors [1, heads, capacity, width] of which the first rows are in use.

    Rows written by a pass count only once `commit` has been called, so an aborted pass leaves the cache as it was.

    Args:
        layers: how many layers write to it.
        capacity: rows to reserve at the first write; storage grows by itself past that.
    """

    def __init__(self, layers: int, capacity: int = GRANULE) -> None:
        self._keys: list[torch.Tensor | None] = [None] * layers
        self._values: list[torch.Tensor | None] = [None] * layers
        self._capacity = _round_up(max(capacity, 1))
        self._context = 0
        self._depths: list[int] = []

    @property
    def context_length(self) -> int:
        return self._context

    @property
    def node_depths(self) -> Sequence[int]:
        """Depths of the tree nodes that are held, in order of arrival."""
        return self._depths

    @property
    def length(self) -> int:
        """Rows in use: context and nodes."""
        return self._context + len(self._depths)

    @property
    def nbytes(self) -> int:
        """Bytes of storage, used or reserved."""
        return sum(t.nbytes for t in (*self._keys, *self._values) if t is not None)

    def write(
        self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor, padded: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store rows `start`, `start + 1`, ... of a layer and return its rows from 0 on.

        Args:
            layer: index of the layer.
            start: row to begin at; the rows before it are in use.
            keys: [1, heads, rows, key width].
            values: [1, heads, rows, value width].
            padded: how many rows to return, at least `start + rows`; those behind the stored ones hold no meaning.
        """
        end = start + keys.shape[2]
        views = []
        for store, new in ((self._keys, keys), (self._values, values)):
            held = self._fit(store[layer], new, max(end, padded), start)
            held[:, :, start:end] = new
            store[layer] = held
            views.append(held[:, :, :padded])
        return views[0], views[1]

    def _fit(self, held: torch.Tensor | None, new: torch.Tensor, rows: int, used: int) -> torch.Tensor:
        if held is not None and held.shape[2] >= rows:
            return held
        self._capacity = max(self._capacity, _round_up(rows))
        grown = new.new_zeros((1, new.shape[1], self._capacity, new.shape[3]))
        if held is not None:
            grown[:, :, :used] = held[:, :, :used]
        return grown

    def commit(self, chain: int, depths: Sequence[int]) -> None:
        """Count the rows of a finished pass: `chain` context rows, then nodes at `depths`.

        Raises:
            ValueError: context rows while nodes are held; `keep` or `truncate` comes first.
        """
        if chain and self._depths:
            raise ValueError("the context cannot grow behind tree nodes: keep or truncate first")
        self._context += chain
        self._depths.extend(depths)

    def keep(self, path: Sequence[int]) -> None:
        """Let these nodes join the context, in this order, and forget the others (gather and compact).

        Raises:
            IndexError: a node that is not held.
        """
        if any(not 0 <= node < len(self._depths) for node in path):
            raise IndexError(f"nodes {list(path)} are not all among the {len(self._depths)} held")
        start, end = self._context, self._context + len(path)
        if list(path) != list(range(len(path))):
            index = torch.tensor([self._context + node for node in path])
            for store in (self._keys, self._values):
                for held in store:
                    if held is not None:
                        held[:, :, start:end] = held.index_select(2, index.to(held.device))
        self._context = end
        self._depths = []

    def truncate(self, length: int) -> None:
        """Forget every node, and the context from `length` on.

        Raises:
            ValueError: more than is held, or negative.
        """
        if not 0 <= length <= self._context:
            raise ValueError(f"cannot truncate {self._context} context rows to {length}")
        self._context = length
        self._depths = []


def _round_up(rows: int) -> int:
    return -(-rows // GRANULE) * GRANULE
