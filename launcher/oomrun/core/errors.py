"""Every error that oomrun raises on purpose, with the exit code it ends in.

    OomrunError
    ├── SpecError               the job file is wrong                        exit 2
    ├── InfeasiblePlanError     nothing fits into the memory there is        exit 3
    ├── PlatformError           our side or the machine                      exit 4
    │   └── ProbeError · JournalError · CheckpointError · LaunchError
    └── JobFailedError          the training failed for good                 exit 1

Errors carry fields and build their own message. A worker's death is none of them: it
is evidence, and evidence is data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from oomrun.core import units


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong in a job file, and where; line and column from 1."""

    file: str
    line: int
    column: int
    path: str  # where in the document: ``memory.headroom``, ``args[2]``, or "" for all
    message: str
    hint: str = ""
    source_line: str = ""  # the text of that line, to show it under the message

    def __str__(self) -> str:
        path = f"{self.path}: " if self.path else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.file}:{self.line}:{self.column}: {path}{self.message}{hint}"


class OomrunError(Exception):
    """The base of all errors that oomrun raises on purpose."""

    exit_code: ClassVar[int] = 4


class SpecError(OomrunError):
    """The job file is wrong; ``problems`` says where, all of them at once."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class InfeasiblePlanError(OomrunError):
    """No allowed setting fits; names what was needed, what there is, what would fit."""

    exit_code = 3

    def __init__(
        self,
        reason: str,
        *,
        needed_bytes: int | None = None,
        available_bytes: int | None = None,
        nearest: str | None = None,
    ) -> None:
        self.reason = reason
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.nearest = nearest
        facts = []
        if needed_bytes is not None:
            facts.append(f"needed {units.format_bytes(needed_bytes)}")
        if available_bytes is not None:
            facts.append(f"available {units.format_bytes(available_bytes)}")
        if nearest:
            facts.append(f"what would fit: {nearest}")
        super().__init__(": ".join([reason, ", ".join(facts)]) if facts else reason)


class PlatformError(OomrunError):
    """The machine or oomrun itself failed, not the job; ``where`` names the place."""

    exit_code = 4

    def __init__(
        self, problem: str, *, where: str | None = None, hint: str | None = None
    ) -> None:
        self.problem = problem
        self.where = where
        self.hint = hint
        message = f"{where}: {problem}" if where else problem
        super().__init__(f"{message} ({hint})" if hint else message)


class ProbeError(PlatformError):
    """The devices could not be looked at, or a trial step could not be run."""


class JournalError(PlatformError):
    """The journal of a run cannot be read or written."""


class CheckpointError(PlatformError):
    """A checkpoint cannot be read or written."""


class UnreadableError(CheckpointError):
    """A checkpoint may be whole, but the file system does not let it be read now."""


class LaunchError(PlatformError):
    """The worker processes could not be started."""


class JobFailedError(OomrunError):
    """The training failed for good: why, after how many attempts, what came first."""

    exit_code = 1

    def __init__(
        self,
        cause: str,
        *,
        attempts: int,
        first_failure: str | None = None,
        log: str | None = None,
    ) -> None:
        self.cause = cause
        self.attempts = attempts
        self.first_failure = first_failure
        self.log = log
        tries = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        message = f"{cause} after {tries}"
        if first_failure:
            message += f"; first failure: {first_failure}"
        super().__init__(f"{message}; see {log}" if log else message)


def would_train_another(file: str, messages: Mapping[str, str], hint: str) -> SpecError:
    """The refusal to go on with a run of other settings.

    Args:
        file: the job file.
        messages: what has changed, by setting.
        hint: what can be done.
    """
    return SpecError(
        [
            Problem(
                file=file,
                line=1,
                column=1,
                path=key,
                message=f"{message}: going on would train another model",
                hint=hint,
            )
            for key, message in messages.items()
        ]
    )
