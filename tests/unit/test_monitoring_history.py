"""Every query of the boards and alerts, asked of a Prometheus that knows a real run."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import history
from oomrun.monitoring import export
from oomrun.monitoring.alerts import ALERTS
from prometheus_server import Prometheus

pytestmark = pytest.mark.skipif(
    not shutil.which("prometheus") or not shutil.which("promtool"),
    reason="prometheus is not installed (apt-get install prometheus)",
)

CHOSEN = {
    "$run": ".+", "$device": ".*", "$__rate_interval": "20s", "$__range": "1h",
}  # fmt: skip
ROOT = Path(__file__).parents[2]
PARENT = history.machine_with_gpus().gpus[1].gpu_uuid
#: As the documents show them, and what they find of which device.
JOINS = {
    "DCGM_FI_DEV_FB_USED * on (UUID, GPU_I_ID) group_left (device, model) "
    "oomrun_gpu_hardware_info": {(history.GPU, 1024.0), ("MIG-1", 16.0)},
    "nvidia_smi_memory_used_bytes * on (uuid) group_left (device, model) "
    'oomrun_gpu_hardware_info{GPU_I_ID=""}': {(history.GPU, 2.0**30)},
    "oomrun_gpu_utilization_ratio * on (device) group_left (run) "
    "max by (device, run) (oomrun_gpu_info)": {(history.GPU, 0.5)},
}
LABEL_VALUES = re.compile(r"label_values\((?P<series>.+), (?P<label>\w+)\)")
SELECTOR = re.compile(r"\boomrun_\w+(?:\{[^}]*\})?(?!=|\w)")


class Known(NamedTuple):
    """A Prometheus, and the time that its history spans."""

    server: Prometheus
    start: float
    end: float

    def has(self, expression: str) -> bool:
        """Whether ``expression`` had a value at some time."""
        for name, value in CHOSEN.items():
            expression = expression.replace(name, value)
        step_s = history.SCRAPE_S
        return bool(self.server.history(expression, self.start, self.end, step_s))


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Known]:
    end = time.time() - 60
    run = history.watched_run(end=end)
    # No GPU and none of its exporters are here: their series are written by hand.
    bare = history.GPU.removeprefix("GPU-")
    machine = history.machine_with_gpus()
    others = "".join(
        f"{name} {value} {moment:.3f}\n"
        for name, value in (
            (f'DCGM_FI_DEV_FB_USED{{gpu="0",UUID="{history.GPU}"}}', 1024),
            (f'DCGM_FI_DEV_FB_USED{{gpu="1",UUID="{PARENT}",GPU_I_ID="7"}}', 16),
            (f'nvidia_smi_memory_used_bytes{{uuid="{bare}"}}', 2**30),
        )
        for moment in (run[0].at + n for n in range(0, int(end - run[0].at), 5))
    )
    text = history.openmetrics(
        run, history.as_on_gpu(run), more=others, machine=machine
    )
    server = history.fill(tmp_path_factory.mktemp("prometheus"), text)
    yield Known(server, run[0].at, end + 2 * history.SCRAPE_S)
    server.close()


def test_every_query_of_every_board_finds_something(known: Known) -> None:
    empty = [
        f"{board.uid}, {panel.title}: {query.expr}"
        for board in export.BOARDS
        for row in board.rows
        for panel in row.panels
        for query in panel.queries
        if not known.has(query.expr)
    ]
    assert not empty, "\n".join(empty)


def test_what_marks_and_variables_ask_for_is_there(known: Known) -> None:
    for board in export.BOARDS:
        for mark in board.to_json()["annotations"]["list"]:
            assert known.has(mark["expr"]), mark["expr"]
        for query in board.variables.values():
            found = LABEL_VALUES.fullmatch(query)
            assert found, query
            assert known.has(
                "count by ({label}) ({series})".format(**found.groupdict())
            )


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_series_of_every_alert_is_there(known: Known, alert: object) -> None:
    expression = alert.expr  # type: ignore[attr-defined]
    known.has(expression)  # raises where Prometheus cannot make sense of it
    series = SELECTOR.findall(expression)
    assert series
    for name in series:
        assert known.has(name), name


@pytest.mark.parametrize("query", JOINS)
def test_other_exporters_join_by_uuid(known: Known, query: str) -> None:
    documented = (ROOT / "docs" / "monitoring.md").read_text()
    assert query in documented
    found = {
        (series["metric"]["device"], float(series["values"][-1][1]))
        for series in known.server.history(query, known.start, known.end, 5.0)
    }
    assert found == JOINS[query]


def test_a_query_for_nothing_finds_nothing(known: Known) -> None:
    assert not known.has("oomrun_device_memory_limitt_bytes")
    assert not known.has('oomrun_oom_events_total{phase="lunch"}')


def test_the_run_was_one_that_ran_out_of_memory(known: Known) -> None:
    """Else the boards would show little of what they are for."""
    watched = 'run="watched"'
    for metric in ("oom_events", "restarts", "resumes", "adaptations", "lost_steps"):
        total = f"sum(oomrun_{metric}_total{{{watched}}})"
        assert known.has(f"{total} > 0"), metric
    assert known.has(
        f'oomrun_run_state{{{watched}, oomrun_run_state="completed"}} == 1'
    )
