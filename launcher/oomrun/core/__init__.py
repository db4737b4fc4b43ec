"""The pure core: decisions as functions over frozen values. No files, clock, environment or TensorFlow."""
