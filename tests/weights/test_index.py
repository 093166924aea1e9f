"""The index against the safetensors library's own files, and against every kind of damage."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from drawbar.errors import CheckpointError
from drawbar.weights.index import CheckpointIndex, TensorEntry

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int16,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.float32,
    torch.int64,
    torch.float64,
]
INDEX = "model.safetensors.index.json"


def tensor_bytes(entry: TensorEntry) -> bytes:
    return entry.file.read_bytes()[entry.offset : entry.offset + entry.nbytes]


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file by hand; a header of bytes is taken as it is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def fault(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        CheckpointIndex.from_folder(folder)
    return str(caught.value)


def save_shards(folder: Path, index: dict[str, str] | None = None) -> dict[str, str]:
    """Two shards with tensors a, b and c, d; returns their true weight map."""
    shards = {"model-00001-of-00002.safetensors": "ab", "model-00002-of-00002.safetensors": "cd"}
    for file, names in shards.items():
        save_file({name: torch.arange(ord(name), ord(name) + 4) for name in names}, folder / file)
    weight_map = {name: file for file, names in shards.items() for name in names}
    if index is not None:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index or weight_map}))
    return weight_map


# Names that JSON must escape, or that the format reserves.
names = st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__" and name.isprintable())
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@settings(max_examples=60, deadline=None)
@given(
    specs=st.dictionaries(names, st.tuples(st.sampled_from(DTYPES), shapes, st.integers(0, 2)), min_size=1, max_size=8),
    with_index=st.booleans(),
    data=st.data(),
)
def test_index_agrees_with_the_library(
    specs: dict[str, tuple[torch.dtype, tuple[int, ...], int]], with_index: bool, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards: dict[str, dict[str, torch.Tensor]] = {}
        for key, (dtype, shape, shard) in specs.items():
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            content = data.draw(st.binary(min_size=nbytes, max_size=nbytes))
            if dtype == torch.bool:
                content = bytes(byte % 2 for byte in content)
            flat = torch.tensor(list(content), dtype=torch.uint8).view(dtype)
            shards.setdefault(f"part{shard}.safetensors", {})[key] = flat.reshape(shape)
        for file, tensors in shards.items():
            save_file(tensors, folder / file, metadata={"format": "pt"})
        if with_index:
            weight_map = {key: file for file, tensors in shards.items() for key in tensors}
            (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
        index = CheckpointIndex.from_folder(folder)
        assert set(index) == set(specs)
        assert index.files == tuple(sorted(folder / file for file in shards))
        for file in shards:
            for key, tensor in load_file(folder / file).items():
                found = index[key]
                assert (found.name, found.file) == (key, folder / file)
                assert (found.dtype, found.shape) == (tensor.dtype, tuple(tensor.shape))
                assert tensor_bytes(found) == raw(tensor)
        assert index.total_bytes == sum(t.numel() * t.itemsize for ts in shards.values() for t in ts.values())


def test_single_file_wins_over_others_without_an_index(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    save_file({"a": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    index = CheckpointIndex.from_folder(str(tmp_path))
    assert index.files == (tmp_path / "model.safetensors",)
    assert index["a"].shape == (2,)


def test_with_an_index_only_its_shards_are_used(tmp_path: Path) -> None:
    save_shards(tmp_path, {})
    save_file({"a": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    index = CheckpointIndex.from_folder(tmp_path)
    assert len(index.files) == 2
    assert sorted(index) == ["a", "b", "c", "d"]
    assert index.folder == tmp_path
    assert "4 tensors in 2 files" in repr(index)


def test_require(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    index = CheckpointIndex.from_folder(tmp_path)
    assert index.require("w") is index.require("w", [2, 3]) is index["w"]
    with pytest.raises(CheckpointError, match=r"w has shape \[2, 3\].*needs \[3, 2\]"):
        index.require("w", (3, 2))
    with pytest.raises(CheckpointError, match="tensor v is missing"):
        index.require("v")


def test_all_dtypes_of_the_format_that_torch_has(tmp_path: Path) -> None:
    for kind, nbytes in {"F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "U32": 4, "U64": 8, "C64": 8}.items():
        write(tmp_path / "model.safetensors", {"t": entry(0, nbytes, [1], kind)}, bytes(nbytes))
        assert CheckpointIndex.from_folder(tmp_path)["t"].dtype.itemsize == nbytes


def test_header_need_not_be_padded(tmp_path: Path) -> None:
    header = json.dumps({"t": entry(0, 3)}).encode() + b" "
    for extra in range(8):
        write(tmp_path / "model.safetensors", header + b" " * extra, b"abc")
        assert tensor_bytes(CheckpointIndex.from_folder(tmp_path)["t"]) == b"abc"


# --- damaged files -------------------------------------------------------------------------------------------------

GOOD = {"first": entry(0, 4), "second": entry(4, 8, [2], "F16")}
DAMAGED: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "empty": (lambda path: path.write_bytes(b""), ["empty"]),
    "seven bytes": (lambda path: path.write_bytes(b"1234567"), ["7 bytes"]),
    "git lfs pointer": (lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), ["lfs pull"]),
    "absurd length": (lambda path: write(path, GOOD, bytes(8), 1 << 62), [str(1 << 62)]),
    "length of the bound + 1": (lambda path: write(path, GOOD, bytes(8), 100_000_001), ["100000001"]),
    "no header": (lambda path: write(path, b"", bytes(8)), ["header of 0"]),
    "header longer than file": (lambda path: write(path, GOOD, b"", 5000), ["cut short", "5008"]),
    "not json": (lambda path: write(path, b'{"first": '), ["header is damaged"]),
    "not utf-8": (lambda path: write(path, b'{"\xff": 1}'), ["header is damaged"]),
    "deep json": (lambda path: write(path, b"[" * 200_000), ["header is damaged"]),
    "not an object": (lambda path: write(path, [1, 2]), ["JSON object"]),
    "same key twice": (
        lambda path: write(path, b'{"first": %s, "first": %s}' % ((json.dumps(entry(0, 4)).encode(),) * 2), bytes(4)),
        ["first is given twice"],
    ),
    "entry is no object": (lambda path: write(path, {"first": 7}), ["tensor first"]),
    "no dtype": (lambda path: write(path, {"first": {"shape": [], "data_offsets": [0, 1]}}, b"1"), ["tensor first"]),
    "dtype is no string": (lambda path: write(path, {"first": entry(0, 1) | {"dtype": []}}, b"1"), ["tensor first"]),
    "negative shape": (lambda path: write(path, {"first": entry(0, 1, [-1])}, b"1"), ["tensor first"]),
    "fractional shape": (lambda path: write(path, {"first": entry(0, 1) | {"shape": [1.0]}}, b"1"), ["tensor first"]),
    "boolean shape": (lambda path: write(path, {"first": entry(0, 1) | {"shape": [True]}}, b"1"), ["tensor first"]),
    "shape is no list": (lambda path: write(path, {"first": entry(0, 1) | {"shape": 1}}, b"1"), ["tensor first"]),
    "impossible shape": (lambda path: write(path, {"first": entry(0, 0, [1 << 62, 9, 0])}), ["first", "impossible"]),
    "three offsets": (
        lambda path: write(path, {"first": entry(0, 1) | {"data_offsets": [0, 1, 2]}}, b"1"),
        ["tensor first"],
    ),
    "backwards": (lambda path: write(path, {"first": entry(4, 0, [4])}, bytes(4)), ["tensor first", "backwards"]),
    "unknown dtype": (lambda path: write(path, {"first": entry(0, 4, [8], "F4")}, bytes(4)), ["tensor first", "F4"]),
    "size and shape differ": (
        lambda path: write(path, {"first": entry(0, 4, [3], "F16")}, bytes(4)),
        ["tensor first", "[3] of F16", "6 bytes", "give it 4"],
    ),
    "overlap": (
        lambda path: write(path, {"first": entry(0, 4), "second": entry(3, 7)}, bytes(7)),
        ["tensor second overlaps tensor first"],
    ),
    "same bytes": (
        lambda path: write(path, {"first": entry(0, 4), "second": entry(0, 4)}, bytes(4)),
        ["tensor second overlaps tensor first"],
    ),
    "gap": (
        lambda path: write(path, {"first": entry(0, 4), "second": entry(6, 8)}, bytes(8)),
        ["tensor second leaves 2 bytes unused behind tensor first"],
    ),
    "gap in front": (lambda path: write(path, {"first": entry(2, 4)}, bytes(4)), ["tensor first leaves 2 bytes"]),
    "beyond the file": (lambda path: write(path, {"first": entry(0, 99)}, bytes(4)), ["cut short"]),
    "trailing bytes": (lambda path: write(path, GOOD, bytes(9)), ["too long"]),
    "no tensors": (lambda path: write(path, {"__metadata__": {"format": "pt"}}), ["no tensors"]),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_file(tmp_path: Path, damage: str) -> None:
    make, expected = DAMAGED[damage]
    make(tmp_path / "model.safetensors")
    message = fault(tmp_path)
    assert "model.safetensors" in message
    for words in expected:
        assert words in message


def test_file_cut_by_one_byte_says_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    message = fault(tmp_path)
    assert str(path) in message
    assert str(len(whole)) in message
    assert str(len(whole) - 1) in message


@settings(max_examples=150, deadline=None)
@given(cut=st.integers(0, 10_000), extra=st.integers(0, 3), flips=st.lists(st.integers(0, 10_000), max_size=3))
def test_random_damage_to_the_header_is_an_error_or_harmless(cut: int, extra: int, flips: list[int]) -> None:
    """Whatever is broken: either a CheckpointError, or an index whose tensors lie within the file."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.safetensors"
        save_file({"a": torch.zeros(7), "b": torch.zeros(2, 3, dtype=torch.bfloat16)}, path)
        content = bytearray(path.read_bytes())
        header = 8 + int.from_bytes(content[:8], "little")
        for flip in flips:
            content[flip % header] ^= 1 << flip % 8
        path.write_bytes(bytes(content[: len(content) - cut % 9 * (cut % 2)]) + bytes(extra))
        try:
            index = CheckpointIndex.from_folder(name)
        except CheckpointError as error:
            assert "model.safetensors" in str(error)
        else:
            size = path.stat().st_size
            assert all(8 <= found.offset <= found.offset + found.nbytes <= size for found in index.values())


# --- shards and their index file -----------------------------------------------------------------------------------


def test_index_names_a_shard_that_is_absent(tmp_path: Path) -> None:
    save_shards(tmp_path, {})
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    message = fault(tmp_path)
    assert INDEX in message
    assert "model-00002-of-00002.safetensors" in message
    assert "fetch" in message


def test_numbered_shard_is_missing_without_index(tmp_path: Path) -> None:
    save_shards(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    assert "00001-of-00002 of model is missing (1 of 2 are there)" in fault(tmp_path)


@pytest.mark.parametrize("first", [0, 1])
def test_numbering_may_start_at_zero_or_one(tmp_path: Path, first: int) -> None:
    for number in range(3):
        save_file({str(number): torch.zeros(1)}, tmp_path / f"model-{number + first:05d}-of-00003.safetensors")
    assert len(CheckpointIndex.from_folder(tmp_path)) == 3


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    save_file({"twice": torch.zeros(1)}, tmp_path / "x.safetensors")
    save_file({"twice": torch.zeros(1)}, tmp_path / "y.safetensors")
    message = fault(tmp_path)
    assert "y.safetensors: tensor twice is also in x.safetensors" in message


def test_stale_index_tensor_in_other_shard(tmp_path: Path) -> None:
    right = save_shards(tmp_path)
    save_shards(tmp_path, right | {"a": right["c"]})
    message = fault(tmp_path)
    assert f"{INDEX}: the index file is stale" in message
    assert f"it says that tensor a is in {right['c']}, but it is in {right['a']}" in message
    assert "fetch" in message


def test_stale_index_tensor_nowhere(tmp_path: Path) -> None:
    right = save_shards(tmp_path)
    save_shards(tmp_path, right | {"e": right["c"]})
    message = fault(tmp_path)
    assert f"{INDEX}: the index file is stale" in message
    assert f"it says that tensor e is in {right['c']}, but no shard holds it" in message


def test_stale_index_lacks_a_tensor(tmp_path: Path) -> None:
    right = save_shards(tmp_path)
    save_shards(tmp_path, {name: file for name, file in right.items() if name != "d"})
    message = fault(tmp_path)
    assert f"{INDEX}: the index file is stale: {right['d']} holds tensor d, which it does not name" in message


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"weight_map": {}}',
        b'{"weight_map": []}',
        b'{"metadata": {}}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": "../model.safetensors"}}',
        b'{"weight_map": {"a": "/model.safetensors"}}',
        b'{"weight_map": {"a": "pytorch_model.bin"}}',
        b'{"weight_map": {"a": "model.safetensors", "a": "model.safetensors"}}',
    ],
)
def test_damaged_index_file(tmp_path: Path, content: bytes) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / INDEX).write_bytes(content)
    assert str(tmp_path / INDEX) in fault(tmp_path)


# --- other things than a checkpoint --------------------------------------------------------------------------------


def test_no_folder(tmp_path: Path) -> None:
    assert "no such folder" in fault(tmp_path / "absent")


def test_a_file(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert "is a file; give the folder" in fault(tmp_path / "model.safetensors")


def test_empty_folder(tmp_path: Path) -> None:
    message = fault(tmp_path)
    assert str(tmp_path) in message
    assert "holds no weights" in message


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapter(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"{}")
    message = fault(tmp_path)
    assert "adapter (LoRA)" in message
    assert "base model" in message


def test_adapter_beside_a_model_is_not_dropped_in_silence(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    message = fault(tmp_path)
    assert "adapter_config.json" in message
    assert "merge" in message


def test_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for path in tmp_path, tmp_path / "model.gguf":
        message = fault(path)
        assert "GGUF is not supported" in message
        assert "safetensors" in message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickles(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02")
    message = fault(tmp_path)
    assert name in message
    assert "nothing is ever unpickled" in message
    assert "safetensors" in message


def test_broken_link(tmp_path: Path) -> None:
    """A hub cache whose blob was deleted."""
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    assert "model.safetensors: cannot be read" in fault(tmp_path)
