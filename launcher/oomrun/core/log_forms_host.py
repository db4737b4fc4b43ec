"""Forms in which the memory of a host runs out, and of processes that were killed.

See ``log_forms``.
"""

from __future__ import annotations

from oomrun.core.log_form import Form, form

__all__ = ["HOST_GENERAL", "HOST_MEMORY"]

# Of TensorFlow's allocators, those of a host: pageable, and pinned for copies to a GPU
# ("cuda_host_bfc", "gpu_host_bfc").
_OF_HOST = (
    r"(?:\w{0,20}cpu\w{0,40}|CPU|mkl_bfc\w{0,20}|(?:\w{1,20}_)?host(?:_\w{1,20})?)\b"
)

HOST_MEMORY: tuple[Form, ...] = (
    # ----- memory of the host -----
    form(
        "host_killed",
        "error",
        r"\boom[-_]kill(?:er)? event",
        r"exceeded \d+% memory budget|\bKilledWorker\b",
        r"\bOOM[- ]?[Kk]illed\b|\bSystem OOM encountered",
        r"\bcontainer oom [0-9a-f]{8}|/tasks/oom\b|\bTaskOOM\b",
        r"for exceeding (?:\w+ )?memory limits?|physical memory used\. ",
        r"hard limit .?[hs]_(?:vmem|rss|data)\b|job killed: p?v?mem \d",
        r"exceeded MEM usage hard limit",
        r"instance type with more memory|using all available RAM",
        r"tried to allocate more memory than is available",
        r"Memory (?:quota|limit of .{1,20}) exceeded",
        r"Detected \d+ oom",
        r"cgroup out-of-memory handler",
        # "At some point" is told of jobs that ended well, too.
        r"\bExceeded (?:job|step) memory limit(?! at some)",
        r"ran out-of-memory and exited",
        r"task[ s\d,\[\]-]{0,40}: Out Of Memory",
        r"JobState=OUT_OF_MEMORY|\bState[:=]? *OUT_OF_ME|\bOUT_OF_ME(?:M|MORY)?\b\+?"
        r".{0,20}\b0:125",
        r"low on resource: memory",
        r"node had condition: \[?MemoryPressure",
        r"(?:exceeded|exceeds|over|beyond|above) (?:\w+ ){0,2}"
        r"(?:memory|mem|RSS|vmem|rss|virtual memory|physical memory) (?:limit|request)",
        r"[Cc]group mem(?:ory)? limit exceeded|exceed\w{0,3} request_memory\b",
        r"[Mm]emory (?:limit )?.{0,40}exceeded.{0,60}\bkill",
        r"\bkill\w{0,3}\b.{0,120}(?:\bout of memory\b|running low on memory"
        r"|due to (?:memory|the OOM)|by the (?:Linux |kernel )?OOM[- ]?[Kk]iller)",
        r"OutOfMemoryError: Task was killed",
        r"due to the node running low on memory",
        r"(?:OOM|oom|out-of-memory)[- ][Kk]iller (?:has )?kill\w*",
        r"TERM_MEMLIMIT",
        r"systemd-oomd killed|\bearlyoom\b.{0,80}(?:kill|SIG)",
        r"Failed with result 'oom-kill'",
        r"A process of this unit has been killed by the OOM killer",
        r"used more memory than|Container killed on request.{0,40}Exit code is 137",
        r"is running beyond (?:physical|virtual) memory limits",
    ),
    form(
        "shm",
        "killed",
        r"^(?:.{0,200}\bline \d+: {0,8}\d+ )?Bus error\b",
        r"(?:signal|SIG) ?(?:7\b|\(?SIGBUS)|\bSIGBUS\b|exited on signal 7",
        r"Fatal Python error: Bus error",
    ),
    form(
        "host_killed",
        "killed",
        r"^Killed$|\bline \d+: {0,8}\d+ Killed\b",
        r"\bkilled by signal: Killed\b",
        r"\b[Ss]ignal 9\b",
        r"(?:\(|[Rr]eceived |by |[Ss]ignal |Signals\.|of )SIGKILL\b|SIGKILL ?\(-?9\)",
        r"\b9 ?\(Killed\)|\(Killed\)$|\bstatus=9/KILL\b|zsh: killed\b",
        r"[Ee]xit(?:ed)?[ _-]?(?:with )?(?:error )?(?:code|status)?\W{1,8}(?:137|-9)\b",
        r"\bcode (?:137|-9)\b",
    ),
    form(
        "host_allocator",
        "error",
        rf"\b(?:OOM|[Oo]ut of memory)\b.{{0,400}}\bby allocator {_OF_HOST}",
        rf"Allocator \({_OF_HOST}\) ran out of memory",
        r"^(?:[\w.]{0,80}[.:] ?)?_?(?:Array)?MemoryError(?=:|$| \()",
        r"(?:Error|Exception): .{0,80}(?<![\w.])_?(?:Array)?MemoryError(?:\(|:|$)",
        r"(?:INTERNAL|UNKNOWN|Internal|Unknown)\b.{0,40}: _?(?:Array)?MemoryError\b",
        r"Unable to allocate \S+ \w+ for an array",
        r"[a-z]: MemoryError:",
        r"\bbad_alloc\b(?!\w)",
        r"St9bad_alloc",
        r"DefaultCPUAllocator: .*memory|not enough memory: you tried to allocate",
        r"\b[Cc]annot allocate (?:memory|vector of size)\b",
        r"\[WinError (?:8|14|1450|1455)\]|[Pp]aging file is too small",
        r"\[WinError 1816\]|low virtual memory condition",
        r"[Nn]ot enough memory resources|\b(?i:0xc0000017|0xc000012d)\b",
        r"[Nn]ot enough (?:storage|quota) is available to",
        r": bad allocation(?= \[|[.!]?$)",
        r"\[Errno 12\]|\bENOMEM\b",
        r"memory for the batch of component",
        r"\b[Oo]ut of memory\b.{0,60}\b(?:cudaHostAlloc|cudaMallocHost|hipHostMalloc)",
        r"(?:cudaHostAlloc|cudaMallocHost|hipHostMalloc)\b.{0,60}[Oo]ut of memory",
        r"[Ff]ailed to (?:(?:CUDA|HIP) host alloc|malloc)\b",
        r"OUT_OF_HOST_MEMORY|HOST_ALLOCATION_FAILED",
        # From a GPU, to be read.
        r"unable to allocate output tensor\b"
        r".{0,300};[0-9a-f]{1,16};\S{0,120}device:CPU:",
        # oneDNN's number for it.
        r"exception:Status: 1, message: could not",
        r"\bon host: CUDA_ERROR_OUT_OF_MEMORY|(?:allocate|register) pinned host memory",
        r"pinned (?:host )?memory\b.{0,60}(?:OUT_OF_MEMORY|[Oo]ut of memory)",
        r"java\.lang\.OutOfMemoryError|ray\.exceptions\.OutOfMemoryError",
        r"(?:JavaScript heap|LLVM ERROR:) out of memory",
        r"LLVM ERROR: [Uu]nable to allocate",
        r"fatal error: runtime: (?:cannot allocate memory|out of memory)",
        r"memory allocation of \d+ bytes failed",
        r"(?:pyarrow\.lib\.)?ArrowMemoryError|malloc of size \d+ failed",
        # NCCL names malloc among what a system call may be.
        r"(?<!socket, )(?:malloc|calloc|realloc|mmap|posix_memalign)\(?\)?\b.{0,40}"
        r"(?:failed|[Cc]annot allocate)",
        r"malloc: can't allocate|mimalloc: .{0,20}unable to allocate",
        r"tcmalloc: .{0,40}(?:failed|Unable)|tcmalloc: allocation failed",
        r"libgomp: Out of memory|out of memory allocating \d+ bytes after",
        r"[Mm]emory allocation (?:still failed|failure$)|sqlite3\.\w{1,40}: out of mem",
        r"[Cc]annot recover from MemoryErrors|[Ii]nsufficient memory for the Java",
        r"[Cc]ould not reserve enough space for",
        r"(?:failed|unable) to allocate .{0,40}\b(?:on|from) (?:the )?(?:host|CPU)\b",
        r"_?(?:virtual |Virtual )memory exhausted",
        r"HDF5.{0,80}(?:memory allocation failed|can't allocate)",
        r"(?:error|cv2\.error): .{0,120}Failed to allocate \d+ bytes",
    ),
    # It was not given; most programs end of it, some do without.
    form("host_allocator", "hint", r"tcmalloc: large alloc \d{1,20} bytes == \(nil\)"),
)

#: Of any program: after all that is known of devices.
HOST_GENERAL: tuple[Form, ...] = (
    form(
        "gpu_allocator",
        "error",
        r"ErrorOutOfDeviceMemory|[Dd]evice memory allocation\b.{0,60}\bfailed",
        r"(?:GPU|VRAM|[Dd]evice|HBM)\b.{0,40}\b(?:is|ran) out of memory",
    ),
    form(
        "host_allocator",
        "error",
        r"\bOutOfMemory(?:Error|Exception)?(?=\(|:|$)|ErrorOutOfHostMemory",
        r"(?i:\b(?:error|fatal|exception|panic)\b.{0,80}: (?:out of|insufficient) mem)",
        r"^[Oo]ut of memory[.!:]?$|\b[Mm]emory allocation failed\b",
        r"[Cc]ould not allocate \d",
    ),
    # Words alone: a guess.
    form("host_killed", "status", r"exited with error: signal: killed"),
    form(
        "gpu_allocator",
        "status",
        r"(?i:\b(?:cuda|gpu|device|hbm)\b.{0,120}\bout of memory\b)",
        r"(?i:\bout of memory\b.{0,60}\b(?:cuda|gpu|device)\b)",
        r"(?i:\bnot enough (?:gpu|device|cuda|vram|video) ?(?:memory|ram)?\b)",
    ),
    form(
        "host_allocator",
        "status",
        r"(?i:\b(?:error|failed|failure|fatal|aborted)\b.{0,120}\bout of memory\b)",
        r"(?i:\bout of memory\b.{0,60}\b(?:error|abort\w{0,3}|exiting|failed))",
        r"(?i:(?:error|failed|exhausted)\b.{0,120}\bnot enough (?:ram|memory)\b)",
    ),
)
