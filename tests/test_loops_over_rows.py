"""Loops that take one example after the other: on every device, or once, as on one device."""

import pytest
import tensorflow.compat.v1 as tf

import towers
from models import floats, weights

SHARDED, ONCE = [], []


def sharded(program):
    """Registers a function of the batch whose loop runs on every device."""
    SHARDED.append(program)
    return program


def once(program):
    """Registers one whose loop runs once."""
    ONCE.append(program)
    return program


def take_all(x, step, count=None, start=0):
    """A loop that writes `step(i, examples)` for each example, in a list; the list, stacked."""
    count = tf.shape(x)[0] if count is None else count
    examples = tf.TensorArray(tf.float32, tf.shape(x)[0], clear_after_read=False).unstack(x)
    written = tf.TensorArray(tf.float32, tf.shape(x)[0])

    def body(i, written):
        return i + 1, written.write(i, step(i, examples))

    written = tf.while_loop(lambda i, _: i < count, body, (start, written))[1]
    return written.stack()


@sharded
def each(x):
    return tf.map_fn(lambda row: row / (1 + tf.norm(row)), x)


@sharded
def several(x):
    """Two lists in, and two out, of other types and shapes."""
    both = tf.map_fn(
        lambda pair: (tf.reduce_sum(pair[0] * pair[1]), tf.argmax(pair[0])),
        (x, tf.sin(x)),
        dtype=(tf.float32, tf.int64),
    )
    return both[0] + tf.cast(both[1], tf.float32)


@sharded
def with_a_variable(x):
    w = weights('w', 3, 3)
    return tf.map_fn(lambda row: tf.linalg.matvec(w, row), x)


@sharded
def with_the_mean(x):
    """Each example beside what all examples come to."""
    mean = tf.reduce_mean(x, 0)
    return tf.map_fn(lambda row: row - mean, x)


@sharded
def with_all_examples(x):
    return tf.map_fn(lambda row: tf.reduce_max(tf.linalg.matvec(x, row)), x)


@sharded
def with_a_branch(x):
    def grown(row):
        return tf.cond(tf.reduce_sum(row) > 0, lambda: 2 * row, lambda: tf.exp(row))

    return tf.map_fn(grown, x)


@sharded
def with_a_comparison(x):
    """An op of the body may have the name of the comparison that ends the loop."""
    return tf.map_fn(lambda row: tf.where(row < 0.1, row, 2 * row), x)


@sharded
def with_something_else(x):
    numbers = tf.constant([1.0, 2.0, 3.0])
    return x * tf.map_fn(lambda row: numbers, x)


@sharded
def several_rows_of_each(x):
    halves = tf.reshape(tf.concat([x, x + 1], 1), [-1, 3])
    return tf.map_fn(tf.nn.softmax, halves)


@sharded
def one_after_another(x):
    """What one loop writes, another one reads."""
    return tf.map_fn(tf.nn.relu, tf.map_fn(tf.sin, x))


@sharded
def by_hand(x):
    return take_all(x, lambda i, examples: examples.read(i) * 3)


@once
def ragged_rows(x):
    counts = tf.cast(3 * tf.abs(x[:, 0]), tf.int32)
    spec = tf.RaggedTensorSpec([None], tf.int32)
    rows = tf.map_fn(tf.range, counts, fn_output_signature=spec)
    return x + tf.cast(tf.reduce_sum(rows, 1)[:, None], tf.float32)


@once
def with_its_number(x):
    return take_all(x, lambda i, examples: examples.read(i) + tf.cast(i, tf.float32))


@once
def with_the_next_number(x):
    def body(i, written):
        following = i + 1
        return following, written.write(i, examples.read(i) * tf.cast(following, tf.float32))

    count = tf.shape(x)[0]
    examples = tf.TensorArray(tf.float32, count).unstack(x)
    start = 0, tf.TensorArray(tf.float32, count)
    return tf.while_loop(lambda i, _: i < count, body, start)[1].stack()


@once
def with_the_first(x):
    return take_all(x, lambda i, examples: examples.read(i) - examples.read(0))


@once
def with_the_one_before(x):
    return take_all(x, lambda i, examples: examples.read(tf.maximum(i - 1, 0)))


@once
def backwards(x):
    count = tf.shape(x)[0]
    return take_all(x, lambda i, examples: examples.read(count - 1 - i))


@once
def with_the_number_of_all(x):
    count = tf.shape(x)[0]
    return take_all(x, lambda i, examples: examples.read(i) / tf.cast(count, tf.float32), count)


@once
def summed_up(x):
    return tf.scan(lambda before, row: before + row, x)


@once
def all_but_one(x):
    count = tf.shape(x)[0]
    examples = tf.TensorArray(tf.float32, count).unstack(x)
    body = lambda i, most: (i + 1, tf.maximum(most, examples.read(i)))  # noqa: E731
    return tf.while_loop(lambda i, _: i < count - 1, body, (0, x[0]))[1] + tf.zeros_like(x)


def reasons_of(programs, sizes, static):
    batches = [floats(size, 3, seed=size) for size in sizes]
    return towers.compare_outputs(programs, batches, 3, static=static)


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
def test_on_every_device(behavior, static):
    """Also with fewer examples than devices."""
    reasons = reasons_of(SHARDED, [7, 7] if static else [7, 4, 2, 1], static)
    assert not any(reasons.values()), reasons


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
def test_once(behavior, static):
    """A step isn't for its own row alone: what shows it is in the reason."""
    reasons = reasons_of(ONCE, [7, 7] if static else [7, 4, 2], static)
    assert all(reasons.values()), reasons


def test_what_draws_numbers(behavior):
    """Only what it draws differs from run to run."""
    program = lambda x: tf.map_fn(lambda row: row + tf.random.uniform([], seed=3), x)  # noqa: E731
    program.__name__ = 'drawn'
    found = []

    def drawn(x):
        found.append(program(x))
        return tf.cast(tf.shape(found[-1]), tf.float32)

    reasons = reasons_of([drawn], [7], static=False)
    assert 'side effects or draws random numbers' in ' '.join(reasons['drawn'])


def test_a_list_that_is_also_read_in_full(behavior):
    """Another op needs all elements, so the loop runs once."""

    def program(x):
        examples = tf.TensorArray(tf.float32, tf.shape(x)[0], clear_after_read=False).unstack(x)
        body = lambda i, total: (i + 1, total + examples.read(6 - i))  # noqa: E731
        total = tf.while_loop(lambda i, _: i < 7, body, (0, tf.zeros([3])))[1]
        taken = take_all(x, lambda i, _: examples.read(i))
        return taken + total

    reasons = reasons_of([program], [7], static=True)
    assert reasons['program']


@pytest.mark.parametrize('microbatches', [1, 2])
def test_training(behavior, microbatches):
    """A network behind such a loop, with micro-batches too; its gradient stops at the loop."""

    def model_fn(features, labels, mode):
        hidden = tf.tanh(tf.matmul(tf.map_fn(tf.sin, features), weights('w', 3, 3)))
        scaled = tf.stop_gradient(tf.map_fn(lambda row: 1 / (1 + tf.norm(row)), hidden))
        loss = tf.reduce_mean(tf.square(hidden * scaled[:, None] - labels))
        train_op = tf.train.AdamOptimizer(0.1).minimize(loss, tf.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    batches = [(floats(size, 3, seed=size), floats(size, 1)) for size in (8, 8, 3, 1)]
    ours, _ = towers.compare(model_fn, batches, 2, static=False, microbatches=microbatches)
    plan = towers.steps.of_graph(ours.graph).plan
    types = {ours.graph.get_operation_by_name(name).type for name in plan.once}
    assert not types & {'StatelessWhile', 'While', 'Exit', 'TensorListStack'}


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
def test_gradients_through_a_loop(behavior, static):
    """It runs once then, as its steps keep what gradients need."""

    def model_fn(features, labels, mode):
        w = weights('w', 3, 3)
        hidden = tf.map_fn(lambda row: tf.tanh(tf.linalg.matvec(w, row)), features)
        loss = tf.reduce_mean(tf.square(hidden - labels))
        train_op = tf.train.GradientDescentOptimizer(0.1).minimize(loss, tf.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    batches = [(floats(7, 3, seed=i), floats(7, 1, seed=i)) for i in range(3)]
    towers.compare(model_fn, batches, 3, static=static)
