"""``oomrun devices``: the table, JSON, and following along."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator

import pyte
import pytest
from fake_machine import CLI, FREE_BYTES, python

from nvml_library import GIB, Machine, uuid


def test_the_table(machine: Machine) -> None:
    machine.add_mig(7, 1)
    machine.change({"1.processes": f"41:{30 * GIB}", "process.41": "python"})
    machine.change({"fail.nvmlDeviceGetHandleByIndex_v2.3": 15})
    done = python(machine, CLI, "devices")
    assert done.returncode == 0
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].split() == [
        *("DEVICE", "NAME", "TOTAL", "FREE", "RESERVED", "OTHERS'", "USE")
    ]
    assert lines[2].split()[:2] == ["1", "GPU-00000001"]
    assert lines[2].split()[-4:] == ["80GiB", "49.4GiB", "600MiB", "30GiB"]
    assert "gpu:3" in lines[4]
    assert "(not usable)" in lines[4]
    assert "(in MIG mode)" in lines[8]
    assert "   MIG-70000000" in lines[9]
    assert "   GPU-00000001: pid 41 (python) holds 30GiB" in lines
    assert "NVIDIA driver  555.42.02" in lines
    assert lines[-1].startswith("note: GPU 3 (unknown GPU): the GPU is lost")


def test_short_ids_stay_unique(machine: Machine) -> None:
    machine.change({"1.uuid": uuid(0)[:-1] + "7"})
    ids = [
        line[3:].split()[0]
        for line in python(machine, CLI, "devices").stdout.splitlines()[1:3]
    ]
    assert ids == [uuid(0), uuid(0)[:-1] + "7"]


def test_json(machine: Machine) -> None:
    done = python(machine, CLI, "devices", "--json")
    assert done.returncode == 0
    assert len(json.loads(done.stdout)["devices"]) == 9


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([0, 1, 2, 3], "NVLink         0, 1, 2, 3: each with each, through a switch"),
        ([0, 1], "NVLink         0-1"),
    ],
)
def test_nvlink_is_one_line(machine: Machine, gpus: list[int], expected: str) -> None:
    for gpu in gpus:
        machine.change({f"{gpu}.links": 1, f"{gpu}.link.0.type": 2})
    assert expected in python(machine, CLI, "devices").stdout.splitlines()


def watch(machine: Machine, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CLI, "devices", "--watch", "0.1", *options],
        env=machine.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )


def lines_until(
    process: subprocess.Popen[str], wanted: Callable[[str], bool]
) -> list[str]:
    """Reads on to the first line that is wanted; the test's time limit bounds it."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if wanted(lines[-1]):
            return lines
    raise AssertionError("\n".join(lines))


@pytest.fixture
def following(machine: Machine) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``oomrun devices --watch 0.1``, and ends it."""
    with contextlib.ExitStack() as stack:

        def start(*options: str) -> subprocess.Popen[str]:
            process = stack.enter_context(watch(machine, *options))
            stack.callback(process.kill)
            return process

        yield start


def test_watch_follows_a_neighbour_until_ctrl_c(
    machine: Machine, following: Callable[..., subprocess.Popen[str]]
) -> None:
    watching = following("--json")

    def until(free_bytes: int) -> None:
        lines_until(
            watching,
            lambda line: json.loads(line)["devices"][0]["free_bytes"] == free_bytes,
        )

    until(FREE_BYTES)
    machine.change({"0.processes": f"41:{GIB}"})
    until(FREE_BYTES - GIB)
    machine.change({"0.processes": None})
    until(FREE_BYTES)
    watching.send_signal(signal.SIGINT)
    assert watching.wait(timeout=20) == 0


def test_watch_dates_each_document(
    following: Callable[..., subprocess.Popen[str]],
) -> None:
    watching = following("--json")
    (first,) = lines_until(watching, bool)
    (second,) = lines_until(watching, bool)
    assert json.loads(first)["at"] < json.loads(second)["at"]


def test_watch_over_a_pipe_is_plain_text_with_the_time(
    machine: Machine, following: Callable[..., subprocess.Popen[str]]
) -> None:
    watching = following()
    lines = lines_until(watching, lambda line: line == "")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", lines[0])
    assert lines[1].split()[0] == "DEVICE"
    machine.change({"fail.nvmlDeviceGetHandleByIndex_v2.0": 15})
    lines_until(watching, lambda line: "note: GPU 0 (unknown GPU): the GPU is" in line)
    machine.change({"fail.nvmlDeviceGetHandleByIndex_v2.0": None})
    back = lines_until(watching, lambda line: line.startswith("0  GPU-00000000"))
    assert "\x1b" not in "".join(back)


class Terminal:
    """``oomrun devices --watch`` in a terminal of that size, kept in memory."""

    def __init__(self, machine: Machine, columns: int, rows: int) -> None:
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self._end, inner = pty.openpty()
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(inner, termios.TIOCSWINSZ, size)
        environment = machine.environment(TERM="xterm")
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLI, "devices", "--watch", "0.1"],
            env=environment,
            stdin=inner,
            stdout=inner,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(inner)

    def until(self, text: str) -> list[str]:
        """The screen's lines, once the text is on it."""
        until = time.monotonic() + 60
        while not any(text in line for line in self.screen.display):
            assert time.monotonic() < until, "\n".join(self.screen.display)
            if select.select([self._end], [], [], 0.1)[0]:
                self._stream.feed(os.read(self._end, 65536))
        return [line.rstrip() for line in self.screen.display]

    def press_ctrl_c(self) -> int:
        """The exit code."""
        os.write(self._end, b"\x03")
        return self.process.wait(timeout=20)

    def close(self) -> None:
        """Takes the terminal away."""
        self.process.kill()
        self.process.wait()
        os.close(self._end)


@pytest.fixture
def terminal(machine: Machine) -> Iterator[Callable[[int, int], Terminal]]:
    """Makes terminals in which the command runs, and takes them away."""
    with contextlib.ExitStack() as stack:

        def make(columns: int, rows: int) -> Terminal:
            made = Terminal(machine, columns, rows)
            stack.callback(made.close)
            return made

        yield make


def test_watch_on_a_terminal_stays_in_place(
    machine: Machine, terminal: Callable[[int, int], Terminal]
) -> None:
    shown = terminal(120, 40)
    first = shown.until("NVIDIA driver")
    assert first[0].split()[0] == "DEVICE"
    machine.change({"0.processes": f"41:{GIB}", "process.41": "python"})
    lines = shown.until("pid 41 (python) holds 1GiB")
    assert lines[1].split()[-1] == "1GiB"
    machine.change({"0.processes": None, "driver": "560.1"})
    after = shown.until("560.1")
    assert [line for line in after if "pid 41" in line] == []
    assert len([line for line in after if "DEVICE" in line]) == 1
    assert shown.press_ctrl_c() == 0


def test_watch_on_a_small_terminal_shows_what_matters(
    machine: Machine, terminal: Callable[[int, int], Terminal]
) -> None:
    machine.change({"0.processes": f"41:{GIB}"})
    shown = terminal(72, 6)
    lines = shown.until("more lines")
    assert lines[0].split()[0] == "DEVICE"
    assert lines[1].startswith("0  GPU-00000000  NVIDIA H100")
    assert lines[1].endswith("1GiB")
    assert re.match(r"\(\d+ more lines", lines[4])
    assert shown.press_ctrl_c() == 0


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "nan"])
def test_watch_refuses_what_is_no_time(machine: Machine, seconds: str) -> None:
    done = python(machine, CLI, "devices", f"--watch={seconds}")
    assert done.returncode == 2
    assert "is not a number of seconds above 0" in done.stderr


def test_the_command_loads_nothing_heavy(machine: Machine) -> None:
    code = (
        "import sys\n"
        "from oomrun.cli import devices_command\n"
        "print({'pynvml', 'rich', 'tensorflow', 'psutil'} & set(sys.modules))"
    )
    assert python(machine, code).stdout == "set()\n"
