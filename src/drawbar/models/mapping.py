"""Which tensors of a checkpoint make which parameter of the model.

Most are the same under the same name. Some are renamed or assembled (a layer's experts are separate tensors on disk and
one stacked parameter in the model); how is transformers' knowledge, used here and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from drawbar.errors import CheckpointError
from drawbar.weights.index import CheckpointIndex, TensorEntry

# Buffers that older versions of transformers saved and the model computes itself.
_COMPUTED = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias|attn\.bias)$")


@dataclass
class Recipe:
    """How one or more parameters are made from tensors of the checkpoint.

    Attributes:
        targets: the parameters, by full name, with the dtype each is held in.
        sources: the tensors, with the converter's pattern each one matched.
        converter: transformers' converter; None where the one source is the one target.
    """

    targets: dict[str, torch.dtype]
    sources: list[tuple[TensorEntry, str | None]] = field(default_factory=list)
    converter: WeightConverter | None = None

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        return tuple(entry for entry, _ in self.sources)

    @property
    def copied_bytes(self) -> int:
        """Bytes that making the parameters takes beyond the tensors as they were read."""
        if self.converter is not None:
            cast = self.held_bytes if any(entry.dtype not in self.targets.values() for entry in self.entries) else 0
            return 2 * sum(entry.nbytes for entry in self.entries) + cast
        (entry,) = self.entries
        (dtype,) = self.targets.values()
        return 0 if entry.dtype == dtype else entry.nbytes // entry.dtype.itemsize * dtype.itemsize

    @property
    def held_bytes(self) -> int:
        """Bytes of the parameters once made."""
        dtype = next(iter(self.targets.values()))
        return sum(
            entry.nbytes // entry.dtype.itemsize * dtype.itemsize if entry.dtype.is_floating_point else entry.nbytes
            for entry in self.entries
        )

    def build(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters, from tensors by checkpoint name. A tensor that needs no change is not copied."""
        if self.converter is None:
            (entry,) = self.entries
            made = dict.fromkeys(self.targets, tensors[entry.name])
        else:
            converter = deepcopy(self.converter)
            first = next(iter(self.targets))
            for entry, pattern in self.sources:
                converter.add_tensor(first, entry.name, pattern, tensors[entry.name])
            made = converter.convert(first)
        return {name: _cast(made[name], dtype) for name, dtype in self.targets.items()}


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor


def map_weights(model: PreTrainedModel, index: CheckpointIndex, dtype: torch.dtype) -> list[Recipe]:
    """A recipe for every parameter and saved buffer of the model, none missing and none left over.

    Tied parameters are tied in the model as the checkpoint has them: see `_settle_ties`.

    Args:
        model: a skeleton.
        index: the checkpoint.
        dtype: what floating-point parameters are held in, but for those that transformers keeps in float32.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or of another shape; names it.
    """
    state = model.state_dict()
    recipes = _collect(model, index, state)
    _settle_ties(model, index, recipes, state)
    missing = sorted(set(state) - {name for recipe in recipes for name in recipe.targets})
    if missing:
        raise CheckpointError(
            f"{index.folder}: {_listed(missing)} missing from the checkpoint ({type(model).__name__} needs "
            f"{'it' if len(missing) == 1 else 'them'}); fetch the checkpoint again, or correct config.json"
        )
    plan = model._get_dtype_plan(dtype)
    for recipe in recipes:
        for name in recipe.targets:
            recipe.targets[name] = _planned(name, state[name], dtype, plan)
        _check_shapes(recipe, state, index)
    return recipes


def _collect(model: PreTrainedModel, index: CheckpointIndex, state: Mapping[str, torch.Tensor]) -> list[Recipe]:
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    recipes: dict[str, Recipe] = {}
    unexpected = []
    for name in sorted(index, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target in recipes and pattern is None:
            raise CheckpointError(f"{index.folder}: more than one tensor makes {target}: {name} is one too many")
        if pattern is None and target not in state:
            unexpected.append(name)
            continue
        recipe = recipes.setdefault(target, Recipe({}, converter=by_pattern[pattern] if pattern else None))
        recipe.sources.append((index[name], pattern))
    _refuse_unexpected(model, index, unexpected)
    for target, recipe in recipes.items():
        recipe.targets = dict.fromkeys(_targets(target, recipe, index), torch.float32)
    unknown = sorted({name for recipe in recipes.values() for name in recipe.targets} - set(state))
    if unknown:
        raise CheckpointError(
            f"{index.folder}: {_listed(unknown)} in the checkpoint, but not in {type(model).__name__}"
        )
    return list(recipes.values())


def _targets(target: str, recipe: Recipe, index: CheckpointIndex) -> list[str]:
    if recipe.converter is None:
        return [target]
    return list(_converted_shapes(target, recipe, index))


def _converted_shapes(target: str, recipe: Recipe, index: CheckpointIndex) -> dict[str, torch.Size]:
    """Names and shapes that a converter makes, found on meta tensors."""
    converter = deepcopy(recipe.converter)
    assert converter is not None
    for entry, pattern in recipe.sources:
        converter.add_tensor(target, entry.name, pattern, torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
    try:
        return {name: tensor.shape for name, tensor in converter.convert(target).items()}
    except Exception as error:  # transformers' operations raise all kinds
        names = _listed([entry.name for entry in recipe.entries])
        raise CheckpointError(f"{index.folder}: {names} cannot be assembled into {target}: {error}") from error


def _refuse_unexpected(model: PreTrainedModel, index: CheckpointIndex, names: list[str]) -> None:
    """Tensors without a place mean that config and weights disagree, unless the model's class says otherwise."""
    ignored = [re.compile(pattern) for pattern in (model._keys_to_ignore_on_load_unexpected or ())]
    left = [name for name in names if not _COMPUTED.search(name) and not any(p.search(name) for p in ignored)]
    if left:
        raise CheckpointError(
            f"{index.folder}: {_listed(left)} in the checkpoint, but {type(model).__name__} has no place for "
            f"{'it' if len(left) == 1 else 'them'}; config.json does not describe these weights"
        )


def _settle_ties(
    model: PreTrainedModel, index: CheckpointIndex, recipes: list[Recipe], state: Mapping[str, torch.Tensor]
) -> None:
    """Let one recipe serve all parameters of a tie, from whichever tensor the checkpoint holds.

    Where the config ties two parameters and the checkpoint holds both, each keeps its own: if the tensors are equal
    nothing changes, and if they are not, the tensors are the truth (transformers decides the same).
    """
    made = {name: recipe for recipe in recipes for name in recipe.targets}
    for target, source in model.all_tied_weights_keys.items():
        if target not in state or source not in state:
            continue
        if target not in made and source in made:
            made[source].targets[target] = torch.float32
            made[target] = made[source]
        elif source not in made and target in made:
            made[target].targets[source] = torch.float32
            made[source] = made[target]


def _planned(name: str, held: torch.Tensor, dtype: torch.dtype, plan: Mapping[str, torch.dtype]) -> torch.dtype:
    if not held.is_floating_point():
        return held.dtype
    for pattern, planned in plan.items():
        if re.search(rf"(^|\.){pattern}(\.|$)", name):
            return planned
    return dtype


def _check_shapes(recipe: Recipe, state: Mapping[str, torch.Tensor], index: CheckpointIndex) -> None:
    if recipe.converter is None:
        (entry,) = recipe.entries
        for name in recipe.targets:
            index.require(entry.name, tuple(state[name].shape))
        return
    shapes = _converted_shapes(next(iter(recipe.targets)), recipe, index)
    for name in recipe.targets:
        if shapes[name] != state[name].shape:
            raise CheckpointError(
                f"{index.folder}: {name} is assembled to shape {tuple(shapes[name])} from "
                f"{len(recipe.sources)} tensors, but config.json says {tuple(state[name].shape)}"
            )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{'tensor' if len(names) == 1 else 'tensors'} {shown}{more} {'is' if len(names) == 1 else 'are'}"
