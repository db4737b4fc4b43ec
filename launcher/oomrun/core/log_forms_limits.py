"""Forms that use the words of memory and mean something else, or another memory.

Covers: harmless lines, limits of gRPC and protobuf, shared memory, disks, faults of
devices, set-ups that cannot work. See ``log_forms``.
"""

from __future__ import annotations

from oomrun.core.log_form import EXHAUSTED, Form, form
from oomrun.core.log_forms_translated import TRANSLATED_NO_MEMORY

__all__ = ["NOT_DEVICE_MEMORY"]

NOT_DEVICE_MEMORY: tuple[Form, ...] = (
    form(
        "host_killed",
        "kernel",
        r"\bKill(?:ed)? process \d+",
        r"\boom-kill:constraint=",
        r"\boom_reaper: ",
        r"OOM encountered, victim process",
        r"\binvoked oom-killer\b",
    ),
    form(
        "gpu_allocator",
        "harmless",
        r"caller indicates that this is not a failure",
        r"redzone checking; skipping",
        r"allocat\w{0,3}\b.{0,80}\b(?:this is benign|not (?:a|an) (?:failure|error))",
        r"re-allocate a larger region to avoid OOM",
        # TensorRT leaves out what does not fit, and takes another.
        r"[Ss]kipping tactic\b|insufficient to use tactic",
    ),
    # Its sizes are of a whole program.
    form("xla", "harmless", r"rematerialization; only reduced to"),
    form(
        "host_allocator",
        "harmless",
        r"Allocation of \d+ exceeds \d+% of (?:free )?system memory",
    ),
    # Advice, and names of settings and tests.
    form(
        "crash",
        "harmless",
        r"(?i:\b(?:avoid|prevent|reduce|tip:|if you|in case of|whenever|should you|may "
        r"cause|can cause|might cause|could cause|to fix|handles?|without|caught"
        r"|catch)\b"
        r".{0,60}\b(?:out[ -]of[ -]memory|oom)\b(?!.{0,200}\bTried to alloc))",
        r"(?i:\b(?:no|not|never|isn.t|wasn.t) (?:an? |any )?(?:oom|out[ -]of[ -]mem))",
        r"\b(?:PASSED|SKIPPED)$|\bOOM ?Killed\W{1,5}(?:false|no|0)\b",
        # A list of what may have been.
        r"potential root causes",
        # What is large is told of, and given or read.
        r"tcmalloc: large alloc \d{1,20} bytes == (?!\(nil\))",
        r"[Rr]eading dangerously large protocol message",
    ),
    # The same status and the same words, for what is no memory.
    form(
        "threads",
        "other",
        r"Too many open files|inotify (?:watch|instance) limit",
        r"\b(?:shm|sem)get\b.{0,60}No space left",
        # Memory that a network card or a program may pin is a limit of its own.
        r"(?:ibv_\w{1,40}|\w{0,20}mr_reg|[Rr]egister memory|\bmlock(?:all)?"
        r"|\bcreate_[cq][qp]|\bio_uring\w{0,20})\b.{0,80}Cannot allocate memory"
        r"|max locked memory",
        r"unable to create (?:new )?native thread|too many memory regions",
    ),
    form("misconfiguration", "other", r"[Cc]annot allocate memory in static TLS block"),
    # No machine had room for it: it never ran.
    form(
        "no_capacity",
        "other",
        r"nodes are available: |\bFailedScheduling\b|\bUnschedulable\b",
        r"didn't have enough resource|Memory specification can not be satisfied",
        r"\bCapacityError\b|InsufficientInstanceCapacity|InsufficientFreeAddresses",
        r"_RESOURCE_POOL_EXHAUSTED|\bSTOCKOUT\b|[Uu]nable to provision",
        r"(?<![Dd]isk )(?<![Mm]emory )\b[Qq]uota (?:exceeded|metrics exceed|limit)"
        r"|exceed(?:s|ed)? (?:the |your )?(?:\w+ )?(?:quota|rate limit)"
        r"|[Rr]ate limit exceeded|\bcode 429\b|[Tt]oo many requests"
        r"|[Rr]esource has been exhausted \(e\.g\. check quota\)",
    ),
    form(
        "grpc",
        "error",
        r"message larger than max",
        r"metadata size exceeds|Bandwidth exhausted|ENHANCE_YOUR_CALM|too_many_pings",
        r"[Mm]essage (?:size )?exceeds (?:the )?max",
        r"trying to send message larger than max",
        r"grpc: received message (?:larger|after decompression larger)",
    ),
    form(
        "protobuf_limit",
        "error",
        r"larger than 2 ?GB",
        r"maximum protobuf size of 2 ?GB",
        r"GraphDef cannot be larger than",
        r"serialize message of type",
        r"[Pp]rotocol message was (?:rejected because it was )?too (?:big|large)",
        r"\b(?:[Pp]rotobuf|[Pp]rotocol (?:buffer|message)s?|[Pp]roto)\b.{0,80}"
        r"\b(?:exceeds|exceeded|larger than|bigger than|limited to|limit of)"
        r" (?:the )?\d+ ?[MG]i?B\b",
        r"protocol buffer\b.{0,160}larger than the limit",
        r"exceeds (?:the )?(?:maximum )?(?:protobuf|protocol buffer|2 ?GB)\b.{0,40}"
        r"(?:limit|size|2 ?GB)",
        r"exceeded maximum protobuf size",
        r"Exceeds maximum protobuf size",
        r"(?:[Pp]rotobuf|[Pp]roto|[Mm]essage|GraphDef|[Mm]odel)\b.{0,80}"
        r"\b(?:2 ?GB|2 ?GiB|2147483647|2147483648)\b",
        r"EncodeError: Failed to serialize proto",
        r"\b(?:[Tt]ensor|[Gg]raph|[Mm]essage|[Pp]roto)\w*\b.{0,60}"
        r"too large to (?:be )?serialized?\b",
    ),
    # Above 2 GB the counter of a message's size wraps. That a thread changes a message,
    # as the text has it, is rare.
    form(
        "protobuf_limit",
        "status",
        r"serialized to a size different from what was originally expected",
        r"[Bb]yte size calculation and serialization were inconsistent",
    ),
    form(
        "shm",
        "error",
        r"workers? (?:is|are) out of shared memory",
        r"raise your shared memory limit",
        r"insufficient shared memory",
        r"No space left on device\b.{0,120}/dev/shm|/dev/shm\b.{0,120}"
        r"(?:No space left on device|\bis full\b|Bus error|Cannot allocate)",
        r"unable to (?:open|write to|allocate|resize|create) .{0,20}shared memory",
        r"(?:Error while creating|failed to create) shared memory segment",
        r"shared memory (?:object|segment|store)\b.{0,80}(?:No space left|is full)",
        r"(?:torch_|/dev/shm|shm)\S{0,120}>?\b.{0,60}No space left on device \(28\)",
        r"killed by signal: Bus error",
        # The stores that Ray and Arrow keep there.
        r"ObjectStoreFullError|PlasmaStoreFull|\bobject store is full\b",
        r"not enough space for /dev/shm|Usage of EmptyDir volume .?\w{0,20}shm\b",
    ),
    form(
        "disk",
        "error",
        r"[Nn]o space left on device|\[Errno (?:28|122)\]|\[WinError 112\]",
        r"Disk quota exceeded|\bdisk is full\b",
        r"ENOSPC\b",
        r"EDQUOT\b",
        r"low on resource: (?:\[?DiskPressure|ephemeral-storage|inodes|imagefs|nodefs)",
        r"(?:node had condition: \[|\b)DiskPressure\b",
        r"[Ee]phemeral (?:local )?storage usage exceeds",
        r"exceeds.{0,60}ephemeral.storage",
        r"Usage of EmptyDir volume .{0,80} exceeds the limit",
        # One file grew above what is allowed for one.
        r"\[Errno 27\]|\bEFBIG\b|\berrno = 27\b|\bSIGXFSZ\b",
        r"[Ff]ile size limit exceeded",
        r"^(?!.{0,400}(?i:http|upload|request|413)).{1,400}[:;] ?File too large"
        r"(?= ?[\[('\"]|\.?$)",
        r"There is not enough space on the disk|[Nn]ot enough (?:free )?disk space",
        r"[Ff]ile write failed: .{0,200}(?:errno = 28|errno = 122)",
        # TensorFlow 1 said no more than the file's name.
        EXHAUSTED + r"(?:/|\.{1,2}/|[\w.-]{1,80}/)\S{0,400}(?:$|;| \[)",
        r"tempstate\d{6,}",
    ),
    # A size that no device ever had is a length that was read wrong.
    form(
        "crash",
        "other",
        r"more than 1EB memory",
        # The C library found its heap damaged: no matter of size.
        r"\bmalloc\.c:\d+: \w{1,40}: Assertion|\bdouble free or corruption",
        r"\b(?:malloc(?:_consolidate)?|realloc|free|munmap_chunk)\(\): (?:invalid"
        r"|corrupt|memory corrupt|unaligned|mismatch|unsorted|double free|too many)",
        r"\bcorrupted (?:size vs|double-linked list)",
    ),
    form(
        "hardware",
        "other",
        r"CUDA_ERROR_(?:NVLINK|ECC|HARDWARE)",
        r"uncorrectable (?:NVLink|ECC)",
        r"GPU has fallen off the bus|GPU is lost",
        # Those left out are faults of a program's kernels.
        r"\bNVRM: Xid\b(?!.{0,40}\): (?:13|31|43|45),)",
    ),
    form(
        "device_fault",
        "other",
        r"CUDA_ERROR_(?:ILLEGAL|MISALIGNED|LAUNCH_FAILED|ASSERT"
        r"|LAUNCH_OUT_OF_RESOURCES|UNKNOWN\b)",
        r"illegal memory access|misaligned address|\bNVRM: Xid\b",
        r"DXGI_ERROR_DEVICE|GetDeviceRemovedReason|CallbackErrorSubmissionsIgnored",
        r"device-side assert|kIOGPUCommandBufferCallbackError(?!OutOfMemory)",
        r"command buffer exited with error status(?!.{0,400}OutOfMemory)",
        r"too many resources requested for launch",
        r"unspecified launch failure",
        r"cudaErrorIllegalAddress",
    ),
    form(
        "misconfiguration",
        "other",
        # Said beside each cuDNN that did not start (pitfall 3). Drivers before 410 work
        # with no CUDA that TensorFlow 2 was built for.
        r"[Pp]ossibly insufficient driver version: (?:[1-3]?\d\d|40\d)\.",
        r"NCCL WARN Call to ibv_\w{1,40} failed|\bDuplicate GPU detected\b",
        r"CUDA driver version is insufficient|[Dd]river/library version mismatch",
        r"devices are busy or unavailable",
        r"no (?:CUDA-capable device|CUDA GPUs are available)",
        r"(?:CUDA_ERROR_NO_DEVICE|CUDA_ERROR_INVALID_DEVICE|CUDA_ERROR_COMPAT)",
        r"invalid device ordinal",
        r"no kernel image is available",
        r"Loaded runtime CuDNN library: .{0,80} but source was compiled with",
        r"Could not load dynamic library|cannot open shared object file",
        # A library for which there was no memory is no wrong set-up.
        r"^(?:ModuleNotFoundError|ImportError)\b(?!.{0,400}(?:Cannot allocate memory$"
        r"|[Pp]aging file is|[Nn]ot enough (?:memory|storage)\b"
        rf"|{TRANSLATED_NO_MEMORY}))",
        r"can't open file .{0,200}No such",
        r"(?:command not found|unrecognized arguments:)",
    ),
)
