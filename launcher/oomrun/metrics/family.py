"""One metric family: its name, its text, and how its samples are read from a state.

Covers: from such descriptions to ``prometheus_client``'s families, for any number of
runs. Does not cover: which metrics there are (``catalogue.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    Exemplar,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)

from oomrun.core.histogram import Histogram
from oomrun.core.machine import MachineReading
from oomrun.core.state import JobState
from oomrun.core.tally import Traced

__all__ = ["Counted", "Family", "Kept", "Sample", "Value", "build", "build_machine"]

Subject = TypeVar("Subject", JobState, MachineReading)


@dataclass(frozen=True, slots=True)
class Counted:
    """A count, and the event that it last grew by: an exemplar, in OpenMetrics."""

    count: float
    by: Traced | None = None


Value = float | Histogram | Counted | Mapping[str, bool]
#: Label values after ``run``, then the value; None where there is nothing to say yet.
Sample = tuple[tuple[str, ...], Value | None]


@dataclass(frozen=True, slots=True)
class Family(Generic[Subject]):
    """A metric family, of runs or of the machine.

    Attributes:
        name: as it is queried, with ``_total`` or ``_info``.
        type: gauge, counter, histogram, info or stateset.
        help: one sentence.
        read: the samples of one run, or of the machine.
        labels: names of the labels, of a run's metric those after ``run``.
        source: what ``read`` looks at; while these are the same objects, the samples
            are the same. None: it is read at every scrape.
    """

    name: str
    type: str
    help: str
    read: Callable[[Subject], Iterable[Sample]]
    labels: tuple[str, ...] = ()
    source: Callable[[Subject], tuple[object, ...]] | None = None


#: The samples of families and runs, with the objects that they were read from.
Kept = dict[tuple[str, str, str], tuple[tuple[object, ...], list[Any]]]


def build(family: Family[JobState], states: Sequence[JobState], kept: Kept) -> Metric:
    """The family with the samples of all ``states``.

    Args:
        family: the family.
        states: the runs.
        kept: of the last scrape; it is changed.
    """
    labels = ("run", *family.labels)
    metric = _empty(family, labels)
    for state in states:
        if family.source is None:
            _add_run(metric, family, state)
            continue
        key, source = (family.name, state.name, state.run_id), family.source(state)
        before = kept.get(key)
        if before is None or any(map(operator.is_not, before[0], source)):
            alone = _empty(family, labels)
            _add_run(alone, family, state)
            before = kept[key] = (source, alone.samples)
        metric.samples.extend(before[1])
    return metric


def _add_run(metric: Metric, family: Family[JobState], state: JobState) -> None:
    for values, value in family.read(state):
        if value is not None:
            _add(metric, (state.name, *values), value, state.run_id)


def build_machine(family: Family[MachineReading], reading: MachineReading) -> Metric:
    """The family with the machine's samples."""
    metric = _empty(family, family.labels)
    for values, value in family.read(reading):
        if value is not None:
            _add(metric, values, value)
    return metric


def _empty(family: Family[Subject], labels: tuple[str, ...]) -> Metric:
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


def _add(
    metric: Metric, labels: tuple[str, ...], value: Value, run_id: str = ""
) -> None:
    if isinstance(metric, GaugeMetricFamily) and isinstance(value, (int, float)):
        metric.add_metric(labels, value)  # nearly all are
        return
    match metric:
        case InfoMetricFamily():
            metric.add_metric(labels, {})
        case StateSetMetricFamily() if isinstance(value, Mapping):
            metric.add_metric(labels, dict(value))
        case HistogramMetricFamily() if isinstance(value, Histogram):
            metric.add_metric(labels, _buckets(value), value.sum_s)
        case CounterMetricFamily() if isinstance(value, Counted):
            exemplar = _exemplar(value.by, run_id) if value.by else None
            metric.add_metric(labels, value.count, exemplar=exemplar)
        case GaugeMetricFamily() | CounterMetricFamily() if isinstance(
            value, int | float
        ):
            metric.add_metric(labels, value)
        case _:
            raise TypeError(f"{metric.name}: {value!r} is no value of a {metric.type}")


def _exemplar(event: Traced, run_id: str) -> Exemplar:
    """Leads from a count to the attempt whose log tells the rest."""
    labels = {"run_id": run_id, "attempt": str(event.attempt), "step": str(event.step)}
    return Exemplar(labels, 1.0, event.at)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    ends = [*map(str, histogram.bounds_s), "+Inf"]
    total, buckets = 0, []
    for end, count in zip(ends, histogram.counts, strict=True):
        total += count
        buckets.append((end, float(total)))
    return buckets
