"""Results that outlive a call, for as long as what they were measured with stands.

Each belongs to the sources that decide it: the engine decides what fits (``TRUTH``),
the search what is planned as well (``PLANS``). Once a byte of them changes, their
results are no longer found; they stay in the file, for a checkout that goes back.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import oomrun

__all__ = ["PLANS", "TRUTH", "Kept", "digest"]

_PACKAGE = Path(oomrun.__file__).parent
_WORKER = _PACKAGE / "worker"

#: What decides whether a micro-batch runs.
TRUTH = (
    _WORKER / "engine",
    *(_WORKER / f"{name}.py" for name in ("places", "pool", "position", "read_ahead")),
    Path(__file__).parents[1] / "zoo",
)
#: What decides which one is planned, and what it is predicted to need.
PLANS = (
    *TRUTH,
    *(
        _WORKER / f"{name}.py"
        for name in (
            "probing", "recordings", "recovery", "searching", "step_graph", "training",
        )
    ),
    *(
        _PACKAGE / "core" / f"{name}.py"
        for name in (
            "allocations", "allocator", "batch", "convolutions", "memory", "probing",
            "reading_ahead", "recorded",
        )
    ),
)  # fmt: skip


def digest(sources: Iterable[Path]) -> str:
    """A short hash over Python files, by their names and contents.

    Args:
        sources: files, and folders of which all files are taken.
    """
    found = hashlib.sha256()
    for source in sources:
        for file in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            found.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()[:12]


class Kept:
    """Values by section and key, in a file if one is named.

    Args:
        file: read if it exists, written after each change. One process at a time.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._content: dict[str, dict[str, Any]] = {}
        self._writing = threading.Lock()
        if file is not None and file.exists():
            self._content = json.loads(file.read_text())

    def get(self, section: str, key: str) -> Any:
        """What was put there; None if nothing was."""
        return self._content.get(section, {}).get(key)

    def put(self, section: str, key: str, value: Any) -> None:
        """Keeps ``value``, which JSON must be able to hold."""
        with self._writing:
            self._content.setdefault(section, {})[key] = value
            if self._file is None:
                return
            self._file.parent.mkdir(parents=True, exist_ok=True)
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps(self._content) + "\n")
            os.replace(new, self._file)
