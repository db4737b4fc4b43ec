"""A worker without TensorFlow: says that it is ready, and waits to be ended.

It speaks the real protocol, and its lifeline is the real one. As small as can be: there
are hundreds of them on one machine.
"""

from __future__ import annotations

import json
import os
import socket
import time

from oomrun.worker import lifeline


def main() -> None:
    """Waits for the supervisor's end, or its own."""
    with open(os.environ["OOMRUN_LAUNCH_FILE"], encoding="utf-8") as file:
        launch = json.load(file)
    channel = socket.socket(fileno=int(os.environ["OOMRUN_CHANNEL_FD"]))
    lifeline.die_with_parent(launch["supervisor_pid"])
    ready = {
        "v": 1, "type": "worker_ready", "at": time.time(), "rank": launch["rank"],
        "attempt": launch["attempt"], "pid": os.getpid(), "tensorflow": "-",
        "keras": "-", "start_s": 0.0,
    }  # fmt: skip
    channel.sendall(json.dumps(ready).encode() + b"\n")
    while channel.recv(4096):
        pass
    lifeline.end_group()


if __name__ == "__main__":
    main()
