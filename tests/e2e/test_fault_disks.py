"""Disks that are full or read-only, and damaged checkpoints, through the real command.

Cells of the fault matrix (``matrix``). What the kernel says is real: a small tmpfs that
the script fills, ``/dev/full``, permissions, a limit on the size of files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import disks
import jobs
import matrix
import pytest

from oomrun.core import events as ev

# Before the eighth step the disk named by FAULT becomes full.
FILL = """
if step == 7 and first_time("filled"):
    with open(os.environ["FAULT"], "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
"""
# The journal, checkpoints and logs each have a disk of their own.
APART = matrix.JOB.replace("{every: 2 steps}", "{every: 2 steps, dir: saved}")


@pytest.mark.parametrize("cell", matrix.cells(["disk-full-checkpoint"]))
def test_a_full_disk_for_checkpoints(tmp_path: Path, cell: str) -> None:
    job = jobs.make(tmp_path / "job", matrix.script(FILL), APART)
    with disks.disk(job.folder / "saved", "256k") as disk:
        assert _run(job, disk) == 0, job.everything()
        good = disk.seen(disk.folder).glob("step-*")
        assert {path.name[5:15] for path in good} == {f"{n:010d}" for n in (2, 4, 6)}
        assert not list(disk.seen(disk.folder).glob(".unfinished-*"))
    matrix.check_complete(job)
    failed = job.events(ev.CheckpointFailed)
    assert {event.step for event in failed} >= {8, 18}
    assert all("No space left on device" in event.reason for event in failed)
    # Loud, and counted.
    assert "could not be written, training goes on" in job.said()
    assert any("No space left" in note for note in job.status()["notes"])


# No file may grow beyond 1 KiB for some steps: neither checkpoints nor the log.
SMALL_FILES = """
import resource
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
if step in (7, 11):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024 if step == 7 else hard, hard))
"""


@pytest.mark.parametrize("cell", matrix.cells(["disk-full-checkpoint-limit"]))
def test_files_may_not_grow_for_a_while(tmp_path: Path, cell: str) -> None:
    job = jobs.make(tmp_path / "job", matrix.script(SMALL_FILES), matrix.JOB)
    assert job.run(env={"FAULT": "yes"}) == 0, job.everything()
    matrix.check_complete(job)
    failed = job.events(ev.CheckpointFailed)
    assert {event.step for event in failed} & {8, 10}
    assert all("File too large" in event.reason for event in failed)
    # What comes later is written again.
    assert job.events(ev.CheckpointSaved)[-1].reason == "fit completed"
    assert "the end of the script" in job.log(1)


@pytest.mark.parametrize("cell", matrix.cells(["disk-full-journal"]))
def test_a_full_disk_for_the_journal(tmp_path: Path, cell: str) -> None:
    job = jobs.make(tmp_path / "job", matrix.script(FILL), APART)
    runs = job.run_dir.path
    with disks.disk(runs, "256k") as disk:
        assert _run(job, disk) == 4
        said = "journal.jsonl: cannot be written: no space left on device"
        assert said in job.said()
        assert "the same command goes on" in job.said()
        assert "Traceback" not in job.said()
        (disk.seen(runs) / "filler").unlink()
        assert _run(job, disk) == 0, job.said()
        shutil.copytree(disk.seen(runs), tmp_path / "kept")
    # What was in the namespace is gone with it.
    shutil.copytree(tmp_path / "kept", runs, dirs_exist_ok=True)
    matrix.check_complete(job)
    (restored,) = job.events(ev.Restored)
    assert restored.step in (6, 8)


@pytest.mark.parametrize("cell", matrix.cells(["disk-full-log"]))
def test_a_full_disk_for_the_log(tmp_path: Path, cell: str) -> None:
    job = jobs.make(tmp_path / "job", matrix.script(FILL), APART)
    job.run_dir.path.mkdir(parents=True)
    job.run_dir.journal.touch()  # so that it is a run's folder
    with disks.disk(job.run_dir.attempts, "256k") as disk:
        # The last page of the log is not full; Keras's lines do not fill it.
        (job.folder / "train.py").write_text(
            matrix.script(FILL).replace('print("the', 'print("x" * 10000, "the')
        )
        assert _run(job, disk) == 0, job.everything()
        log = disk.seen(job.run_dir.attempt(1).log()).read_text()
    assert "Epoch 1/3" in log
    assert "the end of the script" not in log
    _says_that_the_log_is_lost(job)


@pytest.mark.parametrize("cell", matrix.cells(["disk-full-log-from-the-start"]))
def test_a_log_that_takes_nothing(tmp_path: Path, cell: str) -> None:
    job = jobs.make(tmp_path / "job", matrix.script("pass"), matrix.JOB)
    log = job.run_dir.attempt(1).log()
    log.parent.mkdir(parents=True)
    log.symlink_to("/dev/full")
    job.run_dir.journal.touch()
    assert job.run() == 0, job.said()
    _says_that_the_log_is_lost(job)


def _says_that_the_log_is_lost(job: jobs.Job) -> None:
    matrix.check_complete(job)
    (note,) = [note for note in job.events(ev.Noted) if note.code == "log-lost"]
    assert "No space left on device" in note.text
    assert job.said().count("the worker's log cannot be written") == 1


def _run(job: jobs.Job, disk: disks.Disk) -> int:
    """The command, on a disk that gets full; again, and nothing is filled."""
    inside = disk.inside(job.folder)
    process = job.start(env={"FAULT": str(disk.folder / "filler")}, inside=inside)
    return process.wait(300)


# --- read-only ----------------------------------------------------------------------

# Before the eighth step nothing can be made in the run's folders any more.
READ_ONLY = """
if step == 7 and first_time("read-only"):
    for folder, _, _ in os.walk("runs"):
        os.chmod(folder, 0o555)
    if os.environ["FAULT"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("cell", matrix.cells(["read-only-from-the-start"]))
def test_a_read_only_folder_from_the_start(tmp_path: Path, cell: str) -> None:
    job = jobs.make(tmp_path / "job", matrix.script("pass"), matrix.JOB)
    runs = job.run_dir.path.parent
    runs.mkdir()
    runs.chmod(0o555)
    assert _held(job) == 4
    assert "runs/small: cannot be made: permission denied" in job.said()
    runs.chmod(0o755)
    job.run_dir.path.mkdir()
    job.run_dir.path.chmod(0o555)
    assert _held(job) == 4
    assert "runs/small/lock: cannot be opened: permission denied" in job.said()
    assert "Traceback" not in job.said()
    assert not list(job.folder.glob("start-*")), "the script was started"


@pytest.mark.parametrize("cell", matrix.cells(["read-only-midway"]))
def test_a_folder_becomes_read_only(tmp_path: Path, cell: str) -> None:
    job = jobs.make(tmp_path / "job", matrix.script(READ_ONLY), matrix.JOB)
    assert _held(job, fault="stay") == 0, job.everything()
    matrix.check_complete(job)
    failed = job.events(ev.CheckpointFailed)
    assert {event.step for event in failed} >= {8, 18}
    assert all("Permission denied" in event.reason for event in failed)
    assert "could not be written, training goes on" in job.said()


@pytest.mark.parametrize("cell", matrix.cells(["read-only-and-killed"]))
def test_a_worker_is_killed_in_a_read_only_folder(tmp_path: Path, cell: str) -> None:
    job = jobs.make(tmp_path / "job", matrix.script(READ_ONLY), matrix.JOB)
    assert _held(job, fault="kill") == 4
    said = "runs/small/attempts/0002/plan.json: cannot be written: permission denied"
    assert said in job.said()
    assert "Traceback" not in job.said()
    for folder, _, _ in os.walk(job.run_dir.path):
        os.chmod(folder, 0o755)
    assert _held(job) == 0, job.everything()
    matrix.check_complete(job)


def _held(job: jobs.Job, fault: str = "") -> int:
    process = job.start(env={"FAULT": fault}, inside=disks.HELD_BY_PERMISSIONS)
    return process.wait(300)


# --- damaged checkpoints ------------------------------------------------------------

KILLED = """
if step == 9:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended in failure, with whole checkpoints of steps 4, 6 and 8."""
    job = jobs.make(
        tmp_path_factory.mktemp("failed") / "job",
        matrix.script(KILLED),
        matrix.JOB + "recovery: {max_restarts: {crash: 0}}\n",
    )
    assert job.run(env={"FAULT": "yes"}) == 1, job.everything()
    return job.folder


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut": _cut,
    "flipped": _flip,
    "deleted": Path.unlink,
}


@pytest.mark.parametrize("cell", matrix.beginning("damaged-"))
def test_a_damaged_checkpoint_is_never_used(
    tmp_path: Path, failed: Path, cell: str
) -> None:
    shutil.copytree(failed, tmp_path / "job")
    job = jobs.Job(tmp_path / "job")
    *_, before, newest = sorted(job.run_dir.checkpoints.glob("step-*"))
    damage, file = matrix.DAMAGED[cell]
    DAMAGES[damage](newest / file)
    assert job.run() == 0, job.everything()
    matrix.check_complete(job)
    (rejected,) = job.events(ev.CheckpointRejected)
    assert rejected.name == newest.name
    assert newest.name in job.said()
    (restored,) = job.events(ev.Restored)
    assert restored.name == before.name


@pytest.mark.slow
def test_a_damaged_checkpoint_in_a_read_only_folder(
    tmp_path: Path, failed: Path
) -> None:
    """It cannot be deleted, and is not used all the same."""
    shutil.copytree(failed, tmp_path / "job")
    job = jobs.Job(tmp_path / "job")
    *_, before, newest = sorted(job.run_dir.checkpoints.glob("step-*"))
    _flip(newest / "arrays.bin")
    job.run_dir.checkpoints.chmod(0o555)
    assert _held(job) == 0, job.everything()
    matrix.check_complete(job)
    assert {event.name for event in job.events(ev.CheckpointRejected)} == {newest.name}
    assert job.events(ev.Restored)[0].name == before.name
    assert newest.exists()
