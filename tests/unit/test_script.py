"""A script run by us sees what it would see under ``python``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The first lines of a worker, but for its channel (`launching.WORKER_ARGV`).
OURS = """
import sys
sys.path[:1] = [p for p in sys.path[:1] if p]
from oomrun.worker import script
kind, program, *args = sys.argv[1:]
(script.run_module if kind == "module" else script.run_script)(program, args)
"""


def python(folder: Path, *argv: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, *argv], cwd=folder, text=True, capture_output=True, timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def ours(folder: Path, kind: str, *argv: str) -> tuple[int, str, str]:
    return python(folder, "-c", OURS, kind, *argv)


EVERYTHING = '''\
"""The docstring."""
import __main__
import atexit
import inspect
import os
import pickle
import sys
from dataclasses import dataclass

import beside

@dataclass
class Point:
    x: "int"

def main():
    print(__name__, __file__, sys.argv, sys.path[0], __doc__, beside.VALUE)
    print(__package__, __spec__, type(__builtins__), type(__loader__).__name__)
    print(__main__.Point is Point, Point.__module__)
    print(__main__ is sys.modules["__main__"])
    print(pickle.loads(pickle.dumps(Point(3))), pickle.dumps(Point(3)))
    print(inspect.getsource(main)[:10], sorted({*vars(__main__)} - {"__annotations__"}))
    print(sys.path, os.getcwd())

atexit.register(lambda: print("at exit", __name__, __main__.Point(4)))
if __name__ == "__main__":
    main()
'''


def test_the_same_names_paths_and_arguments(tmp_path: Path) -> None:
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "train.py").write_text(EVERYTHING)
    (folder / "beside.py").write_text("VALUE = 'beside'\n")
    (tmp_path / "linked.py").symlink_to(folder / "train.py")
    for program in (folder / "train.py", tmp_path / "linked.py"):
        for args in ([], ["--epochs", "3", "", "ü"]):
            wanted = python(tmp_path, str(program), *args)
            assert wanted[0] == 0, wanted[2]
            assert ours(tmp_path, "script", str(program), *args) == wanted
    # By a relative path, but for the path itself.
    code, out, err = ours(tmp_path, "script", "src/train.py")
    assert (code, err) == (0, "")
    assert f"'src/train.py'] {folder} The docstring. beside" in out


@pytest.mark.parametrize(
    "line",
    [
        "pass", "import sys; sys.exit()", "import sys; sys.exit(0)",
        "import sys; sys.exit(3)", "import sys; sys.exit('no data')",
        "raise SystemExit",
        "exit(4)", "import os; os._exit(5)", "import sys; sys.exit(-1)",
        "import sys; sys.exit([1])",
    ],
)  # fmt: skip
def test_the_same_exit_codes(tmp_path: Path, line: str) -> None:
    program = tmp_path / "train.py"
    program.write_text(line + "\n")
    assert ours(tmp_path, "script", str(program)) == python(tmp_path, str(program))


@pytest.mark.parametrize(
    "source",
    [
        "# -*- coding: latin-1 -*-\nprint(len('\xe9'), '\xe9' == '\\xe9')\n".encode(
            "latin-1"
        ),
        b"\xef\xbb\xbfprint('with a mark')\n",
        b"print(1)\r\nprint(2)\r\n",
        b"from __future__ import annotations\ndef f(x: no) -> no: ...\n"
        b"print(f.__annotations__)\n",
        # Our own future statements are not the script's.
        b"def f(x: int) -> str: ...\nprint(f.__annotations__)\n",
        b"",
    ],
)
def test_the_source_is_read_as_python_reads_it(tmp_path: Path, source: bytes) -> None:
    program = tmp_path / "train.py"
    program.write_bytes(source)
    wanted = python(tmp_path, str(program))
    assert wanted[0] == 0, wanted[2]
    assert ours(tmp_path, "script", str(program)) == wanted


def test_errors_are_the_scripts_own(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    for text, last in (
        ("x = 1\nraise ValueError('no')\n", "ValueError: no"),
        ("x = (\n", "SyntaxError"),
    ):
        program.write_text(text)
        code, _, err = ours(tmp_path, "script", str(program))
        assert code == 1
        assert last in err.strip().splitlines()[-1]
        assert f'File "{program}", line' in err
    code, _, err = ours(tmp_path, "script", str(tmp_path / "missing.py"))
    assert (code, "FileNotFoundError" in err) == (1, True)


SPAWNS = """\
import multiprocessing

def square(x):
    return x * x

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [1, 2, 3]))
"""


def test_spawned_processes_find_the_script(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(SPAWNS)
    assert ours(tmp_path, "script", str(program)) == (0, "[1, 4, 9]\n", "")
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(SPAWNS)
    assert ours(tmp_path, "module", "pkg.train") == (0, "[1, 4, 9]\n", "")


MODULE = """\
import sys
from . import helper
print(__name__, __file__, __package__, __spec__.name, sys.argv, sys.path[0])
print(helper.VALUE, type(__builtins__), sys.modules["__main__"].helper is helper)
"""


def test_a_module_is_run_as_with_dash_m(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("print('package', __name__)\n")
    (package / "helper.py").write_text("VALUE = 7\n")
    (package / "train.py").write_text(MODULE)
    (package / "__main__.py").write_text(MODULE)
    for name in ("pkg.train", "pkg"):
        wanted = python(tmp_path, "-m", name, "--epochs", "3")
        assert wanted[0] == 0, wanted[2]
        assert ours(tmp_path, "module", name, "--epochs", "3") == wanted


@pytest.mark.parametrize("name", ["nothing", "nothing.train", "empty"])
def test_a_module_that_is_not_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "__init__.py").touch()
    code, _, err = ours(tmp_path, "module", name)
    assert code == 1
    assert "ModuleNotFoundError" in err.strip().splitlines()[-1]
