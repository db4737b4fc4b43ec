"""What is shipped, what importing it costs, and that files tell the same story.

Covers: the wheel's contents, imports, the Makefile against README and CI, the length
of files, the configs, links in documents. Does not cover: installing from PyPI.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import oomrun
from oomrun.core import jobfile

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*ROOT.glob("launcher/**/*.py"), *ROOT.glob("strategies/**/*.py")])
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
JOBS = sorted(ROOT.glob("configs/*/job.yaml"))
HEAVY = ("tensorflow", "keras", "numpy", "horovod")
LONGEST = 400

PUBLIC = {
    "oomrun": ["Loop", "__version__"],
    "oomrun.cli": ["COMMANDS", "Command", "build_parser", "main"],
    "oomrun.metrics": ["Exporter", "ExporterError", "serve", "start"],
    "oomrun.devices": [
        "DISCOVERY_TIMEOUT_S",
        "READING_TIMEOUT_S",
        "Wait",
        "discover",
        "held_open",
        "memory_of",
        "wait_until_free",
    ],
    "oomrun_strategies.single": ["SingleStrategy"],
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: setuptools leaves folders where it builds."""
    pytest.importorskip("build", reason="`build` comes with the extra `test`")
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    for name in ("launcher", "strategies"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(tree)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (tree / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel was unpacked into."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Another interpreter that imports our packages from ``folder``."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_wheel_has_two_names_at_the_top(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    info = f"oomrun-{oomrun.__version__}.dist-info"
    assert tops == {"oomrun", "oomrun_strategies", info}
    shipped = {name for name in names if not name.startswith(info)}
    typed = {"oomrun/py.typed", "oomrun_strategies/py.typed"}
    assert {name for name in shipped if not name.endswith(".py")} == typed
    modules = {
        str(path.relative_to(ROOT / path.relative_to(ROOT).parts[0]))
        for path in SOURCES
    }
    assert shipped - typed == modules


def test_the_wheel_has_the_command_and_the_strategies(installed: Path) -> None:
    (entry_points,) = installed.glob("*.dist-info/entry_points.txt")
    assert [line for line in entry_points.read_text().splitlines() if line] == [
        "[console_scripts]",
        "oomrun = oomrun.cli:main",
        "[oomrun.strategies]",
        "horovod = oomrun_strategies.horovod:HorovodStrategy",
        "mirrored = oomrun_strategies.mirrored:MirroredStrategy",
        "multi_worker_mirrored = "
        "oomrun_strategies.multi_worker_mirrored:MultiWorkerMirroredStrategy",
        "single = oomrun_strategies.single:SingleStrategy",
    ]
    assert list(installed.glob("*.dist-info/licenses/LICENSE"))


def test_what_is_promised_is_what_is_tried(installed: Path) -> None:
    (metadata,) = installed.glob("*.dist-info/METADATA")
    required = metadata.read_text()
    matrix = (ROOT / "tests/versions/matrix.py").read_text()
    for package in ("tensorflow", "keras"):
        (lowest,) = re.findall(rf'"{package}==(\d+\.\d+)\.\d+"', matrix)
        bounds = re.findall(rf"Requires-Dist: {package}\S*?>=([\d.]+)", required)
        assert set(bounds) == {lowest}, package


def test_importing_us_imports_no_tensorflow(installed: Path) -> None:
    modules = [
        name for name in map(module_name, SOURCES) if ".worker" not in name
        and not name.endswith("__main__")
    ]  # fmt: skip
    code = (
        f"import sys, importlib\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        f"heavy = [name for name in {HEAVY} if name in sys.modules]\n"
        f"print(sys.modules['oomrun'].__file__, heavy)"
    )
    done = python(installed, "-c", code)
    assert done.stdout == f"{installed / 'oomrun' / '__init__.py'} []\n", done.stderr


def module_name(path: Path) -> str:
    """The dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_validate_imports_little(installed: Path) -> None:
    job = str(JOBS[0])
    done = python(installed, "-X", "importtime", "-m", "oomrun", "validate", job)
    assert done.returncode == 0, done.stderr
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "yaml" in imported
    for name in (*HEAVY, "pydantic", "rich", "prometheus_client", "psutil", "pynvml"):
        assert name not in imported


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name: str) -> None:
    assert importlib.import_module(name).__all__ == PUBLIC[name]


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_all_is_sorted_and_true(path: Path) -> None:
    tree = ast.parse(path.read_text())
    exported = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    ]
    for names in exported:
        assert len(set(names)) == len(names)
        assert set(names) <= set(defined(tree))


def defined(tree: ast.Module) -> Iterator[str]:
    """The names that a module defines or imports at its top level."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_files_are_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= LONGEST


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.parent.name)
def test_every_config_is_valid(path: Path) -> None:
    spec = jobfile.load(path.read_text(), filename=str(path), environment={})
    assert spec.name == path.parent.name


@pytest.mark.parametrize("name", ["README.md", "docs/recipes.md", "docs/kubernetes.md"])
def test_the_job_files_in_documents_are_valid(name: str) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / name).read_text(), re.M | re.S)
    assert blocks
    for block in blocks:
        jobfile.load(block, filename=name, environment={})


def make_targets() -> set[str]:
    """What the Makefile can make, by hand."""
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    targets = set(phony.split())
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in targets)
    return targets


def test_documents_name_targets_that_exist() -> None:
    for document in [*DOCUMENTS, ROOT / ".ci/run"]:
        text = document.read_text()
        # In code, not in prose: `make demo`, or a line of a shell block.
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
        assert named <= make_targets(), document


def test_the_readme_starts_with_two_commands_and_ci_runs_one() -> None:
    readme = (ROOT / "README.md").read_text()
    named = re.findall(r"^make ([a-z]+)", readme, re.MULTILINE)
    assert named[:2] == ["demo", "test"]
    ci = (ROOT / ".ci/run").read_text().splitlines()
    assert ci[-1] == "make test"
    assert os.access(ROOT / ".ci/run", os.X_OK)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target
