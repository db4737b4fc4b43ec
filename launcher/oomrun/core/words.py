"""Every event in words: one short line for a person.

Covers: what the live view, plain logs, JSON logs and status say of an event.
Does not cover: times, colours, how often something is said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from oomrun.core import batch, units
from oomrun.core import events as ev
from oomrun.core.state import JobState
from oomrun.core.status import oom_number, oom_report_path, planned_devices
from oomrun.core.topology import HOST_ID

__all__ = [
    "cut", "describe", "epoch_ended", "level", "one_line", "progress", "replaced",
]  # fmt: skip

_LONGEST = 500
# Control characters, among them those that move a terminal's cursor or colour it, and
# those that turn the direction of writing.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")


def one_line(text: str, longest: int = _LONGEST) -> str:
    """``text`` on one line without control characters, cut off where it is long."""
    line = _UNPRINTABLE.sub(" ", text).strip()
    return line if len(line) <= longest else line[: longest - 1] + "…"


def describe(event: ev.Event, state: JobState) -> str | None:
    """``event`` in words, or None where a person need not hear of it.

    Args:
        event: what happened.
        state: the state after it.
    """
    text = _describe(event, state)
    return one_line(text) if text is not None else None


def _describe(event: ev.Event, state: JobState) -> str | None:
    match event:
        case ev.RunStarted():
            return f"run {event.name} started (oomrun {event.version})"
        case ev.RunResumed():
            return f"run {state.name} goes on: {event.reason}"
        case ev.AttemptStarted():
            return f"attempt {event.attempt}: {_plan(event.plan)}"
        case ev.WorkerReady() if not event.tensorflow:
            return f"the program runs (pid {event.pid})"
        case ev.WorkerReady():
            return (
                f"worker {event.rank} is ready after "
                f"{units.format_duration(event.start_s)} "
                f"(TensorFlow {event.tensorflow}, Keras {event.keras})"
            )
        case ev.FitStarted():
            return _fit_started(event)
        case ev.Progressed():
            return progress(state)
        case ev.OomOccurred():
            return _oom(event) + _see_report(event.attempt, state)
        case ev.LeakFound():
            return _leak(event)
        case ev.Probed():
            return _probed(event)
        case ev.OptimizerReplaced():
            return replaced(event)
        case ev.MicroBatchPlanned():
            return event.reason
        case ev.SharePlanned():
            return (
                f"{event.device} takes {event.share} of {event.global_batch_size} "
                f"samples, {event.micro_batch_size} a pass ({event.reason})"
            )
        case ev.MicroBatchChanged():
            # The reason says from what to what; a journal of others may lack it.
            return event.reason or f"micro-batch {event.old} -> {event.new}"
        case ev.CheckpointSaved():
            return (
                f"checkpoint at step {event.step}: "
                f"{units.format_bytes(event.size_bytes)} in "
                f"{units.format_duration(event.duration_s)} ({event.reason})"
            )
        case ev.CheckpointFailed():
            return (
                f"the checkpoint at step {event.step} could not be written, "
                f"training goes on: {event.reason}"
            )
        case ev.CheckpointMirrored():
            return (
                f"{event.name} is at checkpoint.dir: "
                f"{units.format_bytes(event.size_bytes)} in "
                f"{units.format_duration(event.duration_s)}"
            )
        case ev.MirrorFailed():
            what = event.name or "what is there"
            how = "copied to" if event.name else "read from"
            return (
                f"{what} could not be {how} checkpoint.dir, training goes on with "
                f"the local disk alone: {event.reason}"
            )
        case ev.CheckpointsFetched():
            return _fetched(event)
        case ev.CheckpointRejected():
            return f"checkpoint {event.name} is not used: {event.reason}"
        case ev.Restored():
            return _restored(event)
        case ev.Noted():
            return f"note: {event.text}"
        case ev.FitEnded():
            return _fit_ended(event)
        case ev.ScriptEnded() if event.outcome == "raised":
            at = f" at {event.location}" if event.location else ""
            return f"the script raised {event.exception}{at}: {event.message}"
        case ev.DecisionMade():
            return _decision(event, state)
        case ev.RunEnded():
            why = f": {event.reason}" if event.reason else ""
            return f"run {state.name} {event.state}{why} (exit code {event.exit_code})"
        case _:
            # The state shows phases; the decision says how an attempt ended and why.
            return None


def level(event: ev.Event) -> str:
    """``info``, ``warning`` or ``error``."""
    match event:
        case (
            ev.OomOccurred()
            | ev.LeakFound()
            | ev.CheckpointFailed()
            | ev.CheckpointRejected()
            | ev.OptimizerReplaced()
            | ev.MirrorFailed()
        ):
            return "warning"
        case ev.ScriptEnded() if event.outcome == "raised":
            return "warning" if event.oom else "error"
        case ev.DecisionMade() if event.action == "restart":
            # To go on with what was stopped is what was asked for.
            return "info" if event.cause == "preemption" else "warning"
        case ev.DecisionMade() if event.action == "fail":
            return "error"
        case ev.RunEnded() if event.state == "failed":
            return "error"
        case _:
            return "info"


def _leak(event: ev.LeakFound) -> str:
    host = event.device == HOST_ID
    where = "of the host" if host else f"on {event.device}"
    text = (
        f"memory leak: {units.format_bytes(event.grown_bytes)} more are in use {where} "
        "between steps than when the fit began"
    )
    if event.bytes_per_step:  # else memory ran out before the rate was known
        text += f", {units.format_bytes(int(event.bytes_per_step))} a step"
    text += "; "
    if event.steps_left:
        text += f"it would run out in about {event.steps_left} steps, so "
    return text + "the worker saves and is started again"


def _fetched(event: ev.CheckpointsFetched) -> str:
    size = units.format_bytes(event.size_bytes)
    took = units.format_duration(event.duration_s)
    text = f"{', '.join(event.names) or 'nothing'} of {event.url} was copied here"
    text += f": {size} in {took}" if event.names else ""
    if event.rejected:
        text += f"; torn or altered, and not used: {', '.join(event.rejected)}"
    return text


def replaced(event: ev.OptimizerReplaced) -> str:
    """What is in place of what, and what that saves."""
    now, before = map(units.format_bytes, (event.used_bytes, event.written_bytes))
    saved = units.format_bytes(event.written_bytes - event.used_bytes)
    return (
        f"{event.model} is trained with {event.used} in the place of {event.written} "
        f"(lever {event.lever}): {now} of slots instead of {before}, {saved} saved; "
        "another model comes out"
    )


def _probed(event: ev.Probed) -> str:
    tried = f"tried micro-batch {event.micro_batch_size} for {event.steps} steps"
    if event.peak_bytes is None:
        return f"{tried}: it ran out of memory"
    took = units.format_duration(event.seconds)
    return f"{tried}: peak {units.format_bytes(event.peak_bytes)} ({took})"


def progress(state: JobState) -> str:
    """Where training is and how fast."""
    # Steps of train_on_batch belong to no epoch.
    parts = [f"epoch {state.epoch}{_of(state.epochs)}"] if state.epoch else []
    parts.append(f"step {state.step_in_epoch}{_of(state.steps_per_epoch)}")
    if state.loss is not None:
        parts.append(f"loss {state.loss:.4g}")
    if state.step_s:
        parts.append(f"{units.format_duration(state.step_s)}/step")
        if state.global_batch_size:
            speed = state.global_batch_size / state.step_s
            digits = ".3g" if speed < 1000 else ".0f"
            parts.append(f"{speed:{digits}} samples/s")
    if state.shares and state.global_batch_size:
        count = len(state.shares)
        many = f"{count} device{'s' if count > 1 else ''}"
        parts.append(f"global {state.global_batch_size} on {many}")
    elif state.micro_batch_size and state.global_batch_size:
        parts.append(cut(state.global_batch_size, state.micro_batch_size))
    return ", ".join(parts)


def epoch_ended(event: ev.Event, state: JobState) -> bool:
    """Whether ``event`` reports the last step of an epoch."""
    return (
        isinstance(event, ev.Progressed)
        and state.steps_per_epoch is not None
        and event.step_in_epoch >= state.steps_per_epoch
    )


def cut(share: int, micro_batch_size: int, whole: int | None = None) -> str:
    """How a global batch is cut: ``micro-batch 64 x 4 (global 256)``.

    Args:
        share: samples of it that are one device's.
        micro_batch_size: samples a pass.
        whole: samples of all of it; None where it is one device's.
    """
    size = min(micro_batch_size, share)
    if size < 1:
        return f"global batch {share}"
    steps = batch.accumulation_steps(share, size)
    if whole is not None and whole != share:
        return f"micro-batch {size} x {steps} ({share} of {whole})"
    return f"micro-batch {size} x {steps} (global {share})"


def _of(total: int | None) -> str:
    return "" if total is None else f"/{total}"


def _plan(plan: Mapping[str, Any]) -> str:
    text = str(plan.get("strategy", "?"))
    devices = planned_devices(plan)
    if devices:
        text += " on " + ", ".join(map(_planned_device, devices))
    if plan.get("left_out"):
        text += f", without {', '.join(map(str, plan['left_out']))}"
    share = plan.get("global_batch_size")
    size = devices[0].get("micro_batch_size") if len(devices) == 1 else None
    if share and size:
        text += f", {cut(share, size)}"
    return text


def _planned_device(device: Mapping[str, Any]) -> str:
    limit = device.get("limit_bytes")
    at_most = f" (limit {units.format_bytes(limit)})" if limit is not None else ""
    return f"{device.get('id')}{at_most}"


def _fit_started(event: ev.FitStarted) -> str:
    text = f"fit {event.fit}: {event.epochs} epochs"
    if event.steps_per_epoch is not None:
        text += f" of {event.steps_per_epoch} steps"
    if event.initial_epoch:
        text += f", from epoch {event.initial_epoch + 1}"
    if event.global_batch_size and event.micro_batch_size:
        text += f", {cut(event.global_batch_size, event.micro_batch_size)}"
    return text


_RECOVERY = {
    "in_process": "trying again with a smaller micro-batch",
    "restart": "the worker is started again",
}


def _oom(event: ev.OomOccurred) -> str:
    where = "host memory" if event.kind == "host" else event.device or "a device"
    size = f" at micro-batch {event.micro_batch_size}" if event.micro_batch_size else ""
    follows = _RECOVERY.get(event.recovery, event.recovery)
    phase = f" in {event.phase}" if event.phase != "unknown" else ""
    # Where the phase is unknown, so is the step, unless one was reported before.
    step = f", step {event.step}" if phase or event.step else ""
    return f"out of memory: {where}{phase}{size}{step}; {follows}"


def _see_report(attempt: int, state: JobState) -> str:
    number = oom_number(state)
    return f" (see {oom_report_path(attempt, number)})" if number else ""


def _restored(event: ev.Restored) -> str:
    lost = ""
    if event.lost_steps:
        many = "step is" if event.lost_steps == 1 else "steps are"
        lost = f"; {event.lost_steps} {many} trained again"
    if not event.name:
        return f"training starts at the beginning{lost}"
    return f"training goes on from {event.name} at step {event.step}{lost}"


def _fit_ended(event: ev.FitEnded) -> str:
    if event.replayed:
        return f"fit {event.fit} was completed before; its result is used"
    return f"fit {event.fit} completed at step {event.step}, {event.samples} samples"


_ACTIONS = {"restart": "restarting", "fail": "giving up", "stop": "stopping"}


def _decision(event: ev.DecisionMade, state: JobState) -> str | None:
    if event.action == "finish":
        return None  # the end of the run says it
    action = _ACTIONS.get(event.action, event.action)
    text = f"attempt {event.attempt} ended: {event.reason}; {action}"
    if event.cause == "oom":
        text += _see_report(state.oom_attempt, state)
    if event.delay_s > 0:
        text += f" in {units.format_duration(event.delay_s)}"
    return text
