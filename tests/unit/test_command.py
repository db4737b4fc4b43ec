"""Commands: templates, divisors, what the job file may say, what follows an end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oomrun.cli.jobfile_commands import load_job_file
from oomrun.core import command, jobfile
from oomrun.core.diagnosis import Cause, Diagnosis
from oomrun.core.errors import SpecError
from oomrun.core.plan import Plan
from oomrun.core.planning import make_plan
from oomrun.core.policy import Fail, Limits, Restart, decide
from oomrun.core.spec import Command, JobSpec, mathematics
from oomrun.core.state import JobState
from oomrun.core.topology import Device, Host, Inventory
from oomrun.environment import command_environment

GIB = 2**30
VALUES = {"micro_batch": 8, "global_batch": 64, "accumulation_steps": 8}


def load(text: str, **environment: str) -> JobSpec:
    return jobfile.load(
        f"name: x\n{text}\n", filename="job.yaml", environment=environment
    )


def lines(text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load(text)
    return [str(problem) for problem in caught.value.problems]


# --- templates ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("plain", "plain"),
        ("{micro_batch}", "8"),
        ("--batch={micro_batch}x{accumulation_steps}/{global_batch}", "--batch=8x8/64"),
        ("{{micro_batch}}", "{micro_batch}"),
        ("{{{micro_batch}}}", "{8}"),
        ('{{"a": {{}}}}', '{"a": {}}'),
        ("$HOME *.py `x`", "$HOME *.py `x`"),
    ],
)
def test_templates(text: str, filled: str) -> None:
    assert list(command.mistakes(text)) == []
    assert command.fill(text, VALUES) == filled


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{micro}", ["{micro}"]),
        ("{}", ["{}"]),
        ("{micro_batch:d}", ["{micro_batch:d}"]),
        ("{ micro_batch }", ["{ micro_batch }"]),
        ("a}b", ["}"]),
        ("{", ["{"]),
        ("{a {b}", ["{", "{b}"]),
        ("{{a}", ["}"]),
    ],
)
def test_what_is_no_template(text: str, found: list[str]) -> None:
    assert list(command.mistakes(text)) == found


@pytest.mark.parametrize(
    ("whole", "at_most", "largest"),
    [
        (100, 100, 100), (100, 64, 50), (100, 12, 10), (96, 7, 6), (97, 96, 1),
        (1, 1, 1), (2**31 - 1, 1000, 1), (2**30, 2**29 + 1, 2**29),
    ],
)  # fmt: skip
def test_divisors(whole: int, at_most: int, largest: int) -> None:
    assert command.divisor(whole, at_most) == largest


# --- the job file -------------------------------------------------------------------

BATCH = "batch: {global: 64}"


def test_a_command_is_read_as_templates() -> None:
    spec = load(
        "command: [python, '{micro_batch}', '${J}', '$${HOME}', 5]\n"
        f"env: {{A: '${{J}}{{global_batch}}'}}\n{BATCH}",
        J='{"a": 1}',
    )
    assert isinstance(spec.program, Command)
    filled = [command.fill(word, VALUES) for word in spec.program.argv]
    # What comes from the environment is never a template.
    assert filled == ["python", "8", '{"a": 1}', "${HOME}", "5"]
    (name, text) = spec.env[0]
    assert (name, command.fill(text, VALUES)) == ("A", '{"a": 1}64')


def test_braces_mean_nothing_in_other_jobs() -> None:
    spec = load("script: x.py\nargs: ['{micro}']\nenv: {A: '{b} }'}")
    assert spec.env == (("A", "{b} }"),)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"command: [a, '{{micro_bach}}']\n{BATCH}",
            "2:14: command[1]: expected {micro_batch}, {global_batch} or "
            "{accumulation_steps}, got {micro_bach} (did you mean micro_batch?)",
        ),
        (
            f"command: [a]\nenv: {{B: 'x{{'}}\n{BATCH}",
            "3:10: env.B: expected {micro_batch}, {global_batch} or "
            "{accumulation_steps}, got { (write {{ and }} for braces that are meant "
            "as text)",
        ),
        (
            "command: [a, '{micro_batch}']",
            "2:14: command[1]: a command that takes micro-batches needs batch.global "
            "(such as batch: {global: 256})",
        ),
        (
            "command: [a]\nbatch: {micro: {max: 4}}",
            "3:22: batch.micro.max: a command that takes micro-batches needs "
            "batch.global (such as batch: {global: 256})",
        ),
        (
            "command: [a]\nbatch: {global: 100, micro: 30}",
            "3:29: batch.micro: expected a divisor of batch.global (100), got 30 "
            "(such as 25 or 50)",
        ),
        (
            "command: [a]\ncheckpoint: {keep: 3}",
            "3:14: checkpoint.keep: a command does this by itself, so the key would "
            "have no effect (remove it)",
        ),
        (
            "command: [a]\nbatch: {global: none}",
            "3:17: batch.global: expected auto or a number of samples, got 'none'",
        ),
    ],
)
def test_problems(text: str, expected: str) -> None:
    assert lines(text) == [f"job.yaml:{expected}"]


def test_the_mathematics_are_the_template() -> None:
    known = mathematics(load(f"command: [a, '{{micro_batch}}']\n{BATCH}"))
    assert known["program"] == {"command": ["a", "{micro_batch}"]}
    assert known["batch.global"] == 64


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("no-such-program", "no such program in PATH: no-such-program (write ./"),
        ("./missing.sh", "no such file: jobs/missing.sh (paths are relative"),
        ("./plain.sh", "not executable: jobs/plain.sh (chmod +x jobs/plain.sh)"),
        ("./folder", "no such file: jobs/folder"),
        ("''", "no such program in PATH: "),
    ],
)
def test_a_program_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs/folder").mkdir(parents=True)
    (tmp_path / "jobs/plain.sh").write_text("#!/bin/sh\n")
    job = tmp_path / "jobs/job.yaml"
    job.write_text(f"name: x\ncommand: [{word}, 1]\n")
    with pytest.raises(SpecError) as caught:
        load_job_file("jobs/job.yaml")
    (problem,) = caught.value.problems
    assert str(problem).startswith(f"jobs/job.yaml:2:11: command[0]: {message}")
    assert caught.value.exit_code == 2


def test_a_program_is_looked_up_where_it_will_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("beside.sh", "bin/found"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    for words in ("[./beside.sh]", f"[found]\nenv: {{PATH: {tmp_path}/bin}}"):
        (tmp_path / "job.yaml").write_text(f"name: x\ncommand: {words}\n")
        assert load_job_file("job.yaml").name == "x"


# --- the plan -----------------------------------------------------------------------

CPU = Device(
    id="cpu:0", kind="cpu", name="CPU", total_bytes=16 * GIB, free_bytes=8 * GIB
)
GPU = Device(
    id="GPU-1", kind="gpu", name="GPU", total_bytes=16 * GIB, free_bytes=9 * GIB
)
HOST = Host(memory_total_bytes=16 * GIB, memory_available_bytes=8 * GIB)


def plan(settings: str, *gpus: Device, **known: Any) -> Plan:
    spec = load(f"command: [a, '{{micro_batch}}']\n{settings}")
    machine = Inventory(devices=(*gpus, CPU), host=HOST)
    return make_plan(spec, machine, replace(JobState(), **known))


@pytest.mark.parametrize(
    ("batch", "known", "micro"),
    [
        ("{global: 100}", {}, 100),
        ("{global: 100, micro: 25}", {}, 25),
        ("{global: 100, micro: {max: 64}}", {}, 50),
        ("{global: 97, micro: {max: 64}}", {}, 1),
        ("{global: 100}", {"micro_batch_failed": 100, "micro_batch_limit": 50}, 50),
        ("{global: 100}", {"micro_batch_failed": 25}, 10),
    ],
)
def test_the_micro_batch_divides(batch: str, known: dict[str, int], micro: int) -> None:
    made = plan(f"batch: {batch}", **known)
    (device,) = made.devices
    assert device.micro_batch_size == micro
    whole = made.global_batch_size
    assert whole is not None
    assert command.values(made) == {
        "micro_batch": micro,
        "global_batch": whole,
        "accumulation_steps": whole // micro,
    }


def test_a_smaller_micro_batch_says_why() -> None:
    notes = plan("batch: {global: 100, micro: {max: 64}}").notes
    assert (
        "micro-batch 50 since a command's must divide the global batch (100), which 64 "
        "does not"
    ) in notes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("command: [a]", "batch.global is not set, so the program is told no"),
        (f"command: [a]\n{BATCH}", "must read OOMRUN_MICRO_BATCH"),
        ("command: [a]\nmemory: {limit: 1GiB}\ndevices: cpu", "with TensorFlow only"),
        ("command: [a]\nmemory: {limit: 1GiB}\ndevices: gpu", "no limit can be set"),
        ("command: [a]", "steps and peaks cannot be seen"),
    ],
)
def test_notes(text: str, said: str) -> None:
    machine = Inventory(devices=(GPU, CPU), host=HOST)
    notes = make_plan(load(text), machine, JobState()).notes
    assert any(said in note for note in notes), notes


def test_a_program_without_a_batch_is_told_none() -> None:
    made = make_plan(
        load("command: [a]"), Inventory(devices=(CPU,), host=HOST), JobState()
    )
    assert command.values(made) == {}
    assert command.variables(made, 3, "/c") == {
        "OOMRUN_ATTEMPT": "3",
        "OOMRUN_CHECKPOINT_DIR": "/c",
    }


def environment(made: Plan, **base: str) -> dict[str, str]:
    told = command.variables(made, 1, "/c")
    return command_environment(base, told, made, run_id="r", launch_file=Path("/l"))


def test_the_environment_on_a_cpu() -> None:
    made = plan(f"{BATCH}\ndevices: {{cpu: 1, memory: 300MiB}}")
    env = environment(made, KERAS_BACKEND="torch", OOMRUN_MICRO_BATCH="7")
    assert env["TF_CPU_BFC_MEM_LIMIT_IN_MB"] == "300"
    assert env["CUDA_VISIBLE_DEVICES"] == "-1"
    assert env["KERAS_BACKEND"] == "torch"
    assert env["OOMRUN_MICRO_BATCH"] == env["OOMRUN_GLOBAL_BATCH"] == "64"
    assert "PYTHONHASHSEED" not in env
    assert "PYTHONPATH" not in env


def test_an_outer_run_s_numbers_are_not_passed_on() -> None:
    made = make_plan(
        load("command: [a]"), Inventory(devices=(CPU,), host=HOST), JobState()
    )
    assert "OOMRUN_MICRO_BATCH" not in environment(made, OOMRUN_MICRO_BATCH="7")


@pytest.mark.parametrize(
    ("mode", "grows"), [("growth", "true"), ("preallocate", "false")]
)
def test_the_environment_on_a_gpu(mode: str, grows: str) -> None:
    env = environment(plan(f"{BATCH}\nmemory: {{mode: {mode}}}", GPU))
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert env["TF_FORCE_GPU_ALLOW_GROWTH"] == grows


# --- what follows an end ------------------------------------------------------------

LIMITS = Limits(
    max_restarts={"oom": 10, "crash": 3, "preemption": None, "hang": 3}, command=True
)
OOM = Diagnosis(cause=Cause.DEVICE_OOM, summary="GPU-1 ran out of memory (x)")


def test_an_oom_halves_to_a_divisor_down_to_one() -> None:
    state, sizes = replace(JobState(), global_batch_size=100), [100]
    while True:
        decision = decide(OOM, replace(state, micro_batch_failed=sizes[-1]), LIMITS)
        if not isinstance(decision, Restart):
            break
        assert decision.micro_batch_size is not None
        sizes.append(decision.micro_batch_size)
    assert sizes == [100, 50, 25, 10, 5, 2, 1]
    assert isinstance(decision, Fail)
    assert decision.exit_code == 3


@pytest.mark.parametrize(
    ("limits", "failed", "said"),
    [
        (replace(LIMITS, micro_batch_fixed=True), 8, "batch.micro is a fixed number"),
        (replace(LIMITS, levers=()), 8, "recovery.levers allows no change"),
        (LIMITS, None, "with batch.global and {micro_batch}"),
    ],
)
def test_what_cannot_shrink_ends_with_3(
    limits: Limits, failed: int | None, said: str
) -> None:
    decision = decide(OOM, replace(JobState(), micro_batch_failed=failed), limits)
    assert isinstance(decision, Fail)
    assert decision.exit_code == 3
    assert said in decision.reason


def test_a_crash_is_tried_again_unless_it_is_the_same_to_the_last_byte() -> None:
    crash = Diagnosis(cause=Cause.CRASH, summary="the program exited with 3")
    again = replace(crash, repeated=True)
    first, second = (
        replace(JobState(), budget_used={**JobState().budget_used, "crash": used})
        for used in (0, 1)
    )
    assert isinstance(decide(crash, first, LIMITS), Restart)
    assert isinstance(decide(crash, second, LIMITS), Restart)
    # Its output may be that of an attempt that ran out of memory; it has its own turn.
    assert isinstance(decide(again, first, LIMITS), Restart)
    ended = decide(again, second, LIMITS)
    assert isinstance(ended, Fail)
    assert ended.exit_code == 1
