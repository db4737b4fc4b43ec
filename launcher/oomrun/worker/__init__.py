"""What runs inside the training process: bootstrap, engine, Keras adapter."""
