"""The quickstart's characters again, with a training loop of the script's own.

The loop is oomrun's: under `oomrun job.yaml` it recovers from running out of memory and
goes on after an interruption. It runs by itself with `python train.py` as well. Set
FLOATX=float64 to train in double precision.
"""

import argparse
import os

import keras
import numpy as np
import tensorflow as tf

import oomrun

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--size", type=int, default=64, help="pixels a side")
parser.add_argument("--output", default="weights.npz", help="the final weights")
args = parser.parse_args()

keras.backend.set_floatx(os.environ.get("FLOATX", "float32"))
keras.utils.set_random_seed(42)

# 1,797 pictures of ten made-up characters in noise; each pixel becomes a square.
random = np.random.default_rng(0)
labels = random.integers(0, 10, 1797)
images = random.random((10, 8, 8))[labels] + random.normal(0, 0.5, (1797, 8, 8))
scale = args.size // 8
images = np.kron(images, np.ones((1, scale, scale)))
images = images[..., np.newaxis].astype(keras.backend.floatx())
train = tf.data.Dataset.from_tensor_slices((images[:1536], labels[:1536]))
train = train.shuffle(1536, seed=7).batch(args.batch_size)

model = keras.Sequential(
    [
        keras.Input((args.size, args.size, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
accuracy = keras.metrics.SparseCategoricalAccuracy()


def loss(batch):
    """A value for each sample of a batch, or of a part of one."""
    x, y = batch
    predictions = model(x, training=True)
    accuracy.update_state(y, predictions)
    return keras.losses.sparse_categorical_crossentropy(y, predictions)


def tested():
    """The share of the test pictures that the model reads correctly."""
    predictions = model.predict(images[1536:], batch_size=64, verbose=0)
    return float(np.mean(predictions.argmax(1) == labels[1536:]))


loop = oomrun.Loop(loss, keras.optimizers.Adam(1e-3), state=[model, accuracy])
loop.values["best"] = 0.0
for epoch in loop.epochs(args.epochs):
    for batch in loop.batches(train):
        value = loop.step(batch)
    loop.values["best"] = max(loop.values["best"], tested())
    trained = float(accuracy.result())
    print(f"epoch {epoch}: accuracy {trained:.3f}, best {loop.values['best']:.3f}")
    accuracy.reset_state()

np.savez(args.output, *[weight.numpy() for weight in model.weights])
print(f"weights written to {args.output}, best accuracy {loop.values['best']:.3f}")
