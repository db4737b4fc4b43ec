"""Telling the supervisor of a fit: its beginning, its micro-batch, its progress."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from oomrun.core import events as ev
from oomrun.core.memory import Peak
from oomrun.worker import checkpointing, devices, optimizers, remembering
from oomrun.worker.engine import keeping, slicing, static
from oomrun.worker.fit_call import FitCall

if TYPE_CHECKING:
    from oomrun.worker.session import Session

__all__ = [
    "Window", "began_anew", "finite", "fit_started", "micro_batch_planned",
    "optimizer_replaced", "placed", "progressed", "sizes_tried", "state_measured",
]  # fmt: skip

_PEAK_ROSE = 1.02


@dataclass
class Window:
    """The steps since the last report."""

    began: float = field(default_factory=time.monotonic)
    steps: int = 0
    seconds: float = 0.0


def placed(session: Session, call: FitCall, name: str) -> None:
    """Reports from where training goes on, and the steps lost since.

    Args:
        session: the training, put there.
        call: the fit.
        name: of the checkpoint; empty: there is none for this fit.
    """
    session.placed = True
    session.channel.send(
        ev.Restored(
            at=time.time(),
            attempt=session.launch.attempt,
            name=name,
            fit=call.number,
            step=session.step,
            samples=session.samples,
            lost_steps=max(0, session.launch.last_step - session.step),
        )
    )


def began_anew(session: Session, call: FitCall) -> None:
    """Reports the first fit without a checkpoint, where training had been further."""
    if not session.placed and session.launch.last_step > session.step:
        placed(session, call, "")
    session.placed = True


def fit_started(
    session: Session, call: FitCall, data: Any, samples: int | None
) -> None:
    """Reports a fit; takes what is remembered of its model.

    Args:
        session: the training it is part of.
        call: the fit.
        data: its first batch; None where we never see it.
        samples: rows of a global batch; None where that is not known.
    """
    sizes = session.micro_batches
    key = remembering.key_of(session.launch, call, data, samples)
    session.profile_key = key
    sizes.begin(key, call.number)
    # Where sizes are tried first, the one to train with is told after that.
    known = samples is not None and call.managed and not sizes.probes
    session.channel.send(
        ev.FitStarted(
            at=time.time(),
            attempt=session.launch.attempt,
            fit=call.number,
            epochs=call.epochs,
            initial_epoch=call.epoch,
            global_batch_size=samples,
            micro_batch_size=sizes.size(samples) if known and samples else None,
            steps_per_epoch=call.iterator and call.iterator.num_batches,
            state_bytes=checkpointing.state_bytes(call.model),
            profile_key=key,
            custom_loop=call.loop is not None,
        )
    )
    if key is not None:
        if session.launch.rank:
            # The first worker asks by telling of the fit.
            session.channel.send(
                ev.SizesWanted(
                    at=time.time(),
                    attempt=session.launch.attempt,
                    rank=session.launch.rank,
                    profile_key=key,
                )
            )
        remembering.take(session.channel, key, sizes)


def state_measured(
    session: Session,
    model: Any,
    data: Any,
    samples: int,
    graph: Mapping[int, static.GraphPeak],
) -> ev.StateMeasured:
    """Reports what memory is used for, before the first step.

    Args:
        session: the training it is part of.
        model: built and compiled.
        data: a batch.
        samples: its rows.
        graph: what the step's graph says, by rows of a batch.
    """
    memory, *_ = devices.read_memory(session.launch.plan)
    seen = ev.StateMeasured(
        at=time.time(),
        attempt=session.launch.attempt,
        fit=session.fit.number if session.fit else 0,
        global_batch_size=samples,
        input_bytes=slicing.bytes_of(data),
        rest_bytes=memory.in_use_bytes,
        graph_sizes=tuple(graph),
        graph_peaks=tuple(peak.bytes for peak in graph.values()),
        graph_activations=tuple(peak.activations for peak in graph.values()),
        **keeping.bytes_by_kind(model),
    )
    session.channel.send(seen)
    return seen


def optimizer_replaced(session: Session, model: Any) -> None:
    """Reports that a lever has given a model another optimizer, and what it saves."""
    found = optimizers.replaced(model)
    if found is not None:
        session.channel.send(
            ev.OptimizerReplaced(
                at=time.time(),
                attempt=session.launch.attempt,
                fit=session.fit.number if session.fit else 0,
                **found,
            )
        )


def sizes_tried(
    session: Session, tried: Mapping[int, int | None], pools: Mapping[int, int]
) -> None:
    """Reports the peaks of all sizes that were tried, to be remembered.

    Training itself takes more in a group, where the sums of all gradients come
    together; the budget of a trial is less by that.
    """
    if tried and session.profile_key is not None:
        session.channel.send(
            ev.SizesTried(
                at=time.time(),
                attempt=session.launch.attempt,
                rank=session.launch.rank,
                profile_key=session.profile_key,
                sizes=tuple(tried),
                peaks=tuple(tried.values()),
                pools=tuple(map(pools.get, tried)),
            )
        )


def micro_batch_planned(
    session: Session, size: int, samples: int, reason: str, peak: Peak | None
) -> None:
    """Reports the micro-batch that was found by trying, which is used from now on.

    Args:
        session: the training it is part of.
        size: the micro-batch.
        samples: rows of the batch that it is for.
        reason: why this one, in words.
        peak: what a step is predicted to need.
    """
    session.micro_batches.settle(size, samples)
    session.channel.send(
        ev.MicroBatchPlanned(
            at=time.time(),
            attempt=session.launch.attempt,
            fit=session.fit.number if session.fit else 0,
            micro_batch_size=size,
            global_batch_size=samples,
            reason=reason,
            predicted_peak_bytes=None if peak is None else peak.bytes,
            predicted_peak_high_bytes=None if peak is None else peak.high_bytes,
        )
    )


def progressed(
    session: Session, window: Window, samples: int, loss: float | None
) -> None:
    """Reports where training is, with the peaks since the last report.

    Args:
        session: the training.
        window: one step at least.
        samples: rows of a global batch.
        loss: the last step's, if it is known.
    """
    call, sizes = session.fit, session.micro_batches
    micro = sizes.size(samples) if call is None or call.managed else samples
    micro = session.pass_size or micro
    memory = devices.read_memory(session.launch.plan)
    # Of further devices it is not asked: what fits there follows from the first.
    for device in memory[:1]:
        if call is not None and device.peak_bytes is not None:
            sizes.note_peak(micro, device.peak_bytes)
    if session.launch.rank:
        _peak_rose(session, memory)
    session.channel.send(
        ev.Progressed(
            at=time.time(),
            attempt=session.launch.attempt,
            fit=call.number if call else 0,
            step=session.step,
            samples=session.samples,
            epoch=call.epoch + 1 if call else 0,
            step_in_epoch=call.batches if call else session.step,
            loss=loss,
            window_steps=window.steps,
            step_s=window.seconds / window.steps,
            global_batch_size=samples,
            micro_batch_size=micro,
            memory=memory,
        )
    )
    devices.reset_peaks(session.launch.plan)


def finite(value: Any) -> float | None:
    """``value`` as a number that JSON has; None where it is none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None  # None, or whatever else a step of the user's calls its loss
    return number if math.isfinite(number) else None


def _peak_rose(session: Session, memory: tuple[ev.DeviceMemory, ...]) -> None:
    """Tells a new peak of a worker that tells nothing else of its steps."""
    highest = max((device.peak_bytes or 0 for device in memory), default=0)
    # By so much at least: else every step of a growing one would be journaled.
    if highest <= session.peak_told * _PEAK_ROSE:
        return
    session.peak_told = highest
    launch = session.launch
    session.channel.send(
        ev.PeakRose(
            at=time.time(), attempt=launch.attempt, rank=launch.rank, memory=memory
        )
    )
