"""A key of what is trained: equal for two trainings only where memory is used alike.

Covers: the model's structure and code, loss, metrics, optimizer, how it is compiled and
a batch without its size. Names that Keras numbers, learning rates, seeds and the values
of weights are not in it. Does not cover: device, versions and the rest that the
supervisor knows (``oomrun.core.profile``).
Source of what is relied on: keras/src/ops/{function,node,operation}.py,
keras/src/trainers/compile_utils.py, 3.3 to 3.15.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework import config

from oomrun.worker.describing import Describer
from oomrun.worker.ownership import Unkeyable, is_own_class

__all__ = ["key_of", "key_of_loop"]

_log = logging.getLogger(__name__)

_ROUNDS = 30

# Methods that Keras calls, or the user overrides, but no step does.
_HARMLESS = frozenset(
    {
        "build_from_config", "compile", "compile_from_config", "count_params",
        "evaluate", "export", "fit", "from_config", "get_build_config",
        "get_compile_config", "get_config", "load_own_variables", "load_weights",
        "make_predict_function", "make_test_function", "make_train_function",
        "predict", "predict_step", "save", "save_own_variables", "save_weights",
        "summary",
    }
)  # fmt: skip
# Of a configuration: names, what is said otherwise, and what only first values need.
_NOT_OF_CONFIG = frozenset(
    {"build_config", "compile_config", "dtype", "learning_rate", "name", "seed",
     "shared_object_id", "trainable"}
)  # fmt: skip
# Keras's own bases: they have nothing to configure beside what is described anyway.
_ABSTRACT = (
    keras.Layer, keras.Model, keras.Operation, keras.Loss, keras.Metric,
    keras.Optimizer, keras.Initializer, keras.regularizers.Regularizer,
    keras.constraints.Constraint, keras.Sequential, keras.layers.Lambda,
)  # fmt: skip
_CONFIGURED = (
    keras.Loss, keras.Metric, keras.Optimizer, keras.regularizers.Regularizer,
    keras.constraints.Constraint,
)  # fmt: skip


def key_of(model: Any, element_spec: Any) -> str | None:
    """The key of a ``fit`` of a Keras model.

    Args:
        model: compiled, and built: it has its variables.
        element_spec: the specs, or the tensors, of one batch as the step gets it.

    Returns:
        None where it cannot be said with certainty what is trained.
    """
    return _key(lambda describer: [describer.value(model)], element_spec)


def key_of_loop(
    loss: Any, things: Iterable[Any], trained: Iterable[Any], element_spec: Any
) -> str | None:
    """The key of a custom loop.

    Args:
        loss: the function, converted by AutoGraph or not.
        things: the optimizer and all that the loop keeps: models, metrics, variables.
        trained: the variables that are trained.
        element_spec: as for ``key_of``.
    """
    return _key(
        lambda describer: [
            describer.value(loss),
            [describer.value(thing) for thing in things],
            [_variable(describer, variable) for variable in trained],
        ],
        element_spec,
    )


def _key(describe: Callable[[Describer], Any], element_spec: Any) -> str | None:
    try:
        content = [*_described(describe), _batch(element_spec), _settings()]
        text = json.dumps(content, separators=(",", ":"))
    except (Unkeyable, RecursionError) as error:
        _log.debug("the training has no key: %s", error)
        return None
    except Exception:  # whatever attributes of a user's object may raise
        _log.debug("the training has no key", exc_info=True)
        return None
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _described(describe: Callable[[Describer], Any]) -> Any:
    names: frozenset[str] = frozenset()
    for _ in range(_ROUNDS):
        describer = Describer(names, _of_keras, _HARMLESS)
        content = describe(describer)
        if describer.used <= names:
            return content
        names |= describer.used
    raise Unkeyable("its code reads ever more names")


# -- what Keras and TensorFlow make --------------------------------------------


def _of_keras(describer: Describer, value: Any) -> Any:
    match value:
        case keras.Variable() | tf.Variable():
            return ["variable", *_variable(describer, value)]
        case keras.KerasTensor() | tf.TensorSpec() | tf.RaggedTensorSpec():
            return ["tensor", type(value).__name__, str(value.dtype), str(value.shape)]
        case tf.Tensor():
            return describer.value(value.numpy()) if hasattr(value, "numpy") else None
        case tf.DType() | tf.TensorShape():
            return [type(value).__name__, str(value)]
        case keras.DTypePolicy():
            return ["policy", type(value).__name__, value.name]
        case keras.random.SeedGenerator() | keras.Initializer() | tf.random.Generator():
            return [type(value).__name__]
        case keras.optimizers.schedules.LearningRateSchedule():
            return ["schedule"]
        case keras.Operation():
            return _operation(describer, value)
        case _ if isinstance(value, _CONFIGURED):
            return _configured(describer, value)
        case tf.data.Dataset():
            return ["dataset", _batch(value.element_spec)]
        case tf.distribute.Strategy():
            return ["strategy", type(value).__name__, str(value.num_replicas_in_sync)]
        case tf.types.experimental.PolymorphicFunction():
            options = ("_jit_compile", "_autograph", "_reduce_retracing")
            return ["tf.function", describer.value(value.python_function),
                    *(str(getattr(value, name, None)) for name in options)]  # fmt: skip
    return None


def _variable(describer: Describer, variable: Any) -> list[Any]:
    name = re.sub(r"(_\d+)?(:\d+)?$", "", str(variable.name).rpartition("/")[2])
    dtype = tf.as_dtype(variable.dtype).name
    parts = ("regularizer", "constraint")
    return [
        name, dtype, str(tuple(variable.shape)), str(variable.trainable),
        *(describer.value(getattr(variable, part, None)) for part in parts),
    ]  # fmt: skip


def _operation(describer: Describer, operation: Any) -> Any:
    """A layer, a model, or an operation between tensors of a functional model."""
    facts = _configured(describer, operation)
    if isinstance(operation, keras.Layer):
        facts += _layer(describer, operation)
    if isinstance(operation, keras.Sequential):
        facts.append([describer.value(layer) for layer in operation.layers])
    elif hasattr(operation, "_nodes_by_depth"):
        facts.append(_graph(describer, operation))
    if isinstance(operation, keras.Model) and getattr(operation, "compiled", False):
        facts.append(_compiled(describer, operation))
    return facts


def _layer(describer: Describer, layer: Any) -> list[Any]:
    own = {id(weight) for weight in layer.trainable_weights}
    remat = getattr(layer, "_remat_mode", None)
    return [
        ["trainable", str(layer.trainable), layer.dtype_policy.name],
        [
            [*_variable(describer, weight), str(id(weight) in own)]
            for weight in layer.weights
        ],
        ["remat", describer.value(remat and tuple(vars(remat).items()))],
        describer.value(getattr(layer, "activity_regularizer", None)),
        [
            describer.value(inner)
            for inner in layer._flatten_layers(include_self=False, recursive=False)
        ],
    ]


def _graph(describer: Describer, model: Any) -> list[Any]:
    """How the operations of a functional model are joined."""
    places: dict[int, list[str]] = {}
    nodes = [
        node
        for depth in sorted(model._nodes_by_depth, reverse=True)
        for node in model._nodes_by_depth[depth]
    ]
    for number, node in enumerate(nodes):
        for place, output in enumerate(node.outputs):
            places[id(output)] = [str(number), str(place)]

    def argument(value: Any) -> Any:
        if isinstance(value, keras.KerasTensor):
            return ["from", places.get(id(value)), str(value.dtype), str(value.shape)]
        return describer.value(value)

    def arguments(value: Any) -> Any:
        # By hand, since the structure counts and not only its leaves.
        if isinstance(value, dict):
            return [[str(key), arguments(item)] for key, item in value.items()]
        if isinstance(value, list | tuple):
            return [type(value).__name__, *map(arguments, value)]
        return argument(value)

    return [
        *(
            [
                describer.value(node.operation),
                arguments(node.arguments.args),
                arguments(node.arguments.kwargs),
                [[str(o.dtype), str(o.shape)] for o in node.outputs],
            ]
            for node in nodes
        ),
        arguments(model._inputs_struct),
        arguments(model._outputs_struct),
    ]


def _compiled(describer: Describer, model: Any) -> list[Any]:
    loss, metrics = model._compile_loss, model._compile_metrics
    flags = ("jit_compile", "run_eagerly", "steps_per_execution", "auto_scale_loss")
    return [
        describer.value(getattr(model, "optimizer", None)),
        [str(getattr(model, flag, None)) for flag in flags],
        [
            describer.value(getattr(part, name, None))
            for part, name in (
                (loss, "_user_loss"),
                (loss, "_user_loss_weights"),
                (metrics, "_user_metrics"),
                (metrics, "_user_weighted_metrics"),
            )
        ],
    ]


def _configured(describer: Describer, value: Any) -> list[Any]:
    """An object of Keras, or of a user's class derived from one of Keras's."""
    cls = type(value)
    library = next(base for base in cls.__mro__ if not is_own_class(base))
    facts = [describer.value(cls)]
    if library not in _ABSTRACT and not hasattr(value, "_nodes_by_depth"):
        facts.append(_configuration(describer, library, value))
    if is_own_class(cls):
        return [*facts, *describer.attributes(value)]
    return [*facts, *describer.own_parts(value)]


def _configuration(describer: Describer, library: type, value: Any) -> Any:
    try:
        # Of the library's class: a user's may tell only what a constructor needs.
        found = library.get_config(value)  # type: ignore[attr-defined]
    except Exception:
        # A part of it, such as a cell of the user's, has none.
        found = {
            name: item for name, item in vars(value).items() if not name.startswith("_")
        }
    return _cleaned(describer, found)


def _cleaned(describer: Describer, config: Any) -> Any:
    if isinstance(config, dict):
        return [
            [str(key), _cleaned(describer, item)]
            for key, item in config.items()
            if key not in _NOT_OF_CONFIG and not str(key).endswith("_initializer")
        ]
    if isinstance(config, list | tuple):
        return [type(config).__name__, *(_cleaned(describer, i) for i in config)]
    return describer.value(config)


# -- the batch, and settings of the process ------------------------------------


def _batch(spec: Any) -> Any:
    """A batch's structure, shapes and dtypes, but for the number of its samples."""
    if isinstance(spec, dict):
        return [[str(key), _batch(spec[key])] for key in sorted(spec, key=str)]
    if isinstance(spec, list | tuple):
        return [type(spec).__name__, *map(_batch, spec)]
    if spec is None:
        return "none"
    kind = type(spec).__name__.removesuffix("Spec").removeprefix("Eager")
    if kind not in ("Tensor", "RaggedTensor", "SparseTensor"):
        raise Unkeyable(f"a batch with a {type(spec).__name__}")
    shape = tf.TensorShape(spec.shape)
    inner = "?" if shape.rank is None else str(shape.as_list()[1:])
    rank = str(spec.ragged_rank) if kind == "RaggedTensor" else ""
    return [kind, tf.as_dtype(spec.dtype).name, inner, rank]


def _settings() -> list[Any]:
    """What a script may have set for all that it trains."""
    optimizer, threads = tf.config.optimizer, tf.config.threading
    return [
        str(sys.implementation.cache_tag),
        keras.config.floatx(),
        keras.config.image_data_format(),
        str(tf.config.functions_run_eagerly()),
        str(optimizer.get_jit()),
        sorted((k, str(v)) for k, v in optimizer.get_experimental_options().items()),
        str(threads.get_inter_op_parallelism_threads()),
        str(threads.get_intra_op_parallelism_threads()),
        str(tf.config.experimental.tensor_float_32_execution_enabled()),
        str(tf.config.get_soft_device_placement()),
        str(config.is_op_determinism_enabled()),
        str(getattr(keras.config, "is_flash_attention_enabled", lambda: None)()),
    ]
