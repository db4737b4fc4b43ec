"""What follows a failure on a cluster: a function, as tables and properties."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomrun.core import jobfile, last_words
from oomrun.core.state import JobState
from oomrun.kubernetes.endings import standing
from oomrun.kubernetes.resubmission import (
    Ending,
    Failure,
    GiveUp,
    Resubmit,
    Settings,
    decide,
    ending,
)

GIB = 2**30
FREE = Settings(memory_bytes=16 * GIB, memory_max_bytes=40 * GIB)


#: No more memory, but a lever.
LISTED = Settings(
    memory_bytes=16 * GIB,
    memory_max_bytes=None,
    levers=("xla_off", "host_pipeline"),
    pulled=("recompute",),
)


def end(failure: Failure, code: int = 1, size: int | None = None) -> Ending:
    return Ending(
        uid="u", failure=failure, exit_code=code, message="m", micro_batch_failed=size
    )


@pytest.mark.parametrize(
    ("failure", "size", "settings", "changed"),
    [
        ("host_oom", None, FREE, ("kubernetes.memory=24576MiB",)),
        (
            "host_oom",
            None,
            Settings(memory_bytes=36 * GIB, memory_max_bytes=40 * GIB),
            ("kubernetes.memory=40960MiB",),
        ),
        (
            "host_oom",
            None,
            Settings(memory_bytes=GIB, memory_max_bytes=40 * GIB),
            ("kubernetes.memory=2048MiB",),
        ),
        ("host_oom", None, LISTED, ("recovery.pulled=[recompute, host_pipeline]",)),
        (
            "host_oom",
            None,
            replace(LISTED, memory_max_bytes=40 * GIB),
            ("kubernetes.memory=24576MiB",),
        ),
        ("device_oom", 9, FREE, ("batch.micro={max: 4}",)),
        ("evicted", None, FREE, ()),
        ("stopped", None, FREE, ()),
        ("killed", None, FREE, ()),
    ],
)
def test_what_is_submitted_again(
    failure: Failure, size: int | None, settings: Settings, changed: tuple[str, ...]
) -> None:
    found = decide(end(failure, size=size), settings, used=0, most=10)
    assert isinstance(found, Resubmit)
    assert found.overrides == changed


@pytest.mark.parametrize(
    ("failure", "size", "settings", "said"),
    [
        ("training", None, FREE, "m"),
        ("job_file", None, FREE, "m"),
        ("nothing_fits", None, FREE, "m"),
        ("deadline", None, FREE, "m"),
        ("device_oom", 1, FREE, "m"),
        ("device_oom", None, FREE, "m"),
        (
            "device_oom",
            8,
            Settings(memory_bytes=GIB, memory_max_bytes=None, micro_batch_fixed=True),
            "m",
        ),
        (
            "host_oom",
            None,
            Settings(memory_bytes=16 * GIB, memory_max_bytes=None),
            "kubernetes.memory_max would let it",
        ),
        (
            "host_oom",
            None,
            Settings(memory_bytes=40 * GIB, memory_max_bytes=40 * GIB),
            "it had all that kubernetes.memory_max allows (40GiB)",
        ),
    ],
)
def test_what_is_not(
    failure: Failure, size: int | None, settings: Settings, said: str
) -> None:
    found = decide(end(failure, 5, size), settings, used=0, most=10)
    assert isinstance(found, GiveUp)
    assert found.exit_code == 5
    assert said in found.reason


@given(
    st.lists(st.sampled_from(get_args(Failure)), min_size=1, max_size=40),
    st.integers(0, 12),
    st.integers(1, 64),
    st.integers(0, 64),
)
def test_it_ends_within_its_bounds(
    failures: list[Failure], most: int, memory: int, more: int
) -> None:
    """However a job fails: at most so often, never beyond the memory that is allowed,
    and each time with more memory, a smaller micro-batch, or for a cause outside."""
    settings = Settings(
        memory_bytes=memory * GIB, memory_max_bytes=(memory + more) * GIB
    )
    used, size = 0, 64
    for failure in failures:
        found = decide(end(failure, size=size), settings, used=used, most=most)
        if isinstance(found, GiveUp):
            break
        used += 1
        if failure == "host_oom":
            assert found.memory_bytes is not None
            assert settings.memory_bytes < found.memory_bytes <= (memory + more) * GIB
            settings = Settings(
                memory_bytes=found.memory_bytes,
                memory_max_bytes=settings.memory_max_bytes,
            )
        elif failure == "device_oom":
            assert found.micro_batch_max is not None
            assert 1 <= found.micro_batch_max < size
            size = found.micro_batch_max
        else:
            assert failure in ("evicted", "stopped", "killed")
            assert not found.overrides
    assert used <= most


@given(st.integers(1, 10**6), st.integers(1, 2**20))
def test_overrides_are_read_as_they_are_meant(mib: int, size: int) -> None:
    found = Resubmit(reason="", memory_bytes=mib * 2**20, micro_batch_max=size)
    text = "name: a\nscript: t.py\nkubernetes: {image: x, shm: 1MiB, memory: 2MiB}\n"
    examined = jobfile.examine(
        text, filename="j", overrides=found.overrides, environment={}
    )
    assert examined.values["kubernetes.memory"] == mib * 2**20
    if mib > 1:
        assert examined.spec is not None
        assert examined.spec.batch.micro.size == size  # type: ignore[union-attr]


def test_a_lever_is_pulled_once() -> None:
    pulled = replace(LISTED, pulled=("recompute", "host_pipeline"))
    found = decide(end("host_oom", 137), pulled, used=0, most=10)
    assert isinstance(found, GiveUp)
    # Or the run had pulled it itself, and has said so.
    said = replace(end("host_oom", 1), levers=("host_pipeline",))
    found = decide(said, LISTED, used=0, most=10)
    assert isinstance(found, GiveUp)
    assert "kubernetes.memory_max would let it" in found.reason


def test_pulled_levers_are_read_as_they_are_meant() -> None:
    found = Resubmit(reason="", pulled=("recompute", "host_pipeline"))
    text = "name: a\nscript: t.py\nrecovery: {levers: [host_pipeline]}\n"
    spec = jobfile.load(text, filename="j", overrides=found.overrides, environment={})
    assert spec.recovery.pulled == ("recompute", "host_pipeline")
    assert spec.recovery.left == ()


def failed_job(status: dict[str, Any], reason: str = "PodFailurePolicy") -> Any:
    job = {
        "kind": "Job",
        "metadata": {"name": "j", "uid": "u"},
        "status": {
            "conditions": [{"type": "Failed", "status": "True", "reason": reason}]
        },
    }
    pod = {"metadata": {"name": "j-0-a"}, "status": {"phase": "Failed", **status}}
    found = ending(job, [pod], standing(job, [pod]))
    assert found is not None
    return found


def terminated(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    said = {"exitCode": code, "reason": reason, "message": message}
    return {"containerStatuses": [{"name": "worker", "state": {"terminated": said}}]}


SAID = last_words.of_state(
    JobState(state="failed", last_cause="device_oom", micro_batch_failed=8),
    1,
    "no restart is left",
)
HOST = last_words.of_state(
    JobState(last_cause="host_oom", levers=("host_pipeline",)), 1, "host memory ran out"
)
PREEMPTED = {"conditions": [{"type": "DisruptionTarget", "status": "True"}]}


@pytest.mark.parametrize(
    ("status", "failure", "code", "said"),
    [
        (terminated(137, "OOMKilled"), "host_oom", 137, "for host memory"),
        (terminated(137), "killed", 137, "SIGKILL"),
        ({"reason": "Evicted", "message": "low on memory"}, "evicted", 4, "low on"),
        ({**terminated(143), **PREEMPTED}, "evicted", 143, "signal 15"),
        (terminated(1), "training", 1, "the training failed"),
        (terminated(1, message=SAID), "device_oom", 1, "no restart is left"),
        (terminated(1, message=HOST), "host_oom", 1, "host memory ran out"),
        (terminated(2), "job_file", 2, "the job file"),
        (terminated(3), "nothing_fits", 3, "nothing fits"),
        (terminated(3, message=SAID), "device_oom", 3, "no restart is left"),
        (terminated(75), "stopped", 75, "was stopped"),
        (terminated(143), "killed", 143, "signal 15"),
        (terminated(4), "killed", 4, "the machine or oomrun itself"),
    ],
)
def test_why_it_failed(
    status: dict[str, Any], failure: Failure, code: int, said: str
) -> None:
    found = failed_job(status)
    assert (found.failure, found.exit_code) == (failure, code)
    assert said in found.message
    if status == terminated(1, message=SAID):
        assert found.micro_batch_failed == 8
    wanted = ("host_pipeline",) if status == terminated(1, message=HOST) else ()
    assert found.levers == wanted


def test_a_deadline_is_nobody_s_failure() -> None:
    assert failed_job(terminated(143), "DeadlineExceeded").failure == "deadline"


def test_what_has_not_failed() -> None:
    job = {"metadata": {"uid": "u"}, "status": {}}
    assert ending(job, [], standing(job, [])) is None


@given(st.text(max_size=5000), st.integers(0, 255))
def test_last_words_fit_into_what_is_kept(reason: str, code: int) -> None:
    words = last_words.of_error(code, reason)
    assert len(words.encode()) <= 4096
    assert last_words.read(words)["exit_code"] == code


@pytest.mark.parametrize(
    "odd", [None, 1, "", "{", "{}", "[1]", '{"oomrun": 2}', "{" * 5000, "text"]
)
def test_what_is_nobody_s_last_words(odd: object) -> None:
    assert last_words.read(odd) == {}
    assert json.loads(json.dumps(last_words.read(odd))) == {}
