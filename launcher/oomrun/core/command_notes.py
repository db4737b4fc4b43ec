"""What cannot be known of a program that is not ours, and what cannot be done.

Covers: the notes of a command's plan. Does not cover: what it is told (``command.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

from oomrun.core import command
from oomrun.core.spec import AUTO, Command, JobSpec
from oomrun.core.topology import Device

__all__ = ["about"]


def about(spec: JobSpec, program: Command, device: Device) -> Iterator[str]:
    """The notes of a plan.

    Args:
        spec: what the user wrote.
        program: it.
        device: what it will run on.
    """
    yield "a command's steps and peaks cannot be seen: no progress, no prediction"
    texts = [*program.argv, *(text for _, text in spec.env)]
    told = any(name == command.MICRO_BATCH for t in texts for name in command.names(t))
    if spec.batch.global_size is None:
        yield (
            "batch.global is not set, so the program is told no micro-batch, and "
            "running out of device memory ends the run"
        )
    elif not told:
        yield (
            "no {micro_batch} in command or env: the program must read "
            f"{command.NAMES[command.MICRO_BATCH]}, or a smaller one changes nothing"
        )
    if device.kind != "cpu" and spec.memory.limit != AUTO:
        yield "no limit can be set on a GPU for a command: it is planned with only"
    if device.kind == "cpu" and spec.memory.limit != AUTO:
        yield "the limit of a CPU device reaches programs with TensorFlow only"
