"""A worker's first lines and its last ones.

In this order: open the channel, let no full disk end what prints, tie our life to the
supervisor's, seed what the script leaves to chance, set the devices up, hook Keras, run
the script, report how it ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.metadata
import json
import os
import sys
import time
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from oomrun.core import events as ev
from oomrun.core import launch as launches
from oomrun.core.strategy import ENTRY_POINTS, Strategy
from oomrun.worker import lifeline, output, script
from oomrun.worker.channel import Channel

if TYPE_CHECKING:
    from oomrun.core.launch import Launch
    from oomrun.worker.session import Session

__all__ = ["main"]


def main() -> int:
    """Runs one worker; the supervisor has set the environment up."""
    began = time.monotonic()
    # Next to nothing of all that is imported is garbage. To look for it again and again
    # takes a sixth of a start, and after it part of each search in the script.
    gc.disable()
    faulthandler.enable()
    faulthandler.register(launches.DUMP_SIGNAL, all_threads=True)
    launch_file = os.environ.pop(launches.LAUNCH_FILE)
    channel = Channel(int(os.environ.pop(launches.CHANNEL_FD)))
    channel.listen()
    with open(launch_file, encoding="utf-8") as file:
        settings = launches.from_json(json.load(file))
    channel.rank = settings.rank
    output.keep_going(channel, settings.attempt)
    lifeline.die_with_parent(settings.supervisor_pid)
    strategy = _strategy(settings.plan.strategy)
    session = _set_up(settings, channel, strategy, began)
    gc.collect()
    gc.freeze()
    gc.enable()
    ended = _run(settings, strategy)
    if ended.outcome != "raised":
        session.settle()
    else:
        # At which step it failed says whether it would do so again.
        session.report_progress()
    if ended.outcome == "finished":
        session.script_finished()
    session.store.finish()
    channel.send(ended)
    _flush()
    channel.close()
    return ended.exit_code


def _set_up(
    settings: Launch, channel: Channel, strategy: Strategy, began: float
) -> Session:
    import tensorflow as tf

    from oomrun.worker import devices, pool, read_ahead

    devices.set_up(settings.plan)
    pool.gather_on_first_use()
    read_ahead.bound()
    import keras

    if keras.backend.backend() != "tensorflow":
        raise SystemExit(
            f"oomrun trains with Keras's TensorFlow backend, but Keras is set to "
            f"{keras.backend.backend()!r}: set KERAS_BACKEND=tensorflow"
        )
    from oomrun.worker import current, keras_adapter, one_writer, pulling, randomness
    from oomrun.worker.session import Session

    randomness.seed_unseeded(settings.seed)
    session = Session(settings, channel, strategy.group())
    keras_adapter.install(session)
    pulling.pull(settings.plan.levers, session.note)
    current.register(session)
    if settings.rank:
        one_writer.leave_writing_to_another()
    channel.send(
        ev.WorkerReady(
            at=time.time(),
            attempt=settings.attempt,
            rank=settings.rank,
            pid=os.getpid(),
            tensorflow=tf.__version__,
            keras=keras.__version__,
            start_s=time.monotonic() - began,
        )
    )
    return session


def _run(settings: Launch, strategy: Strategy) -> ev.ScriptEnded:
    """Runs the script, and says how it ended."""
    try:
        with strategy.scope():
            if settings.program_kind == "module":
                script.run_module(settings.program, settings.args)
            else:
                script.run_script(settings.program, settings.args)
    except SystemExit as error:
        return _exited(settings, error)
    except BaseException as error:
        return _raised(settings, error)
    return _ended(settings, outcome="finished", exit_code=0)


def _strategy(name: str) -> Strategy:
    """The strategy that the plan names, from whichever package brings it."""
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=name):
        strategy: Strategy = entry.load()()
        return strategy
    raise LookupError(
        f"no installed package brings the strategy {name!r} (entry-point group "
        f"{ENTRY_POINTS}): is oomrun itself installed, not only on the path?"
    )


def _ended(settings: Launch, *, outcome: str, exit_code: int) -> ev.ScriptEnded:
    return ev.ScriptEnded(
        at=time.time(),
        attempt=settings.attempt,
        rank=settings.rank,
        outcome=outcome,
        exit_code=exit_code,
    )


def _exited(settings: Launch, error: SystemExit) -> ev.ScriptEnded:
    """What ``sys.exit`` means, as Python itself reads it."""
    if error.code is None or error.code == 0:
        return _ended(settings, outcome="finished", exit_code=0)
    if isinstance(error.code, int):
        return _ended(settings, outcome="exited", exit_code=error.code)
    # Where the log's disk is full, too, it is told how the script ended.
    with contextlib.suppress(OSError, ValueError):
        print(error.code, file=sys.stderr)
    return _ended(settings, outcome="exited", exit_code=1)


def _raised(settings: Launch, error: BaseException) -> ev.ScriptEnded:
    import tensorflow as tf

    trace = _from_script(error.__traceback__, settings.program)
    with contextlib.suppress(OSError, ValueError):
        traceback.print_exception(type(error), error, trace)
    text = str(error)
    oom = isinstance(error, tf.errors.ResourceExhaustedError | MemoryError) or (
        isinstance(error, tf.errors.OpError) and _looks_like_oom(text)
    )
    return ev.ScriptEnded(
        at=time.time(),
        attempt=settings.attempt,
        rank=settings.rank,
        outcome="raised",
        exit_code=1,
        exception=type(error).__name__,
        message=text[:2000],
        location=_location(error, settings.program),
        oom=oom,
    )


def _looks_like_oom(text: str) -> bool:
    # Here, since it takes a third of what all that is ours takes to load, and every
    # restart waits for that.
    from oomrun.core.oom_text import looks_like_device_oom

    return looks_like_device_oom(text)


def _from_script(trace: TracebackType | None, program: str) -> TracebackType | None:
    """The traceback without our own frames above the script."""
    step = trace
    while step is not None and step.tb_frame.f_code.co_filename != program:
        step = step.tb_next
    return step or trace


def _location(error: BaseException, program: str) -> str:
    """The script's last line in the traceback: ``train.py:12``."""
    lines = [
        f"{os.path.basename(frame.filename)}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == program
    ]
    return lines[-1] if lines else ""


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # the script closed it, or the disk is full
