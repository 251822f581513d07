"""Runs a model_fn on one device or several, from the same values on the same batches.

Every session has as many logical CPU devices as there are towers, and no soft placement, so that a
tower that doesn't run on its device fails.
"""

from __future__ import annotations

import contextlib
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
def session(towers: int, **options: Any) -> Iterator[tf.Session]:
    """A session that has a CPU device a tower and puts every op where it's told to."""
    config = tf.ConfigProto(device_count={'CPU': towers}, allow_soft_placement=False, **options)
    with tf.Session(config=config) as sess:
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
    **options: Any,
) -> Run:
    """Trains for one step a batch.

    Args:
      model_fn: called with features, labels and mode.
      batches: NumPy nests of features and labels, of the same structure.
      towers: how many towers; 1 runs the model_fn as it is, undecorated.
      values: what variables start from, by name.
      steps: how many of the batches to train on, by default all.
      static: whether the graph knows the batch size.
      preprocess: makes features and labels of what is fed, as an input_fn does.
      **options: for `replicate()`.
    """
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(7)
        tf.train.get_or_create_global_step()
        inputs = tf.nest.map_structure(lambda x: _placeholder(x, static), batches[0])
        if towers > 1 or options:
            model_fn = estimator_mgpu.replicate(model_fn, devices=towers, **options)
        features, labels = preprocess(*inputs) if preprocess else inputs
        spec = model_fn(features=features, labels=labels, mode=TRAIN)
        variables = {v.op.name: v for v in tf.global_variables()}
        with session(towers) as sess:
            sess.run([tf.global_variables_initializer(), tf.tables_initializer()])
            for name, value in (values or {}).items():
                variables[name].load(value, sess)
            losses = []
            for batch in batches[:steps]:
                feed = zip(tf.nest.flatten(inputs), tf.nest.flatten(batch))
                feed = {tensor: value for tensor, value in feed if tensor is not None}
                losses.append(sess.run([spec.loss, spec.train_op], feed)[0])
            return Run(sess.run(variables), losses, graph, spec)


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
    **options: Any,
) -> Evaluation:
    """Evaluates, or predicts, one step a batch; 1 tower runs the model_fn undecorated."""
    with tf.Graph().as_default():
        tf.set_random_seed(7)
        tf.train.get_or_create_global_step()
        features, labels = tf.nest.map_structure(lambda x: _placeholder(x, static), batches[0])
        inputs = features, labels
        if towers > 1 or options:
            model_fn = estimator_mgpu.replicate(model_fn, devices=towers, **options)
        spec = model_fn(features=features, labels=labels, mode=mode)
        updates = tf.group(*(update for _, update in spec.eval_metric_ops.values()))
        loss = tf.constant(0.0) if spec.loss is None else spec.loss
        variables = {v.op.name: v for v in tf.global_variables()}
        with session(towers) as sess:
            sess.run([tf.global_variables_initializer(), tf.tables_initializer()])
            sess.run(tf.local_variables_initializer())
            for name, value in (values or {}).items():
                variables[name].load(value, sess)
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
        np.testing.assert_allclose(
            ours.values[name], expected, rtol=rtol, atol=rtol * scale, err_msg=name
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
    values = train(model_fn, batches, 1, steps=0, **shared).values
    one = train(model_fn, batches, 1, values=values, **shared)
    ours = train(model_fn, batches, towers, values=values, **shared, **options)
    assert_same(ours, one, rtol)
    return ours, one
