"""One worker a device, each running the script; TensorFlow adds their gradients up.

Covers: finding the other workers and starting TensorFlow's runtime for collective
operations, which is what ``tf.distribute.MultiWorkerMirroredStrategy`` stands on. The
strategy itself is not used (docs/decisions/0032).
Does not cover: the operations (``collectives``), what of a batch is whose
(``oomrun.worker``).
"""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import socket
import time
from contextlib import AbstractContextManager
from typing import Any

from oomrun.core.launch import ADDRESS, MEETING, RANK, SIZE
from oomrun.core.strategy import Group
from oomrun_strategies.collectives import Collectives

__all__ = ["MultiWorkerMirroredStrategy"]

_JOB = "worker"
_ASK_AGAIN_S = 0.05
_ANSWER_S = 60.0
_LEAVE_S = 5.0
_REUSE_PORT = "TF_GRPC_REUSE_PORT"
_TOO_LATE = (
    "oomrun: TensorFlow cannot join the other workers: {}. Does something use "
    "TensorFlow before the script, such as a sitecustomize module?"
)


class MultiWorkerMirroredStrategy:
    """Trains on one device a worker."""

    def scope(self) -> AbstractContextManager[None]:
        """What the script runs inside of: nothing; every worker runs all of it."""
        return contextlib.nullcontext()

    def group(self) -> Group:
        """Waits for all workers to have an address, and starts TensorFlow's server."""
        rank, size = int(os.environ[RANK]), int(os.environ[SIZE])
        with socket.socket() as held:
            # Ours until TensorFlow listens on it, which asks for the same option.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(("", 0))
            own = f"{os.environ[ADDRESS]}:{held.getsockname()[1]}"
            meeting = _Meeting(os.environ[MEETING], rank, size)
            # How long one waits is for the supervisor to say.
            _listen(rank, meeting.exchange("address", own))
        return _Workers(rank, size, _device(rank), meeting)


class _Workers(Collectives):
    """The workers, and where they meet."""

    def __init__(self, rank: int, size: int, device: str, meeting: _Meeting) -> None:
        super().__init__(rank, size, device)
        self._meeting = meeting

    def leave(self) -> None:
        """Stays until all others have what they wait for of us.

        What TensorFlow has sent may not have left the process yet.
        """
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._meeting.exchange("left", "", within_s=_LEAVE_S)


class _Meeting:
    """The server of the attempt, at which workers tell each other what they are."""

    def __init__(self, server: str, rank: int, size: int) -> None:
        self._server, self._rank, self._size = server, rank, size

    def exchange(self, what: str, own: str, *, within_s: float = math.inf) -> list[str]:
        """What each worker tells, in the order of ranks; those that did in time."""
        until = time.monotonic() + within_s
        host, _, port = self._server.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=_ANSWER_S)
        with contextlib.closing(connection):
            _ask(connection, "PUT", f"/{what}/{self._rank}", own.encode())
            found: list[str] = []
            while len(found) < self._size:
                told = _ask(connection, "GET", f"/{what}/{len(found)}")
                if told is not None:
                    found.append(told.decode())
                elif time.monotonic() < until:
                    time.sleep(_ASK_AGAIN_S)
                else:
                    break
        return found


def _ask(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None = None,
) -> bytes | None:
    connection.request(method, path, body)
    answer = connection.getresponse()
    value = answer.read()
    return value if answer.status == http.HTTPStatus.OK else None


def _listen(rank: int, addresses: list[str]) -> None:
    """Has TensorFlow start with a server for the others, and know theirs."""
    import tensorflow as tf

    # There is no public way to this but the strategy.
    from tensorflow.python.eager import context as contexts

    context: Any = contexts.context()
    try:
        context.configure_collective_ops(
            collective_leader=f"/job:{_JOB}/replica:0/task:0",
            scoped_allocator_enabled_ops=(),
            # Nothing is ever placed in another worker.
            device_filters=(f"/job:{_JOB}/task:{rank}",),
        )
    except RuntimeError as error:
        raise SystemExit(_TOO_LATE.format(error)) from error
    context.enable_collective_ops(
        tf.train.ServerDef(
            cluster=tf.train.ClusterSpec({_JOB: addresses}).as_cluster_def(),
            default_session_config=context.config,
            job_name=_JOB,
            task_index=rank,
            protocol="grpc",
        )
    )
    before = os.environ.get(_REUSE_PORT)
    os.environ[_REUSE_PORT] = "true"
    try:
        context.ensure_initialized()
    finally:
        # Not for what the script starts.
        del os.environ[_REUSE_PORT]
        if before is not None:
            os.environ[_REUSE_PORT] = before


def _device(rank: int) -> str:
    """The device that this worker trains on, by its name among all workers."""
    import tensorflow as tf

    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return f"/job:{_JOB}/replica:0/task:{rank}/device:{kind}:0"
