"""Checkpoints at URLs, through TensorFlow's own file layer: ``ram://`` and ``file://``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from oomrun import checkpoints
from oomrun import fetching as supervised
from oomrun.core import events as ev
from oomrun.core import levers, words
from oomrun.core import remote as urls
from oomrun.core.errors import CheckpointError, SpecError
from oomrun.core.jobfile import load
from oomrun.core.jobfile.checks_kubernetes import check_for_cluster
from oomrun.core.launch import Launch
from oomrun.core.plan import Plan
from oomrun.core.state import JobState
from oomrun.fetching import Fetched
from oomrun.stops import Stops
from oomrun.worker import fetching
from oomrun.worker.remote import Remote, Unreachable, latest
from oomrun.worker.uploading import Uploads

RUN = {"run": "r1", "seed": 7, "job": {"args": "x"}, "levers": []}


@pytest.fixture(params=["ram", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "ram":
        # It lives as long as this process.
        return f"ram://{tmp_path.name}-{time.monotonic_ns()}/job"
    return f"file://{tmp_path}/there"


def write(folder: Path, name: str, content: bytes = b"abc") -> Path:
    checkpoints.write(folder, name, {"arrays.bin": [content], "state.json": [b"{}"]})
    return folder / name


def put(url: str, *names: str) -> None:
    for name in names:
        with tf.io.gfile.GFile(urls.join(url, name), "wb") as file:
            file.write(b"other")


def test_there_and_back(url: str, tmp_path: Path) -> None:
    here, again = tmp_path / "here", tmp_path / "again"
    remote = Remote(url, "r1")
    assert remote.names("step") == []
    for step in (2, 10):
        size = remote.upload(write(here, f"step-{step:010d}-0001", b"x" * step))
        assert size == step + 2
    assert remote.names("step") == ["step-0000000010-0001", "step-0000000002-0001"]
    assert remote.names("fit") == []
    assert remote.download("step-0000000010-0001", again) == 12
    found = checkpoints.read(again / "step-0000000010-0001")
    assert found == {"arrays.bin": b"x" * 10, "state.json": b"{}"}
    remote.discard("step-0000000010-0001")
    assert remote.names("step") == ["step-0000000002-0001"]
    # Another run sees nothing of it.
    assert Remote(url, "r2").names("step") == []


def test_what_has_no_manifest_is_none(url: str, tmp_path: Path) -> None:
    """As an upload leaves it that was torn at any moment."""
    remote = Remote(url, "r1")
    remote.upload(write(tmp_path, "step-1-1"))
    tf.io.gfile.remove(urls.join(url, "r1", "step-1-1", "MANIFEST.json"))
    assert remote.names("step") == []
    remote.upload(tmp_path / "step-1-1")
    assert remote.names("step") == ["step-1-1"]


def test_the_manifest_is_written_last_and_deleted_first(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real, remove = tf.io.gfile.GFile, tf.io.gfile.remove

    def opened(path: str, mode: str) -> Any:
        if mode == "wb":
            seen.append(f"write {path.rpartition('/')[2]}")
        return real(path, mode)

    def removed(path: str) -> None:
        seen.append(f"remove {path.rpartition('/')[2]}")
        remove(path)

    monkeypatch.setattr(tf.io.gfile, "GFile", opened)
    monkeypatch.setattr(tf.io.gfile, "remove", removed)
    remote = Remote(url, "r1")
    for _ in range(2):
        remote.upload(write(tmp_path, "fit-0001"))
    once = ["write arrays.bin", "write state.json", "write MANIFEST.json"]
    assert seen == [*once, "remove MANIFEST.json", *once]


@pytest.mark.parametrize("file", ["arrays.bin", "MANIFEST.json"])
def test_what_was_altered_there_is_not_taken(
    url: str, file: str, tmp_path: Path
) -> None:
    remote = Remote(url, "r1")
    remote.upload(write(tmp_path / "here", "step-1-1"))
    put(urls.join(url, "r1", "step-1-1"), file)
    with pytest.raises(CheckpointError):
        remote.download("step-1-1", tmp_path / "again")
    assert checkpoints.names(tmp_path / "again", "step") == []
    assert not list((tmp_path / "again").glob("*"))


def test_what_was_altered_here_is_not_copied(url: str, tmp_path: Path) -> None:
    path = write(tmp_path, "step-1-1")
    (path / "arrays.bin").write_bytes(b"abd")
    remote = Remote(url, "r1")
    with pytest.raises(CheckpointError, match="was altered"):
        remote.upload(path)
    assert remote.names("step") == []


@pytest.mark.parametrize("name", ["../../evil", "a/b", "..", ""])
def test_a_manifest_names_files_of_its_own_folder_only(name: str) -> None:
    content = json.dumps({"files": {name: {"size": 0, "sha256": ""}}}).encode()
    with pytest.raises(CheckpointError):
        checkpoints.entries_of("step-1-1", content)


def test_which_run_was_there_last(url: str) -> None:
    assert latest(url) is None
    Remote(url, "r1").claim(RUN)
    assert latest(url) == RUN
    put(url, "LATEST.json")
    with pytest.raises(CheckpointError, match="does not say"):
        latest(url)


def test_a_file_system_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="knows no file system s3://"):
        Remote("s3://bucket/job", "r1")
    (tmp_path / "file").write_text("")
    with pytest.raises(Unreachable):
        Remote(f"file://{tmp_path}/file/below", "r1").upload(write(tmp_path, "fit-1"))


# --- copying beside the training ----------------------------------------------------


def launch(url: str, folder: Path, keep: int = 2) -> Launch:
    plan = Plan(
        strategy="single", strategy_reason="", global_batch_size=None,
        memory_mode="growth", devices=(), levers=("optimizer_sgd",),
    )  # fmt: skip
    return Launch(
        attempt=1, rank=0, plan=plan, program_kind="script", program="t.py", args=(),
        run_id="r1", seed=7, checkpoint_dir=str(folder), checkpoint_every_steps=None,
        checkpoint_every_s=None, keep=keep, in_process=True, micro_batch_max=None,
        micro_batch_fixed=None, global_batch_size=None, last_step=0,
        checkpoint_url=url, job={"args": "x"},
    )  # fmt: skip


def test_copies_follow_and_are_kept_as_here(url: str, tmp_path: Path) -> None:
    told: list[Any] = []
    uploads = Uploads(launch(url, tmp_path), told.append)
    for name in ("step-1-1", "step-2-1", "fit-0001", "step-3-1"):
        write(tmp_path, name)
        uploads.put(name)
        assert uploads.wait(30)
    remote = Remote(url, "r1")
    assert remote.names("step") == ["step-3-1", "step-2-1"]
    assert remote.names("fit") == ["fit-0001"]
    assert [type(event) for event in told] == [ev.CheckpointMirrored] * 4
    assert latest(url) == {**RUN, "levers": ["optimizer_sgd"]}


def test_what_a_killed_process_had_not_copied_is(url: str, tmp_path: Path) -> None:
    for name in ("step-1-1", "step-2-1", "fit-0001"):
        write(tmp_path, name)
    assert Uploads(launch(url, tmp_path), lambda _: None).wait(30)
    remote = Remote(url, "r1")
    assert (remote.names("step"), remote.names("fit")) == (["step-2-1"], ["fit-0001"])
    told: list[Any] = []
    assert Uploads(launch(url, tmp_path), told.append).wait(30)
    assert not told


def test_a_failure_is_told_and_the_next_one_tries_again(tmp_path: Path) -> None:
    told: list[Any] = []
    (tmp_path / "there").write_text("in the way")
    here = tmp_path / "here"
    uploads = Uploads(launch(f"file://{tmp_path}/there", here), told.append)
    uploads.put(write(here, "step-1-1").name)
    assert uploads.wait(30)
    ((name, reason),) = [(event.name, event.reason) for event in told]
    assert name == "step-1-1"
    assert reason
    (tmp_path / "there").unlink()
    uploads.put(write(here, "step-2-1").name)
    assert uploads.wait(30)
    assert isinstance(told[-1], ev.CheckpointMirrored)
    # One that is not here any more was superseded.
    uploads.put("step-9-9")
    assert uploads.wait(30)
    assert len(told) == 2


def _a_name_in_no_encoding(here: Path, there: Path) -> None:
    write(here, "step-1-1")
    (there / "r1").mkdir(parents=True)
    Path(os.fsdecode(os.fsencode(there / "r1") + b"/\xff")).touch()


def _a_file_where_the_folder_was(here: Path, _: Path) -> None:
    here.write_text("in the way")


@pytest.mark.parametrize(
    "trouble", [_a_name_in_no_encoding, _a_file_where_the_folder_was]
)
def test_a_first_look_that_fails_is_told_and_copies_go_on(
    tmp_path: Path, trouble: Callable[[Path, Path], None]
) -> None:
    told: list[Any] = []
    here, there = tmp_path / "here", tmp_path / "there"
    trouble(here, there)
    uploads = Uploads(launch(f"file://{there}", here), told.append)
    assert uploads.wait(30)
    (first,) = told
    assert (type(first), first.name) == (ev.MirrorFailed, "")
    assert first.reason
    if here.is_file():
        here.unlink()
    uploads.put(write(here, "step-2-1").name)
    assert uploads.wait(30)
    assert (there / "r1" / "step-2-1" / "MANIFEST.json").exists()


# --- bringing them back -------------------------------------------------------------


@pytest.fixture
def there(url: str, tmp_path: Path) -> str:
    remote = Remote(url, "r1")
    for name in ("fit-0001", "step-1-1", "step-2-1"):
        remote.upload(write(tmp_path / "elsewhere", name))
    remote.claim(RUN)
    return url


def test_a_new_machine_gets_the_newest(there: str, tmp_path: Path) -> None:
    here = tmp_path / "here"
    found = fetching.fetch(there, here, "")
    assert found["names"] == ["fit-0001", "step-2-1"]
    assert {key: found[key] for key in RUN} == RUN
    assert checkpoints.names(here, "step") == ["step-2-1"]
    # And nothing twice.
    assert fetching.fetch(there, here, "r1")["names"] == []


def test_one_that_is_older_gets_what_is_newer(there: str, tmp_path: Path) -> None:
    write(tmp_path / "here", "step-1-1")
    assert fetching.fetch(there, tmp_path / "here", "r1")["names"] == [
        "fit-0001",
        "step-2-1",
    ]
    write(tmp_path / "newer", "step-3-1")
    assert fetching.fetch(there, tmp_path / "newer", "r1")["names"] == ["fit-0001"]


def test_another_run_is_left_alone(there: str, tmp_path: Path) -> None:
    assert fetching.fetch(there, tmp_path / "here", "r2") == {}
    assert fetching.fetch(there + "-none", tmp_path / "here", "") == {}


def test_one_that_is_torn_gives_way_to_the_one_before(
    there: str, tmp_path: Path
) -> None:
    put(urls.join(there, "r1", "step-2-1"), "arrays.bin")
    found = fetching.fetch(there, tmp_path / "here", "")
    assert found["names"] == ["fit-0001", "step-1-1"]
    assert list(found["rejected"]) == ["step-2-1"]


def test_what_a_journal_is_told(tmp_path: Path) -> None:
    found = Fetched(
        run_id="r1", seed=7, levers=("optimizer_sgd",), names=("step-2-1",),
        rejected=("step-3-1",), size_bytes=2**20, duration_s=2.0,
    )  # fmt: skip
    a_job: Any = SimpleNamespace(spec=loaded("gs://bucket/x"))
    (event,) = supervised.events(a_job, JobState(), found)
    state = JobState().after(event)
    assert levers.in_force(state) == ("optimizer_sgd",)
    told = words.describe(event, state)
    assert told is not None
    assert told.startswith("step-2-1 of gs://bucket/x was copied here: 1MiB in 2s")
    assert "not used: step-3-1" in told
    # A run that has been here all the time knows its levers itself.
    (event,) = supervised.events(a_job, replace(JobState(), attempt=3), found)
    assert JobState().after(event).levers == ()
    (event,) = supervised.events(a_job, JobState(), Fetched(failed="no"))
    assert words.level(event) == "warning"
    assert JobState().after(event).mirror_failures == 1
    assert supervised.events(a_job, JobState(), Fetched(run_id="r1", seed=7)) == []


def test_one_that_starts_over_looks_for_nothing(tmp_path: Path) -> None:
    stops = Stops()
    try:
        for spec, fresh in (("gs://bucket/x", True), ("runs/x", False)):
            a_job: Any = SimpleNamespace(spec=loaded(spec), fresh=fresh, measure=False)
            assert supervised.fetch(a_job, JobState(), stops) is None
    finally:
        stops.close()


# --- the job file -------------------------------------------------------------------

JOB = "name: digits\nscript: t.py\ncheckpoint:\n  dir: {}\n"


def loaded(folder: str, **environment: str) -> Any:
    return load(JOB.format(folder), filename="job.yaml", environment=environment)


@pytest.mark.parametrize(
    "folder",
    ["gs://bucket/{name}", "s3://b", "hdfs://host:9000/x", "hdfs:///x", "file:///x/y"],
)
def test_urls_that_tensorflow_can_know(folder: str) -> None:
    spec = loaded(f"'{folder}'")
    assert spec.checkpoint.url == folder.replace("{name}", "digits")
    assert loaded("runs/x").checkpoint.url is None


@pytest.mark.parametrize(
    ("folder", "hint"),
    [
        ("gcs://bucket/x", "TensorFlow knows no gcs://, but gs://, file://, s3://"),
        ("http://host/x", "TensorFlow knows no http://"),
        ("ram://x", "is gone with its process"),
        ("gs:///x", "name a bucket"),
        ("file://x", "three slashes"),
        ("s3://key:secret@bucket/x", "leave the password out"),
        ("az://account/x?sig=secret", "leave out what comes after"),
        ("gs://[x", "this is no URL"),
    ],
)
def test_urls_that_it_cannot(folder: str, hint: str) -> None:
    with pytest.raises(SpecError) as found:
        loaded(f'"{folder}"')
    (problem,) = found.value.problems
    assert (problem.line, problem.column, problem.path) == (4, 8, "checkpoint.dir")
    assert hint in str(problem)
    # A variable's value is checked as well.
    with pytest.raises(SpecError, match=r"checkpoint\.dir"):
        loaded("${BUCKET}", BUCKET=folder)


def test_a_command_keeps_its_own() -> None:
    text = "name: x\ncommand: [./x]\ncheckpoint: {dir: 'gs://b/x'}\n"
    with pytest.raises(SpecError, match="a command keeps its checkpoints by itself"):
        load(text, filename="job.yaml", environment={})


@pytest.mark.parametrize(
    ("folder", "good"),
    [("gs://b/x", True), ("/workspace/x", True), ("runs/x", False),
     ("file:///x", False)],
)  # fmt: skip
def test_on_a_cluster_a_bucket_needs_no_volume(folder: str, good: bool) -> None:
    class Anywhere:
        def problem(self, path: str, wrong: str, hint: str) -> str:
            return wrong

    places: Any = {"checkpoint.dir": Anywhere()}
    found = check_for_cluster({"checkpoint.dir": folder}, places)
    assert (not found) is good


def test_nothing_secret_is_told() -> None:
    text = "GET https://user:pw@host/o/x?X-Sig=abc&y=1: 403 (gs://b/x?token=1)"
    told = urls.without_secrets(text)
    assert told == "GET https://host/o/x?… 403 (gs://b/x?…)"
    assert urls.without_secrets("what? why") == "what? why"


def test_a_job_is_told_by_digests_alone() -> None:
    one = urls.digests({"env": {"TOKEN": "secret"}, "args": []})
    assert set(one) == {"env", "args"}
    assert "secret" not in json.dumps(one)
    assert one["env"] != urls.digests({"env": {"TOKEN": "other"}})["env"]
