"""Where every tensor of a checkpoint lies, from the safetensors headers, which are the truth."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from drawbar.errors import CheckpointError
from drawbar.weights.header import TensorEntry, read_header, unique_keys

__all__ = ["CheckpointIndex", "TensorEntry"]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
ADAPTER_NAME = "adapter_config.json"
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class CheckpointIndex(Mapping[str, TensorEntry]):
    """All tensors of a checkpoint by name.

    Args:
        folder: the checkpoint.
        entries: its tensors.
        files: the shards that hold them.
    """

    def __init__(self, folder: Path, entries: Mapping[str, TensorEntry], files: Sequence[Path]) -> None:
        self.folder = folder
        self.files = tuple(files)
        self._entries = dict(entries)

    @classmethod
    def from_folder(cls, folder: str | Path) -> CheckpointIndex:
        """Read and check the header of every shard; no tensor's data is read.

        Args:
            folder: one that holds `model.safetensors`, or shards with or without their index file. With an index file
                only the shards that it names are used.

        Raises:
            CheckpointError: no safetensors checkpoint is there, or a damaged or incomplete one; names the file, and
                the tensor where it is about one.
        """
        folder = Path(folder)
        try:
            _check_folder(folder)
            _refuse_adapter_beside_model(folder)
            promised = _read_index_file(folder / INDEX_NAME) if (folder / INDEX_NAME).exists() else None
            files = _find_shards(folder) if promised is None else _named_shards(folder, promised)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be read: {error.strerror}") from error
        entries = _read_headers(files)
        if promised is not None:
            _check_promises(folder, promised, entries)
        if not entries:
            raise CheckpointError(f"{folder}: holds no tensors ({', '.join(file.name for file in files)})")
        return cls(folder, entries, files)

    def __getitem__(self, name: str) -> TensorEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"CheckpointIndex({str(self.folder)!r}: {len(self)} tensors in {len(self.files)} files)"

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self._entries.values())

    def require(self, name: str, shape: Sequence[int] | None = None) -> TensorEntry:
        """The tensor of this name, of this shape if one is given.

        Raises:
            CheckpointError: it is missing, or of another shape; names the tensor and both shapes.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing from the checkpoint")
        if shape is not None and entry.shape != tuple(shape):
            raise CheckpointError(
                f"{entry.file}: tensor {name} has shape {list(entry.shape)}, but the model needs {list(shape)}; "
                "config.json does not describe these weights"
            )
        return entry


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise CheckpointError(f"{folder}: no such folder")
    if folder.is_dir():
        return
    if folder.suffix.lower() == ".gguf":
        raise CheckpointError(f"{folder}: GGUF is not supported; give the folder of the model's safetensors checkpoint")
    raise CheckpointError(f"{folder}: is a file; give the folder that holds config.json and the *.safetensors files")


def _refuse_adapter_beside_model(folder: Path) -> None:
    """Other loaders apply an adapter that lies beside a model, so leaving it out in silence would change the text."""
    if (folder / ADAPTER_NAME).exists() and any(not _is_adapter(file.name) for file in folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder / ADAPTER_NAME}: an adapter (LoRA) lies beside the model and would not be applied; "
            "merge it into the model, or move it elsewhere to run the base model"
        )


def _is_adapter(name: str) -> bool:
    return name.startswith("adapter_")


def _find_shards(folder: Path) -> list[Path]:
    """The files that hold the weights where no index file names them."""
    names = sorted(file.name for file in folder.iterdir() if not file.is_dir())  # broken links stay, to be named
    adapters = [name for name in names if _is_adapter(name)]
    shards = [name for name in names if name.endswith(".safetensors") and name not in adapters]
    if not shards:
        raise CheckpointError(f"{folder}: {_why_no_shards(names, bool(adapters))}")
    if SINGLE_NAME in shards:
        return [folder / SINGLE_NAME]
    _check_numbering(folder, shards)
    return [folder / name for name in shards]


def _why_no_shards(names: Sequence[str], adapter: bool) -> str:
    if adapter:
        return "this is an adapter (LoRA), not a model; name the base model, or merge the adapter into it"
    if any(name.endswith(".gguf") for name in names):
        return "holds GGUF files only; GGUF is not supported, the model's safetensors checkpoint is needed"
    pickled = [name for name in names if name.endswith(_PICKLED)]
    if pickled:
        return f"holds pickled weights only ({pickled[0]}), and nothing is ever unpickled; convert them to safetensors"
    return "holds no weights: there are no *.safetensors files in it"


def _check_numbering(folder: Path, shards: Sequence[str]) -> None:
    """Shards called name-00001-of-00003.safetensors say themselves how many there should be."""
    series: dict[tuple[str, str], dict[int, str]] = {}
    for match in filter(None, map(_NUMBERED.fullmatch, shards)):
        series.setdefault((match["stem"], match["count"]), {})[int(match["number"])] = match[0]
    for (stem, count), present in series.items():
        first = 0 if 0 in present else 1
        missing = next((number for number in range(first, first + int(count)) if number not in present), None)
        if missing is not None:
            raise CheckpointError(
                f"{folder}: shard {missing:0{len(count)}d}-of-{count} of {stem} is missing "
                f"({len(present)} of {int(count)} are there); fetch the rest"
            )


def _named_shards(folder: Path, promised: Mapping[str, str]) -> list[Path]:
    names = sorted(set(promised.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder / INDEX_NAME}: names {_listed(missing)} not in the folder; fetch the missing shards, "
            "or remove the index file if it is stale"
        )
    return [folder / name for name in names]


def _read_index_file(path: Path) -> dict[str, str]:
    """Which shard holds each tensor, as the index file has it."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the index file is damaged ({error}); fetch it again") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: the index file has no weight_map, so it names no tensors; fetch it again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_inside(shard):
            raise CheckpointError(f"{path}: tensor {name} is said to be in {shard!r}, which is no file of this folder")
    return weight_map


def _is_inside(shard: str) -> bool:
    path = PurePosixPath(shard)
    return path.suffix == ".safetensors" and not path.is_absolute() and ".." not in path.parts and "\0" not in shard


def _read_headers(files: Sequence[Path]) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for entry in read_header(file):
            twin = entries.setdefault(entry.name, entry)
            if twin is not entry:
                raise CheckpointError(
                    f"{file}: tensor {entry.name} is also in {twin.file.name}; "
                    "remove the shards that belong to another checkpoint"
                )
    return entries


def _check_promises(folder: Path, promised: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> None:
    """The index file must say of every tensor what the headers say."""
    fault = _disagreement(folder, promised, entries)
    if fault is not None:
        raise CheckpointError(
            f"{folder / INDEX_NAME}: the index file is stale: {fault}; fetch the index file and the shards of one "
            "version of the checkpoint"
        )


def _disagreement(folder: Path, promised: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> str | None:
    for name, shard in promised.items():
        entry = entries.get(name)
        if entry is None:
            return f"it says that tensor {name} is in {shard}, but no shard holds it"
        if entry.file != folder / shard:
            return f"it says that tensor {name} is in {shard}, but it is in {entry.file.name}"
    for name, entry in entries.items():
        if name not in promised:
            return f"{entry.file.name} holds tensor {name}, which it does not name"
    return None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}, which {'is' if len(names) == 1 else 'are'}"
