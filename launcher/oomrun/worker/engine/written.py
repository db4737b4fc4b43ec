"""What a traced step writes and draws, read from its graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from oomrun.worker.engine.applying import optimizers_of
from oomrun.worker.engine.returning import NotCuttableError

__all__ = ["check", "draws", "draws_by_kernel", "outside"]

_WRITES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparse")
_DRAWS = (
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "Random",
    "RngReadAndSkip",
    "StatefulStandardNormal",
    "StatefulTruncatedNormal",
    "StatefulUniform",
    "TruncatedNormal",
)
#: The state of these is a variable.
_DRAWS_BY_VARIABLE = ("RngReadAndSkip", "Stateful")


def draws(graph: Any) -> bool:
    """Whether there is an operation of TensorFlow's that draws random numbers."""
    return any(op.type.startswith(_DRAWS) for op in graph.get_operations())


def draws_by_kernel(graph: Any) -> bool:
    """Whether an operation draws from a generator that no variable holds.

    Such a generator goes on with every run of its function, and cannot be put back.
    """
    return any(
        op.type.startswith(_DRAWS) and not op.type.startswith(_DRAWS_BY_VARIABLE)
        for op in graph.get_operations()
    )


def check(graph: Any, model: Any) -> None:
    """Refuses a step that writes what cannot be written once a part.

    Weights are an optimizer's to write. Variables that the model does not keep are in
    no snapshot: a step that failed could not be undone, nor tried.

    Raises:
        NotCuttableError: the step writes either.
    """
    weights = {id(weight.value.handle) for weight in model.trainable_weights}
    kept = {
        id(variable.value.handle)
        for variables in (
            model.variables,
            model.metrics_variables,
            # A model that lists other metrics does not list these, but has them.
            *(metric.variables for metric in _own_metrics(model)),
            *(optimizer.variables for optimizer in optimizers_of(model)),
        )
        for variable in variables
    }
    for given in _written(graph):
        if id(given) in weights:
            raise NotCuttableError("its step writes weights without an optimizer")
        if id(given) not in kept and not _is_seed(graph, given):
            raise NotCuttableError(
                f"its step writes {_name(graph, given)}, which Keras does not know as "
                "the model's: keep it with add_weight, or as a keras.Variable"
            )


def _own_metrics(model: Any) -> list[Any]:
    if hasattr(model, "_get_own_metrics"):
        return list(model._get_own_metrics())
    # Keras 3.3 has no such method.
    metrics = [model._loss_tracker, model._compile_metrics, *model._metrics]
    return [metric for metric in metrics if metric is not None]


def outside(graph: Any, variables: Iterable[Any]) -> bool:
    """Whether a step writes others than ``variables``, seeds, and what undoes it."""
    kept = {id(variable.value.handle) for variable in variables}
    return any(
        id(given) not in kept
        and not _is_seed(graph, given)
        and not _is_ours(graph, given)
        for given in _written(graph)
    )


def _written(graph: Any) -> Iterator[Any]:
    """The handles of the variables that operations of ``graph`` write."""
    given = {id(held): given for given, held in graph.captures}
    for operation in graph.get_operations():
        if operation.type.startswith(_WRITES):
            found = given.get(id(operation.inputs[0]))
            if found is not None:
                yield found


def _name(graph: Any, handle: Any) -> str:
    for variable in graph.variables:
        if variable.handle is handle:
            return f"the variable {variable.name}"
    return "a variable"


def _is_seed(graph: Any, handle: Any) -> bool:
    """Whether it is the state of a seed generator of Keras's.

    A checkpoint has them all: a model's among its variables, the others apart, see
    ``randomness.py`` and ``seeds.py``.
    """
    return "seed_generator_state" in _name(graph, handle)


def _is_ours(graph: Any, handle: Any) -> bool:
    """Whether it is a copy to undo a step by (``snapshot.py``), or the line in it."""
    return _name(graph, handle).startswith("the variable oomrun_")
