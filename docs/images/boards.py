"""Draws the dashboards as previews: board-memory.png and two more.

    PYTHONPATH=tests python docs/images/boards.py [FOLDER]

Needs the extras `test` and `docs`, and Debian's `prometheus`. What is drawn is what
Prometheus answers to the boards' own queries, on the journal of the run in
tests/data/watched_run. Grafana draws it otherwise: each picture says so.
"""

from __future__ import annotations

import itertools
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.dates import DateFormatter
from matplotlib.ticker import FuncFormatter, MaxNLocator

import history
from oomrun.metrics.run_families import RUN_STATES
from oomrun.monitoring.export import BOARDS
from prometheus_server import Prometheus

NOTE = (
    "preview: drawn by matplotlib from what Prometheus answers; Grafana looks otherwise"
)
WIDTH, ROW = 15.0, 0.34  # inches: of a board, and of one row of Grafana's grid
BACK, PANEL, INK, DIM = "#111217", "#181b1f", "#d5d7dc", "#8e9099"
COLOURS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff")
STATES = {
    "starting": "#5794f2", "training": "#73bf69", "evaluating": "#c8f2c2",
    "checkpointing": "#8ab8ff", "adapting": "#f2cc0c", "recovering": "#ff9830",
    "completed": "#37872d", "failed": "#f2495c", "preempted": "#b877d9",
}  # fmt: skip


class Source:
    """A Prometheus that knows the run, asked as Grafana would."""

    def __init__(self, server: Prometheus, start: float, end: float) -> None:
        self.start, self.end = start, end
        self._server = server
        self._chosen = {
            "$run": "watched", "$device": ".*", "$__rate_interval": "20s",
            "$__range": f"{int(end - start)}s",
        }  # fmt: skip

    def series(self, target: dict[str, Any]) -> Iterator[tuple[str, list[Any]]]:
        """Name and samples of each series."""
        expr = target["expr"]
        for name, value in self._chosen.items():
            expr = expr.replace(name, value)
        found = self._server.history(expr, self.start, self.end, 1.0)
        for one in found:
            name = target["legendFormat"].replace("__auto", "")
            for label, value in one["metric"].items():
                name = name.replace(f"{{{{{label}}}}}", value)
            samples = [(at, float(value)) for at, value in one["values"]]
            # What is asked of this moment alone is not there when it was before.
            if not target["instant"] or samples[-1][0] >= self.end - 1:
                yield name.strip(), samples


def main() -> int:
    """Draws the boards."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    end = time.time() - 60
    run = history.watched_run(end=end)
    with tempfile.TemporaryDirectory() as folder:
        server = history.fill(Path(folder), history.openmetrics(run))
        source = Source(server, run[0].at, end + history.SCRAPE_S)
        for board in BOARDS:
            name = board.uid.replace("oomrun", "board")
            draw(board.to_json(), source, target / f"{name}.png")
        server.close()
    return 0


def draw(board: dict[str, Any], source: Source, target: Path) -> None:
    """One board as one picture."""
    panels = _down_to_the_last_with_data(board["panels"], source)
    rows = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels) + 2
    figure = pyplot.figure(figsize=(WIDTH, rows * ROW), facecolor=BACK)
    figure.text(0.01, 1 - 0.9 / rows, board["title"], color=INK, size=14, weight="bold")
    figure.text(0.99, 1 - 0.9 / rows, NOTE, color="#f2cc0c", size=9, ha="right")
    for panel in panels:
        place = panel["gridPos"]
        bottom = 1 - (place["y"] + place["h"] + 2) / rows
        box = (place["x"] / 24, bottom, place["w"] / 24, place["h"] / rows)
        if panel["type"] == "row":
            figure.text(0.01, bottom + 0.3 / rows, panel["title"], color=INK, size=11)
            continue
        _panel(figure, panel, box, source, rows)
    figure.savefig(target, dpi=80, facecolor=BACK)
    pyplot.close(figure)


def _down_to_the_last_with_data(
    panels: list[dict[str, Any]], source: Source
) -> list[dict[str, Any]]:
    """Without the rows at the end of which this run knows nothing: it had no GPU."""
    told = [
        panel["gridPos"]["y"]
        for panel in panels
        if any(list(source.series(query)) for query in panel.get("targets", ()))
    ]
    return [panel for panel in panels if panel["gridPos"]["y"] <= max(told)]


def _panel(
    figure: Any, panel: dict[str, Any], box: Any, source: Source, rows: int
) -> None:
    x, y, width, height = box
    frame = figure.add_axes((x + 0.003, y + 0.15 / rows, width - 0.006,
                             height - 0.3 / rows))  # fmt: skip
    frame.set(facecolor=PANEL, xticks=[], yticks=[])
    frame.spines[:].set_color("#2c3235")
    title = y + height - 0.95 / rows
    figure.text(x + 0.008, title, panel["title"], color=INK, size=9, weight="bold")
    axes = figure.add_axes((x + 0.045, y + 2.2 / rows, width - 0.055,
                            max(height - 3.5 / rows, 0.6 / rows)))  # fmt: skip
    axes.set_facecolor(PANEL)
    axes.tick_params(colors=DIM, labelsize=7)
    axes.spines[:].set_visible(False)
    found = [
        (name, samples) for query in panel["targets"]
        for name, samples in source.series(query)
    ]  # fmt: skip
    drawers = {
        "timeseries": _lines, "state-timeline": _states, "heatmap": _heat,
        "table": _table, "bargauge": _bars,
    }  # fmt: skip
    if panel["type"] == "table":
        _table(axes, panel, source)
    elif not found:
        _say(axes, panel["fieldConfig"]["defaults"].get("noValue", "no data"), DIM)
    else:
        drawers.get(panel["type"], _numbers)(axes, panel, found, source)


def _lines(axes: Axes, panel: dict[str, Any], found: Any, source: Source) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    custom = defaults.get("custom", {})
    stepped = custom.get("lineInterpolation") == "stepAfter"
    for number, (name, samples) in enumerate(found):
        colour = COLOURS[number % len(COLOURS)]
        times = [datetime.fromtimestamp(at) for at, _ in samples]
        values = [value for _, value in samples]
        bars = custom.get("drawStyle") == "bars" or " lost by " in name
        bound = re.search(r"(limit|budget|predicted|predicted at most)$", name)
        if bars:
            axes.vlines(times, 0, values, color=colour, label=name, linewidth=2)  # type: ignore[arg-type]
            continue
        axes.plot(times, values, color=colour, label=name, linewidth=1.3,  # type: ignore[arg-type]
                  linestyle="--" if bound else "-",
                  drawstyle="steps-post" if stepped else "default")  # fmt: skip
    if defaults.get("min") == 0:
        axes.set_ylim(bottom=0)
    _time_axis(axes, source)
    axes.grid(color="#2c3235", linewidth=0.5)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: written(value, defaults["unit"]))
    )
    wide = panel["gridPos"]["w"]
    _legend(axes, 6 if wide > 12 else 2 if wide > 6 else 1)


def _legend(axes: Axes, columns: int) -> None:
    """Below the panel, as Grafana has it."""
    axes.legend(
        loc="upper left", bbox_to_anchor=(0, -0.13), ncols=columns, fontsize=6,
        labelcolor=DIM, frameon=False,
    )  # fmt: skip


def _time_axis(axes: Axes, source: Source) -> None:
    axes.set_xlim(
        datetime.fromtimestamp(source.start),  # type: ignore[arg-type]
        datetime.fromtimestamp(source.end),  # type: ignore[arg-type]
    )
    axes.xaxis.set_major_formatter(DateFormatter("%H:%M:%S"))
    axes.xaxis.set_major_locator(MaxNLocator(5))


def _states(axes: Axes, panel: dict[str, Any], found: Any, source: Source) -> None:
    seen = set()
    for row, (_, samples) in enumerate(found):
        for at, value in samples:
            name = RUN_STATES[int(value)]
            label = None if name in seen else name
            seen.add(name)
            start = datetime.fromtimestamp(at)
            axes.barh(row, datetime.fromtimestamp(at + 1) - start, left=start,  # type: ignore[arg-type]
                      color=STATES.get(name, DIM), label=label)  # fmt: skip
    axes.set_yticks(range(len(found)), [name for name, _ in found])
    _time_axis(axes, source)
    _legend(axes, 8)


def _heat(axes: Axes, panel: dict[str, Any], found: Any, source: Source) -> None:
    """Counts by bucket: Prometheus's are cumulative, as Grafana's heatmaps know."""
    ordered = sorted(found, key=lambda item: float(item[0]))
    values = [[value for _, value in samples] for _, samples in ordered]
    counts = [values[0]] + [
        [max(0.0, b - a) for a, b in zip(low, high, strict=False)]
        for low, high in itertools.pairwise(values)
    ]
    axes.imshow(counts, aspect="auto", origin="lower", cmap="turbo")
    axes.set_xticks([])
    axes.set_yticks(range(len(ordered)), [name for name, _ in ordered])


def _bars(axes: Axes, panel: dict[str, Any], found: Any, source: Source) -> None:
    names = [name for name, _ in found]
    axes.barh(range(len(names)), [samples[-1][1] for _, samples in found],
              color=COLOURS[0])  # fmt: skip
    axes.set_yticks([])
    for row, name in enumerate(names):
        axes.text(0, row, f" {name}", color=BACK, size=8, va="center")


def _numbers(axes: Axes, panel: dict[str, Any], found: Any, source: Source) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    texts = []
    for name, samples in found[:4]:
        value = samples[-1][1]
        text = written(value, defaults["unit"])
        if "mappings" in defaults:
            text = RUN_STATES[int(value)]
        rest = name.removeprefix("watched").strip()
        texts.append(f"{rest} {text}" if rest else text)
    _say(axes, "\n".join(texts), COLOURS[0])


def _table(axes: Axes, panel: dict[str, Any], source: Source) -> None:
    axes.set(xticks=[], yticks=[])
    titles = {
        item["matcher"]["options"]: {p["id"]: p["value"] for p in item["properties"]}
        for item in panel["fieldConfig"]["overrides"]
    }
    cells = [("run", "watched")]
    for target in panel["targets"]:
        about = titles.get(f"Value #{target['refId']}")
        found = list(source.series(target))
        if about is None or not found:
            continue
        value = found[0][1][-1][1]
        text = written(value, about["unit"])
        if about["displayName"] == "state":
            text = RUN_STATES[int(value)]
        cells.append((about["displayName"], text))
    for number, (title, text) in enumerate(cells):
        at = number / len(cells)
        axes.text(at, 0.9, title, color=DIM, size=8, transform=axes.transAxes)
        axes.text(at, 0.78, text, color=INK, size=9, transform=axes.transAxes)


def _say(axes: Axes, text: str, colour: str) -> None:
    axes.set(xticks=[], yticks=[])
    size = 14 if "\n" not in text and len(text) < 14 else 9
    axes.text(0.5, 0.5, text, color=colour, size=size, ha="center", va="center",
              transform=axes.transAxes)  # fmt: skip


def written(value: float, unit: str) -> str:
    """The value as Grafana writes it, about."""
    match unit:
        case "bytes":
            for name in ("B", "KiB", "MiB", "GiB"):
                if abs(value) < 1024 or name == "GiB":
                    return f"{value:.3g} {name}"
                value /= 1024
        case "percentunit":
            return f"{value:.1%}"
        case "s" if abs(value) >= 120:
            return f"{value / 60:.3g} min"
        case "s":
            return f"{value:.3g} s" if abs(value) >= 1 else f"{value * 1000:.3g} ms"
        case "dateTimeFromNow":
            return f"{datetime.fromtimestamp(value / 1000):%H:%M:%S}"
    return f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
