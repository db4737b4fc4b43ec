"""A worker without TensorFlow that misbehaves as its first argument says.

For several workers the argument has one mode for each, such as ``hangs+finishes``.

It speaks the real protocol, and its lifeline is the real one. Run by the supervisor.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from oomrun.core.launch import DUMP_SIGNAL, EXIT_LOST
from oomrun.worker import lifeline

LAUNCH = json.loads(Path(os.environ["OOMRUN_LAUNCH_FILE"]).read_text())
CHANNEL = socket.socket(fileno=int(os.environ["OOMRUN_CHANNEL_FD"]))
ATTEMPT, RANK = LAUNCH["attempt"], LAUNCH["rank"]
STOP = threading.Event()
STEPS = 5


def say(kind: str, /, **fields: Any) -> None:
    body = {"v": 1, "type": kind, "at": time.time(), "attempt": ATTEMPT, **fields}
    CHANNEL.sendall(json.dumps(body).encode() + b"\n")


def ready() -> None:
    say(
        "worker_ready",
        rank=RANK,
        pid=os.getpid(),
        tensorflow="-",
        keras="-",
        start_s=0.0,
    )


def progress(step: int) -> None:
    say(
        "progressed", fit=1, step=step, samples=step * 8, epoch=1, step_in_epoch=step,
        loss=1.0 / step, window_steps=1, step_s=0.01, global_batch_size=8,
        micro_batch_size=LAUNCH["plan"]["devices"][0]["micro_batch_size"] or 8,
        memory=[{"device": "cpu:0", "peak_bytes": 1000 + step}],
    )  # fmt: skip


def ended(outcome: str = "finished", code: int = 0, **fields: Any) -> None:
    say("script_ended", rank=RANK, outcome=outcome, exit_code=code, **fields)


def train(steps: int = STEPS) -> None:
    """Steps on from where an earlier attempt was, as its file tells."""
    place = Path(LAUNCH["checkpoint_dir"]) / "step"
    place.parent.mkdir(parents=True, exist_ok=True)
    done = int(place.read_text()) if place.exists() else 0
    if done:
        # What was done may not have been heard: the supervisor had died.
        progress(done)
    for step in range(done + 1, steps + 1):
        progress(step)
        # At once or not at all, as checkpoints are.
        new = place.with_suffix(f".new-{RANK}")
        new.write_text(str(step))
        new.replace(place)
        time.sleep(0.02)


def grandchild(argv: list[str] | None = None) -> None:
    """A process that leaves group and session, and names itself in a file."""
    child = subprocess.Popen(
        argv or ["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL
    )
    with open(os.environ["PIDS"], "a") as file:
        file.write(f"{child.pid}\n")


def listen() -> None:
    rest = b""
    while chunk := CHANNEL.recv(4096):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if json.loads(line).get("do") == "stop":
                STOP.set()
    lifeline.end_group()


def forever() -> None:
    while True:
        time.sleep(60)


def oom(recovery: str = "restart") -> None:
    say(
        "oom_occurred", rank=RANK, device=f"cpu:{RANK}", kind="device",
        phase="gradients", recovery=recovery, step=1, message="OOM when allocating",
        micro_batch_size=LAUNCH["plan"]["devices"][0]["micro_batch_size"] or 8,
    )  # fmt: skip


def run(mode: str) -> int:
    if mode == "not-ready":
        forever()
    if mode == "broken-start":
        return 3
    ready()
    match mode:
        case "finishes":
            train()
            ended()
        case "slow":
            train(500)
            ended()
        case "a-second":
            train(50)
            ended()
        case "raises":
            ended("raised", 1, exception="ValueError", message="no", location="t.py:3")
            return 1
        case "exits-silently":
            return 1
        case "loses-another":
            return EXIT_LOST
        case "kills-itself-once":
            if ATTEMPT == 1:
                train(2)
                os.kill(os.getpid(), signal.SIGKILL)
            train()
            ended()
        case "ooms-above-2":
            size = LAUNCH["plan"]["devices"][0]["micro_batch_size"] or 8
            progress(1) if size <= 2 else oom()
            if size > 2:
                return 70
            train()
            ended()
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            train(2)
            forever()
        case "hangs":
            train(2)
            forever()
        case "waits-untrained":
            # No step, so that how far it comes decides nothing.
            forever()
        case "freezes":
            train(2)
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hangs-once":
            train(2)
            if ATTEMPT == 1:
                forever()
            train()
            ended()
        case "stops-well":
            train(2)
            STOP.wait()
            ended("stopped", 0)
        case "lingers":
            train()
            ended()
            forever()
        case "aborts-after-report":
            train()
            ended()
            os.abort()
        case "grandchildren":
            grandchild()
            grandchild(["env", "-i", "sleep", "600"])
            train()
            ended()
        case "grandchild-holds-channel":
            os.set_inheritable(CHANNEL.fileno(), True)
            pid = os.fork()
            if pid == 0:
                os.setsid()
                while True:
                    CHANNEL.sendall(b"noise\n" * 1000)
            train()
            ended()
        case "floods":
            for step in range(1, 5001):
                progress(step)
            ended()
        case "garbage":
            CHANNEL.sendall(b"\xff\xfe\n[1, 2\n{}\n[]\n" + b"x" * 3_000_000 + b"\n")
            say("run_ended", state="completed", exit_code=0, reason="I say so")
            say("phase_changed", phase="dancing")
            CHANNEL.sendall(b'{"type": "noted", "at": 1e999, "attempt": 1}\n')
            train()
            ended()
            CHANNEL.sendall(b'{"type": "scr')
        case "prints":
            print("x" * 100_000)
            print("tail of the output", flush=True)
            return 1
        case _:
            raise SystemExit(f"unknown mode {mode}")
    return 0


if __name__ == "__main__":
    lifeline.die_with_parent(LAUNCH["supervisor_pid"])
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    threading.Thread(target=listen, daemon=True).start()
    modes = sys.argv[1].split("+")
    sys.exit(run(modes[RANK % len(modes)]))
