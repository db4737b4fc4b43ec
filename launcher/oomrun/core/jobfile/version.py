"""The version that the schema and the reference speak of."""

VERSION = "0.1"  # core stands alone; a test compares it with oomrun.__version__
