"""All rows, in the document's order."""

from __future__ import annotations

from engine import (
    cases_data,
    cases_execution,
    cases_fit,
    cases_losses,
    cases_methods,
    cases_metrics,
    cases_models,
    cases_optimizers,
    registry,
)

__all__ = ["ROWS"]

# In the order in which their rows were declared: that of the imports.
_MODULES = (
    cases_data,
    cases_losses,
    cases_metrics,
    cases_fit,
    cases_execution,
    cases_optimizers,
    cases_models,
    cases_methods,
)
ROWS = sorted(
    registry.ROWS.values(),
    key=lambda row: [module.__name__ for module in _MODULES].index(row.run.__module__),
)
