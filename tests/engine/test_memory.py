"""The memory plan: it holds what it says, its advice works, limits are read where systems keep them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferax.engine.backend import XlaBackend, avals
from inferax.engine.memory import (
    KV_DTYPES,
    PAGE_SIZE,
    Demand,
    Limit,
    MemoryPlan,
    host_limits,
    kv_dtype,
    memory_limit,
    pages_per_group,
    plan_memory,
)
from inferax.engine.runner import Runner
from inferax.errors import RequestError
from inferax.loaders.model import load, read_headers
from inferax.models.config import LayerSpec
from tests.engine import test_scheduler
from tests.engine.tiny import CONFIG, random_params

MB = 1 << 20
# Four layers in full and twelve in a window, as large as a small real model.
MODEL = replace(
    CONFIG,
    context_length=8192,
    layers=(LayerSpec(None),) * 4 + (LayerSpec(512),) * 12,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=32_000,
)
ROOMY = Demand(MODEL, 100 * MB, Limit(8192 * MB, "the test"))


def kv(plan: MemoryPlan) -> int:
    return sum(row.bytes for row in plan.rows if row.name.startswith("KV cache"))


def test_rows_are_what_the_engine_allocates() -> None:
    for name in KV_DTYPES:
        demand = Demand(CONFIG, 0, Limit(1024 * MB, "the test"), max_num_seqs=3, kv_cache_dtype=name)
        plan = plan_memory(demand)
        runner = Runner(CONFIG, plan.shape, XlaBackend(), random_params(CONFIG), kv_dtype(name, "exact")[1])
        sizes = {row.name: row.bytes for row in plan.rows}
        assert kv(plan) == sum(leaf.nbytes for leaf in runner._cache)
        assert sizes["sampler state"] == sum(leaf.nbytes for leaf in jax.tree.leaves(runner._state))
        assert plan.total == sum(sizes.values()) <= demand.limit.bytes


def test_an_automatic_cache_is_planned_not_grabbed() -> None:
    plan = plan_memory(ROOMY)
    assert plan.max_model_len == 8192 and plan.kv_tokens == 16 * 4096 and plan.full_sequences == 8
    one = plan_memory(replace(ROOMY, max_num_seqs=1))
    assert (one.max_model_len, one.kv_tokens, one.full_sequences) == (8192, 8192, 1)
    tight = plan_memory(replace(ROOMY, limit=Limit(512 * MB, "the test")))
    rest = tight.total - kv(tight)
    assert kv(tight) <= (512 * MB - rest) // 2
    tightest = plan_memory(replace(ROOMY, limit=Limit(190 * MB, "the test")))
    assert 256 <= tightest.max_model_len < 8192, "the context shrinks to what fits"


def test_an_explicit_length_may_take_all_that_is_free() -> None:
    limit = next(
        Limit(size * MB, "the test")
        for size in range(150, 600, 5)
        if plan_memory(replace(ROOMY, limit=Limit(size * MB, "the test"))).max_model_len == 8192
    )
    less = replace(ROOMY, limit=replace(limit, bytes=limit.bytes - 30 * MB))
    assert plan_memory(less).max_model_len < 8192
    asked = plan_memory(replace(less, max_model_len=8192))
    assert asked.max_model_len == 8192 and asked.full_sequences == 1
    assert asked.total <= less.limit.bytes


def test_an_explicit_size_is_filled_and_not_exceeded() -> None:
    for size in (20 * MB, 100 * MB, 500 * MB):
        plan = plan_memory(replace(ROOMY, kv_bytes=size))
        assert kv(plan) <= size < kv(plan) + 16 * 2 * 4 * 64 * 2 * PAGE_SIZE
    every = plan_memory(replace(ROOMY, kv_bytes=6000 * MB, limit=Limit(32768 * MB, "the test")))
    assert every.kv_tokens == 16 * 8192, "more than the sequences can fill is not taken"


def test_windows_have_pages_for_what_they_hold() -> None:
    full, window = plan_memory(ROOMY).shape.num_pages
    assert window < full // 3
    same_for_all = 16 * full
    assert 4 * full + 12 * window < 0.5 * same_for_all


@pytest.mark.parametrize(
    "change",
    [
        {"limit": Limit(190 * MB, "the test"), "max_model_len": 8192},
        {"limit": Limit(400 * MB, "the test"), "max_model_len": 8192, "max_num_seqs": 256},
        {"kv_bytes": 1 * MB, "max_model_len": 4096},
        {"kv_bytes": 30 * MB, "max_model_len": 8192, "kv_cache_dtype": "f32"},
        {"kv_bytes": 4000 * MB, "limit": Limit(500 * MB, "the test")},
        {"limit": Limit(160 * MB, "the test"), "max_num_seqs": 64},
    ],
)
def test_advice_works(change: dict[str, Any]) -> None:
    demand = replace(ROOMY, **change)
    with pytest.raises(RequestError) as error:
        plan_memory(demand)
    text = str(error.value)
    ways = re.findall(
        r"(max_model_len|max_num_seqs|kv_cache_dtype|kv_cache_memory_bytes) (\w+)", text.split("fits: ")[1]
    )
    assert ways, text
    for name, value in ways:
        field = {"kv_cache_memory_bytes": "kv_bytes"}.get(name, name)
        given = value if name == "kv_cache_dtype" else int(value)
        plan = plan_memory(replace(demand, **{field: given}))
        assert plan.total <= demand.limit.bytes
        if field in ("max_model_len", "max_num_seqs"):
            more = given + (PAGE_SIZE if field == "max_model_len" else 1)
            with pytest.raises(RequestError):
                plan_memory(replace(demand, **{field: more}))


def test_what_can_not_fit_at_all_says_so() -> None:
    with pytest.raises(RequestError, match=r"memory: .*1048576 of the test; even one sequence of 16 tokens needs \d+"):
        plan_memory(replace(ROOMY, limit=Limit(MB, "the test")))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(RequestError, match=r"max_model_len: 9000 is not in \[2, 8192\]"):
        plan_memory(replace(ROOMY, max_model_len=9000))
    with pytest.raises(RequestError, match=r"kv_cache_dtype: 'f8' is none of auto, f32, bf16, int8, fp8"):
        kv_dtype("f8", "fast")
    assert [kv_dtype("auto", compute)[1] for compute in ("fast", "exact")] == [jnp.bfloat16, jnp.float32]


@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(test_scheduler.scenarios(), st.integers(1, 2))
def test_the_scheduler_never_sticks_on_planned_pages(scenario: dict[str, Any], spare: int) -> None:
    groups = scenario["groups"]
    layers = tuple(LayerSpec(w if w is None else 4 * w) for w in groups)
    demand = Demand(
        replace(CONFIG, layers=layers),
        0,
        Limit(0, ""),
        max_num_seqs=scenario["seqs"],
        # The scenarios' pages are a quarter of the engine's.
        max_num_batched_tokens=4 * scenario["budget"],
        spare_windows=spare,
    )
    pages = list(pages_per_group(demand, scenario["pages"][0]))
    device, seqs = test_scheduler.play(scenario | {"pages": pages, "faults": {}})
    for seq in seqs:
        if seq.output.finish_reason != "abort":
            assert seq.output.token_ids == test_scheduler.expected(list(seq.prompt), seq.max_tokens)
    assert all(pool.num_free == pool.num_pages for pool in device.scheduler.pages.pools)


def test_headers_tell_the_shapes_of_what_is_loaded(smollm2_path: Path, gemma3_path: Path) -> None:
    for path, pack_for in ((smollm2_path, None), (smollm2_path, "cpu"), (gemma3_path, "cpu")):
        seen: list[Any] = []
        model = load(path, pack_for=pack_for, on_headers=lambda *given, seen=seen: seen.append(given))
        config, params = read_headers(path, pack_for=pack_for)
        assert config == model.config
        assert jax.tree.structure(params) == jax.tree.structure(model.params)
        assert jax.tree.leaves(params) == jax.tree.leaves(avals(model.params))
        assert jax.tree.leaves(seen[0][1]) == jax.tree.leaves(params) and seen[0][0] == config


# -- limits


def system(root: Path, mounts: str, groups: str, files: dict[str, object], free: int = 1000) -> list[Limit]:
    contents = {"proc/self/mountinfo": mounts, "proc/self/cgroup": groups, "proc/meminfo": f"MemAvailable: {free} kB\n"}
    for name, text in (contents | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return host_limits(root)


V2 = "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"


def test_nested_groups_of_version_2(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/a/memory.max": 700_000,
        "sys/fs/cgroup/a/memory.current": 300_000,
        "sys/fs/cgroup/a/memory.stat": "anon 5\ninactive_file 50000",
        "sys/fs/cgroup/a/b/memory.max": "max",
        "sys/fs/cgroup/a/b/memory.current": 100,
    }
    limits = system(tmp_path, V2, "0::/a/b", files)
    assert [limit.bytes for limit in limits] == [1000 * 1024, 700_000 - 250_000]
    assert "control group" in limits[1].source and "700000" in limits[1].source


def test_a_container_sees_its_own_group_at_the_root(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": 5000, "sys/fs/cgroup/memory.current": 1000}
    for groups in ("0::/", "0::/../pod"):
        assert min(x.bytes for x in system(tmp_path, V2, groups, files)) == 4000


def test_version_1(tmp_path: Path) -> None:
    mounts = (
        "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup c rw,cpu\n"
        "35 31 0:32 /docker/x /sys/fs/cgroup/memory rw - cgroup c rw,memory"
    )
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
        "sys/fs/cgroup/memory/in/memory.limit_in_bytes": 90_000,
        "sys/fs/cgroup/memory/in/memory.usage_in_bytes": 20_000,
    }
    limits = system(tmp_path, mounts, "4:memory:/docker/x/in\n0::/", files)
    assert [limit.bytes for limit in limits] == [1000 * 1024, 70_000]


def test_without_any_of_these_files(tmp_path: Path) -> None:
    (limit,) = host_limits(tmp_path)
    assert limit.bytes > 0


def test_a_device_with_memory_of_its_own() -> None:
    class Device:
        device_kind = "the device"

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 1000, "bytes_in_use": 400}

    assert memory_limit(Device(), in_use=100) == Limit(700, "the free memory of the device")
    assert memory_limit(jax.devices("cpu")[0]).bytes > 0
