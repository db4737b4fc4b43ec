"""The key of a training with code of the user's own: what of it counts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from oomrun.worker.model_key import key_of

SPEC = (
    tf.TensorSpec((None, 8, 8, 3), tf.float32),
    tf.TensorSpec((None,), tf.int64),
)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    keras.backend.clear_session()


SOURCE = '''
import argparse
import functools
import math
import types
import keras
import numpy as np
import tensorflow as tf

WIDTH = 4
TABLE = np.arange(6)
DATA = np.zeros((100, 100))
args = argparse.Namespace(heads=2, lr=0.1)
config = {"depth": 2}
helpers = types.ModuleType("helpers_of_the_user")
helpers.power = lambda x: x * x
helpers.unused = 1

def decorated(f):
    @functools.wraps(f)
    def inner(*a, **k):
        return f(*a, **k) + 1
    return inner

def shift(x, by=1.0):
    """Moves it."""
    return x + by

@tf.custom_gradient
def passed(x):
    return x, lambda dy: dy * 2

def unused(x):
    return x - 17

def make(k):
    def scaled(x):
        return x * k
    return scaled

class Base(keras.Layer):
    def finish(self, x):
        return keras.ops.relu(x)

class Block(Base):
    gain = 2
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.note = "x"
        self.flag = True
        self.scaled = make(3)
        self.dense = keras.layers.Dense(units)
    @property
    def rate(self):
        return 0.5
    @staticmethod
    def twice(x):
        return x * 2
    @decorated
    def inner(self, x):
        return x * self.rate
    def call(self, x):
        if self.flag:
            x = self.twice(self.inner(x)) * self.gain
        x = passed(shift(helpers.power(x)))
        return self.finish(self.dense(self.scaled(x)) * math.sqrt(args.heads))
    def never_called(self, x):
        return x

class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.flat = keras.layers.Flatten()
        self.blocks = [Block(WIDTH) for _ in range(config["depth"])]
        self.head = keras.layers.Dense(10)
        self.seed = 5
    def call(self, x, training=False):
        x = self.flat(x) * len(TABLE) + DATA.shape[0]
        for block in self.blocks:
            x = block(x)
        return self.head(x)
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}
    def get_config(self):
        return {"rubbish": object()}

net = Net()
net.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
net(np.zeros((1, 8, 8, 3), "float32"))
'''

CHANGED_SOURCE = {
    "global number": ("WIDTH = 4", "WIDTH = 5"),
    "depth from a dictionary": ('"depth": 2', '"depth": 3'),
    "small array": ("np.arange(6)", "np.arange(7)"),
    "values of a small array": ("np.arange(6)", "np.arange(6) * 2"),
    "shape of data": ("(100, 100)", "(101, 100)"),
    "command line": ("heads=2", "heads=3"),
    "function of another module": ("x: x * x", "x: x * x * x"),
    "decorator": ("f(*a, **k) + 1", "f(*a, **k) + 2"),
    "helper": ("return x + by", "return x - by"),
    "default": ("by=1.0", "by=2.0"),
    "gradient": ("dy * 2", "dy * 3"),
    "closure": ("make(3)", "make(4)"),
    "inherited method": ("ops.relu(x)", "ops.gelu(x)"),
    "class attribute": ("gain = 2", "gain = 3"),
    "flag": ("self.flag = True", "self.flag = False"),
    "property": ("return 0.5", "return 0.6"),
    "static method": ("return x * 2", "return x * 4"),
    "decorated method": ("x * self.rate", "x / self.rate"),
    "call": ("* math.sqrt", "/ math.sqrt"),
    "model's call": ("self.flat(x) *", "self.flat(x) +"),
    "train step": ("training=True", "training=False"),
    "part of a layer": ("Dense(units)", "Dense(units, activation='relu')"),
    "order of blocks": ("in self.blocks:", "in self.blocks[::-1]:"),
    "tf.function": ("    @decorated", "    @tf.function\n    @decorated"),
    "compute dtype": ("Block(WIDTH)", "Block(WIDTH, dtype='bfloat16')"),
    "a builtin replaced": ("import types", "import types\nlen = lambda x: 3"),
}

SAME_SOURCE = {
    "comment": ("WIDTH = 4", "# wide\n\nWIDTH = 4"),
    "data": ("np.zeros((100", "np.ones((100"),
    "learning rate": ("lr=0.1", "lr=0.2"),
    "function that is not used": ("x - 17", "x - 18"),
    "method that is not called": ("        return x\n\nclass", "        pass\n\nclass"),
    "attribute that is not read": ('"x"', '"y"'),
    "name in another module": ("unused = 1", "unused = 2"),
    "seed": ("self.seed = 5", "self.seed = 6"),
    "configuration": ("rubbish", "nonsense"),
    "place in the file": ("import math", "import math\nimport json\n\n"),
}


def _net(source: str) -> Any:
    scope: dict[str, Any] = {"__name__": "users_script"}
    code = compile(source, "/home/user/train.py", "exec", dont_inherit=True)
    exec(code, scope)
    return scope["net"]


def _with(change: tuple[str, str]) -> str:
    old, new = change
    assert SOURCE.count(old) == 1, "the change must be one change"
    return SOURCE.replace(old, new)


def test_no_two_changes_of_the_code_have_one_key() -> None:
    keys = {"": key_of(_net(SOURCE), SPEC)}
    for name, change in CHANGED_SOURCE.items():
        keys[name] = key_of(_net(_with(change)), SPEC)
    assert [name for name, key in keys.items() if key is None] == []
    groups: dict[str | None, list[str]] = {}
    for name, key in keys.items():
        groups.setdefault(key, []).append(name)
    assert [names for names in groups.values() if len(names) > 1] == []


@pytest.mark.parametrize("change", SAME_SOURCE.values(), ids=SAME_SOURCE)
def test_code_that_no_step_runs_does_not_change_the_key(
    change: tuple[str, str],
) -> None:
    key = key_of(_net(SOURCE), SPEC)
    assert key is not None
    assert key_of(_net(_with(change)), SPEC) == key


@pytest.mark.parametrize(
    "line",
    [
        "tf.py_function(lambda v: v, [x], tf.float32)",
        "tf.numpy_function(lambda v: v, [x], tf.float32)",
        "eval('x')",
        "x * len(__import__('os').listdir('/'))",
        "x * open('/dev/null').fileno()",
        "x * hash('a')",
        "x * generator.count",
        "x * os.getpid()",
        "x * getpid()",
        "x * random.random()",
        "x * next(counter)",
    ],
)
def test_what_cannot_be_known_has_no_key(line: str) -> None:
    source = SOURCE.replace("import math", "import math, os, random, itertools")
    source = source.replace(
        "WIDTH = 4",
        "from os import getpid\nWIDTH = 4\ncounter = itertools.count()\n"
        "generator = (i for i in range(3))\n",
    )
    assert key_of(_net(source), SPEC) is not None
    source = source.replace(
        "    def never_called", f"    def other(self, x):\n        return {line}\n"
        "    def never_called",
    ).replace("self.dense(self.scaled(x))", "self.dense(x if x is not None else "
              "self.other(x))")  # fmt: skip
    assert key_of(_net(source), SPEC) is None


def test_attributes_that_are_read_by_name_count_all() -> None:
    source = _with(("self.dense(self.scaled(x))", "self.dense(x) * getattr(self, 'a')"))
    source = source.replace("self.note =", "self.a = self.note =")
    dynamic = source.replace("getattr(self, 'a')", "getattr(self, 'no' + self.rest)")
    dynamic = dynamic.replace('self.note = "x"', 'self.note, self.rest = 1.0, "te"')
    dynamic = dynamic.replace("self.a = ", "")
    keys = [
        key_of(_net(text), SPEC)
        for text in (
            source.replace('= "x"', "= 1.0"), source.replace('= "x"', "= 2.0"),
            dynamic, dynamic.replace("1.0, ", "2.0, "),
        )
    ]  # fmt: skip
    assert len({*keys, None}) == 5


def test_another_process_finds_the_same_key(tmp_path: Path) -> None:
    """With another seed of hashes, from another folder, run as the script."""
    script = tmp_path / "train.py"
    script.write_text(SOURCE)
    program = tmp_path / "run.py"
    program.write_text(
        "import sys\nfrom oomrun.worker import script\n"
        "from oomrun.worker.model_key import key_of\nimport tensorflow as tf\n"
        f"script.run_script({str(script)!r}, [])\n"
        "spec = (tf.TensorSpec((None, 8, 8, 3)), tf.TensorSpec((None,), tf.int64))\n"
        "print(key_of(sys.modules['__main__'].net, spec))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["PYTHONHASHSEED"] = "12345"
    found = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        check=True,
        text=True,
        env=environment,
    )
    key = key_of(_net(SOURCE), SPEC)
    assert key is not None
    assert found.stdout.split()[-1] == key
