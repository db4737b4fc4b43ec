"""What counts as a difference between Keras's own tests plain and under oomrun."""

from __future__ import annotations

import fnmatch
import json

from keras_suite import compare

PASSED, FAILED = {"outcome": "passed"}, {"outcome": "failed", "error": "E  at odds"}


def test_a_test_that_only_one_side_passes_or_knows_is_a_difference() -> None:
    plain = {"a": PASSED, "b": PASSED, "c": FAILED, "d": FAILED, "e": PASSED}
    oomrun = {"a": PASSED, "b": FAILED, "c": PASSED, "d": FAILED, "f": PASSED}

    found = compare.compare(plain, oomrun, {})

    assert found["different"] == {
        "b": {"plain": "passed", "oomrun": "failed", "error": "E  at odds"},
        "c": {"plain": "failed", "oomrun": "passed", "error": "E  at odds"},
        "e": {"plain": "passed", "oomrun": "missing", "error": ""},
        "f": {"plain": "missing", "oomrun": "passed", "error": ""},
    }
    assert found["explained"] == {}


def test_a_reason_explains_the_tests_that_it_names_and_no_others() -> None:
    plain, oomrun = (
        {"x::a_1": PASSED, "x::b": PASSED},
        {"x::a_1": FAILED, "x::b": FAILED},
    )

    found = compare.compare(plain, oomrun, {"*::a_*": "draws anew"})

    assert list(found["different"]) == ["x::b"]
    assert found["explained"]["x::a_1"]["reason"] == "draws anew"


def test_what_plain_keras_does_not_give_twice_is_set_apart() -> None:
    plain = {"chance": FAILED, "ours": PASSED}
    found = compare.compare(plain, {"chance": PASSED, "ours": FAILED}, {})

    compare.set_unsteady_apart(found, plain, {"chance": PASSED, "ours": PASSED})

    assert list(found["different"]) == ["ours"]
    assert list(found["unsteady"]) == ["chance"]


def test_every_reason_names_its_modes_and_tests_and_says_why() -> None:
    for entry in json.loads((compare.HERE / "explained.json").read_text()):
        assert set(entry) == {"modes", "tests", "reason"}
        assert set(entry["modes"]) <= set(compare.MODES), entry
        assert entry["tests"], entry
        assert len(entry["reason"]) > 20, entry
        # One that explains everything explains nothing.
        assert not any(
            fnmatch.fnmatch("keras/a_test.py::T::t", p) for p in entry["tests"]
        )
