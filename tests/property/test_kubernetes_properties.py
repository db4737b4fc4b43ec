"""Whatever a valid job file says, its objects are valid, and say nothing else."""

from __future__ import annotations

import json
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from oomrun.core import jobfile
from oomrun.core.spec import JobSpec
from oomrun.kubernetes import writing
from oomrun.kubernetes.lint import lint
from oomrun.kubernetes.manifests import manifests
from oomrun.kubernetes.submission import Shipped, Submission

KINDS = {
    "ServiceAccount", "ConfigMap", "PersistentVolumeClaim", "NetworkPolicy", "Job",
    "PodMonitor", "Service", "JobSet", "MPIJob", "TrainJob", "TrainingRuntime",
}  # fmt: skip
words = st.text(
    st.sampled_from("ab0-._/:=Z \n\"'{}$(%é"), max_size=8
) | st.sampled_from(
    ["y", "1e3", "0o7", "null", "a: b", "$(HOME)", "---", "nvidia.com/gpu", "a.b/c"]
)
pairs = st.dictionaries(words, words, max_size=2)
sections = st.fixed_dictionaries(
    {"image": st.just("x")},
    optional={
        **dict.fromkeys(("namespace", "queue", "service_account"), words),
        **dict.fromkeys(("labels", "annotations", "node_selector", "mounts"), pairs),
        **dict.fromkeys(
            ("secrets", "files", "tolerations"), st.lists(words, max_size=2)
        ),
        "volume": st.fixed_dictionaries({"claim": words}) | st.just({"size": "1GiB"}),
        "cpu": st.integers(1, 9) | words,
        "pod_monitor": pairs,
        "mode": st.sampled_from(["job", "jobset", "mpijob", "trainjob"]),
        "pods": st.integers(1, 3),
        "gpus": st.integers(0, 3),
    },
)


def loaded(section: dict[str, Any]) -> JobSpec:
    """The job with all of the section that is good."""
    while True:
        document = {
            "name": "digits",
            "script": "t.py",
            "strategy": "horovod",
            "kubernetes": section,
        }
        text = json.dumps(document)
        found = jobfile.examine(text, filename="job.yaml", environment={})
        if found.spec is not None:
            return found.spec
        wrong = {problem.path.split(".")[1].split("[")[0] for problem in found.problems}
        assert wrong & set(section)
        section = {key: value for key, value in section.items() if key not in wrong}


@settings(max_examples=50, deadline=None)
@given(sections, st.text(max_size=20), st.binary(max_size=9))
def test_what_is_valid_renders_to_valid_objects(
    section: dict[str, Any], override: str, script: bytes
) -> None:
    spec = loaded(section)
    assert spec.kubernetes is not None
    made = manifests(
        Submission(
            spec=spec,
            section=spec.kubernetes,
            job_text=b"x",
            files=(Shipped(path="t.py", content=script),),
            overrides=(override,),
            version="1",
        )
    )
    assert {each["kind"] for each in made} <= KINDS
    assert not any(lint(made, (1, 29)))
    assert list(yaml.safe_load_all(writing.documents(made))) == made
