"""What would help, and when it happened, as a log's forms tell it."""

from __future__ import annotations

import pytest

from oomrun.core.judging import judge
from oomrun.core.verdict import Verdict, clues_of

OOM = (
    "ResourceExhaustedError: OOM when allocating tensor with shape[{shape}] and type "
    "float on /job:localhost/replica:0/task:0/device:{device} by allocator {pool}"
)


def verdict(text: str, exit_code: int | None = 1) -> Verdict:
    return judge(clues_of(text, exit_code))


def on_gpu(shape: str) -> str:
    return OOM.format(shape=shape, device="GPU:0", pool="GPU_0_bfc")


def on_cpu(shape: str) -> str:
    return OOM.format(shape=shape, device="CPU:0", pool="cpu")


@pytest.mark.parametrize(
    ("text", "lever"),
    [
        (on_gpu("512,4096,64"), "shrink_micro_batch"),
        # The last drop: the device was full of something else.
        (on_gpu("64"), "free_device"),
        (on_gpu(""), "free_device"),
        # A model on the CPU device, and what is none of a step.
        (on_cpu("512,4096,64"), "shrink_micro_batch"),
        (on_cpu("1,4096,4096,64"), "shrink_host_pipeline"),
        (on_cpu("1843200,4096"), "shrink_host_pipeline"),
        (f"in num_workers=4\n{on_cpu('512,4096,64')}", "shrink_host_pipeline"),
    ],
)
def test_the_size_and_the_place_of_a_tensor_tell_what_helps(
    text: str, lever: str
) -> None:
    assert verdict(text).levers[0] == lever


def test_ranks_without_room_for_next_to_nothing_share_a_gpu() -> None:
    def ranks(shape: str, *numbers: int) -> str:
        return "\n".join(f"[1,{rank}]<stderr>:{on_gpu(shape)}" for rank in numbers)

    assert verdict(ranks("64", 1, 2)).levers[0] == "pin_gpu"
    assert verdict(ranks("64", 1)).levers[0] == "free_device"
    assert verdict(ranks("512,4096,64", 1, 2)).levers[0] == "shrink_micro_batch"


def test_the_rank_that_failed_first_is_told() -> None:
    found = verdict(
        f"[1,3]<stderr>:{on_gpu('512,9')}\n[1,1]<stderr>:{on_gpu('512,7')}\n"
        f"[1,3]<stderr>:{on_gpu('512,8')}"
    )
    assert found.facts.shape == (512, 8)


@pytest.mark.parametrize(
    ("signal", "lever"), [("4 (Illegal instruction)", "fix_code"), ("6", "none")]
)
def test_a_rank_that_died_of_its_own_fault_is_to_be_mended(
    signal: str, lever: str
) -> None:
    found = verdict(
        f"mpirun noticed that process rank 1 with PID 7 on node n exited on signal "
        f"{signal}."
    )
    assert (found.is_oom, found.levers) == (False, (lever,))


LAUNCH = "Non-OK-status: GpuLaunchKernel(f, c) status: Internal: out of memory"


def test_a_launch_that_found_no_memory_is_of_the_start_unless_steps_were_taken() -> (
    None
):
    assert verdict(LAUNCH).phase == "start"
    late = verdict(f"Epoch 1/2\n 7/90 - loss: 0.3\n{LAUNCH}")
    assert (late.kind, late.phase) == ("gpu_context", "unknown")
    assert late.levers[0] == "free_device"


EXHAUSTED = "ResourceExhaustedError: Graph execution error:"


def test_a_class_alone_is_told_as_a_guess() -> None:
    alone = verdict(f"{EXHAUSTED}\n\nDetected at node 'model/dense/MatMul' defined at")
    assert (alone.kind, alone.facts.operation) == (
        "gpu_allocator",
        "model/dense/MatMul",
    )
    assert alone.confidence <= 0.5
    # Whatever line tells the reason is nearer.
    for reason, kind in {
        "/o/a; Too many open files": "not_oom",
        "/o/a; No space left on device": "disk",
        "Received message larger than max (9 vs. 4)": "grpc",
        on_cpu("9,8"): "host_allocator",
    }.items():
        assert verdict(f"{EXHAUSTED}\n{reason}").kind == kind, reason


def test_a_damaged_heap_is_no_lack_of_memory() -> None:
    for said in (
        "python: malloc.c:4028: _int_malloc: Assertion `chunk_main (fwd)' failed.",
        "malloc(): unsorted double linked list corrupted",
        "free(): invalid pointer",
        "corrupted double-linked list",
    ):
        found = verdict(said, 134)
        assert (found.is_oom, found.levers) == (False, ("fix_code",)), said
        assert found.told == said
