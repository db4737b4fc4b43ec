"""Bars and sparklines out of characters.

Covers: the characters, for terminals with and without Unicode, and what is drawn with
them. Does not cover: what is drawn where (``frame.py``).
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass

from rich.text import Text

from oomrun.core.status import DeviceStatus

__all__ = ["ASCII", "UNICODE", "Glyphs", "memory_bar", "progress_bar", "sparkline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """The characters that pictures are made of."""

    full: str
    peak: str
    empty: str
    mark: str
    done: str
    todo: str
    spark: str
    times: str
    dot: str


UNICODE = Glyphs(
    full="█", peak="▓", empty="░", mark="┃", done="━", todo="─", spark="▁▂▃▄▅▆▇█",
    times="×", dot="·",
)  # fmt: skip
ASCII = Glyphs(
    full="#", peak="=", empty=".", mark="|", done="=", todo="-", spark="_.-=^",
    times="x", dot="-",
)  # fmt: skip


def progress_bar(done: float, width: int, glyphs: Glyphs) -> Text:
    """How much is ``done``, from 0 to 1."""
    width = max(4, width)
    full = round(done * width)
    bar = Text(glyphs.done * full, style="green")
    return bar.append(glyphs.todo * (width - full), style="dim")


def sparkline(values: list[float], width: int, glyphs: Glyphs) -> str:
    """The values as a row of bars, the newest at the right."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [
        statistics.fmean(values[start:end]) for start, end in itertools.pairwise(edges)
    ]
    low, high = min(means), max(means)
    top = len(glyphs.spark) - 1
    span = (high - low) or 1.0
    return "".join(glyphs.spark[round((mean - low) / span * top)] for mean in means)


def memory_bar(device: DeviceStatus, limit: int, width: int, glyphs: Glyphs) -> Text:
    """In use, up to the peak, up to the limit; with a mark at the predicted peak."""

    def cells(value: int | None) -> int:
        return min(width, round((value or 0) / limit * width))

    in_use = cells(device.in_use_bytes)
    peak = max(in_use, cells(device.window_peak_bytes))
    fullness = (device.window_peak_bytes or 0) / limit
    style = "red" if fullness > 0.95 else "yellow" if fullness > 0.85 else "green"
    bar = Text(glyphs.full * in_use, style=style)
    bar.append(glyphs.peak * (peak - in_use), style=style)
    bar.append(glyphs.empty * (width - peak), style="dim")
    if device.predicted_peak_bytes is None:
        return bar
    at = min(width - 1, cells(device.predicted_peak_bytes))
    return bar[:at] + Text(glyphs.mark, style="bold magenta") + bar[at + 1 :]
