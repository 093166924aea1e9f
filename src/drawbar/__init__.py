"""drawbar: language models far larger than memory, exactly, several tokens per pass.

Names are loaded when they are first used, so that importing the package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drawbar.config import SamplingParams, SpeculationConfig
    from drawbar.decoder import DecoderOutput, Generation, SpeculativeDecoder
    from drawbar.drafting.base import Drafter, DraftRequest, NoDraft
    from drawbar.drafting.model import ModelDrafter
    from drawbar.engine import Engine, EngineOutput
    from drawbar.errors import (
        BudgetError,
        CheckpointError,
        ConfigurationError,
        DrawbarError,
        GenerationError,
        NumericalError,
        PromptError,
        ReadError,
        UnsupportedModelError,
        VocabularyError,
    )
    from drawbar.models.base import CausalModel, PathCache, Rows, SequenceCache
    from drawbar.models.resident import ResidentModel
    from drawbar.models.streamed import StreamedModel
    from drawbar.stats import Stats
    from drawbar.tree import TokenTree

_HOMES = {
    "config": ("SamplingParams", "SpeculationConfig"),
    "decoder": ("DecoderOutput", "Generation", "SpeculativeDecoder"),
    "drafting.base": ("DraftRequest", "Drafter", "NoDraft"),
    "drafting.model": ("ModelDrafter",),
    "engine": ("Engine", "EngineOutput"),
    "errors": (
        "BudgetError",
        "CheckpointError",
        "ConfigurationError",
        "DrawbarError",
        "GenerationError",
        "NumericalError",
        "PromptError",
        "ReadError",
        "UnsupportedModelError",
        "VocabularyError",
    ),
    "models.base": ("CausalModel", "PathCache", "Rows", "SequenceCache"),
    "models.resident": ("ResidentModel",),
    "models.streamed": ("StreamedModel",),
    "stats": ("Stats",),
    "tree": ("TokenTree",),
}

__all__ = [
    "BudgetError",
    "CausalModel",
    "CheckpointError",
    "ConfigurationError",
    "DecoderOutput",
    "DraftRequest",
    "Drafter",
    "DrawbarError",
    "Engine",
    "EngineOutput",
    "Generation",
    "GenerationError",
    "ModelDrafter",
    "NoDraft",
    "NumericalError",
    "PathCache",
    "PromptError",
    "ReadError",
    "ResidentModel",
    "Rows",
    "SamplingParams",
    "SequenceCache",
    "SpeculationConfig",
    "SpeculativeDecoder",
    "Stats",
    "StreamedModel",
    "TokenTree",
    "UnsupportedModelError",
    "VocabularyError",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"drawbar.{module}"), name)
    raise AttributeError(f"module 'drawbar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
