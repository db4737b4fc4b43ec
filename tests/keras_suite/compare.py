"""Keras's own tests, plain and under oomrun: the same ones must pass.

    python tests/keras_suite/compare.py [--set required] [--mode cut]
    python tests/keras_suite/compare.py keras/src/models/model_test.py ...

Covers: ``run_suite.py`` run by Python and by the real ``oomrun``, the outcomes compared
by the tests' names, every difference printed as JSON. In mode ``whole`` batches are
left as they are, in ``cut`` each is cut into micro-batches of at most two samples: what
then comes out otherwise for a good reason is listed in ``explained.json``. A test that
comes out otherwise is run plain once more: where plain Keras itself gives both
outcomes, oomrun is not to blame.
Exit code 1 if there is a difference that is not explained.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SUITE = HERE / "run_suite.py"

#: Files and folders of Keras's tests, by the name of the set.
SETS: dict[str, tuple[str, ...]] = {
    "required": ("keras/src/trainers/trainer_test.py", "keras/src/callbacks"),
    "training": (
        "keras/src/models",
        "keras/src/optimizers",
        "keras/src/trainers/compile_utils_test.py",
        "keras/src/trainers/epoch_iterator_test.py",
        "keras/src/trainers/data_adapters",
        "keras/src/backend/tensorflow",
        "keras/src/utils/image_dataset_utils_test.py",
        "keras/src/utils/text_dataset_utils_test.py",
        "keras/src/utils/timeseries_dataset_utils_test.py",
        "keras/src/utils/audio_dataset_utils_test.py",
        "keras/src/utils/dataset_utils_test.py",
        "keras/src/wrappers",
        "keras/src/distillation",
        "keras/src/dtype_policies",
        "keras/src/losses",
        "keras/src/metrics",
        "keras/src/saving/saving_lib_test.py",
        "keras/src/layers/layer_test.py",
        "keras/src/layers/attention",
        "keras/src/layers/core",
        "keras/src/layers/normalization",
        "keras/src/layers/rnn",
    ),
}
MODES = ("whole", "cut")
_PACKAGES = ("oomrun", "tensorflow", "keras", "jax", "pytest")

Tests = dict[str, dict[str, str]]


def main() -> int:
    """Runs both, prints the comparison; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--set", choices=SETS, action="append", dest="sets")
    parser.add_argument("--mode", choices=MODES, action="append", dest="modes")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "keras-suite")
    args = parser.parse_args()
    sets = {"files": tuple(args.files)} if args.files else SETS
    report: dict[str, Any] = {
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES}
    }
    failed = False
    for name in args.sets or sets:
        folder = args.folder.resolve() / name
        plain = run_plain(folder / "plain", sets[name])
        report[name] = {"plain": _summary(plain)}
        for mode in args.modes or MODES:
            done = run_oomrun(folder / mode, sets[name], cut=mode == "cut")
            found = compare(plain["tests"], done["tests"], explained(mode))
            _try_again(found, plain["tests"], folder / "again")
            report[name][mode] = {**_summary(done), **found}
            failed = failed or bool(found["different"])
        failed = failed or "passed" not in report[name]["plain"]["counts"]
    print(json.dumps(report, indent=1))
    return 1 if failed else 0


def _summary(run: Any) -> dict[str, Any]:
    counts = Counter(test["outcome"] for test in run["tests"].values())
    return {"counts": counts, "seconds": run["seconds"], "at_end": run["usage"][-1]}


def _try_again(found: dict[str, Any], plain: Tests, folder: Path) -> None:
    files = sorted({name.split("::")[0] for name in found["different"]})
    if files:
        set_unsteady_apart(found, plain, run_plain(folder, files)["tests"])


def run_plain(folder: Path, files: Sequence[str]) -> Any:
    """``python run_suite.py``; what it has written."""
    out = _new(folder) / "outcomes.json"
    # As oomrun has it on a CPU.
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    return _run([sys.executable, str(SUITE), str(out), *files], folder, env)


def run_oomrun(folder: Path, files: Sequence[str], *, cut: bool) -> Any:
    """``oomrun job.yaml`` of the same script; what that has written."""
    out = _new(folder) / "outcomes.json"
    job = {
        "name": "keras-suite",
        "script": str(SUITE),
        "args": [str(out), *files],
        "devices": "cpu",
        "metrics": {"listen": "127.0.0.1:0"},
        **({"batch": {"micro": {"max": 2}}} if cut else {}),
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    argv = [sys.executable, "-m", "oomrun", "job.yaml", "--view", "plain"]
    return _run(argv, folder, dict(os.environ))


def _new(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _run(argv: Sequence[str], folder: Path, env: Mapping[str, str]) -> Any:
    began = time.monotonic()
    with open(folder / "said", "wb") as said:
        done = subprocess.run(argv, cwd=folder, env=env, stdout=said, stderr=said)
    if done.returncode:
        tail = (folder / "said").read_text(errors="replace")[-3000:]
        raise SystemExit(f"{argv} ended with {done.returncode}, in {folder}:\n{tail}")
    outcomes = json.loads((folder / "outcomes.json").read_text())
    outcomes["seconds"] = round(time.monotonic() - began)
    return outcomes


def explained(mode: str) -> dict[str, str]:
    """Why a test may come out otherwise in ``mode``, by a pattern of its name."""
    entries = json.loads((HERE / "explained.json").read_text())
    return {
        pattern: entry["reason"]
        for entry in entries
        if mode in entry["modes"]
        for pattern in entry["tests"]
    }


def compare(plain: Tests, oomrun: Tests, reasons: Mapping[str, str]) -> dict[str, Any]:
    """Every test that came out otherwise, those with a reason apart.

    Args:
        plain: outcomes by the test's name, as ``run_suite.py`` writes them.
        oomrun: the same, under oomrun.
        reasons: see ``explained``.
    """
    report: dict[str, Any] = {"different": {}, "explained": {}, "unsteady": {}}
    for name in sorted({*plain, *oomrun}):
        one, other = plain.get(name, _MISSING), oomrun.get(name, _MISSING)
        if one["outcome"] == other["outcome"]:
            continue
        found = {
            "plain": one["outcome"],
            "oomrun": other["outcome"],
            "error": other.get("error") or one.get("error", ""),
        }
        reason = next((r for p, r in reasons.items() if fnmatch.fnmatch(name, p)), None)
        if reason is None:
            report["different"][name] = found
        else:
            report["explained"][name] = {**found, "reason": reason}
    return report


_MISSING = {"outcome": "missing"}


def set_unsteady_apart(report: dict[str, Any], plain: Tests, again: Tests) -> None:
    """Moves what plain Keras itself does not give twice from ``different``."""
    for name in list(report["different"]):
        first, second = plain.get(name, _MISSING), again.get(name, _MISSING)
        if first["outcome"] != second["outcome"]:
            found = report["different"].pop(name)
            report["unsteady"][name] = {**found, "plain again": second["outcome"]}


if __name__ == "__main__":
    sys.exit(main())
