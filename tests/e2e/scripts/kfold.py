"""Cross-validation: a model for each fold, made, trained and thrown away."""

import keras
import numpy as np
import tensorflow as tf

# One operation at a time: else a step's peak of memory hangs on chance.
tf.config.threading.set_inter_op_parallelism_threads(1)
keras.backend.set_floatx("float64")
keras.utils.set_random_seed(11)

FOLDS = 3
rng = np.random.default_rng(11)
inputs = rng.normal(size=(1536, 20))
targets = np.sin(inputs[:, :1]) + 0.1 * rng.normal(size=(1536, 1))
folds = np.array_split(rng.permutation(len(inputs)), FOLDS)


def make_model():
    model = keras.Sequential(
        [
            keras.Input((20,)),
            keras.layers.Dense(4096, activation="gelu"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True), "mse")
    return model


results = []
for held_out in range(FOLDS):
    keras.backend.clear_session()
    train = np.concatenate([folds[i] for i in range(FOLDS) if i != held_out])
    test = folds[held_out]
    model = make_model()
    history = model.fit(
        inputs[train],
        targets[train],
        batch_size=512,
        epochs=2,
        verbose=2,
        validation_data=(inputs[test], targets[test]),
        validation_batch_size=128,
    )
    score = model.evaluate(inputs[test], targets[test], batch_size=128, verbose=0)
    results += [*model.get_weights(), np.array(score)]
    results += [np.array(v) for _, v in sorted(history.history.items())]
np.savez("weights.npz", *results)
