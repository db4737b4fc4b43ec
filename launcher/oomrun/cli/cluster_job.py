"""A job file with the files that go to a cluster with it.

Covers: reading them, and what is wrong with a file that is good for a machine but not
for a cluster. Does not cover: the objects that are made of it (``oomrun.kubernetes``).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomrun import __version__
from oomrun.cli.jobfile_commands import read_text
from oomrun.core import jobfile
from oomrun.core.errors import Problem, SpecError
from oomrun.core.jobfile import checks_kubernetes
from oomrun.core.jobfile.values_kubernetes import FILE
from oomrun.core.spec import Command, JobSpec, Script
from oomrun.core.units import format_bytes
from oomrun.kubernetes.submission import CONFIG_LIMIT_BYTES, Shipped, Submission

if TYPE_CHECKING:
    pass

__all__ = ["OfThePod", "describe_need", "read_submission"]


class OfThePod(Mapping[str, str]):
    """The environment in a pod, which is not known here: each name is left as it is."""

    def __getitem__(self, name: str) -> str:
        return f"${{{name}}}"

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def read_submission(args: argparse.Namespace) -> Submission:
    """The job that the command line names, ready for a cluster.

    Raises:
        SpecError: something is wrong, with all that can be told at once.
    """
    text = read_text(args.job)
    examined = jobfile.examine(
        text, filename=args.job, overrides=args.set, environment=OfThePod()
    )
    problems = [*examined.problems]
    problems += checks_kubernetes.check_for_cluster(examined.values, examined.places)
    if "kubernetes" not in examined.places and "" in examined.places:
        wrong = "expected the key kubernetes"
        hint = "such as kubernetes: {image: registry/team/train:1}"
        problems.append(examined.places[""].problem("", wrong, hint))
    spec = examined.spec
    if problems or spec is None or spec.kubernetes is None:
        raise SpecError(problems)
    found = _Files(Path(args.job).parent, examined, args.job)
    files = found.of(spec)
    submission = Submission(
        spec=spec,
        section=spec.kubernetes,
        job_text=text.encode(),
        files=files,
        overrides=tuple(args.set),
        **_measured(args, text, spec),
        version=__version__,
    )
    found.check_size(submission)
    if found.problems:
        raise SpecError(found.problems)
    return submission


class _Files:
    """Reads the files of a job, and keeps what is wrong with them."""

    def __init__(
        self, folder: Path, examined: jobfile.Examination, job_file: str
    ) -> None:
        self.folder = folder
        self.examined = examined
        self.job_file = job_file
        self.problems: list[Problem] = []

    def of(self, spec: JobSpec) -> tuple[Shipped, ...]:
        """The program, where it is not in the image, and ``kubernetes.files``."""
        found: list[Shipped | None] = []
        match spec.program:
            case Script(path=path) if not os.path.isabs(path):
                found.append(self._read(path, "script"))
            case Command(argv=(first, *_)) if "/" in first and first[0] != "/":
                path = os.path.normpath(first)
                found.append(self._read(path, "command[0]", executable=True))
        listed = spec.kubernetes.files if spec.kubernetes else ()
        for index, path in enumerate(listed):
            found.append(self._read(path, f"kubernetes.files[{index}]"))
        return tuple(file for file in found if file is not None)

    def check_size(self, submission: Submission) -> None:
        """Report it where the files are too large for a ConfigMap."""
        if submission.size_bytes <= CONFIG_LIMIT_BYTES:
            return
        largest = max(submission.all_files, key=lambda file: len(file.content))
        self._report(
            "kubernetes",
            f"the files that go along have {format_bytes(submission.size_bytes)}, and "
            f"a ConfigMap takes {format_bytes(CONFIG_LIMIT_BYTES)}",
            f"{largest.path} has {format_bytes(len(largest.content))}: put it into the "
            "image or on a volume",
        )

    def _read(self, path: str, key: str, *, executable: bool = False) -> Shipped | None:
        try:
            FILE.check(path)
        except ValueError:
            hint = "or an absolute path, of a file that is in the image"
            self._report(key, f"expected {FILE.words}, got {path}", hint)
            return None
        try:
            content = (self.folder / path).read_bytes()
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            hint = "paths are relative to the job file"
            self._report(key, f"cannot read {self.folder / path}: {why}", hint)
            return None
        return Shipped(path=path, content=content, executable=executable)

    def _report(self, path: str, message: str, hint: str) -> None:
        place = self.examined.places.get(path, self.examined.places[""])
        self.problems.append(place.problem(path, message, hint))


def _measured(args: argparse.Namespace, text: str, spec: JobSpec) -> dict[str, Any]:
    """What a run of the very same job here has found out, if that is asked for."""
    section = spec.kubernetes
    if section is None:
        return {}
    of_gpu = bool(section.gpus) and section.gpu_memory == "auto"
    if not of_gpu and section.grace_s != "auto":
        return {}
    from oomrun.cli.plan_command import known_state
    from oomrun.cli.run_command import run_dir_of
    from oomrun.kubernetes.gpu_memory import gpu_need

    # A run here had the variables of here.
    here = jobfile.examine(
        text, filename=args.job, overrides=args.set, environment=os.environ
    ).spec
    if here is None:
        return {}
    state = known_state(here, run_dir_of(args, here))
    found: dict[str, Any] = {}
    if section.grace_s == "auto":
        found["checkpoint_s"] = state.tally.checkpoint_times.longest_s
    if of_gpu and state.composition is not None:
        found["gpu_need"] = gpu_need(spec, state.composition)
    return found


def describe_need(submission: Submission) -> Sequence[str]:
    """What is worth knowing before the job is sent, for stderr."""
    section, need = submission.section, submission.gpu_need
    notes = []
    if section.volume is None:
        notes.append(
            "there is no kubernetes.volume: a pod that is replaced begins from nothing"
        )
    metrics = submission.spec.metrics
    if section.pod_monitor and (metrics.token or metrics.basic_auth or metrics.tls):
        notes.append(
            "the PodMonitor knows neither the metrics' token or password nor who "
            "signed their certificate: add its authorization, basicAuth or tlsConfig"
        )
    if need is not None:
        whole = format_bytes(need.whole_bytes) if need.whole_bytes else "no GPU"
        notes.append(
            f"GPUs with {format_bytes(need.least_bytes)} are asked for, by what a run "
            f"here has measured; the whole batch at once takes {whole}"
        )
    elif section.gpus and section.gpu_memory == "auto":
        notes.append(
            "nothing is known of the memory that the job needs, so any GPU is taken: "
            "give kubernetes.gpu_memory, or try a run here first"
        )
    return notes
