"""Metrics under construction: series are added by name, and come out in the order of `FAMILIES`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily

from pytools.views.metrics.families import FAMILIES
from pytools.views.metrics.parts import Row

_UNITS: Final = ("seconds", "bytes", "ratio")


class Exposition:
    """Metrics under construction, in the order of `FAMILIES`."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add(self, name: str, labels: Sequence[str], value: float | None) -> None:
        """One series; None: not known, so it is left out."""
        if value is None:
            return
        metric = self._metric(name)
        assert isinstance(metric, GaugeMetricFamily | CounterMetricFamily)
        metric.add_metric(labels, value)

    def ns(self, name: str, labels: Sequence[str], value_ns: float | None) -> None:
        """One series of seconds (or of a share), from nanoseconds (or parts in a billion)."""
        self.add(name, labels, None if value_ns is None else value_ns / 1e9)

    def one_of(self, name: str, labels: Sequence[str], known: Iterable[str], value: str) -> None:
        """One series for each word that is known, 1 for the one that holds; a word that is not known comes besides."""
        for each in dict.fromkeys((*known, value)):
            self.add(name, (*labels, each), float(each == value))

    def counted(self, row: Row) -> None:
        for (name, *own), total in row.totals.items():
            self.add(name, (*row.labels, *own), total.value / 1e9 if name.endswith("_seconds_total") else total.value)
        for (name, *own), histogram in row.histograms.items():
            metric = self._metric(name)
            assert isinstance(metric, HistogramMetricFamily)
            metric.add_metric((*row.labels, *own), histogram.cumulative(), histogram.sum_ns / 1e9)

    def info(self, name: str, values: Sequence[str]) -> None:
        """What is known of something in words."""
        metric = self._metric(name)
        assert isinstance(metric, InfoMetricFamily)
        metric.add_metric([], dict(zip(FAMILIES[name].labels, values, strict=True)))

    def metrics(self) -> Iterator[Metric]:
        """Those with any series."""
        return (self._metrics[name] for name in FAMILIES if name in self._metrics)

    def _metric(self, name: str) -> Metric:
        metric = self._metrics.get(name)
        if metric is None:
            metric = self._metrics[name] = empty(name)
        return metric


def empty(name: str) -> Metric:
    """A metric without any series."""
    family = FAMILIES[name]
    plain = name.removesuffix("_info").removesuffix("_total")
    unit = next((unit for unit in _UNITS if plain.endswith(f"_{unit}")), "")
    match family.kind:
        case "gauge":
            return GaugeMetricFamily(plain, family.help, labels=family.labels, unit=unit)
        case "counter":
            return CounterMetricFamily(plain, family.help, labels=family.labels, unit=unit)
        case "histogram":
            return HistogramMetricFamily(plain, family.help, labels=family.labels, unit=unit)
        case "info":
            return InfoMetricFamily(plain, family.help)
