"""The cases of every op, from the shapes of real models down to one row and to no valid row at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.shapes import (
    DECODE,
    EMPTY,
    GEMMA3_270M,
    LLAMA3_8B,
    MIXED,
    ONE_LATE_ROW,
    ONE_ROW,
    PREFILL,
    QWEN3_0_6B,
    SMOLLM2_135M,
    ModelShape,
    RaggedShape,
)
from inferax.models.readings import HFConfig
from inferax.ops import attention, linear, logprobs, norm, rotary, sample
from inferax.ops.attention import AttentionSpec
from inferax.ops.norm import Norm
from inferax.ops.rotary import RotarySpec
from inferax.ops.sampler_rows import SamplerRows
from inferax.ops.sampler_rows import sampler_rows as make_rows
from tests.ops import oracles
from tests.ops.batches import paged
from tests.ops.suite import Case, collect
from tests.ops.weights import PACKED_TYPES, packed_weight

SMOL = SMOLLM2_135M.scaled(3)  # 192 wide
GEMMA = GEMMA3_270M.scaled(5)  # 128 wide
LLAMA = LLAMA3_8B.scaled(16, kv_heads=2)  # 256 wide, 8 heads
QWEN = QWEN3_0_6B.scaled(4, kv_heads=2)  # 256 wide, 4 heads


class Draw:
    """A stream of random arrays."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.asarray(self._rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(dtype)

    def weight(self, n: int, k: int, dtype: Any = jnp.float32) -> jax.Array:
        return self.normal(n, k, scale=k**-0.5, dtype=dtype)

    def ids(self, *shape: int, below: int) -> jax.Array:
        return jnp.asarray(self._rng.integers(0, below, shape, dtype=np.int32))

    def norm(self, width: int, eps: float = 1e-6, *, layer: bool = False) -> Norm:
        weight = 1 + self.normal(width, scale=0.2)
        return Norm(weight, self.normal(width, scale=0.2) if layer else None, eps=eps, kind="layer" if layer else "rms")


# norm


def norm_cases() -> Iterator[Case]:
    def case(name: str, x: jax.Array, weights: Norm, **more: Any) -> Case:
        return Case(
            norm._norm, name, (x, weights), {}, oracles.norm, norm.norm,
            tolerance=2e-6, wrt=(0, 1), vmaps=((0,), (1,)), **more,
        )  # fmt: skip

    d = Draw(0)
    for model in (SMOLLM2_135M, GEMMA3_270M, LLAMA3_8B):
        yield case(model.name, d.normal(7, model.width, scale=3), d.norm(model.width, model.norm_eps))
    yield case("rms", d.normal(5, 33), d.norm(33), transforms=True)
    yield case("layer", d.normal(5, 33) + 2, d.norm(33, layer=True), transforms=True)
    yield case("one-row", d.normal(1, 576), d.norm(576))
    yield case("one-column", d.normal(3, 1), d.norm(1))
    yield case("no-rows", d.normal(0, 64), d.norm(64))
    yield case("bfloat16", d.normal(4, 64, dtype=jnp.bfloat16), d.norm(64))
    yield case("zeros-and-tiny", jnp.zeros((3, 64)).at[1].set(1e-12).at[2].set(1e-3), d.norm(64, 1e-5))
    # The mean of squares is near float32's largest: nothing may overflow below it.
    yield case("large", d.normal(3, 64, scale=1e15), d.norm(64))


# linear


def call_linear(x, w, n, bias, residual, post_norm, **static):  # type: ignore[no-untyped-def]
    return linear.linear(x, w, norm=n, bias=bias, residual=residual, post_norm=post_norm, **static)


def linear_cases() -> Iterator[Case]:
    plain = {"activation": None, "scale": 1.0, "compute": "exact"}

    def case(name: str, *operands: Any, static: dict[str, Any] | None = None, **more: Any) -> Case:
        every = (*operands, *(None,) * (6 - len(operands)))
        vmaps = ((0,), (1,)) if every[4] is None else ((0, 4), (1,))
        return Case(
            linear._linear, name, every, plain | (static or {}), oracles.linear, call_linear,
            **{"vmaps": vmaps, "wrt": (0, 1, 2, 3, 4, 5)} | more,
        )  # fmt: skip

    d = Draw(1)
    for model, rows in ((SMOLLM2_135M, 5), (GEMMA3_270M, 1), (LLAMA, 37)):
        x = d.normal(rows, model.width)
        yield case(f"{model.name}-qkv-{rows}", x, d.weight(model.qkv_width, model.width), d.norm(model.width))
    yield case("odd-sizes", d.normal(3, 37), d.weight(29, 37))
    yield case("one-by-one", d.normal(1, 1), d.weight(1, 1))
    yield case("no-rows", d.normal(0, 64), d.weight(48, 64))
    yield case("zero-rows", jnp.zeros((4, 64)), d.weight(48, 64), d.norm(64))
    yield case("bfloat16-weight", d.normal(4, 64), d.weight(48, 64, jnp.bfloat16))
    yield case("float16-weight", d.normal(17, 64), d.weight(48, 64, jnp.float16))
    yield case("bfloat16-input", d.normal(4, 64, dtype=jnp.bfloat16), d.weight(48, 64))
    for activation in linear.ACTIVATIONS:
        yield case(activation, d.normal(5, 40), d.weight(24, 40), None, d.normal(24), static={"activation": activation})
    yield case(
        "everything", d.normal(6, 40), d.weight(24, 40), d.norm(40), d.normal(24), d.normal(6, 24), d.norm(24),
        static={"activation": "gelu_tanh", "scale": 0.7}, transforms=True,
    )  # fmt: skip
    yield case(
        "layer-norms", d.normal(6, 40), d.weight(24, 40), d.norm(40, layer=True), None, None, d.norm(24, layer=True),
    )  # fmt: skip

    exact: dict[str, Any] = {"wrt": (0,)}
    fast: dict[str, Any] = {
        "wrt": (0,), "static": {"compute": "fast"}, "bound": oracles.linear_fast_bound, "native": True,
    }  # fmt: skip
    for kind in PACKED_TYPES:
        x, w, plain_too = d.normal(3, 512), packed_weight(kind, 48, 512), kind in ("Q4_1", "Q6_K")
        yield case(kind, x, w, transforms=kind == "Q4_1", native=not plain_too, **exact)
        yield case(f"{kind}-fast", x, w, **fast)
    x, n = d.normal(37, 512), d.norm(512)
    for name, static in (("exact", exact), ("fast", fast)):
        yield case(f"{name}-many-rows", x, packed_weight("Q4_1", 80, 512), n, d.normal(80), d.normal(37, 80), **static)
        yield case(f"{name}-odd-rows", d.normal(9, 96), packed_weight("Q8_0", 7, 96), **static)
        yield case(f"{name}-one-block", d.normal(1, 32), packed_weight("Q4_0", 1, 32), **static)
        yield case(f"{name}-no-rows", d.normal(0, 32), packed_weight("Q4_0", 16, 32), **static)
        yield case(f"{name}-zero-rows", jnp.zeros((3, 32)), packed_weight("Q4_0", 16, 32), **static)
        # Q4_K_M keeps V in Q6_K: a fused weight whose parts differ.
        mixed = (packed_weight("Q4_K", 32, 512), packed_weight("Q6_K", 16, 512))
        yield case(f"{name}-two-types", d.normal(5, 512), mixed, n, transforms=name == "exact", **static)
        half = (packed_weight("Q8_0", 16, 512), d.weight(24, 512))
        yield case(f"{name}-packed-and-dense", d.normal(5, 512), half, **static)
    # One activation far above the rest of its block: the coarsest rounding that the bound allows.
    spiked = d.normal(4, 512).at[:, ::128].mul(50)
    yield case("fast-outliers", spiked, packed_weight("Q4_K", 48, 512), **fast)


# gated_mlp


def call_gated_mlp(x, gate_up, down, n, gate_up_bias, down_bias, residual, post_norm, **static):  # type: ignore[no-untyped-def]
    return linear.gated_mlp(
        x, gate_up, down,
        norm=n, gate_up_bias=gate_up_bias, down_bias=down_bias, residual=residual, post_norm=post_norm, **static,
    )  # fmt: skip


def gated_mlp_cases() -> Iterator[Case]:
    plain = {"activation": "silu", "scale": 1.0, "compute": "exact"}

    def case(name: str, *operands: Any, static: dict[str, Any] | None = None, **more: Any) -> Case:
        every = (*operands, *(None,) * (8 - len(operands)))
        vmaps = ((0,), (2,)) if every[6] is None else ((0, 6), (1,))
        return Case(
            linear._gated_mlp, name, every, plain | (static or {}), oracles.gated_mlp, call_gated_mlp,
            **{"vmaps": vmaps, "wrt": tuple(range(8))} | more,
        )  # fmt: skip

    d = Draw(2)
    for model, activation, rows in ((SMOL, "silu", 5), (GEMMA, "gelu_tanh", 1), (LLAMA, "silu", 37)):
        width, mlp = model.width, model.mlp_width
        yield case(
            f"{model.name}-{rows}", d.normal(rows, width), d.weight(2 * mlp, width), d.weight(width, mlp),
            d.norm(width), None, None, d.normal(rows, width), static={"activation": activation},
        )  # fmt: skip
    for activation in linear.ACTIVATIONS:
        yield case(activation, d.normal(5, 24), d.weight(72, 24), d.weight(24, 36), static={"activation": activation})
    yield case("odd-sizes", d.normal(3, 19), d.weight(26, 19), d.weight(19, 13))
    yield case(
        "everything", d.normal(4, 24), d.weight(72, 24), d.weight(24, 36), d.norm(24), d.normal(72), d.normal(24),
        d.normal(4, 24), d.norm(24), static={"activation": "gelu_tanh", "scale": 0.5}, transforms=True,
    )  # fmt: skip
    yield case("no-rows", d.normal(0, 24), d.weight(72, 24), d.weight(24, 36))
    yield case("zero-rows", jnp.zeros((3, 24)), d.weight(72, 24), d.weight(24, 36), d.norm(24))
    yield case("bfloat16", d.normal(4, 24), d.weight(72, 24, jnp.bfloat16), d.weight(24, 36, jnp.bfloat16))
    for compute, tolerance in (("exact", 1e-5), ("fast", 2e-2)):
        for kind, mlp in (("Q4_1", 96), ("Q8_0", 96), ("Q4_K", 256)):
            gate_up, down = packed_weight(kind, 2 * mlp, 256), packed_weight(kind, 256, mlp)
            yield case(
                f"{kind}-{compute}", d.normal(5, 256), gate_up, down, Norm(d.normal(256, scale=0.05)), None, None,
                d.normal(5, 256), static={"compute": compute}, tolerance=tolerance, wrt=(0,),
                native=compute == "fast",
            )  # fmt: skip
    mixed = (packed_weight("Q4_K", 256, 256), packed_weight("Q6_K", 256, 256, seed=1))
    yield case("two-types", d.normal(5, 256), mixed, packed_weight("Q6_K", 256, 256), d.norm(256), wrt=(0,))


# embed


def embed_cases() -> Iterator[Case]:
    def case(name: str, ids: jax.Array, w: Any, scale: float = 1.0, **more: Any) -> Case:
        # A lookup is exact; the scale rounds once.
        tolerance = 0.0 if scale == 1.0 else 1e-7
        return Case(
            linear._embed, name, (ids, w), {"scale": scale}, oracles.embed, linear.embed,
            **{"tolerance": tolerance, "wrt": (1,), "vmaps": ((0,),)} | more,
        )  # fmt: skip

    d = Draw(3)
    yield case("smollm2", d.ids(9, below=4096), d.normal(4096, SMOL.width))
    yield case("gemma3", d.ids(9, below=4096), d.normal(4096, GEMMA.width), scale=float(np.float32(GEMMA.width**0.5)))
    yield case("first-and-last", jnp.array([0, 99, 0, 99, 50], jnp.int32), d.normal(100, 7), transforms=True)
    yield case("scaled", d.ids(4, below=100), d.normal(100, 7), scale=2.5)
    yield case("no-rows", d.ids(0, below=10), d.normal(10, 8))
    yield case("bfloat16", d.ids(5, below=40), d.normal(40, 8, dtype=jnp.bfloat16))
    for kind in PACKED_TYPES:
        yield case(
            kind, jnp.array([0, 39, 7, 7], jnp.int32), packed_weight(kind, 40, 256),
            wrt=(), transforms=kind == "Q4_1", native=kind != "Q4_1",
        )  # fmt: skip


# rotary


def rotary_spec(theta: float = 10000.0, head_dim: int = 64, **scaling: Any) -> tuple[RotarySpec, Any]:
    """The spec that a config.json is read as, and transformers' config for the same."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=2048,
        rope_parameters={"rope_theta": theta, "rope_type": "default"} | scaling,
    )  # fmt: skip
    return HFConfig(config.to_dict(), "config.json").rotary(), config


def rotary_bound(positions: np.ndarray, lengths: np.ndarray, *, spec: RotarySpec, config: Any) -> Any:
    """An angle in float32 carries a few roundings of its own size; cos and sin pass them on."""
    cos, sin = oracles.rotary(positions, lengths, spec=spec, config=config)
    factor = spec.attention_factor
    allowed = factor * (4e-7 * positions[:, None] * np.ones_like(cos) + 1e-6)
    return allowed, allowed + 0 * sin


def rotary_cases() -> Iterator[Case]:
    positions = jnp.array([0, 1, 2, 511, 2047, 2048, 8191, 100], jnp.int32)
    lengths = jnp.array([1, 2, 900, 512, 2048, 2049, 8192, 8192], jnp.int32)

    def case(name: str, spec: RotarySpec, config: Any, **more: Any) -> Case:
        def call(p: jax.Array, n: jax.Array, *, spec: RotarySpec) -> Any:
            return rotary.rotary(p, n, spec)

        return Case(
            rotary._rotary, name, more.pop("operands", (positions, lengths)), {"spec": spec},
            partial(oracles.rotary, config=config), call,
            bound=partial(rotary_bound, config=config), vmaps=((0,), (0, 1)), **more,
        )  # fmt: skip

    yield case("smollm2", *rotary_spec(SMOLLM2_135M.theta))
    yield case("llama3-8b", *rotary_spec(LLAMA3_8B.theta, LLAMA3_8B.head_dim))
    yield case("gemma3", *rotary_spec(GEMMA3_270M.theta, GEMMA3_270M.head_dim))
    yield case("linear", *rotary_spec(rope_type="linear", factor=8.0))
    yield case("dynamic", *rotary_spec(rope_type="dynamic", factor=4.0), transforms=True)
    yield case(
        "llama3",
        *rotary_spec(
            5e5, 128, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=512,
        ),
    )  # fmt: skip
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    yield case("yarn", *rotary_spec(**yarn))
    yield case("yarn-beta", *rotary_spec(1e6, 128, **yarn, beta_fast=16.0, beta_slow=2.0, truncate=False))
    yield case("yarn-mscale", *rotary_spec(**yarn, mscale=0.8, mscale_all_dim=1.2))
    yield case("yarn-attention-factor", *rotary_spec(**yarn, attention_factor=1.3))
    factors = np.random.default_rng(5).uniform(1, 40, (2, 24)).astype(np.float32)
    longrope = {
        "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 512,
        "short_factor": [float(x) for x in factors[0] / 40 + 1], "long_factor": [float(x) for x in factors[1]],
    }  # fmt: skip
    yield case("longrope", *rotary_spec(head_dim=48, **longrope))
    yield case("partial", *rotary_spec(head_dim=80, rope_type="linear", factor=2.0, partial_rotary_factor=0.4))
    none = jnp.zeros(0, jnp.int32)
    yield case("no-rows", *rotary_spec(), operands=(none, none))


# attention


def call_attention(qkv, cache, batch, angles, qk_norm, sinks, *, spec):  # type: ignore[no-untyped-def]
    return attention.attention(qkv, cache, batch, spec, rotary=angles, qk_norm=qk_norm, sinks=sinks)


def attention_case(
    name: str,
    ragged: RaggedShape,
    model: ModelShape,
    *,
    rotary_dim: int | None = None,
    qk_norm: str = "",
    sinks: bool = False,
    dtype: Any = jnp.float32,
    page_size: int = 16,
    spare_rows: int = 3,
    seed: int = 0,
    transforms: bool = False,
    **spec: Any,
) -> Case:
    d = Draw(100 + seed)
    h, k, e = model.num_heads, model.num_kv_heads, model.head_dim
    layout = paged(
        ragged, num_kv_heads=k, head_dim=e, page_size=page_size, spare_rows=spare_rows, dtype=dtype, seed=seed
    )
    rows = layout.batch.positions.shape[0]
    qkv = d.normal(rows, model.qkv_width)
    if dtype == jnp.bfloat16:
        qkv = qkv.astype(dtype).astype(jnp.float32)  # so that the cache holds it exactly
    angles = None
    if rotary_dim:
        turn = layout.batch.positions[:, None] * 10000.0 ** -(jnp.arange(0, rotary_dim, 2) / rotary_dim)
        angles = (jnp.cos(turn), jnp.sin(turn))
    if not transforms:
        # Padding rows may hold anything; of gradients it is only asked that they be right for finite numbers.
        qkv = qkv.at[ragged.num_tokens :].set(jnp.nan)
    norms = None
    if qk_norm:
        widths = (e, e) if qk_norm == "head" else (h * e, k * e)
        norms = (d.norm(widths[0]), d.norm(widths[1]))
    full = {"scale": e**-0.5} | spec
    return Case(
        attention._attention,
        name,
        (qkv, layout.cache, layout.batch, angles, norms, d.normal(h) if sinks else None),
        {"spec": AttentionSpec(h, k, e, **full)},
        partial(oracles.attention, dtype=np.dtype(dtype)),
        call_attention,
        wrt=(0, 1, 3, 4, 5),
        vmaps=((0, 1), (0,)),
        transforms=transforms,
    )


def attention_cases() -> Iterator[Case]:
    case = attention_case
    tiny = ModelShape("tiny", 32, 4, 2, 16, 64, 100, 1e-6, 1e4)
    odd = ModelShape("odd", 35, 6, 2, 10, 64, 100, 1e-6, 1e4)
    for ragged in (PREFILL, MIXED, ONE_ROW, EMPTY):
        yield case(f"smollm2-{ragged.name}", ragged, SMOLLM2_135M, rotary_dim=64)
    yield case("llama3-8b-decode", DECODE, LLAMA, rotary_dim=128, seed=1)
    yield case("qwen3-mixed", MIXED, QWEN, rotary_dim=128, qk_norm="head", seed=2)
    for ragged in (DECODE, MIXED):
        yield case(
            f"gemma3-{ragged.name}-window", ragged, GEMMA3_270M, rotary_dim=256, qk_norm="head", window=12, seed=3
        )
    yield case("window-of-one", MIXED, tiny, window=1)
    yield case("window-of-a-page", MIXED, tiny, window=16)
    yield case("window-longer-than-all", MIXED, tiny, window=512)
    yield case("softcap", MIXED, tiny, softcap=5.0, scale=0.5)
    yield case("sinks", MIXED, tiny, sinks=True, window=20)
    yield case("sinks-empty", EMPTY, tiny, sinks=True)
    yield case("full-width-qk-norm", MIXED, tiny, qk_norm="full", rotary_dim=16)
    yield case("partial-rotary", MIXED, tiny, rotary_dim=6)
    yield case("interleaved-rotary", MIXED, tiny, rotary_dim=16, rotary_interleaved=True)
    yield case("odd-page-size", MIXED, odd, page_size=5, rotary_dim=10)
    yield case("page-size-one", ONE_LATE_ROW, odd, page_size=1)
    yield case("no-padding", DECODE, tiny, spare_rows=0)
    yield case("bfloat16-cache", MIXED, tiny, dtype=jnp.bfloat16)
    yield case("bfloat16-cache-gemma3", DECODE, GEMMA3_270M, dtype=jnp.bfloat16, window=12)
    for dtype in (jnp.int8, jnp.float8_e4m3fn):
        name = jnp.dtype(dtype).name
        yield case(f"{name}-cache", MIXED, tiny, dtype=dtype, sinks=True, window=20)
        yield case(f"{name}-cache-odd-width", DECODE, odd, dtype=dtype, page_size=5, softcap=5.0)
        yield case(f"{name}-cache-smollm2", MIXED, SMOLLM2_135M, dtype=dtype)
    small = RaggedShape("small", ((5, 1), (0, 3), (3, 2)))
    yield case(
        "all-at-once", small, tiny, page_size=4, rotary_dim=8, qk_norm="head", sinks=True, window=4, softcap=3.0,
        spare_rows=1, transforms=True,
    )  # fmt: skip


# sample


def sampler_rows(rows: int, *, drawn_from: int = 0, **values: Any) -> SamplerRows:
    """Rows with seeds of their own; `values` are scalars or lists of one value per row."""
    seeds = np.random.default_rng(drawn_from).integers(0, 2**63, rows)
    return make_rows(rows, **{"seed": [int(s) for s in seeds], "position": 17} | values)


def sample_cases() -> Iterator[Case]:
    def case(name: str, logits: jax.Array, rows: SamplerRows, **more: Any) -> Case:
        return Case(
            sample._sample,
            name,
            (logits, rows, None),
            {},
            oracles.sample,
            lambda x, r, _: sample._sample(x, r, None),
            vmaps=((0, 1), (0,)),
            **more,
        )

    d = Draw(6)
    filters = sampler_rows(
        8, temperature=[0, 0.7, 1, 0, 1.3, 1, 1, 1], top_k=[0, 5, 1, 3, 0, 0, 50, 0],
        top_p=[1, 1, 1, 0.5, 0.9, 1, 0.7, 0.01], min_p=[0, 0, 0, 0, 0, 0.1, 0.02, 1.0],
    )  # fmt: skip
    yield case("every-filter", d.normal(8, 777, scale=2), filters, transforms=True)
    yield case("greedy", d.normal(8, 777), sampler_rows(8, temperature=0.0))
    yield case("plain", d.normal(8, 777, scale=2), sampler_rows(8, temperature=[0.5, 1.0, 1.5, 2.0] * 2))
    masked = jnp.where(d.ids(8, 777, below=10) > 0, -jnp.inf, d.normal(8, 777))
    yield case("masked", masked, sampler_rows(8, top_p=[1, 0.9, 0.5] + [1] * 5, top_k=[0, 0, 0, 1000, 7, 0, 0, 0]))
    yield case("llama3-vocabulary", d.normal(3, LLAMA3_8B.vocab_size, scale=3), sampler_rows(3, top_p=[1, 0.9, 0.5]))
    yield case("one-token-vocabulary", d.normal(1, 1), sampler_rows(1))
    yield case("one-block", d.normal(3, 256), sampler_rows(3, top_k=300))
    yield case("one-more-than-a-block", d.normal(3, 257), sampler_rows(3, top_p=0.95))


# logprobs


def call_logprobs(x, head, n, ids, **static):  # type: ignore[no-untyped-def]
    return logprobs.logprobs(x, head, ids, norm=n, **static)


def logprobs_cases() -> Iterator[Case]:
    def case(name: str, *operands: Any, softcap: float | None = None, scale: float = 1.0, **more: Any) -> Case:
        return Case(
            logprobs._logprobs, name, operands, {"softcap": softcap, "scale": scale}, oracles.logprobs, call_logprobs,
            **{"wrt": (0, 1, 2), "vmaps": ((0, 3), (1,))} | more,
        )  # fmt: skip

    d = Draw(7)
    # Two tiles of the vocabulary and a rest, chosen ids at the seams.
    seams = jnp.tile(jnp.array([0, 4095, 4096, 8191, 8192, 8291], jnp.int32), (3, 1))
    yield case("tiles", d.normal(3, 24), d.weight(8292, 24), d.norm(24), seams)
    yield case("exact-tiles", d.normal(2, 24), d.weight(8192, 24), None, seams[:2, :4])
    yield case("small", d.normal(4, 24, scale=4), d.weight(50, 24), d.norm(24), d.ids(4, 2, below=50), transforms=True)
    yield case(
        "capped",
        d.normal(4, 24),
        d.weight(50, 24),
        None,
        d.ids(4, 3, below=50),
        softcap=2.0,
        scale=3.0,
    )
    yield case("one-row", d.normal(1, 24), d.weight(50, 24), d.norm(24), d.ids(1, 1, below=50))
    yield case("no-ids", d.normal(3, 24), d.weight(50, 24), None, d.ids(3, 0, below=50))
    # Logits in the hundreds: the sum must not overflow.
    yield case("large", d.normal(3, 24, scale=300), d.weight(50, 24), None, d.ids(3, 2, below=50))
    yield case(
        "packed", d.normal(3, 256), packed_weight("Q4_1", 300, 256), d.norm(256), d.ids(3, 2, below=300), wrt=(0,)
    )
    yield case(
        "packed-tiles", d.normal(2, 32), packed_weight("Q8_0", 4100, 32), None,
        jnp.array([[0, 4099], [4095, 4096]], jnp.int32), wrt=(0,),
    )  # fmt: skip


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "norm": norm_cases,
    "linear": linear_cases,
    "gated_mlp": gated_mlp_cases,
    "embed": embed_cases,
    "rotary": rotary_cases,
    "attention": attention_cases,
    "sample": sample_cases,
    "logprobs": logprobs_cases,
}


def all_cases() -> tuple[Case, ...]:
    return collect(case for cases in GROUPS.values() for case in cases())
