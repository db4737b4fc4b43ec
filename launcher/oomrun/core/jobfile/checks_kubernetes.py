"""How the section ``kubernetes`` goes together with itself and with the rest.

Covers: ``check``, for every reader of the file; ``check_for_cluster``, for those who
send it to a cluster, where the folder of the job file cannot be written to and what is
in the file can be read by others.
"""

import re
from collections.abc import Mapping

from oomrun.core.errors import Problem
from oomrun.core.jobfile.nodes import Place
from oomrun.core.jobfile.reading import Reading
from oomrun.core.kubernetes_spec import JOB_FILE, WORKSPACE
from oomrun.core.kubernetes_syntax import is_dns_1035
from oomrun.core.remote import is_remote
from oomrun.core.spec import IN_WORKERS, Bytes
from oomrun.core.units import format_bytes

# What is behind the job's name in the name of its first pod, which is a host's.
_BEHIND = {"job": "-0", "jobset": "-worker-0-0", "mpijob": "-launcher",
           "trainjob": "-node-0-0"}  # fmt: skip
_LONGEST_HOST = 63
_DEFAULT_MEMORY = 16 * 2**30
_DEFAULT_SHM = 2**30
_secret_name = re.compile(
    r"(?:^|_)(?:PASSWORD|PASSWD|SECRET|API_?KEY|ACCESS_KEY|PRIVATE_KEY|"
    r"(?:ACCESS|AUTH|API|HF|HUB|BEARER)_TOKEN|CREDENTIALS?)(?:_|$)",
    re.ASCII | re.IGNORECASE,
)


def check(reading: Reading) -> None:
    """Report what cannot be together; nothing where there is no such section."""
    if "kubernetes" not in reading.places:
        return
    _name(reading)
    _devices(reading)
    _several(reading)
    _gpu_keys(reading)
    _volume(reading)
    _memory(reading)
    _files(reading)


def check_for_cluster(
    values: Mapping[str, object], places: Mapping[str, Place]
) -> list[Problem]:
    """What is wrong in a file that is good otherwise, but is to go to a cluster.

    The values must have been read with each variable standing for itself, so that what
    is filled in on the cluster is not taken for what the file says.
    """
    problems = []
    folder = values.get("checkpoint.dir")
    there = isinstance(folder, str) and (
        folder.startswith(WORKSPACE + "/")
        or (is_remote(folder) and not folder.startswith("file:"))
    )
    if isinstance(folder, str) and not there:
        wrong = f"expected a folder below {WORKSPACE} or a bucket, got {folder}"
        hint = "leave it out: checkpoints then go into the run directory there"
        problems.append(places["checkpoint.dir"].problem("checkpoint.dir", wrong, hint))
    pairs = values.get("env")
    for key, value in pairs if isinstance(pairs, tuple) else ():
        if _secret_name.search(key) and value and "${" not in value:
            path = f"env.{key}"
            wrong = "looks like a secret, and a ConfigMap is none"
            hint = "remove it, and name a Secret with this key in kubernetes.secrets"
            problems.append(places[path].problem(path, wrong, hint))
    return problems


def _name(reading: Reading) -> None:
    name, pods = reading.values.get("name"), reading.values.get("kubernetes.pods", 1)
    if not isinstance(name, str) or not isinstance(pods, int):
        return
    mode = str(reading.values.get("kubernetes.mode", "job"))
    last = _BEHIND.get(mode, "-0")
    if last.endswith("0"):
        last = f"{last[:-1]}{pods - 1}"
    elif pods > 1:
        last = max(last, f"-worker-{pods - 2}", key=len)
    longest = _LONGEST_HOST - len(last)
    if len(name) > longest:
        wrong = f"expected at most {longest} characters on Kubernetes"
        reading.report("name", wrong, f"its pods have {last} behind it")
    if (pods > 1 or mode != "job") and not is_dns_1035(name):
        wrong = f"expected a letter first, got {name}"
        reading.report("name", wrong, "the pods' network is named after it")


def _several(reading: Reading) -> None:
    """Several pods train together in one way only, and share a folder."""
    pods = reading.values.get("kubernetes.pods", 1)
    gpus = reading.values.get("kubernetes.gpus", 1)
    strategy = reading.values.get("strategy", "auto")
    if isinstance(pods, int) and pods > 1:
        if strategy not in IN_WORKERS:
            ways = " or ".join(IN_WORKERS)
            wrong = f"several pods train with strategy {ways}, and it is {strategy}"
            reading.report("kubernetes.pods", wrong, "add strategy: horovod")
        base = "kubernetes.volume"
        access = reading.values.get(f"{base}.access", "ReadWriteOnce")
        said = any(problem.path.startswith(base) for problem in reading.problems)
        if base not in reading.places:
            wrong = "several pods need a volume that all of them can write to"
            hint = "such as volume: {size: 100GiB, access: ReadWriteMany}"
            reading.report("kubernetes.pods", wrong, hint)
        elif (
            f"{base}.size" in reading.places and access != "ReadWriteMany" and not said
        ):
            wrong = f"several pods cannot all write to a {access} volume"
            key = "access" if f"{base}.access" in reading.places else "size"
            reading.report(f"{base}.{key}", wrong, "access: ReadWriteMany")
    elif (
        isinstance(gpus, int)
        and gpus > 1
        and (
            strategy == "single" or (strategy == "auto" and "command" in reading.places)
        )
    ):
        wrong = f"strategy {strategy} trains on one GPU, so the others would be idle"
        reading.report("kubernetes.gpus", wrong, "add strategy: horovod")
    most = reading.values.get("kubernetes.memory_max")
    memory = reading.values.get("kubernetes.memory", _DEFAULT_MEMORY)
    if isinstance(most, int) and isinstance(memory, int) and most < memory:
        wrong = f"it is less than memory ({format_bytes(memory)})"
        reading.report("kubernetes.memory_max", wrong, "leave it out, or give more")


def _wants_cpu(reading: Reading) -> bool:
    return reading.values.get("devices") == "cpu" or "devices.cpu" in reading.places


def _no_gpus(reading: Reading) -> bool:
    return reading.values.get("kubernetes.gpus", int(not _wants_cpu(reading))) == 0


def _devices(reading: Reading) -> None:
    gpus, devices = reading.values.get("kubernetes.gpus"), reading.values.get("devices")
    if isinstance(gpus, int) and gpus > 0 and _wants_cpu(reading):
        wrong = "the job's devices are the CPU, so a GPU would be idle"
        reading.report("kubernetes.gpus", wrong, "leave it out, or change devices")
    named = devices if isinstance(devices, tuple) else ()
    if gpus == 0 and "devices" in reading.places and devices not in ("auto", "cpu"):
        if not _wants_cpu(reading):
            wrong = "the job's devices are GPUs, so a pod needs one"
            reading.report("kubernetes.gpus", wrong, "leave it out, or change devices")
        return
    if any(isinstance(each, str) for each in named):
        wrong = "a UUID names a GPU of one machine, and pods run on any"
        reading.report("devices", wrong, "use auto, gpu or numbers")
    highest = max((each for each in named if isinstance(each, int)), default=0)
    if highest >= (gpus if isinstance(gpus, int) else 1) and named:
        wrong = f"there is no GPU {highest} in a pod with {gpus or 1}"
        reading.report("devices", wrong, "a pod counts its own GPUs, from 0")


def _gpu_keys(reading: Reading) -> None:
    for key in ("gpu_resource", "gpu_memory"):
        path = f"kubernetes.{key}"
        if path in reading.places and _no_gpus(reading):
            wrong = "a pod of this job has no GPU"
            reading.report(path, wrong, "leave it out, or ask for GPUs")


def _volume(reading: Reading) -> None:
    base = "kubernetes.volume"
    if base not in reading.places:
        return
    given = [key for key in ("claim", "size") if f"{base}.{key}" in reading.places]
    said = any(problem.path.startswith(base) for problem in reading.problems)
    if not given and not said:
        wrong = "expected one of the keys claim and size"
        reading.report(base, wrong, "such as {size: 100GiB}")
    if len(given) == 2:
        wrong = "claim and size exclude each other"
        reading.report(f"{base}.size", wrong, "a claim that is there has its size")
    if given == ["claim"]:
        for key in ("storage_class", "access"):
            if f"{base}.{key}" in reading.places:
                wrong = f"claim and {key} exclude each other"
                reading.report(f"{base}.{key}", wrong, "the claim is there already")


def _memory(reading: Reading) -> None:
    memory = reading.values.get("kubernetes.memory", _DEFAULT_MEMORY)
    shm = reading.values.get("kubernetes.shm", _DEFAULT_SHM)
    if not isinstance(memory, int) or not isinstance(shm, int):
        return
    if shm >= memory:
        asked = "shm" if "kubernetes.shm" in reading.places else "memory"
        wrong = (
            f"shm ({format_bytes(shm)}) is a part of memory ({format_bytes(memory)}) "
            "and leaves nothing of it"
        )
        reading.report(f"kubernetes.{asked}", wrong)
    path = "devices.memory" if "devices.memory" in reading.places else "memory.limit"
    limit = reading.values.get(path)
    each = limit if isinstance(limit, tuple) else (limit,)
    needed = sum(one.count for one in each if isinstance(one, Bytes))
    if _wants_cpu(reading) and needed >= memory:
        wrong = f"a pod has {format_bytes(memory)} of memory in all (kubernetes.memory)"
        reading.report(path, wrong, "ask for more memory, or lower the limit")


def _files(reading: Reading) -> None:
    files = reading.values.get("kubernetes.files")
    for index, file in enumerate(files if isinstance(files, tuple) else ()):
        path = f"kubernetes.files[{index}]"
        if file == JOB_FILE:
            wrong = f"the job file itself is called {JOB_FILE} in a pod"
            reading.report(path, wrong, "leave it out, or rename the other file")
        elif file == reading.values.get("script"):
            reading.report(path, "the script goes along anyhow", "leave it out")
