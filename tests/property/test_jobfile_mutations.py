"""Whatever a job file has in it: located problems, never another exception."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oomrun.core import jobfile
from oomrun.core.errors import SpecError
from oomrun.core.jobfile import document

_FILE = Path(__file__).parents[2] / "benchmarks" / "mutate.py"


def _benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate", _FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mutate = _benchmark()

_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["auto", "8%", "20GiB", "10min", "single", "micro_batch", "on"])
)
_keys = st.sampled_from(
    ["name", "script", "args", "env", "devices", "cpu", "memory", "limit", "batch"]
) | st.text(max_size=8)
_documents = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(_keys, inner, max_size=5)
    ),
    max_leaves=20,
)


def _check(data: bytes, changes: list[str]) -> None:
    for problem in mutate.examine(data, changes):
        assert mutate.located(problem, data), problem
        assert str(problem).isprintable()


@pytest.mark.parametrize("seed", range(8))
def test_mutated_files(seed: int) -> None:
    result = mutate.run(500, seed)
    assert result["failed"] == []
    assert result["valid"] > 0
    assert result["invalid"] > 0


def test_mutated_files_without_libyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyYAML's own parser fails in other ways than libyaml."""
    monkeypatch.setattr(yaml, "CSafeLoader", yaml.SafeLoader)
    result = mutate.run(1000, 100)
    assert result["failed"] == []
    assert result["invalid"] > 0


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
@example(b"\xff\xfen\x00")
def test_bytes(data: bytes) -> None:
    _check(data, [])


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=100))
@example("? ")
@example('"\\UFFFFFFFF"')
def test_text(text: str) -> None:
    examined = jobfile.examine(text, filename="job.yaml", environment={})
    assert examined.problems
    assert all(problem.line >= 1 for problem in examined.problems)


@settings(max_examples=300, deadline=None)
@given(_documents)
def test_wellformed_documents(value: object) -> None:
    _check(yaml.safe_dump(value).encode(), [])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=30), max_size=3))
@example(["a.b.c=" + "[" * 50])
def test_overrides(changes: list[str]) -> None:
    _check(b"name: a\nscript: b\n", changes)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_decoding(data: bytes) -> None:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        with pytest.raises(SpecError) as caught:
            jobfile.decode(data, filename="job.yaml")
        assert mutate.located(caught.value.problems[0], data)
    else:
        assert jobfile.decode(data, filename="job.yaml") == text


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "- ? [{a: "])
def test_no_depth_is_too_much(opening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(opening.encode() * (document.MAX_CHARACTERS // len(opening) - 10), [])
    monkeypatch.setattr(yaml, "CSafeLoader", yaml.SafeLoader)
    _check(opening.encode() * 5000, [])
