"""Pictures of characters, scaled up, and a small convolutional network.

A plain Keras script: it knows nothing of oomrun and runs by itself with
`python train.py`. Set FLOATX=float64 to train in double precision.
"""

import argparse
import os

import keras
import numpy as np

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
train, test = slice(0, 1536), slice(1536, None)

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
model.compile(
    optimizer=keras.optimizers.Adam(1e-3),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
model.fit(
    images[train],
    labels[train],
    batch_size=args.batch_size,
    epochs=args.epochs,
    validation_data=(images[test], labels[test]),
    verbose=2,
)
np.savez(args.output, *[weight.numpy() for weight in model.weights])
print(f"weights written to {args.output}")
