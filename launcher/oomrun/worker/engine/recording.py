"""Recording what a step asks its allocator for, with TensorFlow's own profiler.

TensorFlow's allocator reports each piece that it hands out or takes back to the
profiler, if one is running: bytes, address and time. Measured: a recorded step takes no
longer than others; reading it takes 0.02 to 0.3 s.

Source: ``BFCAllocator::AddTraceMe`` in xla/tsl/framework; the profile is an ``XSpace``,
xla/tsl/profiler/protobuf/xplane.proto. The allocators' names are those of
``GPUProcessState`` in tensorflow/core/common_runtime/gpu.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from oomrun.core.allocations import Recording

__all__ = ["CPU_ALLOCATOR", "GPU_ALLOCATOR", "record"]

CPU_ALLOCATOR, GPU_ALLOCATOR = "bfc_cpu_allocator_for_gpu", "GPU_0_bfc"
_ALLOCATION, _FREE = "MemoryAllocation", "MemoryDeallocation"
#: The level that these reports have; those of Python and of devices are not wanted.
_INFO = 2
#: So many say nothing that fewer would not, and take seconds to read.
_MOST = 100_000


class _Move(NamedTuple):
    at: int  # picoseconds
    handed_out: bool
    address: int
    requested: int
    handed_out_bytes: int


def record(
    take: Callable[[], Any],
    size: int,
    *,
    allocator: str,
    in_use_bytes: int,
    telling: bool,
) -> Recording | None:
    """Takes a step, and returns what it asked for.

    Args:
        take: takes it, and waits for its end.
        size: samples of a pass.
        allocator: its name.
        in_use_bytes: that it has handed out now.
        telling: see ``Recording``.

    Returns:
        None where nothing can be told: a profiler of the script's is running, say.

    Raises:
        tf.errors.ResourceExhaustedError: and all else that ``take`` raises.
    """
    with _profile() as profile:
        take()
    moves = sorted(_moves(profile(), allocator))
    if not 0 < len(moves) <= _MOST:
        return None
    return _recording(moves, size, in_use_bytes, telling=telling)


@contextlib.contextmanager
def _profile() -> Iterator[Callable[[], Any]]:
    """Profiles what is done within; the function gives the profile afterwards."""
    found: list[Any] = []
    options = tf.profiler.experimental.ProfilerOptions(
        host_tracer_level=_INFO, python_tracer_level=0, device_tracer_level=0
    )
    with tempfile.TemporaryDirectory(prefix="oomrun-") as folder:
        try:
            tf.profiler.experimental.start(folder, options)
        except (tf.errors.OpError, RuntimeError):
            yield lambda: None
            return
        try:
            yield lambda: found[0] if found else None
        except BaseException:
            tf.profiler.experimental.stop(save=False)
            raise
        with contextlib.suppress(tf.errors.OpError, RuntimeError, OSError, ImportError):
            tf.profiler.experimental.stop()
            found += _read(Path(folder))


def _read(folder: Path) -> Iterator[Any]:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    for file in folder.rglob("*.xplane.pb"):
        space = xplane_pb2.XSpace()
        space.ParseFromString(file.read_bytes())
        yield space


def _moves(profile: Any, allocator: str) -> Iterator[_Move]:
    for plane in profile.planes if profile is not None else ():
        kinds = {
            number: meta.name == _ALLOCATION
            for number, meta in plane.event_metadata.items()
            if meta.name in (_ALLOCATION, _FREE)
        }
        if not kinds:
            continue
        names = {number: meta.name for number, meta in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                if event.metadata_id not in kinds:
                    continue
                told = {names.get(stat.metadata_id): stat for stat in event.stats}
                try:
                    if names[told["allocator_name"].ref_value] != allocator:
                        continue
                    yield _Move(
                        line.timestamp_ns * 1000 + event.offset_ps,
                        kinds[event.metadata_id],
                        told["addr"].int64_value,
                        told["requested_bytes"].int64_value,
                        told["allocation_bytes"].int64_value,
                    )
                except KeyError:
                    return  # another version's profile


def _recording(
    moves: Iterable[_Move], size: int, in_use_bytes: int, *, telling: bool
) -> Recording:
    early: list[int] = []
    requests: list[int] = []
    # Which list, the place in it, and whether it is freed.
    order: list[tuple[list[int], int, bool]] = []
    live: dict[int, int] = {}
    for move in moves:
        place = live.pop(move.address, None)
        if place is not None:
            order.append((requests, place, True))
        elif not move.handed_out:
            # It was there before the step.
            order.append((early, len(early), True))
            early.append(move.handed_out_bytes)
        if move.handed_out:
            live[move.address] = len(requests)
            order.append((requests, len(requests), False))
            requests.append(move.requested)
    places = [
        (place if which is early else place + len(early), freed)
        for which, place, freed in order
    ]
    return Recording(
        size=size,
        held_bytes=max(0, in_use_bytes - sum(early)),
        early=len(early),
        requests=(*early, *requests),
        moves=tuple(~place if freed else place for place, freed in places),
        telling=telling,
    )
