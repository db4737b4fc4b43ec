"""Where the runs of a machine are: one link for each, in a folder that all know.

Covers: leaving a link when a run starts, taking away links that lead nowhere, finding
the runs, and whom to believe. Does not cover: reading them.

A link is only believed where its owner owns the folder it leads to and the journal in
it: whoever reads may be allowed more than whoever left it. Nothing here fails a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from oomrun.rundir import RunDir

__all__ = ["SHARED", "find", "folders_of", "register"]

_log = logging.getLogger(__name__)

#: For all users of a machine, if its administrator makes it: mode 1777, as /tmp.
SHARED = Path("/var/lib/oomrun/runs")
_KEPT_S = 7 * 24 * 3600.0
_MOST = 1000


def folders_of(environment: Mapping[str, str], shared: Path = SHARED) -> list[Path]:
    """The user's own folder, by the XDG base directory rules, and the shared one."""
    state, home = environment.get("XDG_STATE_HOME", ""), environment.get("HOME", "")
    if os.path.isabs(state):
        return [Path(state, "oomrun", "runs"), shared]
    if os.path.isabs(home):
        return [Path(home, ".local", "state", "oomrun", "runs"), shared]
    return [shared]


def register(run_dir: RunDir, folders: Sequence[Path]) -> None:
    """Leaves a link to the run in each of the folders, and takes old ones away.

    Args:
        run_dir: its journal is there.
        folders: as of ``folders_of``; the first is made, others are used if there.
    """
    path = run_dir.path.absolute()
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
    for number, folder in enumerate(folders):
        try:
            if number == 0 and folder != SHARED:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            elif not folder.is_dir():
                continue
            _tidy(folder)
            _link(folder / f"{path.name[:100]}-{digest}", path)
        except OSError as error:
            _log.debug("%s: the run is not listed here: %s", folder, error)


def _link(link: Path, target: Path) -> None:
    temporary = link.with_name(f".{link.name}.{os.getpid()}.new")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    temporary.symlink_to(target)
    # Over the old one, too: a link's age says when the run was last started.
    os.replace(temporary, link)


def _tidy(folder: Path) -> None:
    """Takes away our own links that lead nowhere, or to what nobody has run lately."""
    long_ago = time.time() - _KEPT_S
    for link, owner in _links(folder):
        if owner != os.getuid():
            continue
        try:
            stale = (link / "journal.jsonl").stat().st_mtime < long_ago
        except PermissionError:
            continue
        except OSError:
            stale = True
        if stale:
            with contextlib.suppress(OSError):
                link.unlink()


def find(folders: Sequence[Path], *, all_users: bool = False) -> list[RunDir]:
    """The runs that the folders list, each once.

    Args:
        folders: as of ``folders_of``.
        all_users: those of other users too, where they may be read.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        if not _is_safe(folder):
            continue
        for link, owner in _links(folder):
            if owner != os.getuid() and not all_users:
                continue
            with contextlib.suppress(OSError):
                target = Path(os.readlink(link))
                if target.is_absolute() and _belongs(target, owner):
                    found[target] = None
    return [RunDir(path) for path in sorted(found)]


def _is_safe(folder: Path) -> bool:
    """Whether nobody but a link's owner (and root) can have put it there."""
    try:
        status = folder.stat()
    except OSError:
        return False
    shared = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    sticky = bool(status.st_mode & stat.S_ISVTX)
    safe = status.st_uid in (0, os.getuid()) and (sticky or not shared)
    if not safe:
        _log.warning(
            "%s is not used: it must be yours or root's, and writable for you alone, "
            "or have mode 1777",
            folder,
        )
    return safe


def _links(folder: Path) -> Iterator[tuple[Path, int]]:
    """The links in the folder with their owners, a thousand at most."""
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number >= _MOST:
                return
            if entry.is_symlink() and not entry.name.startswith("."):
                yield Path(entry.path), entry.stat(follow_symlinks=False).st_uid


def _belongs(target: Path, owner: int) -> bool:
    folder, journal = target.stat(), os.lstat(RunDir(target).journal)
    return (
        stat.S_ISDIR(folder.st_mode)
        and stat.S_ISREG(journal.st_mode)
        and folder.st_uid == journal.st_uid == owner
    )
