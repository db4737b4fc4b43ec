"""The engine: one optimizer step over a batch, in as many passes as memory asks for.

Knows TensorFlow and Keras models; does not know jobs, checkpoints or the supervisor.
"""
