"""Where variables live, and what has to be there with them."""

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import ROWS, adam, batches, floats, predict, spec_of, step
from towers import assert_close, compare, evaluate, session

CPUS = ['/device:CPU:0', '/device:CPU:1', '/device:CPU:2']
CHOICES = pytest.mark.parametrize('variables', ['cpu', 'first', 'spread'])


def build(model_fn, devices=3, **options):
    """Returns the devices of variables, by name."""
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        batch = tf.placeholder(tf.float32, [ROWS, 3]), tf.placeholder(tf.float32, [ROWS, 1])
        replicated = estimator_mgpu.replicate(model_fn, devices=devices, **options)
        replicated(*batch, tf.estimator.ModeKeys.TRAIN)
        return {v.op.name: v.device for v in tf.global_variables()}


def of_sizes(*sizes):
    """Returns a model_fn with a variable for each of several numbers of entries."""

    def model_fn(features, labels, mode):
        output = sum(
            tf.reduce_sum(features) * tf.reduce_sum(tf.get_variable(f'w{i}', [size]))
            for i, size in enumerate(sizes)
        )
        loss = tf.reduce_mean(tf.square(output - labels))
        return spec_of(mode, loss, tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, step()))

    return model_fn


def test_variables_are_spread_by_bytes():
    """The largest first, each onto the device with the fewest bytes so far."""
    found = build(of_sizes(10, 40, 90, 30, 60, 50))
    # 90 to 0, 60 to 1, 50 to 2, 40 to 2, 30 to 1, and 10 to one with 90.
    expected = {2: 0, 4: 1, 5: 2, 1: 2, 3: 1, 0: 0}
    assert {i: found[f'w{i}'] for i in expected} == {i: CPUS[k] for i, k in expected.items()}


def test_slots_are_with_their_variables():
    found = build(of_sizes(10, 40, 90, 30, 60, 50))
    for i in range(6):
        assert found[f'w{i}/Momentum'] == found[f'w{i}']


def by_hand(features, labels, mode):
    """Moments in variables that are made as BERT's optimizer does, and a moving average."""
    loss = tf.reduce_mean(tf.square(predict(features) - labels))
    trained = tf.trainable_variables()
    gradients = tf.gradients(loss, trained)
    updates = [step().assign_add(1)]
    with tf.control_dependencies(gradients):
        for gradient, variable in zip(gradients, trained):
            moment = tf.get_variable(
                f'{variable.op.name}/moment', variable.shape, initializer=tf.zeros_initializer()
            )
            updates.append(variable.assign_sub(0.01 * moment.assign(0.9 * moment + gradient)))
    with tf.control_dependencies(updates):
        averaged = tf.train.ExponentialMovingAverage(0.9).apply(trained)
    return spec_of(mode, loss, averaged)


def test_what_is_named_under_a_variable_is_with_it():
    found = build(by_hand)
    assert set(found.values()) == {'', *CPUS}
    for name in ('net/w', 'net/b', 'net/v'):
        assert found[f'{name}/moment'] == found[name]
        assert found[f'{name}/ExponentialMovingAverage'] == found[name]


@pytest.mark.parametrize('variables, device', [('cpu', CPUS[0]), ('first', CPUS[1])])
def test_one_place(variables, device):
    found = build(by_hand, devices=['/cpu:1', '/cpu:2'], variables=variables)
    assert {found[name] for name in found if name != 'global_step'} == {device}


def test_a_device_of_the_models_own_stays():
    def model_fn(features, labels, mode):
        with tf.device('/cpu:2'):
            w = tf.get_variable('w', [3, 1])
        loss = tf.reduce_mean(tf.square(features @ w + tf.get_variable('b', [1]) - labels))
        return spec_of(mode, loss, adam(loss))

    for variables in ('cpu', 'first', 'spread'):
        found = build(model_fn, devices=['/cpu:1', '/cpu:0'], variables=variables)
        assert estimator_mgpu.devices.spec_of(found['w']).device_index == 2
        assert found['b'] == ('/device:CPU:0' if variables == 'cpu' else '/device:CPU:1')


def test_late_variables_go_where_there_is_least():
    """Those of a second network that is made after the first one's gradients."""

    def model_fn(features, labels, mode):
        updates = []
        for name, size in ('first', 30), ('second', 20), ('third', 15):
            w = tf.get_variable(name, [3, size])
            loss = tf.reduce_mean(tf.square(features @ w - labels))
            updates.append(tf.train.GradientDescentOptimizer(0.1).minimize(loss))
        return spec_of(mode, loss, *updates, step().assign_add(1))

    found = build(model_fn, devices=2)
    assert [found[name] for name in ('first', 'second', 'third')] == [CPUS[i] for i in (0, 1, 1)]


def of_everything(features, labels, mode):
    """Reads of all kinds, of variables that end up on different devices."""
    table = tf.get_variable('table', [7, 3], partitioner=tf.fixed_size_partitioner(2))
    ids = tf.cast(tf.abs(features[:, 0]) * 3, tf.int32) % 7
    net = features + tf.nn.embedding_lookup(table, ids)
    w, b = tf.get_variable('w', [3, 3]), tf.get_variable('b', [3])
    _, net = tf.while_loop(
        lambda i, _: i < 3, lambda i, x: (i + 1, tf.nn.tanh(x @ w + b)), [0, net]
    )
    net = tf.cond(tf.reduce_sum(w) > 0, lambda: net + b, lambda: net @ w)
    net = tf.layers.batch_normalization(net, training=mode == tf.estimator.ModeKeys.TRAIN)
    output = tf.layers.dense(net, 1)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions={'output': output})
    loss = tf.losses.mean_squared_error(labels, output)
    if mode == tf.estimator.ModeKeys.EVAL:
        metrics = {'error': tf.metrics.mean_absolute_error(labels, output)}
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    optimizer = tf.train.AdamOptimizer(0.01, epsilon=1e-3)
    gradients, variables = zip(*optimizer.compute_gradients(loss))
    clipped, _ = tf.clip_by_global_norm(gradients, 0.1)
    train_op = optimizer.apply_gradients(zip(clipped, variables), step())
    return spec_of(mode, loss, train_op, *tf.get_collection(tf.GraphKeys.UPDATE_OPS))


@CHOICES
def test_all_modes_are_those_of_one_device(variables, behavior):
    given = [(features, labels + 2) for features, labels in batches(steps=5)]
    _, one = compare(of_everything, given, 3, variables=variables)
    for mode in ('eval', 'infer'):
        batch = given if mode == 'eval' else [(features, None) for features, _ in given]
        found = [
            evaluate(of_everything, batch, n, mode=mode, values=one.values, **options)
            for n, options in ((3, {'variables': variables}), (0, {}))
        ]
        assert_close(*found, 1e-5)


@CHOICES
def test_training_by_hand(variables, behavior):
    compare(by_hand, batches(), 3, variables=variables, static=False)


def test_variables_are_on_their_devices():
    """Read from what the run itself executed on each device, without soft placement."""
    with tf.Graph().as_default(), session(3) as sess:
        tf.train.get_or_create_global_step()
        batch = tf.constant(floats(ROWS, 3)), tf.constant(floats(ROWS, 1))
        replicated = estimator_mgpu.replicate(of_sizes(10, 40, 90), devices=3)
        spec = replicated(*batch, tf.estimator.ModeKeys.TRAIN)
        sess.run(tf.global_variables_initializer())
        metadata = tf.RunMetadata()
        options = tf.RunOptions(output_partition_graphs=True)
        sess.run(spec.train_op, options=options, run_metadata=metadata)
    found = {}
    for partition in metadata.partition_graphs:
        for node in partition.node:
            if node.op in ('VarHandleOp', 'ResourceApplyMomentum', 'ResourceApplyKerasMomentum'):
                found[node.name] = int(node.device.rpartition(':')[2])
    expected = {'w2': 0, 'w1': 1, 'w0': 2}
    for name, device in expected.items():
        assert found[name] == found[f'{name}/Momentum'] == device
        assert found[f'Momentum/update_{name}/ResourceApplyMomentum'] == device


def test_an_unknown_place():
    with pytest.raises(ValueError, match="variables='gpu' is not known. Legal are cpu"):
        estimator_mgpu.replicate(by_hand, variables='gpu')
