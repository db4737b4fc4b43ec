"""One script's training in this process: its fits, where it is, what it reports.

Covers: counting ``fit`` calls, going on with the one that was interrupted, handing
back the ones that were completed; progress, checkpoints, the request to stop.
Does not cover: how a step is taken (``engine``) and how Keras is hooked
(``keras_adapter.py``).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, NoReturn

from oomrun.core import events as ev
from oomrun.core.launch import Launch
from oomrun.core.strategy import Group
from oomrun.worker import (
    announcing,
    callback_state,
    devices,
    position,
    randomness,
)
from oomrun.worker.channel import Channel
from oomrun.worker.fit_call import FitCall
from oomrun.worker.leaking import LeakWatch
from oomrun.worker.leaving import leave
from oomrun.worker.recovery import MicroBatches
from oomrun.worker.store import Store

__all__ = ["Session"]

_PROGRESS_EVERY_S = 0.25
EXIT_STOPPED, EXIT_RESTART = 75, 70


class Session:
    """The training of one script in one process.

    ``group`` are the workers that take each step together, None for one alone;
    ``pass_size`` is then the samples a pass of this worker's share. It is ``placed``
    once it has told where training goes on.
    """

    def __init__(
        self, launch: Launch, channel: Channel, group: Group | None = None
    ) -> None:
        self.launch = launch
        self.channel = channel
        self.group = group
        self.stop_agreed = False
        self.pass_size: int | None = None
        self.peak_told = 0
        self.profile_key: str | None = None
        self.micro_batches = MicroBatches(launch, channel)
        self.leaks = LeakWatch(launch, group.size if group else 1)
        self.fit: FitCall | None = None
        self.step = self.samples = self._fits = 0
        self._window = announcing.Window()
        self._loss: float | None = None
        self._batch = 0
        self._global_batch_size = launch.global_batch_size
        self._notes: set[str] = set()
        self._last: Any = None  # the batch trained last, for its fingerprint
        self._due = ""
        self._saved_at = time.monotonic()
        self._unsettled: Callable[[], None] | None = None
        self.placed = False
        self.store = Store(launch, channel)

    @property
    def several_devices(self) -> bool:
        """Whether this process has more than one device to train on."""
        return len(self.launch.plan.devices) > 1

    # -- reporting -------------------------------------------------------------

    def note(self, code: str, text: str) -> None:
        """Tells a person something, once a process.

        Names that Keras numbers (``sequential_12``) do not make it another thing.
        """
        known = code + re.sub(r"(?<=[a-z])_[0-9]+\b", "", text)
        if known not in self._notes:
            self._notes.add(known)
            self._send(ev.Noted, code=code, text=text)

    def phase(self, name: str) -> None:
        """Tells what the worker turns to, and starts a new window for its peaks."""
        self.report_progress()
        memory = devices.read_memory(self.launch.plan)
        self._send(ev.PhaseChanged, phase=name, memory=memory)
        devices.reset_peaks(self.launch.plan)

    def _send(self, event: Any, **fields: Any) -> None:
        self.channel.send(event(at=time.time(), attempt=self.launch.attempt, **fields))

    # -- the life of a fit -----------------------------------------------------

    def begin_fit(
        self, model: Any, fingerprint: dict[str, Any], epochs: int
    ) -> FitCall:
        """The next call of ``fit``; ``saved`` says from where it goes on."""
        self.settle()
        self._fits += 1
        self.leaks.follow(model)
        call = FitCall(
            number=self._fits, fingerprint=fingerprint, model=model, epochs=epochs
        )
        call.saved = self.store.find(call.number, fingerprint)
        if call.saved is None:
            announcing.began_anew(self, call)
        return call

    def restored(self, call: FitCall, state: dict[str, Any]) -> None:
        """Training goes on at ``state``."""
        self.step, self.samples = state["step"], state["samples"]
        self.micro_batches.step = self.step
        call.epoch, call.batches = state["epoch"], state["batches"]
        call.entered = call.batches
        announcing.placed(self, call, state["name"])

    def current_micro_batch(self) -> int | None:
        """The micro-batch in use, None before the first batch."""
        size = self._global_batch_size or self._batch
        return self.micro_batches.size(size) if size else None

    def announce(self, batch_size: int | None, data: Any = None) -> None:
        """Reports the beginning of a fit, once its batch size is known.

        Args:
            batch_size: rows of the first batch.
            data: that batch; None where we never see it.
        """
        call = self.fit
        if call is None or call.announced:
            return
        call.announced = True
        size = call.iterator.batch_size if call.iterator is not None else None
        self._global_batch_size = size or batch_size or self._global_batch_size
        announcing.fit_started(self, call, data, self._global_batch_size)

    def end_fit(self, call: FitCall, history: Any) -> None:
        """Keeps the result of a completed ``fit``, for the next run of the script."""
        kept, left_out = callback_state.plain(history.history)
        if left_out:
            self.note(
                "history-not-kept",
                f"{', '.join(left_out)} in the history is no plain data: where a "
                "restart hands back a fit that was completed, it is without it",
            )
        self._complete(call, {"history": kept, "epochs": list(history.epoch)})
        self.settle()

    def end_loop(self, call: FitCall) -> None:
        """As ``end_fit``, for a custom loop that has come to its end."""
        self.leave_loop(call)
        self.settle()

    def leave_loop(self, call: FitCall) -> None:
        """Copies the result of a loop that the script has left before its end.

        It has broken out of it, or raised: which, will show. It counts as completed
        once the script goes on to its next fit, or ends well (``settle``).
        """
        self._complete(call, {"epochs": call.epoch + 1})

    def _complete(self, call: FitCall, result: dict[str, Any]) -> None:
        self.report_progress()
        state = self._state(call, result)
        write = self.store.copy(
            f"fit-{call.number:04d}", call.model, state, "fit completed"
        )

        def settle() -> None:
            write()
            self.store.wait()
            self._send(
                ev.FitEnded,
                fit=call.number,
                step=state["step"],
                samples=state["samples"],
                epoch=state["epoch"] + 1,
            )

        self._unsettled, self.fit = settle, None

    def settle(self) -> None:
        """Writes the result of the last completed fit, if that is still to be done."""
        self.report_progress()
        settle, self._unsettled = self._unsettled, None
        if settle is not None:
            settle()

    def replayed(self, call: FitCall, state: dict[str, Any]) -> None:
        """A completed ``fit`` was handed back from its record."""
        self.step, self.samples = state["step"], state["samples"]
        self._send(
            ev.FitEnded,
            fit=call.number,
            step=self.step,
            samples=self.samples,
            epoch=state["epoch"] + 1,
            replayed=True,
        )
        self.fit = None

    @property
    def stopping(self) -> bool:
        """Whether training ends after this step: in a group, when all know of it."""
        if self.group is not None:
            return self.stop_agreed
        return self.channel.stop_requested.is_set()

    # -- the life of a step ----------------------------------------------------

    def before_step(self, data: Any, samples: int) -> None:
        """Called with every batch before it is trained."""
        self.announce(samples, data)
        self._due = self._due or self._why_save(self.step + 1)
        self._last = data

    def let_batch_go(self) -> None:
        """Until the next batch is trained nothing is saved that is told of the last."""
        self._last = None

    def due_after_step(self) -> None:
        """As ``before_step``, for a step whose batch we never see."""
        self._due = self._due or self._why_save(self.step + 1)

    def epoch_ended(self, loss: Any) -> None:
        """A custom loop is done with an epoch and with what it does at its end."""
        stopping = self.stopping
        call = self.fit
        if call is None or not (self._due or stopping):
            return
        self._loss = announcing.finite(loss)
        self.report_progress()
        call.epoch, call.batches = call.epoch + 1, 0
        self._save_step(call, "stop" if stopping else self._due)
        if stopping:
            self.leave_stopped()

    def step_done(self, samples: int, seconds: float) -> None:
        """One more optimizer step over ``samples`` samples was taken."""
        self.step += 1
        self.samples += samples
        self.micro_batches.step = self.step
        self._batch = samples
        self._window.steps += 1
        self._window.seconds += seconds
        if self.fit is not None:
            self.fit.batches += 1

    def lone_step(self, samples: int, seconds: float, loss: Any) -> None:
        """As ``step_done``, for a step outside of any fit: of ``train_on_batch``."""
        self.step_done(samples, seconds)
        self.batch_ended(loss)
        if self.stopping:
            self.note(
                "no-checkpoint",
                "the script trains outside of fit and oomrun.Loop, where nothing can "
                "be saved: it will begin anew",
            )
            self.leave_stopped()

    def batch_ended(self, loss: Any) -> None:
        """Keras has called the batch hooks: a good moment to report, save or stop."""
        now = time.monotonic()
        if now - self._window.began >= _PROGRESS_EVERY_S:
            self._loss = announcing.finite(loss)
            self.report_progress()
        stopping = self.stopping
        call = self.fit
        if call is None:
            return
        leak = self.leaks.after_step(self.step, call.steps_to_come)
        if self.leaks.in_use_bytes is not None:
            self.micro_batches.at_rest(self.leaks.in_use_bytes)
        if not (self._due or stopping or leak):
            return
        self._loss = announcing.finite(loss)
        self.report_progress()
        self._save_step(call, "stop" if stopping else "leak" if leak else self._due)
        if stopping:
            self.leave_stopped()
        if leak is not None:
            self.channel.send(leak)
            self.leave_for_restart()

    def _why_save(self, step: int) -> str:
        """Why a checkpoint is due after ``step``, or an empty string."""
        if self.stopping:
            return "stop"
        every = self.launch.checkpoint_every_steps
        if every is not None and step % every == 0:
            return "schedule"
        seconds = self.launch.checkpoint_every_s
        if seconds is not None and time.monotonic() - self._saved_at >= seconds:
            return "schedule"
        return ""

    def report_progress(self) -> None:
        """Tells of the steps since the last report."""
        if self._window.steps == 0:
            return
        size = (self.fit and self._global_batch_size) or self._batch
        announcing.progressed(self, self._window, size, self._loss)
        self._window = announcing.Window()

    # -- checkpoints -----------------------------------------------------------

    def _save_step(self, call: FitCall, reason: str) -> None:
        name = f"step-{self.step:010d}-{self.launch.attempt:04d}"
        # In a group whichever worker it is that ends: what one has, all of them have.
        last = reason in ("leak", "out of memory")
        self.store.save(name, call.model, self._state(call, None), reason, last=last)
        self._due, self._saved_at = "", time.monotonic()
        if reason == "schedule":
            self.micro_batches.at_checkpoint()

    def _state(self, call: FitCall, result: Any) -> dict[str, Any]:
        return {
            "fit": call.number,
            "fingerprint": call.fingerprint,
            "step": self.step,
            "samples": self.samples,
            "epoch": call.epoch,
            "batches": call.batches,
            "initial_epoch": call.initial_epoch,
            "data": "" if self._last is None else position.fingerprint(self._last),
            "callbacks": callback_state.save(call.callbacks),
            "random": randomness.save(call.model),
            "result": result,
            "loop": None if call.loop is None else call.loop(),
        }

    def emergency_checkpoint(self) -> None:
        """Saves after an exhaustion that has changed nothing: no step is lost."""
        if self.fit is not None and self.fit.announced:
            self._last = None  # it was not trained
            self._save_step(self.fit, "out of memory")
            self.store.wait()

    # -- leaving ---------------------------------------------------------------

    def script_finished(self) -> None:
        """The script has come to its end; says so if it used nothing of ours."""
        if not (self._fits or self.step or self.micro_batches.used):
            self.note(
                "nothing-managed",
                "the script called neither fit, train_on_batch nor oomrun.Loop, so "
                "oomrun had nothing to manage: a training loop of its own is neither "
                "cut into micro-batches nor saved, unless it is written with "
                "oomrun.Loop (docs/custom-loops.md)",
            )

    def leave_stopped(self) -> NoReturn:
        """Ends the process since we were asked to; the checkpoint is complete."""
        self.store.finish()
        self._send(
            ev.ScriptEnded, rank=self.launch.rank, outcome="stopped",
            exit_code=EXIT_STOPPED,
        )  # fmt: skip
        if self.group is not None:
            self.group.leave()
        self._leave(EXIT_STOPPED)

    def leave_measured(self) -> NoReturn:
        """Ends the process before the first step: all that was asked for is known."""
        self._send(ev.ScriptEnded, rank=self.launch.rank, outcome="exited", exit_code=0)
        self._leave(0)

    def leave_if_leaking(self, size: int, phase: str, message: str) -> None:
        """Starts anew where a step does not fit only since memory was not given back.

        Args:
            size: the micro-batch that ran out of memory; it had run before.
            phase: gradients or apply.
            message: TensorFlow's text.
        """
        leak = self.leaks.explains_exhaustion()
        if leak is not None:
            self.micro_batches.report(size, phase, message, recovery="restart")
            self.report_progress()  # its peaks hold what has grown
            self.channel.send(leak)
            self.emergency_checkpoint()
            self.leave_for_restart()

    def leave_for_restart(self, code: int = EXIT_RESTART) -> NoReturn:
        """Ends the process since it cannot go on."""
        self.report_progress()  # what was trained since, and is now lost, counts
        self.store.wait()
        self._leave(code)

    def _leave(self, code: int) -> NoReturn:
        self.channel.close()
        leave(code)
