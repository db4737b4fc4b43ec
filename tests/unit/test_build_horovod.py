"""What Horovod is built with, how a build is kept, and what is said if it fails."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tools import build_horovod
from tools.build_horovod import BuildError

TOOL = Path(build_horovod.__file__)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"HOROVOD_WITH_GLOO": "1", "HOROVOD_WITHOUT_MPI": "1"}),
        (
            {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_HOME": "/nccl"},
            {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_HOME": "/nccl"},
        ),
        ({"HOROVOD_WITH_MPI": "1"}, {"HOROVOD_WITH_MPI": "1"}),
        ({"HOROVOD_WITH_GLOO": "0"}, {"HOROVOD_WITH_GLOO": "0"}),
        ({"CXX": "clang++"}, {"CXX": "clang++"}),
        ({"CXXFLAGS": "-O1"}, {"CXXFLAGS": "-include cstdint -O1"}),
    ],
)
def test_flags(given: dict[str, str], expected: dict[str, str]) -> None:
    assert expected.items() <= build_horovod.build_flags(given).items()


def test_with_takes_without_away() -> None:
    flags = build_horovod.build_flags({"HOROVOD_WITH_MPI": "1"})
    assert "HOROVOD_WITHOUT_MPI" not in flags
    flags = build_horovod.build_flags({"HOROVOD_WITHOUT_GLOO": "1"})
    assert "HOROVOD_WITH_GLOO" not in flags


def test_what_horovod_reads_when_it_runs_is_no_flag() -> None:
    running = {"HOROVOD_RANK": "0", "HOROVOD_CYCLE_TIME": "1", "PATH": "/bin"}
    flags = build_horovod.build_flags(running)
    assert flags == build_horovod.build_flags({})


def test_another_flag_is_another_wheel() -> None:
    one = build_horovod.key({"flags": build_horovod.build_flags({})})
    same = build_horovod.key({"flags": build_horovod.build_flags({})})
    other = build_horovod.key({"flags": build_horovod.build_flags({"CC": "clang"})})
    assert one == same != other


def test_only_the_source_of_xla_is_left_out() -> None:
    text = 'list(A "x/mpi_ops.cc")\nlist(A "x/xla_mpi_ops.cc")\nlist(B)\n'
    assert build_horovod.patched(text) == 'list(A "x/mpi_ops.cc")\nlist(B)\n'
    with pytest.raises(BuildError, match="0 times"):
        build_horovod.patched("list(B)\n")


def run(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The tool, which has nothing kept."""
    return subprocess.run(
        [sys.executable, str(TOOL), "--cache", str(folder), "--no-install"],
        env={**os.environ, **env}, capture_output=True, text=True,
    )  # fmt: skip


def test_no_compiler(tmp_path: Path) -> None:
    done = run(tmp_path, CXX="no-such-compiler")
    assert done.returncode == 1
    assert "no-such-compiler not found: a C++ compiler and make" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_cmake_that_is_too_new(tmp_path: Path) -> None:
    cmake = tmp_path / "cmake"
    cmake.write_text("#!/bin/sh\necho cmake version 4.1.0\n")
    cmake.chmod(0o755)
    with pytest.raises(BuildError, match=r"version 4\.1: 3\.18 up to"):
        build_horovod.check_machine({"HOROVOD_CMAKE": str(cmake), "CXX": "cc"})


def test_no_network(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but nobody listens
        index = f"http://127.0.0.1:{unused.getsockname()[1]}/simple"
        done = run(
            tmp_path, CXX="sh", PIP_INDEX_URL=index, PIP_RETRIES="0",
            PIP_EXTRA_INDEX_URL="", PIP_CONFIG_FILE=os.devnull, PIP_NO_CACHE_DIR="1",
        )  # fmt: skip
    assert done.returncode == 1
    assert "could not fetch build tools (is the package index reachable" in done.stderr
    assert "Traceback" not in done.stderr
