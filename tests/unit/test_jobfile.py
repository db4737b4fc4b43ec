"""The job file: what it means, and every problem at its place."""

from collections.abc import Mapping, Sequence

import pytest

from oomrun import __version__
from oomrun.core import jobfile
from oomrun.core.errors import Problem, SpecError
from oomrun.core.jobfile import document
from oomrun.core.jobfile.version import VERSION
from oomrun.core.spec import (
    AUTO,
    IN_WORKERS,
    AtMost,
    BatchSpec,
    Bytes,
    CheckpointSpec,
    Cpus,
    EverySeconds,
    EverySteps,
    Gpus,
    JobSpec,
    Listen,
    MemorySpec,
    MetricsSpec,
    Module,
    RecoverySpec,
    RestartLimits,
    Script,
    Share,
    mathematics,
)

MINIMAL = "name: digits\nscript: train.py\n"


def load(
    text: str,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> JobSpec:
    return jobfile.load(
        text,
        filename="job.yaml",
        overrides=overrides,
        environment=environment or {},
    )


def problems(
    text: str,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> list[Problem]:
    with pytest.raises(SpecError) as caught:
        load(text, overrides, environment)
    assert caught.value.exit_code == 2
    return list(caught.value.problems)


def lines(text: str, overrides: Sequence[str] = ()) -> list[str]:
    return [str(problem) for problem in problems(text, overrides)]


def with_keys(text: str) -> JobSpec:
    return load(MINIMAL + text)


# What it means


def test_two_keys_are_enough_and_the_rest_has_defaults() -> None:
    assert load(MINIMAL) == JobSpec(name="digits", program=Script(path="train.py"))


def test_every_default_can_be_written_out() -> None:
    written = with_keys(
        """\
args: []
env: {}
strategy: auto
devices: auto
batch: {global: auto, micro: auto}
memory: {mode: growth, limit: auto, reserve: auto, headroom: 8%}
recovery:
  in_process: auto
  levers: [micro_batch]
  max_restarts: {oom: 10, crash: 3, preemption: unlimited, hang: 3}
  grow_back: true
checkpoint: {every: 5min, keep: 3}
metrics: {listen: "127.0.0.1:9464"}
"""
    )
    assert written == load(MINIMAL)


def test_every_key_away_from_its_default() -> None:
    spec = load(
        """\
name: a1
module: pkg.train
args: [--lr, 1e-3, --n, 5, "on", true-ish]
env: {B: "2", A: 1.50}
strategy: single
devices: [0]
batch: {global: 256, micro: {max: 64}}
memory: {mode: preallocate, limit: [90%], reserve: 1GiB, headroom: 512MiB}
recovery: {in_process: never, levers: [], max_restarts: {oom: unlimited, crash: 0}}
checkpoint: {dir: "out/{name}", every: 500 steps, keep: 1}
metrics: {listen: none}
"""
    )
    assert spec == JobSpec(
        name="a1",
        program=Module(
            name="pkg.train", args=("--lr", "1e-3", "--n", "5", "on", "true-ish")
        ),
        env=(("B", "2"), ("A", "1.50")),
        strategy="single",
        devices=Gpus(ids=(0,)),
        batch=BatchSpec(global_size=256, micro=AtMost(64)),
        memory=MemorySpec(
            mode="preallocate",
            limit=(Share(0.9),),
            reserve=Bytes(2**30),
            headroom=Bytes(512 * 2**20),
        ),
        recovery=RecoverySpec(
            in_process="never",
            levers=(),
            max_restarts=RestartLimits(oom=None, crash=0),
        ),
        checkpoint=CheckpointSpec(directory="out/a1", every=EverySteps(500), keep=1),
        metrics=MetricsSpec(listen=None),
    )


@pytest.mark.parametrize(
    ("text", "hang_after"),
    [("auto", AUTO), ("never", None), ("20min", 1200.0), ("90s", 90.0)],
)
def test_silence(text: str, hang_after: object) -> None:
    spec = with_keys(f"recovery: {{hang_after: {text}}}\n")
    assert spec.recovery.hang_after == hang_after


@pytest.mark.parametrize(
    ("text", "devices", "memory"),
    [
        ("devices: auto", AUTO, MemorySpec()),
        ("devices: gpu", Gpus(), MemorySpec()),
        ("devices: cpu", Cpus(), MemorySpec()),
        ("devices: [GPU-8f6d9a3c]", Gpus(ids=("GPU-8f6d9a3c",)), MemorySpec()),
        ("devices: {cpu: 1}", Cpus(), MemorySpec()),
        (
            "devices: {cpu: 1, memory: 600MiB}",
            Cpus(),
            MemorySpec(mode="limit", limit=Bytes(600 * 2**20)),
        ),
        (
            "devices: {cpu: 1, memory: [600MiB]}",
            Cpus(),
            MemorySpec(mode="limit", limit=(Bytes(600 * 2**20),)),
        ),
        (
            "devices: cpu\nmemory: {limit: 600MiB}",
            Cpus(),
            MemorySpec(mode="limit", limit=Bytes(600 * 2**20)),
        ),
        (
            "devices: cpu\nmemory: {mode: growth, limit: 1GB}",
            Cpus(),
            MemorySpec(mode="limit", limit=Bytes(10**9)),
        ),
        (
            "memory: {limit: 20GiB}",
            AUTO,
            MemorySpec(mode="limit", limit=Bytes(20 * 2**30)),
        ),
        ("memory: {mode: limit}", AUTO, MemorySpec(mode="limit")),
    ],
)
def test_devices_and_their_memory(
    text: str, devices: object, memory: MemorySpec
) -> None:
    spec = with_keys(text)
    assert spec.devices == devices
    assert spec.memory == memory


@pytest.mark.parametrize(
    ("text", "listen"),
    [
        ('"127.0.0.1:0"', Listen(host="127.0.0.1", port=0)),
        ("localhost:80", Listen(host="localhost", port=80)),
        ('"[::1]:9464"', Listen(host="::1", port=9464)),
        ("none", None),
    ],
)
def test_listen(text: str, listen: Listen | None) -> None:
    assert with_keys(f"metrics: {{listen: {text}}}").metrics.listen == listen


def test_checkpoint_interval_in_time() -> None:
    spec = with_keys("checkpoint: {every: 1h30min}")
    assert spec.checkpoint.every == EverySeconds(5400.0)


def test_a_byte_order_mark_and_windows_line_ends_are_fine() -> None:
    text = jobfile.decode(
        b"\xef\xbb\xbfname: digits\r\nscript: train.py\r\n", filename="job.yaml"
    )
    assert load(text) == load(MINIMAL)


def test_json_is_a_job_file() -> None:
    assert load('{"name": "digits", "script": "train.py"}') == load(MINIMAL)


# Variables and overrides


def test_variables_are_filled_in_where_the_docs_say() -> None:
    spec = load(
        """\
name: digits
script: train.py
args: ["${DATA}", "${NONE:-a b}", "$${DATA}", "$DATA"]
env: {HERE: "${DATA}/x", EMPTY: "${BLANK}", FULL: "${BLANK:-full}"}
checkpoint: {dir: "${DATA}/{name}"}
""",
        environment={"DATA": "/data", "BLANK": ""},
    )
    assert spec.program == Script(
        path="train.py", args=("/data", "a b", "${DATA}", "$DATA")
    )
    assert spec.env == (("HERE", "/data/x"), ("EMPTY", ""), ("FULL", "full"))
    assert spec.checkpoint.directory == "/data/digits"


def test_variables_are_text_elsewhere() -> None:
    spec = load("name: digits\nscript: ${DATA}\n", environment={"DATA": "x"})
    assert spec.program == Script(path="${DATA}")


def test_overrides_go_over_the_file() -> None:
    spec = load(
        MINIMAL + "batch: {micro: auto}\nargs: [a]\n",
        [
            "batch.micro.max=64",
            "memory.headroom=5%",
            "args=[--epochs, 3]",
            "metrics.listen=127.0.0.1:0",
            "name=other",
        ],
    )
    assert spec.name == "other"
    assert spec.batch.micro == AtMost(64)
    assert spec.memory.headroom == Share(0.05)
    assert spec.program == Script(path="train.py", args=("--epochs", "3"))
    assert spec.metrics.listen == Listen(host="127.0.0.1", port=0)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "memory.headrom=5%",
            "--set:1:1: memory.headrom: expected a known key, got headrom"
            " (did you mean headroom?)",
        ),
        (
            "batch.global=none",
            "--set:1:14: batch.global: expected auto or a number of samples,"
            " got 'none'",
        ),
        (
            "memory.headroom",
            "--set:1:1: expected PATH=VALUE, got 'memory.headroom'"
            " (such as --set memory.headroom=5%)",
        ),
        (
            "args[0]=x",
            "--set:1:1: expected PATH=VALUE, got 'args[0]=x'"
            " (set a list as a whole: --set args=[--epochs, 5])",
        ),
        (
            "strategy=",
            "--set:1:10: strategy: expected a value, got nothing",
        ),
        (
            "args=[a",
            "--set:1:6: not valid YAML: did not find expected ',' or ']'"
            " (close the list with ])",
        ),
        (
            "batch.micro=on",
            "--set:1:13: batch.micro: expected auto, a number of samples or a mapping"
            " such as {max: 64}, got on without quotes, which YAML 1.1 reads as true",
        ),
        ("name=\x00", "--set:1:6: name: a NUL character cannot stand in a job file"),
    ],
)
def test_wrong_overrides(override: str, expected: str) -> None:
    assert lines(MINIMAL, [override]) == [expected]


def test_the_file_comes_before_the_command_line() -> None:
    found = problems("name: X\nscript: t.py\n", ["strategy=x"])
    assert [problem.file for problem in found] == ["job.yaml", "--set"]


# Syntax


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "",
            "job.yaml:1:1: expected a mapping of keys such as name and script,"
            " got an empty file (oomrun init writes one)",
        ),
        (
            "# nothing\n",
            "job.yaml:1:1: expected a mapping of keys such as name and script,"
            " got an empty file (oomrun init writes one)",
        ),
        (
            "- name\n",
            "job.yaml:1:1: expected a mapping of keys such as name and script,"
            " got a list (oomrun init writes one)",
        ),
        (
            "train.py\n",
            "job.yaml:1:1: expected a mapping of keys such as name and script,"
            " got text (oomrun init writes one)",
        ),
        (MINIMAL + "---\n" + MINIMAL, "job.yaml:3:1: expected one document, got more"),
        (
            MINIMAL + "name: other\n",
            "job.yaml:3:1: name: the key is there twice (first in line 1)",
        ),
        (
            MINIMAL + "5: x\n",
            'job.yaml:3:1: 5: expected text as a key, got 5 (quote it: "5")',
        ),
        (MINIMAL + "? [a, b]\n: x\n", "job.yaml:3:3: expected text as a key"),
        (
            MINIMAL + "batch: &b {global: 5}\n",
            "job.yaml:3:8: batch: the anchor &b is not allowed"
            " (write the value where it is used)",
        ),
        (
            MINIMAL + "env: {<<: {A: b}}\n",
            "job.yaml:3:7: env.<<: merge keys are not allowed (write the values out)",
        ),
        (
            MINIMAL + "args: [!!python/object:os.system x]\n",
            "job.yaml:3:8: args[0]: the tag !!python/object:os.system is not allowed"
            " (write the plain value)",
        ),
        (
            MINIMAL + "env: {on: x}\n",
            "job.yaml:3:7: env.on: the key on is written without quotes,"
            ' which YAML 1.1 reads as true (quote it: "on")',
        ),
        (
            MINIMAL + 'args: ["a\\0b"]\n',
            "job.yaml:3:8: args[0]: the character U+0000 cannot stand in a job file",
        ),
        (
            "name: a\x00b\n",
            "job.yaml:1:8: a NUL character cannot stand in a job file",
        ),
        (
            "name: a\nscript: \x1b[1mx\n",
            "job.yaml:2:9: the character U+001B cannot stand in a job file",
        ),
        (
            "name: \u2028x\n",
            "job.yaml:1:7: the character U+2028 cannot stand in a job file",
        ),
        (
            "name: \ud800x\n",
            "job.yaml:1:7: the character U+D800 cannot stand in a job file",
        ),
        (
            f"name: {'[' * 20}{']' * 20}\n",
            "job.yaml:1:22: name" + "[0]" * 15 + ": nested deeper than 16 levels",
        ),
    ],
)
def test_documents(text: str, expected: str) -> None:
    assert lines(text) == [expected]


def test_an_alias_is_refused_at_its_place() -> None:
    assert lines(MINIMAL + "args: &a [x]\nenv: *a\n") == [
        "job.yaml:3:7: args: the anchor &a is not allowed"
        " (write the value where it is used)",
        "job.yaml:4:6: env: the alias *a is not allowed (write the value out)",
    ]


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ("name: a\nbatch:\n\tglobal: 5\n", 3, "indent with spaces, not with tabs"),
        (
            "name: a: b\n",
            1,
            "quote text with ': ' in it, or indent alike",
        ),
        ("name: [a\n", 1, "close the list with ]"),
        ("name: {a\n", 1, "close the mapping with }"),
        ("name: 'a\n", 1, "close the quote"),
        ("name: @a\n", 1, "quote text that starts with @"),
        ("name: a\n  script: b\n", 2, "quote text with ': ' in it, or indent alike"),
        ('name: "\\q"\n', 1, "write text with backslashes in 'single quotes'"),
        ("batch:\n  micro: 1\n global: 2\n", 3, "indent the keys of one section alike"),
    ],
)
def test_syntax_errors(text: str, line: int, hint: str) -> None:
    (problem,) = problems(text)
    assert problem.message.startswith("not valid YAML: ")
    assert (problem.line, problem.hint) == (line, hint)


def test_aliases_that_multiply_cost_nothing() -> None:
    levels = [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    assert problems("a0: &a0 x\n" + "\n".join(levels))


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 50_000, "- " * 100_000])
def test_deep_nesting_is_a_located_problem(text: str) -> None:
    (problem,) = problems(text)
    assert "nested deeper than 16 levels" in problem.message


def test_a_huge_file_is_refused() -> None:
    (problem,) = problems("#" * (document.MAX_CHARACTERS + 1))
    assert problem.message == "the job file is larger than 1 MiB"


@pytest.mark.parametrize(
    ("data", "line", "column", "hint"),
    [
        (b"name: a\nscript: \xe9\n", 2, 9, "save the file as UTF-8"),
        (
            "name: a\n".encode("utf-16"),
            1,
            1,
            "it looks like UTF-16; save it as UTF-8",
        ),
        (b"\xef\xbb\xbf\xff", 1, 1, "save the file as UTF-8"),
    ],
)
def test_not_utf8(data: bytes, line: int, column: int, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        jobfile.decode(data, filename="job.yaml")
    (problem,) = caught.value.problems
    assert (problem.line, problem.column, problem.hint) == (line, column, hint)


# YAML 1.1 traps


@pytest.mark.parametrize(
    ("value", "reading", "hint"),
    [
        ("on", "which YAML 1.1 reads as true", 'quote it: "on"'),
        ("Yes", "which YAML 1.1 reads as true", 'quote it: "Yes"'),
        ("OFF", "which YAML 1.1 reads as false", 'quote it: "OFF"'),
        ("no", "which YAML 1.1 reads as false", 'quote it: "no"'),
        ("012", "which YAML 1.1 reads as octal", 'write 12, or quote it: "012"'),
        ("0o12", "which only YAML 1.2 reads as octal", 'write 10, or quote it: "0o12"'),
        ("0b11", "which only YAML 1.1 reads as binary", 'quote it: "0b11"'),
        (
            "1_000",
            "which only YAML 1.1 reads as a number",
            'write 1000, or quote it: "1_000"',
        ),
        (
            "1:30",
            "which YAML 1.1 reads as a number of base 60",
            'quote it: "1:30"',
        ),
        ("2026-01-02", "which YAML 1.1 reads as a date", 'quote it: "2026-01-02"'),
        (
            ".inf",
            "which YAML reads as a number that is not finite",
            'quote it: ".inf"',
        ),
        (
            ".NaN",
            "which YAML reads as a number that is not finite",
            'quote it: ".NaN"',
        ),
    ],
)
def test_traps(value: str, reading: str, hint: str) -> None:
    assert lines(MINIMAL + f"env: {{A: {value}}}\n") == [
        f"job.yaml:3:10: env.A: expected text or a number, got {value} without quotes,"
        f" {reading} ({hint})"
    ]
    assert with_keys(f"env: {{A: '{value}'}}").env == (("A", value),)


# Keys by themselves


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "nmae: x",
            "3:1: nmae: expected a known key, got nmae (did you mean name?)",
        ),
        (
            "memory: {head-room: 8%}",
            "3:10: memory.head-room: expected a known key, got head-room"
            " (did you mean headroom?)",
        ),
        (
            "batch: {size: 5}",
            "3:9: batch.size: expected a known key, got size (known: global, micro, "
            "batch_norm, shares)",
        ),
        (
            "batch:",
            "3:7: batch: expected a mapping such as {micro: auto}, got nothing"
            " (leave the key out for its default)",
        ),
        (
            "batch: 256",
            "3:8: batch: expected a mapping such as {micro: auto}, got 256",
        ),
        (
            "batch: {global: 0}",
            "3:17: batch.global: expected auto or a number of samples, got 0"
            " (at least 1)",
        ),
        (
            "batch: {global: 2.0}",
            "3:17: batch.global: expected auto or a number of samples, got 2.0",
        ),
        (
            'batch: {global: "256"}',
            "3:17: batch.global: expected auto or a number of samples, got '256'"
            " (write it without quotes)",
        ),
        (
            "batch: {micro: atuo}",
            "3:16: batch.micro: expected auto, a number of samples or a mapping such"
            " as {max: 64}, got 'atuo' (did you mean auto?)",
        ),
        (
            "batch: {micro: {}}",
            "3:16: batch.micro: expected the key max (such as max: 64)",
        ),
        (
            "batch: {micro: [1]}",
            "3:16: batch.micro: expected auto, a number of samples or a mapping such"
            " as {max: 64}, got a list",
        ),
        (
            "memory: {limit: 20}",
            "3:17: memory.limit: expected auto, a size such as 20GiB, a share such as"
            " 90% or a list with one for each device, got 20"
            " (add a unit: 20MiB or 20GiB)",
        ),
        (
            "memory: {reserve: 20G}",
            "3:19: memory.reserve: expected auto or a size such as 600MiB, got '20G'"
            " (did you mean 20GiB?)",
        ),
        (
            "memory: {headroom: 100%}",
            "3:20: memory.headroom: expected a share below 100% such as 8% or a size"
            " such as 600MiB, got '100%' (less than 100%)",
        ),
        (
            "memory: {headroom: 0.08}",
            "3:20: memory.headroom: expected a share below 100% such as 8% or a size"
            " such as 600MiB, got 0.08 (did you mean 8%?)",
        ),
        (
            "memory: {mode: Growth}",
            "3:16: memory.mode: expected growth, limit or preallocate, got 'Growth'"
            " (did you mean growth?)",
        ),
        (
            "recovery: {max_restarts: {oom: -1}}",
            "3:32: recovery.max_restarts.oom: expected a number of restarts or"
            " unlimited, got -1 (at least 0)",
        ),
        (
            "recovery: {grow_back: yes}",
            "3:23: recovery.grow_back: expected true or false, got yes without quotes,"
            " which YAML 1.1 reads as true (write true)",
        ),
        (
            "recovery: {levers: [micro_batch, micro_batch]}",
            "3:34: recovery.levers[1]: 'micro_batch' is in the list twice",
        ),
        (
            "checkpoint: {every: 500}",
            "3:21: checkpoint.every: expected a number of steps such as 500 steps or a"
            " time such as 10min, got 500 (add a unit: 500 steps or 500min)",
        ),
        (
            "checkpoint: {every: 10m}",
            "3:21: checkpoint.every: expected a number of steps such as 500 steps or a"
            " time such as 10min, got '10m' (did you mean 10min?)",
        ),
        (
            "checkpoint: {every: 1ms}",
            "3:21: checkpoint.every: expected a number of steps such as 500 steps or a"
            " time such as 10min, got '1ms' (from 1s to 31d)",
        ),
        (
            "checkpoint: {dir: 'x/{run}'}",
            "3:19: checkpoint.dir: expected {name} as the only placeholder, got {run}",
        ),
        (
            "metrics: {listen: 9464}",
            "3:19: metrics.listen: expected none or an address such as 127.0.0.1:9464,"
            " got 9464 (name the address too: 127.0.0.1:9464)",
        ),
        (
            "metrics: {listen: 'localhost:99999'}",
            "3:19: metrics.listen: expected none or an address such as 127.0.0.1:9464,"
            " got 'localhost:99999' (ports end at 65535)",
        ),
        (
            "env: {A: true}",
            '3:10: env.A: expected text or a number, got true (quote it: "true")',
        ),
        (
            "env: {A-B: x}",
            "3:7: env.A-B: expected the name of an environment variable, got 'A-B'",
        ),
        (
            "env: {CUDA_VISIBLE_DEVICES: 0}",
            "3:7: env.CUDA_VISIBLE_DEVICES: expected the name of an environment"
            " variable, got 'CUDA_VISIBLE_DEVICES'"
            " (oomrun sets CUDA_VISIBLE_DEVICES itself: use devices)",
        ),
        (
            "args: --epochs 5",
            "3:7: args: expected a list of text and numbers, got '--epochs 5'",
        ),
        (
            "args: [[x]]",
            "3:8: args[0]: expected text or a number, got a list",
        ),
        (
            "args: ['${NO_SUCH}']",
            "3:8: args[0]: the environment variable NO_SUCH is not set"
            " (set it, or give a default: ${NO_SUCH:-…})",
        ),
        (
            "args: ['${A-b}']",
            "3:8: args[0]: expected ${NAME} or ${NAME:-default}, got ${A-b}"
            " (write $${ for a ${ that is meant as text)",
        ),
        (
            "devices: []",
            "3:10: devices: expected a list of GPUs such as [0], got an empty list",
        ),
        (
            "devices: [0.5]",
            "3:11: devices[0]: expected an index such as 0 or a UUID such as GPU-8f6d,"
            " got 0.5",
        ),
        (
            "devices: {memory: 1GB}",
            "3:10: devices: expected the key cpu (such as cpu: 1)",
        ),
    ],
)
def test_keys(text: str, expected: str) -> None:
    assert lines(MINIMAL + text + "\n") == [f"job.yaml:{expected}"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Digits CNN", "did you mean digits-cnn?"),
        ("a" * 64, "at most 63 characters"),
        ("-a", "did you mean a?"),
        ("a_b", "did you mean a-b?"),
        ("'..'", ""),
        ("a/b", "did you mean a-b?"),
        ("123", 'quote it: "123"'),
    ],
)
def test_names(name: str, hint: str) -> None:
    (problem,) = problems(f"name: {name}\nscript: t.py\n")
    assert (problem.path, problem.line, problem.column) == ("name", 1, 7)
    assert problem.hint == hint


@pytest.mark.parametrize("name", ["a", "a" * 63, "digits-cnn", "'1'", "'12-a'"])
def test_good_names(name: str) -> None:
    assert load(f"name: {name}\nscript: t.py\n").name == name.strip("'")


# Keys together


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "name: x\n",
            "1:1: expected one of the keys script, module and command"
            " (such as script: train.py)",
        ),
        (
            "script: x.py\n",
            "1:1: expected the key name (such as name: digits-cnn)",
        ),
        (
            MINIMAL + "module: x\n",
            "3:1: module: script and module exclude each other (keep one of them)",
        ),
        (
            MINIMAL + "batch: {global: 8, micro: 16}\n",
            "3:27: batch.micro: expected at most batch.global (8), got 16",
        ),
        (
            MINIMAL + "memory: {mode: growth, limit: 20GiB}\n",
            "3:16: memory.mode: growth and a limit exclude each other in TensorFlow"
            " (write mode: limit, or leave one of them out)",
        ),
        (
            MINIMAL + "devices: cpu\nmemory: {mode: preallocate}\n",
            "4:16: memory.mode: a CPU device cannot preallocate its memory"
            " (leave it out)",
        ),
        (
            MINIMAL + "devices: {cpu: 1, memory: 1GB}\nmemory: {limit: 1GB}\n",
            "4:17: memory.limit: memory.limit and devices.memory are the same limit"
            " (keep one of them)",
        ),
        (
            MINIMAL + "devices: {cpu: 1, memory: [1GB, 2GB]}\n",
            "3:27: devices.memory: expected one limit for each device (1), got 2",
        ),
        (
            MINIMAL + "devices: cpu\nmemory: {limit: 600MiB, headroom: 700MiB}\n",
            "4:35: memory.headroom: expected less than the limit (600MiB)"
            " (nothing would be left to plan with)",
        ),
    ],
)
def test_combinations(text: str, expected: str) -> None:
    assert lines(text) == [f"job.yaml:{expected}"]


def test_command_goes_without_args() -> None:
    found = lines("name: x\ncommand: [a]\nargs: [b]\n")
    assert "args and command exclude each other" in found[0]


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        (
            "strategy: single\ndevices: [0, 2]",
            "4:10: devices",
            "strategy single trains on one device, got 2",
        ),
        (
            "strategy: single\ndevices: {cpu: 2}",
            "4:16: devices.cpu",
            "strategy single trains on one device, got 2",
        ),
    ],
)
def test_several_devices_are_not_for_one(text: str, place: str, what: str) -> None:
    (problem,) = problems(MINIMAL + text + "\n")
    assert str(problem).startswith(f"job.yaml:{place}: {what}")
    assert "strategy: auto" in problem.hint


@pytest.mark.parametrize("strategy", ["auto", "mirrored", *IN_WORKERS])
def test_several_devices(strategy: str) -> None:
    devices = "devices: {cpu: 2, memory: [600MiB, 200MiB]}"
    spec = with_keys(f"strategy: {strategy}\n{devices}")
    assert spec.devices == Cpus(count=2)


@pytest.mark.parametrize("strategy", ["auto", "mirrored", *IN_WORKERS])
def test_several_devices_are_not_for_a_command(strategy: str) -> None:
    text = f"name: digits\ncommand: [./a]\ndevices: {{cpu: 2}}\nstrategy: {strategy}\n"
    (problem,) = problems(text)
    assert f"strategy {strategy}" in problem.message


def test_a_command_has_workers_of_its_own() -> None:
    text = "name: x\ncommand: [a]\nstrategy: horovod\ndevices: {cpu: 2}\n"
    (problem,) = problems(text)
    assert "a command starts its own workers" in problem.message


def test_later_features_are_checked_all_the_same() -> None:
    found = problems(
        MINIMAL + "kubernetes: {gpus: four, imge: x}\ndevices: {cpu: 2, memory: 1}\n"
    )
    assert [problem.path for problem in found] == [
        "kubernetes",
        "kubernetes.gpus",
        "kubernetes.imge",
        "devices.memory",
    ]


def test_the_version_that_refuses_is_this_one() -> None:
    assert __version__.startswith(VERSION + ".")


def test_the_draft_of_the_design_parses() -> None:
    found = load(
        """\
name: digits-cnn
script: train.py
args: ["--epochs", "5"]
env: {DATA_DIR: /data/digits}
strategy: auto
devices: auto
batch:
  global: 256
  micro: auto
memory:
  mode: growth
  limit: auto
  reserve: auto
  headroom: 8%
recovery:
  in_process: auto
  levers: [micro_batch, allocator, mixed_precision, recompute, fewer_devices]
  max_restarts: {oom: 10, crash: 3, preemption: unlimited, hang: 3}
  grow_back: true
checkpoint: {dir: "runs/{name}", every: 500 steps, keep: 3}
metrics: {listen: "127.0.0.1:9464"}
kubernetes: {image: registry/train:1, gpus: 4}
"""
    )
    assert found.recovery.levers[-1] == "fewer_devices"
    assert found.batch.global_size == 256


def test_all_problems_are_reported_together_in_the_order_of_the_file() -> None:
    found = problems(
        """\
name: Bad Name
scrip: train.py
name: again
batch: {global: 1_000, micro: on}
memory:
  headroom: 120%
  limt: 20G
checkpoint: {dir: 'gcs://bucket/x'}
"""
    )
    assert [(problem.line, problem.path) for problem in found] == [
        (1, ""),
        (1, "name"),
        (2, "scrip"),
        (3, "name"),
        (4, "batch.global"),
        (4, "batch.micro"),
        (6, "memory.headroom"),
        (7, "memory.limt"),
        (8, "checkpoint.dir"),
    ]
    assert found[6].source_line == "  headroom: 120%"


# What decides the trained model


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ("strategy: single", True),
        ("memory: {limit: 20GiB}", True),
        ("batch: {micro: 8}", True),
        ("recovery: {in_process: never}", True),
        ("batch: {global: 64}", False),
        ("args: [x]", False),
        ("env: {A: b}", False),
    ],
)
def test_mathematics(changed: str, same: bool) -> None:
    before, after = mathematics(load(MINIMAL)), mathematics(with_keys(changed))
    assert (before == after) is same


def test_mathematics_knows_the_program() -> None:
    assert mathematics(load("name: x\nmodule: a.b\nargs: [c]\n")) == {
        "program": {"module": "a.b", "args": ["c"]},
        "env": {},
        "batch.global": None,
    }
