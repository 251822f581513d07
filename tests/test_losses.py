"""'auto' is right on the losses that people write, and says so where it cannot tell."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import losses as losses_lib
from models import batches, predict, spec_of, step, with_loss
from towers import compare, evaluate, train

ROWS = 12  # of batches()
REDUCTION = tf.losses.Reduction


def squares(labels, output):
    return tf.square(output - labels)


def mask(labels):
    """Which rows count: about half of them, unevenly spread over the shards."""
    return tf.cast(labels > 0.3, tf.float32)


def l2():
    return 0.1 * tf.add_n([tf.nn.l2_loss(v) for v in tf.trainable_variables()])


def tf_loss(reduction, weighted=False):
    def loss(labels, output):
        weights = mask(labels) * 2.0 if weighted else 1.0
        return tf.losses.mean_squared_error(labels, output, weights, reduction=reduction)

    return loss


def keras_loss(reduction):
    def loss(labels, output):
        return tf.keras.losses.MeanSquaredError(reduction=reduction)(labels, output)

    return loss


def total_loss(labels, output):
    tf.losses.mean_squared_error(labels, output)
    tf.losses.absolute_difference(labels, output, weights=0.3)
    tf.losses.add_loss(l2())
    return tf.losses.get_total_loss()


def static_rows(labels, output):
    rows = labels.shape.as_list()[0] or tf.shape(labels)[0]
    return tf.reduce_sum(squares(labels, output)) / tf.cast(rows, tf.float32)


def times_reciprocal_of_static_rows(labels, output):
    rows = labels.shape.as_list()[0]
    scale = 1.0 / rows if rows else 1.0 / tf.cast(tf.shape(labels)[0], tf.float32)
    return tf.reduce_sum(squares(labels, output)) * scale


def over_columns_first(labels, output):
    per_column = tf.reduce_mean(tf.tile(squares(labels, output), [1, 5]), 0)
    return tf.reduce_sum(per_column)


def softmax(labels, output):
    classes = tf.cast(labels[:, 0] > 0, tf.int32)
    logits = tf.concat([output, -output], 1)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=classes, logits=logits)
    )


LOSSES = {
    'checked': lambda y, p: tf.debugging.check_numerics(tf.reduce_sum(squares(y, p)), 'loss') / 9,
    'printed': lambda y, p: tf.Print(tf.reduce_sum(squares(y, p)), [y[0], p]) + tf.Print(1.0, [y]),
    'reduce_mean': lambda y, p: tf.reduce_mean(squares(y, p)),
    'reduce_sum': lambda y, p: tf.reduce_sum(squares(y, p)),
    'mean of sums': lambda y, p: tf.reduce_mean(tf.reduce_sum(tf.tile(squares(y, p), [1, 5]), 1)),
    'sum of means': lambda y, p: tf.reduce_sum(tf.reduce_mean(tf.tile(squares(y, p), [1, 5]), 1)),
    'columns first': over_columns_first,
    'softmax': softmax,
    'l2_loss of rows': lambda y, p: tf.nn.l2_loss(p - y),
    'rows left to tf.gradients': lambda y, p: tf.reduce_sum(squares(y, p), keepdims=True)[0, 0],
    'sum by batch size': lambda y, p: tf.reduce_sum(squares(y, p)) / ROWS,
    'mean of sums over rows': lambda y, p: tf.reduce_mean(
        tf.reduce_sum(tf.reshape(tf.tile(squares(y, p), [1, 12]), [tf.shape(p)[0], -1]), 0)
    ),
    'boolean_mask': lambda y, p: tf.reduce_mean(tf.boolean_mask(squares(y, p), y > -1)),
    'sum by tf.shape': lambda y, p: (
        tf.reduce_sum(squares(y, p)) / tf.cast(tf.shape(p)[0], tf.float32)
    ),
    'sum by tf.size': lambda y, p: tf.reduce_sum(squares(y, p)) / tf.cast(tf.size(p), tf.float32),
    'scaled sum': lambda y, p: 0.5 * tf.reduce_sum(squares(y, p)) / 100.0,
    'masked mean': lambda y, p: (
        tf.reduce_sum(mask(y) * squares(y, p)) / (tf.reduce_sum(mask(y)) + 1e-8)
    ),
    'masked mean, at least 1': lambda y, p: (
        tf.reduce_sum(mask(y) * squares(y, p)) / tf.maximum(tf.reduce_sum(mask(y)), 1.0)
    ),
    'mean by mean': lambda y, p: (
        tf.reduce_mean(mask(y) * squares(y, p)) / tf.reduce_mean(mask(y) + 0.1)
    ),
    'root': lambda y, p: tf.sqrt(tf.reduce_mean(squares(y, p))),
    'mean and l2': lambda y, p: tf.reduce_mean(squares(y, p)) + l2(),
    'sum and l2': lambda y, p: tf.reduce_sum(squares(y, p)) + l2(),
    'mean and sum and l2': lambda y, p: tf.add_n(
        [tf.reduce_mean(squares(y, p)), tf.reduce_sum(tf.abs(y - p)), l2()]
    ),
    'stacked': lambda y, p: tf.reduce_sum(
        tf.stack([tf.reduce_mean(squares(y, p)), tf.reduce_mean(tf.abs(y - p))]) * [0.3, 0.7]
    ),
    'vector of rows': lambda y, p: squares(y, p)[:, 0],
    'total_loss': total_loss,
    **{f'tf.losses {r}': tf_loss(r) for r in REDUCTION.all() if r != REDUCTION.NONE},
    **{f'tf.losses {r} masked': tf_loss(r, True) for r in REDUCTION.all() if r != REDUCTION.NONE},
    'keras mean': keras_loss('sum_over_batch_size'),
    'keras sum': keras_loss('sum'),
}


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('towers', [2, 5], ids='towers={}'.format)
@pytest.mark.parametrize('loss', LOSSES.values(), ids=LOSSES.keys())
def test_auto_is_exact(loss, towers, static, caplog):
    def model_fn(features, labels, mode):
        value = loss(labels, predict(features))
        train_op = tf.train.MomentumOptimizer(0.02, 0.9).minimize(value, step())
        return spec_of(mode, tf.reduce_sum(value), train_op)

    compare(model_fn, batches(steps=4), towers, static=static)
    assert 'cannot be told' not in caplog.text
    assert 'is taken for a' in caplog.text


def entries(labels, output):
    return tf.tile(squares(labels, output), [1, 400])


STATIC_ROWS = {
    'sum by static rows': static_rows,
    'sum of rows by static rows': lambda y, p: tf.reduce_sum(squares(y, p) / y.shape.as_list()[0]),
    'sum times 1/rows': times_reciprocal_of_static_rows,
    'sum and l2 by static rows': lambda y, p: (
        (tf.reduce_sum(squares(y, p)) + l2()) / y.shape.as_list()[0]
    ),
    'sum of rows times 1/rows': lambda y, p: tf.reduce_sum(
        squares(y, p) * (1.0 / y.shape.as_list()[0])
    ),
    'sum of rows times as many constants': lambda y, p: tf.reduce_sum(
        squares(y, p)[:, 0] * tf.nn.softmax(tf.zeros(y.shape.as_list()[:1]))
    ),
    # 1 / float32(1 / 2400) is 2400.0001.
    'sum times 1/entries': lambda y, p: (
        tf.reduce_sum(entries(y, p)) * (1.0 / entries(y, p).shape.num_elements())
    ),
    'sum of entries by their number': lambda y, p: tf.reduce_sum(
        entries(y, p) / entries(y, p).shape.num_elements()
    ),
    'sum of entries times 1/entries': lambda y, p: tf.reduce_sum(
        entries(y, p) * (1.0 / entries(y, p).shape.num_elements())
    ),
}


@pytest.mark.parametrize('loss', STATIC_ROWS.values(), ids=STATIC_ROWS.keys())
def test_static_rows_are_exact_but_told_of(loss, caplog):
    """The graph has the same constant for what somebody wrote."""
    compare(with_loss(loss), batches(steps=4), 2)
    assert 'is taken for the static size of a shard' in caplog.text
    assert 'take tf.shape(features)[0]' in caplog.text


LITERALS = {
    'sum by a number': lambda y, p: tf.reduce_sum(squares(y, p)) / 6.0,
    'sum of rows by a number': lambda y, p: tf.reduce_sum(squares(y, p) / 6.0),
    'sum of rows by a weight': lambda y, p: tf.reduce_sum(squares(y, p) * (tf.abs(y) / 6.0)),
    'a number times sum': lambda y, p: tf.reduce_sum(squares(y, p)) * (1 / 6),
    'sum of a number times rows': lambda y, p: tf.reduce_sum((1 / 6) * squares(y, p)),
    'heads': lambda y, p: tf.add_n([tf.reduce_sum(squares(y, p * i)) for i in range(6)]) / 6,
    'div_no_nan': lambda y, p: tf.math.divide_no_nan(tf.reduce_sum(squares(y, p)), 6.0),
}


@pytest.mark.parametrize('loss', LITERALS.values(), ids=LITERALS.keys())
def test_a_number_that_is_also_that_of_a_shards_rows_is_told_of(loss, caplog):
    train(with_loss(loss), batches(steps=1), 2)
    assert "If it is a number of its own, say replicate(loss_reduction='sum')" in caplog.text
    compare(with_loss(loss), batches(steps=2), 2, loss_reduction='sum')


@pytest.mark.parametrize('half', [lambda x: x / 2, lambda x: 0.5 * x], ids=['by 2', 'times 0.5'])
def test_a_usual_number_that_is_also_that_of_a_shards_rows(half, caplog):
    """6 towers have 2 rows each."""
    compare(with_loss(lambda y, p: tf.reduce_sum(half(squares(y, p)))), batches(), 6)
    assert 'It is taken for a sum' in caplog.text


def test_rows_in_the_shape_of_the_whole_batch_are_told_of(caplog):
    def loss(labels, output):
        several = tf.reshape(tf.tile(output, [1, 6]), [ROWS, -1])
        return tf.reduce_mean(tf.reduce_sum(tf.square(several), 1))

    train(with_loss(loss), batches(steps=1), 2)
    assert 'gives the 6 rows of a shard a shape of 12' in caplog.text


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
def test_weights_of_classes_by_their_number_are_warned_of(static, caplog):
    def loss(labels, output):
        classes = tf.cast(labels[:, 0] > 0, tf.int32)
        counts = tf.math.bincount(classes, minlength=2, maxlength=2, dtype=tf.float32)
        weights = tf.gather(1.0 / tf.maximum(counts, 1.0), classes)
        return tf.reduce_mean(squares(labels, output)[:, 0] * weights)

    train(with_loss(loss), batches(steps=1), 2, static=static)
    assert 'is a value of all rows of a shard' in caplog.text


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
def test_rows_mixed_before_they_are_summed_one_by_one_are_warned_of(static, caplog):
    """A target distribution by how often there is what in the batch, as in clustering."""

    def loss(labels, output):
        q = tf.nn.softmax(tf.concat([output, -output, 2 * output], 1))
        weights = tf.square(q) / tf.reduce_sum(q, 0)
        p = tf.stop_gradient(weights / tf.reduce_sum(weights, 1, keepdims=True))
        return tf.reduce_mean(tf.reduce_sum(p * tf.log(p / q), 1))

    train(with_loss(loss), batches(steps=1), 2, static=static)
    assert 'is a value of all rows of a shard' in caplog.text


def early(first, second):
    return tf.cond(step() < 5, first, second)


def called(reduce):
    return lambda y, p: tf.function(reduce)(squares(y, p))


# By whether it's exact with rows of unknown number, too.
INSIDE = {
    'sum': (called(tf.reduce_sum), True),
    'mean': (called(tf.reduce_mean), False),
    'mean and number': (called(lambda x: 2 * tf.reduce_mean(x) + 1), False),
    'sum by number': (called(lambda x: tf.reduce_sum(x) / 7.5), True),
    'one of two': (lambda y, p: called(lambda x: (tf.size(x), tf.reduce_sum(x)))(y, p)[1], True),
    'function in function': (called(lambda x: 0.1 * tf.function(tf.reduce_sum)(x)), True),
    'branches': (
        lambda y, p: early(
            lambda: tf.reduce_sum(squares(y, p)), lambda: tf.reduce_sum(tf.abs(y - p))
        ),
        True,
    ),
    'branch of 0': (
        lambda y, p: (
            tf.reduce_sum(squares(y, p)) + early(lambda: tf.reduce_sum(tf.abs(y - p)), lambda: 0.0)
        ),
        True,
    ),
    'branch of a number': (
        lambda y, p: (
            tf.reduce_mean(squares(y, p))
            + early(lambda: tf.reduce_mean(tf.abs(y - p)), lambda: 3.0)
        ),
        False,
    ),
    'case': (
        lambda y, p: tf.switch_case(
            tf.cast(step() % 2, tf.int32),
            [lambda: tf.reduce_sum(squares(y, p)), lambda: 3 * tf.reduce_sum(tf.abs(y - p))],
        ),
        True,
    ),
}


@pytest.mark.parametrize('towers', [1, 3, 4])
@pytest.mark.parametrize('loss, dynamic', INSIDE.values(), ids=INSIDE.keys())
def test_sums_and_means_inside_functions_and_branches(loss, dynamic, towers, behavior, caplog):
    for static in [True, False] if dynamic else [True]:
        compare(with_loss(loss), batches(), towers, static=static)
    assert 'cannot be told' not in caplog.text


NEITHER_INSIDE = {
    'mean by Python': called(
        lambda x: tf.math.divide_no_nan(tf.reduce_sum(x), tf.cast(x.shape[0], tf.float32))
    ),
    'sum by a size from a branch': lambda y, p: (
        tf.reduce_sum(squares(y, p))
        / tf.cast(early(lambda: tf.shape(y), lambda: tf.shape(y))[0], tf.float32)
    ),
    'sum and number': called(lambda x: tf.reduce_sum(x) + 1.0),
    'root': called(lambda x: tf.sqrt(tf.reduce_mean(x))),
    'masked mean': called(lambda x: tf.reduce_mean(tf.boolean_mask(x, x > 0.5))),
    'mean by a number from outside': lambda y, p: tf.function(lambda x, n: tf.reduce_sum(x) / n)(
        squares(y, p), tf.cast(tf.shape(y)[0], tf.float32)
    ),
    'sum or mean': lambda y, p: early(
        lambda: tf.reduce_sum(squares(y, p)), lambda: tf.reduce_mean(tf.abs(y - p))
    ),
    'sum or number': lambda y, p: early(lambda: tf.reduce_sum(squares(y, p)), lambda: 3.0),
    'chosen by the rows': lambda y, p: tf.cond(
        tf.reduce_mean(y) > 0,
        lambda: tf.reduce_sum(squares(y, p)),
        lambda: tf.reduce_sum(tf.abs(y - p)),
    ),
}


@pytest.mark.parametrize('loss', NEITHER_INSIDE.values(), ids=NEITHER_INSIDE.keys())
def test_what_is_no_sum_or_mean_inside_functions_and_branches_is_said(loss, behavior, caplog):
    train(with_loss(loss), batches(steps=1), 3)
    assert 'cannot be told' in caplog.text


DOUBTS = {
    'function': lambda y, p: tf.function(lambda x: tf.reduce_mean(x))(squares(y, p)),
    'two axes': lambda y, p: tf.reduce_mean(
        tf.sqrt(tf.reduce_mean(tf.math.cumulative_logsumexp(tf.transpose(tokens(y - p))), 1) + 9.0)
    ),
}


@pytest.mark.parametrize('loss', DOUBTS.values(), ids=DOUBTS.keys())
def test_auto_warns_where_it_cannot_tell(loss, caplog):
    train(with_loss(loss), batches(steps=1), 2, static=False)
    assert 'cannot be told' in caplog.text
    assert "loss_reduction='mean'" in caplog.text


NEITHER = {
    'max': lambda y, p: tf.reduce_max(squares(y, p)),
    'sum of the largest': lambda y, p: tf.reduce_sum(tf.nn.top_k(squares(y, p)[:, 0], 2).values),
    'product': lambda y, p: tf.reduce_prod(1 + squares(y, p)),
}


@pytest.mark.parametrize('loss', NEITHER.values(), ids=NEITHER.keys())
def test_what_is_neither_a_mean_nor_a_sum_is_said_once(loss, caplog):
    train(with_loss(loss), batches(steps=1), 2, static=False)
    assert caplog.text.count('is neither a mean nor a sum over rows: it goes back to') == 1
    assert 'loss_reduction' not in caplog.text
    assert 'rows are combined with' not in caplog.text


def some_squares(labels, output):
    return tf.boolean_mask(squares(labels, output)[:, 0], labels[:, 0] > 0.5)


def test_a_guarded_mean_is_told_how_to_be_written(behavior, caplog):
    def loss(labels, output):
        kept = some_squares(labels, output)
        return tf.cond(tf.size(kept) > 0, lambda: tf.reduce_mean(kept), lambda: 0.0)

    train(with_loss(loss), batches(steps=1), 2, static=False)
    assert 'write tf.math.divide_no_nan(total, n) instead' in caplog.text


@pytest.mark.parametrize('towers', [1, 3, 4])
def test_a_mean_that_guards_itself_is_exact(towers, behavior, caplog):
    def loss(labels, output):
        kept = some_squares(labels, output)
        n = tf.cast(tf.size(kept), tf.float32)
        return tf.math.divide_no_nan(tf.reduce_sum(kept), n)

    compare(with_loss(loss), batches(), towers, static=False)
    assert 'cannot be told' not in caplog.text


def test_auto_warns_of_an_ambiguous_divisor(caplog):
    """12 rows in 2 shards: 18 is 3 times a shard, but neither the batch nor a shard."""
    train(with_loss(lambda y, p: tf.reduce_sum(squares(y, p)) / 18.0), batches(steps=1), 2)
    assert 'divided by 18' in caplog.text


def test_a_mean_of_what_does_not_depend_on_the_batch_counts_once():
    def model_fn(features, labels, mode):
        del features, labels
        w = tf.get_variable('w', [3])
        loss = tf.nn.l2_loss(w)
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss, step()))

    ours, _ = compare(model_fn, batches(steps=3), 4)
    assert not [op for op in ours.graph.get_operations() if op.type == 'L2Loss'][1:]


@pytest.mark.parametrize('rows', [12, 7], ids='rows={}'.format)
def test_said_sum_counts_l2_once(rows):
    compare(
        with_loss(lambda y, p: 2.0 * tf.reduce_sum(squares(y, p)) / 3.0 + l2()),
        batches(rows, steps=4),
        3,
        loss_reduction='sum',
    )


@pytest.mark.parametrize(
    'reduction', ['mean', REDUCTION.SUM_OVER_BATCH_SIZE, REDUCTION.SUM_BY_NONZERO_WEIGHTS]
)
def test_said_mean(reduction):
    loss = with_loss(lambda y, p: tf.reduce_mean(squares(y, p)) + l2())
    compare(loss, batches(7, steps=4), 3, loss_reduction=reduction)


def test_a_sum_said_to_be_a_mean_is_one_nth_by_hand():
    """Two towers' sums averaged are half the whole sum: the mistake that 'auto' prevents."""
    loss = with_loss(lambda y, p: tf.reduce_sum(squares(y, p)))
    [(features, labels)] = batches(steps=1)
    values = {
        'net/w': np.zeros([3, 4], 'f'),
        'net/b': np.zeros(4, 'f'),
        'net/v': np.zeros([4, 1], 'f'),
    }
    run = train(loss, [(features, labels)], 2, values=values, loss_reduction='mean')
    np.testing.assert_allclose(run.losses, [np.sum(labels**2) / 2], rtol=1e-6)


@pytest.mark.parametrize(
    ('given', 'meant'),
    [
        ('auto', 'auto'),
        ('mean', 'mean'),
        ('sum', 'sum'),
        (REDUCTION.SUM, 'sum'),
        (REDUCTION.MEAN, 'mean'),
        (REDUCTION.SUM_OVER_BATCH_SIZE, 'mean'),
        (REDUCTION.SUM_BY_NONZERO_WEIGHTS, 'mean'),
        (REDUCTION.SUM_OVER_NONZERO_WEIGHTS, 'mean'),
    ],
)
def test_constants(given, meant):
    assert losses_lib.check_reduction(given) == meant


@pytest.mark.parametrize('given', [REDUCTION.NONE, 'average', None, 3])
def test_unknown_reduction(given):
    with pytest.raises(ValueError, match="Legal are 'auto'"):
        estimator_mgpu.replicate(lambda features, labels: None, loss_reduction=given)


def test_a_shard_without_entries_in_a_counted_mean():
    """The mask is empty in the second of three shards, whose own mean is NaN."""
    features, labels = batches(6, steps=1)[0]
    labels[:] = 1.0
    labels[2:4] = 0.0
    compare(with_loss(masked), [(features, labels)] * 3, 3)


def masked(labels, output):
    """NaN on a shard without labels above 0.3: the mean over no rows."""
    return tf.reduce_mean(tf.boolean_mask(squares(labels, output), labels > 0.3))


@pytest.mark.parametrize('towers', [2, 5], ids='towers={}'.format)
def test_loss_weight_makes_a_masked_mean_exact(towers):
    compare(
        with_loss(masked),
        batches(steps=4),
        towers,
        loss_weight=lambda features, labels: tf.reduce_sum(mask(labels)),
    )


def test_loss_weight_of_zero_keeps_nan_out():
    """The mask is empty in the second of three shards."""
    features, labels = batches(6, steps=1)[0]
    labels[:] = 1.0
    labels[2:4] = 0.0
    compare(
        with_loss(masked),
        [(features, labels)] * 3,
        3,
        loss_weight=lambda features, labels: tf.reduce_sum(mask(labels)),
    )


def test_loss_weight_has_to_be_a_scalar():
    with pytest.raises(ValueError, match='has to return a scalar'):
        train(with_loss(masked), batches(steps=1), 2, loss_weight=lambda features, labels: labels)


def test_loss_weight_with_a_sum():
    with pytest.raises(ValueError, match='Leave one'):
        estimator_mgpu.replicate(
            lambda features, labels: None, loss_reduction='sum', loss_weight=lambda f, x: 1.0
        )


def tokens(labels):
    """[rows, 5], of a size that only a step tells in the second dimension."""
    return tf.tile(labels, tf.stack([1, 5 + 0 * tf.shape(labels)[0]]))


SIZES = {
    'unstacked shape': lambda z: tf.cast(tf.reduce_prod(tf.unstack(tf.shape(z))), tf.float32),
    'cast shape': lambda z: tf.cast(tf.shape(z), tf.float32)[0] * 5.0,
    'product of a part': lambda z: tf.cast(tf.reduce_prod(tf.shape(z)[:2]), tf.float32),
    'rows and columns': lambda z: tf.cast(tf.shape(z)[0] * tf.shape(z)[1], tf.float32),
    'transposed': lambda z: tf.cast(tf.shape(tf.transpose(z))[1], tf.float32),
}


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('size', SIZES.values(), ids=SIZES.keys())
def test_sizes_by_which_sums_are_divided(size, static, caplog):
    loss = with_loss(lambda y, p: tf.reduce_sum(tokens(squares(y, p))) / size(tokens(y)))
    compare(loss, batches(steps=3), 2, static=static)
    compare(loss, batches(7, steps=3), 3, static=static)
    assert 'cannot be told' not in caplog.text


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
def test_rows_divided_before_they_are_summed(static, caplog):
    def loss(labels, output):
        rows = labels.shape.as_list()[0] or tf.cast(tf.shape(labels)[0], tf.float32)
        return tf.reduce_sum(squares(labels, output) / rows)

    compare(with_loss(loss), batches(steps=3), 2, static=static)
    assert 'cannot be told' not in caplog.text


def test_time_major_sum_over_time_then_mean_over_rows():
    def loss(labels, output):
        over_time = tf.reduce_sum(tf.transpose(tokens(squares(labels, output))), 0)
        return tf.reduce_mean(over_time)

    compare(with_loss(loss), batches(7, steps=3), 3, static=False)


def test_as_many_losses_as_rows():
    """4 losses in a vector, and 4 rows a shard, are not the same."""

    def loss(labels, output):
        powers = tf.stack([tf.reduce_mean(tf.abs(labels - output) ** k) for k in (1, 2, 3, 4)])
        return tf.reduce_sum(tf.nn.softmax(tf.stop_gradient(powers)) * powers)

    compare(with_loss(loss), batches(8, steps=3), 2)


MIXED = {
    'by the mean': lambda y, p: tf.reduce_mean(
        squares(y, p) * (tf.exp(y) / tf.reduce_mean(tf.exp(y)))
    ),
    'by the sum': lambda y, p: tf.reduce_sum(
        squares(y, p) * (mask(y) / (tf.reduce_sum(mask(y)) + 1e-3))
    ),
}


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('loss', MIXED.values(), ids=MIXED.keys())
def test_rows_mixed_with_a_value_of_their_shard_are_warned_of(loss, static, caplog):
    train(with_loss(loss), batches(steps=1), 2, static=static)
    assert 'is a value of all rows of a shard' in caplog.text
    assert 'train this model with replicate(devices=1)' in caplog.text


@pytest.mark.parametrize('loop', ['while', 'foldl'])
def test_a_loss_from_a_loop_is_warned_of(loop, caplog, behavior):
    def loss(labels, output):
        rows = squares(labels, output)[:, 0]
        if loop == 'foldl':
            return tf.foldl(lambda a, b: a + b, rows)
        body = lambda i, x: (i + 1, x + tf.reduce_mean(rows))  # noqa: E731
        return tf.while_loop(lambda i, x: i < 3, body, [0, 0.0])[1]

    train(with_loss(loss), batches(steps=1), 2)
    assert 'cannot be told' in caplog.text


def test_names_that_are_also_those_of_means():
    """Two divisions in a loss, of means over numbers of entries that only a step tells."""

    def loss(labels, output):
        squared = squares(labels, output)
        some = tf.reduce_mean(tf.boolean_mask(squared, labels[:, 0] > -1))
        others = tf.reduce_mean(tf.boolean_mask(squared, labels[:, 0] > 0))
        return some / (1.0 + some) + others / (1.0 + others)

    compare(with_loss(loss), batches(), 3, static=False)


@pytest.mark.parametrize('shape_of', [tf.shape, lambda x: x.dense_shape], ids=['shape', 'dense'])
@pytest.mark.parametrize('towers', [3, 5], ids='towers={}'.format)
def test_sparse_features_tell_how_many_rows_there_are(shape_of, towers, caplog):
    def model_fn(features, labels, mode):
        output = tf.sparse.sparse_dense_matmul(features, tf.get_variable('w', [3, 1]))
        rows = tf.cast(shape_of(features)[0], tf.float32)
        loss = tf.reduce_sum(squares(labels, output)) / rows
        loss += tf.reduce_mean(output) * tf.cast(shape_of(features)[1], tf.float32)
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss, step()))

    def sparse(features, labels):
        return tf.sparse.from_dense(tf.nn.relu(features)), labels

    for static in (True, False):
        compare(model_fn, batches(steps=3), towers, static=static, preprocess=sparse)
    assert 'cannot be told' not in caplog.text


@pytest.mark.parametrize('static', [True, False])
def test_sparse_features_for_every_tower_have_no_rows(static, caplog):
    def model_fn(features, labels, mode):
        table = tf.sparse.sparse_dense_matmul(features['table'], tf.get_variable('w', [2, 3]))
        output = tf.tensordot(features['x'], tf.reduce_mean(table, 0), 1)[:, tf.newaxis]
        loss = tf.reduce_mean(squares(labels, output))
        loss = tf.reduce_sum(tf.fill([tf.shape(features['table'])[0]], loss))
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss, step()))

    def with_table(features, labels):
        return {'x': features, 'table': tf.sparse.eye(5, 2)}, labels

    data = batches(steps=3)
    compare(model_fn, data, 3, static=static, preprocess=with_table, broadcast=['table'])
    assert 'estimator_mgpu' not in caplog.text


@pytest.mark.parametrize('towers', [3, 5], ids='towers={}'.format)
@pytest.mark.parametrize('static', [True, False], ids='static={}'.format)
def test_means_of_integers(towers, static):
    """TensorFlow cuts off what isn't whole, of the batch's mean rather than of shards'."""

    def model_fn(features, labels, mode):
        mean = tf.reduce_mean(tf.cast(10 * features[:, 0] - 5, tf.int32))
        chosen = tf.boolean_mask(tf.cast(10 * labels, tf.int32), labels > 0.5)
        scale = 3 + 0.1 * tf.cast(mean, tf.float32) + 0.1 * tf.cast(tf.size(chosen), tf.float32)
        loss = tf.reduce_mean(squares(labels, predict(features))) * scale
        if mode == 'train':
            optimizer = tf.train.GradientDescentOptimizer(0.1)
            return spec_of(mode, loss, optimizer.minimize(loss, step()))
        metrics = {'mean': tf.metrics.mean(mean)}
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)

    compare(model_fn, batches(), towers, static=static)
    ours, one = (evaluate(model_fn, batches(), n, static=static) for n in (towers, 0))
    np.testing.assert_allclose(ours.metrics['mean'], one.metrics['mean'], rtol=1e-6)
