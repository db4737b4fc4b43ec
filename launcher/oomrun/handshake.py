"""The hosts of a gang prove to each other that they have the same run directory.

Covers: the run's key, in a file that only its owner may read; what each side says of
it, and the supervisor's part of that. Does not cover: the member's (``member``); what
they say to each other then, which is not encrypted.

A member starts what the supervisor tells it to, and believes what it is told of the
others. So neither talks to a stranger who has found the port, or has taken it. Whoever
can read the run directory could as well change the checkpoints in it.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oomrun.connection import Connection
from oomrun.core.errors import PlatformError

__all__ = [
    "MEMBER", "SUPERVISOR", "Newcomer", "is_proof", "key", "made_key", "nonce", "proof",
]  # fmt: skip

_log = logging.getLogger(__name__)

#: Who proves: what one side has said is no proof of the other's.
SUPERVISOR, MEMBER = "supervisor", "member"
_BYTES = 32


def made_key(path: Path) -> bytes:
    """The run's key; made where there is none yet. For whoever has the run's lock.

    Raises:
        PlatformError: it can be neither read nor written.
    """
    try:
        if (found := key(path)) is not None:
            return found
        # Readable for its owner from its first moment on, and whole or not there.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".key-")
        made = secrets.token_hex(_BYTES).encode()
        try:
            with open(descriptor, "wb") as file:
                file.write(made)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise PlatformError(
            f"the key of the run's hosts is not to be had: {why}", where=str(path)
        ) from None
    return made


def key(path: Path) -> bytes | None:
    """The run's key; None where there is none yet.

    Raises:
        OSError: it is there, but not for us.
    """
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return None
    return found if len(found) == 2 * _BYTES else None


def nonce() -> str:
    """Something that was never said before."""
    return secrets.token_hex(_BYTES)


def proof(secret: bytes, who: str, *said: object) -> str:
    """What ``who`` says to prove that it has the key.

    Args:
        secret: the key.
        who: ``SUPERVISOR`` or ``MEMBER``.
        said: what both have said before, each one's ``nonce`` among it.
    """
    text = "\0".join([who, *map(str, said)])
    return hmac.new(secret, text.encode(), "sha256").hexdigest()


def is_proof(given: object, wanted: str) -> bool:
    """Whether what was given is the proof; takes as long for any that is not."""
    return isinstance(given, str) and hmac.compare_digest(
        given.encode(), wanted.encode()
    )


class Newcomer:
    """Somebody who has connected to the supervisor, and may belong to the run.

    Args:
        connection: to it.
        digest: what it must have in common with us.
        size: how many hosts there are.
        key_file: holds the run's key, or will.

    Attributes:
        number: which member it says it is.
        asked: it has been told who we are, and asked for its own proof.
        proved: it is a member of this run.
    """

    def __init__(
        self, connection: Connection, digest: str, size: int, key_file: Path
    ) -> None:
        self.connection = connection
        self.came_at = time.monotonic()
        self.number = 0
        self.asked = self.proved = False
        self._digest, self._size, self._key_file = digest, size, key_file
        self._wanted = ""

    def hear(self) -> None:
        """Takes what it has said; closes the connection to a stranger."""
        for message in self.connection.read():
            told = message if isinstance(message, dict) else {}
            if self.asked:
                self.proved = is_proof(told.get("proof"), self._wanted)
            if not (self.proved if self.asked else self._greet(told)):
                self.connection.close()
            if self.proved or not self.connection.open:
                return

    def _greet(self, hello: Mapping[str, Any]) -> bool:
        """Proves that we have the run's key, and asks for the same; False: it goes."""
        number, theirs = hello.get("member"), hello.get("nonce")
        if not isinstance(number, int) or not 0 < number < self._size:
            return False
        if hello.get("digest") != self._digest:
            why = "it has another job file, or another version of oomrun"
            self.connection.send({"do": "refuse", "why": why})
            _log.warning("member %d is sent away: %s", number, why)
            return False
        secret, ours = made_key(self._key_file), nonce()
        said = (self._digest, number, theirs, ours)
        self.number, self.asked = number, True
        self._wanted = proof(secret, MEMBER, *said)
        shown = proof(secret, SUPERVISOR, *said)
        return self.connection.send({"do": "prove", "nonce": ours, "proof": shown})
