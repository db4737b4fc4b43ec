"""A process of its own that brings checkpoints from a URL to the local disk.

The supervisor starts it before a run begins, or goes on, that may have been elsewhere:
TensorFlow alone reaches the URL, and the supervisor never imports it. It prints one
JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oomrun import checkpoints
from oomrun.core.errors import CheckpointError
from oomrun.worker import lifeline
from oomrun.worker.remote import Remote, Unreachable, latest

__all__ = ["fetch", "main"]


def main() -> int:
    """What the first argument, a JSON object, asks for."""
    asked = json.loads(sys.argv[1])
    lifeline.die_with_parent(asked["supervisor_pid"])
    try:
        found = fetch(asked["url"], Path(asked["folder"]), asked["run_id"])
    except (Unreachable, CheckpointError, OSError) as error:
        found = {"failed": str(error)}
    print("\n" + json.dumps(found), flush=True)
    return 0


def fetch(url: str, folder: Path, run_id: str) -> dict[str, Any]:
    """Copies what is newer there than in ``folder``.

    Args:
        url: ``checkpoint.dir``.
        folder: where the run keeps its checkpoints.
        run_id: of the run in that folder; empty: there is none yet, and the one that
            was at the URL last goes on.

    Returns:
        ``run``, ``seed``, ``job``, ``levers`` of that run, and ``names``, ``rejected``,
        ``size_bytes``, ``duration_s`` of what was copied; nothing where there is none.
    """
    began = time.monotonic()
    there = latest(url)
    if there is None or (run_id and there["run"] != run_id):
        return {}
    remote = Remote(url, there["run"])
    names: list[str] = []
    rejected: dict[str, str] = {}
    size = 0
    for name in _wanted(remote, folder):
        if name.startswith("step-") and any(n.startswith("step-") for n in names):
            break
        try:
            size += remote.download(name, folder)
            names.append(name)
        except CheckpointError as error:
            rejected[name] = str(error)
    return {
        **there,
        "names": names,
        "rejected": rejected,
        "size_bytes": size,
        "duration_s": time.monotonic() - began,
    }


def _wanted(remote: Remote, folder: Path) -> Iterator[str]:
    """Records of fits that are not here, then newer steps, the newest first."""
    here = checkpoints.names(folder, "fit")
    yield from (name for name in remote.names("fit") if name not in here)
    known = checkpoints.names(folder, "step")[:1]
    for name in remote.names("step"):
        if known and name in checkpoints.in_order([name, *known], "step")[1:]:
            return
        if name not in known:
            yield name


if __name__ == "__main__":
    sys.exit(main())
