"""The plan after measuring, and for a device that is not here."""

from __future__ import annotations

from typing import Any

import pytest

from oomrun.core import breakdown
from oomrun.core import events as ev
from oomrun.core.errors import InfeasiblePlanError
from oomrun.core.jobfile import load
from oomrun.core.measured_plan import measured_plan, plan_elsewhere
from oomrun.core.plan import DevicePlan, Plan
from oomrun.core.spec import JobSpec
from oomrun.core.state import JobState
from oomrun.core.topology import Device, Host, Inventory
from scenarios import MIB
from scenarios import state_measured as seen

GIB = 1024 * MIB
HOST = Host(memory_total_bytes=16 * GIB, memory_available_bytes=8 * GIB)
CPU = Device(id="cpu:0", kind="cpu", name="CPU", total_bytes=16 * GIB)
LIMITED = "devices: {cpu: 1, memory: [100MiB]}"


def job(settings: str = "") -> JobSpec:
    text = f"name: x\nscript: t.py\n{settings}\n"
    return load(text, filename="job.yaml", environment={})


def elsewhere(free: int, settings: str = "", **changes: Any) -> tuple[Plan, DevicePlan]:
    made = plan_elsewhere(job(settings), HOST, free, seen(**changes))
    (device,) = made.devices
    return made, device


def test_the_plan_is_what_the_worker_has_chosen() -> None:
    planned = ev.MicroBatchPlanned(
        at=1.0, attempt=1, fit=1, micro_batch_size=24, global_batch_size=64,
        reason="because", predicted_peak_bytes=70 * MIB,
        predicted_peak_high_bytes=75 * MIB,
    )  # fmt: skip
    # By itself the planner would halve: it knows nothing between 64 and 16.
    known = JobState(
        global_batch_size=64,
        measured={16: 60 * MIB, 24: 70 * MIB},
        micro_batch_failed=48,
    )
    made = measured_plan(
        job(LIMITED), Inventory(devices=(CPU,), host=HOST), known, planned
    )
    (device,) = made.devices
    assert (device.share, device.micro_batch_size, device.accumulation_steps) == (
        64, 24, 3,
    )  # fmt: skip
    assert device.predicted_peak_bytes == 70 * MIB
    assert device.predicted_peak_high_bytes == 75 * MIB
    assert made.notes == ("because",)


def test_a_large_gpu_takes_the_whole_batch() -> None:
    made, device = elsewhere(24 * GIB)
    assert (device.kind, device.share, device.micro_batch_size) == ("gpu", 64, 64)
    # The reserve of a GPU is taken off.
    assert device.limit_bytes == 24 * GIB - int(24 * GIB * 0.04)
    peak = breakdown.known_from_graph(seen()).predict(64)
    assert peak is not None
    assert device.predicted_peak_bytes == peak.bytes
    assert "from the graph of the step alone" in made.notes[-1]
    assert not any("no peak is predicted" in note for note in made.notes)


def test_a_small_gpu_gets_the_size_whose_upper_end_fits() -> None:
    made, device = elsewhere(GIB)
    known = breakdown.known_from_graph(seen())
    size, budget = device.micro_batch_size, device.budget_bytes
    assert size is not None
    assert budget is not None
    assert 1 < size < 64
    this, more = known.predict(size), known.predict(size + 1)
    assert this is not None
    assert more is not None
    assert this.high_bytes <= budget < more.high_bytes
    assert f"sizes from about {size} on" in made.notes[-1]


def test_where_it_is_not_sure_one_sample_is_planned() -> None:
    made, device = elsewhere(780 * MIB)
    assert device.micro_batch_size == 1
    assert "not sure" in made.notes[-1]


def test_a_gpu_that_is_too_small() -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        elsewhere(600 * MIB)
    assert caught.value.needed_bytes is not None
    assert caught.value.available_bytes is not None
    assert caught.value.needed_bytes > caught.value.available_bytes


@pytest.mark.parametrize(
    ("micro", "size"), [("8", 8), ("{max: 8}", 8), ("{max: 500}", 64)]
)
def test_the_job_file_s_own_bounds_hold(micro: str, size: int) -> None:
    _, device = elsewhere(24 * GIB, f"batch: {{micro: {micro}}}")
    assert device.micro_batch_size == size


def test_a_fixed_size_that_does_not_fit() -> None:
    with pytest.raises(InfeasiblePlanError, match="micro-batch 64 needs more"):
        elsewhere(900 * MIB, "batch: {micro: 64}")


def test_the_cpu_s_own_limit_is_not_the_gpu_s() -> None:
    _, device = elsewhere(24 * GIB, LIMITED)
    assert (device.limit_bytes or 0) > 20 * GIB


def test_a_step_whose_graph_tells_nothing() -> None:
    made, device = elsewhere(
        1024 * MIB, graph_sizes=(), graph_peaks=(), graph_activations=()
    )
    assert device.predicted_peak_bytes is None
    assert "tells nothing" in made.notes[-1]
