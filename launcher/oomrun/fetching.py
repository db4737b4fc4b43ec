"""Bringing a run's checkpoints here, where the job file names a URL for them.

Covers: the process that reaches it (``oomrun.worker.fetching``), which run goes on by
that, refusing one of another job. Does not cover: the copying itself.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from oomrun.core import events as ev
from oomrun.core import remote
from oomrun.core.errors import CheckpointError, would_train_another
from oomrun.core.spec import mathematics
from oomrun.core.state import JobState
from oomrun.environment import source_roots
from oomrun.launching import Job, checkpoint_dir
from oomrun.stops import Stops

__all__ = ["Fetched", "events", "fetch"]

_log = logging.getLogger(__name__)

_CODE = (
    "import sys; sys.path[:1] = [p for p in sys.path[:1] if p]; "
    "from oomrun.worker.fetching import main; sys.exit(main())"
)
_LOOK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What came of it.

    Attributes:
        run_id, seed: of the run that goes on; empty and None: none is known there.
        levers: that were in force there.
        names: the checkpoints that were copied.
        rejected: those that are torn or altered.
        size_bytes, duration_s: of the copies.
        failed: why the URL could not be read; empty: it was.
    """

    run_id: str = ""
    seed: int | None = None
    levers: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    size_bytes: int = 0
    duration_s: float = 0.0
    failed: str = ""


def fetch(job: Job, state: JobState, stops: Stops) -> Fetched | None:
    """Copies what the run has there and not here; None: there is nothing to look at.

    Args:
        job: what is to run.
        state: the run so far.
        stops: whether we are asked to stop meanwhile.

    Raises:
        CheckpointError: there is no run here, and it cannot be known whether one is
            there: to begin anew might leave days of training behind.
        SpecError: what is there is of a job that trains something else.
    """
    url = job.spec.checkpoint.url
    if url is None or job.measure or (job.fresh and not state.run_id):
        return None
    _log.info("looking for checkpoints at %s", url)
    answer = _ask(job, url, state.run_id, stops)
    if answer is None:
        return None
    if "failed" in answer:
        if not state.run_id:
            raise CheckpointError(
                f"it cannot be known whether a run is to go on from there: "
                f"{answer['failed']}",
                where=url,
                hint="--fresh trains from the start",
            )
        return Fetched(failed=str(answer["failed"]))
    if not answer:
        return Fetched()
    _check_same(job, url, answer["job"])
    return Fetched(
        run_id=answer["run"],
        seed=answer["seed"],
        levers=tuple(map(str, answer["levers"])),
        names=tuple(answer["names"]),
        rejected=tuple(answer["rejected"]),
        size_bytes=answer["size_bytes"],
        duration_s=answer["duration_s"],
    )


def events(job: Job, state: JobState, fetched: Fetched) -> list[ev.Event]:
    """What the journal is told of it, ``state`` being the run's."""
    if fetched.failed:
        return [
            ev.MirrorFailed(
                at=time.time(), attempt=state.attempt, name="", reason=fetched.failed
            )
        ]
    if not fetched.names and not fetched.rejected:
        return []
    return [
        ev.CheckpointsFetched(
            at=time.time(),
            url=remote.without_secrets(job.spec.checkpoint.url or ""),
            names=fetched.names,
            size_bytes=fetched.size_bytes,
            duration_s=fetched.duration_s,
            # Of a run that has been here all the time the journal knows more.
            levers=() if state.attempt else fetched.levers,
            rejected=fetched.rejected,
        )
    ]


def _check_same(job: Job, url: str, there: dict[str, str]) -> None:
    now = remote.digests(mathematics(job.spec))
    changed = [key for key in sorted({*there, *now}) if there.get(key) != now.get(key)]
    if not changed or job.allow_changes:
        return
    message = f"is not what it was when the run at {url} began"
    raise would_train_another(
        str(job.job_file),
        dict.fromkeys(changed, message),
        "--fresh starts over, another checkpoint.dir keeps both, "
        "--allow-changes goes on",
    )


def _ask(job: Job, url: str, run_id: str, stops: Stops) -> dict[str, Any] | None:
    """The answer of a process that has TensorFlow; None: we are to stop."""
    asked = {
        "url": url,
        "folder": str(checkpoint_dir(job)),
        "run_id": run_id,
        "supervisor_pid": os.getpid(),
    }
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE, json.dumps(asked)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=job.cwd,
            env=_environment(job),
        )
        try:
            while process.poll() is None and not stops.requested:
                stops.sleep(_LOOK_EVERY_S)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        if stops.requested:
            return None
        out.seek(0)
        lines = out.read().decode(errors="replace").split("\n")
        try:
            answer: dict[str, Any] = json.loads([line for line in lines if line][-1])
        except (IndexError, ValueError):
            err.seek(0)
            last = err.read().decode(errors="replace").strip().split("\n")[-1]
            text = remote.without_secrets(last)[:500]
            return {"failed": f"exit code {process.returncode}: {text}"}
        return answer


def _environment(job: Job) -> dict[str, str]:
    """As the worker's, for credentials may be in it, but without a GPU."""
    hidden = job.spec.metrics.secret_variables
    env = {k: v for k, v in job.environment.items() if k not in hidden}
    env |= {**dict(job.spec.env), "CUDA_VISIBLE_DEVICES": "-1"}
    paths = [env.get("PYTHONPATH", ""), *map(str, source_roots())]
    return {**env, "PYTHONPATH": ":".join(path for path in paths if path)}
