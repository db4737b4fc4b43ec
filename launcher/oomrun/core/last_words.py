"""What a run says at its end to whoever started its process: a line of JSON.

Covers: writing and reading it, in what a cluster keeps of a container (4096 bytes).
Does not cover: where it is written to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from oomrun.core import levers
from oomrun.core.state import JobState

__all__ = ["VARIABLE", "of_error", "of_state", "read"]

#: Environment variable: the file that the last words are written to.
VARIABLE = "OOMRUN_TERMINATION_LOG"

_LONGEST_BYTES = 4000
_MARK = "oomrun"


def of_state(state: JobState, exit_code: int, reason: str) -> str:
    """The last words of a run that has ended, or was ended."""
    failed = [state.micro_batch_failed, *state.failed_by_rank.values()]
    known = [size for size in failed if size is not None]
    return _line(
        {
            "exit_code": exit_code,
            "state": state.state,
            "cause": state.last_cause,
            "reason": reason,
            "attempt": state.attempt,
            "step": state.step,
            "micro_batch_failed": min(known, default=None),
            "levers": list(levers.in_force(state)),
        }
    )


def of_error(exit_code: int, reason: str) -> str:
    """Those of a run that could not even begin, or whose machine failed."""
    return _line({"exit_code": exit_code, "reason": reason})


def _line(said: Mapping[str, Any]) -> str:
    text, reason = json.dumps({_MARK: 1, **said}), str(said["reason"])
    while len(text) > _LONGEST_BYTES:
        reason = reason[: len(reason) * 3 // 4]
        text = json.dumps({_MARK: 1, **said, "reason": reason})
    return text


def read(text: object) -> dict[str, Any]:
    """What was said; empty where these are nobody's last words, or not ours."""
    if not isinstance(text, str) or not text.startswith("{"):
        return {}
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) and said.get(_MARK) == 1 else {}
