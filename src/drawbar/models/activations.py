"""Activations whose elements do not depend on where in the tensor they stand.

PyTorch computes whole vectors of elements in one way and what is left over at the end of a thread's share in another,
and the two may differ in the last bit (silu, sigmoid and gelu in float32, tanh-gelu in bfloat16). Where the shares end
depends on the number of rows and of threads.
"""

from __future__ import annotations

import torch
from torch import nn

LANES = 32  # rows to which a pass is rounded where something narrower than a vector is computed for each row
STEP = 64  # elements that PyTorch computes at a time: two vectors of the narrowest type on the widest processor
SHARE = 1 << 14  # elements up to which PyTorch computes in one thread: 32,768, but for gelu

_EVEN_SHARES = {"SiLU", "SiLUActivation", "Sigmoid"}  # gelu cuts its shares in another way
_HOMES = ("transformers.activations", "torch.nn.modules.activation")


class ExactActivation(nn.Module):
    """An element-wise function of which only the last elements of all are ever left over.

    Where the threads' shares would not be whole, each share is computed in a call, and so in a thread, of its own.
    """

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Any shape -> the same shape."""
        threads = torch.get_num_threads()
        plain = type(self.function).__name__ in _EVEN_SHARES
        if values.numel() <= SHARE or threads == 1 or (plain and shares_are_whole(values.numel(), threads)):
            result: torch.Tensor = self.function(values)
            return result
        flat = values.reshape(-1)
        output = torch.empty_like(flat)
        for start in range(0, len(flat), SHARE):
            output[start : start + SHARE] = self.function(flat[start : start + SHARE])
        return output.view(values.shape)


def shares_are_whole(elements: int, threads: int) -> bool:
    """Whether no thread but the last ends its share with elements left over, in however many shares they are cut."""
    most = min(threads, -(-elements // SHARE))
    return all(elements % (shares * STEP) == 0 for shares in range(2, most + 1))


def replace_activations(model: nn.Module) -> None:
    """Replace, in place, the activation modules that have no parameters of their own."""
    for module in [module for module in model.modules() if not isinstance(module, ExactActivation)]:
        for name, child in module.named_children():
            if type(child).__module__ in _HOMES and not [*child.parameters(), *child.buffers()]:
                setattr(module, name, ExactActivation(child))
