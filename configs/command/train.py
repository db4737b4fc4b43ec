"""The quickstart's pictures and a training loop that knows nothing of oomrun.

It trains on micro-batches and adds up their gradients, so that a smaller micro-batch
means more passes and the same model. It goes on from its last epoch if there is one:
`python train.py --micro-batch 64 --steps 4`.
"""

import argparse
import os

import keras
import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--micro-batch", type=int, required=True)
parser.add_argument("--steps", type=int, default=1, help="micro-batches a step")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--output", default="weights.npz", help="the final weights")
args = parser.parse_args()

keras.utils.set_random_seed(42)
# 1,797 pictures of ten made-up characters in noise; each pixel becomes a square.
random = np.random.default_rng(0)
labels = random.integers(0, 10, 1797)
images = random.random((10, 8, 8))[labels] + random.normal(0, 0.5, (1797, 8, 8))
images = np.kron(images, np.ones((1, 8, 8)))
images = images[:1536, ..., np.newaxis].astype("float32")
labels = labels[:1536]
global_batch = args.micro_batch * args.steps

model = keras.Sequential(
    [
        keras.Input((64, 64, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
)
optimizer = keras.optimizers.Adam(1e-3)
optimizer.build(model.trainable_variables)


@tf.function(reduce_retracing=True)
def gradients(x, y):
    """The part of one micro-batch in the gradient of the whole batch."""
    with tf.GradientTape() as tape:
        losses = keras.ops.sparse_categorical_crossentropy(
            y, model(x, training=True), from_logits=True
        )
        loss = tf.reduce_sum(losses) / global_batch
    return loss, tape.gradient(loss, model.trainable_variables)


epoch = tf.Variable(0)
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, epoch=epoch)
folder = os.environ.get("OOMRUN_CHECKPOINT_DIR", "checkpoints")
manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
if manager.restore_or_initialize():
    print(f"going on after epoch {int(epoch)}")

while int(epoch) < args.epochs:
    order = np.random.default_rng(int(epoch)).permutation(len(images))
    for start in range(0, len(order), global_batch):
        total = [tf.zeros_like(weight) for weight in model.trainable_variables]
        loss = 0.0
        for first in range(start, start + global_batch, args.micro_batch):
            rows = order[first : first + args.micro_batch]
            part, grads = gradients(images[rows], labels[rows])
            total = [a + b for a, b in zip(total, grads, strict=True)]
            loss += float(part)
        optimizer.apply_gradients(zip(total, model.trainable_variables, strict=True))
    epoch.assign_add(1)
    manager.save()
    print(f"epoch {int(epoch)}, loss {loss:.4f}")

np.savez(args.output, *[weight.numpy() for weight in model.weights])
