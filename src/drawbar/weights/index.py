"""Where every tensor of a checkpoint lies: read from the safetensors headers, which are the truth, and checked whole."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drawbar.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own bound

_DTYPES: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor on disk.

    Attributes:
        name: its name in the checkpoint.
        file: the shard that holds it.
        dtype: its element type.
        shape: its shape.
        offset: first byte, counted from the start of the file.
        nbytes: its length in bytes.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class CheckpointIndex(Mapping[str, TensorEntry]):
    """All tensors of a checkpoint by name.

    Args:
        folder: the checkpoint.
        entries: its tensors.
        files: its shards.
    """

    def __init__(self, folder: Path, entries: Mapping[str, TensorEntry], files: Sequence[Path]) -> None:
        self.folder = folder
        self.files = tuple(files)
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> TensorEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self._entries.values())

    def require(self, name: str, shape: Sequence[int] | None = None) -> TensorEntry:
        """The tensor of this name, of this shape if one is given.

        Raises:
            CheckpointError: it is missing, or of another shape.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing from the checkpoint")
        if shape is not None and entry.shape != tuple(shape):
            raise CheckpointError(
                f"{entry.file}: tensor {name} has shape {list(entry.shape)}, but config.json asks for {list(shape)}"
            )
        return entry

    @classmethod
    def from_folder(cls, folder: str | Path) -> CheckpointIndex:
        """Read and check the headers of every shard; no tensor data is read.

        Raises:
            CheckpointError: the folder holds no safetensors checkpoint, or a damaged or incomplete one; names the file.
        """
        folder = Path(folder)
        files, promised = _find_shards(folder)
        entries: dict[str, TensorEntry] = {}
        for file in files:
            for entry in read_header(file):
                if entry.name in entries:
                    raise CheckpointError(
                        f"{file}: tensor {entry.name} is also in {entries[entry.name].file.name}; "
                        "the folder mixes shards of different checkpoints"
                    )
                entries[entry.name] = entry
        if promised is not None:
            _check_promises(folder / INDEX_NAME, promised, entries)
        return cls(folder, entries, files)


def _find_shards(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The shards, and what the index file says of them if there is one."""
    if folder.suffix == ".gguf" and folder.is_file():
        raise CheckpointError(f"{folder}: GGUF is not supported; give the folder of the model's safetensors checkpoint")
    if not folder.exists():
        raise CheckpointError(f"{folder}: no such folder")
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file; give the folder that holds config.json and the safetensors shards")
    if (folder / INDEX_NAME).exists():
        promised = _read_index_file(folder / INDEX_NAME)
        files = sorted({folder / shard for shard in promised.values()})
        if missing := [file.name for file in files if not file.is_file()]:
            raise CheckpointError(
                f"{folder / INDEX_NAME}: names {', '.join(missing[:3])}, which {'is' if len(missing) == 1 else 'are'} "
                "not in the folder; fetch the missing shards, or the index file is stale"
            )
        return files, promised
    shards = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("adapter_"))
    if (folder / "model.safetensors") in shards:
        return [folder / "model.safetensors"], None
    if not shards:
        raise CheckpointError(f"{folder}: {_why_no_shards(folder)}")
    _check_numbering(folder, shards)
    return shards, None


def _check_numbering(folder: Path, shards: Sequence[Path]) -> None:
    """Shards called name-00001-of-00003 say themselves how many there should be."""
    for shard in shards:
        stem, _, count = shard.stem.rpartition("-of-")
        if stem and count.isdigit() and len(shards) < int(count):
            raise CheckpointError(f"{folder}: {len(shards)} of {int(count)} shards are there; fetch the missing ones")


def _why_no_shards(folder: Path) -> str:
    names = {file.name for file in folder.iterdir()}
    if "adapter_config.json" in names or any(name.startswith("adapter_model") for name in names):
        return "is an adapter (LoRA) without its base model; merge it into the base model and give that folder"
    if any(name.endswith(".gguf") for name in names):
        return "holds GGUF files only, which are not supported; give the model's safetensors checkpoint"
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in names):
        return "holds pickled weights only, and nothing is ever unpickled; convert them to safetensors"
    return "there are no *.safetensors files, so this is not a checkpoint drawbar can read"


def _read_index_file(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: is not an index of shards ({error}); fetch it again") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: its weight_map names no tensors; fetch it again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{path}: tensor {name} is said to be in {shard!r}, which is no file of this folder")
    return weight_map


def _check_promises(path: Path, promised: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> None:
    for name, shard in promised.items():
        entry = entries.get(name)
        if entry is None:
            raise CheckpointError(f"{path}: is stale: tensor {name} should be in {shard}, but no shard holds it")
        if entry.file.name != shard:
            raise CheckpointError(f"{path}: is stale: tensor {name} should be in {shard}, but is in {entry.file.name}")
    if left := sorted(entries.keys() - promised.keys()):
        raise CheckpointError(f"{path}: is stale: {entries[left[0]].file.name} holds tensor {left[0]}, which it does not name")


def read_header(file: Path) -> list[TensorEntry]:
    """The tensors of one safetensors file, its header and length checked.

    Raises:
        CheckpointError: the file is missing, cut short, too long, or its header is damaged; names file and tensor.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if length < 0:
                raise CheckpointError(f"{file}: is cut short: {size} bytes are no safetensors file; fetch it again")
            if length > MAX_HEADER_BYTES or length < 2:
                raise CheckpointError(f"{file}: its header claims a length of {length} bytes; the file is damaged")
            if 8 + length > size:
                raise CheckpointError(f"{file}: is cut short within its header ({size} of at least {8 + length} bytes)")
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be opened: {error.strerror}") from error
    entries = [_entry(file, name, fields, 8 + length) for name, fields in _parse(file, raw).items()]
    _check_extent(file, entries, 8 + length, size)
    return entries


def _parse(file: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name appears twice")
        return found

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except ValueError as error:
        raise CheckpointError(f"{file}: its header is damaged: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: its header is no JSON object")
    header.pop("__metadata__", None)
    return header


def _entry(file: Path, name: str, fields: Any, data_start: int) -> TensorEntry:
    try:
        kind, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: the header's entry for tensor {name} is damaged") from error
    if not whole or begin > end:
        raise CheckpointError(f"{file}: the header's entry for tensor {name} is damaged")
    if kind not in _DTYPES:
        raise CheckpointError(f"{file}: tensor {name} has dtype {kind}, which is not known here")
    dtype = _DTYPES[kind]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{file}: tensor {name} of shape {list(shape)} and dtype {kind} takes {math.prod(shape) * dtype.itemsize} "
            f"bytes, but the header gives it {end - begin}"
        )
    return TensorEntry(name, file, dtype, tuple(shape), data_start + begin, end - begin)


def _check_extent(file: Path, entries: Sequence[TensorEntry], data_start: int, size: int) -> None:
    """Tensors must follow each other without overlap, and the file must end where they end."""
    position = data_start
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset < position:
            raise CheckpointError(f"{file}: tensor {entry.name} overlaps the one before it; the header is damaged")
        position = entry.offset + entry.nbytes
    if size < position:
        raise CheckpointError(
            f"{file}: is cut short: it has {size} of the {position} bytes that its header announces; fetch it again"
        )
    if size > position:
        raise CheckpointError(
            f"{file}: has {size} bytes, {size - position} more than its header announces; fetch it again"
        )
