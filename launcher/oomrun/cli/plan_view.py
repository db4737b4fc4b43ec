"""How a plan looks: for people, and as JSON.

Covers: the lines of ``oomrun plan`` and its JSON object. Does not cover: making the
plan (``plan_command``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from oomrun.core import breakdown as breakdowns
from oomrun.core import events as ev
from oomrun.core import plan as plans
from oomrun.core.breakdown import Breakdown
from oomrun.core.plan import DevicePlan, Plan
from oomrun.core.spec import Command, JobSpec
from oomrun.core.units import format_bytes

__all__ = ["Shown", "lines", "to_json"]

_HEAD = (
    "device", "limit", "budget", "share", "micro-batch", "passes", "predicted peak",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A plan and what is known of it.

    Attributes:
        plan: the plan.
        source: what it was made from beside the job file and the machine; "" for no
            more.
        composition: what the worker has found of its model; None without one.
        tried: the sizes tried for it.
        overruled: variables of the environment that do not count, in sentences.
    """

    plan: Plan
    source: str = ""
    composition: ev.StateMeasured | None = None
    tried: tuple[ev.Probed, ...] = ()
    overruled: tuple[str, ...] = ()

    @property
    def breakdown(self) -> Breakdown | None:
        """What the first device's peak is made of, where it is known."""
        return breakdowns.of_device(self.composition, self.plan.devices[0])


def to_json(spec: JobSpec, shown: Shown) -> dict[str, Any]:
    """As ``oomrun plan --json`` prints it."""
    found = shown.breakdown
    return {
        "name": spec.name,
        **plans.to_json(shown.plan),
        "source": shown.source,
        "breakdown": None if found is None else breakdowns.to_json(found),
        "tried": [
            {
                "micro_batch_size": tried.micro_batch_size,
                "steps": tried.steps,
                "peak_bytes": tried.peak_bytes,
                "seconds": round(tried.seconds, 3),
            }
            for tried in shown.tried
        ],
        "overruled": list(shown.overruled),
    }


def lines(spec: JobSpec, shown: Shown) -> Iterator[str]:
    """As ``oomrun plan`` prints it."""
    made, found = shown.plan, shown.breakdown
    yield spec.name
    yield f"  strategy      {made.strategy} ({made.strategy_reason})"
    yield f"  global batch  {_batch(spec, made)}"
    yield f"  memory mode   {made.memory_mode}"
    if shown.source:
        yield f"  known from    {shown.source}"
    yield ""
    yield from _table([_HEAD, *map(_row, made.devices)])
    if found is not None:
        yield ""
        yield f"  at micro-batch {found.micro_batch_size} the peak is made of"
        yield from _parts(found, made.global_batch_size)
    if made.notes or shown.overruled:
        yield ""
    for note in (*made.notes, *shown.overruled):
        yield f"  note: {note}"


def _batch(spec: JobSpec, made: Plan) -> str:
    size = made.global_batch_size
    if size:
        source = "the job file" if spec.batch.global_size else "the script, as it ran"
        return f"{size} (from {source})"
    if isinstance(spec.program, Command):
        return "the program's own, not known"
    return "the script's, not known yet"


def _parts(found: Breakdown, samples: int | None) -> Iterator[str]:
    remarks = {"input": f"{samples} samples" if samples else ""}
    if found.bytes_per_sample is not None:
        remarks["activations"] = f"{format_bytes(found.bytes_per_sample)} a sample"
    kinds = dict(breakdowns.KINDS)
    if found.bytes_per_sample is None:
        kinds["surplus"] = "activations, workspace"  # there is no graph to tell which
    rows = [
        (label, format_bytes(getattr(found.parts, kind)), remarks.get(kind, ""))
        for kind, label in kinds.items()
        if getattr(found.parts, kind)
    ]
    rows.append(("= predicted peak", format_bytes(found.peak_bytes), ""))
    rows.append(("its uncertainty, upwards", format_bytes(found.margin_bytes), ""))
    if found.unused_bytes is not None and found.headroom_bytes is not None:
        unused, headroom = found.unused_bytes, found.headroom_bytes
        above = "above the budget" if unused < 0 else ""
        rows.append(("free in the budget", format_bytes(unused), above))
        rows.append(("headroom", format_bytes(headroom), "memory.headroom"))
        total = found.peak_bytes + found.margin_bytes + unused + headroom
        rows.append(("= limit", format_bytes(total), ""))
    width = max(len(size) for _, size, _ in rows)
    yield from _table(
        [("  " + label, size.rjust(width), remark) for label, size, remark in rows]
    )


def _row(device: DevicePlan) -> tuple[str, ...]:
    return (
        device.id,
        _size(device.limit_bytes),
        _size(device.budget_bytes),
        _count(device.share),
        _count(device.micro_batch_size),
        _count(device.accumulation_steps),
        _peak(device),
    )


def _peak(device: DevicePlan) -> str:
    if device.predicted_peak_bytes is None:
        return "-"
    likely = format_bytes(device.predicted_peak_bytes)
    return f"{likely} (up to {_size(device.predicted_peak_high_bytes)})"


def _size(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)


def _count(count: int | None) -> str:
    return "-" if count is None else str(count)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield ("  " + "  ".join(cells)).rstrip()
