"""oomrun: train a Keras script within the memory there is."""

__all__ = ["__version__"]

__version__ = "0.1.0"
