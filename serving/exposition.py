"""Metrics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from inferax.engine.metrics import Metric


def exposition(metrics: Sequence[Metric], model: str) -> tuple[bytes, str]:
    """The text of `metrics` and its media type. Names begin with "inferax:", and each has the label model_name."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(metrics, model))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Collected(Collector):
    def __init__(self, metrics: Sequence[Metric], model: str) -> None:
        self._metrics, self._model = metrics, model

    def describe(self) -> Iterable[Family]:
        return ()

    def collect(self) -> Iterator[Family]:
        families: dict[str, Family] = {}
        for metric in self._metrics:
            names = ["model_name", *(name for name, _ in metric.labels)]
            values = [self._model, *(value for _, value in metric.labels)]
            name = f"inferax:{metric.name}"
            if isinstance(family := families.get(name), CounterMetricFamily):
                family.add_metric(values, metric.value)
            elif metric.kind == "counter":
                families[name] = CounterMetricFamily(name, metric.help, labels=names)
                families[name].add_metric(values, metric.value)  # type: ignore[attr-defined]
            elif metric.kind == "gauge":
                gauge = families[name] = GaugeMetricFamily(name, metric.help, labels=names)
                gauge.add_metric(values, metric.value)
            else:
                bounds = [*(f"{bound:g}" for bound in metric.bounds), "+Inf"]
                buckets = list(zip(bounds, map(float, accumulate(metric.counts)), strict=True))
                histogram = families[name] = HistogramMetricFamily(name, metric.help, labels=names)
                histogram.add_metric(values, buckets, metric.value)
        yield from families.values()
