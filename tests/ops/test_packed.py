"""`PackedWeight`: one uint8 leaf with a static layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferax.errors import UnsupportedError
from inferax.ops.packed import X16, Layout, PackedWeight, canonical, dequantize, pack
from tests.ops.weights import PACKED_TYPES, packed_weight, values_of


# Protects: the leaf's own arithmetic: shapes, bytes, and one leaf in a pytree.
@pytest.mark.parametrize("name", PACKED_TYPES)
def test_shape_and_bytes(name: str) -> None:
    w = packed_weight(name, 6, 512)
    assert w.shape == (6, 512) and w.ndim == 2
    assert w.nbytes == w.data.size == 6 * 512 // w.layout.block * w.layout.block_bytes
    (leaf,) = jax.tree.leaves(w)
    assert leaf is w.data


def test_layout_is_static() -> None:
    q8, q4 = packed_weight("Q8_0", 4, 64), packed_weight("Q4_0", 4, 64)
    assert jax.tree.structure(q8) != jax.tree.structure(q4)
    assert jax.tree.structure(q8) == jax.tree.structure(packed_weight("Q8_0", 8, 32))
    mapped = jax.tree.map(lambda x: x + 0, q8)
    assert isinstance(mapped, PackedWeight) and mapped.layout == q8.layout


def test_dequantize_keeps_leading_axes_and_rows() -> None:
    w = packed_weight("Q4_K", 12, 512)
    want = values_of(w)
    np.testing.assert_array_equal(dequantize(w), want)
    np.testing.assert_array_equal(dequantize(w.rows(3, 7)), want[3:7])
    stacked = PackedWeight(w.data.reshape(3, 4, *w.data.shape[1:]), w.layout)
    assert stacked.shape == (3, 4, 512)
    np.testing.assert_array_equal(dequantize(stacked), want.reshape(3, 4, 512))


@pytest.mark.parametrize("name", sorted(X16))
def test_packing_for_the_cpu_keeps_every_byte_in_another_place(name: str) -> None:
    w = packed_weight(name, 48, 512)
    tiled = pack(w, "cpu")
    assert tiled.layout.form == "x16" and (tiled.shape, tiled.nbytes) == (w.shape, w.nbytes)
    back = canonical(jax.tree.map(jnp.asarray, tiled))
    assert back.layout == w.layout
    np.testing.assert_array_equal(back.data, w.data)
    np.testing.assert_array_equal(dequantize(jax.tree.map(jnp.asarray, tiled)), dequantize(w))
    np.testing.assert_array_equal(dequantize(tiled.rows(16, 32)), values_of(w)[16:32])
    with pytest.raises(ValueError, match="cut a tile of 16 rows"):
        tiled.rows(8, 24)


def test_what_no_kernel_reads_tiled_stays_canonical() -> None:
    for w, platform in (
        (packed_weight("IQ2_XS", 16, 512), "cpu"),
        (packed_weight("Q4_K", 24, 512), "cpu"),
        (packed_weight("Q4_K", 32, 512), "cuda"),
    ):
        assert pack(w, platform) is w


def test_unknown_form_is_refused() -> None:
    w = PackedWeight(jnp.zeros((2, 1, 18), jnp.uint8), Layout("Q4_0", "of-the-future"))
    with pytest.raises(UnsupportedError, match="of-the-future"):
        dequantize(w)
