"""Random numbers: repeatable where the script left them to chance, and kept.

Covers: seeding what the script does not seed itself, so that a restart, which runs
the script from the top, sees the same numbers; saving and restoring the state of the
generators. Not covered, since nothing can reach them: generators seeded from the
system (``numpy.random.default_rng()``), and TensorFlow's stateful random operations
without a seed.

TensorFlow's global seed is left alone on purpose: with it set, ``tf.data`` draws the
same order in every epoch, which would change how an unseeded script trains. Instead,
each unseeded shuffle gets a seed of its own.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import global_seed_generator
from tensorflow.python.eager import context

from oomrun.worker import checkpointing, seeds

__all__ = ["EpochSeed", "global_seed", "restore", "save", "seed_unseeded"]


def global_seed() -> int | None:
    """The script's own TensorFlow seed, None while it has set none."""
    return context.global_seed()  # type: ignore[no-any-return]


def seed_unseeded(seed: int) -> None:
    """Seeds Python's and NumPy's generators, and every unseeded ``tf.data`` shuffle.

    Keras takes the seeds of its initializers and random layers from Python's. Those of
    them that no model keeps are followed from now on, to be saved.
    """
    seeds.follow()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    _seed_shuffles(seed)


def _seed_shuffles(seed: int) -> None:
    original = tf.data.Dataset.shuffle
    seeds = random.Random(seed)

    @functools.wraps(original)
    def shuffle(
        self: Any,
        buffer_size: Any,
        seed: Any = None,
        reshuffle_each_iteration: Any = None,
        name: Any = None,
    ) -> Any:
        if seed is None and global_seed() is None:
            seed = seeds.randrange(1, 2**31)
        return original(
            self,
            buffer_size,
            seed=seed,
            reshuffle_each_iteration=reshuffle_each_iteration,
            name=name,
        )

    tf.data.Dataset.shuffle = shuffle


class EpochSeed:
    """Repeatable shuffling of the arrays given to ``fit`` by an unseeded script.

    Keras shuffles arrays inside a ``tf.data`` pipeline by an operation that cannot be
    rewound. While such a pipeline is built, the operation is replaced by a stateless
    one whose seed depends on the run, the ``fit`` and the epoch.
    """

    def __init__(self, seed: int, fit: int) -> None:
        self._base = (seed * 1_000_003 + fit) % 2**31
        self._epoch = tf.Variable(0, dtype=tf.int32, trainable=False)

    def epoch(self, number: int) -> None:
        """Sets the epoch whose iterator is made next."""
        self._epoch.assign(number)

    def building(self, build: Any) -> Any:
        """The pipeline that ``build()`` makes, with repeatable shuffles."""
        original = tf.random.shuffle

        def shuffle(value: Any, seed: Any = None, name: Any = None) -> Any:
            if seed is not None or global_seed() is not None:
                return original(value, seed=seed, name=name)
            first = tf.cast(tf.reshape(value, [-1])[0], tf.int32)
            pair = tf.stack([self._base + self._epoch, first])
            return tf.random.experimental.stateless_shuffle(value, pair)

        tf.random.shuffle = shuffle
        try:
            return build()
        finally:
            tf.random.shuffle = original


def _keras_generator() -> Any:
    """Keras's global seed generator's variable, None while nothing has used it."""
    generator = global_state.get_global_attribute("global_seed_generator")
    return None if generator is None else generator.state


def save(model: Any = None) -> dict[str, Any]:
    """The state of Python's, NumPy's and Keras's generators, as plain data.

    Args:
        model: has variables that are saved elsewhere; Keras's seed generators that are
            not among them are saved here too.
    """
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
    }
    variable = _keras_generator()
    if variable is not None:
        state["keras"] = np.array(variable.numpy())
    if model is not None:
        kept = checkpointing.training_variables(model)
        state["seeds"] = seeds.save(kept if variable is None else [*kept, variable])
    return state


def restore(state: dict[str, Any]) -> None:
    """Puts the state back that ``save`` returned."""
    if "keras" in state:
        # Making the generator draws from Python's: it comes first.
        global_seed_generator().state.assign(state["keras"])
    seeds.restore(state.get("seeds", {}))
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
