"""Scripts as people write them: each ends with the numbers that it has by itself.

Every script of ``scripts/`` is run by Python, with all memory there is, and by the real
command on a CPU device whose limit its whole batch does not fit into. The limit lies
nearer to what half a batch needs than to what the whole one does: a script that runs
out of memory twice costs 10 s more, one that never does proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jobs
import pytest

from oomrun.core import events as ev

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Style:
    """What is expected of one script.

    Attributes:
        limit: memory of its device.
        samples: how many it trains on, over all epochs and fits.
        tolerance: of weights and history, relative to the norm of each array.
    """

    limit: str
    samples: int
    tolerance: float = 1e-10


STYLES = {
    "autoencoder": Style("70MiB", 176),
    "custom_loop": Style("66MiB", 2560),
    "embeddings": Style("92MiB", 5120),
    "gan": Style("100MiB", 320),
    "kfold": Style("70MiB", 6144),
    "lstm_lengths": Style("54MiB", 800),
    # Each pass rounds its gradients to float16, so the sum over passes differs by that.
    "mixed_precision": Style("72MiB", 8192, tolerance=1e-3),
    "own_train_step": Style("58MiB", 2560),
    "pipeline": Style("100MiB", 2048),
    "py_dataset": Style("30MiB", 1800),
    "sequential": Style("150MiB", 1408),
    "subclassed": Style("70MiB", 2400),
    "train_on_batch": Style("52MiB", 2800),
    "transformer": Style("60MiB", 300),
    "two_inputs": Style("58MiB", 3072),
    "unet": Style("34MiB", 80),
}


def test_every_script_is_run() -> None:
    assert set(STYLES) == {path.stem for path in SCRIPTS.glob("*.py")}


def _limited(style: Style) -> str:
    # Tried before training, the right size would be found without running out.
    return f"devices: {{cpu: 1, memory: {style.limit}}}\nmemory: {{probe: never}}\n"


# One for each way in which a step is taken and cut. The others take eight minutes more;
# what is special in them, their data or their layers, is a row of the compatibility
# table as well.
QUICK = frozenset(
    {
        "custom_loop", "lstm_lengths", "mixed_precision", "own_train_step",
        "train_on_batch",
    }
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in sorted(STYLES)
    ],
)
def test_out_of_memory_changes_none_of_its_numbers(name: str, tmp_path: Path) -> None:
    style, script = STYLES[name], SCRIPTS / f"{name}.py"
    job = jobs.make(tmp_path / "job", script.read_text(), _limited(style))
    process = job.start()  # and, while it waits for memory, the same by itself:
    try:
        jobs.python(script, cwd=tmp_path)
        code = process.wait(300)
    finally:
        process.kill()
        process.wait()
    assert code == 0, job.everything()
    ooms = job.events(ev.OomOccurred)
    assert {event.recovery for event in ooms} == {"in_process"}, job.everything()
    # The whole batch did not fit; all that followed was trained in parts of it.
    whole = ooms[0].micro_batch_size
    assert whole is not None
    assert job.events(ev.MicroBatchChanged)[-1].new < whole
    assert any(
        done.micro_batch_size < done.global_batch_size == whole
        for done in job.events(ev.Progressed)
    )
    status = job.status()
    assert (status["attempts"], status["samples"]) == (1, style.samples)
    found, wanted = job.folder / "weights.npz", tmp_path / "weights.npz"
    assert jobs.distance(found, wanted) <= style.tolerance
    assert jobs.gone(job)
