"""Every exception that drawbar raises on purpose, as one tree.

    DrawbarError
    ├── ConfigurationError      an option or argument that cannot be honoured
    │   ├── BudgetError         the memory budget is too small; says how much is needed
    │   └── PromptError         an empty prompt, or one longer than the context
    ├── CheckpointError         a checkpoint that is missing, incomplete, damaged or of another format
    ├── UnsupportedModelError   an architecture, cache or quantisation that drawbar refuses, by name
    ├── VocabularyError         a draft whose token ids do not mean what the target's mean
    ├── ReadError               the disk failed, or gave less than was asked for, while running
    ├── NumericalError          a model produced NaN where a number was needed
    └── GenerationError         generation failed part way; `output` holds what was produced

`exit_code` is what the command line exits with: 2 for bad usage or bad input, 1 for the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drawbar.decoder import DecoderOutput


class DrawbarError(Exception):
    """Base of all errors raised by drawbar."""

    exit_code = 1


class ConfigurationError(DrawbarError):
    """An option or argument that cannot be honoured."""

    exit_code = 2


class BudgetError(ConfigurationError):
    """The memory budget is too small for what must be held at once."""


class PromptError(ConfigurationError):
    """The prompt is empty, holds ids outside the vocabulary, or does not fit the context."""


class CheckpointError(DrawbarError):
    """A checkpoint is missing, incomplete, damaged, or not in safetensors format."""

    exit_code = 2


class UnsupportedModelError(DrawbarError):
    """The model's architecture, cache type or quantisation is not supported."""

    exit_code = 2


class VocabularyError(DrawbarError):
    """Draft and target do not share one vocabulary."""

    exit_code = 2


class ReadError(DrawbarError):
    """Reading weights failed, or came back short, after the checkpoint had passed its checks."""


class NumericalError(DrawbarError):
    """A model produced NaN, or nothing but minus infinity, as logits."""


class GenerationError(DrawbarError):
    """Generation failed part way. `output` holds the tokens produced until then."""

    def __init__(self, message: str, output: DecoderOutput) -> None:
        super().__init__(message)
        self.output = output
