"""An entry of the zoo trained by the real command, and what its journal says.

Covers: a job under a limit, with nothing remembered from runs before; what was tried,
planned and needed. Does not cover: the largest size that would have run
(``benchmarks.oracle``).
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.zoo.outcome import Case
from e2e import jobs
from oomrun.core import events as ev

__all__ = ["Managed", "read", "run"]

TIMEOUT_S = 900.0

_SCRIPT = """\
import json
import time

import keras

from benchmarks.zoo import ZOO

entry = ZOO[{entry!r}]
model = entry.build({optimizer!r}, {xla})


class Moments(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if len(moments) < 2:
            moments.append(time.time())
            with open("moments.json", "a") as file:
                print(json.dumps(moments), file=file)


moments = [time.time()]
entry.fit(model, {steps}, [Moments()])
"""
_JOB = "devices: {{cpu: 1, memory: [{limit_mib}MiB]}}\n"


@dataclass(frozen=True, kw_only=True)
class Managed:
    """What came of a run.

    Attributes:
        planned: the micro-batch that was planned; None: no plan was made, so that
            training began with whole batches.
        trained: the micro-batch of the last steps; 0: there were none.
        steps: that were taken.
        probed: sizes that were tried first, and their peaks; None: it ran out of
            memory.
        training_ooms: how often training itself did.
        predicted, predicted_high: the peak at ``planned`` as it was predicted, the most
            likely value and the upper end, in bytes.
        real_peak: the highest at ``planned`` in training.
        exit_code: of ``oomrun``.
        seconds: of the whole command.
        start_s: until ``fit`` was first called.
        first_step_s: from there to the end of the first step.
    """

    planned: int | None = None
    trained: int = 0
    steps: int = 0
    probed: tuple[tuple[int, int | None], ...] = ()
    training_ooms: int = 0
    predicted: int | None = None
    predicted_high: int | None = None
    real_peak: int | None = None
    exit_code: int = 0
    seconds: float = 0.0
    start_s: float | None = None
    first_step_s: float | None = None

    @property
    def probe_ooms(self) -> int:
        """How many of the sizes tried ran out of memory."""
        return sum(peak is None for _, peak in self.probed)


def run(case: Case, steps: int) -> Managed:
    """Has ``oomrun`` train a case for so many steps."""
    with tempfile.TemporaryDirectory() as folder:
        script = _SCRIPT.format(
            entry=case.entry, optimizer=case.optimizer, xla=case.xla, steps=steps
        )
        job = jobs.make(Path(folder), script, _JOB.format(limit_mib=case.limit_mib))
        began = time.time()
        code = job.run(timeout_s=TIMEOUT_S)
        seconds = time.time() - began
        moments = _moments(job.folder / "moments.json")
        start_s = first_step_s = None
        if moments is not None:
            start_s = round(moments[0] - began, 2)
            first_step_s = round(moments[1] - moments[0], 2)
        return replace(
            read(job.events()),
            exit_code=code,
            seconds=round(seconds, 1),
            start_s=start_s,
            first_step_s=first_step_s,
        )


def _moments(file: Path) -> tuple[float, float] | None:
    """When ``fit`` was called, and its first step done, in the first attempt to."""
    if not file.exists():
        return None
    called, done = json.loads(file.read_text().splitlines()[0])
    return called, done


def read(events: Iterable[ev.Event]) -> Managed:
    """What the journal tells of a run."""
    events = list(events)
    planned = [e for e in events if isinstance(e, ev.MicroBatchPlanned)]
    probed = [e for e in events if isinstance(e, ev.Probed)]
    trained = [e for e in events if isinstance(e, ev.Progressed)]
    plan = planned[0] if planned else None
    peaks = [
        device.peak_bytes
        for progress in trained
        if plan is not None and progress.micro_batch_size == plan.micro_batch_size
        for device in progress.memory
        if device.peak_bytes is not None
    ]
    return Managed(
        planned=plan.micro_batch_size if plan else None,
        trained=trained[-1].micro_batch_size if trained else 0,
        steps=max((event.step for event in trained), default=0),
        probed=tuple((event.micro_batch_size, event.peak_bytes) for event in probed),
        training_ooms=sum(isinstance(event, ev.OomOccurred) for event in events),
        predicted=plan.predicted_peak_bytes if plan else None,
        predicted_high=plan.predicted_peak_high_bytes if plan else None,
        real_peak=max(peaks) if peaks else None,
    )
