"""The other hosts of a job, started from this one over ssh as members of its gang.

Covers: the hosts that a job file, Slurm or an MPI hostfile names; ssh to them, again
where it breaks. Does not cover: what members do (``gang``, ``member``), the first lines
over there (``cli.host_agent``).

Nothing of the job file comes to a shell: ssh is started with a list of words, the
command for the other host is made of constants of ours, and what is to be run over
there goes through standard input, which stays open for as long as we are there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from oomrun.core import host_names
from oomrun.core.errors import LaunchError
from oomrun.core.spec import Hostfile, Hosts
from oomrun.processes import SPARED

__all__ = ["AGENT", "SSH", "Calls", "address_towards", "check_own_name", "of_job"]

_log = logging.getLogger(__name__)

#: Environment variable: ssh and its options, as a shell would read the words.
SSH = "OOMRUN_SSH"
# A host that is cut off is known to be so after 15 s.
_SSH_OPTIONS = (
    "-T", "-x", "-a", "-S", "none",
    "-o", "BatchMode=yes", "-o", "ConnectTimeout=10",
    "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2",
)  # fmt: skip
AGENT = "oomrun.cli.host_agent"  # tests put their own here
_SLURM = "SLURM_JOB_NODELIST"
_ANY_PORT = 9  # nothing is sent to it
_ALIVE_EVERY_S = 3.0
_AGAIN_S = 2.0
_LEAVE_S = 10.0
_LONGEST_LINE = 500
# Of this host and session; the others have their own.
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


def address_towards(address: str) -> str:
    """The address by which this host is known where ``address`` is.

    Raises:
        LaunchError: there is no way to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((address, _ANY_PORT))
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise LaunchError(f"there is no way to it: {why}", where=address) from None
        return str(asking.getsockname()[0])


def check_own_name(address: str) -> None:
    """Refuses a host whose name is its loopback address to itself.

    Horovod 0.28.1 forgets the interface that it was given where it connects the workers
    of a set (gloo_context.cc), and takes the address of the host's name instead.

    Args:
        address: that by which the other hosts reach this one.

    Raises:
        LaunchError: the others could not reach its workers.
    """
    if _is_loopback(address):
        return  # all of them are here
    name = socket.gethostname()
    try:
        known = socket.gethostbyname(name)
    except OSError:
        known = ""
    if not known or _is_loopback(known):
        raise LaunchError(
            f"to itself the host {name} is {known or 'not known'}, and Horovod tells "
            f"that to the other hosts. Its line in /etc/hosts should be: "
            f"{address} {name}",
            where=address,
        )


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


class Calls:
    """A call to each of the other hosts, made again where it breaks.

    Args:
        hosts: their names.
        argv: of ``oomrun`` over there, for each of them.
        cwd: the folder to call it in.
        environment: our own.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        argv: Sequence[Sequence[str]],
        cwd: Path,
        environment: Mapping[str, str],
    ) -> None:
        self._environment = environment
        own = {
            key: environment[key]
            for key in environment
            if key not in _OWN_VARIABLES and not key.startswith("SSH_")
        }
        self._orders = {
            host: {"argv": list(words), "cwd": str(cwd), "env": own}
            for host, words in zip(hosts, argv, strict=True)
        }
        self._closing = threading.Event()
        self._open: dict[str, subprocess.Popen[bytes]] = {}
        self._threads = [
            threading.Thread(target=self._keep_calling, args=(host,), daemon=True)
            for host in hosts
        ]
        self._threads.append(threading.Thread(target=self._be_heard, daemon=True))
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Waits for members that were sent home; ends the others' calls."""
        self._closing.set()
        for process in list(self._open.values()):
            try:
                process.wait(_LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
        for thread in self._threads:
            thread.join()

    def _keep_calling(self, host: str) -> None:
        told: set[str] = set()
        while not self._closing.is_set():
            try:
                self._call(host, told)
            except OSError as error:
                self._tell(host, f"ssh cannot be started: {error}", told)
            self._closing.wait(_AGAIN_S)

    def _call(self, host: str, told: set[str]) -> None:
        process = subprocess.Popen(
            _ssh(host, self._environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**self._environment, SPARED: str(os.getpid())},
            # Ctrl-C is for us; members are told by us what to do.
            start_new_session=True,
        )
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.write(json.dumps(self._orders[host]).encode() + b"\n")
                process.stdin.flush()
            self._open[host] = process
            for line in process.stdout:
                text = line[:_LONGEST_LINE].decode(errors="replace").strip()
                self._tell(host, text, told)
            del self._open[host]

    def _tell(self, host: str, text: str, told: set[str]) -> None:
        """What is said over there, once."""
        if text and text not in told and not self._closing.is_set():
            told.add(text)
            _log.warning("%s: %s", host, text.removeprefix("oomrun: "))

    def _be_heard(self) -> None:
        while not self._closing.wait(_ALIVE_EVERY_S):
            for process in list(self._open.values()):
                with contextlib.suppress(OSError, ValueError):
                    assert process.stdin is not None
                    os.write(process.stdin.fileno(), b"\n")


def _ssh(host: str, environment: Mapping[str, str]) -> list[str]:
    """The words that run our agent on ``host``."""
    paths = [path for path in sys.path if os.path.isabs(path)]
    code = (
        f"import sys; sys.path[:] = {paths!r}; "
        f"from {AGENT} import main; sys.exit(main())"
    )
    ssh = shlex.split(environment.get(SSH, "ssh"))
    # Over there a shell reads it: it is quoted, and nothing of the job is in it.
    command = shlex.join([sys.executable, "-I", "-c", code])
    return [*ssh, *_SSH_OPTIONS, "--", host, command]
