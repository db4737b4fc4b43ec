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

from oomrun.core.errors import CheckpointError

__all__ = ["discard", "names", "read", "remove_unfinished", "write"]

_MANIFEST = "MANIFEST.json"
_UNFINISHED = ".unfinished-"
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
        _write_file(temporary / _MANIFEST, [manifest])
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
    found = [n for n in entries if n.startswith(f"{kind}-") and _NAME.match(n)]
    return sorted(found, key=_numbers, reverse=True)


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in name.split("-")[1:])


def read(path: Path) -> dict[str, bytes]:
    """The files of one checkpoint, checked against its manifest.

    Raises:
        CheckpointError: a file is missing, torn or altered.
    """
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
        entries = manifest["files"]
        expected = {name: (e["size"], e["sha256"]) for name, e in entries.items()}
        contents = {name: (path / name).read_bytes() for name in expected}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error
    for name, content in contents.items():
        size, digest = expected[name]
        if len(content) != size:
            raise CheckpointError(f"{path.name}: {name} is cut short")
        if hashlib.sha256(content).hexdigest() != digest:
            raise CheckpointError(f"{path.name}: {name} was altered")
    return contents


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
