"""Weight-only int4 for drafts: round to nearest, one scale and zero point per group of 64 inputs."""

from __future__ import annotations

import torch
from torch import nn

GROUP = 64
_LEVELS = 15
_ROWS_AT_A_TIME = 1024  # a multiple of the 64 rows that the kernel packs together


class Int4Linear(nn.Module):
    """A linear layer in PyTorch's packed int4 format for the CPU.

    Args:
        weight: [outputs, inputs]; inputs a multiple of 64, outputs a multiple of 16.
        bias: [outputs] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.outputs, self.inputs = weight.shape
        # Some rows at a time: codes and float copies take ten times the weight that they are made from.
        parts = [_pack(rows) for rows in torch.split(weight, _ROWS_AT_A_TIME)]
        self.packed = nn.Buffer(torch.cat([packed for packed, _ in parts]))
        self.scales = nn.Buffer(torch.cat([scales for _, scales in parts], dim=1).contiguous())
        self.bias = None if bias is None else nn.Buffer(bias)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        flat = rows.reshape(-1, self.inputs)
        product: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            flat.to(torch.bfloat16).contiguous(), self.packed, GROUP, self.scales
        )
        result = product.to(rows.dtype)
        if self.bias is not None:
            result = result + self.bias
        return result.view(*rows.shape[:-1], self.outputs)


def _pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's codes and its scales bfloat16 [inputs / 64, outputs, 2]; it computes (code - 8) * scale + middle."""
    codes, scales, middles = quantize_groups(weight)
    packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return packed, torch.stack((scales.t(), middles.t()), dim=-1).to(torch.bfloat16)


def fits_int4(weight: torch.Tensor) -> bool:
    """Whether the packed kernel takes a weight of this shape."""
    return weight.dim() == 2 and weight.shape[1] % GROUP == 0 and weight.shape[0] % 16 == 0


def quantize_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round each group of 64 inputs to 16 evenly spaced levels between its least and its largest weight.

    Returns:
        codes int32 [outputs, inputs] in 0..15, scales and middles float32 [outputs, inputs / 64], where a weight is
        about `(code - 8) * scale + middle`.
    """
    groups = weight.float().view(weight.shape[0], -1, GROUP)
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    scales = ((high - low) / _LEVELS).clamp_(min=1e-6)
    codes = ((groups - low) / scales).round_().clamp_(0, _LEVELS).to(torch.int32)
    middles = low + 8 * scales
    return codes.view(weight.shape), scales.squeeze(-1), middles.squeeze(-1)


def int4_bytes(outputs: int, inputs: int) -> int:
    """Bytes that a weight of this shape takes in int4."""
    return outputs * inputs // 2 + outputs * (inputs // GROUP) * 4


def quantize_module(module: nn.Module) -> None:
    """Replace, in place, every linear layer that the kernel takes by its int4 copy."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and fits_int4(child.weight):
            setattr(module, name, Int4Linear(child.weight, child.bias))
        else:
            quantize_module(child)
