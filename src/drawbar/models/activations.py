"""Activations whose elements do not depend on where in the tensor they stand.

PyTorch computes whole vectors of elements in one way and what is left over at the end of a thread's share in another,
and the two may differ in the last bit (silu, sigmoid and gelu in float32, tanh-gelu in bfloat16). Where the shares end
depends on the number of rows and of threads.
"""

from __future__ import annotations

import torch
from torch import nn

LANES = 32  # rows to which a pass is rounded where something narrower than a vector is computed for each row
SHARE = 1 << 14  # elements up to which PyTorch computes in one thread: 32,768, but for gelu

_HOMES = ("transformers.activations", "torch.nn.modules.activation")


class ExactActivation(nn.Module):
    """An element-wise function, computed in shares of one thread; only the last can have elements left over."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Any shape -> the same shape."""
        if values.numel() <= SHARE or torch.get_num_threads() == 1:
            result: torch.Tensor = self.function(values)
            return result
        flat = values.reshape(-1)
        output = torch.empty_like(flat)
        for start in range(0, len(flat), SHARE):
            output[start : start + SHARE] = self.function(flat[start : start + SHARE])
        return output.view(values.shape)


def replace_activations(model: nn.Module) -> None:
    """Replace, in place, the activation modules that have no parameters of their own."""
    for module in [module for module in model.modules() if not isinstance(module, ExactActivation)]:
        for name, child in module.named_children():
            if type(child).__module__ in _HOMES and not [*child.parameters(), *child.buffers()]:
                setattr(module, name, ExactActivation(child))
