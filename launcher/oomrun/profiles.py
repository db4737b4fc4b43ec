"""The remembered profiles: one file for each key, in the user's cache folder.

Covers: runs that read and write at once, kills in the middle, files that are damaged or
not ours, a bound on their number. Does not cover: what a profile says
(``core.profile``). Nothing here ever fails a run: a cache that cannot be used is none.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from oomrun.core import profile as profiles
from oomrun.core.errors import PlatformError
from oomrun.core.profile import Profile, ProfileError
from oomrun.rundir import write_atomically

__all__ = ["Profiles", "folder_of"]

_log = logging.getLogger(__name__)

_VERSION = 2
_KEPT = 256
# Far more than the 64 sizes of each kind ever take.
_LARGEST_FILE = 256 * 1024
_LOCK_WAIT_S = 10.0


def folder_of(environment: Mapping[str, str]) -> Path | None:
    """Where profiles are kept, by the XDG base directory rules; None for nowhere."""
    cache, home = environment.get("XDG_CACHE_HOME", ""), environment.get("HOME", "")
    if os.path.isabs(cache):
        return Path(cache, "oomrun", "profiles")
    return Path(home, ".cache", "oomrun", "profiles") if os.path.isabs(home) else None


class Profiles:
    """The profiles in one folder, which any number of processes may use.

    Args:
        folder: it is made when the first profile is stored; None keeps nothing.
        kept: how many files there may be; the ones not used for longest go.
    """

    def __init__(self, folder: Path | None, *, kept: int = _KEPT) -> None:
        self._folder = folder
        self._kept = kept

    def load(self, key: str) -> Profile | None:
        """The profile that was stored under exactly this key."""
        if self._folder is None:
            return None
        path = self._path(self._folder, key)
        try:
            found = _read(path, key)
        except ProfileError:
            self._set_aside(path, key)
            return None
        except OSError as error:
            _log.debug("%s cannot be read: %s", path, error)
            return None
        if found is not None:
            with contextlib.suppress(OSError):
                os.utime(path)  # in use: others go first
        return found

    def store(self, key: str, profile: Profile) -> None:
        """Adds what ``profile`` knows to what is stored under the key."""
        if self._folder is None:
            return
        path = self._path(self._folder, key)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(self._folder):
                try:
                    known = _read(path, key)
                except ProfileError as error:
                    _move_aside(path, error)
                    known = None
                merged = profile if known is None else profiles.merge(known, profile)
                write_atomically(path, _content(key, merged))
                self._discard(self._folder)
        except (OSError, PlatformError) as error:
            _log.debug("a profile cannot be kept in %s: %s", self._folder, error)

    def _path(self, folder: Path, key: str) -> Path:
        return folder / f"{profiles.digest(key)}.json"

    def _set_aside(self, path: Path, key: str) -> None:
        """As it was found bad without the lock: another run may have mended it."""
        try:
            with _locked(path.parent):
                try:
                    _read(path, key)
                except ProfileError as error:
                    _move_aside(path, error)
        except OSError as error:
            _log.debug("%s cannot be set aside: %s", path, error)

    def _discard(self, folder: Path) -> None:
        """What dead writers left, and all but the ``kept`` files used last."""
        used: list[tuple[float, Path]] = []
        for path in folder.iterdir():
            if path.name.startswith(".") and path.name.endswith(".tmp"):
                path.unlink()  # no writer is alive: we hold the lock
            elif path.suffix in (".json", ".bad") and path.is_file():
                used.append((path.stat().st_mtime, path))
        for _, path in sorted(used)[: max(0, len(used) - self._kept)]:
            path.unlink()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, which ends with its process.

    Raises:
        OSError: it cannot be had, or not soon.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(folder / "lock", flags, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _read(path: Path, key: str) -> Profile | None:
    """The profile in the file; None where there is no file.

    Raises:
        ProfileError: it is not one that we have written under this key.
        OSError: it cannot be read.
    """
    try:
        # Not waiting: there might be a pipe of this name.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ProfileError("it is no file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(_LARGEST_FILE + 1)
    finally:
        os.close(descriptor)
    if len(content) > _LARGEST_FILE:
        raise ProfileError("it is too large for a profile")
    return _parse(content, key)


def _content(key: str, profile: Profile) -> bytes:
    body = {"version": _VERSION, "key": key, "profile": profiles.to_json(profile)}
    return json.dumps({**body, "sha256": _checksum(body)}).encode() + b"\n"


def _parse(content: bytes, key: str) -> Profile:
    try:
        value = json.loads(content, parse_constant=_no_constant)
        if not isinstance(value, dict):
            raise ProfileError("it is no object")
        if value.get("version") != _VERSION:
            raise ProfileError(f"it is of version {value.get('version')!r}")
        if value.pop("sha256", None) != _checksum(value):
            raise ProfileError("it was altered")
    except ProfileError:
        raise
    except (ValueError, RecursionError):
        raise ProfileError("it is damaged") from None
    if value.keys() != {"version", "key", "profile"} or value["key"] != key:
        raise ProfileError("it has another key")
    return profiles.from_json(value["profile"])


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _checksum(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _move_aside(path: Path, why: ProfileError) -> None:
    aside = path.with_suffix(".bad")
    _log.warning("%s is not used: %s; it is now %s", path, why, aside.name)
    os.replace(path, aside)
