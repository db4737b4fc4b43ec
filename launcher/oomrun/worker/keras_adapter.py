"""Puts the engine under Keras: ``fit`` keeps all that it does, but not its step.

Covers: replacing, on Keras's own trainer class and once a process, how the train, test
and predict functions are made, the epoch iterator of ``fit``, and ``fit`` itself. The
user's script and its models are not touched.
Source of what is relied on: keras/src/backend/tensorflow/trainer.py, 3.3 to 3.15.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer

from oomrun.worker import (
    building,
    callback_state,
    caveats,
    checkpointing,
    fit_callback,
    measuring,
    optimizers,
    randomness,
    validation,
)
from oomrun.worker.engine import drawing, models, slicing
from oomrun.worker.engine.evaluation import TestFunction
from oomrun.worker.engine.prediction import PredictFunction
from oomrun.worker.engine.trial import Verdict
from oomrun.worker.fit_call import FitCall
from oomrun.worker.position import EpochIterator
from oomrun.worker.session import Session
from oomrun.worker.training import TrainFunction

__all__ = ["install"]

_Trainer = keras_trainer.TensorFlowTrainer


def install(session: Session) -> None:
    """Hooks Keras for ``session``; to be called once, before the script runs."""
    if session.launch.batch_norm == "freeze":
        drawing.freeze_batch_statistics()
    _hook_epoch_iterator(session)
    _hook_train_function(session)
    _hook_test_functions(session)
    _hook_empty_epoch(session)
    _hook_validation(session)
    _Trainer.fit = _fit(session, _Trainer.fit)


def _fit(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(model, *args, **kwargs)
        bound.apply_defaults()
        if session.fit is not None or not getattr(model, "compiled", False):
            return original(*bound.args, **bound.kwargs)  # nested, or Keras's own error
        arguments = bound.arguments
        _override_batch_size(session, arguments)
        call = session.begin_fit(
            model, _fingerprint(model, arguments), arguments["epochs"]
        )
        call.initial_epoch = arguments["initial_epoch"] or 0
        reason = _unmanaged(model)
        call.managed = not reason
        if reason and session.group is not None:
            raise RuntimeError(
                f"{reason}: oomrun cannot share its batches out over several devices. "
                "Write `strategy: single` in the job file"
            )
        if reason and session.several_devices:
            session.note(*caveats.of_one_device(model.name))
        if reason:
            session.note(
                "not-split",
                f"{reason}: its batches are not cut into micro-batches, so they cannot "
                "be made smaller when memory runs out",
            )
        if session.launch.measure:
            # They are for what is trained; some empty the file that they write to.
            arguments["callbacks"] = None
            if reason:
                measuring.leave_unmeasured(session, reason)
        session.fit = call
        try:
            if call.saved is not None and call.saved[0]["result"] is not None:
                return _replay(session, call, arguments)
            arguments["callbacks"] = fit_callback.with_ours(
                session, call, arguments["callbacks"]
            )
            if call.managed:
                call.validation = validation.foreseen(arguments)
            history = original(*bound.args, **bound.kwargs)
            session.end_fit(call, history)
            return history
        except tf.errors.ResourceExhaustedError as error:
            _exhausted_outside_a_step(session, str(error))
            raise
        finally:
            session.fit = None
            fit_callback.without_ours(arguments["callbacks"])

    return fit


def _unmanaged(model: Any) -> str:
    """Why the engine does not take this model's steps; empty where it does."""
    if _replicated(model):
        strategy = type(model.distribute_strategy).__name__
        return f"the script trains {type(model).__name__} in a {strategy} of its own"
    return models.cannot_step(model)


def _replicated(model: Any) -> bool:
    """Whether the script itself spreads the model over devices.

    Its batches are then no tensors, but one for each device.
    """
    return bool(model.distribute_strategy.num_replicas_in_sync > 1)


def _override_batch_size(session: Session, arguments: dict[str, Any]) -> None:
    """The job file's ``batch.global`` takes the place of ``fit``'s ``batch_size``."""
    wanted = session.launch.global_batch_size
    if wanted is None:
        return
    if isinstance(arguments["x"], tf.data.Dataset | keras.utils.PyDataset):
        return  # checked against the data's own batches in the epoch iterator
    arguments["batch_size"] = wanted


def _exhausted_outside_a_step(session: Session, message: str) -> None:
    """Memory ran out in ``fit``, but in none of the passes that the engine makes."""
    call = session.fit
    managed = call is not None and call.managed
    session.micro_batches.report(
        session.current_micro_batch() if managed else None,
        "unknown",
        message,
        recovery="restart" if managed else "none",
    )


def _fingerprint(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """What makes this call of ``fit`` the same one in another run of the script."""
    x = arguments["x"]
    shapes = [
        list(v.shape)
        for v in keras.tree.flatten(x)
        if hasattr(v, "shape") and not isinstance(v, tf.data.Dataset)
    ]
    return {
        "model": type(model).__name__,
        # A lever may have replaced it since the checkpoint was written.
        "optimizer": type(optimizers.written(model.optimizer)).__name__,
        "batch_size": arguments["batch_size"],
        "epochs": arguments["epochs"],
        "steps_per_epoch": arguments["steps_per_epoch"],
        "data": shapes or type(x).__name__,
    }


def _replay(session: Session, call: FitCall, arguments: dict[str, Any]) -> Any:
    """A ``fit`` that was completed before returns what it returned then."""
    assert call.saved is not None
    state, arrays = call.saved
    iterator = EpochIterator(
        distribute_strategy=call.model.distribute_strategy,
        x=arguments["x"],
        y=arguments["y"],
        sample_weight=arguments["sample_weight"],
        batch_size=arguments["batch_size"],
        steps_per_epoch=arguments["steps_per_epoch"],
        shuffle=arguments["shuffle"],
        class_weight=arguments["class_weight"],
        epoch_seed=randomness.EpochSeed(session.launch.seed, call.number),
    )
    # A dataset that the script gives to its next ``fit`` too goes on from where this
    # one left it, after the batch that newer versions of Keras build a model by.
    if hasattr(call.model, "_maybe_symbolic_build"):
        call.model._maybe_symbolic_build(iterator=iterator)
        iterator.reset()
    building.from_spec(call.model, iterator.element_spec)
    if not checkpointing.restore(call.model, state, arrays, session.note):
        building.from_batch(call.model, slicing.as_tensors(iterator.peek()))
        checkpointing.restore(call.model, state, arrays, session.note, whole=True)
    iterator.pass_epochs(len(state["result"]["epochs"]))
    randomness.restore(state["random"])
    history = keras.callbacks.History()
    history.set_model(call.model)
    history.history = state["result"]["history"]
    history.epoch = state["result"]["epochs"]
    call.model.history = history
    callbacks = fit_callback.listed(arguments["callbacks"])
    for callback in callbacks:
        callback.set_model(call.model)
    callback_state.restore(callbacks, state["callbacks"])
    session.replayed(call, state)
    return history


def _hook_epoch_iterator(session: Session) -> None:
    original = keras_trainer.TFEpochIterator

    def make(*args: Any, **kwargs: Any) -> Any:
        call = session.fit
        if call is None:
            return original(*args, **kwargs)  # evaluate, predict
        if call.iterator is not None:
            return original(*args, **kwargs)  # the same in a callback, validation
        seed = randomness.EpochSeed(session.launch.seed, call.number)
        call.iterator = EpochIterator(*args, epoch_seed=seed, **kwargs)
        _check_batch_size(session, call.iterator.batch_size)
        if call.validation is not None:
            call.validation.make(call.model, original, kwargs)
        return call.iterator

    keras_trainer.TFEpochIterator = make


def _check_batch_size(session: Session, found: int | None) -> None:
    wanted = session.launch.global_batch_size
    if wanted is not None and found is not None and wanted != found:
        raise ValueError(
            f"batch.global is {wanted} in the job file, but the script's dataset gives "
            f"batches of {found}: change one of the two"
        )


def _hook_train_function(session: Session) -> None:
    original = _Trainer.make_train_function

    def own(model: Any) -> Any:
        """Keras's train function, made without putting it in our place."""
        ours = model.train_function
        try:
            original(model, force=True)
            return model.train_function
        finally:
            model.train_function = ours

    @functools.wraps(original)
    def make_train_function(model: Any, force: bool = False) -> Any:
        if _unmanaged(model):
            return original(model, force=force)
        if model.train_function is None or force:
            model.train_function = TrainFunction(session, model, lambda: own(model))
        return model.train_function

    _Trainer.make_train_function = make_train_function


def _hook_test_functions(session: Session) -> None:
    make_test, make_predict = (
        _Trainer.make_test_function,
        _Trainer.make_predict_function,
    )

    def _note_metrics(model: Any, verdict: Verdict) -> None:
        for code, text in caveats.of_metrics(model.name, verdict.metrics):
            session.note(code, text)

    @functools.wraps(make_test)
    def make_test_function(model: Any, force: bool = False) -> Any:
        if _replicated(model) or isinstance(
            model.test_step, tf.types.experimental.PolymorphicFunction
        ):
            return make_test(model, force=force)  # the latter: traced once for all
        if model.test_function is None or force:
            model.test_function = TestFunction(
                model, session.micro_batches, functools.partial(_note_metrics, model)
            )
        return model.test_function

    @functools.wraps(make_predict)
    def make_predict_function(model: Any, force: bool = False) -> Any:
        if _replicated(model):
            return make_predict(model, force=force)
        if model.predict_function is None or force:
            make_predict(model, force=True)
            model.predict_function = PredictFunction(
                model,
                model.predict_function,
                session.micro_batches,
                lambda: session.note(*caveats.of_prediction(model.name)),
            )
        return model.predict_function

    _Trainer.make_test_function = make_test_function
    _Trainer.make_predict_function = make_predict_function


def _hook_validation(session: Session) -> None:
    original = _Trainer.evaluate

    @functools.wraps(original)
    def evaluate(model: Any, *args: Any, **kwargs: Any) -> Any:
        call = session.fit
        found = call.validation if call is not None and call.model is model else None
        if found is not None and kwargs.get("_use_cached_eval_dataset"):
            found.before_use(model)
        return original(model, *args, **kwargs)

    _Trainer.evaluate = evaluate


def _hook_empty_epoch(session: Session) -> None:
    """An epoch resumed after its last batch has no step, but it has metrics."""
    original = _Trainer._get_metrics_result_or_logs

    @functools.wraps(original)
    def metrics_or_logs(model: Any, logs: Any) -> Any:
        call = session.fit
        if call is not None and call.model is model and call.entered == call.batches:
            return model.get_metrics_result()
        return original(model, logs)

    _Trainer._get_metrics_result_or_logs = metrics_or_logs
