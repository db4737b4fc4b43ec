"""What a checkpoint of a training holds, and writing it beside the training.

Covers: variables of model, optimizer and metrics by their order, as raw bytes; the
rest as JSON; one writer thread; restoring. Does not cover: folders and checksums
(``oomrun.checkpoints``), when to save (``session.py``).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from oomrun import checkpoints
from oomrun.core import retention, units
from oomrun.core.errors import CheckpointError
from oomrun.worker import optimizers
from oomrun.worker.encoding import Arrays, decode, encode
from oomrun.worker.engine import keeping
from oomrun.worker.engine.objects import Objects

__all__ = [
    "Writer",
    "claimed_fit",
    "load",
    "restore",
    "restore_variables",
    "saved_variables",
    "state_bytes",
    "training_variables",
]

_ARRAYS, _STATE = "arrays.bin", "state.json"
_NO_MEMORY = (MemoryError, tf.errors.ResourceExhaustedError)
_NO_MEMORY_TEXT = "memory ran out while everything was copied"


def training_variables(model: Any) -> list[Any]:
    """All variables that a training step may change, in a fixed order, each once."""
    if isinstance(model, Objects):
        return list(model.variables)
    return keeping.variables_of(model)


def state_bytes(model: Any) -> int:
    """Bytes of weights, optimizer slots, metrics, and the gradients of one step."""
    return keeping.bytes_of([*training_variables(model), *model.trainable_variables])


def saved_variables(arrays: Arrays) -> int:
    """How many variables a checkpoint holds."""
    return sum(1 for name in arrays if name.startswith("variable/"))


def restore_variables(variables: Sequence[Any], arrays: Arrays) -> None:
    """Assigns the saved values.

    Raises:
        CheckpointError: the model has other variables than the one that was saved.
    """
    saved = saved_variables(arrays)
    if saved != len(variables):
        raise CheckpointError(
            f"the model has {len(variables)} variables, the checkpoint {saved}: "
            "the script has changed"
        )
    for index, variable in enumerate(variables):
        value = arrays[f"variable/{index}"]
        if tuple(value.shape) != tuple(variable.shape):
            raise CheckpointError(
                f"variable {variable.path} has shape {tuple(variable.shape)}, in the "
                f"checkpoint {tuple(value.shape)}: the script has changed"
            )
    for index, variable in enumerate(variables):
        variable.assign(arrays[f"variable/{index}"])


def restore(
    model: Any,
    state: Mapping[str, Any],
    arrays: Arrays,
    note: Callable[[str, str], None],
    *,
    whole: bool = False,
) -> bool:
    """Puts a model to where a checkpoint was written.

    Args:
        model: compiled.
        state: the checkpoint's.
        arrays: the checkpoint's.
        note: tells a person something, once.
        whole: the model has all of its variables. Where it lacks some that the
            checkpoint has, it is not the one that was saved.

    Returns:
        Whether it was restored; always, where it is ``whole``.

    Raises:
        CheckpointError: the model has other variables than the one that was saved.
    """
    variables = training_variables(model)
    if optimizers.other_in(state, model):
        found = optimizers.carried_over(state, arrays, model, variables)
        if found is not None:
            arrays, left = found
            note(
                "optimizer-slots",
                f"{state['name']} was written with another optimizer than the lever "
                f"gives now: its slots ({units.format_bytes(left)}) are left behind; "
                "weights, step, learning rate and position in the data go on",
            )
    if not whole and len(variables) != saved_variables(arrays):
        return False
    restore_variables(variables, arrays)
    return True


def _pack(encoded: Any, arrays: Arrays) -> dict[str, list[Any]]:
    index, chunks, offset = [], [], 0
    for name, array in arrays.items():
        # No copy: a view of the array's bytes.
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        dtype = tf.as_dtype(array.dtype).name
        index.append([name, dtype, list(array.shape), offset, content.nbytes])
        chunks.append(content)
        offset += content.nbytes
    header = {"arrays": index, "state": encoded}
    return {_ARRAYS: chunks, _STATE: [json.dumps(header).encode()]}


def claimed_fit(path: Path) -> int | None:
    """The fit that a checkpoint says it is of, unverified; None if it does not say."""
    try:
        header = json.loads((path / _STATE).read_bytes())
        return int(dict(header["state"]["pairs"])["fit"])
    except (OSError, KeyError, TypeError, ValueError):
        return None


def load(path: Path) -> tuple[dict[str, Any], Arrays]:
    """The state and the arrays of a checkpoint.

    Raises:
        CheckpointError: it is torn or altered.
    """
    files = checkpoints.read(path)
    try:
        header = json.loads(files[_STATE])
        arrays: Arrays = {}
        for name, dtype, shape, offset, size in header["arrays"]:
            raw = files[_ARRAYS][offset : offset + size]
            kind = tf.as_dtype(dtype).as_numpy_dtype
            arrays[name] = np.frombuffer(raw, dtype=kind).reshape(shape)
        return decode(header["state"], arrays), arrays
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path.name} cannot be understood: {error}") from error


class _Work:
    """One checkpoint that is to be written.

    Attributes:
        files: their content, after ``pack``.
        values: copies of the variables' values; before that, memory for them.
    """

    def __init__(
        self,
        name: str,
        state: Mapping[str, Any],
        context: Any,
        values: list[np.ndarray[Any, Any]],
    ) -> None:
        self.name, self.context, self.values = name, context, values
        self.files: dict[str, list[Any]] = {}
        arrays: Arrays = {}
        self._encoded = encode(dict(state), arrays, "state")
        # A callback may write to its arrays before they are on disk.
        self._arrays = {key: np.array(array) for key, array in arrays.items()}
        self._held: list[Any] = []

    def hold(self, variables: Sequence[Any]) -> None:
        """Has the values that variables have now copied when this is packed."""
        self._held = keeping.held(variables)

    def copy(self, variables: Sequence[Any]) -> None:
        """Copies the values now, and packs."""
        self.values = keeping.host_copies(variables, self.values)
        self.pack()

    def pack(self) -> None:
        """Makes the files' content, unless that is done."""
        if self._held:
            self.values = keeping.copied(self._held, self.values)
        if not self.files:
            named = {f"variable/{index}": v for index, v in enumerate(self.values)}
            self.files = _pack(self._encoded, {**named, **self._arrays})


class Writer:
    """Writes checkpoints in a thread of its own, one at a time.

    Args:
        folder: the checkpoint folder.
        keep: how many step checkpoints are kept.
        saved: called after each, with name, bytes, seconds taken, seconds blocked and
            what the caller of ``save`` gave as ``context``.
        failed: called with the reason and ``context`` where the disk refused, or was
            too slow.
        timeout_s: how long one may take, and how long training waits for the one
            before.
        behind: whether so many bytes may be copied behind the training, as of
            ``save``; never where it is not given.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        saved: Callable[[str, int, float, float, Any], None],
        failed: Callable[[str, Any], None],
        *,
        timeout_s: float = 600.0,
        behind: Callable[[int], bool] | None = None,
    ) -> None:
        self._folder, self._keep = folder, keep
        self._saved, self._failed = saved, failed
        self._timeout_s = timeout_s
        self._behind = behind or _never
        self._thread: threading.Thread | None = None
        # The last one's copies, to copy into again: new memory takes most of the time.
        self._spare: list[np.ndarray[Any, Any]] = []

    def save(
        self, name: str, model: Any, state: Mapping[str, Any], context: Any
    ) -> None:
        """Writes everything as it is now, in the background.

        The variables are copied there too, where that may be: until then their values
        are held (``keeping.held``). Else all is copied before this returns.
        """
        began = time.monotonic()
        work = self._work(name, model, state, context, self._behind)
        if work is not None:
            self._start(work, time.monotonic() - began)

    def copy(
        self, name: str, model: Any, state: Mapping[str, Any], context: Any
    ) -> Callable[[], None]:
        """Copies everything now; the function returned writes it in the background."""
        began = time.monotonic()
        work = self._work(name, model, state, context, _never)
        if work is None:
            return _nothing
        blocked_s = time.monotonic() - began

        def start() -> None:
            self.wait()
            self._start(work, blocked_s)

        return start

    def _work(
        self,
        name: str,
        model: Any,
        state: Mapping[str, Any],
        context: Any,
        behind: Callable[[int], bool],
    ) -> _Work | None:
        """What is to be written, of now; None where that cannot be."""
        if not self.wait(self._timeout_s):
            long = units.format_duration(self._timeout_s)
            self._failed(f"the one before is still being written after {long}", context)
            return None
        spare, self._spare = self._spare, []
        try:
            work = _Work(name, state, context, spare)
            variables = training_variables(model)
            # What a variable is copied to, and what TensorFlow copies where a step
            # writes to it before that.
            size = sum(a.nbytes for a in spare) or 2 * keeping.bytes_of(variables)
            take = work.hold if behind(size) else work.copy
            take(variables)
        except _NO_MEMORY:
            # Training itself has room: it goes on, with the last good one.
            self._failed(_NO_MEMORY_TEXT, context)
            return None
        return work

    def _start(self, work: _Work, blocked_s: float) -> None:
        # Not a daemon: the interpreter waits for a checkpoint being written.
        self._thread = threading.Thread(
            target=self._write, args=(work, blocked_s), name="oomrun-checkpoint"
        )
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether nothing is being written any more, in ``timeout_s`` at the latest."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._thread = None
        return True

    def _write(self, work: _Work, blocked_s: float) -> None:
        began = time.monotonic()
        try:
            work.pack()
            until = began + self._timeout_s
            timed = {key: self._timed(part, until) for key, part in work.files.items()}
            size = checkpoints.write(self._folder, work.name, timed)
        except _NO_MEMORY:
            self._failed(_NO_MEMORY_TEXT, work.context)
            return
        except OSError as error:
            path, reason = self._folder / work.name, error.strerror or error
            self._failed(f"{path}: {reason}", work.context)
            return
        finally:
            self._spare = work.values
        self._saved(work.name, size, time.monotonic() - began, blocked_s, work.context)
        self._prune()

    def _timed(self, chunks: Sequence[Any], until: float) -> Iterator[Any]:
        for chunk in chunks:
            yield chunk
            if time.monotonic() > until:
                long = units.format_duration(self._timeout_s)
                raise TimeoutError(f"it took longer than {long} and was given up")

    def _prune(self) -> None:
        kept = checkpoints.names(self._folder, "step")
        for name in retention.superseded(kept, self._keep):
            try:
                checkpoints.discard(self._folder / name)
            except OSError:
                return  # the next save tries again


def _never(_: int) -> bool:
    """Everything is copied while training waits."""
    return False


def _nothing() -> None:
    """There is nothing to write."""
