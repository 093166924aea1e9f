"""A model held in memory whole: the draft, and the reference that the streamed model is tested against."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from drawbar.config import format_bytes, parse_bytes
from drawbar.errors import BudgetError, ConfigurationError
from drawbar.models.checkpoint import OpenCheckpoint, read_once
from drawbar.models.quantized import fits_int4, int4_bytes, quantize_module
from drawbar.models.transformer import TransformersModel, set_parameter, total_bytes, workspace_bytes
from drawbar.models.units import HeldWeights

QUANTIZATIONS = ("none", "int4")


class ResidentModel(TransformersModel):
    """Every weight in memory, optionally in int4."""

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        quantize: str | None = None,
        dtype: str = "auto",
        device: str = "cpu",
        memory: str | int | None = None,
    ) -> ResidentModel:
        """Load a checkpoint layer by layer; quantising, no more than one layer is ever held unquantised.

        Args:
            name: checkpoint folder or hub id.
            quantize: None or `int4`, which leaves embedding and head as they are: a quantised head costs more of the
                draft's agreement than all it saves (7.9 tokens per pass against 7.6, mean of 8 prompts, SmolLM2).
            dtype: auto, bfloat16, float16 or float32.
            device: where to hold it.
            memory: refuse to load if more than this would be held.

        Raises:
            DrawbarError: the checkpoint, the option or the budget will not do.
        """
        checkpoint = OpenCheckpoint.open(name, dtype)
        return cls.load(checkpoint, quantize, device, memory)

    @classmethod
    def load(
        cls,
        checkpoint: OpenCheckpoint,
        quantize: str | None = None,
        device: str = "cpu",
        memory: str | int | None = None,
    ) -> ResidentModel:
        """The same from a checkpoint that is already open; the skeleton becomes this model's."""
        if quantize not in (None, *QUANTIZATIONS):
            raise ConfigurationError(f"quantize must be one of {', '.join(QUANTIZATIONS)}, not {quantize!r}")
        int4 = quantize == "int4"
        needed = resident_bytes(checkpoint, quantize)
        if memory is not None and needed > parse_bytes(memory):
            raise BudgetError(f"{checkpoint.folder}: holding it takes {format_bytes(needed)}, more than {memory}")
        model, buckets, place = checkpoint.model, checkpoint.measure_buckets(), torch.device(device)
        reader = checkpoint.reader()
        try:
            for parameters in read_once([[recipe] for recipe in checkpoint.rest], reader):
                _set_all(model, parameters, place)
            for layer, parameters in enumerate(read_once(checkpoint.layers, reader)):
                _set_all(model, parameters, place)
                if int4:
                    quantize_module(model.base_model.layers[layer])
        finally:
            reader.close()
        # An int4 copy is no reference for anything: its attention may be quick.
        precision = torch.float32 if int4 else torch.float64
        return cls(model, buckets, [HeldWeights()] * len(checkpoint.layers), place, precision)

    @property
    def nbytes(self) -> int:
        """Bytes of weights."""
        return total_bytes([*self._model.parameters(), *self._model.buffers()])


def resident_bytes(checkpoint: OpenCheckpoint, quantize: str | None) -> int:
    """Bytes that a resident model of this checkpoint will hold, workspace and caches left out."""
    total = sum(recipe.held_bytes for group in (checkpoint.rest, *checkpoint.layers) for recipe in group)
    if quantize == "int4":
        for module in checkpoint.model.base_model.layers.modules():
            if isinstance(module, nn.Linear) and fits_int4(module.weight):
                total -= module.weight.numel() * checkpoint.dtype.itemsize - int4_bytes(*module.weight.shape)
    return total


def _set_all(model: nn.Module, parameters: dict[str, torch.Tensor], device: torch.device) -> None:
    moved: dict[int, torch.Tensor] = {}
    for name, tensor in parameters.items():
        set_parameter(model, name, moved.setdefault(id(tensor), tensor.to(device)))


def draft_workspace(model: ResidentModel, context: int) -> int:
    """Bytes that passes of this model need beside its weights."""
    return workspace_bytes(model.config, torch.bfloat16, context)
