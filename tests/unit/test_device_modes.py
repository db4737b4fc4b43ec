"""How TensorFlow is told to take GPU memory: the ConfigProto, and the variables.

No GPU is needed: TensorFlow makes the ConfigProto from its list of physical devices,
and GPUs are put into that list before it is used. All that needs TensorFlow runs in one
process of its own, with a new context for each case.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oomrun.core.plan import DevicePlan, Plan
from oomrun.environment import command_environment, overruled, worker_environment

MIB = 2**20
GIB = 2**30

CASES = r'''
import contextlib, io, json
import tensorflow as tf
from google.protobuf.json_format import MessageToDict
from tensorflow.python.eager import context
from oomrun.core.plan import DevicePlan, Plan
from oomrun.worker import devices

MIB = 2**20
ORIGINAL = {
    (place, name): getattr(place, name)
    for config in (tf.config, tf.compat.v1.config, tf.compat.v2.config)
    for place in (config, config.experimental)
    for name in dir(place) if name.startswith("set_")
}


def machine(gpus):
    """A new context that believes in this many GPUs, and TensorFlow as it was."""
    for (place, name), value in ORIGINAL.items():
        setattr(place, name, value)
    context._reset_context()
    made = context.context()
    made._initialize_physical_devices()
    found = [
        context.PhysicalDevice(name=f"/physical_device:GPU:{n}", device_type="GPU")
        for n in range(gpus)
    ]
    for gpu in found:
        made._physical_device_to_index[gpu] = len(made._physical_devices)
        made._physical_devices.append(gpu)
        made._visible_device_list.append(gpu)
        made._memory_growth_map[gpu] = None
    return found


def plan(mode, *limits_mib, kind="gpu"):
    return Plan(
        strategy="single", strategy_reason="", global_batch_size=None, memory_mode=mode,
        devices=tuple(
            DevicePlan(
                id=f"GPU-{n}", kind=kind, budget_bytes=None,
                limit_bytes=None if limit is None else int(limit * MIB),
            )
            for n, limit in enumerate(limits_mib)
        ),
    )


def options():
    """The GPU options of the ConfigProto that TensorFlow would start with."""
    found = MessageToDict(
        context.context().config.gpu_options, preserving_proto_field_name=True
    )
    limits = [
        device.get("memory_limit_mb", [])
        for device in found.pop("experimental", {}).get("virtual_devices", [])
    ]
    return found | ({"limits": limits} if limits else {})


def proto(mode, *limits_mib, kind="gpu"):
    machine(len(limits_mib))
    devices.set_up(plan(mode, *limits_mib, kind=kind))
    return options()


def refused(made, planned, touch=False):
    machine(made)
    if touch:
        tf.constant(1) + 1
    try:
        devices.set_up(planned)
    except devices.DeviceProblemError as error:
        return str(error)


def script(mode, *calls):
    """What the script's own calls leave of the plan's options, and are told."""
    gpu, = machine(1)
    devices.set_up(plan(mode, 700))
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        for call in calls:
            call(gpu)
    return [options(), said.getvalue()]


def split(gpu, config=tf.config):
    config.set_logical_device_configuration(
        gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=50)] * 2
    )


def old_split(gpu):
    tf.config.experimental.set_virtual_device_configuration(
        gpu, [tf.config.experimental.VirtualDeviceConfiguration(memory_limit=50)]
    )


def grow(gpu):
    tf.config.experimental.set_memory_growth(gpu, True)


def grow_by_name(gpu):
    tf.compat.v1.config.experimental.set_memory_growth(enable=True, device=gpu)


def do_not_grow(gpu):
    tf.config.experimental.set_memory_growth(gpu, False)


def cpus():
    """A script may split its CPU; its mistakes are told as TensorFlow tells them."""
    machine(1)
    devices.set_up(plan("limit", 700))
    cpu, = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    try:
        tf.config.experimental.set_memory_growth(cpu)
    except TypeError as error:
        return [context.context().config.device_count["CPU"], str(error)]


def on_cpu():
    machine(2)
    devices.set_up(plan("limit", 300, kind="cpu"))
    return options()


print(json.dumps({
    "growth": proto("growth", 700),
    "growth of two": proto("growth", 700, 900),
    "growth of a MIG device": proto("growth", None, kind="mig"),
    "limit": proto("limit", 700.9),
    "limits of two": proto("limit", 700, 900),
    "a tiny limit": proto("limit", 0.5),
    "limit unknown": proto("limit", None),
    "preallocate": proto("preallocate", 700),
    "preallocate all": proto("preallocate", None),
    "cpu": on_cpu(),
    "no gpu": refused(0, plan("growth", 700)),
    "one too many": refused(2, plan("growth", 700)),
    "growth after a touch": refused(1, plan("growth", 700), touch=True),
    "limit after a touch": refused(1, plan("limit", 700), touch=True),
    "script grows at growth": script("growth", grow, grow_by_name),
    "script grows at limit": script("limit", grow, grow_by_name),
    "script does not grow": script("growth", do_not_grow),
    "script splits at growth": script("growth", split),
    "script splits at limit": script("limit", split),
    "script splits at preallocate": script("preallocate", old_split),
    "script splits by v1": script("growth", lambda g: split(g, tf.compat.v1.config)),
    "cpus": cpus(),
}))
'''


@pytest.fixture(scope="module")
def seen() -> Any:
    done = subprocess.run(
        [sys.executable, "-c", CASES], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("growth", {"allow_growth": True, "visible_device_list": "0"}),
        ("growth of two", {"allow_growth": True, "visible_device_list": "0,1"}),
        ("growth of a MIG device", {"allow_growth": True, "visible_device_list": "0"}),
        # Growth xor a limit: TensorFlow refuses the fraction beside logical devices.
        ("limit", {"visible_device_list": "0", "limits": [[700]]}),
        ("limits of two", {"visible_device_list": "0,1", "limits": [[700], [900]]}),
        ("a tiny limit", {"visible_device_list": "0", "limits": [[1]]}),
        ("limit unknown", {"visible_device_list": "0"}),
        ("preallocate", {"visible_device_list": "0", "limits": [[700]]}),
        ("preallocate all", {"visible_device_list": "0"}),
        ("cpu", {"visible_device_list": "0,1"}),
    ],
)
def test_the_config_proto_of_a_mode__pitfall_23(
    seen: Any, case: str, expected: dict[str, object]
) -> None:
    assert seen[case] == expected


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no gpu", "gives this worker 1 GPU, but TensorFlow"),
        ("no gpu", "tensorflow[and-cuda]"),
        ("one too many", "sees 2"),
        ("growth after a touch", "cannot be modified after being initialized"),
        ("limit after a touch", "Does something use TensorFlow before the script"),
    ],
)
def test_what_cannot_be_set_up_is_said__pitfall_23(
    seen: Any, case: str, words: str
) -> None:
    assert words in seen[case]


GROWS = {"allow_growth": True, "visible_device_list": "0"}
LIMITED = {"visible_device_list": "0", "limits": [[700]]}


@pytest.mark.parametrize(
    ("case", "left", "told"),
    [
        ("script grows at growth", GROWS, None),
        ("script grows at limit", LIMITED, "set_memory_growth of the script"),
        ("script does not grow", GROWS, "set_memory_growth of the script"),
        ("script splits at growth", GROWS, "set_logical_device_configuration"),
        ("script splits at limit", LIMITED, "here limit, decides"),
        ("script splits at preallocate", LIMITED, "set_virtual_device_configuration"),
        ("script splits by v1", GROWS, "set_logical_device_configuration"),
    ],
)
def test_what_the_script_sets_itself_changes_nothing__pitfall_23(
    seen: Any, case: str, left: dict[str, object], told: str | None
) -> None:
    options, said = seen[case]
    assert options == left
    assert (told in said) if told else said == ""


def test_the_cpu_is_the_scripts(seen: Any) -> None:
    count, mistake = seen["cpus"]
    assert count == 2
    assert "enable" in mistake


# --- the variables ------------------------------------------------------------------


def plan(mode: str, limit: int | None = 8 * GIB, kind: str = "gpu") -> Plan:
    device = DevicePlan(id="GPU-1", kind=kind, limit_bytes=limit, budget_bytes=limit)
    return Plan(
        strategy="single",
        strategy_reason="",
        global_batch_size=None,
        memory_mode=mode,
        devices=(device,),
    )


def env(planned: Plan, **given: str) -> dict[str, str]:
    made = worker_environment(
        {}, given, planned, run_id="r1", seed=1, launch_file=Path("/l")
    )
    return {name: value for name, value in made.items() if name.startswith("TF_")}


GROWTH, ALLOCATOR = "TF_FORCE_GPU_ALLOW_GROWTH", "TF_GPU_ALLOCATOR"
KEPT = "TF_DEVICE_MIN_SYS_MEMORY_IN_MB"
ASYNC = "cuda_malloc_async"


@pytest.mark.parametrize(
    ("mode", "given", "expected", "told"),
    [
        ("growth", {}, {GROWTH: "true", KEPT: "256"}, None),
        ("limit", {}, {GROWTH: "true"}, None),
        ("preallocate", {}, {GROWTH: "false"}, None),
        # Whether a limit is grown up to is left to the user; a typo is not.
        ("limit", {GROWTH: "false"}, {GROWTH: "false"}, None),
        ("limit", {GROWTH: "1"}, {GROWTH: "true"}, f"{GROWTH}=1 is not used"),
        ("growth", {GROWTH: "false"}, {GROWTH: "true"}, "and is growth"),
        ("preallocate", {GROWTH: "true"}, {GROWTH: "false"}, "and is preallocate"),
        ("growth", {KEPT: "64"}, {KEPT: "64", GROWTH: "true"}, None),
        # An allocator that keeps to no limit.
        ("growth", {ALLOCATOR: ASYNC}, {ALLOCATOR: ASYNC}, None),
        ("limit", {ALLOCATOR: ASYNC}, {ALLOCATOR: ""}, f"{ASYNC} is not used"),
        ("preallocate", {ALLOCATOR: "cuda_malloc"}, {ALLOCATOR: ""}, "not used"),
        # What costs or saves no memory is the user's.
        ("limit", {"TF_GPU_THREAD_MODE": "gpu_private"}, {}, None),
        ("limit", {"TF_CUDNN_WORKSPACE_LIMIT_IN_MB": "1"}, {}, None),
    ],
)
def test_variables_of_a_gpu_worker(
    mode: str, given: dict[str, str], expected: dict[str, str], told: str | None
) -> None:
    made = env(plan(mode), **given)
    assert {**made, **given, **expected} == made
    found = overruled(given, plan(mode))
    assert len(found) == (told is not None)
    assert told is None or told in found[0]


@pytest.mark.parametrize(
    ("limit", "kept_mib"), [(None, 256), (4 * GIB, 256), (75 * GIB, 1536)]
)
def test_growth_may_reach_the_planned_limit(limit: int | None, kept_mib: int) -> None:
    assert env(plan("growth", limit))[KEPT] == str(kept_mib)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"TF_CPU_BFC_MEM_LIMIT_IN_MB": "77"}, "memory.limit decides"),
        ({"TF_ENABLE_ONEDNN_OPTS": "1"}, "oneDNN crashes"),
        ({"TF_ENABLE_ONEDNN_OPTS": "0"}, None),
        ({GROWTH: "false", ALLOCATOR: ASYNC, "CUDA_VISIBLE_DEVICES": "0"}, None),
    ],
)
def test_variables_of_a_cpu_worker(given: dict[str, str], told: str | None) -> None:
    limited = plan("limit", 300 * MIB, kind="cpu")
    found = overruled(given, limited)
    assert len(found) == (told is not None)
    assert told is None or told in found[0]
    assert env(limited, **given)["TF_CPU_BFC_MEM_LIMIT_IN_MB"] == "300"


def test_what_is_overruled_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        env(plan("preallocate"), **{GROWTH: "once"})
    assert [record.getMessage() for record in caplog.records] == [
        f"{GROWTH}=once is not used: memory.mode decides, and is preallocate"
    ]


def test_a_command_grows_up_to_its_limit() -> None:
    made = command_environment(
        {}, {}, plan("limit"), run_id="r1", launch_file=Path("/l")
    )
    assert made[GROWTH] == "true"
