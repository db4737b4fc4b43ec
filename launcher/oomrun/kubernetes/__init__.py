"""A job on Kubernetes: its manifests, their faults, and how its pods ended.

Covers: pure functions from a job to objects as plain dictionaries, to YAML, to what is
wrong with such objects. Does not cover: reading files (``oomrun.cli``).
"""
