"""Where checkpoints go beside the local disk: URLs of TensorFlow's file layer.

Covers: which folders are remote, which file systems TensorFlow can know, what a URL may
hold, names below it, what is said of a run there. Does not cover: reaching it
(``oomrun.worker.remote``).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

__all__ = ["PATTERN", "check", "digests", "is_remote", "join", "without_secrets"]

# TensorFlow's own, and those of tensorflow-io.
_OWN = ("gs", "file")
_PLUGINS = ("s3", "hdfs", "viewfs", "har", "az")
#: A folder, or one of those; for editors, which do not see what ``check`` does.
PATTERN = f"^(?![A-Za-z][A-Za-z0-9+.-]*://)|^({'|'.join((*_OWN, *_PLUGINS))})://"
_QUERY = re.compile(r"(?<=[^\s?])\?[^\s'\")]+")
_USER = re.compile(r"(?<=://)[^\s/@]+@")


def is_remote(folder: str | None) -> bool:
    """Whether a folder of the job file is a URL."""
    return folder is not None and "://" in folder


def check(url: str) -> None:
    """Refuses a URL at which no checkpoint can be kept.

    Raises:
        ValueError: with a hint.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "ram":
        raise ValueError("what is in ram:// is gone with its process")
    if scheme not in (*_OWN, *_PLUGINS):
        known = ", ".join(f"{name}://" for name in (*_OWN, *_PLUGINS))
        raise ValueError(f"TensorFlow knows no {scheme}://, but {known}")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("this is no URL") from None
    if parts.password is not None:
        raise ValueError("leave the password out: credentials are for the environment")
    if "?" in rest or "#" in rest:
        raise ValueError("leave out what comes after ? or #")
    if scheme == "file" and not rest.startswith("/"):
        raise ValueError("write file:///PATH, with three slashes")
    if scheme not in ("file", "hdfs", "viewfs", "har") and not parts.netloc:
        raise ValueError("name a bucket")


def join(url: str, *names: str) -> str:
    """``url`` with names below it."""
    return "/".join((url.rstrip("/"), *names))


def without_secrets(text: str) -> str:
    """A message without what its URLs may hold of credentials."""
    return _USER.sub("", _QUERY.sub("?…", text))


def digests(mathematics: Mapping[str, Any]) -> dict[str, str]:
    """What ``mathematics`` says, to be compared elsewhere and not to be read there.

    Variables of the environment are among it.
    """
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        for key, value in mathematics.items()
    }
