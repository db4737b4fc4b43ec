"""Running out of memory inside the worker: what to try, and what to tell.

Covers: the micro-batch that is used now, for training and for evaluation; choosing the
next smaller one; going back to one that had run once its memory is free again;
reporting each exhaustion once. Does not cover: undoing the failed
step (``engine/snapshot.py``) and restarts (``oomrun.core.policy``).
"""

from __future__ import annotations

import re
import time

from oomrun.core import batch, growing, launch, log_facts
from oomrun.core import events as ev
from oomrun.core.growing import Lost
from oomrun.core.topology import HOST_ID
from oomrun.worker import devices
from oomrun.worker.channel import Channel, OfOneDevice

__all__ = ["MicroBatches"]

_HOST = re.compile(r"\b(?:MemoryError|std::bad_alloc)\b")

#: Peaks and pools by size, and the smallest size that failed.
_OfModel = tuple[dict[int, int], dict[int, int], int | None]


class MicroBatches:
    """The micro-batch per phase, shrunk as memory demands.

    It grows only back to what had run, at a checkpoint (``core/growing.py``).

    Attributes:
        step: the step that training has reached, for reports.
        measured: peak bytes by size of the current model's training.
        recorded: the least pool that has room for it, by size, where that is known.
        failed: the smallest size of it that ran out of memory.
    """

    def __init__(self, settings: launch.Launch, channel: Channel | OfOneDevice) -> None:
        self._settings = settings
        self._channel = channel
        device = settings.plan.devices[0]
        # A plan for whole batches is no limit for another fit of larger ones.
        cut = device.share is None or (device.micro_batch_size or 0) < device.share
        planned = device.micro_batch_size if cut else None
        self._limits: dict[str, int | None] = {
            "gradients": planned,
            # Evaluation needs less, and is cut only once it has not fitted: what it
            # reports of a masked loss depends on the cut. Where that would mean a
            # restart, it starts with what training has come down to.
            "evaluate": None if settings.in_process else planned,
        }
        self._planned = planned
        self._model = ""
        self._others: dict[str, _OfModel] = {}
        self.measured: dict[int, int] = {}
        self.recorded: dict[int, int] = {}
        # Of them, those of earlier runs.
        self._earlier: dict[int, int] = {}
        self._recorded_earlier: dict[int, int] = {}
        self.failed: int | None = None
        self._ran: dict[str, int] = {"gradients": 0, "evaluate": 0}
        self._resting: int | None = None  # bytes in use between the last two steps
        self._ran_at: dict[int, int] = {}  # the same, by size that then ran
        self._lost: Lost | None = None
        self._limit_before: int | None = None
        self.step = 0

    @property
    def probes(self) -> bool:
        """Whether sizes may be tried before training."""
        device = self._settings.plan.devices[0]
        fixed = self._settings.micro_batch_fixed is not None
        return self._settings.probe and not fixed and device.budget_bytes is not None

    @property
    def budget_bytes(self) -> int:
        """What a step's peak must not exceed."""
        return self._settings.plan.devices[0].budget_bytes or 0

    def begin(self, key: str | None, fit: int) -> None:
        """Another fit: what one of another model has come down to is no limit for it.

        Args:
            key: its ``profile_key``.
            fit: its number.
        """
        settings = self._settings
        known = key or f"fit {fit}"
        if known == self._model:
            return
        self._others[self._model] = (self.measured, self.recorded, self.failed)
        self._model = known
        self._limits["gradients"] = self._planned
        self._ran["gradients"] = 0
        self._resting, self._ran_at, self._lost = None, {}, None
        self.measured, self.recorded, self.failed = self._others.get(
            known, ({}, {}, None)
        )
        self._earlier, self._recorded_earlier = {}, {}
        before = settings.profile_key or f"fit {settings.fit}"
        if known == before:
            self.measured = dict(settings.measured)
            self.recorded = dict(settings.recorded)
            self._earlier = dict(settings.measured)
            self._recorded_earlier = dict(settings.recorded)
            self.failed = settings.micro_batch_failed

    def note_peak(self, size: int, peak_bytes: int) -> None:
        """A step of the current model at ``size`` samples a pass took so much."""
        self.measured[size] = max(self.measured.get(size, 0), peak_bytes)

    def note_pool(self, size: int, pool_bytes: int) -> None:
        """A pool of so much has room for such a step, by its allocations."""
        self.recorded[size] = max(self.recorded.get(size, 0), pool_bytes)

    def note_earlier_peak(self, size: int, peak_bytes: int) -> None:
        """The same of an earlier run, which has seen all of the data's shapes."""
        self._earlier[size] = max(self._earlier.get(size, 0), peak_bytes)
        self.note_peak(size, peak_bytes)

    def note_earlier_pool(self, size: int, pool_bytes: int) -> None:
        """What ``note_pool`` notes, of an earlier run."""
        known = self._recorded_earlier.get(size, 0)
        self._recorded_earlier[size] = max(known, pool_bytes)
        self.note_pool(size, pool_bytes)

    def samples_grew(self) -> None:
        """What this process has measured was of smaller samples than those to come."""
        self.measured = dict(self._earlier)
        self.recorded = dict(self._recorded_earlier)

    def note_failed(self, size: int) -> None:
        """A step of the current model at ``size`` samples a pass ran out of memory."""
        self.failed = min(size, self.failed or size)

    def settle(self, size: int, samples: int) -> None:
        """Takes the size that was found by trying, for training and evaluation."""
        if size >= samples:
            return
        self._limits["gradients"] = size
        # A part of a batch needs less without gradients; all of it may need more.
        evaluated = self._limits["evaluate"]
        self._limits["evaluate"] = min(size, evaluated or size)

    def size(self, samples: int, phase: str = "gradients") -> int:
        """Samples a pass for a batch of ``samples``."""
        bounds = [samples, self._limits[phase]]
        if phase == "gradients":
            settings = self._settings
            bounds += [settings.micro_batch_max, settings.micro_batch_fixed]
        return min(bound for bound in bounds if bound is not None)

    @property
    def used(self) -> bool:
        """Whether a pass of training or evaluation has been made."""
        return any(self._ran.values())

    def ran(self, size: int, phase: str = "gradients") -> None:
        """Notes a size that has just worked."""
        self._ran[phase] = max(self._ran[phase], size)
        if phase == "gradients" and self._resting is not None:
            self._ran_at[size] = self._resting

    def at_rest(self, in_use_bytes: int) -> None:
        """Notes what is in use between two steps of training."""
        self._resting = in_use_bytes

    def at_checkpoint(self) -> None:
        """Goes back to the size that had run, if its memory has been free again."""
        if self._lost is None or self._resting is None or self._lost.back:
            return
        self._lost = growing.at_checkpoint(self._lost, self._resting)
        if not self._lost.back:
            return
        old, size = self._limits["gradients"], self._lost.size
        self._limits["gradients"] = self._limit_before
        self.failed = None
        self._channel.send(
            ev.MicroBatchChanged(
                at=time.time(),
                attempt=self._settings.attempt,
                old=old or size,
                new=size,
                phase="gradients",
                reason=f"the memory that micro-batch {size} ran with was free again at "
                f"{self._lost.wait} checkpoints: micro-batch {old} -> {size}",
            )
        )

    def shrink(
        self, size: int, samples: int, phase: str, message: str, *, safe: bool
    ) -> bool:
        """Reports that ``size`` samples did not fit; takes a smaller size if it may.

        Args:
            size: the micro-batch that failed.
            samples: rows of the batch it was cut from.
            phase: gradients, apply, evaluate or predict.
            message: TensorFlow's text.
            safe: nothing was changed by the failed pass, or it was undone.

        Returns:
            Whether the same pass can be run again in this process.
        """
        kind = "gradients" if phase in ("gradients", "apply") else "evaluate"
        smaller = batch.smaller_micro_batch(samples, size, self._known(kind, size))
        fixed = kind == "gradients" and self._settings.micro_batch_fixed is not None
        again = safe and self._settings.in_process and smaller > 0 and not fixed
        recovery = "in_process" if again else "restart"
        memory = self.report(size, phase, message, recovery=recovery)
        if not again:
            return False
        if phase == "gradients" and self._settings.grow_back:
            self._wait_for(size, memory)
        self._limits[kind] = smaller
        if kind == "gradients":
            self.note_failed(size)
        passes = batch.accumulation_steps(samples, smaller)
        device = self._settings.plan.devices[0].id
        self._channel.send(
            ev.MicroBatchChanged(
                at=time.time(),
                attempt=self._settings.attempt,
                old=size,
                new=smaller,
                phase=kind,
                reason=f"{device} ran out of memory in {phase} at micro-batch {size}: "
                f"micro-batch {size} -> {smaller} x {passes} (global {samples})",
            )
        )
        return True

    def _known(self, kind: str, failed: int) -> int:
        """The largest size that ran, or should, of those below ``failed``; or 0."""
        ran = self._ran[kind] if self._ran[kind] < failed else 0
        if kind != "gradients":
            return ran
        limit = self._settings.plan.devices[0].limit_bytes
        should = batch.known_to_run(failed, self.measured, self.recorded, limit)
        return max(ran, should)

    def _wait_for(self, size: int, memory: ev.DeviceMemory) -> None:
        """Remembers ``size`` where something else took the memory it had run with."""
        waiting = self._lost is not None and not self._lost.back
        rest, in_use = self._ran_at.get(size), memory.in_use_bytes
        if waiting or rest is None or in_use is None:
            return
        shared = self._settings.plan.devices[0].kind != "cpu"
        self._lost = growing.lost(
            size,
            rest_bytes=rest,
            in_use_bytes=in_use,
            budget_bytes=self.budget_bytes,
            refused_at_bytes=memory.peak_bytes if shared else None,
            takes_bytes=self.measured.get(size),
            before=self._lost,
        )
        self._limit_before = self._limits["gradients"]

    def report(
        self, size: int | None, phase: str, message: str, *, recovery: str
    ) -> ev.DeviceMemory:
        """Tells the supervisor of one exhaustion; returns the device's memory then."""
        memory = devices.read_memory(self._settings.plan)
        # TensorFlow passes a generator's MemoryError on as an error of its own.
        host = _HOST.search(message) is not None
        self._channel.send(
            ev.OomOccurred(
                at=time.time(),
                attempt=self._settings.attempt,
                rank=self._settings.rank,
                device=HOST_ID if host else self._settings.plan.devices[0].id,
                kind="host" if host else "device",
                phase=phase,
                recovery=recovery,
                micro_batch_size=None if host else size,
                step=self.step,
                message=_decisive(message),
                memory=memory,
                operation=log_facts.facts_of(message).operation or "",
                location=log_facts.script_line(message) or "",
            )
        )
        # The peak of what did not fit says nothing of what will.
        devices.reset_peaks(self._settings.plan)
        return memory[0]


def _decisive(message: str) -> str:
    """The part of TensorFlow's long text that names shape, type and device."""
    found = re.search(r"OOM when allocating tensor[^\n]*", message)
    text = found.group(0) if found else message.strip().split("\n", 1)[0]
    return text[:500]
