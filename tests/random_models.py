"""Model functions at random: a stack of layers, losses, optimizers, metrics and batches."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf
from hypothesis import strategies as st

from random_layers import IDS, LAYERS, WIDTH, Inputs
from random_losses import LOSSES, TF_LOSSES, WEIGHTS, Labels, tf_loss

ModeKeys = tf.estimator.ModeKeys


class Case(NamedTuple):
    """All that is drawn of a model and its batches.

    Attributes:
      layers: names of LAYERS.
      losses: names of LOSSES, or (name of TF_LOSSES, reduction, name of WEIGHTS).
      l2: whether an L2 loss of all variables is added.
      optimizers: one or two names of OPTIMIZERS; the second has every other variable.
      clipping: a name of CLIPPING.
      by_hand: whether tf.gradients computes the gradients, rather than the optimizer.
      features: names of FEATURES; with none, the features are one tensor.
      metrics: names of METRICS.
      outputs: how many numbers are predicted for a row.
      sizes: the rows of each step's batch; of the first alone if they're static.
      static: whether the graph knows the batch size.
      towers: how many.
      v2: TensorFlow 2's behavior, or TensorFlow 1's.
    """

    layers: list[str] = ['dense']
    losses: list[Any] = ['mean']
    l2: bool = False
    optimizers: list[str] = ['sgd']
    clipping: str = 'none'
    by_hand: bool = False
    features: list[str] = []
    metrics: list[str] = []
    outputs: int = 1
    sizes: list[int] = [4, 4]
    static: bool = True
    towers: int = 2
    v2: bool = True


OPTIMIZERS = {
    'sgd': lambda: tf.train.GradientDescentOptimizer(0.01),
    'momentum': lambda: tf.train.MomentumOptimizer(0.01, 0.5),
    'adam': lambda: tf.train.AdamOptimizer(0.01, epsilon=0.1),
    'adagrad': lambda: tf.train.AdagradOptimizer(0.01),
    'rmsprop': lambda: tf.train.RMSPropOptimizer(0.01, epsilon=0.1),
    'ftrl': lambda: tf.train.FtrlOptimizer(0.01, l2_regularization_strength=0.01),
}

CLIPPING = {
    'none': lambda grads: grads,
    'value': lambda grads: [_of_values(g, lambda v: tf.clip_by_value(v, -0.2, 0.2)) for g in grads],
    'norm': lambda grads: [tf.clip_by_norm(g, 0.1) for g in grads],
    'global norm': lambda grads: tf.clip_by_global_norm(grads, 0.1)[0],
}


def _of_values(grad: Any, clip: Any) -> Any:
    """Clips a gradient that is made dense: single slices are no rows of the batch's gradient."""
    return clip(tf.convert_to_tensor(grad))


# What the harness feeds for each extra feature: f(random, rows).
FEATURES = {
    'ids': lambda random, rows: random.randint(0, IDS, [rows, 2]),
    'scalar': lambda random, rows: random.randn() + np.zeros([]),
    'nested': lambda random, rows: (random.randn(rows), {'deep': random.randn(rows, 2)}),
    'sparse': lambda random, rows: random.randint(0, IDS, [rows, 4]),
    'ragged': lambda random, rows: random.randint(0, IDS, [rows, 4]),
    'words': lambda random, rows: np.array([b'a', b'b', b'c'])[random.randint(0, 3, rows)],
}

# tf.metrics computes in float32, so none is a sum that all but cancels.
METRICS = {
    'mean': lambda y, p, loss: tf.metrics.mean(p + 3),
    'weighted mean': lambda y, p, loss: tf.metrics.mean(p[:, 0] + 3, y.weights[:, 0]),
    'loss': lambda y, p, loss: tf.metrics.mean(loss),
    'mean of mean': lambda y, p, loss: tf.metrics.mean(tf.reduce_mean(tf.abs(y.targets - p))),
    'absolute': lambda y, p, loss: tf.metrics.mean_absolute_error(y.targets, p),
    'root': lambda y, p, loss: tf.metrics.root_mean_squared_error(y.targets, p, y.weights),
    'relative': lambda y, p, loss: tf.metrics.mean_relative_error(y.targets, p, y.targets),
    'accuracy': lambda y, p, loss: tf.metrics.accuracy(y.classes, p[:, 0] > 0.1, y.mask[:, 0]),
    'auc': lambda y, p, loss: tf.metrics.auc(y.classes, tf.sigmoid(p[:, 0])),
    'precision': lambda y, p, loss: tf.metrics.precision(y.classes, p[:, 0] > 0.1),
    'recall': lambda y, p, loss: tf.metrics.recall(y.classes, p[:, 0] > 0.1),
    'iou': lambda y, p, loss: tf.metrics.mean_iou(y.classes, p[:, 0] > 0.1, 2),
    'per class': lambda y, p, loss: tf.metrics.mean_per_class_accuracy(y.classes, p[:, 0] > 0.1, 2),
    'below': lambda y, p, loss: tf.metrics.percentage_below(p, 0.2),
    'false positives': lambda y, p, loss: tf.metrics.false_positives_at_thresholds(
        y.classes, tf.sigmoid(p[:, 0]), [0.4, 0.6]
    ),
    'cosine': lambda y, p, loss: tf.metrics.mean_cosine_distance(
        tf.nn.l2_normalize(y.targets, 1), tf.nn.l2_normalize(-p - 3, 1), 1
    ),
    'top 2': lambda y, p, loss: tf.metrics.recall_at_k(
        tf.cast(y.classes, tf.int64), tf.concat([p, -p, p * 0 + 0.1], 1), 2
    ),
}


def _names(of: dict, most: int, least: int = 0) -> st.SearchStrategy:
    return st.lists(st.sampled_from(list(of)), min_size=least, max_size=most, unique=least == 0)


_loss = st.one_of(
    st.sampled_from(list(LOSSES)),
    st.tuples(
        st.sampled_from(list(TF_LOSSES)),
        st.sampled_from([r for r in tf.losses.Reduction.all() if r != 'none']),
        st.sampled_from(list(WEIGHTS)),
    ),
)

cases = st.builds(
    Case,
    layers=_names(LAYERS, 4, 1),
    losses=st.lists(_loss, min_size=1, max_size=2),
    l2=st.booleans(),
    optimizers=_names(OPTIMIZERS, 2, 1),
    clipping=st.sampled_from(list(CLIPPING)),
    by_hand=st.booleans(),
    features=_names(FEATURES, 3),
    metrics=_names(METRICS, 3),
    outputs=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 17), min_size=3, max_size=3),
    static=st.booleans(),
    towers=st.integers(1, 5),
    v2=st.booleans(),
)


def batches_of(case: Case) -> list:
    """Returns what to feed for each step: a nest of features, and labels around 4."""
    random = np.random.RandomState(sum(case.sizes))
    batches = []
    for rows in [case.sizes[0]] * len(case.sizes) if case.static else case.sizes:
        features = random.randn(rows, WIDTH)
        if case.features:
            extra = {name: FEATURES[name](random, rows) for name in case.features}
            features = {'x': features, **extra}
        labels = 4 + 0.5 * random.randn(rows, case.outputs)
        labels[0] = 4.1  # No batch is masked as a whole.
        batches.append((features, labels))
    return batches


def preprocess(features: Any, labels: Any) -> tuple[Any, Any]:
    """Makes what the input_fn would of what is fed."""
    if isinstance(features, dict):
        features = dict(features)
        if 'sparse' in features:
            features['sparse'] = tf.sparse.from_dense(features['sparse'])
        if 'ragged' in features:
            features['ragged'] = tf.RaggedTensor.from_tensor(features['ragged'], padding=0)
    return features, labels


def _first_layer(features: Any) -> tuple[tf.Tensor, Inputs]:
    """Adds up what there is of features."""
    if not isinstance(features, dict):
        features = {'x': features}
    x = features['x']
    table = functools.partial(tf.get_variable, shape=[IDS, WIDTH], dtype=tf.float64)
    if 'nested' in features:
        first, deep = features['nested'][0], features['nested'][1]['deep']
        x += tf.layers.dense(tf.concat([first[:, None], deep], 1), WIDTH, name='nested')
    if 'sparse' in features:
        x += tf.nn.safe_embedding_lookup_sparse(table('sparse'), features['sparse'])
    if 'ragged' in features:
        x += tf.reduce_sum(tf.gather(table('ragged'), features['ragged']), 1)
    if 'words' in features:
        keys = tf.lookup.KeyValueTensorInitializer(tf.constant(['a', 'b']), tf.constant([0, 1]))
        words = tf.lookup.StaticHashTable(keys, 2).lookup(features['words'])
        x += tf.gather(table('words'), words)
    by_x = tf.cast(tf.abs(features['x']) * 10, tf.int64) % IDS
    lengths = 1 + tf.cast(by_x[:, 2], tf.int32) % WIDTH
    scalar = features.get('scalar', tf.constant(0.5, tf.float64))
    return x, Inputs(features.get('ids', by_x[:, :2]), lengths, scalar)


def _forward(case: Case, features: Any) -> tf.Tensor:
    x, inputs = _first_layer(features)
    for i, name in enumerate(case.layers):
        with tf.variable_scope(f'layer_{i}'):
            x = LAYERS[name](x, inputs)
    return tf.layers.dense(x, case.outputs, name='output')


def _loss_of(case: Case, labels: Labels, output: tf.Tensor) -> tf.Tensor:
    terms = list(tf.losses.get_regularization_losses())
    for loss in case.losses:
        if isinstance(loss, str):
            terms.append(LOSSES[loss](labels, output))
        else:
            terms.append(tf.cast(tf_loss(labels, output, *loss), tf.float64))
    if case.l2:
        terms += [0.01 * tf.nn.l2_loss(v) for v in tf.trainable_variables()]
    return tf.add_n(terms)


def _train(case: Case, loss: tf.Tensor) -> tf.Operation:
    """All gradients are computed before any variable changes, and so is the loss."""
    steps = []
    for i, name in enumerate(case.optimizers):
        optimizer = OPTIMIZERS[name]()
        variables = tf.trainable_variables()[i :: len(case.optimizers)]
        if case.by_hand:
            grads = zip(tf.gradients(loss, variables), variables)
        else:
            grads = optimizer.compute_gradients(loss, variables)
        known = [(g, v) for g, v in grads if g is not None]
        if known:
            grads, variables = zip(*known)
            steps.append((optimizer, CLIPPING[case.clipping](list(grads)), variables))
    with tf.control_dependencies([loss, *(g for _, grads, _ in steps for g in grads)]):
        updates = [o.apply_gradients(zip(grads, variables)) for o, grads, variables in steps]
    with tf.control_dependencies(updates):
        return tf.assign_add(tf.train.get_global_step(), 1).op


def model_fn_of(case: Case) -> Any:
    """Returns the model_fn, for all modes."""

    def model_fn(features, labels, mode):
        output = _forward(case, features)
        predictions = {'output': output, 'best': tf.argmax(output, 1)}
        if mode == ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions=predictions)
        targets = Labels.of(labels)
        loss = _loss_of(case, targets, output)
        if mode == ModeKeys.TRAIN:
            return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=_train(case, loss))
        metrics = {name: METRICS[name](targets, output, loss) for name in case.metrics}
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, predictions=predictions, eval_metric_ops=metrics
        )

    return model_fn
