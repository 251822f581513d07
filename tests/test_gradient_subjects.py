"""Gradients with respect to all sorts of tensors are those of one device."""

import functools

import pytest
import tensorflow.compat.v1 as tf

import towers as towers_lib
from layers import hidden_layer, mean_square, of_losses, output_layer
from models import adam, away_from_0, spec_of, step
from towers import compare, compare_modes, train

# Losses: losses(features, labels) -> loss, output and a train_op of its own, if it has one.


def apply(grads, variables, rate=0.05):
    optimizer = tf.train.MomentumOptimizer(rate, 0.9)
    return optimizer.apply_gradients(zip(grads, variables), step())


def weight(name='w', units=1, **options):
    return tf.get_variable(name, [3, units], **options)


def normalized(features, labels):
    w = weight()
    unit = w / tf.norm(w)
    output = tf.matmul(features, unit)
    loss = mean_square(labels, output)
    return loss, output, apply(tf.gradients(loss, unit), [w])


def normalized_by_a_tape(features, labels):
    w = weight(use_resource=True)
    with tf.GradientTape() as tape:
        unit = w / tf.norm(w)
        tape.watch(unit)
        output = tf.matmul(features, unit)
        loss = mean_square(labels, output) + tf.nn.l2_loss(unit)
    return loss, output, apply(tape.gradient(loss, [unit]), [w])


def with_variables_and_rows(features, labels):
    """In one call with respect to a variable, to what's made of another, and to rows."""
    w, v = weight(units=4), tf.get_variable('v', [4, 1])
    doubled = tf.identity(2.0 * v)
    hidden = tf.nn.tanh(tf.matmul(features, w))
    output = tf.matmul(hidden, doubled)
    loss = mean_square(labels, output)
    of_hidden, of_w, of_doubled = tf.gradients(loss, [hidden, w, doubled])
    noise = tf.stop_gradient(of_hidden)
    more = tf.reduce_mean(tf.square(tf.matmul(hidden + 3.0 * noise, doubled)))
    with tf.control_dependencies([apply([of_w, of_doubled], [w, v])]):
        return loss + more, output, adam(more)


def weights_of_tasks(features, labels):
    """MGDA-UB (Sener and Koltun, 2018, equation 3): by the tasks' gradients of what they share."""
    hidden = tf.nn.tanh(tf.matmul(features, weight(units=4)))
    first, second = (
        tf.matmul(hidden, tf.get_variable(f'{name}_kernel', [4, 1]))
        + tf.get_variable(f'{name}_bias', [1])
        for name in ('first', 'second')
    )
    losses = tf.reduce_mean(tf.square(first - labels)), tf.reduce_mean(tf.abs(second + labels))
    one, other = (tf.gradients(loss, hidden)[0] for loss in losses)
    share = tf.reduce_sum((other - one) * other) / tf.reduce_sum(tf.square(one - other))
    share = tf.stop_gradient(tf.clip_by_value(share, 0.05, 0.95))
    loss = share * losses[0] + (1 - share) * losses[1]
    return loss, first, adam(loss)


def partitioned(features, labels):
    """Clipped by the norm of the gradient of all parts put together."""
    parts = weight(units=4, partitioner=tf.fixed_size_partitioner(3))
    w = tf.convert_to_tensor(parts)
    output = output_layer(tf.nn.tanh(tf.matmul(features, w)))
    loss = mean_square(labels, output)
    norm = tf.norm(tf.gradients(loss, w)[0])
    optimizer = tf.train.MomentumOptimizer(0.05, 0.9)
    grads = [(g * tf.minimum(1.0, 0.1 / norm), v) for g, v in optimizer.compute_gradients(loss)]
    return loss, output, optimizer.apply_gradients(grads, step())


def reads_by_hand(features, labels):
    """Sharpness-aware minimization: gradients where weights were moved to, and back."""
    w, v = weight(units=4, use_resource=True), tf.get_variable('v', [4, 1], use_resource=True)

    def loss_of(own):
        output = tf.matmul(tf.nn.tanh(tf.matmul(features, own[0])), own[1])
        return mean_square(labels, output), output

    loss, output = loss_of([w, v])
    grads = tf.gradients(loss, [w, v])
    moves = [0.05 * g / tf.global_norm(grads) for g in grads]
    with tf.control_dependencies(moves):
        there = tf.group(*(x.assign_add(by) for x, by in zip([w, v], moves)))
    with tf.control_dependencies([there]):
        own = [tf.identity(x.read_value()) for x in (w, v)]
        grads = tf.gradients(loss_of(own)[0], own)
    with tf.control_dependencies(grads):
        back = tf.group(*(x.assign_sub(by) for x, by in zip([w, v], moves)))
    with tf.control_dependencies([back]):
        return loss, output, apply(grads, [w, v])


def cast(features, labels):
    """Computed in another type, with a scaled loss."""
    w = weight()
    low = tf.cast(w, tf.float64)
    output = tf.cast(tf.matmul(tf.cast(features, tf.float64), low), tf.float32)
    loss = mean_square(labels, output)
    [grad] = tf.gradients(128.0 * loss, low)
    return loss, output, apply([tf.cast(grad, tf.float32) / 128.0], [w])


def fast_weights(features, labels):
    """First-order MAML: the gradient where a step of gradient descent leads to."""
    w = weight()
    first = mean_square(labels, tf.matmul(features, w))
    fast = w - 0.1 * tf.gradients(first, w)[0]
    output = tf.matmul(features[:, ::-1], fast)
    loss = mean_square(labels, output)
    return loss, output, apply(tf.gradients(loss, fast), [w])


def looked_up(features, labels):
    """Rows of a table that was normalized; and of the table itself."""
    table = tf.get_variable('table', [5, 4])
    unit = tf.nn.l2_normalize(table, 1)
    ids = tf.cast(tf.abs(features[:, 0]) * 10, tf.int32) % 5
    output = tf.reduce_sum(tf.gather(unit, ids) + tf.gather(unit, (ids + 1) % 5), 1, keepdims=True)
    loss = mean_square(labels, output)
    return loss, output, apply(tf.gradients(loss, unit), [table])


def moved_table(features, labels):
    """Adversarial training on a table: Miyato et al., 2017, section 3, with its own gradient."""
    table, v = tf.get_variable('table', [5, 4]), tf.get_variable('v', [4, 1])
    ids = tf.cast(tf.abs(features) * 10, tf.int32) % 5
    mask = tf.cast(features > -1.0, tf.float32)

    def loss_of(table):
        rows = tf.nn.embedding_lookup(table, ids) * mask[:, :, None]
        output = tf.matmul(tf.reduce_mean(rows, 1), v)
        return tf.reduce_mean(tf.square(output - labels) * tf.nn.tanh(tf.abs(labels))), output

    loss, output = loss_of(table)
    grad = tf.convert_to_tensor(tf.gradients(loss, table)[0])
    loss += loss_of(table + tf.stop_gradient(0.5 * grad / tf.norm(grad)))[0]
    return loss, output


def perturbed_weight(features, labels):
    """A constant that a weight is moved by."""
    w = weight()
    move = tf.zeros([3, 1])
    output = tf.matmul(features, w + move)
    loss = mean_square(labels, output)
    return loss, output, apply(tf.gradients(loss, move), [w])


def perturbed_rows(features, labels):
    """A constant as large as the shard, and so the batch's on one device."""
    move = tf.zeros_like(features)
    hidden = hidden_layer(features + 0.5 * move)
    [slope] = tf.gradients(mean_square(labels, output_layer(hidden)), move)
    with tf.variable_scope('', reuse=True):
        output = output_layer(hidden_layer(features + 3.0 * tf.stop_gradient(slope)))
    return mean_square(labels, output), output


def masked_mean(features, labels):
    """Adversarial rows, of a mean over some; a shard may have none of these."""
    w = weight()
    mask = tf.cast(features[:, :1] > 1.0, tf.float32)

    def loss_of(x):
        return tf.reduce_sum(tf.square(tf.matmul(x, w) - labels) * mask) / tf.reduce_sum(mask)

    slope = tf.stop_gradient(tf.gradients(loss_of(features), features)[0])
    return loss_of(features + 0.5 * slope), tf.matmul(features, w)


def weighted_loss(features, labels):
    def loss_of(x):
        output = output_layer(hidden_layer(x))
        return tf.losses.mean_squared_error(labels, output, tf.abs(features[:, :1])), output

    [slope] = tf.gradients(loss_of(features)[0], features)
    with tf.variable_scope('', reuse=True):
        return loss_of(features + 3.0 * tf.stop_gradient(slope))


def weighted_loss_on_a_tape(features, labels):
    with tf.GradientTape() as tape:
        tape.watch(features)
        output = output_layer(hidden_layer(features))
        loss = tf.losses.mean_squared_error(labels, output, tf.abs(features[:, :1]))
    slope = tape.gradient(loss, features)
    with tf.variable_scope('', reuse=True):
        moved = output_layer(hidden_layer(features + 3.0 * tf.stop_gradient(slope)))
    return loss + mean_square(labels, moved), output


def penalty_on_a_quotient(features, labels):
    """The gradient of a masked mean, differentiated again."""
    mask = tf.cast(features[:, :1] > 0.0, tf.float32)
    output = output_layer(hidden_layer(features))
    score = tf.reduce_sum(output * mask) / (1.0 + tf.reduce_sum(mask))
    [slope] = tf.gradients(score, features)
    loss = mean_square(labels, output) + 10.0 * tf.reduce_sum(tf.square(slope))
    return loss, output


def penalty_on_means(features, labels):
    """Of a mean of each column, and so of no row."""
    output = output_layer(hidden_layer(features))
    columns = tf.reduce_mean(tf.concat([output, tf.square(output)], 1), 0)
    [slope] = tf.gradients(columns, features)
    return mean_square(labels, output) + 10.0 * tf.reduce_sum(tf.square(slope)), output


def of_terms(features, labels):
    """Gradients with respect to the terms of a loss, which are of the whole batch themselves."""
    output = output_layer(hidden_layer(features))
    terms = [mean_square(labels, output), tf.reduce_mean(tf.abs(output))]
    loss = tf.sqrt(terms[0]) + 0.5 * tf.square(terms[1])
    factors = tf.gradients(loss, terms)
    return tf.add_n([tf.stop_gradient(f) * t for f, t in zip(factors, terms)]), output


def penalty_on_a_linear_model(features, labels):
    """Whose gradients are the same for each row, so that no values of rows go into them."""
    output = output_layer(features)
    [slope] = tf.gradients(output, features)
    columns = tf.transpose(features)
    [other] = tf.gradients(
        tf.reduce_sum(tf.matmul(weight('v'), columns, transpose_a=True)), columns
    )
    penalty = tf.reduce_sum(tf.square(tf.norm(slope, axis=1) - 1)) + tf.norm(other)
    return mean_square(labels, output) + 0.01 * penalty, output


def penalty_on_a_linear_model_by_a_tape(features, labels):
    with tf.GradientTape() as tape:
        tape.watch(features)
        output = output_layer(features)
    slope = tape.gradient(output, features)
    return mean_square(labels, output) + 0.01 * tf.reduce_sum(tf.square(slope) - slope), output


WEIGHTS = [
    normalized,
    normalized_by_a_tape,
    with_variables_and_rows,
    partitioned,
    reads_by_hand,
    cast,
    fast_weights,
    looked_up,
    moved_table,
    perturbed_weight,
]
ROWS = [
    weights_of_tasks,
    perturbed_rows,
    masked_mean,
    weighted_loss,
    weighted_loss_on_a_tape,
    penalty_on_a_quotient,
    penalty_on_means,
    penalty_on_a_linear_model,
    penalty_on_a_linear_model_by_a_tape,
    of_terms,
]


@pytest.mark.parametrize('towers', [1, 3, 4], ids='towers={}'.format)
@pytest.mark.parametrize('model_fn', map(of_losses, WEIGHTS + ROWS), ids=lambda f: f.__name__)
def test_as_on_one_device(model_fn, towers, behavior, caplog):
    compare_modes(model_fn, away_from_0, towers)
    assert 'happens once a step' not in caplog.text


@pytest.mark.parametrize('rows', [7, 2], ids='rows={}'.format)
@pytest.mark.parametrize('model_fn', map(of_losses, WEIGHTS + ROWS), ids=lambda f: f.__name__)
def test_batches_that_do_not_divide(model_fn, rows):
    batches = [(x[:rows], y[:rows]) for x, y in away_from_0()[:4]]
    for x, _ in batches:
        x[0, 0] = 2.0  # One row at least is masked in.
    compare(model_fn, batches, 3, static=False)


def test_gradients_that_only_a_gate_waits_for(monkeypatch):
    """Those of the mask: TensorFlow's graph optimizer takes them out, where a session has one."""
    options = tf.GraphOptions()
    options.rewrite_options.disable_meta_optimizer = True
    plain = functools.partial(towers_lib.session, graph_options=options)
    monkeypatch.setattr(towers_lib, 'session', plain)
    compare(of_losses(moved_table), [(x[:7], y[:7]) for x, y in away_from_0()], 3, static=False)


def test_inner_gradients_that_need_other_shards_are_an_error():
    def model_fn(features, labels, mode):
        output = output_layer(hidden_layer(features))
        [slope] = tf.gradients(tf.sqrt(mean_square(labels, output)), features)
        loss = tf.reduce_mean(tf.square(slope))
        return spec_of(mode, loss, adam(loss))

    with pytest.raises(ValueError, match=r'(?s)That is a gradient across devices.*stop_gradient'):
        train(model_fn, away_from_0()[:1], 2)
    train(model_fn, away_from_0()[:1], 1)


def test_second_gradients_of_made_weights_are_an_error():
    def model_fn(features, labels, mode):
        w = weight()
        unit = w / tf.norm(w)
        [grad] = tf.gradients(mean_square(labels, tf.matmul(features, unit)), unit)
        loss = tf.reduce_sum(tf.square(grad))
        return spec_of(mode, loss, apply(tf.gradients(loss, unit), [w]))

    with pytest.raises(ValueError, match=r'(?s)depends on a gradient.*replicate\(devices=1\)'):
        train(model_fn, away_from_0()[:1], 2)
