"""One metric family: its name, its text, and how its samples are read from a state.

Covers: from such descriptions to ``prometheus_client``'s families, for any number of
runs. Does not cover: which metrics there are (``catalogue.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)

from oomrun.core.histogram import Histogram
from oomrun.core.state import JobState

__all__ = ["Family", "Sample", "Value", "build"]

Value = float | Histogram | Mapping[str, bool]
#: Label values after ``run``, then the value; None where there is nothing to say yet.
Sample = tuple[tuple[str, ...], Value | None]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric family.

    Attributes:
        name: as it is queried, with ``_total`` or ``_info``.
        type: gauge, counter, histogram, info or stateset.
        help: one sentence.
        read: the samples of one run.
        labels: names of the labels after ``run``.
    """

    name: str
    type: str
    help: str
    read: Callable[[JobState], Iterable[Sample]]
    labels: tuple[str, ...] = ()


def build(family: Family, states: Sequence[JobState]) -> Metric:
    """The family with the samples of all ``states``."""
    labels = ("run", *family.labels)
    metric = _empty(family, labels)
    for state in states:
        for values, value in family.read(state):
            if value is not None:
                _add(metric, (state.name, *values), value)
    return metric


def _empty(family: Family, labels: tuple[str, ...]) -> Metric:
    match family.type:
        case "counter":
            return CounterMetricFamily(family.name, family.help, labels=labels)
        case "histogram":
            return HistogramMetricFamily(
                family.name, family.help, labels=labels, unit="seconds"
            )
        case "info":
            name = family.name.removesuffix("_info")
            return InfoMetricFamily(name, family.help, labels=labels)
        case "stateset":
            return StateSetMetricFamily(family.name, family.help, labels=labels)
        case _:
            return GaugeMetricFamily(
                family.name, family.help, labels=labels, unit=_unit(family.name)
            )


def _unit(name: str) -> str:
    """The unit for OpenMetrics, which wants it to be the name's last word."""
    last = name.rpartition("_")[2]
    return last if last in ("bytes", "seconds") else ""


def _add(metric: Metric, labels: tuple[str, ...], value: Value) -> None:
    match metric:
        case InfoMetricFamily():
            metric.add_metric(labels, {})
        case StateSetMetricFamily() if isinstance(value, Mapping):
            metric.add_metric(labels, dict(value))
        case HistogramMetricFamily() if isinstance(value, Histogram):
            metric.add_metric(labels, _buckets(value), value.sum_s)
        case GaugeMetricFamily() | CounterMetricFamily() if isinstance(
            value, int | float
        ):
            metric.add_metric(labels, value)
        case _:
            raise TypeError(f"{metric.name}: {value!r} is no value of a {metric.type}")


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    ends = [*map(str, histogram.bounds_s), "+Inf"]
    total, buckets = 0, []
    for end, count in zip(ends, histogram.counts, strict=True):
        total += count
        buckets.append((end, float(total)))
    return buckets
