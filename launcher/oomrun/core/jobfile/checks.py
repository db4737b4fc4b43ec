"""How the keys of a job file go together.

Each check looks only at values that are good by themselves, so that one slip is
reported once.
"""

import re

from oomrun.core.jobfile import checks_command, checks_kubernetes
from oomrun.core.jobfile.reading import Reading
from oomrun.core.spec import IN_WORKERS, Bytes, Gpus, Share
from oomrun.core.units import format_bytes

_placeholder = re.compile(r"\{([^{}]*)\}|[{}]")


def check(reading: Reading) -> None:
    """Report what cannot be together."""
    _program(reading)
    _batch(reading)
    _limit_twice(reading)
    _mode(reading)
    _limit_count(reading)
    _one_device(reading)
    _headroom(reading)
    _checkpoint_dir(reading)
    _metrics(reading)
    checks_command.check(reading)
    checks_kubernetes.check(reading)


def on_cpu(reading: Reading) -> bool:
    """Whether the devices are the CPU for certain."""
    return reading.values.get("devices") == "cpu" or "devices.cpu" in reading.places


def limit_path(reading: Reading) -> str:
    """Where the memory limit is given: ``devices.memory`` means the same."""
    return "devices.memory" if "devices.memory" in reading.places else "memory.limit"


def _program(reading: Reading) -> None:
    given = [key for key in ("script", "module", "command") if key in reading.places]
    if not given and "" in reading.places:
        wrong = "expected one of the keys script, module and command"
        reading.report("", wrong, "such as script: train.py")
    for other in given[1:]:
        wrong = f"{given[0]} and {other} exclude each other"
        problem = reading.keys[other].problem(other, wrong, "keep one of them")
        reading.problems.append(problem)
    if given == ["command"] and "args" in reading.keys:
        wrong = "args and command exclude each other"
        hint = "put the arguments into command"
        reading.problems.append(reading.keys["args"].problem("args", wrong, hint))


def _batch(reading: Reading) -> None:
    micro = reading.values.get("batch.micro")
    whole = reading.values.get("batch.global")
    if isinstance(micro, int) and isinstance(whole, int) and micro > whole:
        wrong = f"expected at most batch.global ({whole}), got {micro}"
        reading.report("batch.micro", wrong)


def _limit_twice(reading: Reading) -> None:
    if "devices.memory" in reading.places and "memory.limit" in reading.places:
        wrong = "memory.limit and devices.memory are the same limit"
        reading.report("memory.limit", wrong, "keep one of them")


def _mode(reading: Reading) -> None:
    mode = reading.values.get("memory.mode")
    limited = isinstance(reading.values.get(limit_path(reading)), Bytes | Share | tuple)
    if mode == "growth" and limited and not on_cpu(reading):
        wrong = "growth and a limit exclude each other in TensorFlow"
        hint = "write mode: limit, or leave one of them out"
        reading.report("memory.mode", wrong, hint)
    if mode == "preallocate" and on_cpu(reading):
        wrong = "a CPU device cannot preallocate its memory"
        reading.report("memory.mode", wrong, "leave it out")


def _limit_count(reading: Reading) -> None:
    path = limit_path(reading)
    limits = reading.values.get(path)
    count = _device_count(reading)
    if isinstance(limits, tuple) and count is not None and len(limits) != count:
        wrong = f"expected one limit for each device ({count}), got {len(limits)}"
        reading.report(path, wrong)


def _one_device(reading: Reading) -> None:
    """Several devices are not for every strategy, nor for a command."""
    strategy, count = reading.values.get("strategy", "auto"), _device_count(reading)
    path = "devices.cpu" if "devices.cpu" in reading.places else "devices"
    several = count is not None and count > 1
    command = "command" in reading.places
    if several and (strategy == "single" or (strategy == "auto" and command)):
        wrong = f"strategy {strategy} trains on one device, got {count}"
        hint = "name one device" if command else "write strategy: auto, or name one"
        reading.report(path, wrong, hint)
    if several and strategy in ("mirrored", *IN_WORKERS) and command:
        wrong = f"a command starts its own workers, got strategy {strategy}"
        reading.report("strategy", wrong, "leave strategy and the further devices out")
    if "hosts" in reading.places and strategy not in ("auto", *IN_WORKERS):
        wrong = f"strategy {strategy} trains on one host"
        reading.report("hosts", wrong, "write strategy: auto, or leave hosts out")
    elif "hosts" in reading.places and command:
        wrong = "a command starts its own workers, on its own hosts"
        reading.report("hosts", wrong, "leave hosts out")


def _device_count(reading: Reading) -> int | None:
    """How many devices there will be, if the job file alone says so."""
    devices = reading.values.get("devices")
    count = reading.values.get("devices.cpu")
    if isinstance(count, int):
        return count
    if isinstance(devices, Gpus | tuple):
        return len(devices) if isinstance(devices, tuple) else None
    return 1 if devices == "cpu" else None


def _headroom(reading: Reading) -> None:
    headroom = reading.values.get("memory.headroom")
    given = reading.values.get(limit_path(reading))
    limits = given if isinstance(given, tuple) else (given,)
    sizes = [limit.count for limit in limits if isinstance(limit, Bytes)]
    if isinstance(headroom, Bytes) and sizes and headroom.count >= min(sizes):
        wrong = f"expected less than the limit ({format_bytes(min(sizes))})"
        reading.report("memory.headroom", wrong, "nothing would be left to plan with")


def _checkpoint_dir(reading: Reading) -> None:
    folder = reading.values.get("checkpoint.dir")
    for match in _placeholder.finditer(folder if isinstance(folder, str) else ""):
        if match.group(1) != "name":
            wrong = f"expected {{name}} as the only placeholder, got {match.group()}"
            reading.report("checkpoint.dir", wrong)


def _metrics(reading: Reading) -> None:
    wrong_already = {problem.path for problem in reading.problems}
    for section in ("metrics.token", "metrics.basic_auth.password"):
        given = [key for key in ("file", "env") if f"{section}.{key}" in reading.places]
        if section in reading.places.keys() - wrong_already and len(given) != 1:
            wrong = f"expected one of the keys file and env, got {len(given) or 'none'}"
            reading.report(section, wrong)
    if "metrics.token" in reading.places and "metrics.basic_auth" in reading.places:
        wrong = "metrics.token and metrics.basic_auth exclude each other"
        reading.report("metrics.basic_auth", wrong, "keep one of them")
    textfile = reading.values.get("metrics.textfile")
    if isinstance(textfile, str) and not textfile.endswith(".prom"):
        wrong = f"expected a name that ends in .prom, got {textfile}"
        reading.report("metrics.textfile", wrong, "node_exporter reads no others")
    if "metrics.listen" not in reading.values or reading.values["metrics.listen"]:
        return
    for key in ("tls", "token", "basic_auth"):
        path = f"metrics.{key}"
        if path in reading.places:
            wrong = f"{path} is for metrics.listen, which is none"
            reading.report(path, wrong, "leave one of them out")
