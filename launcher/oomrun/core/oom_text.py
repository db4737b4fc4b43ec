"""Whether the last lines of a failed program say that memory ran out, and which.

Covers: the forms in which TensorFlow, XLA, JAX, PyTorch, the CUDA libraries, NCCL, C++
and Python say so, and the texts that name the same words and mean nothing. Does not
cover: facts that need no text (exit codes, kernel counters), see ``diagnosis``.

Only for output of a program that has ended and failed: while one lives, a line like
these may be followed by its next step. Lines are judged one by one:

- an *error* says by itself that an allocation failed;
- a *harmless* line is of an allocation that may fail;
- a *hint* may be either. It counts if nothing after it shows that the program went on;
- a *library status* has many causes. It counts where another line shows a shortage.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["Exhaustion", "find_exhaustion", "looks_like_device_oom"]

Memory = Literal["device", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhaustion:
    """Which memory ran out, and the line that says so."""

    memory: Memory
    line: str


def _any(*forms: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{form})" for form in forms))


# Of a line; what says that an allocation failed says it early, and searching in some
# of the forms takes time that grows with the square of a line's length.
_LONGEST = 4096
# What launchers put before the lines of their ranks: "[1,0]<stderr>:", "[rank3]: ".
_rank_prefix = re.compile(r"^(?:\[[\w, ]{1,12}\](?:<\w{1,10}>)?:? ?)+")

_shortage_that_is_harmless = _any(
    r"caller indicates that this is not a failure",
    r"redzone checking; skipping",
)
_harmless = _any(
    # The same status code, for what is no memory: disks, messages, graphs.
    r"No space left on device",
    r"Disk quota exceeded",
    r"serialize message of type",
    r"message larger than max",
    # A size that no device ever had is a length that was read wrong.
    r"more than 1EB memory",
)

_host_error = _any(
    r"\b(?:OOM|out of memory)\b.{0,400}\bby allocator (?:mkl)?cpu\b",
    r"(?<![A-Za-z])_?(?:Array)?MemoryError(?![\w'])",
    r"Unable to allocate \S+ \w+ for an array",
    r"\bbad_alloc\b",
    r"St9bad_alloc",
    r"DefaultCPUAllocator: .*memory|not enough memory: you tried to allocate",
    r"\bCannot allocate memory\b",
    r"memory for the batch of component",
    r"\bon host: CUDA_ERROR_OUT_OF_MEMORY|allocate pinned host memory",
    r"(?:java\.lang|ray\.exceptions)\.OutOfMemoryError",
    r"(?:JavaScript heap|LLVM ERROR:) out of memory",
    r"fatal error: runtime: (?:cannot allocate memory|out of memory)",
    r"memory allocation of \d+ bytes failed",
    # Of schedulers, about the job itself; the kernel's own log is about anybody.
    r"\boom[-_]kill event",
    r"\bOOM ?Killed\b",
    r"ran out-of-memory and exited",
    r"task \d+: Out Of Memory",
    r"JobState=OUT_OF_MEMORY",
    r"low on resource: memory",
)
_device_error = _any(
    r"OOM when allocating",
    r"[Oo]ut of memory (?:while )?(?:trying to )?allocat",
    r"[Oo]ut of memory in memory space",
    r"(?:Resource exhausted|RESOURCE_EXHAUSTED|ResourceExhaustedError)"
    r"(?: \(see above for traceback\))?: *(?:\{\{.*?\}\} *)?"
    r"(?:[Ff]ailed to allocate (?:memory|request)|[Oo]ut of memory)",
    r"[Ff]ailed to allocate (?:memory for requested buffer|request for \S+)",
    r"[Ff]ailed to allocate \d+ bytes for new constant",
    r"cuMemAllocAsync failed to allocate",
    r"Attempting to (?:allocate|reserve) .*not possible",
    r"(?:CU(?:DA|BLAS|DNN|SOLVER|SPARSE|FFT)|HIP|MIOPEN)_\w{0,60}"
    r"(?:OUT_OF_MEMORY|ALLOC_FAILED|DEVICE_ALLOCATION_FAILED)",
    r"cudaErrorMemoryAllocation|hipErrorOutOfMemory|OUT_OF_DEVICE_MEMORY",
    r"\b(?:CUDA|HIP|XPU|NPU|MPS backend) out of memory",
    r"\b(?:CUDA|HIP|CUDNN|NCCL) (?:[Ee]rror|failure)\b.{0,40}\bout of memory",
    r"\b(?:cuda|hip)[A-Z]\w+\b.{0,40}\bout of memory",
    r"initialization on GPU:\d+ failed\. Status: out of memory",
    r"(?<![\w.])(?!java\.|ray\.)(?:\w+\.)*OutOfMemoryError(?=:|$)",
    r"Dst tensor is not initialized",
)
# TensorFlow's lowest level of log.
_information = re.compile(r"(?:\d{4}-\d\d-\d\d [\d:.]+: )?I(?:\d{4})? ")
_hint = _any(
    # TensorFlow asks for most of a GPU, and for less where that fails.
    r"failed to alloc\w* .{0,60}from device: CUDA_ERROR_OUT_OF_MEMORY",
    r"Cuda failure (?:\d+ )?'out of memory'",
    r"Failed to CUDA calloc",
)
_went_on = re.compile(
    r"\b(?:loss|epoch|step|iter(?:ation)?|eta)\b\W{0,3}\d|\bit/s\b", re.IGNORECASE
)
_library_status = _any(
    r"CUDNN_STATUS_(?:INTERNAL_ERROR|NOT_INITIALIZED|NOT_SUPPORTED)",
    r"CUBLAS_STATUS_(?:INTERNAL_ERROR|NOT_INITIALIZED)",
    r"[Ff]ailed to (?:get|determine best cudnn) convolution algorithm",
    r"No algorithm worked",
    r"Blas x?GEMM launch failed",
    r"unhandled (?:cuda|system) error",
)


def find_exhaustion(text: str) -> Exhaustion | None:
    """The last error in ``text`` that says that memory ran out, or None."""
    error: Exhaustion | None = None
    hint = status = ""
    short_of_memory = False
    for raw in text.splitlines():
        line = _rank_prefix.sub("", raw[:_LONGEST]).strip()
        if _shortage_that_is_harmless.search(line):
            short_of_memory, hint = True, ""
        elif _harmless.search(line):
            continue
        elif _is_hint(line):
            short_of_memory, hint = True, line
        elif found := _error(line):
            error = Exhaustion(memory=found, line=line)
        elif _library_status.search(line):
            status = line
        elif _went_on.search(line):
            hint = ""
    if error is None and (hint or (status and short_of_memory)):
        return Exhaustion(memory="device", line=hint or status)
    return error


def _is_hint(line: str) -> bool:
    if _hint.search(line):
        return True
    return bool(_information.match(line)) and "CUDA_ERROR_OUT_OF_MEMORY" in line


def _error(line: str) -> Memory | None:
    # A GPU library's error may be wrapped: "MemoryError: std::bad_alloc: … CUDA error".
    on_host = _host_error.search(line) is not None
    on_device = _device_error.search(line) is not None
    if on_host and not (on_device and "MemoryError" in line):
        return "host"
    return "device" if on_device else None


def looks_like_device_oom(text: str) -> bool:
    """Whether ``text`` says that a device's memory ran out."""
    found = find_exhaustion(text)
    return found is not None and found.memory == "device"
