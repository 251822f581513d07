"""Runs a model_fn on one device or several, from the same values on the same batches.

Every session has as many logical CPU devices as there are towers, and no soft placement, so that a
tower that doesn't run on its device fails.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

import estimator_mgpu

TRAIN = tf.estimator.ModeKeys.TRAIN


class Run(NamedTuple):
    """What a training run came to.

    Attributes:
      values: each variable by name, at the end.
      losses: the loss of every step.
      graph: the graph that was run.
      spec: the EstimatorSpec.
    """

    values: dict[str, np.ndarray]
    losses: list[float]
    graph: tf.Graph
    spec: Any


def _placeholder(value: Any, static: bool) -> tf.Tensor | None:
    if value is None:
        return None
    value = np.asarray(value)
    shape = value.shape if static else (None, *value.shape[1:])
    return tf.placeholder(value.dtype, shape if value.shape else [])


@contextlib.contextmanager
def behavior_of(version: str) -> Iterator[None]:
    """TensorFlow 2's loops, variables and shapes, or those of `tf.disable_v2_behavior()`."""
    if version == 'v2':
        yield
        return
    tf.disable_control_flow_v2()
    tf.disable_resource_variables()
    tf.disable_v2_tensorshape()
    try:
        yield
    finally:
        tf.enable_control_flow_v2()
        tf.enable_resource_variables()
        tf.enable_v2_tensorshape()


@contextlib.contextmanager
def session(towers: int, **options: Any) -> Iterator[tf.Session]:
    """A session that has a device a tower and puts every op where it's told to.

    On GPUs, it puts elsewhere what has no kernel for them.
    """
    soft = bool(tf.config.list_physical_devices('GPU'))
    count = max(towers, 1)
    config = tf.ConfigProto(device_count={'CPU': count}, allow_soft_placement=soft, **options)
    with tf.Session(config=estimator_mgpu.session_config(count, config)) as sess:
        yield sess


def train(
    model_fn: Callable[..., Any],
    batches: Sequence[tuple[Any, Any]],
    towers: int,
    *,
    values: dict[str, np.ndarray] | None = None,
    steps: int | None = None,
    static: bool = True,
    preprocess: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    replicate: Callable[..., Any] = estimator_mgpu.replicate,
    **options: Any,
) -> Run:
    """Trains for one step a batch.

    Args:
      model_fn: called with features, labels and mode.
      batches: NumPy nests of features and labels, of the same structure.
      towers: how many towers; 0 runs the model_fn as it is, undecorated.
      values: what variables start from, by name.
      steps: how many of the batches to train on, by default all.
      static: whether the graph knows the batch size.
      preprocess: makes features and labels of what is fed, as an input_fn does.
      replicate: what replicates the model_fn.
      **options: for `replicate()`.
    """
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(7)
        tf.train.get_or_create_global_step()
        inputs = tf.nest.map_structure(lambda x: _placeholder(x, static), batches[0])
        if towers:
            model_fn = replicate(model_fn, devices=towers, **options)
        features, labels = preprocess(*inputs) if preprocess else inputs
        spec = model_fn(features=features, labels=labels, mode=TRAIN)
        variables = {v.op.name: v for v in tf.global_variables()}
        with session(towers) as sess:
            sess.run([tf.global_variables_initializer(), tf.tables_initializer()])
            load(sess, {variables[name]: value for name, value in (values or {}).items()})
            losses = []
            for batch in batches[:steps]:
                feed = zip(tf.nest.flatten(inputs), tf.nest.flatten(batch))
                feed = {tensor: value for tensor, value in feed if tensor is not None}
                losses.append(sess.run([spec.loss, spec.train_op], feed)[0])
            return Run(sess.run(variables), losses, graph, spec)


def load(sess: tf.Session, values: dict[tf.Variable, np.ndarray]) -> None:
    """Sets variables in one step, as each step of another kind takes its time to be prepared."""
    values = {v.initializer: value for v, value in values.items()}
    sess.run(list(values), {op.inputs[1]: value for op, value in values.items()})


def free_addresses(count: int) -> list[str]:
    """Addresses of this machine at which nothing listens."""
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(('127.0.0.1', 0))) for _ in range(count)]
        return ['{}:{}'.format(*one.getsockname()) for one in free]


def saved_in(model_dir: Any) -> dict[str, np.ndarray]:
    """The variables of the last checkpoint."""
    reader = tf.train.load_checkpoint(str(model_dir))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


class Evaluation(NamedTuple):
    """What an evaluation came to: each metric by name, and the loss of every step."""

    metrics: dict[str, np.ndarray]
    losses: list[float]
    predictions: list[Any]


def evaluate(
    model_fn: Callable[..., Any],
    batches: Sequence[tuple[Any, Any]],
    towers: int,
    *,
    static: bool = True,
    mode: str = tf.estimator.ModeKeys.EVAL,
    values: dict[str, np.ndarray] | None = None,
    preprocess: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    **options: Any,
) -> Evaluation:
    """Evaluates, or predicts, one step a batch; with 0 towers on the model_fn undecorated."""
    with tf.Graph().as_default():
        tf.set_random_seed(7)
        tf.train.get_or_create_global_step()
        inputs = tf.nest.map_structure(lambda x: _placeholder(x, static), batches[0])
        if towers:
            model_fn = estimator_mgpu.replicate(model_fn, devices=towers, **options)
        features, labels = preprocess(*inputs) if preprocess else inputs
        spec = model_fn(features=features, labels=labels, mode=mode)
        updates = tf.group(*(update for _, update in spec.eval_metric_ops.values()))
        loss = tf.constant(0.0) if spec.loss is None else spec.loss
        variables = {v.op.name: v for v in tf.global_variables()}
        with session(towers) as sess:
            sess.run([tf.global_variables_initializer(), tf.tables_initializer()])
            sess.run(tf.local_variables_initializer())
            if values:
                load(sess, {v: values[name] for name, v in variables.items()})
            losses, predictions = [], []
            for batch in batches:
                feed = zip(tf.nest.flatten(inputs), tf.nest.flatten(batch))
                feed = {tensor: value for tensor, value in feed if tensor is not None}
                loss_now, predicted, _ = sess.run([loss, spec.predictions, updates], feed)
                losses.append(loss_now)
                predictions.append(predicted)
            metrics = sess.run({name: value for name, (value, _) in spec.eval_metric_ops.items()})
            return Evaluation(metrics, losses, predictions)


def assert_same(ours: Run, one: Run, rtol: float = 1e-5) -> None:
    """Asserts equal variables: within `rtol` of the largest entry of each."""
    assert set(ours.values) == set(one.values)
    for name, expected in one.values.items():
        assert ours.values[name].shape == expected.shape, name
        assert ours.values[name].dtype == expected.dtype, name
        scale = np.abs(expected).max() if expected.size else 0.0
        # What is float32 among float64 has its own tolerance.
        own = max(rtol, 1e-5) if expected.dtype == np.float32 else rtol
        np.testing.assert_allclose(
            ours.values[name], expected, rtol=own, atol=own * scale, err_msg=name
        )
    np.testing.assert_allclose(ours.losses, one.losses, rtol=rtol)
    assert np.isfinite(one.losses).all()


def compare(
    model_fn: Callable[..., Any],
    batches: Sequence[tuple[Any, Any]],
    towers: int,
    *,
    rtol: float = 1e-5,
    static: bool = True,
    preprocess: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    **options: Any,
) -> tuple[Run, Run]:
    """Trains on one device and on several, from the same values; they have to agree."""
    shared = {'static': static, 'preprocess': preprocess}
    values = train(model_fn, batches, 0, steps=0, **shared).values
    one = train(model_fn, batches, 0, values=values, **shared)
    ours = train(model_fn, batches, towers, values=values, **shared, **options)
    assert_same(ours, one, rtol)
    return ours, one


@functools.lru_cache(maxsize=8)
def _on_one_device(
    model_fn: Callable[..., Any],
    make_batches: Callable[[], Sequence],
    static: bool,
    preprocess: Callable[[Any, Any], tuple[Any, Any]] | None,
    v2: bool,
) -> tuple[dict, Run, Evaluation, Evaluation]:
    """What one device comes to from the same values: initial ones, and runs of all modes."""
    del v2  # Tells results under TensorFlow 2's behavior from those under TensorFlow 1's.
    batches = make_batches()
    shared = {'static': static, 'preprocess': preprocess}
    values = train(model_fn, batches, 0, steps=0, **shared).values
    run = train(model_fn, batches, 0, values=values, **shared)
    evaluation = evaluate(model_fn, batches, 0, values=run.values, **shared)
    return values, run, evaluation, _predict(model_fn, batches, 0, values=run.values, **shared)


def _predict(
    model_fn: Callable[..., Any], batches: Sequence, towers: int, **options: Any
) -> Evaluation:
    mode = tf.estimator.ModeKeys.PREDICT
    unlabelled = [(features, None) for features, _ in batches]
    return evaluate(model_fn, unlabelled, towers, mode=mode, **options)


def compare_modes(
    model_fn: Callable[..., Any],
    make_batches: Callable[[], Sequence],
    towers: int,
    *,
    rtol: float = 1e-5,
    static: bool = True,
    preprocess: Callable[[Any, Any], tuple[Any, Any]] | None = None,
) -> Run:
    """Trains, evaluates and predicts on one device and on several; all has to agree.

    Args:
      model_fn: called with features, labels and mode, for all three modes.
      make_batches: returns NumPy nests of features and labels; both functions are at module level,
        as one device's results are kept for other numbers of towers.
      towers: how many towers.
      rtol: relative to the largest entry of each variable, metric and prediction.
      static: whether the graph knows the batch size.
      preprocess: makes features and labels of what is fed, as an input_fn does.
    """
    shared = {'static': static, 'preprocess': preprocess}
    kept = _on_one_device(model_fn, make_batches, **shared, v2=tf.control_flow_v2_enabled())
    values, one, *others = kept
    batches = make_batches()
    ours = train(model_fn, batches, towers, values=values, **shared)
    assert_same(ours, one, rtol)
    evaluation = evaluate(model_fn, batches, towers, values=one.values, **shared)
    predictions = _predict(model_fn, batches, towers, values=one.values, **shared)
    for found, expected in zip([evaluation, predictions], others):
        assert_close(found, expected, rtol)
    return ours


def assert_close(ours: Any, one: Any, rtol: float) -> None:
    """Asserts equal nests of arrays: within `rtol` of the largest entry of each."""
    tf.nest.assert_same_structure(ours, one)
    for found, expected in zip(tf.nest.flatten(ours), tf.nest.flatten(one)):
        found, expected = np.asarray(found), np.asarray(expected)
        assert found.shape == expected.shape
        if expected.dtype.kind == 'f':
            scale = np.abs(expected).max() if expected.size else 0.0
            # What is float32 among float64, as tf.metrics is, has its own tolerance.
            own = max(rtol, 1e-5) if expected.dtype == np.float32 else rtol
            np.testing.assert_allclose(found, expected, rtol=own, atol=own * scale)
        else:
            np.testing.assert_array_equal(found, expected)
