"""The job's state as Prometheus metrics: computed when asked, never counted aside."""

from oomrun.metrics.exporter import Exporter, ExporterError, serve, start

__all__ = ["Exporter", "ExporterError", "serve", "start"]
