"""The Dockerfile, as far as that can be seen without a container runtime.

Covers: hadolint; that what it names is there; that what it copies is all that its
installation needs, by that very command. Does not cover: building and running it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import metadata
from pathlib import Path

import pytest

import programs
from oomrun.core.kubernetes_spec import WORKSPACE, KubernetesSpec

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "k8s" / "Dockerfile"
IGNORED = DOCKERFILE.with_name("Dockerfile.dockerignore")


def instructions() -> list[tuple[str, str]]:
    """Each instruction with its argument, without comments."""
    lines = [
        line
        for line in DOCKERFILE.read_text().splitlines()
        if not line.lstrip().startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name, rest.strip()) for name, _, rest in found]


def all_of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def copied() -> list[str]:
    """What is copied from this folder."""
    found = [rest.split() for rest in all_of("COPY")]
    return [path for words in found if "--" not in words[0] for path in words[:-1]]


@programs.needs_hadolint
def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    assert programs.HADOLINT is not None
    done = subprocess.run(
        [programs.HADOLINT, str(DOCKERFILE)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "")
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python:latest\nRUN pip install x\n")
    done = subprocess.run([programs.HADOLINT, str(bad)], capture_output=True, text=True)
    assert done.returncode
    assert "DL3007" in done.stdout


def test_the_base_is_of_one_version() -> None:
    (base, *_) = all_of("ARG")
    assert re.fullmatch(r"BASE=python:3\.\d+\.\d+-slim-\w+", base)
    assert [rest.split()[0] for rest in all_of("FROM")] == ["${BASE}"] * 2
    python = base.removeprefix("BASE=python:").rpartition(".")[0]
    supported = metadata("oomrun").get_all("Classifier") or []
    assert f"Programming Language :: Python :: {python[:4]}" in supported


def test_what_it_names_is_there() -> None:
    for path in copied():
        assert (ROOT / path).exists(), path
    assert [rest.split() for rest in all_of("COPY") if rest.startswith("--")] == [
        ["--from=build", "/opt/oomrun", "/opt/oomrun"]
    ]
    extras = set(metadata("oomrun").get_all("Provides-Extra") or [])
    (default,) = [a.removeprefix("EXTRA=") for a in all_of("ARG") if "EXTRA" in a]
    told = re.findall(r"EXTRA=(\w+)", DOCKERFILE.read_text())
    assert {default, *told} == {"tensorflow", "gpu"}
    assert {default, *told, "kubernetes"} <= extras
    (install,) = [run for run in all_of("RUN") if "pip install" in run]
    assert '".[${EXTRA},kubernetes]"' in install


def test_nothing_else_goes_to_the_builder() -> None:
    first, *others = [
        line
        for line in IGNORED.read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert first == "*"
    assert {line[1:] for line in others if line.startswith("!")} == set(copied())


def test_it_runs_as_the_user_of_the_pods_and_keeps_no_secret() -> None:
    spec = KubernetesSpec(image="x")
    assert all_of("USER") == [f"{spec.user}:{spec.user}"]
    (made,) = [run for run in all_of("RUN") if "useradd" in run]
    assert f"--uid {spec.user} --gid {spec.user}" in made
    assert all_of("WORKDIR")[-1] == WORKSPACE
    assert all_of("ENTRYPOINT") == ['["oomrun"]']
    assert not re.search(r"(?i)secret|token|passw|credential", "".join(all_of("ENV")))
    names = [argument.partition("=")[0] for argument in all_of("ARG")]
    assert names == ["BASE", "EXTRA", "HOROVOD"]


def test_what_is_copied_can_be_installed(tmp_path: Path) -> None:
    """By the very command, in a folder: only oomrun itself, as packages are here."""
    pytest.importorskip("ensurepip", reason="Debian keeps it in python3-venv")
    source, target = tmp_path / "src", tmp_path / "opt"
    source.mkdir()
    for path in copied():
        place = source / path
        place.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", str(ROOT / path), str(place)], check=True)
    (command,) = [run for run in all_of("RUN") if "pip install" in run]
    here = sysconfig.get_path("purelib")
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "EXTRA": "tensorflow",
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's way to say that there is none
        "PYTHONPATH": here,
    }
    words = ["bash", "-ec", command.replace("/opt/", f"{target}/")]
    done = subprocess.run(words, cwd=source, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    program = str(target / "oomrun/bin/oomrun")
    where = "import oomrun; print(oomrun.__file__)"
    asked = [str(target / "oomrun/bin/python"), "-P", "-c", where]
    del env["PYTHONPATH"]
    env["PYTHONPATH"] = str(target / "packages")
    (target / "packages").symlink_to(here)
    found = subprocess.run(asked, env=env, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(str(target))
    done = subprocess.run(
        [program, "render", "--help"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("built", ["yes", "no"])
def test_horovod_can_be_left_out(tmp_path: Path, built: str) -> None:
    """The condition of the very command, with a Python that only says its words."""
    (command,) = [run for run in all_of("RUN") if "build_horovod" in run]
    python = tmp_path / "opt/oomrun/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["sh", "-ec", command.replace("/opt/", f"{tmp_path}/opt/")],
        env={**os.environ, "HOROVOD": built}, capture_output=True, text=True,
    )  # fmt: skip
    wanted = "tools/build_horovod.py\n" if built == "yes" else ""
    assert (done.returncode, done.stdout) == (0, wanted)
