"""The first lines of oomrun on another host, called over ssh by the first one.

Covers: reading on standard input what to run, and ending with all that was started when
the caller is not heard any more. Does not cover: the call (``oomrun.hosts``), and what
is run, which is ``oomrun run`` as a member of the gang.

A connection may break without a word: a cable, a frozen host. So the caller says every
few seconds that it is there, with an empty line.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
from typing import Any

from oomrun.processes import kill_descendants

__all__ = ["main"]

# Ten of its lines. Less would end trainings for a network that only stutters.
_SILENCE_S = 30.0
_CHUNK_BYTES = 64 * 1024
_EXIT_LOST = 1


def main() -> int:
    """Runs a member to its end; the exit code."""
    # A closing connection may say so by a signal, too.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    order = _order()
    if not os.path.isdir(order["cwd"]):
        raise SystemExit(
            f"oomrun: {order['cwd']} is not on this host: the job's folders must be "
            "shared, under the same paths, by all hosts"
        )
    os.chdir(order["cwd"])
    os.environ.update(order["env"])
    threading.Thread(target=_listen, daemon=True).start()
    # Only now: what is imported may look at the environment.
    from oomrun import cli

    return cli.main(order["argv"])


def _order() -> dict[str, Any]:
    """The first line of standard input."""
    read = b""
    while not read.endswith(b"\n"):
        # The caller says nothing more before a few seconds have passed.
        chunk = os.read(0, _CHUNK_BYTES)
        if not chunk:
            raise SystemExit("oomrun: who has called is gone before it said anything")
        read += chunk
    order: dict[str, Any] = json.loads(read)
    return order


def _listen() -> None:
    """Until the caller is gone: then nothing of ours stays."""
    while select.select([0], [], [], _SILENCE_S)[0] and os.read(0, _CHUNK_BYTES):
        pass
    kill_descendants()
    os._exit(_EXIT_LOST)
