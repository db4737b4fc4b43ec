"""The session of this process, for what the script itself imports of oomrun.

The launcher's bootstrap registers it before the script runs. A script that was started
without oomrun finds none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oomrun.worker.session import Session

__all__ = ["register", "session"]

_session: Session | None = None


def register(running: Session | None) -> None:
    """Makes ``running`` the session of this process; None: there is none."""
    global _session
    _session = running


def session() -> Session | None:
    """The session that runs the script, None without oomrun's launcher."""
    return _session
