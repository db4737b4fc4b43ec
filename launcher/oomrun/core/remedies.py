"""What would help against a failure, and what in a log points to it.

Covers: signs (another process, fragmentation, a weight and not a batch …), the phase of
the training, the levers that follow. Does not cover: pulling one (``policy``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from oomrun.core import units
from oomrun.core.causes import Cause
from oomrun.core.log_facts import Facts, size_bytes
from oomrun.core.log_reading import Reading

__all__ = ["LEVERS", "levers", "phase", "sentence", "signs"]

#: What each lever means, for a person.
LEVERS = {
    "shrink_micro_batch": "use a smaller micro-batch",
    "restart_same": "start it again as it is",
    "free_device": "free the device: end other processes on it, or let the pool take "
    "less of it",
    "raise_shm": "give it a larger /dev/shm",
    "shrink_host_pipeline": "load less at once: smaller shuffle buffer and prefetch, "
    "fewer loader workers",
    "fix_disk": "make room on the disk, or raise the quota",
    "fix_code": "change the program at the named place",
    "sparse_as_dense": "reduce the embedding's gradient densely (sparse_as_dense)",
    "pin_gpu": "give each process a GPU of its own",
    "revert_last_change": "take the last change of the settings back",
    "fewer_ranks_per_host": "run fewer processes on a host",
    "none": "nothing needs to be done",
}

Phase = Literal["start", "gradients", "apply", "evaluate", "checkpoint", "unknown"]

_OPTIMIZERS = re.compile(
    r"(?:^|/)(?:adam\w*|sgd|momentum|rmsprop|adagrad\w*|adadelta|ftrl|lamb|nadam|lion"
    r"|adafactor|optimizer|train_op|apply_gradients)(?:_\d+)?/",
    re.IGNORECASE,
)
_initializer = re.compile(
    r"Initializer/|/Assign\b|zeros_like|random_(?:uniform|normal)"
)
_evaluate = re.compile(
    r"in (?:test_step|evaluate|test_function|predict|predict_step|validate|run_eval"
    r"|validation_step)\b|__inference_(?:test|predict)_\w+|\bevaluat(?:e|ion|ing)\b"
    r"|\b[Vv]alidat(?:e|ion|ing)\b|\bprediction_loop\b|\btraining=False\b",
)
# An estimator evaluates when it has written a checkpoint.
_after_checkpoint = re.compile(r"Saving checkpoints? for \d+.{0,400}\n.{0,400}OOM when")
_checkpoint = re.compile(
    r"in (?:save|save_weights|save_checkpoint|_save|save_model|write)\b|\[Op:SaveV2"
)
_backward = re.compile(r"gradient|backprop|Grad\b|in backward\b|\.backward\(", re.I)

_SIGNS = (
    ("fragmentation", re.compile(
        r"reserved by PyTorch but unallocated|due to memory fragmentation\."
    )),
    ("other_process", re.compile(
        r"[Pp]rocess \d+ has \d|other process(?:es)? (?:is|are|on) |already (?:in use|"
        r"allocated) by another process"
    )),
    ("device_shared", re.compile(r"\bDuplicate GPU detected\b")),
    ("device_busy", re.compile(r"devices are busy or unavailable")),
    ("settings_changed", re.compile(
        r"\b(?:fraction|limit|batch[ _]size|setting)\b.{0,60}\b(?:raised|increased"
        r"|changed|bumped)\b (?:from|to)\b"
    )),
    ("sparse_gradients", re.compile(
        r"IndexedSlices|Horovod_?Allgather|HorovodAllgather"
    )),
    ("sequence", re.compile(
        r"(?:rnn|lstm|gru)[\w/]{0,80}/while|TensorArray"
        r"|\bbucket|sequence length|padded to"
    )),
    # On the chip, of a fixed size: a kernel is too large for it.
    ("scratch", re.compile(
        r"(?:memory space |scoped |space=)(?:vmem|smem|cmem|sflag)\b"
    )),
    ("padding", re.compile(r"Extra memory due to padding")),
    ("loader", re.compile(
        r"DataLoader|shuffle buffer|prefetch|shuffle_batch|input_pipeline|tf_data"
        r"|num_workers"
    )),
    # Keras takes its batches from arrays in memory in this way: all of the data went.
    ("copied_in", re.compile(
        r"Failed copying input tensor from \S{1,80}CPU:\d.{0,200} to run GatherV2\b"
    )),
    ("read_in", re.compile(r"\bastype\b|np\.load|read_csv|for an array with shape")),
)  # fmt: skip
_smi = re.compile(r"^\[(\d+)\] .{0,80}\| +(\d+) / (\d+) MB", re.MULTILINE)
_pool = re.compile(r"Created (?:TensorFlow )?device \(.{0,120} with (\d+) MB memory\)")
_ladder = re.compile(r"failed to alloc\w* \S+ (?:\((\d+) bytes\) )?from device")
_unallocated = re.compile(r"and (\d+(?:\.\d+)?) ([KMG])iB is reserved by PyTorch but")
_wanted = re.compile(r"Tried to allocate (\d+(?:\.\d+)?) ([KMG])iB")
_node_number = re.compile(r"\[\[Node: \w{1,80}_(\d{1,9}) = ")
_limit = re.compile(r"^(?:.{0,40}> ?:?)?Limit: +(\S{1,30})$", re.MULTILINE)
_in_use = re.compile(r"^(?:.{0,40}> ?:?)?InUse: +(\S{1,30})$", re.MULTILINE)
# A cgroup slowed its processes down: they were above memory.high.
_throttled = re.compile(r"^\s*high [1-9]\d{0,18}\s*$", re.MULTILINE)
_late = re.compile(r"\b[Ee]poch[ :]+(\d+)")
_SMALL_POOL_MB = 512
# No batch, but the data of a whole training.
_LARGE_CONSTANT = 2**28
_TINY_BYTES = 8 * 2**20
_HUGE_DIMENSION = 100_000
_MANY_NODES = 1000
_HUGE_REQUEST = 2**37  # 128 GiB: above any single device of today's
_SCALE = {"K": 2**10, "M": 2**20, "G": 2**30}


def signs(
    text: str, reading: Reading, facts: Facts, others: Sequence[int] | None
) -> tuple[str, ...]:
    """What stands out in a log, in a fixed order."""
    found = [name for name, pattern in _SIGNS if pattern.search(text)]
    if "fragmentation" in found and not _fragmented(text):
        found.remove("fragmentation")
    if others:
        found.append("other_process")
    pools = [int(match[1]) for match in _pool.finditer(text)]
    if pools and min(pools) < _SMALL_POOL_MB:
        found.append("full_before")
    if _throttled.search(text):
        found.append("throttled")
    if _uneven(text):
        found.append("one_device_for_all")
    if len(_ladder.findall(text)) >= 3:
        found.append("start_ladder")
    size = size_bytes(facts)
    if size is not None and size < _TINY_BYTES:
        found.append("tiny_request")
    if _many_ranks(reading, tiny="tiny_request" in found):
        found.append("many_ranks")
    if size is not None and size > _LARGE_CONSTANT and facts.operation == "_EagerConst":
        found.append("constant")
    if size is not None and size > _HUGE_REQUEST:
        found.append("huge_request")
    if facts.shape and max(facts.shape) >= _HUGE_DIMENSION and len(facts.shape) == 2:
        found.append("weight")
    if _step_on_host(facts):
        found.append("step_on_host")
    if facts.shape and len(facts.shape) > 2 and facts.shape[0] == 1:
        found.append("one_sample")
    if facts.shape and _unsplit(text, facts.shape[0]):
        found.append("unsplit")
    if _fragmented_pool(text, facts.requested_bytes):
        found.append("fragmentation")
    nodes = [int(match[1]) for match in _node_number.finditer(text)]
    if nodes and max(nodes) >= _MANY_NODES:
        found.append("piling_up")
    epochs = [int(match[1]) for match in _late.finditer(text)]
    if epochs and max(epochs) >= 10:
        found.append("late")
    return tuple(dict.fromkeys(found))


def _many_ranks(reading: Reading, *, tiny: bool) -> bool:
    """Whether several ranks found no memory for their start, or for next to nothing."""
    kinds = {"gpu_context", *(("gpu_allocator",) if tiny else ())}
    failed = {
        hit.line.rank for hit in reading.hits
        if hit.form.kind in kinds and hit.form.role in ("error", "hint", "status")
    }  # fmt: skip
    return len(failed) > 1


def _step_on_host(facts: Facts) -> bool:
    """Whether it is a tensor of several samples, as of a model on the CPU device."""
    several = facts.shape is not None and len(facts.shape) > 1 and facts.shape[0] > 1
    return several and (facts.device or "").startswith("CPU:")


def _fragmented(text: str) -> bool:
    """Whether more is reserved and not used than a good part of what was wanted."""
    free, wanted = _unallocated.search(text), _wanted.search(text)
    if free is None or wanted is None:
        return free is None
    unused = float(free[1]) * _SCALE[free[2]]
    return unused >= 0.5 * float(wanted[1]) * _SCALE[wanted[2]]


_replicas = re.compile(r"\b(?:towers|replicas|gpus|devices|num_gpus|ranks)[=:] ?(\d+)")
_samples = re.compile(r"\b\w{0,20}(?:images|samples|batch)\w{0,20}[=:] ?(\d+)")


def _unsplit(text: str, size: int) -> bool:
    """Whether a tensor holds the samples of all replicas."""
    replicas, samples = _replicas.search(text), _samples.search(text)
    if replicas is None or samples is None or int(replicas[1]) < 2:
        return False
    return int(replicas[1]) * int(samples[1]) == size


def _fragmented_pool(text: str, wanted: int | None) -> bool:
    """Whether TensorFlow's pool had more free than was wanted, in pieces."""
    limits, used = _limit.findall(text), _in_use.findall(text)
    if wanted is None or not limits or not used:
        return False
    try:
        free = _plain_bytes(limits[-1]) - _plain_bytes(used[-1])
    except ValueError:
        return False
    return free >= wanted


def _plain_bytes(text: str) -> int:
    return int(text) if text.isdigit() else units.parse_bytes(text)


def _uneven(text: str) -> bool:
    """Whether a list of cards shows one full and the others idle."""
    shares = [int(used) / max(1, int(total)) for _, used, total in _smi.findall(text)]
    if len(shares) < 2:
        return False
    return max(shares) > 0.85 and sorted(shares)[-2] < 0.3


def phase(text: str, facts: Facts) -> Phase:
    """Where in the training it was, if the operation or the traceback tells."""
    operation = f"{facts.operation or ''}/"
    if _initializer.search(operation):
        return "start"
    if _OPTIMIZERS.search(operation):
        return "apply"
    end = text[-8192:]
    if _checkpoint.search(end):
        return "checkpoint"
    if _evaluate.search(text) or _after_checkpoint.search(text):
        return "evaluate"
    if _backward.search(operation) or _backward.search(end):
        return "gradients"
    return "unknown"


def levers(
    kind: str,
    *,
    is_oom: bool,
    cause: Cause | None,
    phase: Phase,
    signs: Sequence[str],
) -> tuple[str, ...]:
    """What would help, the best first."""
    match kind:
        case "disk":
            return ("fix_disk",)
        case "protobuf_limit" | "grpc":
            return ("fix_code",)
        case "shm":
            more = ("shrink_host_pipeline",) if "loader" in signs else ()
            return ("raise_shm", *more)
        case "host_killed":
            return ("shrink_host_pipeline", "fewer_ranks_per_host")
        case "host_allocator" if is_oom and cause is not Cause.DEVICE_OOM:
            return _of_host(signs)
        case "gpu_context":
            if {"start_ladder", "many_ranks"} & set(signs):
                return ("pin_gpu", "free_device")
            return ("free_device", "fewer_ranks_per_host")
        case "gpu_library" | "nccl":
            return ("free_device", "shrink_micro_batch")
    if is_oom and kind == "host_allocator":
        # The CPU device's pool: nobody else is in it.
        return tuple(x for x in _of_device(phase, signs) if x != "free_device")
    if is_oom:
        return _of_device(phase, signs)
    if "device_busy" in signs:
        return ("free_device", "pin_gpu")
    if "device_shared" in signs:
        return ("pin_gpu", "fix_code")
    if cause in (Cause.KILLED, Cause.PREEMPTION, Cause.HANG):
        return ("restart_same",)
    if cause in (Cause.CRASH, Cause.MISCONFIGURATION):
        return ("fix_code",)
    if "throttled" in signs:
        return ("shrink_host_pipeline",)
    return ("none",)


def _of_host(signs: Sequence[str]) -> tuple[str, ...]:
    if "read_in" in signs:
        return ("fix_code", "shrink_host_pipeline")
    other = {"loader", "weight", "tiny_request"} & set(signs)
    batch = ("shrink_micro_batch",) if "step_on_host" in signs and not other else ()
    if "late" in signs:
        return (*batch, "restart_same", "shrink_host_pipeline")
    return (*batch, "shrink_host_pipeline", "fix_code")


_OF_THE_PROGRAM = frozenset(
    {
        "weight", "constant", "copied_in", "scratch", "padding", "huge_request",
        "sequence", "unsplit", "one_sample",
    }
)  # fmt: skip


def _of_device(phase: Phase, signs: Sequence[str]) -> tuple[str, ...]:
    if {"one_device_for_all", "many_ranks"} & set(signs):
        return ("pin_gpu", "free_device")
    if "sparse_gradients" in signs:
        return ("sparse_as_dense", "shrink_micro_batch")
    if "settings_changed" in signs:
        return ("revert_last_change", "shrink_micro_batch")
    if "other_process" in signs or "full_before" in signs:
        return ("free_device", "shrink_micro_batch")
    if "piling_up" in signs:
        return ("restart_same", "fix_code")
    if "fragmentation" in signs:
        return ("restart_same", "shrink_micro_batch")
    if _OF_THE_PROGRAM & set(signs):
        return ("fix_code", "shrink_micro_batch")
    if "tiny_request" in signs:
        # The last drop: what filled the device is another.
        return ("free_device", "shrink_micro_batch")
    if phase in ("apply", "evaluate", "start"):
        return ("fix_code", "shrink_micro_batch")
    return ("shrink_micro_batch", "free_device")


_IN_PHASE = {
    "start": " at the start",
    "gradients": " in the backward pass",
    "apply": " in the optimizer",
    "evaluate": " in evaluation",
    "checkpoint": " while a checkpoint was written",
    "unknown": "",
}


def sentence(summary: str, facts: Facts, phase: Phase) -> str:
    """The summary with what is known of the allocation."""
    size = facts.requested_bytes or facts.about_bytes
    parts = []
    if size is not None:
        parts.append(f"{units.format_bytes(size)} were asked for")
    if facts.shape is not None:
        of = f" of {facts.dtype}" if facts.dtype else ""
        parts.append(f"shape {list(facts.shape)}{of}")
    if facts.device is not None:
        parts.append(f"on {facts.device}")
    if facts.operation is not None and size is not None:
        parts.append(f"by {facts.operation}")
    told = f" ({', '.join(parts)})" if parts else ""
    return f"{summary}{_IN_PHASE[phase]}{told}"
