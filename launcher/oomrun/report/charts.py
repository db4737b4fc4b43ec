"""Charts as inline SVG that fit any width: the lines scale, the words do not.

Covers: lines over time with marks, in a fixed number of points. The words around them
are HTML, since text within a stretched picture would be stretched too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Band", "Line", "Mark", "chart", "strip", "thinned"]

_WIDTH, _HEIGHT = 1000, 200
_MOST_BUCKETS = 240

Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A curve. ``stepped``: a value holds until the next one."""

    name: str
    style: str
    points: Points
    stepped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment, with what a pointer that rests on it is told."""

    at_s: float
    style: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A span of time."""

    start_s: float
    end_s: float
    style: str
    title: str


def chart(
    title: str,
    lines: Sequence[Line],
    end_s: float,
    *,
    words: Callable[[float], str],
    marks: Iterable[Mark] = (),
    bands: Iterable[Band] = (),
    from_zero: bool = True,
) -> str:
    """A figure, or nothing where no line has a point.

    Args:
        title: what is shown.
        lines: the curves, the last one on top.
        end_s: where the time axis ends.
        words: a value for a person.
        marks: moments, drawn from top to bottom.
        bands: spans of time behind it all.
        from_zero: whether the values' axis begins at 0.
    """
    values = [v for line in lines for v in _numbers(line.points)]
    if not values:
        return ""
    low = 0.0 if from_zero and min(values) >= 0 else min(values)
    high = max(values)
    if high <= low:
        high = low + (abs(low) or 1.0)
    to_x = _scale(0.0, end_s, 0.0, _WIDTH)
    to_y = _scale(low, high, _HEIGHT - 4, 6)
    drawn = [
        *(_band(band, to_x, _HEIGHT) for band in bands),
        f'<path class="grid" d="M0 {to_y(high):.1f}H{_WIDTH}M0 '
        f'{to_y((low + high) / 2):.1f}H{_WIDTH}M0 {to_y(low):.1f}H{_WIDTH}"/>',
        *(_mark(mark, to_x, _HEIGHT) for mark in marks),
        *(_curve(line, to_x, to_y, end_s) for line in lines),
    ]
    legend = "".join(
        f'<span class="key"><i class="{line.style}"></i>{escape(line.name)}</span>'
        for line in lines
        if _numbers(line.points)
    )
    return (
        f"<figure><figcaption><b>{escape(title)}</b>{legend}</figcaption>"
        f'<div class="plot"><span class="top">{escape(words(high))}</span>'
        f'<span class="bottom">{escape(words(low))}</span>'
        f"{_svg(drawn, _HEIGHT, title)}</div></figure>"
    )


def strip(
    title: str, bands: Iterable[Band], marks: Iterable[Mark], end_s: float
) -> str:
    """Spans of time side by side, with marks."""
    to_x = _scale(0.0, end_s, 0.0, _WIDTH)
    drawn = [
        *(_band(band, to_x, 40) for band in bands),
        *(_mark(mark, to_x, 40) for mark in marks),
    ]
    return f'<div class="strip">{_svg(drawn, 40, title)}</div>'


def thinned(points: Points, end_s: float) -> list[tuple[float, float | None]]:
    """At most some hundred points, the highest and lowest of each moment among them."""
    if len(points) <= 4 * _MOST_BUCKETS:
        return list(points)
    kept: dict[int, set[int]] = {}
    for index, (at_s, value) in enumerate(points):
        bucket = int(at_s / (end_s or 1.0) * _MOST_BUCKETS)
        held = kept.setdefault(bucket, set())
        if value is None:
            continue
        held.add(index)
        if len(held) > 2:
            ranked = sorted(held, key=lambda i: points[i][1] or 0.0)
            held.difference_update(ranked[1:-1])
    found: list[tuple[float, float | None]] = []
    for held in kept.values():
        found += [points[index] for index in sorted(held)] or [(math.nan, None)]
    return found


def _numbers(points: Points) -> list[float]:
    return [v for _, v in points if v is not None and math.isfinite(v)]


def _scale(
    low: float, high: float, start: float, stop: float
) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (stop - start)


def _svg(drawn: Iterable[str], height: int, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}">{"".join(drawn)}</svg>'
    )


def _band(band: Band, to_x: Callable[[float], float], height: int) -> str:
    start, end = to_x(band.start_s), to_x(band.end_s)
    return (
        f'<rect class="{band.style}" x="{start:.1f}" y="0" '
        f'width="{max(2.0, end - start):.1f}" height="{height}">'
        f"<title>{escape(band.title)}</title></rect>"
    )


def _mark(mark: Mark, to_x: Callable[[float], float], height: int) -> str:
    return (
        f'<path class="mark {mark.style}" d="M{to_x(mark.at_s):.1f} 0V{height}">'
        f"<title>{escape(mark.title)}</title></path>"
    )


def _curve(
    line: Line,
    to_x: Callable[[float], float],
    to_y: Callable[[float], float],
    end_s: float,
) -> str:
    path, down = [], False
    for at_s, value in thinned(line.points, end_s):
        if value is None or not math.isfinite(value):
            down = False
            continue
        x, y = to_x(at_s), to_y(value)
        if down:
            path.append(f"H{x:.1f}V{y:.1f}" if line.stepped else f"L{x:.1f} {y:.1f}")
        else:
            # With round ends, a line of no length is a dot.
            path.append(f"M{x:.1f} {y:.1f}h0")
        down = True
    return f'<path class="curve {line.style}" d="{"".join(path)}"/>'
