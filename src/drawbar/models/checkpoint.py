"""A checkpoint sorted into what belongs to each layer of a model and what belongs to none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from drawbar.hardware import RowBuckets, row_buckets
from drawbar.models.activations import LANES
from drawbar.models.loading import build_skeleton, load_config, resolve_checkpoint, resolve_dtype
from drawbar.models.mapping import Recipe, map_weights
from drawbar.models.transformer import attach_buckets, product_shapes
from drawbar.weights.index import CheckpointIndex, TensorEntry
from drawbar.weights.reader import Reader, open_reader
from drawbar.weights.stream import Unit, WeightStream


@dataclass
class OpenCheckpoint:
    """A checked checkpoint with its skeleton: everything but the weights themselves.

    Attributes:
        folder: where the checkpoint lies.
        model: transformers' model without weights.
        dtype: what it computes in.
        layers: the recipes of each layer.
        rest: the recipes of everything else (embedding, final norm, head).
        index: its tensors.
    """

    folder: Path
    model: PreTrainedModel
    dtype: torch.dtype
    layers: list[list[Recipe]]
    rest: list[Recipe]
    index: CheckpointIndex

    @classmethod
    def open(cls, name: str | Path, dtype: str = "auto") -> OpenCheckpoint:
        """Check config, headers and names; read no weights.

        Raises:
            CheckpointError, UnsupportedModelError, ConfigurationError: see `load_config`, `CheckpointIndex` and
                `map_weights`.
        """
        folder = resolve_checkpoint(name)
        # The index first: it knows folders that hold adapters, GGUF or pickles, and says what to do about them.
        index = CheckpointIndex.from_folder(folder)
        config = load_config(folder)
        resolved = resolve_dtype(dtype, config)
        model = build_skeleton(config, resolved)
        layers, rest = _by_layer(model, map_weights(model, index, resolved))
        return cls(folder, model, resolved, layers, rest, index)

    def layer_prefix(self, layer: int) -> str:
        """What the parameters of a layer are called, up to their local names."""
        return f"{layers_prefix(self.model)}{layer}."

    def layer_units(self) -> list[Unit]:
        """One unit of the stream for each layer."""
        return [Unit(self.layer_prefix(i), _entries(recipes)) for i, recipes in enumerate(self.layers)]

    def measure_buckets(self) -> RowBuckets:
        """Run the row-invariance self-test on this model's matrix products."""
        shapes = product_shapes(self.model, self.dtype)
        buckets = row_buckets(shapes)
        if attach_buckets(self.model, buckets) or any(shape.outputs % LANES for shape in shapes):
            # Gates and routers apply functions to a few numbers a row; see `drawbar.models.activations`.
            return RowBuckets(tuple(size for size in buckets.sizes if size % LANES == 0))
        return buckets

    def reader(self) -> Reader:
        """A reader over the checkpoint's files."""
        return open_reader(self.index.files)


def layers_prefix(model: PreTrainedModel) -> str:
    """The name of the list of layers, with a dot behind it."""
    layers = model.base_model.layers
    name: str = next(name for name, module in model.named_modules() if module is layers)
    return name + "."


def _by_layer(model: PreTrainedModel, recipes: Sequence[Recipe]) -> tuple[list[list[Recipe]], list[Recipe]]:
    pattern = re.compile(re.escape(layers_prefix(model)) + r"(\d+)\.")
    layers: list[list[Recipe]] = [[] for _ in model.base_model.layers]
    rest: list[Recipe] = []
    for recipe in recipes:
        match = pattern.match(next(iter(recipe.targets)))
        (layers[int(match[1])] if match else rest).append(recipe)
    return layers, rest


def _entries(recipes: Sequence[Recipe]) -> tuple[TensorEntry, ...]:
    return tuple(entry for recipe in recipes for entry in recipe.entries)


def read_once(groups: Sequence[Sequence[Recipe]], reader: Reader) -> Iterator[dict[str, torch.Tensor]]:
    """Read groups of recipes one after the other, each once, and yield parameters that the caller may keep.

    Parameters that share a tensor in the checkpoint (tied ones) share it here too.
    """
    units = [Unit(str(number), _entries(group)) for number, group in enumerate(groups)]
    if not units:
        return
    with closing(WeightStream(units, reader, slots=1)) as stream:
        for number, group in enumerate(groups):
            with stream.unit(number) as tensors:
                yield _owned(group, tensors)


def _owned(recipes: Sequence[Recipe], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # By storage: a converter that splits a tensor makes views that start anywhere within it.
    borrowed = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    parameters: dict[str, torch.Tensor] = {}
    for recipe in recipes:
        copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
        for name, made in recipe.build(tensors).items():
            place = (made.data_ptr(), made.shape)
            if place not in copies:
                copies[place] = made.clone() if made.untyped_storage().data_ptr() in borrowed else made
            parameters[name] = copies[place]
    return parameters
