"""Loading params: one error for all bad tensors, packed types side by side, and nothing read twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from inferax.errors import LoadError
from inferax.loaders.params import load_params
from inferax.loaders.tensors import TensorInfo
from inferax.models.config import LayerSpec, ModelConfig
from inferax.models.readings import gguf_names
from inferax.models.weights import parameter_count, weight_entries
from inferax.ops.packed import PackedWeight
from inferax.ops.rotary import RotarySpec

CONFIG = ModelConfig(
    family="llama", vocab_size=96, width=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_width=128,
    context_length=128, layers=(LayerSpec(),) * 2, rotaries=(RotarySpec(16),), norm_eps=1e-5,
)  # fmt: skip
TABLE = gguf_names()
FILE = Path("tiny.gguf")


class Tensors:
    """Tensors in memory, in the place of a file."""

    def __init__(self, arrays: Mapping[str, np.ndarray], packed: Mapping[str, str]) -> None:
        self._arrays = dict(arrays)
        self.tensors = {}
        for name, array in arrays.items():
            kind = packed.get(name)
            shape = array.shape if kind is None else (array.shape[0], array.shape[1] * 32)
            self.tensors[name] = TensorInfo(name, shape, kind or "F32", array.nbytes)
        self.files = (FILE,)

    def file_of(self, name: str) -> Path:
        del name
        return FILE

    def read(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def close(self) -> None: ...


def arrays(config: ModelConfig = CONFIG) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {}
    for entry in weight_entries(config):
        for part in entry.parts:
            found[TABLE[part.name].name.format(i=part.layer)] = rng.standard_normal(part.shape).astype(np.float32)
    return found


def test_places_every_part() -> None:
    given = arrays()
    params = load_params(CONFIG, TABLE, Tensors(given, {}), FILE)
    qkv = np.concatenate([given[f"blk.1.attn_{p}.weight"] for p in "qkv"])
    np.testing.assert_array_equal(params["layers"][1]["qkv"], qkv)
    np.testing.assert_array_equal(params["norms"][3], given["blk.1.ffn_norm.weight"])
    np.testing.assert_array_equal(params["norms"][4], given["output_norm.weight"])
    assert sum(a.size for a in given.values()) == parameter_count(CONFIG)


def test_parts_of_different_types_stay_side_by_side() -> None:
    given = arrays()
    packed = {}
    for part, kind, size in (("q", "Q4_0", 18), ("k", "Q4_0", 18), ("v", "Q8_0", 34)):
        name = f"blk.0.attn_{part}.weight"
        given[name] = np.full((given[name].shape[0], 2, size), ord(part), np.uint8)
        packed[name] = kind
    params = load_params(CONFIG, TABLE, Tensors(given, packed), FILE)
    qk, v = params["layers"][0]["qkv"]
    assert isinstance(qk, PackedWeight) and isinstance(v, PackedWeight)
    assert (qk.layout.type, qk.shape, v.layout.type, v.shape) == ("Q4_0", (96, 64), "Q8_0", (32, 64))
    assert qk.nbytes + v.nbytes == sum(given[name].nbytes for name in packed)


def test_one_error_names_every_bad_tensor() -> None:
    given = arrays()
    del given["blk.0.attn_k.weight"], given["output_norm.weight"]
    given["blk.1.ffn_down.weight"] = np.zeros((128, 64), np.float32)  # transposed
    given["blk.1.attn_norm.weight"] = np.zeros((32,), np.float32)
    given["blk.7.attn_q.weight"] = np.zeros((64, 64), np.float32)
    with pytest.raises(LoadError) as caught:
        load_params(CONFIG, TABLE, Tensors(given, {}), FILE)
    text = str(caught.value)
    for expected in (
        "tiny.gguf",
        "2 missing: ",
        "blk.0.attn_k.weight",
        "output_norm.weight",
        "2 misshapen",
        "blk.1.ffn_down.weight is [128, 64], expected [64, 128]",
        "blk.1.attn_norm.weight is [32], expected [64]",
        "1 unexpected: blk.7.attn_q.weight",
    ):
        assert expected in text, text


def test_a_tied_head_may_stand_in_the_file_too() -> None:
    tied = replace(CONFIG, tied_head=True)
    params = load_params(tied, TABLE, Tensors(arrays(), {}), FILE)
    assert "head" not in params


def test_dtype_converts_matrices_only() -> None:
    params = load_params(CONFIG, TABLE, Tensors(arrays(), {}), FILE, dtype="bfloat16")
    assert params["layers"][0]["o"].dtype == "bfloat16"
    assert params["norms"].dtype == "float32"


def test_buffers_that_the_config_tells_are_no_error() -> None:
    given = arrays() | {"rope_freqs.weight": np.ones(8, np.float32)}
    load_params(CONFIG, TABLE, Tensors(given, {}), FILE)


def test_leaves_do_not_share_memory_with_the_file() -> None:
    given = arrays()
    params = load_params(CONFIG, TABLE, Tensors(given, {}), FILE)
    before = np.array(params["embed"])
    given["token_embd.weight"][:] = 0
    np.testing.assert_array_equal(params["embed"], before)


def test_loading_compiles_nothing() -> None:
    events: list[str] = []

    def listen(event: str, seconds: float, **_: object) -> None:
        del seconds
        events.append(event)

    given = Tensors(arrays(), {})
    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        load_params(CONFIG, TABLE, given, FILE)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not [event for event in events if "compile" in event]
