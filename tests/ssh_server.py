"""A real sshd of a test's own, and how to come in.

Covers: keys, configuration, start and end. Does not cover: where it is reached.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

__all__ = ["SSHD", "closed_connections", "refused", "running"]

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
_SSHD_CONFIG = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
"""
_SSH_CONFIG = """\
Host *
  User {user}
  Port {port}
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


@contextlib.contextmanager
def running(
    folder: Path, address: str, inside: Sequence[str] = ()
) -> Iterator[tuple[str, psutil.Process]]:
    """An sshd that listens at ``address``.

    Args:
        folder: for its files.
        address: on a network of its own, or one of this host.
        inside: the words before a command that is to run where the address is.

    Yields:
        The words of ``ssh`` that reaches it, and its process.
    """
    assert SSHD is not None
    for key in ("host_key", "user_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key],
            check=True,
        )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where its children shut themselves in
    port = 22 if inside else _free_port(address)
    known = {"folder": folder, "address": address, "port": port}
    (folder / "sshd_config").write_text(_SSHD_CONFIG.format(**known))
    (folder / "ssh_config").write_text(
        _SSH_CONFIG.format(user=getpass.getuser(), **known)
    )
    with open(folder / "sshd.log", "wb") as log:
        server = subprocess.Popen(
            [*inside, SSHD, "-D", "-e", "-f", str(folder / "sshd_config")],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        _wait_until_it_listens(folder / "sshd.log", server)
        yield f"ssh -F {folder}/ssh_config", psutil.Process(server.pid)
    finally:
        server.kill()
        server.wait()


def _free_port(address: str) -> int:
    with socket.socket() as asking:
        asking.bind((address, 0))
        return int(asking.getsockname()[1])


def _wait_until_it_listens(log: Path, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 60
    while "Server listening" not in log.read_text():
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.02)


def refused(ssh: str, address: str) -> str:
    """Why nobody is let in (a locked account, say); "" where all is well."""
    done = subprocess.run(
        [*shlex.split(ssh), address, "true"], capture_output=True, text=True
    )
    return done.stderr.strip() or "no reason is said" if done.returncode else ""


def closed_connections(server: psutil.Process) -> int:
    """Kills what serves its connections, as a host's sudden end would."""
    found = server.children()
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return len(found)
