"""The committed reference is the generated one, and its examples are true."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from oomrun.core import jobfile
from oomrun.core.jobfile.fields import JOB
from oomrun.core.jobfile.kinds import Field, Json, Kind, Missing, OneOf, Section
from oomrun.core.jobfile.nodes import join
from oomrun.core.jobfile.reference import example_yaml, flow, reference_markdown
from oomrun.core.jobfile.template import init_text

DOCS = Path(__file__).parents[2] / "docs" / "job-file.md"
FRAME = {"name": "digits", "script": "train.py"}


def fields(kind: Kind = JOB, path: str = "") -> Iterator[tuple[str, Field]]:
    if isinstance(kind, OneOf):
        for option in kind.options:
            yield from fields(option, path)
    elif isinstance(kind, Section):
        for field in kind.fields:
            yield join(path, field.key), field
            yield from fields(field.kind, join(path, field.key))


def cases() -> Iterator[tuple[str, Json]]:
    for path, field in fields():
        for example in field.examples:
            yield path, example
        if not isinstance(field.default, Missing):
            yield path, field.default


def test_the_committed_reference_is_the_generated_one() -> None:
    assert DOCS.read_text() == reference_markdown(), (
        "run: python -m oomrun.core.jobfile.reference > docs/job-file.md"
    )


def test_every_key_is_in_the_reference() -> None:
    text = reference_markdown()
    for path, _ in fields():
        assert f" `{path}`\n" in text


@pytest.mark.parametrize(("path", "value"), list(cases()))
def test_examples_and_defaults_are_valid_where_they_stand(
    path: str, value: Json
) -> None:
    document = dict(FRAME)
    if path in ("module", "command"):
        del document["script"]
    if path == "command":  # its example takes micro-batches, of a batch that is said
        text_of_batch = example_yaml("batch.global", 256) + "\n"
    else:
        text_of_batch = ""
    document.pop(path, None)
    if path.startswith("devices.") and path != "devices.cpu":
        count = len(value) if isinstance(value, list) else 1
        text = f"devices: {{cpu: {count}, memory: {flow(value)}}}\n"
        text += "strategy: horovod\n"
    else:
        text = example_yaml(path, value) + "\n"
    examined = jobfile.examine(
        yaml.safe_dump(document) + text + text_of_batch, filename="x", environment={}
    )
    if path.startswith("kubernetes."):
        # One key of a section may need another.
        sections = ("kubernetes", "kubernetes.volume", "kubernetes.pods")
        assert {p.path for p in examined.problems} <= set(sections)
    else:
        assert not examined.problems


def test_the_text_of_init_is_valid() -> None:
    spec = jobfile.load(init_text("src/train.py"), filename="x", environment={})
    assert spec == jobfile.load(
        "name: train\nscript: src/train.py", filename="x", environment={}
    )


@pytest.mark.parametrize(
    "script",
    ["train.py", "../a b/#x.py", "yes", "012", 'it\'s: "x".py', "ü.py", "-.py", "a #b"],
)
def test_init_quotes_what_needs_quotes(script: str) -> None:
    spec = jobfile.load(init_text(script), filename="x", environment={})
    assert getattr(spec.program, "path", None) == script


def test_every_comment_of_init_is_a_valid_key() -> None:
    text = init_text("train.py", batch_size=256)
    assert "256 is what the script seems to say" in text
    lines = []
    for line in text.splitlines()[4:]:
        body = line.removeprefix("# ") if line.startswith("# ") else line
        body = body.removeprefix("#") if line.startswith("#   ") else body
        lines.append(body)
    spec = jobfile.load("\n".join(lines), filename="x", environment={})
    assert spec.memory.mode == "growth"
    assert spec.checkpoint.directory == "checkpoints/train"
    assert spec.env == (("TF_CPP_MIN_LOG_LEVEL", "2"),)
