"""Metrics: plain counters, gauges and histograms, with vLLM's names where vLLM has them. A server exports them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from inferax.engine.outputs import FinishReason

if TYPE_CHECKING:
    from inferax.engine.core import EngineCore
    from inferax.engine.sequence import Sequence as Seq

# Upper bounds of the buckets: 1, 2, 5 and their tens; from a quarter of a millisecond to an hour; whole tokens.
SECONDS = (0.00025, 0.0005, *(round(m * 10.0**e, 6) for e in range(-3, 3) for m in (1, 2, 5)), 1000.0, 3600.0)
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


class Histogram:
    """Counts of observations by bucket: `counts[i]` of those in (bounds[i - 1], bounds[i]], the last beyond all."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass(frozen=True)
class Metric:
    """One metric at one moment. `value`: its number, for a histogram the sum of its observations, in the unit that
    ends its name. `counts`: for a histogram, observations by bucket up to each of `bounds`, the last beyond all."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()
    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()


_HELP = {
    "time_to_first_token_seconds": "From a request's arrival to its first token",
    "inter_token_latency_seconds": "Between one token of a sequence and the next",
    "request_time_per_output_token_seconds": "Mean time between the tokens of a finished sequence",
    "e2e_request_latency_seconds": "From arrival to end",
    "request_queue_time_seconds": "From arrival until it was first let into a step",
    "request_prefill_time_seconds": "From there to the first token",
    "request_decode_time_seconds": "From the first token to the last",
    "request_prompt_tokens": "Prompt tokens of finished sequences",
    "request_generation_tokens": "Tokens that finished sequences got",
    "iteration_tokens_total": "Tokens computed in a step",
    "step_time_seconds": "Time of a step of the engine's loop on the host, its wait for the device included",
}


@dataclass(slots=True)
class Timing:
    """When things happened to a sequence, in seconds of the engine's clock."""

    arrived: float
    scheduled: float | None = None
    first: float | None = None
    last: float = 0.0


@dataclass
class Metrics:
    """What happened in an engine since it was made."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    step_failures: int = 0
    stuck_steps: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram(SECONDS if "_seconds" in name else TOKENS) for name in _HELP}
    )
    _step: float = 0.0  # when the tokens of the step before were read
    _now: float = 0.0
    _gaps: int = 0

    def begin(self, now: float) -> None:
        """The tokens of a step were read."""
        self._now, self._gaps = now, 0

    def token(self, seq: Seq, timing: Timing) -> None:
        """A sequence got one of them."""
        if timing.first is None:
            timing.first = self._now
            self.prompt_tokens += seq.prompt_len
            self.histograms["time_to_first_token_seconds"].observe(self._now - timing.arrived)
        elif timing.last == self._step:  # as for most: counted together below
            self._gaps += 1
        else:
            self.histograms["inter_token_latency_seconds"].observe(self._now - timing.last)
        timing.last = self._now

    def end(self, tokens: int) -> None:
        """All of them were given out, so many."""
        self.generation_tokens += tokens
        if self._gaps:
            self.histograms["inter_token_latency_seconds"].observe(self._now - self._step, self._gaps)
        self._step = self._now

    def done(self, seq: Seq, timing: Timing, now: float) -> None:
        """A sequence ended, whatever the reason."""
        count, seen = len(seq.output.token_ids), self.histograms
        self.finished[seq.output.finish_reason or "abort"] += 1
        seen["request_prompt_tokens"].observe(seq.prompt_len)
        seen["request_generation_tokens"].observe(count)
        seen["e2e_request_latency_seconds"].observe(now - timing.arrived)
        if timing.scheduled is not None:
            seen["request_queue_time_seconds"].observe(timing.scheduled - timing.arrived)
            if timing.first is not None:
                seen["request_prefill_time_seconds"].observe(timing.first - timing.scheduled)
                seen["request_decode_time_seconds"].observe(timing.last - timing.first)
                if count > 1:
                    each = (timing.last - timing.first) / (count - 1)
                    seen["request_time_per_output_token_seconds"].observe(each)


def snapshot(core: EngineCore) -> list[Metric]:
    """All metrics of an engine now. May be called from any thread: numbers of one step may be counted in part."""
    m, scheduler = core.metrics, core.scheduler
    stats, compiles = scheduler.pages.stats, getattr(core.runner.backend, "stats", None)
    found = [
        Metric("num_requests_running", "gauge", "Sequences that take part in steps", len(scheduler.running)),
        Metric("num_requests_waiting", "gauge", "Sequences that wait for a slot or for pages", scheduler.num_waiting),
        Metric("kv_cache_usage_perc", "gauge", "Share of the KV cache's pages in use, 0 to 1", scheduler.pages.usage),
        Metric("prefix_cache_queries", "counter", "Tokens looked up in the prefix cache", stats.queries),
        Metric("prefix_cache_hits", "counter", "Tokens found there", stats.hits),
        Metric("num_preemptions", "counter", "Sequences that gave up their pages", scheduler.num_preemptions),
        Metric("prompt_tokens", "counter", "Tokens of prompts that were taken in", m.prompt_tokens),
        Metric("generation_tokens", "counter", "Tokens that were generated", m.generation_tokens),
        Metric("step_failures", "counter", "Steps that failed", m.step_failures),
        Metric("stuck_steps", "counter", "Steps that took longer than the watchdog allows", m.stuck_steps),
        Metric("compile_count", "counter", "Programs compiled", getattr(compiles, "compiled", 0)),
        Metric("compile_seconds", "counter", "Time that took", getattr(compiles, "compile_seconds", 0.0)),
    ]
    for reason, count in m.finished.items():
        labels = (("finished_reason", reason),)
        found.append(Metric("request_success", "counter", "Sequences that ended, by reason", count, labels))
    for name, histogram in m.histograms.items():
        counts = tuple(histogram.counts)
        found.append(Metric(name, "histogram", _HELP[name], histogram.total, (), histogram.bounds, counts))
    return found
