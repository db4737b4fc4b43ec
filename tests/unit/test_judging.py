"""What went wrong, from a log and what is known beside it: any program's.

``oom_logs.jsonl``: labelled by others. ``own_failures.jsonl``: written by us before the
rules were tried on them. Both with every prefix that launchers put before lines.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oomrun.core.causes import Cause
from oomrun.core.judging import judge
from oomrun.core.remedies import LEVERS
from oomrun.core.verdict import Verdict, clues_of, to_json

DATA = Path(__file__).parents[1] / "data"
FACTS = ("device", "shape", "dtype", "requested_bytes")


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


LABELLED = rows("oom_logs.jsonl")
OWN = rows("own_failures.jsonl")


def verdict(
    text: str, exit_code: int | None = 1, evidence: dict[str, Any] | None = None
) -> Verdict:
    return judge(clues_of(text, exit_code, evidence))


def judged(row: dict[str, Any], text: str | None = None) -> dict[str, Any]:
    said = row["text"] if text is None else text
    return to_json(verdict(said, row["exit_code"], row["evidence"]))


@pytest.mark.parametrize("row", LABELLED, ids=[row["id"] for row in LABELLED])
def test_labelled_logs(row: dict[str, Any]) -> None:
    found = judged(row)
    assert found["is_oom"] is row["is_oom"]
    assert found["kind"] in {row["kind"], *(["unknown"] if row["ambiguous"] else [])}
    assert {fact: found[fact] for fact in FACTS} == {fact: row[fact] for fact in FACTS}
    assert set(found["levers"]) & set(row["lever"])


@pytest.mark.parametrize("row", OWN, ids=[row["id"] for row in OWN])
def test_our_own_texts(row: dict[str, Any]) -> None:
    found = judged(row)
    assert found["is_oom"] is row["is_oom"]
    assert found["kind"] == row["kind"]
    assert {fact: found[fact] for fact in row["facts"]} == row["facts"]
    assert found["levers"]
    assert set(found["levers"]) <= set(LEVERS)
    assert found["summary"]
    assert "\n" not in found["summary"]


def each(form: str) -> Callable[[str], str]:
    return lambda text: "\n".join(form % line for line in text.splitlines())


PUT_AROUND: dict[str, Callable[[str], str]] = {
    "iso": each("2029-04-05T06:07:08.123456789Z %s"),
    "logging": each("2029-04-05 06:07:08,123 - trainer.main - ERROR - %s"),
    "loguru": each("2029-04-05 06:07:08.123 | ERROR    | app.main:run:7 - %s"),
    "cri": each("2029-04-05T06:07:08.1Z stderr F %s"),
    "syslog": each("Apr  5 06:07:08 gpu-01 python3[4411]: %s"),
    "torchrun": each("[rank7]: %s"),
    "mpi": each("[1,7]<stderr>:%s"),
    "srun": each("7: %s"),
    "compose": each("trainer-1  | %s"),
    "stern": each("[pod/train-0/main] %s"),
    "ray": each("(RayTrainWorker pid=811, ip=10.0.0.7) %s"),
    "colour": each("\x1b[31;1m%s\x1b[0m"),
    "json": lambda text: "\n".join(
        json.dumps({"log": line + "\n", "stream": "stderr"})
        for line in text.splitlines()
    ),
    "windows": lambda text: text.replace("\n", "\r\n"),
    "languages": lambda text: f"加载数据…\nLade Daten …\n{text}\n日志结束\nEnde.",
}


@pytest.mark.parametrize("around", PUT_AROUND)
def test_what_is_put_around_lines_changes_nothing(around: str) -> None:
    wrong = []
    for row in [*OWN[::5], *LABELLED[::4]]:
        found = judged(row, PUT_AROUND[around](row["text"]))
        if (found["is_oom"], found["kind"]) != (row["is_oom"], row["kind"]):
            wrong.append(row["id"])
    assert [name for name in wrong if not ambiguous(name)] == []


def ambiguous(name: str) -> bool:
    return any(row["id"] == name and row["ambiguous"] for row in LABELLED)


@pytest.mark.parametrize(("width", "rows"), [(80, OWN[::2]), (120, OWN[1::2])])
def test_lines_that_were_wrapped_are_put_together(
    width: int, rows: list[dict[str, Any]]
) -> None:
    texts = [row for row in rows if len(row["text"]) > width]
    wrong = [row["id"] for row in texts if wrapped(row, width) != row["kind"]]
    assert len(wrong) <= 0.03 * len(texts), wrong


def wrapped(row: dict[str, Any], width: int) -> str:
    cut = [
        line[at : at + width]
        for line in row["text"].splitlines()
        for at in range(0, max(1, len(line)), width)
    ]
    kind: str = judged(row, "\n".join(cut))["kind"]
    return kind


def test_the_limit_of_protobuf_is_the_one_that_is_told() -> None:
    rejected = (
        "A protocol message was rejected because it was too big (more than %d bytes)"
    )
    said = {
        rejected % 67108864: "64MiB",
        rejected % 2147483647: "2 GB",
        rejected % 1073741824: "1GiB",
        "protobuf message exceeds 64MB": "64 MB",
        "tensorflow.GraphDef exceeded maximum protobuf size of 2GB: 3": "2 GB",
        "ValueError: GraphDef cannot be larger than 2GB.": "2 GB",
        "InvalidProtocolBufferException: Protocol message was too large.": "2 GB",
    }
    for text, limit in said.items():
        found = verdict(text)
        assert found.kind == "protobuf_limit", text
        assert f"({limit})" in found.summary, text


def test_a_file_that_is_too_large_is_no_full_disk() -> None:
    for text, code in (
        ("OSError: [Errno 27] File too large: '/out/a.h5'", 1),
        ("cp: error writing '/mnt/a.h5': File too large", 1),
        ("Epoch 1/2", 153),
    ):
        found = verdict(text, code)
        assert (found.kind, found.levers) == ("disk", ("fix_disk",)), text
        assert "ulimit -f" in found.summary, text


def test_a_full_disk_after_an_exhaustion_is_a_second_thing() -> None:
    text = (
        "OOM when allocating tensor with shape[8,4] and type float on /job:localhost/"
        "replica:0/task:0/device:GPU:1 by allocator GPU_1_bfc\n"
        "step 77 failed, writing an emergency checkpoint\n"
        "ResourceExhaustedError: /o/a_temp/part-0; No space left on device [Op:SaveV2]"
    )
    found = verdict(text)
    assert (found.kind, found.phase) == ("gpu_allocator", "unknown")
    assert found.facts.device == "GPU:1"
    assert "disk_full" in found.signs
    assert found.levers[-1] == "fix_disk"
    # Where it had gone on, the disk is all that ended it.
    alone = verdict(
        text.replace("step 77 failed, writing", "step 77 loss 0.1\nwriting")
    )
    assert (alone.kind, alone.levers) == ("disk", ("fix_disk",))


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def test_pitfall_2_what_a_program_survived_did_not_end_it() -> None:
    went_on = f"{OOM}\nbatch 64 does not fit: 32\nstep 1, loss 2.3"
    assert not verdict(went_on, 0).is_oom
    assert not verdict(f"{went_on}\nKeyError: 'x'", 1).is_oom
    # Nothing else failed: then the exit code is of the OOM, whoever printed the step.
    assert verdict(went_on, 1).is_oom


def test_progress_of_another_rank_does_not_count() -> None:
    text = f"[rank1]: {OOM}\n[rank0]: step 8, loss 0.3"
    assert verdict(text, None).is_oom
    assert not verdict(f"[rank1]: {OOM}\n[rank1]: step 8, loss 0.3", None).is_oom


def test_pitfall_3_a_guess_is_told_as_one() -> None:
    alone = verdict("CUBLAS_STATUS_NOT_INITIALIZED")
    assert alone.confidence <= 0.5
    assert verdict(OOM).confidence > 0.9


def test_pitfall_5_a_kill_is_told_by_counters() -> None:
    kinds = [
        verdict("Epoch 1/2", -9, {"cgroup_oom_kill": kills}).kind for kills in (1, 0)
    ]
    assert kinds == ["host_killed", "not_oom"]
    assert verdict("Epoch 1/2", 137).confidence <= 0.5


@pytest.mark.parametrize(
    ("text", "exit_code", "cause"),
    [
        (OOM, 1, Cause.DEVICE_OOM),
        ("MemoryError", 1, Cause.HOST_OOM),
        ("OSError: [Errno 28] No space left on device: '/a/b'", 1, Cause.DISK_FULL),
        ("insufficient shared memory (shm)", 1, Cause.SHM_FULL),
        ("ValueError: GraphDef cannot be larger than 2GB.", 1, Cause.GRAPH_LIMIT),
        ("Received message larger than max (9 vs. 4)", 1, Cause.MESSAGE_LIMIT),
        ("CANCELLED AT 2029-01-01 DUE TO PREEMPTION ***", 143, Cause.PREEMPTION),
        ("Watchdog caught collective operation timeout: x", 1, Cause.HANG),
        ("ValueError: 3", 1, Cause.CRASH),
        ("ModuleNotFoundError: No module named 'x'", 1, Cause.MISCONFIGURATION),
        ("", 0, Cause.FINISHED),
        ("", -15, Cause.PREEMPTION),
    ],
)
def test_causes(text: str, exit_code: int, cause: Cause) -> None:
    assert verdict(text, exit_code).cause is cause


@pytest.mark.parametrize(
    ("node", "phase"),
    [
        ("adam/Sqrt_3", "apply"),
        ("gradient_tape/net/conv/Conv2DBackpropFilter", "gradients"),
        ("table/Adam_1/Initializer/zeros", "start"),
        ("net/dense/MatMul", "unknown"),
    ],
)
def test_the_phase_is_read_from_the_operation(node: str, phase: str) -> None:
    text = f"OOM when allocating tensor with shape[8,4]\n\t [[{{{{node {node}}}}}]]"
    assert verdict(text).phase == phase
    assert verdict(text).facts.operation == node


def test_a_pool_with_enough_free_in_pieces_is_fragmented() -> None:
    text = (
        "Allocator (GPU_0_bfc) ran out of memory trying to allocate 9.5MiB (rounded to "
        "10000000)requested by op a\nLimit: %d\nInUse: 80000000"
    )
    assert "fragmentation" in verdict(text % 95_000_000).signs
    assert "fragmentation" not in verdict(text % 85_000_000).signs


def test_the_sentence_says_what_was_asked_for() -> None:
    found = verdict(
        "OOM when allocating tensor with shape[8,1024] and type float on /job:localhost"
        "/replica:0/task:0/device:GPU:1 by allocator GPU_1_bfc"
    )
    assert found.summary == (
        "the device ran out of memory (shape [8, 1024] of float, on GPU:1)"
    )


EVENTS = "low 0\nhigh {high}\nmax 0\noom 0\noom_kill {kills}"


def test_counters_of_the_kernel_may_be_in_the_text() -> None:
    """Known for sure as evidence, and the same where somebody printed them."""
    for code in (137, None):
        found = verdict(EVENTS.format(high=0, kills=2), code)
        assert (found.kind, found.confidence) == ("host_killed", 0.98)
        assert verdict(EVENTS.format(high=0, kills=0), code).kind == "not_oom"
        # Printed before the training, they are not of its end.
        early = EVENTS.format(high=0, kills=0) + "\nstep 3 loss 0.7\nKilled"
        assert verdict(early, code).kind == "host_killed"
    slow = verdict(EVENTS.format(high=812, kills=0), None)
    assert (slow.is_oom, slow.levers) == (False, ("shrink_host_pipeline",))


@pytest.mark.parametrize("said", ['"OOMKilled": %s', "OOMKilled=%s,", "OOMKilled: %s"])
def test_a_container_that_was_within_its_limit_was_killed_by_others(said: str) -> None:
    found = verdict(f"{said % 'false'}\nExitCode: 137", 137)
    assert (found.is_oom, found.cause) == (False, Cause.KILLED)
    # The host's kernel may have done it: no more than likely.
    assert found.confidence <= 0.6
    assert "dmesg" in found.summary
    assert verdict(f"{said % 'true'}\nExitCode: 137", 137).kind == "host_killed"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (0xC0000017, "host_allocator"),  # no memory
        (0xC000012D, "host_allocator"),  # no page file
        (0xC0000005, "not_oom"),  # an access violation
        (0xC000013A, "not_oom"),  # Ctrl-C
    ],
)
def test_windows_tells_by_its_exit_code(code: int, kind: str) -> None:
    assert verdict("Epoch 1/2", code).kind == kind
    assert verdict("Epoch 1/2", code - 2**32).kind == kind
    # What a program says of a device is nearer.
    assert verdict(OOM, code).kind == "gpu_allocator"


XLAS_WORDS = (
    "Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.00GiB (rounded to "
    "2147483648)requested by op %s\n"
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate %d bytes."
)


@pytest.mark.parametrize(
    ("operation", "size", "kind"),
    [
        ("model/conv1/Conv2D", 2**31, "gpu_allocator"),
        ("StatefulPartitionedCall/tower/convolution", 2**31, "gpu_allocator"),
        ("model/conv1/Conv2D", 2**30, "xla"),  # of another request
        ("StatefulPartitionedCall", 2**31, "xla"),
        ("cluster_0_1/xla_run", 2**31, "xla"),
        ("", 2**31, "xla"),
    ],
)
def test_xlas_words_are_the_pools_where_an_operation_asked(
    operation: str, size: int, kind: str
) -> None:
    assert verdict(XLAS_WORDS % (operation, size)).kind == kind


@pytest.mark.parametrize(
    ("to", "kind"),
    [
        ("GPU:1", "gpu_allocator"),
        ("DML:1", "gpu_allocator"),
        ("CPU:0", "host_allocator"),
    ],
)
def test_a_copy_fails_where_it_was_to_go(to: str, kind: str) -> None:
    start = "/job:localhost/replica:0/task:0/device"
    found = verdict(
        "ResourceExhaustedError: SameWorkerRecvDone unable to allocate output tensor. "
        f"Key: {start}:GPU:0;899591e1dcfebd12;{start}:{to};edge_11_x;0:0"
    )
    assert (found.kind, found.facts.device) == (kind, to)


def test_a_start_that_names_no_device_is_of_the_only_one() -> None:
    # Of one length, as wrapped lines are.
    ready = "Created TensorFlow device (/job:localhost/replica:0/task:0/device:GPU:%d x"
    said = "failed to create context: CUDA_ERROR_OUT_OF_MEMORY"
    assert verdict(f"{ready % 2}\n{said}").facts.device == "GPU:2"
    assert verdict(f"{ready % 2}\n{ready % 3}\n{said}").facts.device is None


def test_ranks_that_start_on_one_gpu_should_each_have_their_own() -> None:
    said = "[1,{0}]<stderr>:cudaSetDevice() failed. Status: out of memory"
    two = verdict("\n".join(said.format(rank) for rank in (0, 1)))
    assert two.levers[0] == "pin_gpu"
    assert verdict(said.format(0)).levers[0] == "free_device"


def test_who_waited_is_not_who_failed() -> None:
    stalled = "[1,0]<stderr>:Stalled ranks: 1"
    assert verdict(stalled).cause is Cause.HANG
    crashed = verdict(f"{stalled}\n[1,1]<stderr>:FileNotFoundError: x")
    assert (crashed.cause, crashed.levers) == (Cause.CRASH, ("fix_code",))


def test_nobody_needs_to_mend_what_somebody_stopped() -> None:
    found = verdict("KeyboardInterrupt", 130)
    assert (found.cause, found.levers) == (Cause.PREEMPTION, ("none",))
    assert verdict("ValueError: 3\nKeyboardInterrupt").cause is Cause.CRASH
