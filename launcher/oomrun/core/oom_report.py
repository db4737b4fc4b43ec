"""The report of one exhaustion: a text that a person can act on.

Covers: what was asked for and where, the memory there was, the sizes tried so far, what
oomrun did, what else would help, with numbers. All of it from events and the state that
they add up to. Does not cover: writing it to a file (``oomrun.oom_reports``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from oomrun.core import breakdown as breakdowns
from oomrun.core import events as ev
from oomrun.core import levers, log_facts, units, words
from oomrun.core import status as statuses
from oomrun.core.breakdown import Breakdown
from oomrun.core.log_facts import Facts
from oomrun.core.state import JobState
from oomrun.core.status import DeviceStatus

__all__ = ["is_history", "write"]

_HISTORY = (
    ev.AttemptStarted, ev.Probed, ev.MicroBatchPlanned, ev.MicroBatchChanged,
    ev.OomOccurred, ev.LeakFound, ev.DecisionMade, ev.OptimizerReplaced,
)  # fmt: skip
_MOST_HISTORY = 40


def is_history(event: ev.Event) -> bool:
    """Whether an event is one of those that a report lists."""
    return isinstance(event, _HISTORY)


def write(
    oom: ev.OomOccurred,
    state: JobState,
    history: Sequence[ev.Event],
    followed: Sequence[ev.Event] = (),
    *,
    when: str,
    log: str,
) -> str:
    """The report.

    Args:
        oom: the exhaustion.
        state: the run right after it.
        history: what came before it, see ``is_history``.
        followed: what was decided because of it; nothing yet.
        when: the moment, for a person.
        log: where the worker's output is.
    """
    device = next((d for d in statuses.devices(state) if d.id == oom.device), None)
    found = breakdowns.of_device(state.composition, device) if device else None
    parts = (
        _title(oom, state, when),
        _asked(oom, state, log),
        _memory(oom, device, found),
        _sizes(state, history),
        *([_levers(state)] if levers.in_force(state) else []),
        _done(followed),
        ("What you can do", *_bullets(_advice(oom, state, device, found, followed))),
    )
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _title(oom: ev.OomOccurred, state: JobState, when: str) -> Iterator[str]:
    name = words.one_line(state.name)
    yield f"Out of memory: {_where(oom)}"
    number = statuses.oom_number(state)
    yield f"run {name}, attempt {oom.attempt}, exhaustion {number}, {when}"


def _where(oom: ev.OomOccurred) -> str:
    return "host memory" if oom.kind == "host" else oom.device or "a device"


_PHASES = {
    "build": "while the model was built",
    "gradients": "in the forward or backward pass",
    "apply": "while the optimizer changed the weights",
    "evaluate": "in evaluation",
    "predict": "in prediction",
    "checkpoint": "while a checkpoint was written",
}


def _facts(oom: ev.OomOccurred) -> Facts:
    return log_facts.facts_of(oom.message)


def _asked(oom: ev.OomOccurred, state: JobState, log: str) -> Iterator[str]:
    facts = _facts(oom)
    yield "What ran out"
    rows = [("when", f"step {oom.step}, {_PHASES.get(oom.phase, 'phase not known')}")]
    if oom.micro_batch_size:
        share = max(state.global_batch_size or 0, oom.micro_batch_size)
        rows.append(("samples", words.cut(share, oom.micro_batch_size)))
    size = log_facts.size_bytes(facts)
    if size is not None:
        rows.append(("asked for", _tensor(units.format_bytes(size), facts)))
    elif facts.shape is not None:
        rows.append(("asked for", _tensor("a tensor", facts)))
    operation = oom.operation or facts.operation
    if operation:
        rows.append(("operation", words.one_line(operation, 200)))
        layer = _layer(operation)
        if layer:
            rows.append(("layer", words.one_line(layer, 200)))
    if oom.location:
        rows.append(("script", words.one_line(oom.location, 200)))
    if oom.message:
        rows.append(("message", words.one_line(oom.message, 300)))
    rows.append(("output", words.one_line(log)))
    yield from _table(rows)


_NO_LAYERS = frozenset(
    {"gradient_tape", "gradients", "while", "body", "cond", "then", "else"}
)


def _layer(operation: str) -> str | None:
    """The layer in ``gradient_tape/model/conv_1/Relu``: what stands before the end."""
    steps = [step for step in operation.split("/") if step not in _NO_LAYERS]
    named = [step for step in steps[:-1] if not step.startswith(("_", "Stateful"))]
    return named[-1] if named else None


def _tensor(size: str, facts: Facts) -> str:
    if facts.shape is None:
        return size
    of = f" of {facts.dtype}" if facts.dtype else ""
    return f"{size}: shape {list(facts.shape)}{of}"


def _memory(
    oom: ev.OomOccurred, device: DeviceStatus | None, found: Breakdown | None
) -> Iterator[str]:
    yield f"Memory of {_where(oom)}"
    rows: list[tuple[str, str]] = []
    seen = next((m for m in oom.memory if m.device == oom.device), None)
    limit = (seen.limit_bytes if seen else None) or (device and device.limit_bytes)
    if seen is not None and seen.in_use_bytes is not None:
        rows.append(("in use", f"{units.format_bytes(seen.in_use_bytes)} afterwards"))
    if seen is not None and seen.peak_bytes is not None:
        rows.append(("highest", units.format_bytes(seen.peak_bytes)))
    if limit:
        budget = device.budget_bytes if device else None
        more = f", {units.format_bytes(budget)} to plan into" if budget else ""
        rows.append(("limit", f"{units.format_bytes(limit)}{more}"))
    if device is not None and device.predicted_peak_bytes is not None:
        high = device.predicted_peak_high_bytes or device.predicted_peak_bytes
        rows.append(
            (
                "predicted",
                f"{units.format_bytes(device.predicted_peak_bytes)}, at most "
                f"{units.format_bytes(high)}, at micro-batch {device.micro_batch_size}",
            )
        )
    yield from _table(rows or [("", "nothing is known of it")])
    if found is not None:
        yield "  predicted to be made of"
        kinds = ((kind, getattr(found.parts, kind)) for kind in breakdowns.KINDS)
        yield from _table(
            [
                (f"  {breakdowns.KINDS[kind]}", units.format_bytes(count))
                for kind, count in kinds
                if count
            ]
        )


def _sizes(state: JobState, history: Sequence[ev.Event]) -> Iterator[str]:
    yield "Micro-batches so far"
    told = [(event, line) for event in history if (line := _told(event, state))]
    if len(told) > _MOST_HISTORY:
        yield f"  ({len(told) - _MOST_HISTORY} earlier ones are in journal.jsonl)"
    rows = [
        (f"attempt {getattr(event, 'attempt', '?')}", line)
        for event, line in told[-_MOST_HISTORY:]
    ]
    yield from _table(rows or [("", "none was tried")])
    if state.measured:
        ran = ", ".join(
            f"{size}: {units.format_bytes(peak)}"
            for size, peak in sorted(state.measured.items())
        )
        yield f"  ran, with peak  {ran}"


def _levers(state: JobState) -> Iterator[str]:
    yield "Levers in force"
    for name in levers.in_force(state):
        yield f"  {words.one_line(levers.in_words(name))}"
    if state.optimizer is not None:
        yield f"  {words.one_line(words.replaced(state.optimizer))}"


def _told(event: ev.Event, state: JobState) -> str | None:
    if isinstance(event, ev.OomOccurred):
        size = f" at {event.micro_batch_size}" if event.micro_batch_size else ""
        return f"ran out{size} in {event.phase}, step {event.step}"
    told = words.describe(event, state)
    attempt = getattr(event, "attempt", 0)
    return told.removeprefix(f"attempt {attempt}: ") if told else None


def _done(followed: Sequence[ev.Event]) -> Iterator[str]:
    yield "What oomrun did"
    if not followed:
        yield "  nothing yet"
    for event in followed:
        match event:
            case ev.MicroBatchChanged():
                yield f"  in process: {words.one_line(event.reason)}"
            case ev.DecisionMade():
                yield f"  {event.action}: {words.one_line(event.reason)}"
            case ev.RunEnded():
                yield f"  the run {event.state} (exit code {event.exit_code})"


# --- what would help ----------------------------------------------------------------


def _advice(
    oom: ev.OomOccurred,
    state: JobState,
    device: DeviceStatus | None,
    found: Breakdown | None,
    followed: Sequence[ev.Event],
) -> Iterator[str]:
    smaller = _smaller(followed)
    if smaller and oom.phase == "gradients":
        yield (
            "Nothing is needed: the global batch stays as it is. To begin at what fits "
            f"in other runs, too: batch: {{micro: {{max: {smaller}}}}}"
        )
    if oom.kind == "host":
        yield (
            "Load less at once (shuffle buffer, prefetch, workers), or give the "
            "machine or its cgroup more memory. A smaller micro-batch does not help"
        )
        return
    if oom.phase in ("evaluate", "predict"):
        size = smaller or max(1, (oom.micro_batch_size or 2) // 2)
        yield f"Give evaluate or predict a smaller batch, such as {size} samples"
    if oom.phase == "apply" and state.composition is not None:
        slots = units.format_bytes(state.composition.optimizer_bytes)
        yield (
            f"The optimizer keeps {slots}: one with less state (SGD without momentum "
            "has none) is another training, and leaves as much for the rest; "
            "recovery.levers may list optimizer_lion, optimizer_adafactor and "
            "optimizer_sgd"
        )
    ran = state.measured.get(oom.micro_batch_size or 0)
    if ran is not None and oom.phase == "gradients":
        peak = units.format_bytes(ran)
        yield (
            f"Micro-batch {oom.micro_batch_size} had run before, with {peak} at most: "
            "look for what takes more since then, such as longer samples, tensors that "
            "the script keeps, or another process on the device"
        )
    by_limit = list(_by_limit(device)) or list(_by_what_was_asked(oom))
    yield from by_limit
    if found is None and oom.phase in ("gradients", "apply"):
        yield "oomrun plan --measure JOB shows what a step's memory is made of"
    yield from _by_parts(found)
    yield from _by_pieces(oom)


def _smaller(followed: Sequence[ev.Event]) -> int | None:
    for event in reversed(followed):
        if isinstance(event, ev.MicroBatchChanged) and event.new < event.old:
            return event.new
        if isinstance(event, ev.DecisionMade) and event.micro_batch_size:
            return event.micro_batch_size
    return None


def _by_limit(device: DeviceStatus | None) -> Iterator[str]:
    """What limit would have been enough for the size that failed."""
    if device is None or not device.limit_bytes or not device.budget_bytes:
        return
    high = device.predicted_peak_high_bytes
    if high is None or high <= device.budget_bytes:
        return
    needed = high * device.limit_bytes // device.budget_bytes
    yield (
        f"Micro-batch {device.micro_batch_size} needs a limit of about "
        f"{units.format_bytes(needed)} (memory.limit, or another device)"
    )


def _by_what_was_asked(oom: ev.OomOccurred) -> Iterator[str]:
    """The same, where nothing was predicted: enough for this allocation at least."""
    seen = next((m for m in oom.memory if m.device == oom.device), None)
    size = log_facts.size_bytes(_facts(oom))
    if seen is None or size is None or not seen.limit_bytes or not seen.peak_bytes:
        return
    needed = units.format_bytes(seen.peak_bytes + size)
    yield (
        f"A limit of {needed} would have been enough for this allocation (the "
        "highest use so far, and what was asked for); later ones may need more"
    )


def _by_parts(found: Breakdown | None) -> Iterator[str]:
    if found is None:
        return
    if found.bytes_per_sample:
        yield (
            f"A sample takes {units.format_bytes(found.bytes_per_sample)} of "
            "activations: smaller images or shorter sequences shrink that"
        )
    if found.parts.activations > found.peak_bytes // 4:
        half = units.format_bytes(found.parts.activations // 2)
        yield (
            f"keras.mixed_precision.set_global_policy('mixed_bfloat16') would save up "
            f"to {half} of activations; it changes the numbers"
        )
    if found.parts.script > found.peak_bytes // 4:
        kept = units.format_bytes(found.parts.script)
        yield f"The script keeps {kept} on the device between steps: keep less of it"


def _by_pieces(oom: ev.OomOccurred) -> Iterator[str]:
    """Free memory that was in pieces."""
    seen = next((m for m in oom.memory if m.device == oom.device), None)
    size = log_facts.size_bytes(_facts(oom))
    if seen is None or size is None or not seen.limit_bytes or not seen.peak_bytes:
        return
    free = seen.limit_bytes - seen.peak_bytes
    if free >= size and not oom.device.startswith("cpu"):
        yield (
            f"At least {units.format_bytes(free)} were free, and "
            f"{units.format_bytes(size)} were asked for: the pool is in pieces. "
            "TF_GPU_ALLOCATOR=cuda_malloc_async (env in the job file) may help"
        )


def _bullets(lines: Iterator[str]) -> list[str]:
    return [f"  - {line}." for line in lines] or ["  - See docs/recipes.md."]


def _table(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    width = max((len(label) for label, _ in rows), default=0)
    for label, value in rows:
        yield f"  {label:<{width}}  {value}".rstrip()
