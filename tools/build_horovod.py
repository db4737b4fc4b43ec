"""Builds Horovod against the TensorFlow of the Python that runs this, and installs it.

    python tools/build_horovod.py [--cache DIR] [--jobs N] [--no-install]

Horovod's last release does not build against a current TensorFlow as it is: one of its
source files needs headers of XLA that TensorFlow does not ship. Without that file all
but collectives inside of XLA-compiled code works.

CPU and Gloo are the default. Horovod's own variables choose otherwise, for example
``HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_HOME=/usr/local/nccl``, and are a part of the
key under which the wheel is kept: the same call a second time installs what the first
one built. setuptools and cmake of the versions that Horovod needs go into a folder of
their own, so that nothing but Horovod itself changes in the environment.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
#: Read by Horovod's setup.py and CMake files; those that it reads when it runs are not
#: here (HOROVOD_RANK, HOROVOD_CYCLE_TIME and many more).
FLAGS = re.compile(
    r"HOROVOD_(WITH(OUT)?_\w+|GPU(_\w+)?|(NCCL|CUDA|ROCM|NVTX)_\w+|CPU_OPERATIONS"
    r"|BUILD_\w+|ALLOW_MIXED_GPU_IMPL|CMAKE|DEBUG)"
)
TOOLCHAIN = (
    "CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDACXX", "NVCC_APPEND_FLAGS",
)  # fmt: skip
DEFAULTS = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
}
#: setup.py asks for the packages behind the first three before it builds anything.
TOOLS = (
    "setuptools<81", "wheel", "cmake>=3.18,<4", "cloudpickle", "psutil", "pyyaml",
    "packaging",
)  # fmt: skip
CMAKE_LISTS = "horovod/tensorflow/CMakeLists.txt"
DROPPED = "xla_mpi_ops.cc"
# Its Gloo uses uint8_t without saying where from, which GCC 13 and later refuse.
CXX_FLAGS = "-include cstdint"
_SHOWN_LINES = 25


class BuildError(Exception):
    """It cannot be built; the text says why and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Builds and installs; 1 and a message on standard error where it cannot."""
    parser = argparse.ArgumentParser(
        prog="build_horovod.py",
        description=f"Builds Horovod {VERSION} against the installed TensorFlow.",
        epilog="HOROVOD_* variables that Horovod's build knows are passed through.",
    )
    parser.add_argument(
        "--cache", type=Path, default=_cache(os.environ), metavar="DIR",
        help="where wheels are kept (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N",
        help="compilers at a time; each takes up to 2 GiB (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--no-install", action="store_true", help="only build, and print the wheel"
    )
    args = parser.parse_args(argv)
    try:
        wheel = built(args.cache.absolute(), os.environ, args.jobs)
        if not args.no_install:
            _install(wheel)
    except BuildError as error:
        print(f"build_horovod.py: {error}", file=sys.stderr)
        return 1
    print(wheel)
    return 0


def built(cache: Path, environment: Mapping[str, str], jobs: int) -> Path:
    """The wheel for this Python, its TensorFlow and these flags, built if need be.

    Raises:
        BuildError: it cannot be built.
    """
    flags = build_flags(environment)
    made_for = {
        "horovod": VERSION,
        "sdist": SDIST_SHA256,
        "without": DROPPED,
        "tensorflow": _tensorflow(),
        "python": sys.version.split()[0],
        "platform": sysconfig.get_platform(),
        "flags": flags,
    }
    folder = cache / key(made_for)
    found = sorted(folder.glob("horovod-*.whl"))
    if found:
        return found[0]
    check_machine(environment)
    _say(f"building Horovod {VERSION} against TensorFlow {made_for['tensorflow']}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="oomrun-horovod-") as made:
        wheel = _build(Path(made), {**environment, **flags}, jobs)
        (folder / "made-for.json").write_text(json.dumps(made_for, indent=2) + "\n")
        # Under its name only once it is whole: another build may be looking.
        partial = folder / f".{wheel.name}.{os.getpid()}"
        shutil.copyfile(wheel, partial)
        os.replace(partial, folder / wheel.name)
    return folder / wheel.name


def build_flags(environment: Mapping[str, str]) -> dict[str, str]:
    """What Horovod is built with: the user's flags over the defaults."""
    given = {
        name: value
        for name, value in environment.items()
        if FLAGS.fullmatch(name) or name in TOOLCHAIN
    }
    flags = DEFAULTS | given
    # "With" and "without" at once is an error there; the user's word counts.
    for name in DEFAULTS.keys() - given.keys():
        with_it = "WITHOUT" not in name
        old, new = ("WITH_", "WITHOUT_") if with_it else ("WITHOUT_", "WITH_")
        if given.get(name.replace(old, new), "0") not in ("", "0"):
            del flags[name]
    flags["CXXFLAGS"] = f"{CXX_FLAGS} {given.get('CXXFLAGS', '')}".strip()
    return dict(sorted(flags.items()))


def key(made_for: Mapping[str, object]) -> str:
    """The folder's name for what a wheel was made for."""
    text = json.dumps(made_for, sort_keys=True)
    return f"{VERSION}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def patched(text: str) -> str:
    """Horovod's list of sources without the one that cannot be compiled.

    Raises:
        BuildError: it is not named there exactly once.
    """
    lines = text.splitlines(keepends=True)
    kept = [line for line in lines if DROPPED not in line]
    if len(kept) != len(lines) - 1:
        raise BuildError(
            f"{CMAKE_LISTS} names {DROPPED} {len(lines) - len(kept)} times, not once: "
            f"this is not Horovod {VERSION}"
        )
    return "".join(kept)


def _cache(environment: Mapping[str, str]) -> Path:
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "oomrun" / "horovod"


def _tensorflow() -> str:
    """The version and the way of building of the TensorFlow that is installed."""
    code = (
        "import tensorflow as tf; "
        "print('found', tf.__version__, *tf.sysconfig.get_compile_flags()[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
    )  # fmt: skip
    found = re.search(r"^found (.*)$", done.stdout, re.MULTILINE)
    if found is None:
        raise BuildError(
            f"TensorFlow cannot be imported by {sys.executable}: Horovod is built "
            f"against it, so install it first\n{_end_of(done.stderr)}"
        )
    return found[1]


def check_machine(environment: Mapping[str, str]) -> None:
    """Refuses a machine on which the build would fail after minutes.

    Raises:
        BuildError: what it is built with is missing, or does not suit.
    """
    compiler = environment.get("CXX", "g++")
    missing = [
        name for name in (compiler.split()[0], "make") if shutil.which(name) is None
    ]
    if missing:
        raise BuildError(
            f"{' and '.join(missing)} not found: a C++ compiler and make are needed "
            "(Debian: apt-get install g++ make; another compiler: CXX=...)"
        )
    cmake = environment.get("HOROVOD_CMAKE")
    if cmake:
        done = subprocess.run(
            [cmake, "--version"], capture_output=True, text=True, check=False
        )
        version = re.search(r"version (\d+)\.(\d+)", done.stdout)
        if version is None or not (3, 18) <= (int(version[1]), int(version[2])) < (4,):
            raise BuildError(
                f"HOROVOD_CMAKE={cmake} is {version[0] if version else 'no cmake'}: "
                "3.18 up to, not including, 4 is needed; unset it, and one is fetched"
            )


def _build(folder: Path, environment: Mapping[str, str], jobs: int) -> Path:
    tools, wheels = folder / "tools", folder / "wheels"
    source = folder / f"horovod-{VERSION}"
    own = dict(environment)
    own["PATH"] = f"{tools / 'bin'}:{own.get('PATH', os.defpath)}"
    own["PYTHONPATH"] = str(tools)
    own["MAKEFLAGS"] = f"-j{jobs}"  # not that of a make which may have started us
    own["CUDA_VISIBLE_DEVICES"] = "-1"
    _say("fetching its source, cmake and setuptools")
    _pip(["install", "--target", str(tools), *TOOLS], environment, "fetch build tools")
    _fetch(folder, own)
    lists = source / CMAKE_LISTS
    lists.write_text(patched(lists.read_text()))
    _say(f"compiling, {jobs} at a time: some minutes")
    _pip(
        ["wheel", "--no-build-isolation", "--no-deps", "--no-cache-dir",
         "--wheel-dir", str(wheels), str(source)],
        own, "compile Horovod",
    )  # fmt: skip
    (wheel,) = wheels.glob("horovod-*.whl")
    return wheel


def _fetch(folder: Path, environment: Mapping[str, str]) -> None:
    wanted = folder / "sdist.txt"
    wanted.write_text(f"horovod=={VERSION} --hash=sha256:{SDIST_SHA256}\n")
    _pip(
        ["download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation",
         "--dest", str(folder), "--requirement", str(wanted)],
        environment, "fetch Horovod's source",
    )  # fmt: skip
    with tarfile.open(folder / f"horovod-{VERSION}.tar.gz") as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)  # Python 3.10.11 and older; its hash is known


def _install(wheel: Path) -> None:
    # Another build of the same version may be there: pip would keep it.
    options = ["--force-reinstall", "--no-deps"]
    _pip(["install", *options, str(wheel)], os.environ, "install Horovod")
    _pip(["install", str(wheel)], os.environ, "install what Horovod needs")
    code = (
        "import horovod.tensorflow as hvd; assert hvd.gloo_built() or hvd.mpi_built()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
    )  # fmt: skip
    if done.returncode:
        raise BuildError(
            f"{wheel} was built and installed, but cannot be loaded: remove it, and "
            f"build again\n{_end_of(done.stderr)}"
        )


def _pip(arguments: Sequence[str], env: Mapping[str, str], what: str) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, *arguments], capture_output=True, text=True, check=False, env=dict(env)
    )
    if done.returncode:
        text = done.stdout + done.stderr
        hint = ""
        if re.search(r"NewConnectionError|Max retries|No matching distribution", text):
            hint = " (is the package index reachable from here?)"
        raise BuildError(f"could not {what}{hint}\n{_end_of(text)}")


def _end_of(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines()[-_SHOWN_LINES:])


def _say(text: str) -> None:
    print(f"build_horovod.py: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
