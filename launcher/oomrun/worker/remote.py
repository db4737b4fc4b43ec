"""Checkpoints beyond the local disk, through TensorFlow's file layer.

Covers: copying a finished checkpoint there and back, which ones are complete, which run
they are of, deleting. A store of objects has no rename, so the manifest is the commit:
it is written last and deleted first, and a copy without one is none.
Does not cover: when that is done (``uploading.py``, ``fetching.py``).

Below the URL each run has a folder of its own, and ``LATEST.json`` names the run that
was there last. So a run that starts over deletes nothing of the one before.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from oomrun import checkpoints
from oomrun.core import remote as urls
from oomrun.core.errors import CheckpointError

__all__ = ["Remote", "Unreachable", "latest"]

_LATEST = "LATEST.json"
_CHUNK = 8 * 2**20


class Unreachable(Exception):
    """The file system cannot be had, or refuses; the text has no secret."""


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except (tf.errors.OpError, OSError) as error:
        text = getattr(error, "message", None) or str(error)
        kind = type(error).__name__
        raise Unreachable(f"{kind}: {urls.without_secrets(text)[:500]}") from None


def latest(url: str) -> dict[str, Any] | None:
    """What is known of the run that was there last; None: there was none.

    Raises:
        Unreachable: it cannot be read.
        CheckpointError: it holds something else.
    """
    _register(url)
    with _reached():
        path = urls.join(url, _LATEST)
        if not tf.io.gfile.exists(path):
            return None
        text = _read(path)
    try:
        found = json.loads(text)
        run, seed, job = found["run"], found["seed"], found["job"]
        levers = found.get("levers", [])
        good = isinstance(run, str) and isinstance(seed, int) and isinstance(job, dict)
        if good and isinstance(levers, list):
            return {"run": run, "seed": seed, "job": job, "levers": levers}
    except (ValueError, TypeError, KeyError):
        pass
    raise CheckpointError(f"{path} does not say which run is there")


class Remote:
    """The checkpoints of one run at a URL.

    Raises:
        Unreachable: in each method, where the file system refuses.
    """

    def __init__(self, url: str, run_id: str) -> None:
        _register(url)
        self._url, self._folder = url, urls.join(url, run_id)

    def claim(self, run: Mapping[str, Any]) -> None:
        """From now on this run is the one that was there last."""
        with _reached():
            tf.io.gfile.makedirs(self._url)
            whole = urls.join(self._url, _LATEST)
            _write(f"{whole}.new", [json.dumps(dict(run)).encode()])
            # Never half of it: a machine that found none would train from the start.
            tf.io.gfile.rename(f"{whole}.new", whole, overwrite=True)

    def names(self, kind: str) -> list[str]:
        """Complete checkpoints of a kind (``step`` or ``fit``), newest first."""
        with _reached():
            if not tf.io.gfile.exists(self._folder):
                return []
            entries = [name.strip("/") for name in tf.io.gfile.listdir(self._folder)]
            return [
                name
                for name in checkpoints.in_order(entries, kind)
                if tf.io.gfile.exists(self._manifest(name))
            ]

    def upload(self, path: Path) -> int:
        """Copies a checkpoint there; the bytes.

        Raises:
            CheckpointError: the local one is torn, altered or gone.
        """
        entries = checkpoints.manifest(path)
        target = urls.join(self._folder, path.name)
        with _reached():
            self._uncommit(path.name)
            tf.io.gfile.makedirs(target)
            for name in entries:
                chunks = _checked(path.name, name, entries[name], _local(path / name))
                _write(urls.join(target, name), chunks)
            content = json.dumps({"version": 1, "files": entries}, indent=1).encode()
            _write(self._manifest(path.name), [content])
        return sum(entry["size"] for entry in entries.values())

    def download(self, name: str, folder: Path) -> int:
        """Copies a checkpoint from there; the bytes.

        Raises:
            CheckpointError: it is torn or altered.
            OSError: the local disk refuses.
        """
        with _reached():
            content = _read(self._manifest(name))
        entries = checkpoints.entries_of(name, content)
        source = urls.join(self._folder, name)
        files = {
            file: _checked(name, file, entry, _there(urls.join(source, file)))
            for file, entry in entries.items()
        }
        return checkpoints.write(folder, name, files)

    def discard(self, name: str) -> None:
        """Deletes a checkpoint; from its first moment on it is none any more."""
        with _reached():
            self._uncommit(name)
            tf.io.gfile.rmtree(urls.join(self._folder, name))

    def _manifest(self, name: str) -> str:
        return urls.join(self._folder, name, checkpoints.MANIFEST)

    def _uncommit(self, name: str) -> None:
        if tf.io.gfile.exists(self._manifest(name)):
            tf.io.gfile.remove(self._manifest(name))


def _register(url: str) -> None:
    """Has TensorFlow know the URL's file system, by tensorflow-io if need be.

    Raises:
        Unreachable: it does not.
    """
    scheme = url.partition("://")[0]
    if scheme in tf.io.gfile.get_registered_schemes():
        return
    with contextlib.suppress(ImportError, OSError, NotImplementedError):
        importlib.import_module("tensorflow_io")
    if scheme not in tf.io.gfile.get_registered_schemes():
        raise Unreachable(
            f"this TensorFlow knows no file system {scheme}://: the package "
            "tensorflow-io brings it, where there is one for this TensorFlow"
        )


def _local(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _there(path: str) -> Iterator[bytes]:
    with _reached(), tf.io.gfile.GFile(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _read(path: str) -> bytes:
    with tf.io.gfile.GFile(path, "rb") as file:
        content: bytes = file.read()
        return content


def _write(path: str, chunks: Any) -> None:
    with tf.io.gfile.GFile(path, "wb") as file:
        for chunk in chunks:
            file.write(chunk)


def _checked(
    name: str, file: str, entry: Mapping[str, Any], chunks: Iterator[bytes]
) -> Iterator[bytes]:
    """The chunks, and an error at their end where they are not those of the entry."""
    digest, size = hashlib.sha256(), 0
    for chunk in chunks:
        digest.update(chunk)
        size += len(chunk)
        yield chunk
    if size != entry["size"]:
        raise CheckpointError(f"{name}: {file} is cut short")
    if digest.hexdigest() != entry["sha256"]:
        raise CheckpointError(f"{name}: {file} was altered")
