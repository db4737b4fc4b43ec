"""Jobs with a ``command``, through the real command line: any program, real processes.

Covers: a real exhaustion of a real TensorFlow program in a shell script; ends, stops
and kills of small programs. Does not cover: what texts mean (``test_oom_text.py``).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import jobs
import psutil
import pytest

import nvml_library
from oomrun.core import events as ev

EXAMPLE = Path(__file__).parents[2] / "configs" / "command"
# Says that it runs, and ends well when it is told to, like a program that saves.
SAVES = """\
import os, pathlib, signal, sys, time
saved = pathlib.Path(os.environ["OOMRUN_CHECKPOINT_DIR"], "saved")
if saved.exists():
    sys.exit("went on" != saved.read_text())
def save(*_):
    time.sleep(0.2)
    saved.write_text("went on")
    sys.exit(int(sys.argv[1]))
signal.signal(signal.SIGTERM, save)
pathlib.Path("runs-now").touch()
while True:
    signal.pause()
"""


OOM_UNTIL = (
    'echo "batch $0"; if [ "$0" -gt %d ]; then '
    'echo "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"; '
    "exit 1; fi"
)


def make(folder: Path, command: list[str], keys: str = "") -> jobs.Job:
    """A job file with these words and ``program.py`` beside it."""
    folder.mkdir(exist_ok=True)
    text = f"name: {jobs.NAME}\ncommand: {json.dumps(command)}\n{keys}\n{jobs.METRICS}"
    if "devices:" not in keys:
        text += "devices: cpu\n"
    (folder / "job.yaml").write_text(text)
    return jobs.Job(folder)


def shell(folder: Path, script: str, keys: str = "", *words: str) -> jobs.Job:
    return make(folder, ["sh", "-c", script, *words], keys)


def wait_for_file(path: Path, job: jobs.Job) -> str:
    until = time.monotonic() + 60
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < until, job.everything()
        time.sleep(0.05)
    return path.read_text()


def wait_for_running(folder: Path, job: jobs.Job) -> None:
    until = time.monotonic() + 60
    while not (folder / "runs-now").exists():
        assert time.monotonic() < until, job.everything()
        time.sleep(0.05)


def test_the_example_runs_out_of_memory_for_real_and_recovers(tmp_path: Path) -> None:
    for name in ("job.yaml", "train.sh", "train.py"):
        (tmp_path / name).symlink_to(EXAMPLE / name)
    job = jobs.Job(tmp_path)
    code = job.run(
        "--set", "metrics.listen=127.0.0.1:0", "--run-dir", f"runs/{jobs.NAME}",
        env={"PYTHON": sys.executable, "TF_CPP_MIN_LOG_LEVEL": "1"},
    )  # fmt: skip
    assert code == 0, job.everything()
    status = job.status()
    assert (status["state"], status["exit_code"]) == ("completed", 0)
    assert status["restarts"]["oom"] == status["oom_events"] == 1
    assert status["devices"][0]["micro_batch_size"] == 128
    assert (status["step"], status["samples"], status["epoch"]) == (None, None, None)
    (oom,) = job.events(ev.OomOccurred)
    assert (oom.kind, oom.phase, oom.recovery) == ("device", "unknown", "restart")
    assert oom.micro_batch_size == 256
    assert "OOM when allocating tensor" in oom.message
    decisions = [d.action for d in job.events(ev.DecisionMade)]
    assert decisions == ["restart", "finish"]
    assert "training with a micro-batch of 256" in job.log(1)
    assert "training with a micro-batch of 128" in job.log(2)
    assert "epoch 2, loss" in job.log(2)
    assert (tmp_path / "weights.npz").exists()
    assert jobs.gone(job)


def test_what_a_program_is_told(tmp_path: Path) -> None:
    script = "import os; print(os.environ, os.listdir('/proc/self/fd'))"
    job = make(
        tmp_path,
        [sys.executable, "-c", script, "{accumulation_steps}", "{{x}}"],
        "env: {MINE: 'b{micro_batch}'}\nbatch: {global: 12, micro: {max: 5}}",
    )
    assert job.run() == 0, job.everything()
    log = job.log(1)
    for name, value in {
        "OOMRUN_MICRO_BATCH": "4", "OOMRUN_GLOBAL_BATCH": "12", "MINE": "b4",
        "OOMRUN_ACCUMULATION_STEPS": "3", "OOMRUN_ATTEMPT": "1",
        "OOMRUN_CHECKPOINT_DIR": str(job.run_dir.checkpoints),
    }.items():  # fmt: skip
        assert f"'{name}': '{value}'" in log
    assert "OOMRUN_CHANNEL_FD" not in log
    assert "OOMRUN_LAUNCH_FILE" not in log
    # Its three streams, and the folder that it lists.
    assert log.rstrip().endswith("['0', '1', '2', '3']")
    launch = json.loads(job.run_dir.attempt(1).launch().read_text())
    assert launch["args"][-2:] == ["3", "{x}"]


def test_a_program_sees_the_one_gpu_that_was_chosen(tmp_path: Path) -> None:
    library = nvml_library.build(tmp_path / "nvml")
    machine = nvml_library.Machine(library, tmp_path / "machine", gpus=2)
    script = 'echo "$CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER"'
    job = shell(
        tmp_path,
        f"{script}; " + OOM_UNTIL % 32,
        "batch: {global: 64}\ndevices: [1]\nmemory: {limit: 20GiB}",
        "{micro_batch}",
    )
    env = machine.environment()
    assert job.run(env=env) == 0, job.everything()
    for attempt in (1, 2):
        assert f"{nvml_library.uuid(1)} PCI_BUS_ID" in job.log(attempt)
    (oom,) = job.events(ev.OomOccurred)
    assert (oom.device, oom.micro_batch_size) == (nvml_library.uuid(1), 64)
    assert "no limit can be set on a GPU for a command" in str(job.status()["notes"])


def test_the_micro_batch_shrinks_over_divisors(tmp_path: Path) -> None:
    job = shell(tmp_path, OOM_UNTIL % 10, "batch: {global: 100}", "{micro_batch}")
    assert job.run() == 0, job.everything()
    told = [event.plan["devices"][0] for event in job.events(ev.AttemptStarted)]
    assert [d["micro_batch_size"] for d in told] == [100, 50, 25, 10]
    assert [d["accumulation_steps"] for d in told] == [1, 2, 4, 10]
    assert "batch 10" in job.log(4)
    assert job.run() == 0
    assert len(job.events(ev.AttemptStarted)) == 4  # it was complete


@pytest.mark.parametrize(
    ("keys", "attempts", "said"),
    [
        ("batch: {global: 2}", 2, "even one sample at a time does not fit"),
        ("batch: {global: 8, micro: 4}", 1, "batch.micro is a fixed number"),
    ],
)
def test_where_nothing_fits_the_code_is_3(
    tmp_path: Path, keys: str, attempts: int, said: str
) -> None:
    job = shell(tmp_path, OOM_UNTIL % 0, keys, "{micro_batch}")
    assert job.run() == 3, job.everything()
    assert len(job.events(ev.AttemptStarted)) == attempts
    assert said in job.said()


def test_the_budget_of_oom_restarts_holds(tmp_path: Path) -> None:
    keys = "batch: {global: 64}\nrecovery: {max_restarts: {oom: 2}}"
    job = shell(tmp_path, OOM_UNTIL % 0, keys, "{micro_batch}")
    assert job.run() == 1, job.everything()
    assert len(job.events(ev.AttemptStarted)) == 3
    assert "no restart is left (recovery.max_restarts.oom: 2)" in job.said()


def test_a_failed_program_is_code_1_and_its_own_code_is_told(tmp_path: Path) -> None:
    job = shell(tmp_path, "echo bad input; exit 3")
    assert job.run() == 1, job.everything()
    assert "the program exited with 3: bad input" in job.said()
    # The second attempt said the very same: nothing can have moved.
    assert len(job.events(ev.AttemptStarted)) == 2
    assert job.status()["restarts"]["crash"] == 1


def test_other_failures_use_the_budget_of_crashes_up(tmp_path: Path) -> None:
    keys = "recovery: {max_restarts: {crash: 2}}"
    job = shell(tmp_path, 'echo "attempt $OOMRUN_ATTEMPT"; kill -SEGV $$', keys)
    assert job.run() == 1, job.everything()
    assert len(job.events(ev.AttemptStarted)) == 3
    assert "the program died of SIGSEGV: attempt 3; no restart is left" in job.said()
    assert [end.signal for end in job.events(ev.AttemptEnded)] == [signal.SIGSEGV] * 3


def test_a_program_that_is_not_found_is_code_2_at_its_place(tmp_path: Path) -> None:
    job = make(tmp_path, ["no-such-program", "x"])
    assert job.run() == 2
    assert job.said().startswith(
        "job.yaml:2:11: command[0]: no such program in PATH: no-such-program"
    )
    assert not job.run_dir.path.exists()


def test_a_program_that_cannot_be_started_is_code_4(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("neither a script with #! nor a binary\n")
    program.chmod(0o755)
    job = make(tmp_path, ["./program"])
    assert job.run() == 4, job.everything()
    assert f"could not start: oomrun: {program}: Exec format error" in job.said()


@pytest.mark.parametrize("code", ["0", "75", "1"])
def test_sigterm_lets_the_program_save_and_the_next_call_goes_on(
    tmp_path: Path, code: str
) -> None:
    (tmp_path / "program.py").write_text(SAVES)
    job = make(tmp_path, [sys.executable, "program.py", code])
    process = job.start()
    wait_for_running(tmp_path, job)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75, job.everything()
    assert job.status()["state"] == "preempted"
    assert "oomrun: stopped; the same command goes on" in job.said()
    assert (job.run_dir.checkpoints / "saved").exists()
    assert jobs.gone(job)
    assert job.run() == 0, job.everything()
    assert job.status()["restarts"]["preemption"] == 1


def test_what_a_shell_ran_is_told_to_stop_too(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SAVES)
    python = sys.executable
    job = shell(tmp_path, f"{python} program.py 0; echo the shell went on")
    process = job.start()
    wait_for_running(tmp_path, job)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75, job.everything()
    assert (job.run_dir.checkpoints / "saved").exists()
    assert "the shell went on" not in job.log(1)
    assert jobs.gone(job)


def test_a_program_that_does_not_stop_is_killed_after_the_grace(tmp_path: Path) -> None:
    script = "trap '' TERM; touch runs-now; while :; do sleep 60; done"
    job = shell(tmp_path, script)
    process = job.start("--grace", "1s")
    wait_for_running(tmp_path, job)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75, job.everything()
    assert jobs.gone(job)
    assert job.events(ev.AttemptEnded)[0].cause == "preemption"


# Its own child, one that left the group, and one that left group and environment.
FAMILY = """\
sleep 600 & one=$!
setsid sleep 600 & two=$!
env -i setsid sleep 600 & three=$!
echo $$ $one $two $three > pids
wait
"""


def family(folder: Path, job: jobs.Job) -> list[psutil.Process]:
    pids = wait_for_file(folder / "pids", job).split()
    return [psutil.Process(int(pid)) for pid in pids]


def all_gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=10)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def test_a_killed_supervisor_leaves_nothing_behind(tmp_path: Path) -> None:
    job = shell(tmp_path, FAMILY)
    process = job.start()
    processes = family(tmp_path, job)
    guard = psutil.Process(job.wait_for(ev.AttemptStarted).pids[0])
    process.kill()
    process.wait()
    assert all_gone([guard, *processes])
    assert job.processes() == []


def test_a_killed_guard_takes_the_program_along(tmp_path: Path) -> None:
    job = shell(tmp_path, FAMILY, "recovery: {max_restarts: {crash: 0}}")
    process = job.start()
    processes = family(tmp_path, job)
    os.kill(job.wait_for(ev.AttemptStarted).pids[0], signal.SIGKILL)
    assert process.wait(60) == 1, job.everything()
    assert all_gone(processes)
    assert job.events(ev.AttemptEnded)[0].cause == "killed"


def test_a_program_that_ends_leaves_nothing_behind(tmp_path: Path) -> None:
    job = shell(tmp_path, FAMILY.replace("wait\n", "exit 0\n"))
    assert job.run() == 0, job.everything()
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
