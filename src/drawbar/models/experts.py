"""Mixture-of-experts layers whose rows do not depend on which other rows chose the same expert."""

from __future__ import annotations

import torch
from torch import nn

from drawbar.hardware import RowBuckets
from drawbar.models.activations import SHARE

EXPERTS_NAME = "drawbar_exact"


def exact_experts(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Experts for transformers' `ExpertsInterface`: each expert's rows are padded to a row-invariant count.

    A row's experts are summed in order of their index, whatever else is in the pass.

    Args:
        module: holds `gate_up_proj` or `up_proj`, and `down_proj`, stacked over experts; its `row_buckets` attribute,
            set when the model was loaded, says which row counts are invariant.
        hidden_states: [rows, width].
        top_k_index: int64 [rows, k], the experts of each row.
        top_k_weights: [rows, k].

    Returns:
        [rows, width].
    """
    buckets = module.row_buckets
    assert isinstance(buckets, RowBuckets)
    output = torch.zeros_like(hidden_states)
    for expert in torch.unique(top_k_index).tolist():
        rows, choice = torch.where(top_k_index == expert)
        count = len(rows)
        chosen = hidden_states[rows]
        padding = buckets.pad(count) - count
        if padding:
            chosen = torch.cat((chosen, chosen[-1:].expand(padding, -1)))
        result = _expert(module, expert, chosen)[:count]
        output.index_add_(0, rows, (result * top_k_weights[rows, choice, None]).to(output.dtype))
    return output


def _expert(module: nn.Module, expert: int, rows: torch.Tensor) -> torch.Tensor:
    if module.has_gate:
        wide = _product(module, "gate_up_proj", expert, rows)
        # In shares of one thread: see `drawbar.models.activations`.
        shares = torch.split(wide, max(1, SHARE // wide.shape[-1]))
        inner = torch.cat([module._apply_gate(share) for share in shares])  # type: ignore[operator]
    else:
        inner = module.act_fn(_product(module, "up_proj", expert, rows))  # type: ignore[operator]
    return _product(module, "down_proj", expert, inner)


def _product(module: nn.Module, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
    weight: torch.Tensor = getattr(module, name)[expert]
    bias: torch.Tensor | None = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    if module.is_transposed:
        # As the layer itself writes it: a product, then a sum.
        result = rows @ weight
        return result if bias is None else result + bias
    return nn.functional.linear(rows, weight, bias)
