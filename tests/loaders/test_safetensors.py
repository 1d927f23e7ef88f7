"""The safetensors reader against the safetensors library, and against broken and incomplete checkpoints."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from inferax.errors import LoadError, UnsupportedError
from inferax.loaders.safetensors import INDEX, SINGLE, open_safetensors
from inferax.loaders.tensors import TensorSource

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


def weights(*names: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(len(names))
    return {name: rng.standard_normal((4, 3)).astype(ml_dtypes.bfloat16) for name in names}


def shard(directory: Path, shards: dict[str, dict[str, np.ndarray]], **extra: str) -> None:
    weight_map = {name: file for file, tensors in shards.items() for name in tensors} | extra
    for file, tensors in shards.items():
        save_file(tensors, directory / file)
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    shard(tmp_path, {FIRST: weights("a", "b"), SECOND: weights("c")})
    return tmp_path


def test_every_type_equals_the_library(tmp_path: Path) -> None:
    torch.manual_seed(3)
    tensors = {name: (torch.randn(5, 3, 7) * 3).abs().to(dtype) for name, dtype in TYPES.items()}
    # An odd number of bytes first, so that what follows lies unaligned in the file.
    tensors["A"] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}
    save_torch(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    source: TensorSource = open_safetensors(tmp_path)
    assert source.files == (tmp_path / SINGLE,)
    loaded = load_torch(tmp_path / SINGLE)
    assert set(source.tensors) == set(loaded)
    for name, expected in loaded.items():
        info, array = source.tensors[name], source.read(name)
        assert array.shape == info.shape == tuple(expected.shape)
        assert info.nbytes == array.nbytes == expected.nbytes
        assert array.tobytes() == expected.flatten().view(torch.uint8).numpy().tobytes(), name
        if name in TYPES:
            assert info.type == name
            assert array.dtype.name == str(TYPES[name]).removeprefix("torch.")


def test_arrays_are_views_of_the_mapping(tmp_path: Path) -> None:
    stored = weights("a", "b")
    save_file(stored, tmp_path / SINGLE)
    with open_safetensors(tmp_path / SINGLE) as source:
        for name in source.tensors:
            array = source.read(name)
            assert not array.flags.owndata and not array.flags.writeable
            assert np.shares_memory(array, source.read(name))
        kept = source.read("a")
    np.testing.assert_array_equal(kept, stored["a"])  # an array outlives its file
    with pytest.raises(ValueError, match="after close"):
        source.read("a")


def test_types_that_share_bytes_are_listed_and_refused(tmp_path: Path) -> None:
    save_torch({"w": torch.zeros(2, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, tmp_path / SINGLE)
    source = open_safetensors(tmp_path)
    assert (source.tensors["w"].type, source.tensors["w"].shape, source.tensors["w"].nbytes) == ("F4", (2, 8), 8)
    with pytest.raises(UnsupportedError, match="tensor 'w' has type F4"):
        source.read("w")


@pytest.mark.parametrize("by_index", [False, True])
def test_shards(sharded: Path, by_index: bool) -> None:
    # Files beside the shards are not read, whatever is in them.
    (sharded / "consolidated.safetensors").write_bytes(b"not one")
    (sharded / "pytorch_model.bin").write_bytes(b"not one")
    source = open_safetensors(sharded / INDEX if by_index else sharded)
    assert source.files == (sharded / FIRST, sharded / SECOND)
    assert {name: source.file_of(name).name for name in source.tensors} == {"a": FIRST, "b": FIRST, "c": SECOND}
    for name, expected in (weights("a", "b") | weights("c")).items():
        np.testing.assert_array_equal(source.read(name), expected)


def test_single_file_wins_over_index_and_stray_name_is_found(sharded: Path) -> None:
    save_file(weights("whole"), sharded / SINGLE)
    assert set(open_safetensors(sharded).tensors) == {"whole"}
    only = sharded / "only"
    only.mkdir()
    save_file(weights("x"), only / "weights.safetensors")
    assert set(open_safetensors(only).tensors) == {"x"}


def test_index_decides_between_shards(tmp_path: Path) -> None:
    shards = {FIRST: weights("a", "both"), SECOND: weights("b", "both", "c")}
    shard(tmp_path, shards, both=SECOND)
    source = open_safetensors(tmp_path)
    assert source.file_of("both").name == SECOND
    np.testing.assert_array_equal(source.read("both"), shards[SECOND]["both"])
    index = json.loads((tmp_path / INDEX).read_text())
    del index["weight_map"]["both"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(LoadError, match=f"{SECOND}: tensor 'both' is in {FIRST} too, and the index names neither"):
        open_safetensors(tmp_path)


def test_missing_shard_and_missing_tensor(sharded: Path) -> None:
    shard(sharded, {FIRST: weights("a"), SECOND: weights("b")}, head=SECOND, norm=SECOND)
    with pytest.raises(LoadError, match=rf"{SECOND}: the index places tensors in it that it lacks \(head, norm\)"):
        open_safetensors(sharded)
    (sharded / SECOND).unlink()
    with pytest.raises(LoadError, match=f"{SECOND}: this shard is missing. Fetch every file that {INDEX} names"):
        open_safetensors(sharded)
    (sharded / FIRST).unlink()
    with pytest.raises(LoadError, match=f"{FIRST}: this shard is missing, and 1 more"):
        open_safetensors(sharded)


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ("{", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": 3}}', "tensor 'a' in 3, which is not the name of a file beside it"),
        ('{"weight_map": {"a": "../x.safetensors"}}', r"tensor 'a' in '\.\./x\.safetensors'"),
        ('{"weight_map": {"a": "/etc/x.safetensors"}}', "which is not the name of a file beside it"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "not a .safetensors file. Convert it"),
        ("", "the file is empty"),
    ],
)
def test_broken_index(tmp_path: Path, index: str | bytes, problem: str) -> None:
    (tmp_path / INDEX).write_bytes(index if isinstance(index, bytes) else index.encode())
    with pytest.raises(LoadError, match=problem) as caught:
        open_safetensors(tmp_path)
    assert caught.value.file == str(tmp_path / INDEX)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(LoadError, match="pickle .*inferax never reads.*Convert it.*save_pretrained"):
            open_safetensors(path)


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=f"no weights in it. It should hold {SINGLE}, or {INDEX}"):
        open_safetensors(tmp_path)
    with pytest.raises(LoadError, match="not there"):
        open_safetensors(tmp_path / "none")
    for name in "ab":
        save_file(weights(name), tmp_path / f"{name}.safetensors")
    with pytest.raises(LoadError, match=r"2 \.safetensors files \(a\.safetensors, b\.safetensors\) and no"):
        open_safetensors(tmp_path)
    with pytest.raises(LoadError, match="no tensor 'lm_head.weight'"):
        open_safetensors(tmp_path / "a.safetensors").read("lm_head.weight")


def file_of(header: Any, data: bytes = b"", size: int | None = None) -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(head) if size is None else size) + head + data


def entry(shape: list[int], offsets: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the file is empty"),
        (b"\x08\0\0", "not a valid safetensors file"),
        (file_of(b"{}", size=2**63), "not a valid safetensors file"),
        (file_of(b"{}", size=90_000_000), "not a valid safetensors file"),
        (file_of(b"{nonsense"), "not a valid safetensors file"),
        (file_of(b'{"\xff": 1}'), "not a valid safetensors file"),
        (file_of(entry([2], [0, 8]), bytes(7)), "not a valid safetensors file"),
        (file_of(entry([2], [0, 8]), bytes(9)), "not a valid safetensors file"),
        (file_of(entry([3], [0, 8]), bytes(8)), "not a valid safetensors file"),
        (file_of(entry([2], [8, 0]), bytes(8)), "not a valid safetensors file"),
        (file_of(entry([2], [4, 12]), bytes(12)), "not a valid safetensors file"),
        (file_of(entry([2**40, 2**40], [0, 8]), bytes(8)), "not a valid safetensors file"),
        (file_of(entry([2], [0, 8], "F31"), bytes(8)), "not a valid safetensors file"),
        (file_of(entry([0] + [2**62], [0, 0])), r"tensor 'w' has a shape that no array can have: \[0, 4611"),
        (file_of(entry([1] * 65, [0, 4]), bytes(4)), "tensor 'w' has a shape that no array can have"),
        (
            file_of(b'{"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0],"x":' + b"9" * 5000 + b"}}"),
            "not a valid safetensors file",
        ),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
    ],
)
def test_broken_file(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / SINGLE
    path.write_bytes(content)
    with pytest.raises(LoadError, match=problem) as caught:
        open_safetensors(tmp_path)
    assert caught.value.file == str(path) and caught.value.remedy


def small() -> bytes:
    header = {
        "__metadata__": {"format": "pt"},
        "w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [12, 16]},
    }
    return file_of(header, bytes(range(16)))


def open_or_refuse(path: Path, content: bytes) -> bool:
    """Nothing but LoadError may come out, and what opens must be whole."""
    path.write_bytes(content)
    try:
        source = open_safetensors(path)
    except LoadError:
        return False
    for name, info in source.tensors.items():
        try:
            assert len(source.read(name).tobytes()) == info.nbytes
        except UnsupportedError:
            assert info.type in ("F4", "F6_E2M3", "F6_E3M2")
    return True


def test_cut_off_at_every_byte(tmp_path: Path) -> None:
    content = small()
    assert open_or_refuse(tmp_path / SINGLE, content)
    for size in range(len(content)):
        assert not open_or_refuse(tmp_path / SINGLE, content[:size]), size


@settings(max_examples=400, deadline=None, database=None, derandomize=True)
@given(
    changes=st.lists(st.tuples(st.integers(0, len(small()) - 1), st.integers(0, 255)), max_size=3),
    cut=st.one_of(st.just(0), st.integers(0, 40)),
    at=st.integers(0, len(small())),
    gap=st.binary(max_size=9),
)
def test_damaged_file_opens_whole_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], cut: int, at: int, gap: bytes
) -> None:
    content = bytearray(small())
    for where, value in changes:
        content[where] = value
    content[at : at + cut] = gap
    open_or_refuse(tmp_path_factory.getbasetemp() / "damaged.safetensors", bytes(content))
