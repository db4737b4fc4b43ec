"""Checkpoint folders: written all or not at all, and never trusted unread.

Covers: writing a set of files to a temporary folder, their sizes and checksums in a
manifest, everything fsynced, then one rename; listing, verifying, deleting.
Does not cover: what is in the files (``worker/checkpointing.py``).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from oomrun.core.errors import CheckpointError, UnreadableError

__all__ = [
    "MANIFEST", "discard", "entries_of", "in_order", "manifest", "names", "read",
    "remove_unfinished", "write",
]  # fmt: skip

MANIFEST = "MANIFEST.json"
_UNFINISHED = ".unfinished-"
# A checkpoint with one of these is not as it was written. All else is the file
# system's fault: a server that is away, no rights, no descriptors.
_DAMAGE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_NAME = re.compile(r"^(step|fit)-[0-9]+(-[0-9]+)?$")


def write(folder: Path, name: str, files: Mapping[str, Iterable[bytes]]) -> int:
    """Writes one checkpoint and returns its size in bytes.

    Args:
        folder: where checkpoints are kept; made where it is missing.
        name: the checkpoint's own folder below it.
        files: chunks of content by file name.

    Raises:
        OSError: the disk is full, read-only or gone; nothing is left of the try.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Workers of several hosts may write at once, with the same process id.
    temporary = folder / f"{_UNFINISHED}{name}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        temporary.mkdir()
        entries = {
            file: _write_file(temporary / file, chunks)
            for file, chunks in files.items()
        }
        manifest = json.dumps({"version": 1, "files": entries}, indent=1).encode()
        _write_file(temporary / MANIFEST, [manifest])
        _sync_folder(temporary)
        target = folder / name
        if target.exists():
            discard(target)
        temporary.rename(target)
        _sync_folder(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return sum(entry["size"] for entry in entries.values())  # type: ignore[misc]


def _write_file(path: Path, chunks: Iterable[bytes]) -> dict[str, int | str]:
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"size": size, "sha256": digest.hexdigest()}


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def names(folder: Path, kind: str) -> list[str]:
    """Complete checkpoints of a kind (``step`` or ``fit``), newest first."""
    try:
        entries = [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return []
    return in_order(entries, kind)


def in_order(entries: Iterable[str], kind: str) -> list[str]:
    """Those names that are of checkpoints of a kind, newest first."""
    found = [n for n in entries if n.startswith(f"{kind}-") and _NAME.match(n)]
    return sorted(found, key=_numbers, reverse=True)


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in name.split("-")[1:])


def read(path: Path) -> dict[str, bytes]:
    """The files of one checkpoint, checked against its manifest.

    Raises:
        CheckpointError: a file is missing, torn or altered.
        UnreadableError: whether one is cannot be known now.
    """
    entries = manifest(path)
    try:
        contents = {name: (path / name).read_bytes() for name in entries}
    except (OSError, ValueError) as error:
        raise _unread(path, error) from error
    for name, content in contents.items():
        entry = entries[name]
        if len(content) != entry["size"]:
            raise CheckpointError(f"{path.name}: {name} is cut short")
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise CheckpointError(f"{path.name}: {name} was altered")
    return contents


def manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Size and checksum of each file of one checkpoint.

    Raises:
        CheckpointError: it does not say.
        UnreadableError: whether it does cannot be known now.
    """
    try:
        content = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise _unread(path, error) from error
    return entries_of(path.name, content)


def _unread(path: Path, error: Exception) -> CheckpointError:
    passes = isinstance(error, OSError) and not isinstance(error, _DAMAGE)
    kind = UnreadableError if passes else CheckpointError
    return kind(f"{path.name} cannot be read: {error}")


def entries_of(name: str, content: bytes) -> dict[str, dict[str, Any]]:
    """The same of the content of a manifest, of the checkpoint ``name``."""
    try:
        entries = json.loads(content)["files"]
        return {
            file: {"size": entry["size"], "sha256": entry["sha256"]}
            for file, entry in entries.items()
            if _is_file_name(file)
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{name} cannot be read: {error}") from error


def _is_file_name(name: str) -> bool:
    """Whether it is a file of the checkpoint's own folder."""
    if "/" in name or name in ("", ".", "..", MANIFEST):
        raise ValueError(f"{name!r} is no file of a checkpoint")
    return True


def discard(path: Path) -> None:
    """Deletes a checkpoint; from its first moment on it is no longer listed."""
    doomed = path.with_name(f"{_UNFINISHED}{path.name}-{os.getpid()}-discarded")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Deletes what writers that died have left behind."""
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if entry.name.startswith(_UNFINISHED):
            shutil.rmtree(entry, ignore_errors=True)
