"""Profiles join in any order, as often as one likes, and read back as written."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from oomrun.core.profile import Profile, ProfileError, from_json, merge, to_json

amounts = st.integers(1, 2**63 - 1)
# Few sizes, so that they meet, and a range that overflows the 64 which are kept.
by_size = st.dictionaries(st.integers(1, 12), amounts) | st.dictionaries(
    st.integers(1, 200), amounts, min_size=60, max_size=90
)
profiles = st.builds(
    Profile,
    state_bytes=st.none() | st.integers(0, 2**40),
    measured=by_size,
    failed=by_size,
    pool_ratio=st.none() | st.floats(1.0, 100.0),
    steps=st.integers(0, 2**40),
)
json_values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(profiles, profiles)
def test_merging_is_commutative(a: Profile, b: Profile) -> None:
    assert merge(a, b) == merge(b, a)


@given(profiles, profiles, profiles)
def test_merging_is_associative(a: Profile, b: Profile, c: Profile) -> None:
    assert merge(merge(a, b), c) == merge(a, merge(b, c))


@given(profiles, profiles)
def test_merging_again_changes_nothing(a: Profile, b: Profile) -> None:
    assert merge(a, a) == a == merge(a, Profile())
    assert merge(merge(a, b), b) == merge(a, b)


@given(profiles, profiles)
def test_nothing_measured_is_forgotten_but_for_small_sizes(
    a: Profile, b: Profile
) -> None:
    merged = merge(a, b)
    smallest = min(merged.measured, default=0)
    for profile in (a, b):
        for size, peak in profile.measured.items():
            assert merged.measured.get(size, 0) >= peak or size < smallest
        for size, limit in profile.failed.items():
            found = merged.smallest_failed(limit)
            assert found is not None or size > max(merged.failed)


@given(profiles)
def test_a_profile_reads_back_as_it_was_written(profile: Profile) -> None:
    assert from_json(json.loads(json.dumps(to_json(profile)))) == profile


@given(profiles, st.sampled_from(sorted(to_json(Profile()))), json_values)
@example(Profile(), "measured", [[1, 2], [1, 2]])
def test_a_changed_field_is_an_error_or_a_profile_that_says_just_that(
    profile: Profile, name: str, value: Any
) -> None:
    changed = {**to_json(profile), name: value}
    try:
        found = from_json(changed)
    except ProfileError:
        return
    assert to_json(found) == changed


@given(json_values)
def test_no_other_value_is_a_profile(value: Any) -> None:
    try:
        from_json(value)
    except ProfileError:
        return
    raise AssertionError(f"{value!r} was taken for a profile")
