"""Commands: no text is too strange, what is meant as text stays, divisors divide."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from oomrun.core import command, jobfile
from oomrun.core.oom_text import find_exhaustion
from oomrun.core.spec import Command

VALUES = {"micro_batch": 8, "global_batch": 64, "accumulation_steps": 8}
# Braces, dollars and names more often than chance would have them.
PIECES = st.sampled_from(
    ["{", "}", "{{", "}}", "$", "${J}", "$${", "{micro_batch}", "{x}", "a", " "]
)
TEXTS = st.lists(PIECES | st.characters(codec="utf-8"), max_size=12).map("".join)


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4), TEXTS, TEXTS)
def test_what_is_read_can_be_filled_in(
    words: list[str], variable: str, own: str
) -> None:
    job: dict[str, Any] = {
        "name": "x", "command": words, "env": {"A": own}, "batch": {"global": 64},
    }  # fmt: skip
    text = yaml.safe_dump(job, allow_unicode=True)
    examined = jobfile.examine(text, filename="j", environment={"J": variable})
    if examined.spec is None:
        assert examined.problems
        return
    program = examined.spec.program
    assert isinstance(program, Command)
    filled = [command.fill(word, VALUES) for word in program.argv]
    assert len(filled) == len(words)
    for word, result in zip(words, filled, strict=True):
        if word == "${J}":
            assert result == variable
        if not set(word) & set("{}$"):
            assert result == word
    command.fill(dict(examined.spec.env)["A"], VALUES)


@given(TEXTS)
def test_doubled_braces_are_text(text: str) -> None:
    doubled = text.replace("{", "{{").replace("}", "}}")
    assert list(command.mistakes(doubled)) == []
    assert command.fill(doubled, {}) == text


@given(st.integers(1, 3000), st.integers(1, 4000))
def test_a_divisor_is_the_largest(whole: int, at_most: int) -> None:
    found = command.divisor(whole, at_most)
    expected = max(n for n in range(1, min(whole, at_most) + 1) if whole % n == 0)
    assert found == expected
    size = min(whole, at_most)
    below, above = command.divisors_around(whole, size)
    assert below <= size <= above
    assert whole % below == whole % above == 0


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=300))
def test_any_output_can_be_read(text: str) -> None:
    found = find_exhaustion(text)
    assert found is None or found.line in text
