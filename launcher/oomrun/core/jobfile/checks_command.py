"""What a job with a ``command`` says beside it: templates, batch, keys of no effect."""

from collections.abc import Iterator

from oomrun.core import command, levers
from oomrun.core.jobfile.nodes import shorten
from oomrun.core.jobfile.reading import Reading, nearest
from oomrun.core.remote import is_remote

# What only a worker of ours does; with a program that writes its own checkpoints the
# keys would be ignored in silence.
_WORKER_ONLY = (
    "recovery.in_process", "recovery.hang_after", "checkpoint.every", "checkpoint.keep",
    "checkpoint.timeout",
)  # fmt: skip


def check(reading: Reading) -> None:
    """Report what is wrong in a job with a ``command``; nothing in other jobs."""
    if "command" not in reading.places:
        return
    used = [path for path in _template_paths(reading) if _template(reading, path)]
    _whole_batch(reading, used)
    _divides(reading)
    for path in _WORKER_ONLY:
        if path in reading.keys:
            wrong = "a command does this by itself, so the key would have no effect"
            problem = reading.keys[path].problem(path, wrong, "remove it")
            reading.problems.append(problem)
    folder = reading.values.get("checkpoint.dir")
    if isinstance(folder, str) and is_remote(folder):
        wrong = "a command keeps its checkpoints by itself, in a folder of this machine"
        reading.report("checkpoint.dir", wrong, "name a folder, or leave it out")
    for key, hint in (("levers", "use [micro_batch]"), ("pulled", "remove it")):
        listed = reading.values.get(f"recovery.{key}")
        for index, lever in enumerate(listed if isinstance(listed, tuple) else ()):
            if lever != levers.MICRO_BATCH:
                wrong = f"{lever} is not to be had of a command"
                reading.report(f"recovery.{key}[{index}]", wrong, hint)


def _template_paths(reading: Reading) -> Iterator[str]:
    for path in reading.templates:
        if path.startswith(("command[", "env.")):
            yield path


def _template(reading: Reading, path: str) -> bool:
    """Whether one text has names in it; reports those that there are not."""
    text = reading.templates[path]
    for mistake in command.mistakes(text):
        *most, last = (f"{{{name}}}" for name in command.NAMES)
        wrong = f"expected {', '.join(most)} or {last}, got {shorten(mistake)}"
        near = nearest(mistake.strip("{}"), command.NAMES)
        hint = near or "write {{ and }} for braces that are meant as text"
        reading.report(path, wrong, hint)
    return any(name in command.NAMES for name in command.names(text))


def _whole_batch(reading: Reading, used: list[str]) -> None:
    """The program's own batch cannot be seen, so it has to be said."""
    if reading.values.get("batch.global") is not None:
        return
    if "batch.global" in reading.places and "batch.global" not in reading.values:
        return  # it is wrong in itself, and that was said
    micro = reading.values.get("batch.micro", reading.values.get("batch.micro.max"))
    asked = ["batch.micro"] if isinstance(micro, int) else []
    if "batch.micro.max" in reading.places:
        asked = ["batch.micro.max"]
    for path in (used + asked)[:1]:
        wrong = "a command that takes micro-batches needs batch.global"
        reading.report(path, wrong, "such as batch: {global: 256}")


def _divides(reading: Reading) -> None:
    micro = reading.values.get("batch.micro")
    whole = reading.values.get("batch.global")
    if not isinstance(micro, int) or not isinstance(whole, int) or whole % micro == 0:
        return
    if micro < whole:
        below, above = command.divisors_around(whole, micro)
        wrong = f"expected a divisor of batch.global ({whole}), got {micro}"
        reading.report("batch.micro", wrong, f"such as {below} or {above}")
