"""TensorFlow's allocator, as far as it decides whether a step has room.

Covers: ``Pool``, one piece of memory that is handed out as the best-fit allocator with
coalescing (BFC) of TensorFlow hands it out. Does not cover: what is asked of it
(``allocations.py``); pools that grow in regions, which lie apart.

Source: ``BFCAllocator`` in xla/tsl/framework: a request is rounded up to 256 bytes and
given the smallest free piece that is large enough, of those the one at the lowest
address. The rest of a piece is split off if the piece has twice what was asked for, or
128 MiB more; otherwise all of it is handed out, and counted as in use. Free neighbours
are joined at once.
"""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["GRAIN", "Pool", "rounded"]

#: Bytes that every piece has a multiple of.
GRAIN = 256
_LARGEST_WASTE = 128 * 2**20
#: A free piece is one number, its length in the high bits: those compare fast.
_BITS = 48
_ADDRESS = (1 << _BITS) - 1


def rounded(size: int) -> int:
    """The bytes that a request counts as where nothing is wasted."""
    return -(-size // GRAIN) * GRAIN or GRAIN


def _is_split(length: int, wanted: int) -> bool:
    """Whether the rest of a free piece stays free."""
    return length >= 2 * wanted or length - wanted >= _LARGEST_WASTE


class Pool:
    """One piece of ``size`` bytes, all of it free.

    Attributes:
        in_use: bytes that are handed out.
        peak: the most that were.
    """

    def __init__(self, size: int) -> None:
        self.in_use = self.peak = 0
        self._free = [size << _BITS]  # in the order in which pieces are looked at
        self._length = {0: size}  # of each piece, by its address
        self._before: dict[int, int] = {size: 0}  # the piece that ends at an address
        self._used: set[int] = set()

    def allocate(self, size: int, *, exactly: bool = False) -> int | None:
        """Hands out a piece; returns its address, None where none is large enough.

        Args:
            size: bytes.
            exactly: no more than that, as the allocator would not do it.
        """
        wanted = rounded(size)
        free = self._free
        place = bisect_left(free, wanted << _BITS)
        if place == len(free):
            return None
        piece = free.pop(place)
        length, address = piece >> _BITS, piece & _ADDRESS
        if length != wanted and (exactly or _is_split(length, wanted)):
            rest = address + wanted
            self._put(address, wanted)
            self._put(rest, length - wanted)
            insort(free, length - wanted << _BITS | rest)
            length = wanted
        self._used.add(address)
        self.in_use += length
        if self.in_use > self.peak:
            self.peak = self.in_use
        return address

    def piece_for(self, size: int) -> tuple[int, int] | None:
        """Address and length of the piece that ``allocate`` would hand out now."""
        wanted = rounded(size)
        place = bisect_left(self._free, wanted << _BITS)
        if place == len(self._free):
            return None
        length, address = self._free[place] >> _BITS, self._free[place] & _ADDRESS
        return address, wanted if _is_split(length, wanted) else length

    def free(self, address: int) -> None:
        """Takes a piece back."""
        used, lengths = self._used, self._length
        used.remove(address)
        length = lengths[address]
        self.in_use -= length
        after = address + length
        if after in lengths and after not in used:
            length += self._take(after)
        before = self._before.get(address)
        if before is not None and before not in used:
            del lengths[address]
            address, length = before, length + self._take(before)
        self._put(address, length)
        insort(self._free, length << _BITS | address)

    def _put(self, address: int, length: int) -> None:
        self._length[address] = length
        self._before[address + length] = address

    def _take(self, address: int) -> int:
        """Takes a free piece out of the books, and returns its length."""
        length = self._length.pop(address)
        self._free.pop(bisect_left(self._free, length << _BITS | address))
        return length
