"""What is remembered of a job's memory: its JSON form and its key."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from oomrun.core.profile import (
    Environment,
    Profile,
    ProfileError,
    digest,
    from_json,
    full_key,
    merge,
    relevant_variables,
    to_json,
)

PROFILE = Profile(
    state_bytes=100,
    measured={64: 900, 8: 300},
    failed={128: 1000, 256: 2000},
    pool_ratio=1.25,
    steps=40,
)
ENVIRONMENT = Environment(
    versions={"tensorflow": "2.21.0", "keras": "3.15.1", "oomrun": "0.1.0"},
    device_kind="gpu",
    device_name="NVIDIA H100",
    driver="550.1",
    cpu_count=16,
    memory_mode="growth",
    strategy="single",
    replicas=1,
    global_batch_size=256,
    batch_norm="allow",
    variables={"TF_ENABLE_ONEDNN_OPTS": "0"},
)


def test_a_profile_comes_back_from_json() -> None:
    assert from_json(json.loads(json.dumps(to_json(PROFILE)))) == PROFILE
    assert from_json(to_json(Profile())) == Profile()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("state_bytes", -1),
        ("state_bytes", 1.0),
        ("state_bytes", True),
        ("state_bytes", "100"),
        ("state_bytes", 2**63),
        ("measured", {"8": 300}),
        ("measured", [[8, 300], [8, 301]]),
        ("measured", [[64, 900], [8, 300]]),
        ("measured", [[8, 0]]),
        ("measured", [[0, 300]]),
        ("measured", [[8, None]]),
        ("measured", [[8, 300.0]]),
        ("measured", [[True, 300]]),
        ("measured", [[8]]),
        ("measured", [8, 300]),
        ("measured", None),
        ("measured", [[size, 1] for size in range(1, 66)]),
        ("failed", [[128, None]]),
        ("failed", [[2**31, 1]]),
        ("pool_ratio", 1),
        ("pool_ratio", 0.9),
        ("pool_ratio", 101.0),
        ("pool_ratio", float("nan")),
        ("pool_ratio", float("inf")),
        ("steps", None),
        ("steps", -1),
        ("another", 1),
    ],
)
def test_whatever_is_odd_is_no_profile(name: str, value: Any) -> None:
    with pytest.raises(ProfileError):
        from_json({**to_json(PROFILE), name: value})


@pytest.mark.parametrize("value", [None, [], 1, "x", {}])
def test_what_is_no_object_is_no_profile(value: Any) -> None:
    with pytest.raises(ProfileError):
        from_json(value)


@pytest.mark.parametrize("name", [item.name for item in fields(Profile)])
def test_a_profile_without_one_of_its_fields_is_none(name: str) -> None:
    value = to_json(PROFILE)
    del value[name]
    with pytest.raises(ProfileError):
        from_json(value)


def test_the_largest_sizes_that_ran_are_kept_and_the_smallest_that_failed() -> None:
    sizes = {size: 1000 + size for size in range(1, 101)}
    profile = Profile(measured=sizes, failed=sizes)
    assert list(profile.measured) == list(range(37, 101))
    assert list(profile.failed) == list(range(1, 65))
    assert from_json(to_json(profile)) == profile


def test_what_failed_under_a_lower_limit_may_fit_under_a_higher_one() -> None:
    assert PROFILE.smallest_failed(900) == 128
    assert PROFILE.smallest_failed(1000) == 128
    assert PROFILE.smallest_failed(1001) == 256
    assert PROFILE.smallest_failed(2001) is None


def test_merging_keeps_the_highest_of_each() -> None:
    other = Profile(
        state_bytes=90, measured={8: 310, 16: 400}, failed={128: 1500}, steps=7
    )
    assert merge(PROFILE, other) == Profile(
        state_bytes=100,
        measured={8: 310, 16: 400, 64: 900},
        failed={128: 1500, 256: 2000},
        pool_ratio=1.25,
        steps=40,
    )


@pytest.mark.parametrize(
    "change",
    [
        {"versions": {**ENVIRONMENT.versions, "tensorflow": "2.20.0"}},
        {"versions": {**ENVIRONMENT.versions, "oomrun": "0.2.0"}},
        {"versions": {**ENVIRONMENT.versions, "cudnn": "9"}},
        {"device_kind": "mig"},
        {"device_name": "NVIDIA A100"},
        {"driver": None},
        {"cpu_count": 8},
        {"memory_mode": "limit"},
        {"strategy": "mirrored"},
        {"replicas": 2},
        {"global_batch_size": 512},
        {"batch_norm": "freeze"},
        {"variables": {}},
        {"variables": {"TF_ENABLE_ONEDNN_OPTS": "1"}},
    ],
)
def test_another_environment_has_another_key(change: dict[str, Any]) -> None:
    other = full_key("model", replace(ENVIRONMENT, **change))
    assert other != full_key("model", ENVIRONMENT)
    assert digest(other) != digest(full_key("model", ENVIRONMENT))


def test_every_field_of_the_environment_is_in_the_key() -> None:
    key = json.loads(full_key("m", ENVIRONMENT))
    assert key.keys() - {"engine", "model"} == {f.name for f in fields(Environment)}
    assert key["model"] == "m"
    assert full_key("n", ENVIRONMENT) != full_key("m", ENVIRONMENT)


def test_the_order_of_mappings_does_not_change_the_key() -> None:
    turned = dict(reversed(ENVIRONMENT.versions.items()))
    other = replace(ENVIRONMENT, versions=turned)
    assert full_key("m", other) == full_key("m", ENVIRONMENT)


@pytest.mark.parametrize("package", ["tensorflow", "keras", "oomrun"])
def test_no_key_without_the_versions_that_decide(package: str) -> None:
    versions = {**ENVIRONMENT.versions, package: ""}
    with pytest.raises(ProfileError, match=package):
        full_key("m", replace(ENVIRONMENT, versions=versions))


def test_variables_that_decide_memory_are_told_from_those_that_do_not() -> None:
    deciding = {
        "OMP_NUM_THREADS": "2",
        "TF_CPU_ALLOCATOR_USE_BFC": "true",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_GPU_ALLOCATOR": "cuda_malloc_async",
        "TF_XLA_FLAGS": "--tf_xla_auto_jit=2",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    }
    others = {
        "CUDA_VISIBLE_DEVICES": "GPU-1",
        "HOME": "/home/x",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": "160",
        # Terraform's, which begin as TensorFlow's do; and anybody's secret.
        "TF_CLI_CONFIG_FILE": "/home/x/.terraformrc",
        "TF_TOKEN_app_example_com": "hidden",
        "TF_VAR_db_password": "hidden",
        "KERAS_API_KEY": "hidden",
        "NVIDIA_API_KEY": "hidden",
        "TF_SERVICE_CREDENTIALS": "hidden",
    }
    assert relevant_variables({**others, **deciding}) == deciding
