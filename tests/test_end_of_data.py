"""Training to the end of the data is training for as many steps; so are evaluating and predicting.

One undecorated device that trains for so many steps says what has to come out. The environment
variable RUNS says how often each model trains.
"""

import os

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.cluster import machine_input, saving
from models import ROWS, LazyAdam, floats, sgd, spec_of, step
from towers import MODES, TRAIN, assert_close, load, session, tower_of

RUNS = [None] * int(os.environ.get('RUNS', '2'))  # each to the end of the data
IDS = 40  # Not all are in a batch.


def dataset():
    """Two epochs of batches of 12, 12 and 7 rows."""
    rows = 2 * ROWS + 7
    ids = np.random.RandomState(0).randint(IDS, size=[rows, 2])
    data = tf.data.Dataset.from_tensor_slices(({'x': floats(rows, 3), 'ids': ids}, floats(rows, 1)))
    return data.batch(ROWS).repeat(2)


STEPS = 6
MACHINES = ['/job:chief/task:0', '/job:worker/task:0', '/job:worker/task:1']


def error_of(features, labels):
    w = tf.get_variable('w', [3, 1])
    return tf.reduce_mean(tf.square(tf.matmul(features['x'], w) - labels))


def momentum(loss):
    return tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, step())


def counter(name):
    return tf.get_variable(name, [], trainable=False, initializer=tf.zeros_initializer())


def regularized(features, labels, mode):
    """By a variable that no example reaches."""
    unreached = tf.get_variable('unreached', [4, 4])
    loss = error_of(features, labels) + tf.nn.l2_loss(unreached)
    return spec_of(mode, loss, momentum(loss))


def with_statistics(features, labels, mode):
    """A product of two of a variable that no example reaches."""
    unreached = tf.get_variable('unreached', [4, 4])
    loss = error_of(features, labels) + tf.reduce_mean(unreached) * tf.reduce_max(unreached)
    return spec_of(mode, loss, momentum(loss))


def embedded_by(make_optimizer):
    def model_fn(features, labels, mode):
        table = tf.get_variable('table', [IDS, 3])
        sums = tf.reduce_sum(tf.nn.embedding_lookup(table, features['ids']), [1, 2])
        loss = error_of(features, labels - sums[:, None])
        return spec_of(mode, loss, make_optimizer().minimize(loss, step()))

    return model_fn


def averaged(features, labels, mode):
    """Averages of all variables after each step, and of one that only a regularizer reaches."""
    unreached = tf.get_variable('unreached', [4, 4])
    loss = error_of(features, labels) + tf.nn.l2_loss(unreached)
    averages = tf.train.ExponentialMovingAverage(0.9)
    with tf.control_dependencies([momentum(loss)]):
        return spec_of(mode, loss, averages.apply(tf.trainable_variables()))


def add_to(variable):
    return lambda: tf.assign_add(variable, 1.0)


def repeat(times, body):
    """The last of what a body makes in a loop, whose turns don't add at the same time."""
    turns = {'parallel_iterations': 1}  # Two that do may lose one, on one device as well.
    return tf.while_loop(lambda i, _: i < times, lambda i, _: (i + 1, body(i)), (0, 0.0), **turns)[
        1
    ]


def counted(features, labels, mode):
    """How many steps there were: alone, in loops and branches, and in those within others."""
    names = ['alone', 'in_loop', 'in_branch', 'first', 'others', 'looped_in_branch', 'after_branch']
    alone, in_loop, in_branch, first, others, looped, after = map(counter, names)
    gate = counter('gate')
    loss = error_of(features, labels)

    def of_first_or_others(i):
        return repeat(2, lambda j: tf.cond(tf.equal(j, 0), add_to(first), add_to(others)))

    writes = [
        momentum(loss),
        alone.assign_add(1.0),
        repeat(3, lambda i: tf.assign_add(in_loop, 1.0)),
        tf.cond(gate < 1, add_to(in_branch), lambda: 0.0),
        repeat(3, of_first_or_others),
        tf.cond(gate < 1, lambda: repeat(2, lambda i: tf.assign_add(looped, 1.0)), lambda: 0.0),
    ]
    # The branch that is taken needs no batch, the other one does.
    branch = tf.cond(gate < 1, lambda: 0.0, lambda: tf.reduce_sum(features['x']))
    with tf.control_dependencies([branch]):
        writes.append(tf.assign_add(after, 1.0))
    return spec_of(mode, loss, *writes)


def accumulated(features, labels, mode):
    """Gradients of two steps at a time, of which a counter of the model's own tells."""
    loss = error_of(features, labels)
    optimizer = tf.train.AdamOptimizer(0.1)
    [(gradient, w)] = optimizer.compute_gradients(loss)
    total = tf.get_variable('total', [3, 1], trainable=False, initializer=tf.zeros_initializer())
    turn = counter('turn')

    def apply():
        with tf.control_dependencies([optimizer.apply_gradients([(total.read_value() / 2, w)])]):
            return tf.group(total.assign(tf.zeros_like(total)))

    with tf.control_dependencies([total.assign_add(gradient)]):
        train_op = tf.cond(tf.equal(turn % 2, 1), apply, tf.no_op)
    with tf.control_dependencies([train_op]):
        return spec_of(mode, loss, turn.assign_add(1.0), step().assign_add(1))


MODELS = {
    'regularized': regularized,
    'statistics': with_statistics,
    'adam': embedded_by(lambda: tf.train.AdamOptimizer(0.1)),
    'ftrl': embedded_by(lambda: tf.train.FtrlOptimizer(0.1)),
    'rmsprop': embedded_by(lambda: tf.train.RMSPropOptimizer(0.1, momentum=0.5)),
    'lazy adam': embedded_by(lambda: LazyAdam(0.1)),
    'averaged': averaged,
    'counted': counted,
    'accumulated': accumulated,
}


def read_all():
    """A batch, and what has it begin with the first one."""
    iterator = tf.data.make_initializable_iterator(dataset())
    return *iterator.get_next(), iterator.initializer


def read_by_machine():
    """The same batch, of which each of three machines reads a part."""

    def input_fn(input_context):
        n, i = input_context.num_input_pipelines, input_context.input_pipeline_id

        def part(*batch):
            rows = tf.shape(batch[1])[0]
            return tf.nest.map_structure(lambda t: t[rows * i // n : rows * (i + 1) // n], batch)

        return dataset().map(part)

    features, labels = machine_input.read(lambda call: call(), input_fn, MACHINES)()
    return features, labels, tf.tables_initializer()


def runs_of(
    model_fn, mode=TRAIN, *, devices=0, values=None, steps=(None,), read=read_all, target=None
):
    """Runs steps, over and over.

    Args:
      values: what variables have before each run; without it, they go on from the run before.
      steps: how many steps, for each run; None for all up to the end of the data.

    Yields:
      The variables that a run comes to.
    """
    with tf.Graph().as_default() as graph:
        tf.train.create_global_step()
        features, labels, begin = read()
        spec = model_fn(features, labels, mode)
        updates = [update for _, update in spec.eval_metric_ops.values()]
        given = spec.train_op, spec.loss, spec.predictions, updates
        fetches = [fetched for fetched in given if fetched is not None]
        variables = {v.op.name: v for v in tf.global_variables() + tf.local_variables()}
        initializers = [tf.global_variables_initializer(), tf.local_variables_initializer()]
        if target:
            saving.place_on_chief(graph)
        with tf.Session(target) if target else session(devices) as sess:
            sess.run(initializers)
            for count in steps:
                load(sess, {variables[name]: value for name, value in (values or {}).items()})
                sess.run(begin)
                try:
                    for _ in range(1000 if count is None else count):
                        sess.run(fetches)
                except tf.errors.OutOfRangeError:
                    assert count is None
                yield sess.run(variables)


def known_steps(model_fn, mode=TRAIN):
    """The initial values, and what as many steps come to on one device, undecorated."""
    return list(runs_of(model_fn, mode, steps=(0, STEPS)))


def compare(model_fn, mode=TRAIN):
    """Compares running to the end of the data, on one and on several devices, with known steps."""
    values, expected = known_steps(model_fn, mode)
    for devices in (1, 3):
        ours = estimator_mgpu.replicate(model_fn, devices=devices)
        for found in runs_of(ours, mode, devices=devices, steps=RUNS, values=values):
            assert_close(found, expected, 1e-4)
    return expected


@pytest.mark.core
@pytest.mark.parametrize('name', MODELS)
def test_training_to_the_end(name, behavior):
    assert compare(MODELS[name])['global_step'] == STEPS


@pytest.mark.parametrize('name', MODELS)
def test_training_on_machines(name, three_machines):
    """Of a batch that one of them reads, and of one of which each reads a part."""
    values, expected = known_steps(MODELS[name])
    devices = [f'{machine}/device:CPU:{i}' for machine in MACHINES for i in range(2)]
    ours = estimator_mgpu.replicate(MODELS[name], devices=devices)
    options = {'steps': RUNS, 'values': values, 'target': three_machines}
    for read in (read_all, read_by_machine):
        for found in runs_of(ours, devices=len(devices), read=read, **options):
            assert_close(found, expected, 1e-4)


def test_evaluating_to_the_end(behavior):
    """A metric and a counter that no example reaches."""

    def model_fn(features, labels, mode):
        unreached = tf.get_variable('unreached', [4])
        metrics = {
            'error': tf.metrics.mean(tf.abs(labels)),
            'unreached': tf.metrics.mean(unreached),
            'count': (counter('other').value(), tf.assign_add(counter('counted'), 1.0)),
        }
        loss = error_of(features, labels)
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)

    found = compare(model_fn, MODES.EVAL)
    assert found['counted'] == STEPS
    assert found['mean_1/count'] == 4 * STEPS  # entries of the variable


def test_calls_in_turn(behavior):
    """Calls that write to one variable: each has an argument that waits for the call before."""

    def model_fn(features, labels, mode):
        initial = tf.zeros_initializer()
        total = tf.get_variable(
            'total', [], use_resource=True, trainable=False, initializer=initial
        )

        @tf2.function
        def add(x):
            total.assign(total * 0.5 + tf.reduce_max(x))
            return x * 2

        first = add(features['x'])
        with tf.control_dependencies([first]):
            second = add(features['x'] * 3)
        last = add(second)
        with tf.control_dependencies([last]):
            counted = step().assign_add(1)
        return spec_of(mode, error_of(features, labels), counted)

    compare(model_fn)


def test_predicting_to_the_end(behavior):
    def model_fn(features, labels, mode):
        counted = tf.assign_add(counter('counted'), 1.0)
        predictions = {
            'x': features['x'],
            'counted': tf.fill([tf.shape(features['x'])[0]], counted),
        }
        return tf.estimator.EstimatorSpec(mode, predictions=predictions)

    assert compare(model_fn, MODES.PREDICT)['counted'] == STEPS


@pytest.mark.parametrize('devices', [1, 3])
def test_an_estimator(devices, tmp_path):
    """As many steps by train(), evaluate() and predict() as there are batches."""

    def model_fn(features, labels, mode):
        count = counter('counted')
        counted = tf.assign_add(count, 1.0)
        if mode == MODES.PREDICT:
            each = tf.fill([tf.shape(features['x'])[0]], counted)
            return tf.estimator.EstimatorSpec(mode, predictions={'count': each})
        loss = error_of(features, labels)
        return tf.estimator.EstimatorSpec(
            mode,
            loss=loss,
            train_op=tf.group(momentum(loss), counted),
            eval_metric_ops={'count': (count.value(), counted)},
        )

    estimator = estimator_mgpu.Estimator(model_fn, str(tmp_path), devices=devices)
    for trained in (STEPS, 2 * STEPS):
        estimator.train(dataset)
        assert estimator.get_variable_value('counted') == trained
    assert estimator.evaluate(dataset)['count'] == 3 * STEPS
    predicted = [each['count'] for each in estimator.predict(dataset)]
    assert len(predicted) == 2 * (2 * ROWS + 7) and predicted[-1] == 3 * STEPS


def iterated(features, labels, mode):
    """An iterator of the model's own."""
    own = tf.data.make_initializable_iterator(tf.data.Dataset.range(100))
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, own.initializer)
    loss = error_of(features, labels)
    number = tf.cast(own.get_next(), tf.float32)
    return spec_of(mode, loss, momentum(loss), tf.assign(counter('own'), number))


def queued(features, labels, mode):
    """A queue that each step puts something into, and takes something out of."""
    queue = tf.FIFOQueue(100, [tf.float32], [[]])
    loss = error_of(features, labels)
    with tf.control_dependencies([queue.enqueue(1.0)]):
        taken = queue.dequeue()
    return spec_of(mode, loss, momentum(loss), tf.assign_add(counter('own'), taken))


@pytest.mark.parametrize('devices', [1, 3])
@pytest.mark.parametrize('model_fn, last', [(iterated, STEPS - 1), (queued, STEPS)])
def test_input_of_the_model_itself(model_fn, last, devices):
    """Goes on with each step, and not beyond the last."""
    estimator = estimator_mgpu.Estimator(model_fn, devices=devices)
    estimator.train(dataset)
    assert estimator.get_variable_value('own') == last
    assert estimator.get_variable_value('global_step') == STEPS


def test_a_write_that_follows_from_the_batch_needs_no_other_edge():
    def model_fn(features, labels, mode):
        loss = error_of(features, labels)
        return spec_of(mode, loss, sgd(loss))

    with tf.Graph().as_default() as graph:
        batch = tf.data.make_one_shot_iterator(dataset()).get_next()
        estimator_mgpu.replicate(model_fn, devices=2)(*batch, TRAIN)
    assert not [op.name for op in graph.get_operations() if 'is_there' in op.name]


def test_features_that_end_and_are_not_used():
    """A write then waits for no batch, as on one device."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(labels - tf.get_variable('w', [1])))
        return spec_of(mode, loss, momentum(loss), tf.assign_add(counter('own'), 1.0))

    with tf.Graph().as_default():
        tf.train.create_global_step()
        features = tf.data.Dataset.from_tensors(floats(ROWS, 3))
        features = tf.data.make_one_shot_iterator(features).get_next()
        labels = tf.placeholder(tf.float32, [ROWS, 1])
        spec = estimator_mgpu.replicate(model_fn, devices=2)(features, labels, TRAIN)
        [own] = [v for v in tf.global_variables() if v.op.name == 'own']
        with session(2) as sess:
            sess.run(tf.global_variables_initializer())
            for _ in range(3):
                sess.run(spec.train_op, {labels: floats(ROWS, 1)})
            assert sess.run(own) == 3


@pytest.mark.parametrize('devices', [1, 2])
def test_labels_that_end_and_are_not_used(devices, behavior):
    """A step doesn't get them on one device, so it doesn't count them on several."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(features * tf.get_variable('w', [1])))
        return spec_of(mode, loss, momentum(loss))

    with tf.Graph().as_default():
        global_step = tf.train.create_global_step()
        examples = tf.data.Dataset.from_tensor_slices(floats(ROWS, 1))
        batch = [
            tf.data.make_one_shot_iterator(dataset.batch(ROWS)).get_next()
            for dataset in (examples.repeat(3), examples)
        ]
        spec = estimator_mgpu.replicate(model_fn, devices=devices)(*batch, TRAIN)
        with session(2) as sess:
            sess.run(tf.global_variables_initializer())
            with pytest.raises(tf.errors.OutOfRangeError):
                while True:
                    sess.run(spec.train_op)
            assert sess.run(global_step) == 3


@pytest.mark.parametrize('devices', [1, 2])
def test_features_that_end_and_no_step_uses(devices, behavior):
    """Writes wait for the features that the step uses, until those end, too."""

    def model_fn(features, labels, mode):
        tf.identity(features['short'], 'for_a_hook')
        loss = tf.reduce_mean(tf.square(labels - features['long'] * tf.get_variable('w', [1])))
        return spec_of(mode, loss, momentum(loss), tf.assign_add(counter('own'), 1.0))

    with tf.Graph().as_default():
        global_step = tf.train.create_global_step()
        features = {}
        for name, count in {'short': 1, 'long': 3}.items():
            examples = tf.data.Dataset.from_tensors(floats(ROWS, 1)).repeat(count)
            features[name] = tf.data.make_one_shot_iterator(examples).get_next()
        labels = tf.constant(floats(ROWS, 1))
        spec = estimator_mgpu.replicate(model_fn, devices=devices)(features, labels, TRAIN)
        [own] = [v for v in tf.global_variables() if v.op.name == 'own']
        with session(2) as sess:
            sess.run(tf.global_variables_initializer())
            with pytest.raises(tf.errors.OutOfRangeError):
                while True:
                    sess.run(spec.train_op)
            assert sess.run([own, global_step]) == [3, 3]


def test_batches_that_go_through_a_queue(behavior):
    """What takes from it doesn't take a batch, which would be lost."""

    def model_fn(features, labels, mode):
        x, y = tf.train.batch(
            [features['x'], labels], ROWS, 1, 500, True, allow_smaller_final_batch=True
        )
        loss = error_of({'x': x}, y)
        rows = tf.cast(tf.shape(y)[0], tf.float32)
        return spec_of(mode, loss, momentum(loss), tf.assign_add(counter('rows'), rows))

    with tf.Graph().as_default():
        tf.train.create_global_step()
        features, labels, begin = read_all()
        ours = estimator_mgpu.replicate(model_fn, devices=1)
        spec = ours(features, labels, TRAIN)
        [rows] = [v for v in tf.global_variables() if v.op.name == 'rows']
        with session(1) as sess:
            sess.run([tf.global_variables_initializer(), tf.local_variables_initializer(), begin])
            coordinator = tf.train.Coordinator()
            threads = tf.train.start_queue_runners(sess, coordinator)
            with pytest.raises(tf.errors.OutOfRangeError):
                while True:
                    sess.run(spec.train_op)
            coordinator.request_stop()
            coordinator.join(threads)
            assert sess.run(rows) == 2 * (2 * ROWS + 7)


def with_noise(features, labels, mode):
    """Random numbers, in an initial value, too; and a feature that isn't used."""
    start = tf.random.uniform([3, 1], seed=5)
    noise = tf.reduce_sum(tf.random.normal([4], seed=1), name='noise')
    shifted = tf.get_variable('shifted', initializer=start)
    loss = error_of(features, labels) + tf.reduce_sum(tf.square(shifted - start)) + 0 * noise
    return spec_of(mode, loss, momentum(loss), counter('counted').assign_add(1.0))


class Runs(tf.train.SessionRunHook):
    """Runs something by itself, after each step and at the end."""

    def __init__(self, name):
        self.name = name

    def after_run(self, run_context, run_values):
        run_context.session.run(self.name)

    def end(self, session):
        session.run(self.name)


@pytest.mark.parametrize('devices', [1, 2])
def test_what_hooks_run_by_themselves(devices, behavior):
    """Takes no batch, if it needs none."""

    def input_fn():
        unused = tf.data.make_one_shot_iterator(tf.data.Dataset.range(3)).get_next()
        features, labels = tf.data.make_one_shot_iterator(dataset()).get_next()
        return ({**features, 'unused': unused} if devices == 1 else features), labels

    estimator = estimator_mgpu.Estimator(with_noise, devices=devices)
    estimator.train(input_fn, [Runs('noise:0')])
    assert estimator.get_variable_value('counted') == STEPS
    assert estimator.get_variable_value('global_step') == STEPS


class Feeds(tf.train.SessionRunHook):
    """Feeds batches in the place of those that the input has, which is at its end."""

    def begin(self):
        self.graph = tf.get_default_graph()

    def before_run(self, run_context):
        return tf.train.SessionRunArgs(None, {'x:0': floats(4, 3), 'y:0': floats(4, 1)})


@pytest.mark.parametrize('devices', [1, 2])
def test_batches_that_a_hook_feeds(devices, behavior):
    def input_fn():
        empty = dataset().map(lambda features, labels: (features['x'], labels)).take(0)
        x, y = tf.data.make_one_shot_iterator(empty).get_next()
        x = tf.placeholder_with_default(x, [None, 3], 'x')
        return {'x': x}, tf.placeholder_with_default(y, [None, 1], 'y')

    def model_fn(features, labels, mode):
        loss = error_of(features, labels)
        return spec_of(mode, loss, momentum(loss), counter('counted').assign_add(1.0))

    estimator = estimator_mgpu.Estimator(model_fn, devices=devices)
    feeds = Feeds()
    estimator.train(input_fn, [feeds], steps=STEPS)
    assert estimator.get_variable_value('counted') == STEPS
    towers = {tower_of(op.name) for op in feeds.graph.get_operations()} - {None}
    assert towers == ({0, 1} if devices == 2 else set())


def test_a_queue_that_the_step_itself_fills(tmp_path):
    """Its batch is what an earlier step put into it."""

    def input_fn():
        queue = tf.FIFOQueue(9, [tf.float32], [[4, 3]], shared_name='filled')
        first = queue.enqueue(floats(4, 3))
        tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, first)
        tf.add_to_collection('queue', queue)
        return {'x': queue.dequeue()}, floats(4, 1)

    def model_fn(features, labels, mode):
        [queue] = tf.get_collection('queue')
        loss = error_of(features, labels)
        count = counter('counted').assign_add(1.0)
        return spec_of(mode, loss, momentum(loss), queue.enqueue(floats(4, 3, seed=1)), count)

    estimator = estimator_mgpu.Estimator(model_fn, str(tmp_path), devices=2)
    estimator.train(input_fn, steps=STEPS)
    assert estimator.get_variable_value('counted') == STEPS
