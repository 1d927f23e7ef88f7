"""The GGUF reader against the gguf package's writer and reader, and against files that are broken in every way."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFValueType, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from inferax.errors import LoadError
from inferax.loaders.gguf import GGUFFile, open_gguf
from inferax.loaders.tensors import TensorSource
from inferax.ops.ggml import TYPES, dequantize_blocks

PLAIN = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
}


def text(s: str | bytes) -> bytes:
    s = s.encode() if isinstance(s, str) else s
    return struct.pack("<Q", len(s)) + s


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str | bytes, dims: Sequence[int], type: int, offset: int = 0, num_dims: int | None = None) -> bytes:
    """A tensor's entry; `dims` as in the file, fastest first."""
    head = text(name) + struct.pack("<I", len(dims) if num_dims is None else num_dims)
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, type, offset)


def header(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    version: int = 3,
    num_entries: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    num_entries = len(entries) if num_entries is None else num_entries
    num_tensors = len(tensors) if num_tensors is None else num_tensors
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries) + b"".join([*entries, *tensors])


def with_data(head: bytes, data: bytes, alignment: int = 32) -> bytes:
    return head + bytes(-len(head) % alignment) + data


@pytest.fixture
def save(tmp_path: Path) -> Any:
    def save(content: bytes, name: str = "model.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return save


def write(path: Path, *, alignment: int | None = None, **options: Any) -> dict[str, np.ndarray]:
    """A file with a value of every metadata type and a tensor of every type; returns the tensors as stored."""
    rng = np.random.default_rng(5)
    w = GGUFWriter(path, "llama", **options)
    if alignment:
        w.add_custom_alignment(alignment)
    for kind, value in {"uint8": 255, "int8": -128, "uint16": 65535, "int16": -5, "uint32": 2**32 - 1}.items():
        getattr(w, f"add_{kind}")(f"a.{kind}", value)
    for kind, value in {"int32": -7, "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.1, "float64": 0.1}.items():
        getattr(w, f"add_{kind}")(f"a.{kind}", value)
    w.add_bool("a.true", True)
    w.add_bool("a.false", False)
    w.add_string("a.text", "Füße 😀\x00 end")
    w.add_string("a.empty", "")
    w.add_array("a.texts", ["a", "", "Ġñ", "▁"])
    w.add_array("a.ints", [1, -2, 3])
    w.add_array("a.floats", [0.5, 0.1])
    w.add_array("a.bools", [True, False, True])
    w.add_array("a.bytes", b"\x00\x01\xff")
    stored: dict[str, np.ndarray] = {}
    for name, dtype in PLAIN.items():
        values = (rng.standard_normal((3, 2, 5)) * 100).astype(dtype)
        stored[f"plain.{name}"] = values
        raw = GGMLQuantizationType[name]
        data = values.view(np.uint8) if name == "BF16" else values
        w.add_tensor(f"plain.{name}", data, raw_dtype=raw if name == "BF16" else None)
    for name, info in TYPES.items():
        if name not in ("Q2_0", "Q8_1"):  # the package does not know the one, and has another size for the other
            blocks = rng.integers(0, 256, (4, 3, info.block_bytes), dtype=np.uint8)
            stored[f"packed.{name}"] = blocks
            w.add_tensor(f"packed.{name}", blocks.reshape(4, -1), raw_dtype=GGMLQuantizationType[name])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return stored


def assert_holds(file: GGUFFile, stored: dict[str, np.ndarray]) -> None:
    assert set(file.tensors) == set(stored)
    for name, values in stored.items():
        info, read = file.tensors[name], file.read(name)
        packed, type = name.startswith("packed."), name.split(".")[1]
        shape = (*values.shape[:-2], values.shape[-2] * TYPES[type].block) if packed else values.shape
        assert (info.name, info.type, info.shape, info.nbytes) == (name, type, shape, values.nbytes)
        assert (read.dtype, read.shape) == (values.dtype, values.shape)
        assert read.tobytes() == values.tobytes()


@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_reads_what_the_gguf_package_wrote(tmp_path: Path, alignment: int | None) -> None:
    path = tmp_path / "model.gguf"
    stored = write(path, alignment=alignment)
    file = open_gguf(path)
    source: TensorSource = file
    assert (file.architecture, file.version, file.alignment) == ("llama", 3, alignment or 32)
    assert file.files == (path,) and source.file_of("plain.F32") == path
    assert_holds(file, stored)

    reader = GGUFReader(path)
    assert set(file.metadata) == {k for k in reader.fields if not k.startswith("GGUF.")}
    for key, value in file.metadata.items():
        expected = reader.fields[key].contents()
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected, key
        assert type(value) in (int, float, bool, str, list, np.ndarray)
    assert file.metadata["a.true"] is True and file.metadata["a.false"] is False
    arrays = {k: v.dtype for k, v in file.metadata.items() if isinstance(v, np.ndarray)}
    assert arrays == {"a.ints": np.int32, "a.floats": np.float32, "a.bools": np.bool_, "a.bytes": np.uint8}
    for t in reader.tensors:
        assert file.tensors[t.name].shape == tuple(int(d) for d in reversed(t.shape))
        assert file.read(t.name).tobytes() == t.data.tobytes()


def test_arrays_are_views_of_the_mapping(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path)
    with open_gguf(path) as file:
        for name in file.tensors:
            array = file.read(name)
            assert not array.flags.owndata and not array.flags.writeable
            assert np.shares_memory(array, file.read(name))
        kept = file.read("plain.F32")
        before = kept.copy()
    np.testing.assert_array_equal(kept, before)  # an array outlives its file
    with pytest.raises(ValueError, match="after close"):
        file.read("plain.F32")


def test_version_2_and_types_newer_than_the_gguf_package(save: Any) -> None:
    q2, q8 = np.arange(36, dtype=np.uint8), np.arange(72, dtype=np.uint8)
    tensors = [tensor("new", [128], 42), tensor("act", [32, 2], 9, 64), tensor("scalar", [], 26, 160)]
    data = q2.tobytes() + bytes(28) + q8.tobytes() + bytes(24) + struct.pack("<i", -3)
    file = open_gguf(save(with_data(header([], tensors, version=2), data)))
    assert file.version == 2
    assert file.tensors["new"].shape == (128,) and file.tensors["act"].shape == (2, 32)
    np.testing.assert_array_equal(file.read("new"), q2.reshape(2, 18))
    np.testing.assert_array_equal(file.read("act"), q8.reshape(2, 1, 36))
    assert file.tensors["scalar"].shape == () and file.read("scalar") == -3


def test_smollm2_equals_the_gguf_package(smollm2_path: Path) -> None:
    file, reader = open_gguf(smollm2_path), GGUFReader(smollm2_path)
    assert file.architecture == "llama"
    assert {k for k in reader.fields if not k.startswith("GGUF.")} == set(file.metadata)
    for key, value in file.metadata.items():
        assert reader.fields[key].contents() == (value.tolist() if isinstance(value, np.ndarray) else value)
    for t in reader.tensors:
        info = file.tensors[t.name]
        assert (info.type, info.shape) == (t.tensor_type.name, tuple(int(d) for d in reversed(t.shape)))
        assert info.nbytes == t.n_bytes
        assert file.read(t.name).ravel()[:1000].tobytes() == t.data.ravel()[:1000].tobytes()
    t = next(t for t in reader.tensors if t.name == "blk.7.attn_k.weight")
    values = dequantize_blocks(file.tensors[t.name].type, jnp.asarray(file.read(t.name)))
    np.testing.assert_array_equal(np.asarray(values).reshape(t.shape[::-1]), gguf.dequantize(t.data, t.tensor_type))


def test_gemma3_opens_fast(gemma3_path: Path) -> None:
    """262,144 tokens: 0.2 s on two cores; the bound leaves room for a busy machine."""
    start = time.perf_counter()
    file = open_gguf(gemma3_path)
    assert time.perf_counter() - start < 1.5
    assert len(file.metadata["tokenizer.ggml.tokens"]) == len(file.metadata["tokenizer.ggml.scores"]) == 262_144
    assert {i.type for i in file.tensors.values()} >= {"F32", "Q6_K", "Q8_0"}


def split(tmp_path: Path, **options: Any) -> tuple[list[Path], dict[str, np.ndarray]]:
    stored = write(tmp_path / "m.gguf", **options)
    return sorted(tmp_path.glob("m-*.gguf")), stored


@pytest.mark.parametrize("options", [{"split_max_tensors": 12}, {"split_max_tensors": 20, "small_first_shard": True}])
def test_any_part_of_a_split_model_opens_all(tmp_path: Path, options: dict[str, Any]) -> None:
    files, stored = split(tmp_path, **options)
    assert len(files) == 3
    for part in files:
        file = open_gguf(part)
        assert file.files == tuple(files)
        assert file.architecture == "llama" and file.metadata["a.int32"] == -7
        assert_holds(file, stored)
    assert {file.file_of(name) for name in stored} <= set(files) and file.file_of("packed.NVFP4") == files[-1]


def test_broken_splits(tmp_path: Path) -> None:
    files, _ = split(tmp_path, split_max_tensors=12)
    second = files[1].read_bytes()

    files[1].unlink()
    for part in (files[0], files[2]):
        with pytest.raises(LoadError, match=r"m-00002-of-00003\.gguf: this part .* is missing\. Put all 3 parts"):
            open_gguf(part)
    files[1].write_bytes(files[2].read_bytes())
    with pytest.raises(LoadError, match="by its name this is part 2 of 3, by its metadata part 3 of 3"):
        open_gguf(files[0])
    files[1].write_bytes(second.replace(b"plain.", b"other.").replace(b"packed.", b"shaded."))
    assert len(open_gguf(files[0]).tensors) == 33
    files[1].write_bytes(second[:-1000])
    with pytest.raises(LoadError, match=r"m-00002-of-00003\.gguf: the data of tensor"):
        open_gguf(files[0])
    renamed = files[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(LoadError, match=r"one of 3 parts .* NAME-00001-of-00003\.gguf"):
        open_gguf(renamed)


def test_split_parts_that_do_not_fit_together(save: Any) -> None:
    def part(no: int, names: Sequence[str], total: int, count: bytes = struct.pack("<H", 2)) -> bytes:
        entries = [
            entry("split.no", GGUFValueType.UINT16, struct.pack("<H", no)),
            entry("split.count", GGUFValueType.UINT16, count),
            entry("split.tensors.count", GGUFValueType.INT32, struct.pack("<i", total)),
        ]
        tensors = [tensor(n, [8], 0, 32 * i) for i, n in enumerate(names)]
        return with_data(header(entries, tensors), bytes(32 * len(names)))

    first = save(part(0, ["x", "y"], 3), "m-00001-of-00002.gguf")
    second = save(part(1, ["z"], 3), "m-00002-of-00002.gguf")
    assert set(open_gguf(second).tensors) == {"x", "y", "z"}
    save(part(1, ["y"], 3), second.name)
    with pytest.raises(LoadError, match="m-00002.*tensor 'y' is in m-00001-of-00002.gguf too"):
        open_gguf(first)
    save(part(1, ["z", "w"], 3), second.name)
    with pytest.raises(LoadError, match="m-00001.*hold 4 tensors where 3 are announced"):
        open_gguf(first)
    head = header([entry("split.count", GGUFValueType.STRING, text("two"))])
    with pytest.raises(LoadError, match="split.count should be a number, and is 'two'"):
        open_gguf(save(head, first.name))


def test_missing_tensor_and_architecture(save: Any) -> None:
    file = open_gguf(save(header()))
    with pytest.raises(LoadError, match="no tensor 'output.weight'"):
        file.read("output.weight")
    with pytest.raises(LoadError, match="general.architecture .* is None"):
        _ = file.architecture


U8, STRING, ARRAY = GGUFValueType.UINT8, GGUFValueType.STRING, GGUFValueType.ARRAY


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return entry("k", ARRAY, struct.pack("<IQ", kind, count) + content)


def one(*args: Any, data: bytes = bytes(4096), **kwargs: Any) -> bytes:
    return with_data(header([], [tensor(*args, **kwargs)]), data)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the file is empty"),
        (b"GG", "starts with b'GG'"),
        (b"PK\x03\x04" + bytes(60), r"starts with b'PK\\x03\\x04', and a GGUF file with b'GGUF'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer.*git lfs pull"),
        (header(version=1), "GGUF version 1; versions 2 and 3"),
        (header(version=4), "GGUF version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian.*gguf-convert-endian"),
        (header(num_entries=2**63), "announces 9223372036854775808 metadata values"),
        (header(num_tensors=2**40), "announces 1099511627776 tensors"),
        (header([entry("k", 13, bytes(8))]), "metadata k has value type 13; known are 0 to 12"),
        (header([array(STRING, 2**60)]), "announces 1152921504606846976 strings in metadata k"),
        (header([array(U8, 2**64 - 1)]), "announces 18446744073709551615 numbers in metadata k"),
        (header([array(ARRAY, 1, bytes(32))]), "metadata k is an array of arrays"),
        (header([array(99, 1, bytes(32))]), "the elements of metadata k has value type 99"),
        (header([array(STRING, 2, text("a") + text(b"\xff\xfe"))]), r"metadata k\[1\] is not UTF-8"),
        (header([entry("k", STRING, text(b"caf\xe9"))]), "metadata k is not UTF-8 .* at byte 3"),
        (header([entry(b"\xff", U8, b"\0")]), "the key of metadata value 0 is not UTF-8"),
        (header([entry("k", STRING, struct.pack("<Q", 2**63) + bytes(8))]), "k has a length of 9223372036854775808"),
        (header([entry("k", U8, b"\0"), entry("k", U8, b"\0")]), "metadata k occurs twice"),
        (header([entry("general.alignment", GGUFValueType.UINT32, struct.pack("<I", 0))]), "alignment is 0, .* power"),
        (header([entry("general.alignment", GGUFValueType.UINT32, struct.pack("<I", 24))]), "alignment is 24"),
        (header([entry("general.alignment", STRING, text("32"))]), "alignment is '32'"),
        (header([entry("general.alignment", GGUFValueType.BOOL, b"\1")]), "alignment is True"),
        (one("t", [8, 8], 0, data=bytes(255)), r"tensor 't' \[8, 8\] F32 ends at offset \d+, and the file at \d+"),
        (one("t", [8], 0, 4096), "the data of tensor 't'"),
        (one("t", [8], 0, 2**64 - 32), "the data of tensor 't'"),
        (one("t", [2**63, 2**63, 2**63], 0), "the data of tensor 't'"),
        (one("t", [8, 0], 0), r"tensor 't' has shape \[0, 8\]"),
        (one("t", [8], 0, 4), "tensor 't' is at offset 4, which is not a multiple of 32"),
        (one("t", [1, 1, 1, 1, 1], 0), "tensor 't' has 5 dimensions"),
        (one("t", [8], 0, num_dims=2**32 - 1), "tensor 't' has 4294967295 dimensions"),
        (one("t", [48, 2], 2), "tensor 't' has rows of 48 weights, not a multiple of the 32 in a block of Q4_0"),
        (one("t", [], 8), "rows of 1 weights, not a multiple of the 32 in a block of Q8_0"),
        (one("t", [32], 99), "tensor 't' has ggml type 99, which is not known.*Q4_K_M"),
        (one("t", [32], 4), r"ggml type 4 \(Q4_2\), which was removed"),
        (one("t", [32], 31), r"ggml type 31 \(Q4_0_4_4\), which was removed"),
        (one("t", [32], 38), r"ggml type 38 \(IQ4_NL_8_8\), which was removed"),
        (one(b"t\xff", [32], 0), "the name of tensor 0 is not UTF-8"),
        (with_data(header([], [tensor("t", [8], 0), tensor("t", [8], 0, 32)]), bytes(64)), "tensor 't' occurs twice"),
        (with_data(header([], [tensor("s", [16], 0, 32), tensor("t", [16], 0)]), bytes(96)), "'t' and 's' overlap"),
    ],
)
def test_broken_file(save: Any, content: bytes, problem: str) -> None:
    """Each is a typed error that names the file and the thing, found without a large allocation."""
    path = save(content)
    tracemalloc.start()
    try:
        with pytest.raises(LoadError, match=problem) as caught:
            open_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.file == str(path) and caught.value.remedy


def test_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="this is not there"):
        open_gguf(tmp_path / "none.gguf")
    with pytest.raises(LoadError, match="this is a directory"):
        open_gguf(tmp_path)
    with pytest.raises(LoadError, match="not a regular file"):
        open_gguf("/dev/null")


def test_big_endian_file_of_the_gguf_package(tmp_path: Path) -> None:
    w = GGUFWriter(tmp_path / "big.gguf", "llama", endianess=GGUFEndian.BIG)
    w.add_tensor("t", np.ones((2, 2), np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    with pytest.raises(LoadError, match="big-endian"):
        open_gguf(tmp_path / "big.gguf")


def small() -> bytes:
    """Every construct of the format in under a kilobyte."""
    entries = [
        entry("general.architecture", STRING, text("llama")),
        entry("general.alignment", GGUFValueType.UINT32, struct.pack("<I", 8)),
        entry("split.count", GGUFValueType.UINT16, struct.pack("<H", 1)),
        array(STRING, 3, text("a") + text("Ġñ") + text("")),
        entry("n", ARRAY, struct.pack("<IQ3f", GGUFValueType.FLOAT32, 3, 1, 2, 3)),
        entry("b", GGUFValueType.BOOL, b"\1"),
        entry("f", GGUFValueType.FLOAT64, struct.pack("<d", 0.5)),
    ]
    tensors = [tensor("w", [32, 2], 2), tensor("n", [5], 0, 40), tensor("e", [3, 2, 2], 30, 64)]
    return with_data(header(entries, tensors), bytes(range(88)), 8)


def open_or_refuse(path: Path, content: bytes) -> GGUFFile | None:
    """Nothing but LoadError may come out, and what opens must be whole."""
    path.write_bytes(content)
    try:
        file = open_gguf(path)
    except LoadError:
        return None
    for name, info in file.tensors.items():
        assert file.read(name).nbytes == info.nbytes
        file.read(name).tobytes()
    return file


def test_cut_off_at_every_byte(tmp_path: Path) -> None:
    content = small()
    whole = open_or_refuse(tmp_path / "m.gguf", content)
    assert whole is not None and len(whole.tensors) == 3
    for size in range(len(content)):
        assert open_or_refuse(tmp_path / "m.gguf", content[:size]) is None, size


@settings(max_examples=400, deadline=None, database=None, derandomize=True)
@given(
    changes=st.lists(st.tuples(st.integers(0, len(small()) - 1), st.integers(0, 255)), max_size=4),
    cut=st.one_of(st.just(0), st.integers(0, len(small()) // 2)),
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
    open_or_refuse(tmp_path_factory.getbasetemp() / "damaged.gguf", bytes(content))


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(st.sampled_from([i for i in range(4, len(small()) - 88)]), st.sampled_from([4, 8]), st.integers(0, 2**64 - 1))
def test_wild_counts_lengths_and_offsets(
    tmp_path_factory: pytest.TempPathFactory, at: int, width: int, value: int
) -> None:
    content = bytearray(small())
    content[at : at + width] = value.to_bytes(8, "little")[:width]
    open_or_refuse(tmp_path_factory.getbasetemp() / "wild.gguf", bytes(content))
