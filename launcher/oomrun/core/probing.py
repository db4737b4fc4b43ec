"""Which micro-batch to try next, until the one to train with is found.

Covers: ``next_step``, a function of what is known of a model and what is asked for.
Each trial narrows the interval of the prediction (``memory.py``); the next size is the
largest whose upper end is within the budget, so that no trial is expected to run out of
memory. Does not cover: trying it (``worker/probing.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from oomrun.core.batch import accumulation_steps, even_micro_batch
from oomrun.core.memory import MemoryModel
from oomrun.core.reading_ahead import LESS_CROWDED
from oomrun.core.units import format_bytes

__all__ = ["Asked", "NothingFits", "Settled", "Step", "Try", "next_step"]

#: A size this much below the one that could be tried next is good enough; where
#: recorded steps tell which that is; one that an earlier run has come to, or that cost
#: a compilation, where only clearly more could be had.
_NEAR, _NEAR_RECORDED, _NEAR_REMEMBERED = 0.04, 0.02, 0.25
#: The first size where nothing at all is known, not even from the graph.
_FIRST = 2
#: No further than this above what ran is tried next, whatever is predicted.
_FURTHER = 4
#: So much of a size is trained with that ran where the pool was full: in a longer run
#: it may run out.
_FULL = 0.95
#: A size that takes more than this share of what a larger one took saves nothing.
_LESS = 0.98
#: How far the budget must be above a prediction's upper end for a size to go untried.
_SURELY = 1.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a size is looked for.

    Attributes:
        samples: rows of the batch.
        at_most: the user's own upper bound, or ``samples``.
        budget_bytes: what the peak must not exceed.
        spare_bytes: what should be left of that, if it can be had for little.
        trials_left: how many sizes may still be tried.
        failed: the smallest size that ran out of memory; None while none did.
        crowded: the smallest that ran, but might not in each step to come.
        remembered: whether the sizes that ran are those of an earlier training.
        even: whether each other size costs a compilation, so that passes are to be of
            one size.
    """

    samples: int
    at_most: int
    budget_bytes: int
    spare_bytes: int = 0
    trials_left: int
    failed: int | None = None
    crowded: int | None = None
    remembered: bool = False
    even: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """Run a few passes of ``size`` samples, and measure them."""

    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Train with ``size`` samples a pass.

    ``surely``: so far below the budget that nothing need be done to keep it there.
    """

    size: int
    reason: str
    surely: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingFits:
    """Not even one sample at a time."""

    reason: str


Step = Try | Settled | NothingFits


def next_step(known: MemoryModel, asked: Asked) -> Step:
    """The next size to try, or the one to train with.

    Args:
        known: what is known of the model so far.
        asked: what is looked for.
    """
    most = min(asked.at_most, asked.samples)
    if asked.failed is not None:
        most = min(most, asked.failed - 1)
    if most < 1:
        return NothingFits(reason="even one sample at a time ran out of memory")
    asked, tried = _with_spare(known, most, asked), most
    if asked.crowded is not None:
        most = min(most, _below_crowded(known, asked.crowded))
    ran = _largest_that_ran(known, most, asked.budget_bytes)
    wanted = within = known.largest_within(asked.budget_bytes, most)
    # What ran out of memory was predicted to fit as well.
    credible = asked.failed is None
    if wanted == most and credible and _far_below(known, most, asked.budget_bytes):
        return replace(_settled(known, most, asked), surely=True)
    largest = max((m for m in known.measured if m <= tried), default=0)
    wanted = _bounded(known, asked, wanted, ran=ran, largest=largest, most=most)
    counted = known.measured[ran] if ran else 0
    if counted > asked.budget_bytes and ran not in known.recorded.pools:
        return _as_far_as_it_goes(known, ran, asked)
    if asked.even:
        wanted = even_micro_batch(asked.samples, wanted)
    near = _NEAR if known.recorded.best is None else _NEAR_RECORDED
    if asked.remembered or asked.even:
        near = _NEAR_REMEMBERED
    if wanted <= ran * (1 + near):
        return _settled(known, ran or 1, asked)
    if asked.trials_left <= 0 and not ran:
        # All that ran took more than is wanted, and still ran. A smaller size need not
        # take less: sums of sparse gradients grow with the number of parts.
        best = _least(known, most) or (0 if within else _that_ran(known, asked))
        if best:
            return _settled(known, best, asked)
    # Below a size that ran, the line is as good as a trial. Not so with recordings: at
    # each size holes lie elsewhere.
    recorded = known.recorded.best is not None
    proven = (bool(ran) and not recorded) or asked.remembered
    if (proven and wanted < largest) or asked.trials_left <= 0:
        if recorded and ran:
            surely = known.largest_within(asked.budget_bytes, most, tried=False)
            wanted = max(ran, min(wanted, surely))
        return _settled(known, wanted if wanted < largest or not ran else ran, asked)
    return Try(size=wanted)


def _bounded(
    known: MemoryModel, asked: Asked, wanted: int, *, ran: int, largest: int, most: int
) -> int:
    """``wanted``, not further from what is known than can be believed.

    Args:
        known: what is known of the model.
        asked: what is looked for.
        wanted: the largest size that is predicted to fit; 0: none is.
        ran: the largest that ran within the budget.
        largest: the largest that ran.
        most: the upper bound.
    """
    if wanted == 0 and ran == 0:
        # Not even what is smallest is known to fit: it is tried all the same.
        first = _FIRST if not known.measured and not known.static else 1
        wanted = min(most, first)
    if largest:
        wanted = min(wanted, _FURTHER * largest)
    if largest and not ran:
        # Above the budget by what does not shrink as the graph says: half will show.
        wanted = max(wanted, min(known.measured) // 2)
    if asked.failed is not None:
        # Not the next smaller one: half way to what ran, or to nothing.
        wanted = min(wanted, max(1, (largest + asked.failed) // 2))
    return wanted


def _as_far_as_it_goes(known: MemoryModel, ran: int, asked: Asked) -> Settled:
    """A size that ran where the pool was full.

    What it needs is less, but what more would need is not known where all that is left
    over has been handed out.
    """
    full = format_bytes(known.measured[ran])
    if asked.even:
        return _settled(known, ran, asked, f"ran with {full} handed out")
    why = f"leaves some room: {ran} ran with {full} handed out"
    return _settled(known, max(1, int(ran * _FULL)), asked, why)


def _below_crowded(known: MemoryModel, crowded: int) -> int:
    """A little less than it, or a larger one that ran, and was not crowded."""
    ran = (size for size in known.measured if size < crowded)
    return max(1, int(crowded * LESS_CROWDED), *ran)


def _with_spare(known: MemoryModel, most: int, asked: Asked) -> Asked:
    """``asked`` with its spare bytes taken off the budget.

    Not once two sizes ran of which neither leaves as much: a peak that hardly hangs on
    the micro-batch would otherwise be met with ever smaller ones.
    """
    less = max(1, asked.budget_bytes - asked.spare_bytes)
    ran = sum(size <= most for size in known.measured)
    if ran >= 2 and not _largest_that_ran(known, most, less):
        less = asked.budget_bytes
    return replace(asked, budget_bytes=less, spare_bytes=0)


def _largest_that_ran(known: MemoryModel, most: int, budget: int) -> int:
    needed = known.needed
    told, ran_within = known.measured, known.recorded.ran_within
    fitting = (
        size
        for size, peak in needed.items()
        if size <= most and (peak <= budget or ran_within(size, told.get(size), budget))
    )
    return max(fitting, default=0)


def _least(known: MemoryModel, most: int) -> int:
    """The size that ran with the lowest peak, of those that no smaller one undercuts.

    0 where a smaller size took clearly less than the next larger one: it is worth
    going further down.
    """
    ran = sorted(size for size in known.measured if size <= most)
    if len(ran) < 2:
        return 0
    if known.measured[ran[0]] < _LESS * known.measured[ran[1]]:
        return 0
    return min(ran, key=lambda size: (known.measured[size], -size))


def _that_ran(known: MemoryModel, asked: Asked) -> int:
    """The largest that ran all the same where a smaller one has failed; or 0."""
    if asked.failed is None:
        return 0
    most = min(asked.at_most, asked.samples)
    return max((size for size in known.measured if size <= most), default=0)


def _far_below(known: MemoryModel, size: int, budget: int) -> bool:
    """Whether ``size`` surely fits: it is trained, not tried first."""
    peak = known.predict(size)
    return peak is not None and peak.high_bytes * _SURELY <= budget


def _settled(known: MemoryModel, size: int, asked: Asked, why: str = "") -> Settled:
    if asked.even:
        size = even_micro_batch(asked.samples, size)
    passes = accumulation_steps(asked.samples, size)
    why = why or _needs(known, size, asked.budget_bytes)
    return Settled(
        size=size,
        reason=f"micro-batch {size} x {passes} (global {asked.samples}) {why}",
    )


def _needs(known: MemoryModel, size: int, budget_bytes: int) -> str:
    budget = f"{format_bytes(budget_bytes)} that may be used"
    pool_bytes = known.recorded.pools.get(size)
    if pool_bytes is not None and pool_bytes <= budget_bytes:
        # TensorFlow may tell of more, which it hands out where nobody needs it.
        return f"has room in {format_bytes(pool_bytes)} of {budget}"
    if size in known.measured:
        return f"took {format_bytes(known.measured[size])} of {budget}"
    peak = known.predict(size)
    if peak is None:
        return f"of {budget}; what it needs is not known"
    if peak.high_bytes > budget_bytes and known.recorded.pools:
        # Of which it has less in use at a time.
        return f"has room in {format_bytes(peak.high_bytes)}, with the holes in it"
    return f"needs up to {format_bytes(peak.high_bytes)} of {budget}"
