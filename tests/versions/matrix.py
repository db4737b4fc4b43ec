"""oomrun at both ends of what it supports: the lowest and the newest of everything.

    python tests/versions/matrix.py [--folder build/versions] [--only lowest]

Covers: a virtual environment for each end, with the oldest and the newest Python to be
found, oomrun as a user installs it, and ``smoke.py`` in it; a table at the end. Does
not cover: what lies between the ends. Exit code 1 if an end failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One end: the Pythons to look for, best first, and what pip is asked for."""

    name: str
    pythons: tuple[str, ...]
    requirements: tuple[str, ...]


ENDS = (
    End(
        name="lowest",
        pythons=("3.10", "3.11", "3.12"),  # TensorFlow 2.16 knows no 3.13
        requirements=("tensorflow==2.16.1", "keras==3.3.3"),
    ),
    End(
        name="newest",
        pythons=("3.13", "3.12", "3.11", "3.10"),
        requirements=("tensorflow==2.21.*", "keras>=3.15"),
    ),
)


def main() -> int:
    """Tries the ends; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions")
    parser.add_argument("--only", choices=[end.name for end in ENDS])
    parser.add_argument(
        "--python", action="append", default=[], metavar="PATH",
        help="an interpreter to use besides those on PATH; may be repeated",
    )  # fmt: skip
    args = parser.parse_args()
    rows = []
    for end in ENDS:
        if args.only in (None, end.name):
            rows.append(_try(end, args.folder / end.name, args.python))
    print(_table(rows))
    return 1 if any(row["result"] != "passed" for row in rows) else 0


def _try(end: End, folder: Path, pythons: Sequence[str]) -> dict[str, str]:
    python = find_python(end.pythons, pythons)
    print(f"{end.name}: {python}, {', '.join(end.requirements)}", flush=True)
    try:
        _install(python, folder, end.requirements)
    except subprocess.CalledProcessError as error:
        return _row(end, {}, f"not installed: {error}")
    runs = folder / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    done = subprocess.run(
        [_bin(folder, "python"), str(HERE / "smoke.py"), "--folder", str(runs)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    try:
        report = json.loads(done.stdout)
    except ValueError:
        return _row(end, {}, f"smoke.py ended with exit code {done.returncode}")
    (folder / "report.json").write_text(done.stdout)
    return _row(end, report, ", ".join(report["failed"]) or "passed")


def find_python(wanted: Sequence[str], also: Sequence[str]) -> str:
    """The first interpreter of these versions that works, or else our own."""
    candidates = [*also, *(f"python{version}" for version in wanted)]
    found = {_version(path): path for path in reversed([*candidates, "python3"])}
    for version in wanted:
        if version in found:
            return found[version]
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    print(f"no Python {' or '.join(wanted)} on PATH: {own} ({sys.executable}) instead")
    return sys.executable


def _version(python: str) -> str | None:
    """The version of an interpreter; None for one that is missing or broken."""
    code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _install(python: str, folder: Path, requirements: Sequence[str]) -> None:
    stamp = folder / "installed.txt"
    wanted = f"{python} {' '.join(requirements)}"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        pip = [_bin(folder, "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--upgrade", "pip"], check=True)
        subprocess.run([*pip, *requirements, f"{ROOT}[tensorflow]"], check=True)
        stamp.write_text(wanted)
    else:  # oomrun itself may have changed
        pip = [_bin(folder, "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--force-reinstall", str(ROOT)], check=True)


def _bin(folder: Path, program: str) -> str:
    return str(folder / "bin" / program)


def _row(end: End, report: dict[str, Any], result: str) -> dict[str, str]:
    versions = {key: report.get(key, "-") for key in ("python", "tensorflow", "keras")}
    return {"end": end.name, **versions, "result": result}


def _table(rows: Sequence[dict[str, str]]) -> str:
    lines = [list(rows[0]), *[list(row.values()) for row in rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


if __name__ == "__main__":
    sys.exit(main())
