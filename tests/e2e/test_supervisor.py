"""The real supervisor loop with workers that die, hang, flood and hide."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from killable import JOB, QUICK, causes, events, of_this_run

from oomrun import journal
from oomrun.core import events as ev
from oomrun.core.errors import SpecError
from oomrun.core.jobfile import load
from oomrun.core.state import replay
from oomrun.rundir import RunDir
from oomrun.supervisor import Outcome
from oomrun.watched import Timing

# --- how workers end ----------------------------------------------------------------


def test_a_worker_that_finishes(run: Callable[..., Outcome], folder: Path) -> None:
    outcome = run("finishes")
    assert (outcome.exit_code, outcome.state.state) == (0, "completed")
    assert outcome.state.step == 5
    assert outcome.state == replay(events(folder))
    attempt = RunDir(folder / "runs" / "killable").attempt(1)
    assert json.loads(attempt.plan.read_text())["strategy"] == "single"
    assert attempt.log().exists()


def test_a_completed_run_is_left_alone(
    run: Callable[..., Outcome], folder: Path
) -> None:
    run("finishes")
    before = events(folder)
    again = run("raises")
    assert (again.exit_code, again.already) == (0, True)
    assert events(folder) == before


def test_a_script_that_raises_before_any_step_is_not_run_again(
    run: Callable[..., Outcome], folder: Path
) -> None:
    outcome = run("raises")
    assert (outcome.exit_code, outcome.state.state) == (1, "failed")
    assert "ValueError at t.py:3: no" in outcome.reason
    assert outcome.state.attempt == 1


def test_a_failed_run_gets_new_budgets_and_keeps_its_seed(
    run: Callable[..., Outcome], folder: Path
) -> None:
    first = run("raises")
    second = run("finishes")
    assert second.exit_code == 0
    assert second.state.seed == first.state.seed
    assert second.state.run_id == first.state.run_id
    assert second.state.attempt == 2


def test_dying_without_a_report_uses_up_the_crash_budget(
    run: Callable[..., Outcome], folder: Path
) -> None:
    text = JOB + "recovery: {max_restarts: {crash: 1}}\n"
    outcome = run("exits-silently", text=text)
    assert outcome.exit_code == 1
    assert causes(folder) == ["crash", "crash"]
    assert "recovery.max_restarts.crash: 1" in outcome.reason


def test_a_worker_that_cannot_start(run: Callable[..., Outcome], folder: Path) -> None:
    outcome = run("broken-start")
    assert (outcome.exit_code, causes(folder)) == (4, ["misconfiguration"])


def test_a_killed_worker_is_started_again_where_it_was(
    run: Callable[..., Outcome], folder: Path
) -> None:
    outcome = run("kills-itself-once")
    assert outcome.exit_code == 0
    assert causes(folder) == ["killed", "finished"]
    steps = [e.step for e in events(folder) if isinstance(e, ev.Progressed)]
    # The worker that goes on tells the step that it begins with.
    assert list(dict.fromkeys(steps)) == [1, 2, 3, 4, 5]


def test_each_oom_restart_changes_the_micro_batch(
    run: Callable[..., Outcome], folder: Path
) -> None:
    outcome = run("ooms-above-2")
    assert outcome.exit_code == 0
    starts = [e for e in events(folder) if isinstance(e, ev.AttemptStarted)]
    sizes = [start.plan["devices"][0]["micro_batch_size"] for start in starts]
    assert sizes == [8, 4, 2]
    assert outcome.state.restarts["oom"] == 2


def test_a_fixed_micro_batch_is_not_changed(
    run: Callable[..., Outcome], folder: Path
) -> None:
    outcome = run("ooms-above-2", text=JOB.replace("global: 8", "global: 8, micro: 4"))
    assert outcome.exit_code == 3
    assert "batch.micro is a fixed number" in outcome.reason
    assert outcome.state.attempt == 1


def test_what_a_worker_reported_counts_not_its_last_breath(
    run: Callable[..., Outcome],
) -> None:
    assert run("aborts-after-report").exit_code == 0


def test_a_process_that_does_not_end_after_its_script_is_ended(
    run: Callable[..., Outcome],
) -> None:
    outcome = run("lingers")
    assert outcome.exit_code == 0
    assert "SIGTERM ended its process before its threads" in outcome.reason


def test_a_silent_worker_hangs_where_silence_is_limited(
    run: Callable[..., Outcome], folder: Path
) -> None:
    # Its Python may take long to start: until then it is silent, too.
    quiet = Timing(kill_after_s=0.3, hang_after=5.0, dump_s=5.0)
    text = JOB + "recovery: {max_restarts: {hang: 1}}\n"
    outcome = run("hangs", text=text, timing=quiet)
    assert (outcome.exit_code, causes(folder)) == (1, ["hang", "hang"])
    attempt = RunDir(folder / "runs" / "killable").attempt(1)
    log = attempt.log(0).read_text()
    assert "in forever" in log, "it says where it hangs"


@pytest.mark.parametrize("days", [24, 25, 31])
def test_any_patience_can_be_waited_for(run: Callable[..., Outcome], days: int) -> None:
    """The kernel takes no wait of more milliseconds than 31 bits have."""
    text = JOB + f"recovery: {{hang_after: {days}d}}\n"
    spec = load(text, filename="job.yaml", environment={})
    timing = replace(QUICK, hang_after=spec.recovery.hang_after)
    assert run("finishes", text=text, timing=timing).exit_code == 0


@pytest.mark.parametrize("mode", ["grandchildren", "grandchild-holds-channel"])
def test_nothing_of_a_run_outlives_it(
    run: Callable[..., Outcome], folder: Path, mode: str
) -> None:
    assert run(mode).exit_code == 0
    assert of_this_run(folder) == []


# --- what comes down the channel ----------------------------------------------------


def test_a_flood_of_progress_is_seen_whole_and_journaled_in_short(
    run: Callable[..., Outcome], folder: Path
) -> None:
    seen = []
    slow = Timing(progress_every_s=3600.0)
    outcome = run("floods", timing=slow, observers=[lambda _, e: seen.append(e)])
    assert outcome.exit_code == 0
    assert sum(isinstance(e, ev.Progressed) for e in seen) == 5000
    kept = [e for e in events(folder) if isinstance(e, ev.Progressed)]
    assert len(kept) == 2
    assert sum(e.window_steps for e in kept) == 5000
    replayed = replay(events(folder))
    assert (replayed.step, replayed.peaks) == (5000, {"cpu:0": 6000})
    assert replayed.steps_timed == outcome.state.steps_timed


def test_garbage_is_left_out(run: Callable[..., Outcome], folder: Path) -> None:
    outcome = run("garbage")
    assert (outcome.exit_code, outcome.state.step) == (0, 5)
    ends = [e for e in events(folder) if isinstance(e, ev.RunEnded)]
    assert [end.reason for end in ends] == ["the script finished"]


def test_an_observer_that_fails_does_not_end_the_run(
    run: Callable[..., Outcome],
) -> None:
    def broken(_state: object, _event: object) -> None:
        raise RuntimeError("the view is broken")

    assert run("finishes", observers=[broken]).exit_code == 0


def test_the_output_is_in_the_log(run: Callable[..., Outcome], folder: Path) -> None:
    run("prints", text=JOB + "recovery: {max_restarts: {crash: 0}}\n")
    log = RunDir(folder / "runs" / "killable").attempt(1).log().read_text()
    assert log.endswith("tail of the output\n")


# --- which run it is ----------------------------------------------------------------


def test_other_mathematics_are_refused_by_name(
    run: Callable[..., Outcome], folder: Path
) -> None:
    run("raises")
    with pytest.raises(SpecError) as caught:
        run("finishes", text=JOB.replace("global: 8", "global: 16"))
    assert [p.path for p in caught.value.problems] == ["batch.global"]
    outcome = run(
        "finishes", text=JOB.replace("global: 8", "global: 16"), allow_changes=True
    )
    assert outcome.exit_code == 0


def test_fresh_sets_the_old_run_aside(
    run: Callable[..., Outcome], folder: Path
) -> None:
    first = run("finishes")
    second = run("finishes", fresh=True)
    assert second.state.run_id != first.state.run_id
    assert second.state.attempt == 1
    aside = RunDir(folder / "runs" / "killable.1")
    assert replay(journal.read(aside.journal)).run_id == first.state.run_id


@pytest.mark.parametrize(
    ("directory", "holds"),
    [
        (".", "the folder that oomrun was called in"),
        ("..", "the folder that oomrun was called in"),
        ("runs", "the run's own folder"),
        ("link", "the run's own folder"),
        ("conf", "the job file"),
    ],
)
def test_fresh_renames_nothing_that_is_not_the_runs(
    run: Callable[..., Outcome], folder: Path, directory: str, holds: str
) -> None:
    (folder / "link").symlink_to("runs")
    text = JOB + f"checkpoint: {{dir: {folder / directory}}}\n"
    file = folder / ("conf/job.yaml" if directory == "conf" else "job.yaml")
    file.parent.mkdir(exist_ok=True)
    run("finishes", text=text, job_file=file)
    before = sorted(folder.rglob("*"))
    with pytest.raises(SpecError, match=f"holds {holds}, and --fresh would rename"):
        run("finishes", text=text, job_file=file, fresh=True)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("place", [".", "../{name}", "{folder}"])
def test_fresh_does_not_rename_the_folder_it_is_called_in(
    run: Callable[..., Outcome], folder: Path, place: str
) -> None:
    run_dir = RunDir(Path(place.format(name=folder.name, folder=folder)))
    run("finishes", run_dir=run_dir)
    with pytest.raises(SpecError, match=r"--run-dir: .* holds the folder that oomrun"):
        run("finishes", run_dir=run_dir, fresh=True)
    assert replay(journal.read(run_dir.journal)).state == "completed"


def test_another_keras_backend_is_refused(
    run: Callable[..., Outcome], folder: Path
) -> None:
    with pytest.raises(SpecError, match="jax"):
        run("finishes", text=JOB + "env: {KERAS_BACKEND: jax}\n")


# --- when the supervisor dies ---------------------------------------------------------


def test_a_journal_torn_anywhere_is_taken_up(
    folder: Path, run: Callable[..., Outcome]
) -> None:
    run("kills-itself-once")
    path = RunDir(folder / "runs" / "killable").journal
    whole = path.read_bytes()
    states = {len(whole): "completed"}
    for cut in range(max(0, len(whole) - 2048), len(whole)):
        path.write_bytes(whole[:cut])
        with journal.Journal(path) as opened:
            states[cut] = replay(opened.events).state
            assert path.read_bytes() == whole[: whole.rfind(b"\n", 0, cut) + 1]
    assert set(states.values()) <= {
        "starting", "training", "recovering", "completed", "pending",
    }  # fmt: skip
    # One cut in each line goes through the whole supervisor.
    for cut in [n for n in states if n < len(whole) and whole[n : n + 1] == b"\n"]:
        path.write_bytes(whole[:cut])
        assert run("finishes").exit_code == 0


class KilledError(BaseException):
    """Ends a supervisor at a chosen event, as close to SIGKILL as one process gets."""


def test_a_supervisor_killed_after_any_event_ends_the_run_the_same(
    run: Callable[..., Outcome], folder: Path
) -> None:
    """One run whose every supervisor dies one event later than the one before."""
    lives, done = 1, False
    while not done:
        left = [lives]

        def die(_state: object, _event: object, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise KilledError

        try:
            assert run("ooms-above-2", observers=[die]).exit_code == 0
            done = True
        except KilledError:
            lives += 1
    state = replay(events(folder))
    assert (state.state, state.step, state.restarts["oom"]) == ("completed", 5, 2)
    assert state.attempt > 3
    assert of_this_run(folder) == []
