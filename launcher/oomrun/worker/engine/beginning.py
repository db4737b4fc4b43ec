"""What is done before all else of a step, so that it can be undone.

Covers: a function of its own that copies what the step may change, and sets back its
line. Does not cover: what is copied (``snapshot.py``), where the line is crossed
(``line.py``).

In the step's own graph it would be run when its executor comes to it, since TensorFlow
orders what uses one variable, and nothing else: it may be when half of the step is
done. And there all of the step would have to wait for it, initial values of variables
too, which are taken out of the graph (docs/decisions/0042).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from oomrun.worker.engine.line import Line
from oomrun.worker.engine.snapshot import Snapshot

__all__ = ["Beginning"]


class Beginning:
    """Called before each step, when that has been traced.

    Args:
        line: of the step.
        snapshot: of what it changes.
        eagerly: whether steps are run so.
    """

    def __init__(self, line: Line, snapshot: Snapshot, *, eagerly: bool) -> None:
        self._line, self._snapshot, self._eagerly = line, snapshot, eagerly
        self._run: Callable[[], Any] | None = None

    def __call__(self) -> None:
        """Nothing of the step may have run."""
        if self._snapshot.grew() or self._run is None:
            self._run = self._begin if self._eagerly else _compiled(self._begin)
        self._run()

    def _begin(self) -> None:
        # The line last: where a copy failed it tells of the step before, whose weights
        # were written, so that nothing is undone with half of the copies.
        with tf.control_dependencies(self._snapshot.take()):
            self._line.begin()


def _compiled(begin: Callable[[], None]) -> Callable[[], Any]:
    function = tf.function(tf.autograph.experimental.do_not_convert(begin))
    # Called as it is: to look it up would take as long as to run it.
    return function.get_concrete_function()  # type: ignore[no-any-return]
