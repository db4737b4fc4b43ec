"""What the graph of a step says of its memory, before it is run.

TensorFlow's own analysis walks the graph of the real training step as a device would
execute it, for any number of rows, on a device that need not be there: 0.05 to 0.6 s
a size, measured. It knows the tensors, not what the executor keeps for longer than it
must, nor what libraries take: measured on CPU devices, real steps took 1.4 times
(a convolutional network) to 2.1 times as much (a transformer).

Source: ``GraphMemory`` in tensorflow/core/grappler/costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.protobuf import device_properties_pb2
from tensorflow.python.framework import meta_graph
from tensorflow.python.grappler import cluster as clusters
from tensorflow.python.grappler import item as items

from oomrun.worker import pool

__all__ = ["GraphPeak", "has_loops", "least_bytes", "peaks"]

_LOOPS = frozenset({"Enter", "For", "StatelessWhile", "While"})

# Of a host with GPUs, for tensors that the analysis makes of weights and batch.
_HOST_ROOM = 2**31

# Only what a device is called decides where its operations go; the numbers are those
# of speed, which is not asked for.
_DEVICE = device_properties_pb2.NamedDevice(
    name="/job:localhost/replica:0/task:0/device:GPU:0",
    properties=device_properties_pb2.DeviceProperties(
        type="GPU",
        vendor="NVIDIA",
        frequency=1500,
        num_cores=64,
        bandwidth=900_000_000,
        memory_size=2**40,
        environment={"architecture": "8"},
    ),
)


@dataclass(frozen=True, slots=True)
class GraphPeak:
    """The peak of a step's graph, in bytes.

    ``activations`` is what of it is neither weights nor batch: the tensors that the
    step itself makes.
    """

    bytes: int
    activations: int


def has_loops(graph: Any) -> bool:
    """Whether ``graph`` has loops, of which the analysis sees one turn."""
    definition = graph.as_graph_def()
    nodes = [*definition.node]
    for function in definition.library.function:
        nodes += function.node_def
    return any(node.op in _LOOPS for node in nodes)


def least_bytes(model: Any, rows: int) -> int:
    """What a step over so many rows needs at least, by what Keras knows; 0: nothing.

    The largest output of a layer, and its gradient. The analysis of the graph does not
    count tensors whose shape it cannot tell, as behind ``tf.repeat``.

    Args:
        model: has layers.
        rows: of a batch.
    """
    largest = 0
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.InputLayer):
            continue  # the batch: it has no gradient
        try:
            outputs = keras.tree.flatten(layer.output)
        except (AttributeError, ValueError):
            continue  # it was never called on symbols, or several times
        for output in outputs:
            shape = tuple(getattr(output, "shape", (None, None)))[1:]
            if None not in shape:
                largest = max(largest, math.prod(shape) * _item_bytes(output))
    return 2 * rows * largest


def _item_bytes(tensor: Any) -> int:
    return int(tf.as_dtype(tensor.dtype).size)


def peaks(function: Any, data: Any, sizes: Iterable[int]) -> dict[int, GraphPeak]:
    """A step's peak by rows of its batch; empty where the graph cannot tell.

    Args:
        function: the concrete function of the step, whose first inputs are a batch.
        data: such a batch; of each tensor its shape beyond the rows is taken.
        sizes: numbers of rows.
    """
    batch = keras.tree.flatten(data)
    if not all(isinstance(value, tf.Tensor) for value in batch):
        return {}
    cluster = clusters.Cluster(devices=[_DEVICE])
    try:
        found = {size: _peak(cluster, function, batch, size) for size in sizes}
    except (tf.errors.OpError, ValueError, KeyError, RuntimeError):
        return {}
    finally:
        cluster.Shutdown()
    return found if all(peak.bytes for peak in found.values()) else {}


def _peak(cluster: Any, function: Any, batch: list[Any], size: int) -> GraphPeak:
    graph = function.graph
    definition = graph.as_graph_def()
    nodes = {node.name: node for node in definition.node}
    for placeholder, value in zip(function.inputs, batch, strict=False):
        rows = [size] if value.shape.rank else []
        _set_shape(nodes[placeholder.op.name], [*rows, *value.shape[1:]])
    _name_weights(graph, definition)
    given = [node for node in definition.node if node.op == "Placeholder"]
    if sum(map(_placeholder_bytes, given)) > _room_bytes() // 2:
        for node in given:
            _make_nothing_of(node)
    meta = meta_graph.create_meta_graph_def(graph_def=definition, graph=graph)
    wanted = [*(output.op.name for output in function.outputs)]
    wanted += [operation.name for operation in graph.control_outputs]
    meta.collection_def["train_op"].node_list.value.extend(wanted)
    by_device = cluster.DeterminePeakMemoryUsage(items.Item(meta))
    names = {node.name for node in given}
    found = [_of_device(peak, alive, names) for peak, alive in by_device.values()]
    return max(found, key=lambda peak: peak.bytes, default=GraphPeak(0, 0))


def _of_device(peak: int, alive: Iterable[Any], given: set[str]) -> GraphPeak:
    """From the analysis: the tensors that are alive at the peak, each with its bytes.

    Args:
        peak: their sum.
        alive: of each the operation, which of its outputs, bytes, from when to when.
        given: operations that stand for weights and batch.
    """
    made = sum(int(size) for name, _, size, *_ in alive if name not in given)
    return GraphPeak(int(peak), made)


def _name_weights(graph: Any, definition: Any) -> None:
    """Puts the shapes of variables where they are read: the analysis follows none."""
    handles = {held.op.name: given for given, held in graph.captures}
    variables = {id(variable.handle): variable for variable in graph.variables}
    for node in definition.node:
        if node.op != "ReadVariableOp":
            continue
        variable = variables.get(id(handles.get(node.input[0].split(":")[0])))
        if variable is None:
            continue
        after = [name for name in node.input if name.startswith("^")]
        node.op = "Placeholder"
        del node.input[:]
        node.input.extend(after)
        node.attr.clear()
        node.attr["dtype"].type = variable.dtype.as_datatype_enum
        _set_shape(node, variable.shape)


def _set_shape(node: Any, shape: Iterable[int]) -> None:
    value = node.attr["shape"].shape
    value.Clear()
    for length in shape:
        value.dim.add().size = length


def _placeholder_bytes(node: Any) -> int:
    lengths = [max(1, dim.size) for dim in node.attr["shape"].shape.dim]
    size = tf.as_dtype(node.attr["dtype"].type).size  # None for handles
    return int(math.prod(lengths) * (size or 0))


def _room_bytes() -> int:
    """What may be taken for a moment of the memory that the CPU device uses."""
    limit = pool.limit_bytes()
    if limit is None:
        return _HOST_ROOM
    return max(
        0, limit - int(tf.config.experimental.get_memory_info("CPU:0")["current"])
    )


def _make_nothing_of(node: Any) -> None:
    """Has the analysis make no tensor of a placeholder.

    It makes one for each, in the memory of the CPU device, and dies of SIGSEGV where
    that has no room (measured; ``GrapplerItemFromMetaGraphDef``): several times the
    weights, since an optimizer reads each more than once. Of a variable it makes none,
    but takes it to be there from beginning to end, which is a few percent off.
    """
    node.op = "VariableV2"
    node.ClearField("input")
    for name in set(node.attr) - {"dtype", "shape"}:
        del node.attr[name]
