"""Two devices of which one has a third of the other's memory: shares by speed or equal.

Two workers with 600 and 200 MiB, one core each. A pass costs much beside its samples,
and little of it fits into the small one: so that is slow. In pairs of runs, one with
equal shares, each in passes as large as fit its device (``batch.shares: by_memory``),
and one as oomrun does it by itself. Times are those of whole steps, once shares have
settled. Prints JSON.

Usage: python -m benchmarks.unequal [--pairs 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))

import jobs

from oomrun.core import events as ev

BATCH, STEPS, SETTLED = 128, 24, 12
LIMITS_MIB = (600, 200)
SCRIPT = f"""\
import json, os, time
import keras
import numpy as np

keras.utils.set_random_seed(5)
rng = np.random.default_rng(0)
x = rng.normal(size=({BATCH}, 64, 64, 3)).astype("float32")
y = rng.normal(size=({BATCH}, 1)).astype("float32")
model = keras.Sequential([
    keras.Input((64, 64, 3)),
    keras.layers.Conv2D(40, 1),
    *[keras.layers.ReLU() for _ in range(6)],
    keras.layers.GlobalAveragePooling2D(),
    keras.layers.Dense(2400, "relu"),
    keras.layers.Dense(2400, "relu"),
    keras.layers.Dense(1),
])
model.compile(keras.optimizers.SGD(1e-4), "mse", jit_compile=False)
class Times(keras.callbacks.Callback):
    ends = []
    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(time.perf_counter())
model.fit(x, y, batch_size={BATCH}, epochs={STEPS}, verbose=0, callbacks=[Times()])
if os.environ["OOMRUN_RANK"] == "0":
    with open("times.json", "w") as file:
        json.dump(np.diff(Times.ends).tolist(), file)
"""
JOB = """\
strategy: horovod
devices: {{cpu: 2, memory: [{}MiB, {}MiB]}}
batch: {{shares: {}}}
checkpoint: {{every: 1h}}
env: {{TF_NUM_INTRAOP_THREADS: 1, TF_NUM_INTEROP_THREADS: 1}}
"""


def run(folder: Path, shares: str) -> dict[str, Any]:
    """One run to its end: its shares, and the median time of its last steps."""
    job = jobs.make(folder, SCRIPT, JOB.format(*LIMITS_MIB, shares))
    if job.run(timeout_s=1800) != 0:
        raise SystemExit(f"the run fails:\n{job.everything()}")
    planned: dict[str, list[tuple[int, int]]] = {}
    for event in job.events(ev.SharePlanned):
        planned.setdefault(event.device, []).append(
            (event.share, event.micro_batch_size)
        )
    times = json.loads((folder / "times.json").read_text())
    return {
        "shares_and_micro_batches": planned,
        "step_s": statistics.median(times[SETTLED:]),
        "exhaustions": len(job.events(ev.OomOccurred)),
        "exhaustions_when_settled": sum(
            oom.step >= SETTLED for oom in job.events(ev.OomOccurred)
        ),
        "attempts": len(job.events(ev.AttemptStarted)),
    }


def main() -> None:
    """Prints what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=3)
    pairs = []
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(parser.parse_args().pairs):
            pair = {}
            # In turns, so that what else the machine does favours none.
            for kind in ("by_memory", "auto")[:: -1 if number % 2 else 1]:
                pair[kind] = run(Path(temporary) / f"{number}-{kind}", kind)
                print(f"{number} {kind}: {pair[kind]}", file=sys.stderr)
            faster = pair["by_memory"]["step_s"] / pair["auto"]["step_s"]
            pairs.append({"faster": round(faster, 3), **pair})
    report = {
        "global_batch_size": BATCH,
        "limits_mib": LIMITS_MIB,
        "steps": STEPS,
        "timed_from_step": SETTLED,
        "faster": round(statistics.median(pair["faster"] for pair in pairs), 3),
        "pairs": pairs,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
