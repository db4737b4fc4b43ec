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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from oomrun.core.allocations import FREE, HELD, Recording
from oomrun.core.allocator import GRAIN

__all__ = ["CPU_ALLOCATOR", "GPU_ALLOCATOR", "record"]

CPU_ALLOCATOR, GPU_ALLOCATOR = "bfc_cpu_allocator_for_gpu", "GPU_0_bfc"
_ALLOCATION, _FREE = "MemoryAllocation", "MemoryDeallocation"
#: The level that these reports have; those of Python and of devices are not wanted.
_INFO = 2
#: So many say nothing that fewer would not, and take seconds to read.
_MOST = 100_000
#: No pool is so large that two pieces of it lie further apart.
_FAR = 2**40


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
    pool_bytes: int | None,
    telling: bool,
) -> Recording | None:
    """Takes a step, and returns what it asked for.

    Args:
        take: takes it, and waits for its end.
        size: samples of a pass.
        allocator: its name.
        in_use_bytes: that it has handed out now.
        pool_bytes: of its pool.
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
    early, requests, order = _matched(moves)
    return Recording(
        size=size,
        layout=_layout(moves, early, in_use_bytes, pool_bytes or _FAR),
        early=len(early),
        requests=(*(move.handed_out_bytes for move in early), *requests),
        moves=order,
        telling=telling,
    )


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


def _matched(
    moves: Sequence[_Move],
) -> tuple[list[_Move], list[int], tuple[int, ...]]:
    """Which free ends which allocation.

    Returns:
        The frees of what was there before; the bytes of all requests; ``moves`` as
        ``Recording`` has them.
    """
    early: list[_Move] = []
    requests: list[int] = []
    # The place in one of the two lists, whether it is the first, whether it is freed.
    order: list[tuple[int, bool, bool]] = []
    live: dict[int, int] = {}
    for move in moves:
        place = live.pop(move.address, None)
        if place is not None:
            order.append((place, False, True))
        elif not move.handed_out:
            order.append((len(early), True, True))
            early.append(move)
        if move.handed_out:
            live[move.address] = len(requests)
            order.append((len(requests), False, False))
            requests.append(move.requested)
    places = (
        (place if is_early else place + len(early), freed)
        for place, is_early, freed in order
    )
    return early, requests, tuple(~place if freed else place for place, freed in places)


def _layout(
    moves: Sequence[_Move], early: Sequence[_Move], in_use_bytes: int, far: int
) -> tuple[tuple[int, int], ...]:
    """The pool as the step began, from the addresses of all that was moved in it.

    What was handed out had been free, but for what was freed before. What lies between
    such pieces was in use, as far as so much was; the rest of that lies below them.
    Regions that lie far apart are put one after the other, the largest last.
    """
    places = {move.address: place for place, move in enumerate(early)}
    ends = {move.address: move.address + move.handed_out_bytes for move in early}
    marks = [(at, ends[at], place) for at, place in places.items()]
    for low, high in _joined(moves):
        for begin, end in sorted(ends.items()):
            if low < begin < high:
                marks.append((low, begin, FREE))
            if low < end and begin < high:
                low = max(low, end)
        if low < high:
            marks.append((low, high, FREE))
    regions: list[list[tuple[int, int]]] = [[]]
    gaps: list[tuple[int, int, int]] = []  # bytes, region, place in it
    reached = min(marks)[0]
    for begin, end, what in sorted(marks):
        gap = begin - reached
        if gap > far:
            regions.append([])
        elif gap > 0:
            gaps.append((gap, len(regions) - 1, len(regions[-1])))
            regions[-1].append((gap, HELD))
        regions[-1].append((end - begin, what))
        reached = end
    held = in_use_bytes - sum(move.handed_out_bytes for move in early)
    between = sum(gap for gap, _, _ in gaps)
    for gap, region, place in sorted(gaps, reverse=True):
        if between <= held:
            break
        regions[region][place] = (gap, FREE)
        between -= gap
    found = [(held - between, HELD)] if held > between else []
    for region_pieces in sorted(regions, key=lambda pieces: sum(n for n, _ in pieces)):
        # Nothing is joined over the border of two regions.
        found += [*region_pieces, (GRAIN, HELD)]
    found.pop()
    while found and found[-1][1] == FREE:
        found.pop()  # as all above it
    return tuple(found)


def _joined(moves: Iterable[_Move]) -> list[tuple[int, int]]:
    """From where to where pieces were handed out, overlapping ones as one."""
    pieces = sorted(
        (move.address, move.address + move.handed_out_bytes)
        for move in moves
        if move.handed_out
    )
    found: list[tuple[int, int]] = []
    for low, high in pieces:
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return found
