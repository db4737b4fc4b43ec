"""Which lever is pulled, when it is taken back, and what it does in a process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from oomrun.core import events as ev
from oomrun.core import levers, oom_report
from oomrun.core import plan as plans
from oomrun.core import status as statuses
from oomrun.core.diagnosis import Cause, Diagnosis
from oomrun.core.errors import InfeasiblePlanError, SpecError
from oomrun.core.group_planning import plan_for
from oomrun.core.jobfile import load
from oomrun.core.plan import DevicePlan, Plan
from oomrun.core.policy import Fail, Limits, Restart, decide
from oomrun.core.state import JobState
from oomrun.core.topology import Device, Host, Inventory
from oomrun.environment import overruled, worker_environment
from oomrun.launching import policy_limits

ALL = (
    "allocator",
    "recompute",
    "mixed_precision",
    "xla_on",
    "xla_off",
    "host_pipeline",
)
CPU = {"memory_mode": "limit", "devices": [{"id": "cpu:0", "kind": "cpu"}]}
GPU = {"memory_mode": "growth", "devices": [{"id": "GPU-1", "kind": "gpu"}]}


def limits(*order: str) -> Limits:
    return Limits(
        max_restarts={"oom": 10, "crash": 3, "preemption": None, "hang": 3},
        levers=order,
    )


def oom(attempt: int = 1, size: int = 64, recovery: str = "restart") -> ev.OomOccurred:
    return ev.OomOccurred(
        at=1.0, attempt=attempt, rank=0, device="cpu:0", kind="device",
        phase="gradients", recovery=recovery, micro_batch_size=size, step=3, message="",
    )  # fmt: skip


def state(size: int = 64, plan: dict[str, Any] = CPU) -> JobState:
    """A run whose memory ran out at ``size``."""
    started = ev.AttemptStarted(at=0.0, attempt=1, plan=plan)
    found = replace(JobState(), global_batch_size=64).after(started)
    return found.after(oom(size=size))


def decided(state: JobState, *order: str, cause: Cause = Cause.DEVICE_OOM) -> Any:
    return decide(Diagnosis(cause=cause, summary="out"), state, limits(*order))


def after(state: JobState, decision: Restart, attempt: int) -> JobState:
    """The state once the next attempt has begun."""
    made = ev.DecisionMade(
        at=2.0, attempt=attempt, action="restart", cause="oom", reason=decision.reason,
        micro_batch_size=decision.micro_batch_size, levers=decision.levers,
    )  # fmt: skip
    started = ev.AttemptStarted(at=3.0, attempt=attempt + 1, plan=state.plan or {})
    return state.after(made).after(started)


def test_what_is_listed_first_is_pulled_first() -> None:
    first = decided(state(), "recompute", "micro_batch", "mixed_precision")
    assert first.levers == ("recompute",)
    assert first.micro_batch_size is None
    assert "lever recompute (activations" in first.reason
    now = after(state(), first, 1).after(oom(2))
    second = decided(now, "recompute", "micro_batch", "mixed_precision")
    assert (second.levers, second.micro_batch_size) == (None, 32)


def test_what_is_listed_last_waits_for_the_smallest_micro_batch() -> None:
    order = ("micro_batch", "mixed_precision")
    assert decided(state(), *order).micro_batch_size == 32
    last = decided(state(1), *order)
    assert last.levers == ("mixed_precision",)
    now = after(state(1), last, 1)
    # A sample needs less now: sizes begin anew.
    assert (now.micro_batch_failed, now.micro_batch_limit) == (None, None)
    ended = decided(now.after(oom(2, 1)), *order)
    assert isinstance(ended, Fail)
    assert ended.exit_code == 3


@pytest.mark.parametrize("order", [(), ("micro_batch",)])
def test_nothing_that_is_not_listed_is_pulled(order: tuple[str, ...]) -> None:
    assert isinstance(decided(state(1), *order), Fail)


def test_every_lever_is_pulled_once_and_then_it_ends() -> None:
    now, seen = state(1, GPU), []
    for attempt in range(1, 20):
        decision = decided(now, *ALL, "micro_batch")
        if isinstance(decision, Fail):
            break
        seen.append(decision.levers)
        now = after(now, decision, attempt).after(oom(attempt + 1, 1))
    # The pipeline's memory is not a GPU's.
    assert [found[-1] for found in seen] == list(ALL[:-1])
    assert now.levers == ALL[:-1]


@pytest.mark.parametrize(
    ("name", "plan", "cause", "helps"),
    [
        ("allocator", GPU, Cause.DEVICE_OOM, True),
        ("allocator", {**GPU, "memory_mode": "limit"}, Cause.DEVICE_OOM, False),
        ("allocator", CPU, Cause.DEVICE_OOM, False),
        ("recompute", GPU, Cause.HOST_OOM, False),
        ("host_pipeline", GPU, Cause.DEVICE_OOM, False),
        ("host_pipeline", CPU, Cause.DEVICE_OOM, True),
        ("host_pipeline", GPU, Cause.HOST_OOM, True),
    ],
)
def test_a_lever_is_pulled_where_it_can_help(
    name: str, plan: dict[str, Any], cause: Cause, helps: bool
) -> None:
    found = decided(state(1, plan), name, cause=cause)
    assert isinstance(found, Restart) is helps


def test_a_lever_that_made_it_worse_is_taken_back() -> None:
    # 32 had run, 64 had not; with the lever 16 does not.
    before = replace(state(), measured={32: 9, 8: 5})
    pulled = decided(before, "xla_on", "micro_batch")
    worse = after(before, pulled, 1).after(oom(2, 16))
    back = decided(worse, "xla_on", "micro_batch")
    assert back.levers == ()
    assert "xla_on is taken back" in back.reason
    now = after(worse, back, 2)
    assert (now.levers, now.micro_batch_failed) == ((), 64)
    # And it is not pulled again.
    again = decided(now.after(oom(3)), "xla_on", "micro_batch")
    assert again.levers is None
    assert again.micro_batch_size == 32


@pytest.mark.parametrize(("ran", "failed"), [({}, 64), ({8: 5}, 16), ({64: 5}, 64)])
def test_a_lever_that_did_not_help_enough_stays(
    ran: dict[int, int], failed: int
) -> None:
    before = replace(state(), measured=ran)
    pulled = decided(before, "recompute", "micro_batch")
    now = after(before, pulled, 1).after(oom(2, failed))
    assert decided(now, "recompute", "micro_batch").levers is None


def test_a_script_that_does_not_start_with_a_lever_goes_on_without() -> None:
    pulled = decided(state(1), "micro_batch", "xla_on")
    now = after(state(1), pulled, 1)
    raised = ev.ScriptEnded(
        at=4.0, attempt=2, rank=0, outcome="raised", exit_code=1, exception="ValueError"
    )
    found = decided(now.after(raised), "micro_batch", "xla_on", cause=Cause.CRASH)
    assert found.levers == ()
    assert "before a step was trained with it" in found.reason
    without = after(now, found, 2).after(raised)
    assert isinstance(
        decided(without, "micro_batch", "xla_on", cause=Cause.CRASH), Fail
    )


def test_levers_stay_through_other_restarts() -> None:
    pulled = decided(state(1), "micro_batch", "recompute")
    now = after(state(1), pulled, 1)
    killed = decided(now, "micro_batch", "recompute", cause=Cause.KILLED)
    assert killed.levers is None
    assert after(now, killed, 2).levers == ("recompute",)


@pytest.mark.parametrize("given", [{}, {"TF_GPU_ALLOCATOR": "bfc"}])
def test_the_allocator_is_set_in_the_environment(
    given: dict[str, str], tmp_path: Any
) -> None:
    plan = Plan(
        strategy="single", strategy_reason="", global_batch_size=None,
        memory_mode="growth", levers=("allocator",),
        devices=(
            DevicePlan(id="GPU-1", kind="gpu", limit_bytes=2**30, budget_bytes=2**30),
        ),
    )  # fmt: skip

    def made(plan: Plan) -> dict[str, str]:
        return worker_environment(
            given, {}, plan, run_id="r", seed=1, launch_file=tmp_path
        )

    assert made(plan)["TF_GPU_ALLOCATOR"] == "cuda_malloc_async"
    told = " ".join(overruled(given, plan))
    assert ("the lever allocator decides" in told) is bool(given)
    for without in (replace(plan, levers=()), replace(plan, memory_mode="limit")):
        assert made(without).get("TF_GPU_ALLOCATOR") != "cuda_malloc_async"
    assert plans.from_json(plans.to_json(plan)) == plan


def test_a_command_takes_micro_batches_only() -> None:
    text = "name: x\ncommand: [./x]\nrecovery: {levers: [micro_batch, recompute]}\n"
    with pytest.raises(SpecError) as found:
        load(text, filename="job.yaml", environment={})
    (problem,) = found.value.problems
    assert problem.path == "recovery.levers[1]"
    assert "recompute is not to be had of a command" in problem.message
    text = "name: x\ncommand: [./x]\nrecovery: {pulled: [recompute]}\n"
    with pytest.raises(SpecError, match="recompute is not to be had of a command"):
        load(text, filename="job.yaml", environment={})


@pytest.mark.parametrize("cpus", [1, 2])
def test_levers_that_are_pulled_from_the_beginning(cpus: int) -> None:
    listed = "{levers: [recompute, xla_off, micro_batch], pulled: [recompute]}"
    devices = f"devices: {{cpu: {cpus}, memory: {['1GiB'] * cpus}}}"
    text = f"name: x\nscript: t.py\nrecovery: {listed}\n{devices}\n"
    spec = load(text, filename="job.yaml", environment={})
    size = {"total_bytes": 2**33, "free_bytes": 2**33}
    cpu = Device(id="cpu:0", kind="cpu", name="CPU", **size)
    host = Host(memory_total_bytes=2**33, memory_available_bytes=2**33)
    inventory = Inventory(devices=(cpu,), host=host)

    def planned(known: JobState) -> dict[str, Any]:
        return plans.to_json(plan_for(spec, inventory, known))

    first = planned(JobState())
    assert first["levers"] == ["recompute"]
    found = state(plan=first)
    assert levers.in_force(found) == ("recompute",)
    out = Diagnosis(cause=Cause.DEVICE_OOM, summary="out")
    decision = decide(out, found, policy_limits(spec))
    assert isinstance(decision, Restart)
    assert decision.levers == ("xla_off",)
    again = after(found, decision, 2)
    assert levers.in_force(again) == ("recompute", "xla_off")
    assert planned(again)["levers"] == ["recompute", "xla_off"]


LOOP = ev.FitStarted(
    at=1.0, attempt=1, fit=1, epochs=1, initial_epoch=0, global_batch_size=64,
    micro_batch_size=64, steps_per_epoch=4, custom_loop=True,
)  # fmt: skip
GROUP = {
    "strategy": "horovod",
    "devices": [{"id": "cpu:0", "kind": "cpu"}, {"id": "cpu:1", "kind": "cpu"}],
}


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (state(1).after(LOOP).after(oom(size=1)), "a loop of oomrun.Loop calls"),
        (state(1, GROUP), "it is for training on one device"),
        (replace(state(1), levers=("optimizer_sgd",)), "keeps less is in force"),
    ],
)
def test_an_optimizer_that_cannot_be_replaced_is_not_tried(
    found: JobState, why: str
) -> None:
    ended = decided(found, "micro_batch", "optimizer_lion")
    assert isinstance(ended, Fail)
    assert "The lever optimizer_lion is not tried: " in ended.reason
    assert why in ended.reason


def test_optimizers_follow_each_other() -> None:
    order = ("micro_batch", "optimizer_lion", "optimizer_sgd")
    first = decided(state(1), *order)
    assert first.levers == ("optimizer_lion",)
    now = after(state(1), first, 1).after(oom(2, 1))
    assert decided(now, *order).levers == ("optimizer_lion", "optimizer_sgd")


def test_where_the_state_alone_is_too_large_the_optimizer_comes_first() -> None:
    plan = {**CPU, "devices": [{**CPU["devices"][0], "limit_bytes": 100}]}
    held = replace(state(64, plan), state_bytes=101)
    order = ("recompute", "micro_batch", "optimizer_sgd")
    pulled = decided(held, *order)
    assert pulled.levers == ("optimizer_sgd",)
    # What it held is known of the other optimizer only.
    assert after(held, pulled, 1).state_bytes is None
    assert decided(replace(held, state_bytes=99), *order).levers == ("recompute",)


def test_a_state_that_is_too_large_is_tried_where_an_optimizer_may_help() -> None:
    size = {"total_bytes": 2**33, "free_bytes": 2**33}
    cpu = Device(id="cpu:0", kind="cpu", name="CPU", **size)
    host = Host(memory_total_bytes=2**33, memory_available_bytes=2**33)
    inventory = Inventory(devices=(cpu,), host=host)
    known = replace(JobState(), state_bytes=2**31)

    def planned(listed: str) -> Any:
        text = (
            "name: x\nscript: t.py\ndevices: {cpu: 1, memory: 1GiB}\n"
            f"recovery: {{levers: {listed}}}\n"
        )
        spec = load(text, filename="job.yaml", environment={})
        return plan_for(spec, inventory, known)

    assert planned("[micro_batch, optimizer_lion]").devices
    with pytest.raises(InfeasiblePlanError, match="own state"):
        planned("[micro_batch]")


def test_a_report_tells_what_was_saved() -> None:
    told = ev.OptimizerReplaced(
        at=3.0, attempt=2, fit=1, lever="optimizer_lion", model="m", written="Adam",
        used="Lion", written_bytes=8 * 2**20, used_bytes=4 * 2**20,
    )  # fmt: skip
    pulled = decided(state(1), "micro_batch", "optimizer_lion")
    now = after(state(1), pulled, 1).after(told).after(oom(2, 1))
    report = oom_report.write(oom(2, 1), now, [told], when="now", log="log")
    assert "Levers in force\n  optimizer_lion (models are compiled" in report
    assert "4MiB of slots instead of 8MiB, 4MiB saved; another model" in report
    assert statuses.status_json(now)["optimizer"]["used"] == "Lion"
    # Taken back: what it had saved is in force no more.
    made = ev.DecisionMade(
        at=4.0, attempt=2, action="restart", cause="oom", reason="", levers=()
    )
    assert now.after(made).optimizer is None


def test_the_nearest_lever_is_named() -> None:
    text = "name: x\nscript: t.py\nrecovery: {levers: [optimizer_adafactr]}\n"
    with pytest.raises(SpecError) as found:
        load(text, filename="job.yaml", environment={})
    (problem,) = found.value.problems
    assert problem.path == "recovery.levers[0]"
    assert "optimizer_adafactor" in (problem.hint or "")


def test_every_lever_says_what_it_does_and_costs() -> None:
    for name in levers.LEVERS:
        assert levers.in_words(name).startswith(f"{name} (")
        assert "; " in levers.in_words(name)
    assert levers.in_words("of_a_newer_version") == "of_a_newer_version"


# --- in the process -----------------------------------------------------------------


def chain(*layers: Any) -> Any:
    import keras

    return keras.Sequential([keras.Input((8,)), *layers])


def sizes(groups: Sequence[Sequence[Any]] | None) -> list[int] | None:
    return None if groups is None else [len(group) for group in groups]


def test_a_chain_is_recomputed_in_groups() -> None:
    import keras

    from oomrun.worker.recomputing import groups_of

    dense = [keras.layers.Dense(8) for _ in range(9)]
    model = chain(*dense)
    assert sizes(groups_of(model._functional)) == [3, 3, 3]
    # What a call changes must change once.
    dense[4:4] = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    found = groups_of(chain(*dense)._functional)
    alone = [g[0] for g in found or () if len(g) == 1]
    assert dense[4] in alone
    assert dense[5] in alone


def test_what_is_no_chain_is_left_as_it_is() -> None:
    import keras

    from oomrun.worker.recomputing import groups_of

    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(8)(inputs)
    added = keras.layers.Add()([inputs, hidden])
    assert groups_of(keras.Model(inputs, added)) is None
    shared = keras.layers.Dense(8)
    assert groups_of(keras.Model(inputs, shared(shared(inputs)))) is None
    two = keras.Model(inputs, [hidden, keras.layers.Dense(8)(hidden)])
    assert groups_of(two) is None


def test_recomputed_gradients_are_the_same() -> None:
    import keras
    import numpy as np
    import tensorflow as tf

    from oomrun.worker import recomputing
    from precision import precision

    keras.utils.set_random_seed(3)
    # In single precision rounding differs by what TensorFlow fuses on a processor.
    with precision("float64"):
        model = chain(
            *(keras.layers.Dense(8, "tanh") for _ in range(6)),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(8, "gelu"),
            keras.layers.Dense(1),
        )
    x = tf.constant(np.random.default_rng(0).normal(size=(16, 8)), tf.float64)

    @tf.function
    def gradients(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        return [loss, *tape.gradient(loss, model.trainable_weights)]

    def run() -> list[Any]:
        before = [w.numpy() for w in model.weights]
        found = [value.numpy() for value in tf.function(gradients.python_function)(x)]
        found += [w.numpy() for w in model.non_trainable_weights]
        for weight, value in zip(model.weights, before, strict=True):
            weight.assign(value)
        return found

    plain, said = run(), []
    original = type(model._functional).call
    try:
        recomputing.install(lambda code, text: said.append(text))
        again = run()
    finally:
        type(model._functional).call = original
    for one, other in zip(plain, again, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-13)
    assert "of them twice" in said[0]
