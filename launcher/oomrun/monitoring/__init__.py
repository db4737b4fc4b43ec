"""Grafana dashboards and Prometheus alert rules for oomrun's metrics, as data."""

from oomrun.monitoring.export import FORMATS, files, stream

__all__ = ["FORMATS", "files", "stream"]
