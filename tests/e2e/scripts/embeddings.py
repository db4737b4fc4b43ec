"""A recommender: large embedding tables, of which a batch touches few rows."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

# One operation at a time: else a step's peak of memory hangs on chance.
tf.config.threading.set_inter_op_parallelism_threads(1)
keras.backend.set_floatx("float64")
keras.utils.set_random_seed(10)

USERS, ITEMS, WIDTH, SEEN = 5000, 8000, 32, 32
rng = np.random.default_rng(10)
users = rng.integers(0, USERS, size=2560)
histories = rng.integers(0, ITEMS, size=(2560, SEEN))
items = rng.integers(0, ITEMS, size=2560)
liked = ((users + items) % 2).astype("float64")[:, None]

user = keras.Input((), dtype="int64", name="user")
seen = keras.Input((SEEN,), dtype="int64", name="seen")
item = keras.Input((), dtype="int64", name="item")
table = layers.Embedding(ITEMS, WIDTH)  # shared by what was seen and what is offered
offered = table(item)
interest = layers.Dense(4 * WIDTH, activation="tanh")(table(seen))
interest = layers.Dense(WIDTH, activation="tanh")(interest)
interest = layers.Dot(axes=(2, 1))([interest, offered])
score = layers.Dense(1, activation="sigmoid")(
    layers.Concatenate()([interest, layers.Embedding(USERS, WIDTH)(user), offered])
)
model = keras.Model([user, seen, item], score)
model.compile(
    keras.optimizers.Adagrad(0.05), "binary_crossentropy", metrics=["accuracy", "auc"]
)
history = model.fit(
    [users, histories, items], liked, batch_size=1024, epochs=2, verbose=2
)
values = [np.array(v) for _, v in sorted(history.history.items())]
np.savez("weights.npz", *model.get_weights(), *values)
