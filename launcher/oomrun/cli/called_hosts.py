"""The hosts of a job file, as a gang whose other members ``oomrun run`` calls itself.

Covers: which gang they are, and what is called on each. Does not cover: the calls
(``oomrun.hosts``), and the gang (``gang_options``).
"""

from __future__ import annotations

from typing import Any

from oomrun.core.errors import LaunchError

__all__ = ["call", "meeting_of"]

# A gang's hosts may be waited for in a queue; those of a job file are there, or not.
_WITHIN_S = 300.0


def meeting_of(job: Any, within_s: float | None) -> tuple[Any, tuple[str, ...]]:
    """The gang that the job file's hosts are, and those of them that are called."""
    from oomrun import hosts
    from oomrun.gang import Meeting

    known = hosts.of_job(job.spec.hosts, job.job_file, job.environment)
    called = tuple(name for name, address in known.items() if address)
    if len(called) == len(known):
        raise LaunchError(
            "oomrun is called on one of a job's hosts, which has the run: this one is "
            "not among them",
            where=", ".join(known),
        )
    if not called:
        return None, ()
    ours = hosts.address_towards(known[called[0]])
    hosts.check_own_name(ours)
    meeting = Meeting(
        size=len(known),
        member=0,
        host=ours,
        port=0,
        patience_s=within_s or _WITHIN_S,
    )
    return meeting, called


def call(called: Any, job: Any, meeting: Any, port: int, args: Any) -> Any:
    """Starts members on the job file's other hosts."""
    from oomrun import hosts

    settings = [word for change in args.set or () for word in ("--set", change)]
    words = [
        [
            "run", str(job.job_file), *settings,
            "--run-dir", str(job.run_dir.path), "--gang", str(meeting.size),
            "--member", str(number), "--meet", f"{meeting.host}:{port}",
        ]
        for number in range(1, meeting.size)
    ]  # fmt: skip
    return hosts.Calls(called, words, job.cwd, job.environment)
