"""Whatever a valid job file says, its objects are valid, and say nothing else."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from oomrun.core import jobfile
from oomrun.core.kubernetes_spec import Mode
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


#: For each place in a job file where somebody's own words go: the words of a harmless
#: job, which stand for nothing else in what is rendered.
HARMLESS = {
    "name": "ph-name", "image": "ph.image/x", "namespace": "ph-space",
    "queue": "ph-queue", "service_account": "ph-account",
    "priority_class": "ph-priority", "claim": "ph-claim", "secret": "ph-secret",
    "pull_secret": "ph-pull", "label key": "ph.label/key", "label": "ph-label",
    "annotation key": "ph.annotation/key", "annotation": "ph-annotation",
    "selector key": "ph.selector/key", "selector": "ph-selector",
    "monitor key": "ph.monitor/key", "monitor": "ph-monitor",
    "mount": "/ph-mount", "mounted": "ph-mounted", "taint": "ph.taint/key",
    "env name": "PH_ENV", "env": "ph-env", "argument": "ph-argument",
}  # fmt: skip
NASTY = ["y", "no", "1e3", "0o7", "0x1F", "1_0", "1:30", "null", "~", ".inf", "=", "<<",
     "a: b", "- a", "#x", "a #b", "&a", "*a", "!!python/object:os.system x", "%x", "@",
     "`id`", "$(id)", "$(HOME)", "${HOME}", "$$", "{{ .Values.x }}", "{% x %}",
     "---", "...", "\n---\nkind: Secret\n", "\nkind: Pod", '"', "'", '"}\n', "\\\\",
     "a\x00b", "\x07", "\x85", "\u2028", "\ufeff", "\ud800", "\U0001f600", " ", "a ",
     " a", "\t", "\r\n", "../..", "/etc", "a/../b", "a" * 64, "A", "\xe9", "-a", "a-",
     "a.b", "a_b", "ab", "a/b", "a:b", "a=b:NoSchedule", "", "oomrun/digest",
     "app.kubernetes.io/name", "nvidia.com/gpu", "/ab/c", "ab.c/d",
]  # fmt: skip
hostile = st.dictionaries(
    st.sampled_from(sorted(HARMLESS)),
    st.sampled_from(NASTY) | st.text(max_size=12),
    min_size=1,
    max_size=3,
)  # fmt: skip


# The same in C, where PyYAML was built with it.
READER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def document_of(words: dict[str, str], mode: str) -> dict[str, Any]:
    """A job with these words, each at its place."""
    return {
        "name": words["name"],
        "script": "t.py",
        "strategy": "horovod",
        "args": [words["argument"]],
        "env": {words["env name"]: words["env"]},
        "kubernetes": {
            "mode": mode, "pods": 2, "gpus": 1, "gpu_memory": "any",
            "image": words["image"],
            "namespace": words["namespace"],
            "queue": words["queue"],
            "service_account": words["service_account"],
            "priority_class": words["priority_class"],
            "volume": {"claim": words["claim"]},
            "secrets": [words["secret"]],
            "pull_secrets": [words["pull_secret"]],
            "labels": {words["label key"]: words["label"]},
            "annotations": {words["annotation key"]: words["annotation"]},
            "node_selector": {words["selector key"]: words["selector"]},
            "pod_monitor": {words["monitor key"]: words["monitor"]},
            "mounts": {words["mount"]: words["mounted"]},
            "tolerations": [words["taint"]],
        },
    }  # fmt: skip


def rendered_of(words: dict[str, str], mode: str) -> list[dict[str, Any]] | None:
    """What is rendered, read back from its YAML; None where the job is refused."""
    # JSON has no escape for what is beyond 16 bits, as YAML has.
    text = json.dumps(document_of(words, mode))
    text = text.replace("\\ud83d\\ude00", "\\U0001f600")
    found = jobfile.examine(text, filename="job.yaml", environment={})
    if found.spec is None:
        assert found.problems
        return None
    assert found.spec.kubernetes is not None
    made = manifests(
        Submission(
            spec=found.spec, section=found.spec.kubernetes, job_text=b"x", version="1",
            files=(Shipped(path="t.py", content=b"y"),),
            overrides=(f"args=[{words['argument']}]",),
        )
    )  # fmt: skip
    if any(lint(made, (1, 29))):
        return None
    return list(yaml.load_all(writing.documents(made), READER))


def with_words(value: Any, words: dict[str, str]) -> Any:
    """The harmless objects with other words in the places of theirs."""
    if isinstance(value, dict):
        return {with_words(k, words): with_words(v, words) for k, v in value.items()}
    if isinstance(value, list):
        return [with_words(each, words) for each in value]
    if not isinstance(value, str):
        return value
    for place, harmless in HARMLESS.items():
        # In a command a dollar has to be doubled, or the kubelet takes it for its own.
        in_command = place == "argument"
        word = words[place].replace("$", "$$") if in_command else words[place]
        if harmless in value:
            return value.replace(harmless, word)
    return value


def expected(plain: list[dict[str, Any]], words: dict[str, str]) -> Any:
    """The harmless objects with these words; of a taint its parts."""
    taint = words["taint"]
    found = with_words(plain, {**words, "taint": taint.partition(":")[0]})
    if "=" in taint or ":" in taint:
        wanted = {"key": taint.partition("=")[0].partition(":")[0]}
        if "=" in taint:
            wanted |= {"operator": "Equal"}
            wanted["value"] = taint.partition("=")[2].partition(":")[0]
        else:
            wanted |= {"operator": "Exists"}
        if ":" in taint:
            wanted["effect"] = taint.partition(":")[2]
        for pod in pods_of(found):
            pod["tolerations"][-1] = wanted
    return found


def pods_of(value: Any) -> Iterator[dict[str, Any]]:
    """Each pod's ``spec``, wherever it is."""
    if isinstance(value, dict):
        if "tolerations" in value:
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from pods_of(each)


@pytest.fixture(scope="module")
def plain() -> dict[str, list[dict[str, Any]]]:
    """The harmless job in each mode; it is not refused."""
    found = {mode: rendered_of(HARMLESS, mode) for mode in get_args(Mode)}
    return {mode: objects for mode, objects in found.items() if objects}


@pytest.mark.parametrize("place", HARMLESS)
def test_each_hostile_word_is_refused_or_stays_in_its_place(
    plain: dict[str, list[dict[str, Any]]], place: str
) -> None:
    modes, accepted = itertools.cycle(get_args(Mode)), set()
    for word, mode in zip(NASTY, modes, strict=False):
        words = {**HARMLESS, place: word}
        found = rendered_of(words, mode)
        if found is not None:
            accepted.add(word)
            assert found == expected(plain[mode], words), word
    free = place in ("annotation", "env", "argument")
    # No text, and a variable that there is not.
    refused = {"a\x00b", "\ud800", "${HOME}"}
    assert not free or accepted >= set(NASTY) - refused
    assert accepted & {"ab", "/ab/c"}, "nothing is let through"


@settings(max_examples=50, deadline=None)
@given(hostile, st.sampled_from(get_args(Mode)))
def test_hostile_words_are_refused_or_stay_in_their_places(
    plain: dict[str, list[dict[str, Any]]], words: dict[str, str], mode: str
) -> None:
    """No further object, key or value: only those words, exactly, where they belong."""
    everything = {**HARMLESS, **words}
    found = rendered_of(everything, mode)
    if found is not None:
        assert found == expected(plain[mode], everything)


def test_each_place_shows_or_is_the_job_file_s_alone(
    plain: dict[str, list[dict[str, Any]]],
) -> None:
    """The property above is about something: no place is lost on the way."""
    assert set(plain) == set(get_args(Mode))
    for mode, objects in plain.items():
        text = json.dumps(objects)
        missing = {place for place, word in HARMLESS.items() if word not in text}
        # Those go along in the job file, as it is.
        assert missing == {"env name", "env"}, mode
