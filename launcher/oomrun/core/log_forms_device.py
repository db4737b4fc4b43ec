"""Forms in which the memory of a device runs out.

Covers: allocators, starts, libraries, XLA, NCCL. See ``log_forms``.
"""

from __future__ import annotations

from oomrun.core.log_form import EXHAUSTED, Form, form

__all__ = ["DEVICE_GENERAL", "DEVICE_PARTICULAR"]

_GPU_PREFIX = r"(?:CU(?:DA|BLAS|DNN|SOLVER|SPARSE|FFT|RAND)|HIP|MIOPEN|ROCBLAS)"
_LIBRARY = (
    r"(?:(?:CU|HIP)(?:BLAS|DNN|SOLVER|SPARSE|FFT|RAND)|MIOPEN|ROC(?:BLAS|SOLVER|FFT))"
)
_SIZE = r"\d[\d.,]* ?(?:[KMGT]?i?B|[KMGT]|bytes)?"

DEVICE_PARTICULAR: tuple[Form, ...] = (
    # ----- memory of a device, the particular kinds -----
    form(
        "gpu_allocator",
        "error",
        r"(?:MemoryError|bad_alloc): .{0,200}(?:cudaErrorMemoryAllocation|CUDA error)",
        r"MEM_OBJECT_ALLOCATION_FAILURE",
        r"thrust::\w.{0,80}bad_alloc",
        r"\b(?:cupy|rmm|numba|triton)\b.{0,80}\b[Oo]ut[ _]?[Oo]f[ _]?[Mm]emory",
    ),
    form(
        "gpu_async_allocator",
        "error",
        r"cu(?:da)?(?:Mem|Malloc)\w{0,20}Async\b.{0,60}failed to allocate",
        r"gpu_async_\d+\b.{0,60}(?:failed|[Oo]ut of memory)",
        r"(?:cuda|hip)_?[Mm]alloc_?[Aa]sync\w{0,20}\b.{0,99}(?:out of mem|OUT_OF_MEM)",
        r"cudaMallocAsync\b.{0,80}(?:failed|error).{0,40}memory",
    ),
    # NCCL tries again with less, or in another way.
    form(
        "nccl",
        "hint",
        r"NCCL WARN .{0,200}(?:Cuda|CUDA|HIP) failure (?:\d+ )?'?out of memory",
        r"Cuda failure (?:\d+ )?'out of memory'",
        r"Failed to (?:CUDA|cuda) ?(?:calloc|malloc)",
    ),
    form(
        "nccl",
        "error",
        r"(?:\bNCCL\b|ncclUnhandledCudaError|ncclSystemError)\b.{0,200}"
        r"(?:\bout of memory|cudaErrorMemoryAllocation)",
    ),
    form("nccl", "status", r"unhandled cuda error"),
    form(
        "gpu_context",
        "error",
        r"(?:cuDevicePrimaryCtxRetain|cuCtxCreate|cuInit|hipCtxCreate|cuCtxSetCurrent"
        r"|cudaSetDevice|cudaGetDevice|cudaStreamCreate\w{0,20}|CUDA initialization)"
        r"\b.{0,160}(?:OUT_OF_MEMORY|[Oo]ut of memory|MemoryAllocation)",
        r"NVML: Insufficient Memory",
        r"initialization on GPU:\d+ failed\. Status: out of memory",
        r"(?:could not|failed to|[Uu]nable to)"
        r" (?:create|retain|initialize|allocate|get|set) (?:\w+ ){0,3}?"
        r"(?:CUDA |cuda )?(?:context|stream|device handle)\b.{0,200}"
        r"(?:OUT_OF_MEMORY|[Oo]ut of memory)",
        r"(?:CUDA|cuda|GPU|gpu) context\b.{0,120}(?:OUT_OF_MEMORY|[Oo]ut of memory)",
        r"context\b.{0,80}CUDA_ERROR_OUT_OF_MEMORY",
        r"[Oo]ut of memory\b.{0,60}\b(?:cuDevicePrimaryCtxRetain|cuCtxCreate|cuInit)",
        # A kernel's code and stacks are the driver's, beside all pools.
        r"(?:Gpu|Cuda|Hip)LaunchKernel\(.{0,400}: [Oo]ut of memory",
        r"\b[Ll]aunch (?:CUDA |ROCM |ROCm |GPU )?kernel\b.{0,300}"
        r"(?:OUT_OF_MEMORY|[Oo]ut ?[Oo]f ?[Mm]emory)",
    ),
    form(
        "gpu_library",
        "error",
        rf"{_LIBRARY}_(?!\w{{0,60}}HOST_ALLOC)\w{{0,60}}"
        r"(?:ALLOC_FAILED|ALLOCATION_FAILED|OUT_OF_MEMORY)",
        r"(?:miopenStatus|rocblas_status_|hipblasStatus)\w{0,20}"
        r"(?:[Aa]lloc_?[Ff]ailed|memory_error|_ALLOC_FAILED)",
        r"(?:cuDNN|cuBLAS|cuSOLVER|cuFFT|cublas|cudnn|MIOpen|rocBLAS|hipBLAS\w{0,3}"
        r"|(?:roc|hip)FFT)\b.{0,120}(?:OUT_OF_MEMORY|[Oo]ut of memory)",
        r"[Mm]emory not available to allocate buffer|Hip error creating buffer",
        r"(?:cublas|cudnn|cusolver|BLAS)\b.{0,40}: the resource allocation failed",
        r"(?:workspace|scratch)\b.{0,80}(?:OUT_OF_MEM|[Oo]ut of mem|not enough mem)",
        r"[Ff]ailed to allocate (?:\w+ )?(?:scratch|workspace|work area)\b",
        r"CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
        r"\b(?:cub|hipcub|rocprim|gpuprim)::.{0,300}"
        r"(?:[Oo]ut of memory|MemoryAllocation|OutOfMemory)",
        # The libraries' numbers for it.
        r"cuFFT \w{0,10} ?plan: ?2\b|cuSolver\w{0,4} call failed with status ?= ?2\b",
        r"\bmiopenStatusSuccess\b.{0,80}\(4 vs\. 0\)",
        r"\bCUDNN_STATUS_SUCCESS\b.{0,80}\(2 vs\. 0\)",
        r"\bCUBLAS_STATUS_SUCCESS\b.{0,80}\(3 vs\. 0\)",
    ),
    # A kernel's part of the memory on the chip. Here since queues limit "vmem", too.
    form(
        "xla",
        "error",
        r"[Ss]coped allocation with size|exceed\w{0,3} (?:the )?scoped \w{1,8} limit",
        r"\bCompileTime\w{1,20}Oom\b|\bRuntimeBufferAllocationFailure\b",
        r"would exceed memory \(size=\d",
    ),
)

DEVICE_GENERAL: tuple[Form, ...] = (
    # ----- memory of a device, in general -----
    form(
        "xla",
        "error",
        r"unlikely to have enough device memory",
        r"[Oo]ut of memory in memory space",
        r"Exceeded \w{1,12} capacity by",
        r"(?<![Rr]an )\b[Oo]ut of memory (?:while )?(?:trying to )?allocat",
        r"[Ff]ailed to allocate \d\S{0,20}(?: bytes)? for new constant",
        r"Attempting to (?:allocate|reserve) .{0,120}not possible",
        r"[Ff]ailed to allocate request for \S+",
        r"XlaRuntimeError: .{0,80}(?:[Oo]ut of memory|[Ff]ailed to allocate)",
        r"[Ff]ailed to load in-memory CUBIN.{0,120}(?:OUT_OF_MEMORY|out of memory)",
        r"(?:hlo|HLO|\bXLA\b|[Bb]uffer assignment|executable|[Cc]ompil)\w*.{0,120}"
        r"(?:exceeds|exceeded) (?:the )?(?:available |device |GPU |HBM )?"
        r"(?:memory|HBM)\b",
        r"[Aa]utotun\w{0,8}\b.{0,200}[Oo]ut of memory",
        r"(?:algorithms|configs) tried\b.{0,300}(?:[Oo]ut of mem|EXHAUSTED)",
    ),
    form("xla", "status", r"[Ff]ailed to determine best cudnn convolution algorithm"),
    # TensorFlow asks for most of a GPU, and for less where that fails.
    form(
        "gpu_context",
        "hint",
        rf"failed to alloc\w{{0,5}} {_SIZE}.{{0,80}}from device: "
        r"(?:CUDA_ERROR_OUT_OF_MEM|HIP_ERROR_OutOfMem|hipErrorOutOfMem|hipError_t\(\d)",
    ),
    form(
        "gpu_context",
        "status",
        r"HSA_STATUS_ERROR_OUT_OF_RESOURCES",
    ),
    form(
        "gpu_allocator",
        "status",
        r"\b(?:PI|UR_RESULT)_ERROR_OUT_OF_RESOURCES\b",
        # The class alone, where the text ends before the reason.
        r"^(?:tensorflow\.[\w.]{1,80}\.|tf\.[\w.]{1,80}\.|errors(?:_impl)?\.)?"
        r"ResourceExhaustedError(?:: {0,3}(?:Graph execution error:?"
        r"|\d+ root error\(s\) found\.?)?)?(?: {2,99}Traceback \(most .{0,20})?$",
    ),
    form(
        "gpu_allocator",
        "error",
        r"OOM (?:error )?when allocating|\b[Rr]an out of memory trying to allocate",
        EXHAUSTED + r"(?:[Ff]ailed to allocate (?:memory|request)|[Oo]ut of memory"
        r"|OOM\b|.{0,200}\bOOM when)",
        r"^failed to allocate memory$",
        r"[Ff]ailed to allocate memory for requested buf",
        r"Dst tensor is not initialized",
        rf"{_GPU_PREFIX}_\w{{0,60}}(?:OUT_OF_MEMORY|ALLOC_FAILED)",
        r"cudaErrorMemoryAllocation|hipErrorOutOfMemory|OUT_OF_DEVICE_MEMORY",
        r"\bE_OUTOFMEMORY\b|HRESULT\b.{0,40}0x8007000[eE]\b",
        r"Error Code \d+: OutOfMemory|ErrorOutOfMemory\)?$|CL_OUT_OF_RESOURCES",
        r"(?i:failed to alloc\w{0,6} (?:device|hbm|gpu|vram|xpu) memory)",
        r"unable to allocate output tensor\b",
        r"Check failed: .{0,160}\b(?:cuda|hip)Success\b.{0,160}"
        r"\((?:(?:2|1002) vs\. 0|0 vs\. (?:2|1002))\)",
        r"CUDABadAlloc|\bCUDA (?:memory )?allocation failed",
        r"DEVMEM Allocation failed|[Ff]ailed to allocate (?:\w+ )?MTL[A-Z]\w+",
        r"NVMLError_InsufficientMemory|\b[Cc]uda\b.{0,80}\(out of memory\)",
        r"Error \[(?:CUDA|HIP)\]: out of memory",
        r"\b(?:CUDA|HIP|XPU|NPU|MPS backend|MUSA|HPU|ROCm|GPU) out of memory(?=\W|$)"
        r"(?! [a-z])",
        r"\b[Oo]ut of memory (?:error )?on (?:GPU|CUDA|device)\b",
        r"\b(?:CUDA|HIP|CUDNN|cuda|NCCL)(?: driver| runtime)?"
        r" (?:[Ee]rror|failure)\b.{0,60}"
        r"\b(?:out of memory|MemoryAllocation|memory allocation)",
        r"\b(?:cuda|hip)[A-Z]\w{0,40}\b.{0,60}\bout of memory",
        r"(?<![\w.])(?!java\.|ray\.)(?:\w{1,40}\.){0,8}OutOfMemoryError(?=:|$)",
        r"PJRT\b.{0,80}RESOURCE_EXHAUSTED.{0,80}memory",
    ),
    form(
        "gpu_library",
        "status",
        r"CUDNN_STATUS_(?:INTERNAL_ERROR|NOT_INITIALIZED)",
        r"CUBLAS_STATUS_(?:INTERNAL_ERROR|NOT_INITIALIZED)",
        r"CUSOLVER_STATUS_(?:INTERNAL_ERROR|NOT_INITIALIZED)",
        r"[Ff]ailed to get convolution algorithm",
        r"No algorithm worked",
        r"[Ff]ailed to create cuSolver\w{0,4} instance",
        r"operation \w{0,40}Create\(&handle\) failed",
        r"(?i:failed to (?:make|create|initialize) (?:\w+ )?cufft (?:\w+ )?plan)",
        r"DNN library (?:initialization failed|is not found)",
        r"Failure to initialize cublas may be due to OOM",
        r"[Aa]ttempting to perform BLAS operation using StreamExecutor without BLAS",
    ),
    # Of many causes, and memory is not the likely one (pitfall 3).
    form(
        "gpu_library",
        "hint",
        r"CUDNN_STATUS_(?:NOT_SUPPORTED|EXECUTION_FAILED|BAD_PARAM)(?!.{0,80}contiguous)",
        r"Blas x?(?:GEMM|SCAL|GEMV)\w{0,20} launch failed",
    ),
)
