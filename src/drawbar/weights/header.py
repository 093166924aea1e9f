"""One safetensors file's header: read without its data, and checked until every byte of the file is accounted for."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from drawbar.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own bound
_LENGTH_BYTES = 8
_MAX_ELEMENTS = 2**60  # zeros aside: beyond it the strides of even an empty tensor overflow

# Types of less than a byte (F4, F6) have no counterpart in torch of the same shape, and are refused by name.
_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
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
        offset: its first byte, counted from the start of the file.
        nbytes: its length in bytes.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(file: Path) -> list[TensorEntry]:
    """The tensors of one safetensors file, in the order of their bytes.

    Raises:
        CheckpointError: the file is missing, cut short, too long, or its header is damaged; names file and tensor.
    """
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            start = stream.read(_LENGTH_BYTES)
            length = _header_length(file, start, size)
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    if len(raw) != length:
        raise CheckpointError(f"{file}: the header of {length} bytes cannot be read whole; fetch the file again")
    data_start = _LENGTH_BYTES + length
    entries = [_entry(file, name, fields, data_start) for name, fields in _parse(file, raw).items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_layout(file, entries, data_start, size)
    return entries


def _header_length(file: Path, start: bytes, size: int) -> int:
    if size == 0:
        raise CheckpointError(f"{file}: the file is empty (0 bytes); fetch it again")
    if start == b"version ":
        raise CheckpointError(f"{file}: is a Git LFS pointer in place of the file; fetch it with `git lfs pull`")
    if len(start) < _LENGTH_BYTES:
        raise CheckpointError(f"{file}: {size} bytes are too few for a safetensors file; fetch it again")
    length = int.from_bytes(start, "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file}: claims a header of {length} bytes (2 to {MAX_HEADER_BYTES} are possible); "
            "the file is damaged or not in safetensors format"
        )
    if _LENGTH_BYTES + length > size:
        raise CheckpointError(
            f"{file}: is cut short within its header: it has {size} of at least {_LENGTH_BYTES + length} bytes; "
            "fetch it again"
        )
    return length


def _parse(file: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the header is damaged: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: the header is damaged: a JSON object is expected")
    header.pop("__metadata__", None)
    return header


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads`: an object whose keys all differ.

    Raises:
        ValueError: a key comes twice; names it.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key} is given twice")
        found[key] = value
    return found


def _entry(file: Path, name: str, fields: Any, data_start: int) -> TensorEntry:
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file}: tensor {name}: its entry in the header is damaged")
    kind, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (isinstance(kind, str) and _is_numbers(shape) and _is_numbers(offsets) and len(offsets) == 2):
        raise CheckpointError(f"{file}: tensor {name}: its entry in the header is damaged: {str(fields)[:200]}")
    if kind not in _DTYPES:
        raise CheckpointError(f"{file}: tensor {name}: dtype {kind} is not supported (known: {', '.join(_DTYPES)})")
    if math.prod(max(size, 1) for size in shape) > _MAX_ELEMENTS:
        raise CheckpointError(f"{file}: tensor {name}: shape {shape} is impossible; the header is damaged")
    begin, end = offsets
    if begin > end:
        raise CheckpointError(f"{file}: tensor {name}: its data_offsets {offsets} run backwards; the header is damaged")
    dtype = _DTYPES[kind]
    expected = math.prod(shape) * dtype.itemsize
    if end - begin != expected:
        raise CheckpointError(
            f"{file}: tensor {name}: shape {shape} of {kind} takes {expected} bytes, "
            f"but its data_offsets give it {end - begin}"
        )
    return TensorEntry(name, file, dtype, tuple(shape), data_start + begin, end - begin)


def _is_numbers(value: Any) -> TypeGuard[list[int]]:
    """A list of whole numbers, none below 0 (and no booleans, which Python counts among them)."""
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _check_layout(file: Path, entries: Sequence[TensorEntry], data_start: int, size: int) -> None:
    """Tensors must follow each other without overlap or gap, and the file must end where they end."""
    position, previous = data_start, "the header"
    for entry in entries:
        if entry.offset != position:
            fault = "overlaps" if entry.offset < position else f"leaves {entry.offset - position} bytes unused behind"
            raise CheckpointError(f"{file}: tensor {entry.name} {fault} {previous}; the header is damaged")
        position, previous = entry.offset + entry.nbytes, f"tensor {entry.name}"
    if size < position:
        raise CheckpointError(
            f"{file}: is cut short: it has {size} of the {position} bytes that its header announces; fetch it again"
        )
    if size > position:
        raise CheckpointError(
            f"{file}: is too long: it has {size} bytes, but its header announces {position}; fetch it again"
        )
