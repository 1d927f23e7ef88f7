"""Reference dequantization: every ggml type, bitwise equal to the gguf package's and to ggml's own."""

from __future__ import annotations

import base64
import ctypes
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from jax.extend.core import jaxprs_in_params

from inferax.errors import UnsupportedError
from inferax.ops.ggml import TYPES, dequantize_blocks

GOLDEN = Path(__file__).parent.parent / "golden" / "ggml.json"
# The gguf package has no dequantization of these; goldens made by ggml stand in.
NOT_IN_GGUF = {"Q8_1", "Q8_K", "Q1_0", "Q2_0"}
IN_GGUF = sorted(set(TYPES) - NOT_IN_GGUF)

# Byte offsets of the float16 numbers in a block; IQ1_M spreads its one over four nibbles.
HALVES = {
    **dict.fromkeys(["Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S"], (0,)),
    **dict.fromkeys(["IQ3_XXS", "IQ3_S", "IQ1_S", "Q1_0", "Q2_0"], (0,)),
    **dict.fromkeys(["Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q8_1"], (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)},
}
# Zeros, smallest and largest subnormal, smallest normal, largest, and one; of both signs.
EDGES = np.array([0, 1, 0x3FF, 0x400, 0x7BFF, 0x3C00], np.uint16)
EDGES = np.concatenate([EDGES, EDGES | 0x8000])


def random_blocks(name: str, num: int = 2048) -> np.ndarray:
    """Blocks in which every byte takes every value equally often, with finite scales that visit all edges."""
    rng = np.random.default_rng(TYPES[name].id)
    every_value = np.tile(np.arange(256, dtype=np.uint8), (TYPES[name].block_bytes, num // 256))
    blocks = np.ascontiguousarray(rng.permuted(every_value, axis=1).T)
    halves = rng.integers(0, 1 << 16, (2, num), dtype=np.uint16)
    halves[:, : len(EDGES) ** 2] = np.stack(np.meshgrid(EDGES, EDGES)).reshape(2, -1)
    halves[(halves & 0x7C00) == 0x7C00] &= 0xBFFF
    for at, half in zip(HALVES.get(name, ()), halves, strict=False):
        blocks[:, at : at + 2] = half.view(np.uint8).reshape(num, 2)
    if name == "IQ1_M":
        for i in range(4):
            nibble = ((halves[0] >> (4 * i)) & 15).astype(np.uint8)
            blocks[:, 49 + 2 * i] = (blocks[:, 49 + 2 * i] & 15) | (nibble << 4)
    return blocks


def by_gguf(name: str, blocks: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return quants.dequantize(blocks, GGMLQuantizationType[name])


def assert_same_bits(actual: Any, expected: np.ndarray) -> None:
    actual = np.asarray(actual)
    assert actual.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


def test_types_are_those_of_the_gguf_package() -> None:
    known = {t.name: (int(t), *gguf.GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType}
    plain = {"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"}
    ours = {i.name: (i.id, i.block, i.block_bytes) for i in TYPES.values()}
    # Q2_0 is newer than the package, and its size of Q8_1 is that of an older layout with two float32.
    assert ours.pop("Q2_0") == (42, 64, 18)
    assert ours.pop("Q8_1") == (9, 32, 36)
    del known["Q8_1"]
    assert ours == {name: value for name, value in known.items() if name not in plain}


@pytest.mark.parametrize("name", IN_GGUF)
def test_bitwise_equal_to_gguf_package(name: str) -> None:
    blocks = random_blocks(name)
    assert_same_bits(dequantize_blocks(name, jnp.asarray(blocks)), by_gguf(name, blocks))


@pytest.mark.parametrize("name", ["Q4_1", "Q2_K", "Q4_K", "IQ1_S", "MXFP4"])
def test_same_bits_op_by_op_in_a_fusion_and_vmapped(name: str) -> None:
    """The types that add or subtract, and some others: no contraction (a * b + c in one rounding) shows."""
    blocks = random_blocks(name)[:144].reshape(3, 2, 24, -1)
    expected = by_gguf(name, blocks).reshape(3, 2, 24, -1)
    with jax.disable_jit():
        assert_same_bits(dequantize_blocks(name, jnp.asarray(blocks)), expected)
    fused = jax.jit(lambda b: (dequantize_blocks(name, b), jnp.sum(dequantize_blocks(name, b) * 3 + 1)))
    assert_same_bits(fused(jnp.asarray(blocks))[0], expected)
    mapped = jax.vmap(lambda b: dequantize_blocks(name, b), in_axes=1, out_axes=1)
    assert_same_bits(mapped(jnp.asarray(blocks)), expected)


@pytest.mark.parametrize("name", sorted(TYPES))
def test_works_under_strict_promotion_without_large_gathers(name: str) -> None:
    """A decoder looks up nothing but its code book, and never leans on implicit promotion."""
    info = TYPES[name]
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        aval = jax.ShapeDtypeStruct((2, 5, info.block_bytes), jnp.uint8)
        jaxpr = jax.make_jaxpr(lambda b: dequantize_blocks(name, b))(aval)
    assert [a.shape for a in jaxpr.out_avals] == [(2, 5, info.block)]
    tables = [e.invars[0].aval.shape for e in equations(jaxpr.jaxpr) if e.primitive.name == "gather"]
    assert tables == {
        **dict.fromkeys(["IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"], [(16,)]),
        **{"IQ2_XXS": [(256, 8)], "IQ2_XS": [(512, 8)], "IQ2_S": [(1024, 8)], "IQ3_XXS": [(256, 4)]},
        **{"IQ3_S": [(512, 4)], "IQ1_S": [(2048, 8)], "IQ1_M": [(2048, 8)]},
    }.get(name, [])


def equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("name", [n for n in IN_GGUF if n in HALVES])
def test_infinite_and_nan_scales_follow_ieee(name: str) -> None:
    blocks = random_blocks(name)
    for i, half in enumerate((0x7C00, 0xFC00, 0x7E00)):
        at = HALVES[name][0]
        blocks[i::3, at : at + 2] = np.frombuffer(np.uint16(half).tobytes(), np.uint8)
    np.testing.assert_array_equal(np.asarray(dequantize_blocks(name, jnp.asarray(blocks))), by_gguf(name, blocks))


def golden(name: str, field: str) -> np.ndarray:
    stored = base64.b64decode(json.loads(GOLDEN.read_text())["types"][name][field])
    if field == "blocks":
        return np.frombuffer(stored, np.uint8).reshape(-1, TYPES[name].block_bytes)
    return np.frombuffer(stored, np.float32).reshape(-1, TYPES[name].block)


@pytest.mark.parametrize("name", ["Q1_0", "Q2_0", "Q8_K"])
def test_bitwise_equal_to_golden_of_ggml(name: str) -> None:
    blocks, expected = jnp.asarray(golden(name, "blocks")), golden(name, "values")
    assert_same_bits(dequantize_blocks(name, blocks), expected)


def test_q8_1_gives_back_what_ggml_quantized() -> None:
    blocks, original = golden("Q8_1", "blocks"), golden("Q8_1", "quantized_from")
    scale, total = blocks[:, :4].copy().view(np.float16).astype(np.float32).T
    values = np.asarray(dequantize_blocks("Q8_1", jnp.asarray(blocks)))
    assert np.all(np.abs(values - original) <= scale[:, None] * 0.57)  # half a step, and a float16 scale times 127
    np.testing.assert_allclose(values.sum(axis=1), total, rtol=2e-3)


def test_every_type_equals_ggml_itself() -> None:
    """Against the library, where llama-cpp-python is installed."""
    found = find_spec("llama_cpp")
    if found is None or found.origin is None:
        pytest.skip("llama-cpp-python is not installed")
    ggml = ctypes.CDLL(str(next((Path(found.origin).parent / "lib").glob("libggml-base.*"))))
    for name in TYPES:
        function = getattr(ggml, f"dequantize_row_{name.lower().replace('_k', '_K')}", None)
        assert function or name == "Q8_1"
        if function:
            blocks = random_blocks(name)
            if name == "Q8_K":
                blocks[:, 3] &= 0xBF  # no NaN
            expected = np.empty((len(blocks), TYPES[name].block), np.float32)
            function(*(ctypes.c_void_p(a.ctypes.data) for a in (blocks, expected)), ctypes.c_int64(expected.size))
            assert_same_bits(dequantize_blocks(name, jnp.asarray(blocks)), expected)


def test_refuses_unknown_types_and_wrong_shapes() -> None:
    with pytest.raises(UnsupportedError, match="'Q4_2'.*Q4_K"):
        dequantize_blocks("Q4_2", jnp.zeros((1, 18), jnp.uint8))
    with pytest.raises(ValueError, match=r"Q4_0 blocks are uint8\[..., 18\], got uint8\[2, 17\]"):
        dequantize_blocks("Q4_0", jnp.zeros((2, 17), jnp.uint8))
    with pytest.raises(ValueError, match="got int8"):
        dequantize_blocks("Q4_0", jnp.zeros((2, 18), jnp.int8))
