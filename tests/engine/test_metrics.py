"""Metrics: vLLM's names, and numbers that agree with what happened."""

from __future__ import annotations

import pytest

from inferax.engine.metrics import SECONDS, Histogram, snapshot
from tests.engine.harness import core, drain, make, samples

VLLM = (
    "num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries prefix_cache_hits "
    "num_preemptions prompt_tokens generation_tokens time_to_first_token_seconds inter_token_latency_seconds "
    "request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds "
    "request_prefill_time_seconds request_decode_time_seconds request_prompt_tokens request_generation_tokens "
    "request_success iteration_tokens_total"
).split()
OURS = "compile_count compile_seconds step_time_seconds step_failures stuck_steps".split()


def test_a_histogram_counts_into_its_buckets() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.5, 1.0, 1.1, 5.0, 7.0):
        histogram.observe(value)
    histogram.observe(2.0, times=3)
    assert histogram.counts == [2, 4, 1, 1] and histogram.total == pytest.approx(20.6)
    assert list(SECONDS) == sorted(set(SECONDS))


def test_numbers_agree_with_what_happened() -> None:
    engine = core()
    seqs = [make(i) for i in range(5)] + samples(6, 2)
    for seq in seqs:
        engine.add([seq])
    for _ in range(4):
        engine.step()
    now = {m.name: m.value for m in snapshot(engine)}
    assert now["num_requests_running"] >= 2 and now["num_requests_running"] + now["num_requests_waiting"] == 7
    assert 0 < now["kv_cache_usage_perc"] < 1
    engine.abort("4")
    drain(engine)
    taken = [seq for seq in seqs if seq.output.token_ids]
    tokens = sum(len(seq.output.token_ids) for seq in seqs)
    found = snapshot(engine)
    assert {m.name for m in found} == {*VLLM, *OURS}
    by_name = {m.name: m for m in found}
    assert by_name["generation_tokens"].value == tokens
    assert by_name["prompt_tokens"].value == sum(seq.prompt_len for seq in taken)
    assert by_name["prefix_cache_hits"].value == sum(seq.cached for seq in seqs)
    reasons = {m.labels[0][1]: m.value for m in found if m.name == "request_success"}
    assert reasons == {"stop": 0, "length": 6, "abort": 1, "error": 0}
    assert by_name["kv_cache_usage_perc"].value == by_name["num_requests_running"].value == 0
    for name, count in {
        "time_to_first_token_seconds": len(taken),
        "inter_token_latency_seconds": tokens - len(taken),
        "e2e_request_latency_seconds": 7,
        "request_generation_tokens": 7,
        "request_decode_time_seconds": len(taken),
    }.items():
        metric = by_name[name]
        assert sum(metric.counts) == count and len(metric.counts) == len(metric.bounds) + 1, name
    assert by_name["request_generation_tokens"].value == tokens
    for name in ("time_to_first_token_seconds", "step_time_seconds", "compile_seconds"):
        assert by_name[name].value > 0
    # The parts of a request's time add up to the whole, to what lies between its last token and its end.
    parts = sum(by_name[f"request_{part}_time_seconds"].value for part in ("queue", "prefill", "decode"))
    assert parts <= by_name["e2e_request_latency_seconds"].value


def test_failures_are_counted() -> None:
    engine = core()
    engine.add([make(1)])
    engine.runner.forward = None  # type: ignore[method-assign,assignment]
    try:
        engine.step()
    finally:
        del engine.runner.forward
    assert engine.metrics.step_failures == 1 and engine.metrics.finished["error"] == 1
