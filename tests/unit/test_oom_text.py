"""What programs print when memory ran out, and what only looks like it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oomrun.core.oom_text import find_exhaustion, looks_like_device_oom

LOGS = Path(__file__).parents[1] / "data" / "oom_logs.jsonl"
LABELLED = [json.loads(line) for line in LOGS.read_text().splitlines()]


def memory(text: str) -> str | None:
    found = find_exhaustion(text)
    return found.memory if found else None


@pytest.mark.parametrize("log", LABELLED, ids=[log["id"] for log in LABELLED])
def test_labelled_logs(log: dict[str, Any]) -> None:
    # null: not out of memory, or nothing in the text alone says so.
    assert memory(log["text"]) == log["memory"]
    assert looks_like_device_oom(log["text"]) is (log["memory"] == "device")


DEVICE = [
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0",
    "RuntimeError: CUDA out of memory. Tried to allocate 1.5 GiB (GPU 0; 7.79 GiB",
    "[rank3]: torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1 GiB",
    "RuntimeError: CUDA error: out of memory",
    "RuntimeError: MPS backend out of memory (MPS allocated: 9.00 GB",
    "CUDA Error: out of memory",
    "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 8,589,934,592 bytes",
    "numba.cuda.cudadrv.driver.CudaAPIError: [2] CUDA_ERROR_OUT_OF_MEMORY",
    "MemoryError: std::bad_alloc: CUDA error at: x.hpp: cudaErrorMemoryAllocation out",
    "cudaMalloc failed: out of memory",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`",
    "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7 GiB",
    "RESOURCE_EXHAUSTED: Out of memory allocating 1073741824 bytes.",
    "RESOURCE_EXHAUSTED: Failed to allocate request for 1.00GiB (1B) on device ordinal",
    "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 9.54G. "
    "That was not possible. There are 6.53G free.",
    "Resource exhausted: OOM when allocating tensor with shape[8,8]",
    "InternalError: Dst tensor is not initialized.",
    "ResourceExhaustedError (see above for traceback): failed to allocate memory",
    "InternalError: CUDA runtime implicit initialization on GPU:0 failed. Status: out "
    "of memory",
    "InternalError: cudaSetDevice() on GPU:0 failed. Status: out of memory",
    "cuMemAllocAsync failed to allocate 173946175488 bytes",
    "Failed to load in-memory CUBIN: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
]
HOST = [
    "MemoryError",
    "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 9. GiB for an array",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:116] . DefaultCPUAllocator: can't "
    "allocate memory: you tried to allocate 4000000000000 bytes.",
    "terminate called after throwing an instance of 'std::bad_alloc'",
    "OSError: [Errno 12] Cannot allocate memory",
    "ResourceExhaustedError: OOM when allocating tensor with shape[9] on "
    "/device:CPU:0 by allocator cpu",
    "java.lang.OutOfMemoryError: Java heap space",
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low",
    "RESOURCE_EXHAUSTED: Failed to allocate memory for the batch of component 0",
    "failed to alloc 8589934592 bytes on host: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    "RuntimeError: unable to mmap 1 bytes from file </torch_1>: Cannot allocate memory",
    "memory allocation of 4294967296 bytes failed",
]
NEITHER = [
    "",
    "CUDNN_STATUS_INTERNAL_ERROR",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
    "non-contiguous input.",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "StatusCode.RESOURCE_EXHAUSTED Received message larger than max (7 vs. 4)",
    "ResourceExhaustedError: /ckpt/x.tempstate; No space left on device [Op:SaveV2]",
    "ResourceExhaustedError: ./out/weights-212.tempstate229",
    "Allocation of 6291456000 exceeds 10% of system memory.",
    "UserWarning: this may consume a large amount of memory",
    "the cure for a CUDA OOM is a smaller batch",
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB "
    "memory.",
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, "device") for text in DEVICE),
        *((text, "host") for text in HOST),
        *((text, None) for text in NEITHER),
    ],
)
def test_forms(text: str, expected: str | None) -> None:
    assert memory(f"epoch 1\n{text}\n") == expected


SHORTAGE = (
    "2031-01-09 07:30:40.6: W tensorflow/core/common_runtime/bfc_allocator.cc:290] "
    "Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.37GiB with "
    "freed_by_count=0. The caller indicates that this is not a failure"
)
RETRIED = (
    "2031-11-25 21:32:01.3: I tensorflow/stream_executor/cuda/cuda_driver.cc:759] "
    "failed to allocate 1.83G from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory"
)


def test_pitfall_2_benign_text_is_no_oom() -> None:
    assert memory(SHORTAGE) is None


def test_pitfall_3_a_library_s_status_needs_a_shortage_beside_it() -> None:
    for status in ("CUDNN_STATUS_INTERNAL_ERROR", "CUBLAS_STATUS_NOT_INITIALIZED"):
        assert memory(status) is None
        assert memory(f"{SHORTAGE}\n{status}") == "device"
        assert memory(f"{status}\n{RETRIED}") == "device"


def test_a_hint_counts_unless_the_program_went_on() -> None:
    assert memory(RETRIED) == "device"
    assert memory(f"{RETRIED}\nstep 12, loss 0.7") is None
    assert memory(f"{RETRIED}\n{SHORTAGE}") is None


def test_the_last_error_is_the_one() -> None:
    found = find_exhaustion(f"{DEVICE[0]}\nsaving\nMemoryError\nexit")
    assert found is not None
    assert (found.memory, found.line) == ("host", "MemoryError")


def test_long_lines_take_no_long_time() -> None:
    for text in ("a." * 200_000, "OOM " * 100_000, "cudaA " * 60_000, "x" * 400_000):
        assert memory(text) is None
