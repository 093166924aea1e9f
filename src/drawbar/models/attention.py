"""Exact attention: float64 inside, so that a row's result does not depend on what else is in the pass.

A sum's rounding depends on the order of its terms, and the order depends on how many keys and rows there are. In
float64 the difference lies some 40 bits below what bfloat16 keeps (29 below float32), so rounding the result back
removes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from drawbar.errors import UnsupportedModelError
from drawbar.kv_cache import KVCache
from drawbar.models.base import Rows

ATTENTION_NAME = "drawbar_exact"

SCORE_BYTES = 48 << 20  # of float64 scores held at a time
MASK_BYTES = 16 << 20  # of masks that a sequence keeps for the layers to come

# What layers hand over besides the arguments of `exact_attention`, and that changes nothing for inference.
_HARMLESS = {
    "position_ids",
    "output_router_logits",
    "output_hidden_states",
    "use_cache",
    "output_attentions",
    "dropout",
    "is_causal",
    "cache_position",
    "logits_to_keep",
}


@dataclass(frozen=True)
class Span:
    """One sequence's rows within a pass, and what they see.

    Attributes:
        rows: the sequence's rows.
        cache: its cache, as it was before the pass.
        start: index of the first row in the pass.
    """

    rows: Rows
    cache: KVCache
    start: int
    _blocked: dict[tuple[int, int, int | None], torch.Tensor] = field(default_factory=dict, compare=False)

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    @property
    def base(self) -> int:
        """Cache rows in use before the pass."""
        return self.cache.length

    def positions(self) -> torch.Tensor:
        """Position of each row, int64 [rows]."""
        context = self.cache.context_length
        last = context + len(self.rows.chain) - 1
        chain = torch.arange(context, context + len(self.rows.chain))
        return torch.cat((chain, torch.tensor([last + depth for depth in self.rows.depths], dtype=torch.long)))

    def key_positions(self) -> torch.Tensor:
        """Position of each key, int64 [base + rows]."""
        context = self.cache.context_length
        held = torch.tensor([context - 1 + depth for depth in self.cache.node_depths], dtype=torch.long)
        return torch.cat((torch.arange(context), held, self.positions()))

    def blocked(self, first: int, last: int, window: int | None, device: torch.device) -> torch.Tensor:
        """The complement of `mask`; made once for all the layers of a pass, unless a long prompt has too many."""
        key = (first, last, window)
        if key in self._blocked:
            return self._blocked[key]
        blocked = ~self.mask(first, last, window).to(device)
        if sum(mask.nbytes for mask in self._blocked.values()) + blocked.nbytes <= MASK_BYTES:
            self._blocked[key] = blocked
        return blocked

    def mask(self, first: int, last: int, window: int | None) -> torch.Tensor:
        """Bool [last - first, base + last]: the keys that rows `first` to `last` (within the span) see."""
        chain, keys = len(self.rows.chain), self.base + last
        rows = torch.arange(first, last)[:, None]
        columns = torch.arange(keys)[None, :]
        context = self.cache.context_length + chain
        mask = columns <= torch.where(rows < chain, self.base + rows, context - 1)
        if last > chain:
            nodes = max(first, chain)
            visible = self.rows.visible
            assert visible is not None
            mask[nodes - first :, context:] = visible[nodes - chain : last - chain, : keys - context]
        if window is not None:
            mask &= self.key_positions()[None, :keys] > self.positions()[first:last, None] - window
        return mask


@dataclass(frozen=True)
class Slice:
    """The part of a pass that a layer computes at a time: pass rows `first` to `last`, padded to `padded` rows.

    `precision` is what attention computes in: float64, but for drafts that need not be exact.
    """

    spans: Sequence[Span]
    first: int
    last: int
    padded: int
    precision: torch.dtype = torch.float64

    def parts(self) -> list[tuple[Span, int, int]]:
        """The spans that this slice touches, with the rows, counted within the span, that it holds of each."""
        parts = []
        for span in self.spans:
            first, last = max(span.start, self.first), min(span.end, self.last)
            if first < last:
                parts.append((span, first - span.start, last - span.start))
        return parts


def exact_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    layout: Slice | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for transformers' `AttentionInterface`.

    Args:
        module: the attention layer.
        query: [1, heads, rows of the slice, width].
        key: [1, key heads, keys of all spans, width]; each span's keys are padded as `PassCache` says.
        value: [1, key heads, keys of all spans, value width].
        attention_mask: None; the mask follows from `layout`.
        scaling: factor on the scores.
        sliding_window: how far back a row sees, itself included.
        softcap: scores are capped smoothly at this magnitude.
        s_aux: a logit for each head that takes part in the softmax and carries no value (attention sink).
        layout: the slice of the pass.

    Returns:
        [1, rows, heads, value width] and None.

    Raises:
        UnsupportedModelError: the layer asks for something that would change the result and is not known here.
    """
    unknown = {name for name, given in others.items() if given is not None and name not in _HARMLESS}
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unknown.add("keys on both sides")
    if unknown or attention_mask is not None or layout is None:
        asked = ", ".join(sorted(unknown)) or "a mask of its own"
        raise UnsupportedModelError(f"{type(module).__name__} asks its attention for {asked}, which drawbar cannot do")
    output = query.new_zeros((query.shape[2], query.shape[1], value.shape[3]))
    offset = 0
    for span, first, last in layout.parts():
        held = span.base + last
        row = span.start + first - layout.first
        output[row : row + last - first] = _attend(
            query[0, :, row : row + last - first],
            key[0, :, offset : offset + held],
            value[0, :, offset : offset + held],
            span.blocked(first, last, sliding_window, query.device),
            scaling,
            softcap,
            s_aux,
            layout.precision,
        )
        offset += held
    return output[None], None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocked: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    precision: torch.dtype,
) -> torch.Tensor:
    """One sequence: query [heads, rows, width], key and value [key heads, keys, width] -> [rows, heads, width]."""
    heads, rows, width = query.shape
    key_heads, keys, _ = key.shape
    group = heads // key_heads
    output = query.new_empty((rows, heads, value.shape[2]))
    step = max(1, min(rows, SCORE_BYTES // (8 * group * keys)))
    heads_step = max(1, SCORE_BYTES // (8 * group * keys * step))
    for head in range(0, key_heads, heads_step):
        wide_key = key[head : head + heads_step].to(precision).transpose(1, 2)
        wide_value = value[head : head + heads_step].to(precision)
        # No weight, not even zero, takes a value that is not finite: a bad branch would reach rows that do not see it.
        unfit = None
        if not bool(wide_value.sum().isfinite()):
            unfit = ~wide_value.isfinite().all(dim=-1)  # [key heads, keys]
            wide_value = wide_value.masked_fill(unfit[..., None], 0.0)
        count = len(wide_key)
        for row in range(0, rows, step):
            part = query[head * group : (head + count) * group, row : row + step].to(precision)
            scores = torch.matmul(part.reshape(count, -1, width), wide_key).mul_(scaling)
            if softcap is not None:
                scores.div_(softcap).tanh_().mul_(softcap)
            scores = scores.view(count, group, -1, keys)
            scores.masked_fill_(blocked[row : row + step], -torch.inf)
            sink = (
                None
                if sinks is None
                else sinks[head * group : (head + count) * group].to(precision).view(count, group, 1, 1)
            )
            weights = _softmax(scores, sink).view(count, -1, keys)
            mixed = torch.matmul(weights, wide_value)
            if unfit is not None:
                seen = (unfit[:, None, :] & ~blocked[row : row + step]).any(dim=-1)  # [key heads, rows]
                mixed.view(count, group, -1, value.shape[2]).masked_fill_(seen[:, None, :, None], torch.nan)
            mixed = mixed.view(count * group, -1, value.shape[2])
            output[row : row + step, head * group : (head + count) * group] = mixed.transpose(0, 1).to(output.dtype)
    return output


def _softmax(scores: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    if sink is None:
        return torch.softmax(scores, dim=-1)
    padded = torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), dim=-1)
    return torch.softmax(padded, dim=-1)[..., :-1]


class PassCache:
    """What transformers' layers see as their cache during one slice of a pass.

    Args:
        layout: the slice.
        pad: rounds a number of keys up to a row count whose matrix products are row invariant: layers that keep
            compressed keys (multi-head latent attention) expand them with a product over all keys.
    """

    def __init__(self, layout: Slice, pad: Callable[[int], int]) -> None:
        self._layout = layout
        self._pad = pad
        self.updates = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the slice's rows, [1, heads, rows, width] each, and return all keys and values of its sequences."""
        self.updates += 1
        parts = self._layout.parts()
        total = sum(span.base + last for span, _, last in parts)
        keys, values = [], []
        for span, first, last in parts:
            row = span.start + first - self._layout.first
            window = slice(row, row + last - first)
            held = self._pad(total) if len(parts) == 1 else span.base + last
            stored = span.cache.write(
                layer_idx, span.base + first, key_states[:, :, window], value_states[:, :, window], held
            )
            keys.append(stored[0])
            values.append(stored[1])
        if len(parts) == 1:
            return keys[0], values[0]
        padding = self._pad(total) - total
        return tuple(nn.functional.pad(torch.cat(part, dim=2), (0, 0, 0, padding)) for part in (keys, values))  # type: ignore[return-value]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Asked by some models only to make positions, which drawbar always gives."""
        return 0
