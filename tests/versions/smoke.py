"""Real trainings under the TensorFlow and Keras of this interpreter; prints JSON.

    python tests/versions/smoke.py [--folder DIR]

Covers: running out of memory for real, recovered in process and by a restart; sizes
tried first; a step in micro-batches against plain Keras; stopped by SIGTERM, then
carried on. Each ends in the weights of `python train.py` with no limit. Needs oomrun to
be installed. Exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parents[1] / "configs" / "quickstart"
JOB = """\
name: smoke
script: {script}
args: [{output}]
devices: cpu
batch: {{micro: {{max: 24}}}}
checkpoint: {{every: 3 steps}}
metrics: {{listen: none}}
"""
RELATIVE = 1e-10  # double precision, another order of summation
TIMEOUT_S = 600


class FailedError(Exception):
    """A run did not do what it should."""


def main() -> int:
    """Runs all checks; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to run (default: temporary)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        results = check_all(args.folder or Path(temporary))
    failed = [name for name, result in results.items() if result["error"]]
    versions = {name: metadata.version(name) for name in ("keras", "numpy")}
    report = {
        "python": platform.python_version(),
        "tensorflow": _tensorflow(),
        **versions,
        "checks": results,
        "failed": failed,
    }
    print(json.dumps(report, indent=1))
    return 1 if failed else 0


def check_all(folder: Path) -> dict[str, dict[str, Any]]:
    """Every check by its name: seconds taken, and the error or an empty string."""
    results = {}
    for name, check in CHECKS.items():
        place = folder / name.replace(" ", "-")
        place.mkdir(parents=True)
        began = time.monotonic()
        try:
            check(place)
            error = ""
        except FailedError as failure:
            error = str(failure)
        seconds = round(time.monotonic() - began, 1)
        results[name] = {"seconds": seconds, "error": error}
        print(f"{name}: {error or 'passed'} ({seconds} s)", file=sys.stderr, flush=True)
    return results


def in_process(folder: Path) -> None:
    """Runs out of memory, shrinks, and goes on in the same process."""
    status = _quickstart(folder, "recovery.in_process=auto")
    _demand(status["in_process_recoveries"] >= 1, status)


def by_restart(folder: Path) -> None:
    """Runs out of memory, and goes on in another process."""
    status = _quickstart(folder, "recovery.in_process=never")
    _demand(status["restarts"]["oom"] >= 1, status)


def tried_first(folder: Path) -> None:
    """Tries sizes before the first step, and never runs out of memory."""
    status = _quickstart(folder, "recovery.in_process=auto", ooms=False)
    _demand(0 < status["devices"][0]["micro_batch_size"] < 256, status)


def micro_batches(folder: Path) -> None:
    """Masks, weights, two fits: in micro-batches as in whole batches."""
    _plain(HERE / "train.py", folder, "plain.npz")
    _job(folder)
    _expect(0, *_run(folder))
    # A masked loss is a mean over the valid entries of each pass: evaluated in other
    # passes, it is another mean of means, in Keras as in oomrun.
    others = ("validation", "scores")
    _compare(folder / "plain.npz", folder / "split.npz", RELATIVE, but=others)


def stopped(folder: Path) -> None:
    """SIGTERM once it trains; the same command goes on to the same weights."""
    _job(folder)
    _expect(0, *_run(folder))
    (folder / "split.npz").rename(folder / "whole.npz")
    (folder / "runs").rename(folder / "earlier")
    _expect(75, *_run(folder, stop_when=lambda: _trains(folder)))
    _expect(0, *_run(folder))
    _compare(folder / "whole.npz", folder / "split.npz", 0.0)


CHECKS: dict[str, Callable[[Path], None]] = {
    "out of memory, in process": in_process,
    "out of memory, by restart": by_restart,
    "sizes tried first": tried_first,
    "micro-batches": micro_batches,
    "stopped and carried on": stopped,
}


def _quickstart(folder: Path, setting: str, *, ooms: bool = True) -> dict[str, Any]:
    os.environ["FLOATX"] = "float64"
    options = ("--epochs", "1", "--output")
    _plain(QUICKSTART / "train.py", folder, *options, "plain.npz")
    arguments = f"args=[{', '.join(options)}, limited.npz]"
    # Where sizes are tried first, memory does not run out.
    probe = "never" if ooms else "auto"
    given = (arguments, "metrics.listen=none", f"memory.probe={probe}", setting)
    settings = [word for value in given for word in ("--set", value)]
    _expect(0, *_oomrun(folder, str(QUICKSTART / "job.yaml"), *settings))
    _compare(folder / "plain.npz", folder / "limited.npz", RELATIVE)
    code, text = _oomrun(folder, "status", "runs/quickstart", "--json")
    _expect(0, code, text)
    status: dict[str, Any] = json.loads(text[text.index("{") :])
    _demand(
        (status["oom_events"] > 0) == ooms and status["global_batch_size"] == 256,
        status,
    )
    return status


def _job(folder: Path) -> None:
    text = JOB.format(script=json.dumps(str(HERE / "train.py")), output="split.npz")
    (folder / "job.yaml").write_text(text)


def _run(folder: Path, stop_when: Callable[[], bool] | None = None) -> tuple[int, str]:
    return _oomrun(folder, "job.yaml", stop_when=stop_when)


def _trains(folder: Path) -> bool:
    journal = folder / "runs" / "smoke" / "journal.jsonl"
    return journal.exists() and "checkpoint_saved" in journal.read_text()


def _oomrun(
    folder: Path, *arguments: str, stop_when: Callable[[], bool] | None = None
) -> tuple[int, str]:
    command = [sys.executable, "-m", "oomrun", *arguments]
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=subprocess.STDOUT
        )
        deadline = time.monotonic() + TIMEOUT_S
        while process.poll() is None:
            if stop_when is not None and stop_when():
                process.send_signal(signal.SIGTERM)
                stop_when = None
            if time.monotonic() > deadline:
                process.kill()
                raise FailedError(f"{arguments} took over {TIMEOUT_S} s")
            time.sleep(0.05)
        output.seek(0)
        return process.returncode, output.read()


def _plain(script: Path, folder: Path, *arguments: str) -> None:
    # What oomrun sets for a limited CPU device: the same kernels, the same sums.
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"}
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
        timeout=TIMEOUT_S,
    )  # fmt: skip
    _expect(0, done.returncode, done.stdout + done.stderr)


def _compare(
    first: Path, second: Path, relative: float, but: Sequence[str] = ()
) -> None:
    with np.load(first) as left, np.load(second) as right:
        _demand(sorted(left.files) == sorted(right.files), "other arrays")
        for name in set(left.files) - set(but):
            scale = np.max(np.abs(left[name])) or 1.0
            off = float(np.max(np.abs(left[name] - right[name])) / scale)
            _demand(off <= relative, f"{name} is off by {off:.1e} ({relative:g})")


def _expect(wanted: int, code: int, text: str) -> None:
    _demand(code == wanted, f"exit code {code}, not {wanted}: {text[-2000:]}")


def _demand(holds: bool, what: object) -> None:
    if not holds:
        raise FailedError(str(what))


def _tensorflow() -> str:
    for name in ("tensorflow", "tensorflow-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


if __name__ == "__main__":
    sys.exit(main())
