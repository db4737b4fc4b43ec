"""Whatever happens in a run, its metrics parse and its counters never fall."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

import scenarios
from oomrun.core import events as ev
from oomrun.core.state import JobState, replay
from oomrun.core.status import status_json
from oomrun.core.words import describe
from oomrun.metrics.catalogue import JobStateCollector
from oomrun.metrics.exposition import Encoders

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

times = st.floats(0, 2e9)
counts = st.integers(0, 10**6)
sizes = st.integers(1, 4096)
texts = st.text(max_size=20)
phases = st.sampled_from(["build", "gradients", "apply", "evaluate", "unknown"])
kinds = st.sampled_from(["device", "host"])
bytes_read = st.none() | st.integers(0, 2**40)
memory = st.lists(
    st.builds(
        ev.DeviceMemory,
        device=st.sampled_from(["cpu:0", "GPU-1"]),
        in_use_bytes=bytes_read,
        peak_bytes=bytes_read,
        limit_bytes=bytes_read,
    ),
    max_size=2,
).map(tuple)
attempt = st.integers(1, 9)
fit = st.integers(1, 3)

events = st.one_of(
    st.builds(ev.RunResumed, at=times, pid=counts, reason=texts),
    st.builds(
        ev.AttemptStarted,
        at=times,
        attempt=attempt,
        plan=st.sampled_from([scenarios.PLAN, scenarios.smaller_plan(), {}]),
        pids=st.lists(counts, max_size=2).map(tuple),
    ),
    st.builds(
        ev.FitStarted,
        at=times,
        attempt=attempt,
        fit=fit,
        epochs=st.integers(1, 9),
        initial_epoch=st.integers(0, 3),
        global_batch_size=st.none() | sizes,
        micro_batch_size=st.none() | sizes,
        steps_per_epoch=st.none() | sizes,
    ),
    st.builds(
        ev.Progressed,
        at=times,
        attempt=attempt,
        fit=fit,
        step=counts,
        samples=counts,
        epoch=st.integers(1, 9),
        step_in_epoch=counts,
        loss=st.none() | st.floats(),
        window_steps=st.integers(0, 100),
        step_s=st.floats(0, 1e4),
        global_batch_size=sizes,
        micro_batch_size=sizes,
        memory=memory,
    ),
    st.builds(
        ev.OomOccurred,
        at=times,
        attempt=attempt,
        rank=st.integers(0, 3),
        device=st.sampled_from(["cpu:0", "GPU-1", ""]),
        kind=kinds,
        phase=phases,
        recovery=st.sampled_from(["in_process", "restart"]),
        micro_batch_size=st.none() | sizes,
        step=counts,
        message=texts,
        memory=memory,
    ),
    st.builds(
        ev.MicroBatchChanged,
        at=times,
        attempt=attempt,
        old=sizes,
        new=sizes,
        phase=st.sampled_from(["gradients", "evaluate"]),
        reason=texts,
    ),
    st.builds(
        ev.CheckpointSaved,
        at=times,
        attempt=attempt,
        name=texts,
        step=counts,
        samples=counts,
        epoch=st.integers(1, 9),
        size_bytes=counts,
        duration_s=st.floats(0, 1e4),
        blocked_s=st.floats(0, 1e4),
        reason=texts,
    ),
    st.builds(
        ev.CheckpointFailed, at=times, attempt=attempt, step=counts, reason=texts
    ),
    st.builds(
        ev.Restored,
        at=times,
        attempt=attempt,
        name=texts,
        fit=fit,
        step=counts,
        samples=counts,
        lost_steps=counts,
    ),
    st.builds(
        ev.FitEnded,
        at=times,
        attempt=attempt,
        fit=fit,
        step=counts,
        samples=counts,
        epoch=st.integers(1, 9),
        replayed=st.booleans(),
    ),
    st.builds(
        ev.AttemptEnded,
        at=times,
        attempt=attempt,
        cause=st.sampled_from(["device_oom", "host_oom", "crash", "finished"]),
        summary=texts,
        exit_code=st.none(),
    ),
    st.builds(
        ev.DecisionMade,
        at=times,
        attempt=attempt,
        action=st.sampled_from(["restart", "finish", "fail", "stop"]),
        cause=st.sampled_from(["oom", "crash", "preemption", "hang", "finished"]),
        reason=texts,
        micro_batch_size=st.none() | sizes,
    ),
    st.builds(
        ev.RunEnded,
        at=times,
        state=st.sampled_from(["completed", "failed", "preempted"]),
        exit_code=st.integers(0, 255),
        reason=texts,
    ),
)


def started(name: str) -> ev.RunStarted:
    """The first event of a run."""
    return ev.RunStarted(
        at=1.0, run_id="r", name=name, version="0", seed=1, mathematics={}
    )


def registry(state: JobState) -> CollectorRegistry:
    found = CollectorRegistry()
    found.register(JobStateCollector(lambda: [state]))
    return found


def counters(families: Iterable[Metric]) -> Samples:
    """The samples of counters and histograms, by name and labels."""
    found: Samples = {}
    for family in families:
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} twice"
            if family.type in ("counter", "histogram"):
                found[key] = sample.value
    return found


def collected(state: JobState) -> Samples:
    """What a scrape counts, without the detour through text."""
    return counters(registry(state).collect())


@given(st.text(min_size=1, max_size=20), st.lists(events, max_size=12))
@settings(max_examples=40, deadline=None)
def test_counters_never_fall_and_never_vanish(
    name: str, happened: list[ev.Event]
) -> None:
    state = replay([started(name)])
    before = collected(state)
    for event in happened:
        state = state.after(event)
        now = collected(state)
        for key, count in before.items():
            if key[0] == "oomrun_oom_events_total" and count == 0:
                continue  # a new plan may have other devices; nothing was counted
            assert now[key] >= count, key
        before = now


@given(st.text(min_size=1, max_size=20), st.lists(events, max_size=12))
@settings(max_examples=40, deadline=None)
def test_openmetrics_parses_and_status_and_words_exist(
    name: str, happened: list[ev.Event]
) -> None:
    state = replay([started(name)])
    for event in happened:
        state = state.after(event)
        describe(event, state)
        status_json(state)
    text = generate_latest(registry(state)).decode()
    parsed = text_string_to_metric_families(text)
    assert counters(parsed) == collected(state)
    text = openmetrics(registry(state)).decode()  # type: ignore[no-untyped-call]
    families = list(parse_openmetrics(text))  # type: ignore[no-untyped-call]
    runs = {
        sample.labels["run"]
        for family in families
        for sample in family.samples
        if "run" in sample.labels
    }
    assert runs == {name}


ENCODERS = Encoders()  # of many runs, as `oomrun monitor` has them


@given(st.text(min_size=1, max_size=20), st.lists(events, max_size=12))
@settings(max_examples=40, deadline=None)
def test_lines_that_are_kept_are_those_of_the_library(
    name: str, happened: list[ev.Event]
) -> None:
    state = replay([started(name)])
    kept = CollectorRegistry()
    kept.register(JobStateCollector(lambda: [state]))
    for event in [None, *happened]:
        state = state.after(event) if event else state
        for accept in ("", "application/openmetrics-text;version=1.0.0"):
            expected, kind = choose_encoder(accept)
            encode, content_type = ENCODERS.choose(accept)
            assert content_type == kind
            # What was kept from the events before is the same as what is read anew.
            assert encode(kept) == expected(registry(state))


@given(st.lists(events, max_size=12))
@settings(max_examples=40, deadline=None)
def test_label_sets_of_a_run_are_there_from_its_first_attempt(
    happened: list[ev.Event],
) -> None:
    plan = ev.AttemptStarted(at=1.0, attempt=1, plan=scenarios.PLAN, pids=(1,))
    state = replay([started("run"), plan])
    first = set(collected(state))
    for event in happened:
        state = state.after(event)
    for name, labels in set(collected(state)) - first:
        # Only a device or phase that no plan and no version named can be new.
        assert name == "oomrun_oom_events_total", (name, labels)
        assert dict(labels)["device"] in ("GPU-1", "", "cpu:0")
