"""A job on several hosts: which they are, what devices they have, workers on them.

Covers: the hosts that a job file, Slurm or an MPI hostfile names; ssh to them; the
supervisor's end of a worker over there. Does not cover: the end on the other host
(``agent``), what is planned for which (``core.group_planning``).

Nothing of the job file comes to a shell: ssh is started with a list of words, the
command for the other host is made of constants of ours, and what is to be started over
there goes through standard input.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from oomrun.agent import ALIVE, ENDED, SIGNAL
from oomrun.core import host_names, topology
from oomrun.core.errors import LaunchError, ProbeError
from oomrun.core.launch import RANK
from oomrun.core.spec import Hostfile, Hosts
from oomrun.core.topology import Inventory
from oomrun.processes import Ended, Worker

__all__ = ["SSH", "RemoteWorker", "inventories", "of_job"]

#: Environment variable: ssh and its options, as a shell would read the words.
SSH = "OOMRUN_SSH"
# A host that is cut off is known to be so after 15 s.
_SSH_OPTIONS = (
    "-T", "-x", "-a", "-S", "none",
    "-o", "BatchMode=yes", "-o", "ConnectTimeout=10",
    "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2",
)  # fmt: skip
_SSH_FAILED = 255  # any other code is the agent's
_SLURM = "SLURM_JOB_NODELIST"
_INVENTORY_S = 120.0
_ALIVE_EVERY_S = 3.0
# Of this host and session; a worker elsewhere has its own.
_OWN_VARIABLES = ("HOSTNAME", "DISPLAY", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")


def of_job(
    wanted: Hosts, job_file: Path, environment: Mapping[str, str]
) -> dict[str, str]:
    """The hosts of a job in the order of their ranks; none: this one alone.

    Returns:
        By name the address; empty for this very host.

    Raises:
        LaunchError: what names them cannot be read, or a name is of no host.
    """
    ours = {
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
    }
    found = {name: _address(name) for name in _names(wanted, job_file, environment)}
    if len(set(found.values())) < len(found):
        raise LaunchError("two names of hosts are of one", where=", ".join(found))
    return {name: "" if at in ours else at for name, at in found.items()}


def _address(host: str) -> str:
    try:
        return socket.gethostbyname(host.rpartition("@")[2])
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise LaunchError(f"no host is known by this name: {why}", where=host) from None


def _names(
    wanted: Hosts, job_file: Path, environment: Mapping[str, str]
) -> Sequence[str]:
    try:
        match wanted:
            case None:
                return []
            case "slurm":
                where, text = _SLURM, environment.get(_SLURM, "")
                if not text:
                    raise LaunchError(
                        "hosts: slurm, but this is no job of Slurm's: the variable is "
                        "not set",
                        where=where,
                    )
                return host_names.expanded(text)
            case Hostfile(path=path):
                where = str(job_file.parent / path)
                return host_names.of_hostfile(Path(where).read_text())
            case _:
                return wanted
    except (ValueError, OSError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise LaunchError(f"hosts cannot be read: {why.lower()}", where=where) from None


def _ssh(host: str, function: str, environment: Mapping[str, str]) -> list[str]:
    """The words that run a function of the agent on ``host``."""
    paths = [path for path in sys.path if os.path.isabs(path)]
    code = (
        f"import sys; sys.path[:] = {paths!r}; "
        f"from oomrun.agent import {function}; sys.exit({function}())"
    )
    ssh = shlex.split(environment.get(SSH, "ssh"))
    # Over there a shell reads it: it is quoted, and nothing of the job is in it.
    return [*ssh, *_SSH_OPTIONS, "--", host,
            shlex.join([sys.executable, "-I", "-c", code])]  # fmt: skip


def inventories(
    hosts: Mapping[str, str], here: Inventory, environment: Mapping[str, str]
) -> dict[str, Inventory] | None:
    """The devices of each host of a job, all read at once.

    Args:
        hosts: from ``of_job``.
        here: those of this host, which goes by the name of "".
        environment: our own.

    Returns:
        In the order of ranks; None where no hosts are named.

    Raises:
        ProbeError: one cannot be reached, or has no oomrun.
    """
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        asked = {
            host: pool.submit(_inventory, host, environment)
            for host, address in hosts.items()
            if address
        }
        found = {
            host if host in asked else "": asked[host].result()
            if host in asked
            else here
            for host in hosts
        }
    return found or None


def _inventory(host: str, environment: Mapping[str, str]) -> Inventory:
    try:
        done = subprocess.run(
            _ssh(host, "inventory", environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_INVENTORY_S,
            env=dict(environment),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProbeError(f"its devices cannot be read: {error}", where=host) from None
    if done.returncode != 0:
        said = done.stderr.strip().rsplit("\n", 1)[-1] or f"exit {done.returncode}"
        raise ProbeError(
            f"its devices cannot be read over ssh: {said} (the same Python and oomrun "
            "must be there, under the same paths, and ssh must ask nothing)",
            where=host,
        )
    return topology.from_json(json.loads(done.stdout))


class RemoteWorker(Worker):
    """A worker on another host: the process that we have is ssh's."""

    def __init__(
        self,
        host: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        cwd: Path,
        meeting_host: str,
    ) -> None:
        """Starts it; see ``Worker``.

        Args:
            host: where.
            argv, env, log, cwd: as in ``Worker``, the same over there.
            meeting_host: the address that workers reach each other towards.
        """
        self.host = host
        self._told: Ended | None = None
        self._kept: list[Any] = []
        self._sending = threading.Lock()
        # Only the worker itself is known by its rank.
        ssh_env = {key: env[key] for key in env if key != RANK}
        super().__init__(_ssh(host, "main", env), ssh_env, log, cwd, over_stdio=True)
        own = {
            key: env[key]
            for key in env
            if key not in _OWN_VARIABLES and not key.startswith("SSH_")
        }
        self.send(
            {
                "argv": list(argv),
                "env": own,
                "log": str(log),
                "cwd": str(cwd),
                "meeting_host": meeting_host,
            }
        )
        self._closing = threading.Event()
        threading.Thread(target=self._be_heard, daemon=True).start()

    def _be_heard(self) -> None:
        while not self._closing.wait(_ALIVE_EVERY_S):
            self.send({"do": ALIVE})

    def send(self, message: Mapping[str, Any]) -> bool:
        """See ``Worker``."""
        with self._sending:
            return super().send(message)

    def read(self) -> list[Any]:
        """See ``Worker``."""
        kept, self._kept = self._kept, []
        return kept + self._heard(super().read())

    def _heard(self, values: list[Any]) -> list[Any]:
        """All but the agent's own last words, which are kept."""
        found = []
        for value in values:
            if isinstance(value, dict) and ENDED in value:
                self._told = Ended(**value[ENDED])
            elif value != {}:
                found.append(value)
        return found

    def ending(self) -> Ended | None:
        """How the worker has ended, as its host says; how ssh has, if that is lost."""
        ended = super().ending()
        if ended is None:
            return None
        if self._told is None:
            self._kept = self.drain()
        return self._told or self._of_ssh(ended)

    def _of_ssh(self, ended: Ended) -> Ended:
        lost = ended.exit_code in (None, _SSH_FAILED)
        return replace(ended, lost_host=self.host) if lost else ended

    def signal_process(self, number: int) -> None:
        """Has a signal sent over there."""
        self.send({"do": SIGNAL, "number": number, "group": False})

    def signal_group(self, number: int) -> None:
        """Has a signal sent over there; what must end at once ends with ssh."""
        if number == signal.SIGKILL:
            super().signal_group(number)
        else:
            self.send({"do": SIGNAL, "number": number, "group": True})

    def finish(self) -> Ended:
        """See ``Worker``; ssh's end is the end over there."""
        self._closing.set()
        ended = super().finish()
        self._kept = self.drain()
        return self._told or self._of_ssh(ended)

    def close(self) -> None:
        """See ``Worker``."""
        self._closing.set()
        super().close()
