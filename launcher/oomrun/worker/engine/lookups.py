"""Where the rows of a sparse gradient come from, read from the graph of a step.

A table that is looked up by the items of each sample has a row of gradient for each of
them: those of a whole batch are those of its parts, one after the other. But a step may
look each item up once, however many samples have it (Keras multiplies sparse tensors
so), and then the whole batch has one row for it, which is the sum of those of the
parts. Keras's optimizers square row by row, so that to them it is not the same.

What is followed are operations that leave distinct numbers distinct, through calls of
functions (a layer's own ``tf.function``). Where distinct numbers are made into others
in another way, or some lookups of a table are of one kind and some of the other, what
the rows are cannot be told.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

__all__ = ["TWO_WAYS", "Kind", "inexact", "kind"]

#: What ``inexact`` means.
TWO_WAYS = (
    "it looks a table up for each sample, and once for all of them, and its optimizer "
    "takes the rows of such a gradient one by one"
)

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_UNIQUE = ("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2")
#: The gradients of lookups that add up what they find: values, and distinct places.
_SUMMED = (
    "SparseSegmentMeanGradV2", "SparseSegmentSqrtNGradV2", "SparseSegmentSumGradV2",
)  # fmt: skip
#: The first of what they are given, in another form.
_AS_GIVEN = (
    "Cast", "EnsureShape", "ExpandDims", "Identity", "Neg", "PreventGradient",
    "Reshape", "Snapshot", "Squeeze", "StopGradient",
)  # fmt: skip
_SHIFTS = ("Add", "AddV2", "Sub")
_ONLY_SHAPE = ("Rank", "Shape", "ShapeN", "Size")

#: The calls, outermost first, of the function that a tensor is in.
_Calls = tuple[Any, ...]
_Place = tuple[Any, _Calls]


class Kind(enum.Enum):
    """How the rows of a whole batch follow from those of its parts."""

    #: They are all of theirs, one after the other.
    EACH = "each"
    #: One for each place, the sum of what the parts have for it.
    ONCE = "once"
    #: Neither of the two.
    NEITHER = "neither"


def kind(gradient: tf.IndexedSlices) -> Kind:
    """Of a gradient that was traced; EACH of one that was not."""
    if isinstance(gradient.indices, tf.__internal__.EagerTensor):
        return Kind.EACH
    pieces = list(_pieces(_resolved(gradient.indices, ())))
    if len(pieces) == 1:
        return _kind(pieces[0])
    kinds = {_kind(piece) for piece in pieces}
    if kinds != {Kind.EACH}:
        return Kind.NEITHER
    # Where all are fixed, ``rows.joined`` sees that each part has the same.
    fixed = {_fixed(piece) for piece in pieces}
    return Kind.NEITHER if len(fixed) > 1 else Kind.EACH


def inexact(gradients: Any, optimizer: Any) -> bool:
    """Whether what parts give for ``gradients`` is not what the whole batch would.

    Args:
        gradients: of one part, traced.
        optimizer: that is given them.
    """
    sparse = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
    if not sparse or _is_linear(optimizer):
        return False
    return any(kind(gradient) is Kind.NEITHER for gradient in sparse)


def _is_linear(optimizer: Any) -> bool:
    """Whether it adds up the rows of a gradient, and does nothing else to them."""
    clips = ("clipnorm", "clipvalue", "global_clipnorm")
    return type(optimizer) is keras.optimizers.SGD and not any(
        getattr(optimizer, name, None) for name in clips
    )


def _kind(place: _Place) -> Kind:
    if _distinct(place):
        return Kind.ONCE
    return Kind.NEITHER if _from_distinct(place) else Kind.EACH


def _pieces(place: _Place) -> Iterator[_Place]:
    """What was put one behind the other: a table's lookups, if it has several."""
    (tensor, calls), operation = place, place[0].op
    if operation.type in ("Identity", "Cast", "Reshape"):
        yield from _pieces(_given(operation, 0, calls))
    elif operation.type == "ConcatV2":
        for index in range(len(operation.inputs) - 1):
            yield from _pieces(_given(operation, index, calls))
    else:
        yield tensor, calls


def _distinct(place: _Place) -> bool:
    """Whether no two numbers of a tensor are the same, whatever the samples are."""
    (tensor, calls), operation = place, place[0].op
    name, output = operation.type, tensor.value_index

    def given(index: int) -> bool:
        return _distinct(_given(operation, index, calls))

    if name in _UNIQUE:
        return bool(output == 0 and tensor.shape.rank == 1)
    if name in _SUMMED:
        return bool(output == 1)
    if name == "Where":
        return bool(operation.inputs[0].shape.rank == 1)
    if name == "TopKV2":
        return tensor.shape.rank == 1 and (output == 1 or given(0))
    if name in _AS_GIVEN:
        return given(0)
    if name == "IdentityN":
        return given(output)
    if name in _SHIFTS:
        ranks = [value.shape.rank for value in operation.inputs]
        return (ranks[1] == 0 and given(0)) or (ranks[0] == 0 and given(1))
    if name == "SelectV2":  # Keras's lookups count negative numbers from the end
        return given(1) and given(2)
    if name == "GatherV2":
        return given(0) and given(1)
    return bool(name == "Range" and tf.get_static_value(tensor) is None)


def _from_distinct(place: _Place) -> bool:
    """Whether what is distinct in each part goes into a tensor."""
    return any(op.type in (*_UNIQUE, *_SUMMED) for op in _behind(place))


def _fixed(place: _Place) -> bool:
    """Whether a tensor holds the same whatever the samples are, and their number."""
    return all(
        operation.type == "Const"
        or (
            (operation.inputs and not operation.op_def.is_stateful)
            and operation.type not in (*_ONLY_SHAPE, "PlaceholderWithDefault")
        )
        for operation in _behind(place)
    )


def _behind(place: _Place) -> Iterator[Any]:
    """All operations that a tensor's values, not just its shape, come from."""
    waiting, seen = [place], set()
    while waiting:
        tensor, calls = waiting.pop()
        operation = tensor.op
        key = (operation.name, *(call.name for call in calls))
        if key in seen:
            continue
        seen.add(key)
        yield operation
        if operation.type not in _ONLY_SHAPE:
            count = len(operation.inputs)
            waiting += [_given(operation, index, calls) for index in range(count)]


def _given(operation: Any, index: int, calls: _Calls) -> _Place:
    return _resolved(operation.inputs[index], calls)


def _resolved(tensor: Any, calls: _Calls) -> _Place:
    """Where a tensor is made that a call has returned, or was given."""
    while True:
        operation = tensor.op
        if operation.type in _CALLS:
            called = operation.graph._get_function(operation.get_attr("f").name)
            graph = getattr(called, "graph", None)
            if graph is None:
                return tensor, calls
            tensor, calls = graph.outputs[tensor.value_index], (*calls, operation)
        elif operation.type == "Placeholder" and calls:
            names = [given.name for given in tensor.graph.inputs]
            if tensor.name not in names:
                return tensor, calls
            tensor = calls[-1].inputs[names.index(tensor.name)]
            calls = calls[:-1]
        else:
            return tensor, calls
