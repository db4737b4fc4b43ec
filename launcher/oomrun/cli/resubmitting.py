"""``oomrun submit --watch``: submits a job again where that can help.

Covers: waiting, deciding, keeping each decision in a file before it is carried out, and
carrying it out once. Does not cover: the decision (``oomrun.kubernetes.resubmission``).

The file has a line for each failure, by the uid of the object that failed. Whoever is
started again after having been killed finds there whether anything was decided of the
job that is on the cluster, and either carries that out or begins to watch.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oomrun.cli.cluster_job import read_submission
from oomrun.cli.cluster_waiting import Waiting, pods_of, say
from oomrun.core.errors import PlatformError
from oomrun.core.spec import Command, JobSpec
from oomrun.kubernetes.cluster import Cluster
from oomrun.kubernetes.endings import standing
from oomrun.kubernetes.resubmission import (
    GiveUp,
    Resubmit,
    Settings,
    decide,
    ending,
)
from oomrun.kubernetes.submission import Submission

__all__ = ["Decisions", "Resubmitting"]


class Decisions:
    """What was decided of a job's failures, in a file that only grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = _read(path)

    @property
    def resubmits(self) -> int:
        """How often the job was submitted again."""
        return sum(line["do"] == "resubmit" for line in self.lines)

    def made(self, uid: str) -> bool:
        """Whether we have submitted this object."""
        return any(line["do"] == "made" and line["uid"] == uid for line in self.lines)

    @property
    def to_carry_out(self) -> bool:
        """Whether the last decision was to submit it again, and that is still to do."""
        return bool(self.lines) and self.lines[-1]["do"] == "resubmit"

    @property
    def overrides(self) -> tuple[str, ...]:
        """What the decisions have changed so far; the later ones win."""
        changed: dict[str, str] = {}
        for line in self.lines:
            for each in line.get("overrides", ()):
                changed[each.partition("=")[0]] = each
        return tuple(changed.values())

    def of(self, uid: str) -> dict[str, Any] | None:
        """What was decided of the failure of this object."""
        decided = (line for line in self.lines if line["do"] != "made")
        return next((line for line in decided if line["uid"] == uid), None)

    def add(
        self, uid: str, failure: str, decision: Resubmit | GiveUp
    ) -> dict[str, Any]:
        """Keeps a decision; it is on the disk when this returns."""
        line: dict[str, Any] = {"at": time.time(), "uid": uid, "failure": failure}
        line["reason"] = decision.reason
        if isinstance(decision, Resubmit):
            line |= {"do": "resubmit", "overrides": list(decision.overrides)}
        else:
            line |= {"do": "give_up", "exit_code": decision.exit_code}
        self._append(line)
        return line

    def add_made(self, uid: str) -> None:
        """Keeps that this object is ours to decide of."""
        self._append({"at": time.time(), "uid": uid, "do": "made"})

    def _append(self, line: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(line)

    def begin(self) -> None:
        """Sets those of an earlier job of this name aside."""
        if self.lines:
            self.path.replace(self.path.with_name(f"{self.path.name}.old"))
            self.lines = []


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise PlatformError(f"cannot be read: {why}", where=str(path)) from None
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # whoever wrote it was killed, and did nothing of it
    return found


@dataclass(slots=True, kw_only=True)
class Resubmitting:
    """Watches one job.

    Attributes:
        args: of ``submit``; its ``--set`` come before what is decided here.
        cluster: where the job is.
        decisions: what was decided so far.
        make: submits a job whose predecessor has ended.
    """

    args: argparse.Namespace
    cluster: Cluster
    decisions: Decisions
    make: Callable[[Submission], None]

    def submission(self) -> Submission:
        """The job with all that was changed of it."""
        given = [*self.args.set, *self.decisions.overrides]
        return read_submission(argparse.Namespace(**{**vars(self.args), "set": given}))

    def run(self) -> int:
        """Until the job completes, or nothing can be done; the exit code."""
        self._begin()
        while True:
            current = self.submission()
            code = self._wait(current)
            found = self.cluster.read(current.kind, current.name)
            if found is None:
                return code
            line = self._decided(found, current)
            if line is None:
                return code
            say(str(line["reason"]))
            if line["do"] != "resubmit":
                return int(line["exit_code"])
            self._make()

    def _begin(self) -> None:
        """Submits the job, unless it is there and ours to watch."""
        found = self._on_cluster()
        if found is None and self.decisions.to_carry_out:
            self._make()
            return
        if found is None and self.args.once and self.decisions.lines:
            return  # somebody has deleted it
        if found is not None:
            state = standing(found, ()).state
            uid = str(found["metadata"]["uid"])
            if state not in ("completed", "failed"):
                say(f"the job {found['metadata']['name']} is there; watching it")
                self.decisions.add_made(uid)
                return
            decided = self.decisions.of(uid)
            # It failed, or was to be submitted again, when nobody watched.
            open_end = decided is None or decided["do"] == "resubmit"
            goes_on = self.args.once or (state == "failed" and open_end)
            if self.decisions.made(uid) and goes_on:
                return
        self.decisions.begin()
        self._make()

    def _on_cluster(self) -> dict[str, Any] | None:
        current = self.submission()
        return self.cluster.read(current.kind, current.name)

    def _make(self) -> None:
        self.make(self.submission())
        found = self._on_cluster()
        if found is not None:
            self.decisions.add_made(str(found["metadata"]["uid"]))

    def _wait(self, current: Submission) -> int:
        return Waiting(
            cluster=self.cluster,
            kind=current.kind,
            name=current.name,
            follow=self.args.follow,
            timeout_s=self.args.timeout,
        ).run()

    def _decided(
        self, job: dict[str, Any], current: Submission
    ) -> dict[str, Any] | None:
        """What follows; None where the job has not failed, and goes on or is stuck."""
        pods = pods_of(self.cluster, job)
        end = ending(job, pods, standing(job, pods))
        if end is None:
            return None
        known = self.decisions.of(end.uid)
        if known is not None:
            return known
        decision = decide(
            end,
            _settings(current.spec),
            used=self.decisions.resubmits,
            most=self.args.resubmits,
        )
        if isinstance(decision, GiveUp):
            decision = replace(
                decision, reason=f"not submitted again: {decision.reason}"
            )
        return self.decisions.add(end.uid, end.failure, decision)


def _settings(spec: JobSpec) -> Settings:
    section = spec.kubernetes
    assert section is not None
    return Settings(
        memory_bytes=section.memory_bytes,
        memory_max_bytes=section.memory_max_bytes,
        micro_batch_fixed=isinstance(spec.batch.micro, int),
        levers=() if isinstance(spec.program, Command) else spec.recovery.left,
        pulled=spec.recovery.pulled,
    )
