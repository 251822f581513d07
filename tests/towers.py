"""Runs a model_fn on one device or several, from the same values on the same batches.

Every session has as many logical CPU devices as there are towers, and no soft placement, so that a
tower that doesn't run on its device fails.

A `model_fn` is called with features, labels and mode; `batches` are NumPy nests of features and
labels, one a step; 0 `towers` run the model_fn as it is; `values` are what variables start from, by
name. Options are `static`, whether the graph knows the batch size; `preprocess`, which makes
features and labels of what is fed, as an input_fn does; `epochs`, so many of which an input
pipeline gives, where nothing is fed; `optimized`, as of `session()`; `replicate`, and what that
takes.

An input pipeline is read to its end, but for a model_fn as it is: that takes as many steps, since
it may write once more when it finds no batch.
"""

import contextlib
import functools
import socket
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import steps
from estimator_mgpu.partition.nodes.names import Names

MODES = tf.estimator.ModeKeys
TRAIN = MODES.TRAIN
NAMES = Names('replicate')  # of the ops that are added


def tower_of(name):
    """The number of the tower that an op is a copy in, by the op's name; None for others."""
    copy = NAMES.copy_of(name)
    return None if copy is None else copy.tower


class Run(NamedTuple):
    """What a training run came to: variables by name at the end, and the loss of every step."""

    values: dict[str, np.ndarray]
    losses: list[float]
    graph: tf.Graph
    spec: Any
    start: dict[str, np.ndarray]  # what the variables were before the first step


class Evaluation(NamedTuple):
    """What an evaluation came to: each metric by name, and what every step gave."""

    metrics: dict[str, np.ndarray]
    losses: list[float]
    predictions: list[Any]
    values: dict[str, np.ndarray]  # of variables, the metrics' too


def _placeholder(value, static):
    if value is None:
        return None
    value = np.asarray(value)
    shape = value.shape if static else (None, *value.shape[1:])
    return tf.placeholder(value.dtype, shape if value.shape else [])


def _pipeline(batches, epochs, static):
    """Returns an input pipeline's batch; only the last one of an epoch may be shorter."""
    sizes = [len(tf.nest.flatten(batch)[0]) for batch in batches]
    batch_size = sizes[0]
    assert all(size == batch_size for size in sizes[:-1])
    assert sizes[-1] <= batch_size

    # One array for each tensor of the batches, by its place among them; None has none.
    examples = {}
    for i, leaf in enumerate(zip(*map(tf.nest.flatten, batches))):
        if leaf[0] is not None:
            examples[str(i)] = np.concatenate(leaf)

    dataset = tf.data.Dataset.from_tensor_slices(examples)
    dataset = dataset.batch(batch_size, drop_remainder=static).repeat(epochs).prefetch(1)
    iterator = tf.data.make_initializable_iterator(dataset)
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)

    tensors = iterator.get_next()
    count = len(tf.nest.flatten(batches[0]))
    leaves = [tensors.get(str(i)) for i in range(count)]
    return tf.nest.pack_sequence_as(batches[0], leaves)


@contextlib.contextmanager
def behavior_of(version):
    """TensorFlow 2's loops, variables and shapes, or those of `tf.disable_v2_behavior()`."""
    if version == 'v2' or not tf.control_flow_v2_enabled():
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


def session_config(towers, optimized=False, microbatches=1):
    """The config of `session()`, which says what the arguments are."""
    count = max(towers, 1)
    config = tf.ConfigProto(device_count={'CPU': count}) if optimized else None
    config = estimator_mgpu.session_config(count, config, microbatches)
    config.operation_timeout_in_ms = 120_000  # A step that never ends fails.
    if not towers:
        config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.allow_soft_placement = bool(tf.config.list_physical_devices('GPU'))
    return config


@contextlib.contextmanager
def session(towers, optimized=False, microbatches=1):
    """A session that has a device a tower and puts every op where it's told to.

    On GPUs, it puts elsewhere what has no kernel for them.

    Args:
      towers: how many; 0 is one device, and none of TensorFlow's graph optimizers: they take long,
        and what others are compared with has to be what the graph says.
      optimized: whether all of these run on towers, as in a session of a user's own. Otherwise
        those do that a user gets by default: with several towers almost none. One device has none
        in either case, so what an optimizer changes on one device as well shows as a difference.
      microbatches: as of `replicate()`.
    """
    with tf.Session(config=session_config(towers, optimized, microbatches)) as sess:
        yield sess


def nodes_of_a_step(sess, fetches, feed=None):
    """The nodes that a step ran, as TensorFlow made them, each with its device."""
    options, found = tf.RunOptions(output_partition_graphs=True), tf.RunMetadata()
    sess.run(fetches, feed, options, found)
    return [node for part in found.partition_graphs for node in part.node]


@contextlib.contextmanager
def built(
    model_fn,
    batches,
    towers,
    mode,
    static=True,
    preprocess=None,
    epochs=None,
    replicate=estimator_mgpu.replicate,
    **options,
):
    """The EstimatorSpec, whose graph is the default one, and what each step is fed."""
    with tf.Graph().as_default():
        tf.set_random_seed(7)
        tf.train.get_or_create_global_step()
        if epochs:
            inputs = _pipeline(batches, epochs, static)
            feeds = [None] * len(batches) * epochs
        else:
            inputs = tf.nest.map_structure(lambda x: _placeholder(x, static), batches[0])
            feeds = [_feed(inputs, batch) for batch in batches]

        if towers:
            model_fn = replicate(model_fn, devices=towers, **options)
        features, labels = preprocess(*inputs) if preprocess else inputs
        yield model_fn(features=features, labels=labels, mode=mode), feeds


def graph_of(model_fn, batches, towers, **options):
    """The graph of training, of which nothing runs."""
    with built(model_fn, batches, towers, TRAIN, **options):
        return tf.get_default_graph()


@contextlib.contextmanager
def _started(model_fn, batches, towers, mode, values=None, optimized=False, **options):
    """A session, the EstimatorSpec, what each step is fed, and what variables start from.

    After the last step of an input pipeline, there has to be none.
    """
    with built(model_fn, batches, towers, mode, **options) as (spec, feeds):
        with session(towers, optimized, options.get('microbatches', 1)) as sess:
            yield sess, spec, feeds, initialize(sess, values or {})


def initialize(sess, values):
    """Initializes tables and variables, from `values` where these have a variable's name.

    It's one step, as each step of another kind takes its time to be prepared; and one for local
    variables, if there are any: they may begin with what global ones have.

    Returns:
      What the global variables start from, by name.
    """
    initial = {}
    for variable in tf.global_variables():
        assign = variable.initializer
        if tf.is_tensor(assign):  # of a variable of an imported graph
            assign = assign.op
        initial[variable.op.name] = assign.inputs[1]

    initializers = [tf.global_variables_initializer(), tf.tables_initializer()]
    named = [name for name in initial if name in values]
    given = {initial[name]: values[name] for name in named}
    assert len(given) == len(named), 'Variables that share an initial value need one each.'
    _, start = sess.run([initializers, initial], given)
    if tf.local_variables():
        sess.run(tf.local_variables_initializer())
    return start


def _feed(inputs, batch):
    pairs = zip(tf.nest.flatten(inputs), tf.nest.flatten(batch))
    return {tensor: value for tensor, value in pairs if tensor is not None}


def _run(sess, fetches, feeds, ends):
    """What is fetched in each step; where the data `ends`, one more finds none."""
    found = [sess.run(fetches, feed) for feed in feeds]
    if ends:
        with pytest.raises(tf.errors.OutOfRangeError):
            sess.run(fetches)
    return found


def train(model_fn, batches, towers, *, values=None, steps=None, **options):
    """Trains for one step a batch, or for so many steps."""
    ends = bool(options.get('epochs') and towers and steps is None)
    with _started(model_fn, batches, towers, TRAIN, values, **options) as started:
        sess, spec, feeds, start = started
        variables = {v.op.name: v for v in tf.global_variables()}
        assert {*(values or {})} <= {*variables}
        losses = [loss for loss, _ in _run(sess, [spec.loss, spec.train_op], feeds[:steps], ends)]
        return Run(sess.run(variables), losses, sess.graph, spec, start)


def load(sess, values):
    """Sets variables in one step, as each step of another kind takes its time to be prepared."""
    values = {v.initializer: value for v, value in values.items()}
    sess.run(list(values), {op.inputs[1]: value for op, value in values.items()})


def free_addresses(count):
    """Addresses of this machine at which nothing listens."""
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(('127.0.0.1', 0))) for _ in range(count)]
        return ['{}:{}'.format(*one.getsockname()) for one in free]


def wait_for(condition):
    """Waits up to a minute for what another thread does."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def saved_in(model_dir):
    """The variables of the last checkpoint."""
    reader = tf.train.load_checkpoint(str(model_dir))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def evaluate(model_fn, batches, towers, *, mode=MODES.EVAL, values=None, **options):
    """Evaluates, or predicts, one step a batch."""
    ends = bool(options.get('epochs') and towers)
    with _started(model_fn, batches, towers, mode, values, **options) as started:
        sess, spec, feeds, start = started
        assert values is None or {*start} <= {*values}
        updates = tf.group(*(update for _, update in spec.eval_metric_ops.values()))
        loss = tf.constant(0.0) if spec.loss is None else spec.loss
        losses, predictions, _ = zip(*_run(sess, [loss, spec.predictions, updates], feeds, ends))
        metrics = {name: value for name, (value, _) in spec.eval_metric_ops.items()}
        variables = {v.op.name: v for v in tf.global_variables() + tf.local_variables()}
        metrics, after = sess.run([metrics, variables])
        return Evaluation(metrics, list(losses), list(predictions), after)


def assert_close(ours, one, rtol, name='', floor=0.0):
    """Asserts equal nests of arrays: within `rtol` of the largest entry of each, or of a floor."""
    tf.nest.assert_same_structure(ours, one)
    for found, expected in zip(tf.nest.flatten(ours), tf.nest.flatten(one)):
        found, expected = np.asarray(found), np.asarray(expected)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
        if expected.dtype.kind == 'f':
            scale = max(np.abs(expected).max(), floor) if expected.size else 0.0
            # What is float32 among float64, as tf.metrics is, has its own tolerance.
            own = max(rtol, 1e-5) if expected.dtype == np.float32 else rtol
            np.testing.assert_allclose(found, expected, own, own * scale, err_msg=name)
        else:
            np.testing.assert_array_equal(found, expected, name)


def assert_same(ours, one, rtol=1e-5):
    """Asserts equal variables and losses of two runs."""
    assert set(ours.values) == set(one.values)
    for name, expected in one.values.items():
        assert_close(ours.values[name], expected, rtol, name)
    np.testing.assert_allclose(ours.losses, one.losses, rtol=rtol)
    assert np.isfinite(one.losses).all()


def types_run_once(graph):
    """The types of the ops that depend on the batch, but aren't sharded."""
    return {graph.get_operation_by_name(name).type for name in steps.of_graph(graph).plan.once}


def compare(model_fn, batches, towers, *, rtol=1e-5, **options):
    """Trains on one device and on several, from the same values; they have to agree."""
    one = train(model_fn, batches, 0, **options)
    ours = train(model_fn, batches, towers, values=one.start, **options)
    assert_same(ours, one, rtol)
    return ours, one


def compare_predictions(model_fn, batches, towers, **options):
    """Predicts on one device and on several; it has to agree."""
    one, ours = (evaluate(model_fn, batches, n, mode=MODES.PREDICT, **options) for n in (0, towers))
    assert_close(ours.predictions, one.predictions, 1e-5)


def compare_outputs(programs, batches, towers, **options):
    """Computes what programs make of batches, on one device and on several; it has to agree.

    Args:
      programs: functions of the features, each of which makes a tensor. All are in one graph.
      batches: features.
      towers: how many there are.
      **options: as of `evaluate()`.

    Returns:
      By a program's name, the reasons why ops of it run once.
    """
    graphs = []

    def model_fn(features, labels, mode):
        graphs.append(tf.get_default_graph())
        outputs = {}
        for program in programs:
            with tf.name_scope(program.__name__):
                outputs[program.__name__] = program(features)
        return tf.estimator.EstimatorSpec(mode, predictions=outputs)

    compare_predictions(model_fn, [(features, None) for features in batches], towers, **options)

    reasons = {program.__name__: set() for program in programs}
    for name, (why, _) in steps.of_graph(graphs[-1]).plan.once.items():
        reasons[name.partition('/')[0]].add(why)
    return reasons


_OF_INPUTS = ('static', 'preprocess', 'epochs')  # options that one device has, too


@functools.lru_cache(maxsize=8)
def _on_one_device(model_fn, make_batches, v2, **inputs):
    """What one device comes to: runs of all modes."""
    del v2  # Tells results under TensorFlow 2's behavior from those under TensorFlow 1's.
    batches = make_batches()
    run = train(model_fn, batches, 0, **inputs)
    return run, _others(model_fn, batches, 0, values=run.values, **inputs)


def _others(model_fn, batches, towers, **options):
    """An evaluation and, without labels, predictions."""
    unlabelled = [(features, None) for features, _ in batches]
    modes = [(MODES.EVAL, batches), (MODES.PREDICT, unlabelled)]
    return [evaluate(model_fn, given, towers, mode=mode, **options) for mode, given in modes]


def compare_modes(model_fn, make_batches, towers, *, rtol=1e-5, **options):
    """Trains, evaluates and predicts on one device and on several; all has to agree.

    Both functions are at module level, as one device's results are kept for other numbers of
    towers, and for other options of `replicate()`.
    """
    v2 = tf.control_flow_v2_enabled()
    inputs = {name: options[name] for name in _OF_INPUTS if name in options}
    one, others = _on_one_device(model_fn, make_batches, v2, **inputs)
    batches = make_batches()
    ours = train(model_fn, batches, towers, values=one.start, **options)
    assert_same(ours, one, rtol)
    assert_close(_others(model_fn, batches, towers, values=one.values, **options), others, rtol)
    return ours
