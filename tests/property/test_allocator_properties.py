"""The allocator's rules against a plain list of pieces; what is replayed by them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from oomrun.core import allocations, reading_ahead
from oomrun.core.allocations import FREE, HELD, Recording
from oomrun.core.allocator import Pool, rounded
from oomrun.core.recorded import Recorded

WASTE = 128 * 2**20


@dataclass
class Plain:
    """The same rules, as they are written down: pieces in the order of addresses."""

    pieces: list[tuple[int, int, bool]]  # address, length, whether it is free

    def allocate(self, size: int) -> int | None:
        wanted = rounded(size)
        free = [(n, at) for at, n, is_free in self.pieces if is_free and n >= wanted]
        if not free:
            return None
        length, at = min(free)
        place = self.pieces.index((at, length, True))
        split = length >= 2 * wanted or length - wanted >= WASTE
        kept = wanted if split else length
        new = [(at, kept, False)]
        new += [(at + kept, length - kept, True)] if split else []
        self.pieces[place : place + 1] = new
        return at

    def free(self, address: int) -> None:
        joined: list[tuple[int, int, bool]] = []
        for at, length, is_free in self.pieces:
            is_free = is_free or at == address
            if is_free and joined and joined[-1][2]:
                before = joined[-1]
                joined[-1] = (before[0], before[1] + length, True)
            else:
                joined.append((at, length, is_free))
        self.pieces = joined

    @property
    def in_use(self) -> int:
        return sum(length for _, length, is_free in self.pieces if not is_free)


sizes = st.one_of(st.integers(1, 5000), st.integers(1, 300 * 2**20))


@given(
    pool_bytes=st.integers(1, 2**22).map(lambda n: 256 * n),
    moves=st.lists(st.tuples(st.booleans(), sizes, st.integers(0, 99)), max_size=60),
)
def test_a_pool_hands_out_what_the_rules_say(
    pool_bytes: int, moves: list[tuple[bool, int, int]]
) -> None:
    pool, plain = Pool(pool_bytes), Plain([(0, pool_bytes, True)])
    live: list[int] = []
    for frees, size, which in moves:
        if frees and live:
            address = live.pop(which % len(live))
            pool.free(address)
            plain.free(address)
        else:
            found = pool.allocate(size)
            assert found == plain.allocate(size)
            if found is not None:
                live.append(found)
        assert pool.in_use == plain.in_use <= pool.peak <= pool_bytes


@st.composite
def recordings(draw: st.DrawFn, *, with_early: bool = True) -> Recording:
    size = draw(st.sampled_from([5, 7, 11, 13, 31, 61]))
    rows = draw(st.lists(st.integers(1, 4000), min_size=1, max_size=20))
    fixed = draw(st.lists(st.integers(1, 100_000), max_size=10))
    requests = [size * n for n in rows] + [n + (n % size == 0) for n in fixed]
    requests = draw(st.permutations(requests))
    early = draw(st.integers(0, len(requests) // 2)) if with_early else 0
    live, moves = list(range(early)), []
    waiting = list(range(early, len(requests)))
    while waiting or (live and draw(st.booleans())):
        if waiting and (not live or draw(st.booleans())):
            live.append(waiting.pop(0))
            moves.append(live[-1])
        else:
            moves.append(~live.pop(draw(st.integers(0, len(live) - 1))))
    lengths = st.integers(1, 4000).map(lambda n: 256 * n)
    pieces = [(rounded(requests[place]), place) for place in range(early)]
    pieces += [(n, HELD) for n in draw(st.lists(lengths, max_size=4))]
    pieces += [(n, FREE) for n in draw(st.lists(lengths, max_size=4))]
    return Recording(
        size=size,
        layout=tuple(draw(st.permutations(pieces))),
        early=early,
        requests=tuple(requests),
        moves=tuple(moves),
        telling=True,
    )


@given(recordings())
def test_the_least_pool_has_room_for_all_that_is_needed(recording: Recording) -> None:
    least, needed = (
        allocations.least_pool(recording), allocations.needed_bytes(recording),
    )  # fmt: skip
    assert needed <= least
    peak = allocations.pool_peak(recording, least)
    assert peak is not None
    assert needed <= peak <= least


@given(recordings(), st.floats(1, 2), st.lists(st.integers(0, 255), max_size=9))
def test_bytes_below_what_the_allocator_counts_in_decide_nothing(
    recording: Recording, roomier: float, less: list[int]
) -> None:
    """Neither of the pool nor of the gaps in its layout."""
    missing = itertools.chain(less, itertools.repeat(0))
    layout = ((n - next(missing), what) for n, what in recording.layout)
    gaps = replace(recording, layout=tuple(layout))
    pool_bytes = rounded(int(allocations.least_pool(recording) * roomier))
    found = allocations.fits(recording, pool_bytes)
    assert allocations.fits(recording, pool_bytes + 255) == found
    assert allocations.fits(gaps, pool_bytes) == found
    assert allocations.fits(gaps, pool_bytes + 255) == found


@given(recordings(), st.integers(1, 500))
def test_a_step_of_another_size_asks_for_as_much_more(
    recording: Recording, size: int
) -> None:
    then = allocations.at_size(recording, size)
    assert then.moves == recording.moves
    for place, (before, after) in enumerate(
        zip(recording.requests, then.requests, strict=True)
    ):
        grows = place >= recording.early and before % recording.size == 0
        assert after == (before // recording.size * size if grows else before)
    larger = allocations.at_size(recording, size + 1)
    assert allocations.needed_bytes(then) <= allocations.needed_bytes(larger)


@given(recordings(), st.integers(1, 1000).map(lambda n: 256 * n))
def test_what_is_held_beside_is_needed_too(recording: Recording, more: int) -> None:
    then = allocations.with_more(recording, more)
    needed = allocations.needed_bytes(recording)
    assert allocations.needed_bytes(then) == needed + more


@given(
    recordings(with_early=False),
    st.integers(1, 2000).map(lambda n: 256 * n),
    st.floats(1, 2),
    st.integers(0, 60),
)
def test_where_no_moment_is_bad_a_later_step_has_room(
    recording: Recording, batch_bytes: int, roomier: float, moment: int
) -> None:
    """The batch is put where a real pool puts it, then a step begins with it there."""
    least = allocations.least_pool(allocations.with_more(recording, batch_bytes))
    pool_bytes = rounded(int(least * roomier))
    bad = reading_ahead.share_without_room(recording, pool_bytes, batch_bytes)
    pieces = {
        pool.piece_for(batch_bytes)
        for pool in allocations.played(recording, pool_bytes)
        if pool is not None
    }
    freed = {~move for move in recording.moves if move < 0}
    ends = (~n for n in range(len(recording.requests)) if n not in freed)
    moves = (*recording.moves, *ends)
    room = _two_steps(recording, moves, pool_bytes, batch_bytes, moment)
    if len(pieces - {None}) <= 8 and bad in (0, 1):  # all of them were tried
        assert room in (None, bad == 0)


def _two_steps(
    recording: Recording,
    moves: tuple[int, ...],
    pool_bytes: int,
    batch_bytes: int,
    moment: int,
) -> bool | None:
    """Whether a second step has room; None where the first had none for the batch."""
    pool = Pool(pool_bytes)
    layout = tuple(allocations.squeezed(recording.layout, pool_bytes))
    begun = [pool.allocate(n, exactly=True) for n, _ in layout]
    for address, (_, what) in zip(begun, layout, strict=True):
        if what == FREE and address is not None:
            pool.free(address)
    for step in (1, 2):
        places: dict[int, int] = {}
        for number, move in enumerate(moves):
            if step == 1 and number == moment:
                piece = pool.piece_for(batch_bytes)
                if piece is None or pool.allocate(batch_bytes) is None:
                    return None
            if move < 0:
                pool.free(places.pop(~move))
                continue
            address = pool.allocate(recording.requests[move])
            if address is None:
                return None if step == 1 else False
            places[move] = address
        if step == 1 and moment >= len(moves) and pool.allocate(batch_bytes) is None:
            return None
    return True


@given(
    recordings(),
    st.integers(0, 500),
    st.integers(1, 2000).map(lambda n: 256 * n),
    st.floats(1, 2),
)
def test_a_size_is_made_smaller_until_it_is_not_crowded(
    recording: Recording, size: int, batch_bytes: int, roomier: float
) -> None:
    least = allocations.least_pool(allocations.at_size(recording, max(1, size)))
    known = Recorded(
        pools={recording.size: least},
        best=recording,
        pool_bytes=rounded(int(least * roomier)),
        batch_bytes=batch_bytes,
        reads_into_pool=True,
    )
    found = known.less_crowded(size)
    assert size * 0.6 - 6 <= found <= size
    if found < size:
        assert known.less_crowded(found) <= found
        assert size not in known.pools
    assert replace(known, reads_into_pool=False).less_crowded(size) == size
    assert known.less_crowded(recording.size) == recording.size  # it was tried
