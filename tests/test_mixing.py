"""Rows that meet others of their shard are warned of, where the loss shows it; others aren't."""

import pytest
import tensorflow.compat.v1 as tf

from models import batches, with_loss
from towers import compare, train

WARNING = 'rows are combined with other rows of their shard'
BOTH = pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])


def squares(labels, output):
    return tf.square(output - labels)


def halves(labels, output):
    """The first half has labels, the second one hasn't."""
    n = tf.shape(output)[0] // 2
    return tf.reduce_mean(squares(labels[:n], output[:n])) + tf.reduce_mean(tf.abs(output[n:]))


def split(labels, output):
    first, second = tf.split(output, 2)
    return tf.reduce_mean(tf.square(first)) + tf.reduce_mean(tf.abs(second))


def split_otherwise_than_repeated(labels, output):
    first, second = tf.split(tf.tile(tf.concat([output, labels], 1), [4, 1]), 2)
    return tf.reduce_mean(tf.square(first[:, :1] - second[:, 1:]))


def split_with_a_table(labels, output):
    """As heads along the rows, but for what is added by the number of a row."""
    table = tf.tile(tf.constant([[1.0], [3.0]]), [tf.shape(output)[0], 1])
    first, second = tf.split(tf.tile(output, [2, 1]) + table, 2)
    return tf.reduce_mean(tf.square(first + 2 * second - labels))


def halves_otherwise_than_repeated(labels, output):
    rows = tf.shape(output)[0]
    wide = tf.tile(tf.concat([output, labels], 1), [4, 1])
    return tf.reduce_mean(tf.square(wide[: 3 * rows, :1] - wide[rows:, 1:]))


def divided_by_a_slice(labels, output):
    return tf.reduce_sum(squares(labels, output)) / tf.cast(tf.shape(output[1:])[0], tf.float32)


def running_numbers(labels, output):
    """Sums of integers so far, that aren't where rows of a ragged tensor end."""
    ends = tf.concat([[0], tf.cumsum(tf.cast(labels[:, 0] > 0, tf.int32))], 0)
    return tf.reduce_mean(squares(labels, output)[:, 0] * tf.cast(ends[1:], tf.float32))


def ranked(labels, output):
    """Each positive row against each negative one."""
    scores, positive = output[:, 0], tf.cast(labels[:, 0] > 0, tf.float32)
    pairs = positive[:, None] * (1 - positive[None, :])
    losses = tf.nn.softplus(scores[None, :] - scores[:, None])
    return tf.reduce_sum(pairs * losses) / tf.maximum(tf.reduce_sum(pairs), 1.0)


def in_batch_negatives(labels, output):
    """Each row's answer among those of the whole batch."""
    wide = tf.concat([output, output**2], 1)
    logits = tf.matmul(wide, tf.concat([labels, labels**2], 1), transpose_b=True)
    right = tf.range(tf.shape(logits)[0])
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=right, logits=logits)
    return tf.reduce_mean(losses)


def hardest(labels, output):
    worst, _ = tf.nn.top_k(squares(labels, output)[:, 0], 2)
    return tf.reduce_mean(worst)


def neighbours(labels, output):
    return tf.reduce_mean(tf.square(output - tf.roll(output, 1, 0)))


def reversed_rows(labels, output):
    return tf.reduce_mean(squares(labels, 0.7 * output + 0.3 * tf.reverse(output, [0])))


def shuffled(labels, output):
    return tf.reduce_mean(squares(labels, output) * tf.random.shuffle(output))


def some_rows(labels, output):
    return tf.reduce_mean(squares(tf.gather(labels, [0, 1]), tf.gather(output, [0, 1])))


def by_place(labels, output):
    n = tf.shape(output)[0]
    return tf.reduce_mean(squares(labels, output)[:, 0] * tf.cast(tf.range(n), tf.float32))


def spectrum(labels, output):
    return tf.reduce_mean(tf.abs(tf.signal.rfft((output - labels)[:, 0])))


def spectrum_of_all(labels, output):
    both = tf.concat([labels, output], 1)
    return tf.reduce_mean(tf.abs(tf.signal.fft2d(tf.cast(both, tf.complex64))))


def singular_values(labels, output):
    return tf.reduce_sum(tf.linalg.svd(tf.concat([labels, output], 1), compute_uv=False))


def quantized(labels, output):
    """By the range that they have."""
    quantized = tf.quantization.quantize_and_dequantize_v2(output, 0, 0, range_given=False)
    return tf.reduce_mean(squares(labels, quantized))


def not_suppressed(labels, output):
    boxes = tf.concat([labels, labels, labels + 1, labels + 1], 1)
    kept = tf.image.non_max_suppression(boxes, tf.stop_gradient(output[:, 0]), 2)
    return tf.reduce_mean(squares(tf.gather(labels, kept), tf.gather(output, kept)))


def numbered_classes(labels, output):
    _, numbers = tf.unique(tf.cast(labels[:, 0] * 3, tf.int32))
    return tf.reduce_mean(squares(labels, output)[:, 0] * tf.cast(numbers, tf.float32))


def sums_of_two(labels, output):
    return tf.einsum('bi,ci->', labels, output)


@pytest.mark.parametrize(
    'loss',
    [
        halves,
        halves_otherwise_than_repeated,
        split,
        split_with_a_table,
        divided_by_a_slice,
        running_numbers,
    ]
    + [split_otherwise_than_repeated, ranked, in_batch_negatives, hardest]
    + [
        neighbours,
        reversed_rows,
        shuffled,
        some_rows,
        by_place,
        spectrum,
        spectrum_of_all,
        quantized,
        not_suppressed,
    ]
    + [numbered_classes, sums_of_two],
    ids=lambda f: f.__name__,
)
@BOTH
def test_rows_that_meet_others_are_warned_of(loss, static, caplog):
    train(with_loss(loss), batches(steps=1), 3, static=static)
    # What picks the hardest rows isn't a mean or a sum either, and is named for that.
    neither = "neither a mean nor a sum over rows: it goes back to 'TopKV2'"
    assert caplog.text.count(WARNING) == int(loss is not hardest)
    assert caplog.text.count(neither) == int(loss is hardest)


def convolved(x):
    return tf.nn.conv2d(x, tf.get_variable('kernel', [2, 2, 3, 3]), 1, 'SAME')


def pooled_and_flat(x):
    return tf.layers.flatten(tf.layers.average_pooling2d(x, 2, 1))[:, :, None, None] * tf.ones(3)


def chosen(x):
    return tf.gather_nd(x, tf.where(x[:, 0, 0, 0] > -99))


def of_an_op_that_is_not_known(x):
    return tf.image.rgb_to_hsv(tf.sigmoid(x))


@BOTH
@pytest.mark.parametrize(
    'given',
    [convolved, pooled_and_flat, chosen, of_an_op_that_is_not_known, lambda x: x],
    ids=['convolved', 'pooled', 'chosen', 'unknown', 'as it is'],
)
def test_parts_of_a_batch_are_warned_of(given, static, caplog):
    """As two views of an image, one half of the batch each."""

    def loss(labels, output):
        images = tf.tile(output[:, :, None, None], [1, 2, 2, 3])
        given_images = tf.layers.flatten(given(images))
        wide = given_images.shape.as_list()[1]
        first, second = tf.unstack(tf.reshape(given_images, [2, -1, wide]))
        return tf.reduce_mean(tf.square(first - second))

    train(with_loss(loss), batches(steps=1), 3, static=static)
    sentences = [WARNING, 'cannot be told', 'is a value of all rows of a shard']
    assert any(sentence in caplog.text for sentence in sentences)


@BOTH
def test_singular_values_are_those_of_a_shard(static, caplog):
    train(with_loss(singular_values), batches(steps=1), 3, static=static)
    assert WARNING in caplog.text or 'neither a mean nor a sum over rows' in caplog.text


def above_the_mean(labels, output):
    losses = squares(labels, output)
    return tf.reduce_sum(losses * tf.cast(losses >= tf.reduce_mean(losses), tf.float32))


def only_the_largest(labels, output):
    losses = squares(labels, output)
    return tf.reduce_mean(tf.where(tf.equal(losses, tf.reduce_max(losses)), losses, 0 * losses))


def kept_above_the_mean(labels, output):
    losses = squares(labels, output)[:, 0]
    return tf.reduce_mean(tf.boolean_mask(losses, losses >= tf.reduce_mean(losses)))


def weighted_if_any_is_large(labels, output):
    large = tf.reduce_any(labels > 1)
    return tf.reduce_mean(squares(labels, output) * tf.where_v2(large, tf.abs(labels), 1.0))


@pytest.mark.parametrize(
    'loss',
    [above_the_mean, only_the_largest, kept_above_the_mean, weighted_if_any_is_large],
    ids=lambda f: f.__name__,
)
@BOTH
def test_rows_that_are_compared_with_values_of_a_shard_are_warned_of(loss, static, caplog):
    train(with_loss(loss), batches(steps=1), 3, static=static)
    assert 'is a value of all rows of a shard' in caplog.text


def balanced(classes, output):
    """By how many of the batch have a row's class."""
    counts = tf.math.bincount(classes[:, 0] % 2, minlength=2, maxlength=2)
    counts = tf.cast(tf.gather(counts, classes[:, 0] % 2), tf.float32)
    return tf.reduce_sum(squares(tf.cast(classes, tf.float32), output)[:, 0] / counts)


def of_the_most_usual_class(classes, output):
    usual = tf.argmax(tf.reduce_sum(tf.one_hot(classes[:, 0], 7), 0), output_type=tf.int32)
    chosen = tf.cast(tf.equal(classes, usual), tf.float32)
    return tf.reduce_mean(squares(tf.cast(classes, tf.float32), output) * chosen)


def of_classes_that_all_have(classes, output):
    there = tf.reduce_any(tf.equal(classes, tf.range(7)), 0)
    there = tf.cast(tf.gather(there, 6 - classes[:, 0]), tf.float32)
    return tf.reduce_mean(squares(tf.cast(classes, tf.float32), output)[:, 0] * there)


def above_the_mean_class(classes, output):
    size = tf.size(classes)
    chosen = tf.cast(classes * size > tf.reduce_sum(classes), tf.float32)
    return tf.reduce_mean(squares(tf.cast(classes, tf.float32), output) * chosen)


def by_counts(classes, output):
    ids = classes[:, 0]
    counts = tf.gather(tf.math.unsorted_segment_sum(tf.ones_like(ids), ids, 9), ids)
    losses = squares(tf.cast(classes, tf.float32), output)[:, 0]
    return tf.reduce_mean(losses * tf.cast(counts, tf.float32))


def by_a_sum(classes, output):
    divided = (10 * classes) // (1 + tf.reduce_sum(classes))
    return tf.reduce_mean(squares(tf.cast(divided, tf.float32), output))


def by_all_texts(classes, output):
    text = tf.strings.reduce_join(tf.as_string(classes[:, 0]), 0)
    seed = tf.cast(tf.strings.to_hash_bucket_fast(text, 5), tf.int32)
    return tf.reduce_mean(squares(tf.cast((classes + seed) % 5, tf.float32), output))


def filled(classes, output):
    most = tf.cast(tf.argmax(tf.math.bincount(classes[:, 0], minlength=7)), tf.int32)
    usual = tf.fill(tf.shape(classes), most)
    return tf.reduce_mean(tf.nn.relu(output) * tf.cast(tf.equal(usual, classes), tf.float32))


def filled_with_means(classes, output):
    means = tf.fill(tf.shape(output)[:1], tf.reduce_mean(output))
    return tf.reduce_mean(squares(means[:, None], output))


INTEGERS = [
    (features, abs(3 * labels).astype('int32') % 7) for features, labels in batches(steps=3)
]


@pytest.mark.parametrize(
    'loss',
    [balanced, of_the_most_usual_class, of_classes_that_all_have, above_the_mean_class, by_counts]
    + [by_a_sum, by_all_texts, filled, filled_with_means],
    ids=lambda f: f.__name__,
)
@BOTH
def test_rows_and_integers_of_a_shard_are_warned_of(loss, static, caplog):
    train(with_loss(loss), INTEGERS[:1], 3, static=static)
    assert 'of all rows of' in caplog.text or WARNING in caplog.text


def of_counted_rows(classes, output):
    """The sum by the number of positive ones, which are integers."""
    positive = tf.cast(classes > 0, tf.int32)
    losses = squares(tf.cast(classes, tf.float32), output) * tf.cast(positive, tf.float32)
    return tf.reduce_sum(losses) / tf.cast(1 + tf.reduce_sum(positive), tf.float32)


def by_own_integers(classes, output):
    several = tf.concat([classes, 2 * classes], 1)
    shares = tf.cast(several, tf.float32) / tf.cast(1 + tf.reduce_sum(several, 1)[:, None], 'float')
    return tf.reduce_mean(squares(shares[:, :1], output))


def spectrum_of_each(classes, output):
    wide = tf.concat([output, tf.cast(classes, tf.float32)], 1)
    return tf.reduce_mean(tf.square(tf.abs(tf.signal.rfft(wide))))


def sparse_sums(classes, output):
    """Over rows, and of each."""
    sparse = tf.sparse.from_dense(tf.concat([classes, classes % 2], 1))
    sparse = tf.SparseTensor(sparse.indices, tf.cast(sparse.values, tf.float32), sparse.dense_shape)
    n = tf.cast(tf.shape(output)[0], tf.float32)
    columns, each = tf.sparse.reduce_sum(sparse, 0), tf.sparse.reduce_sum(sparse, 1)
    each = tf.ensure_shape(each, [None])
    return (
        tf.reduce_sum(tf.square(tf.ensure_shape(columns, [2]) / n))
        + tf.reduce_mean(tf.square(output[:, 0] - each))
        + tf.ensure_shape(tf.sparse.reduce_sum(sparse), []) / n
        + tf.reduce_sum(
            tf.square(tf.sparse.sparse_dense_matmul(sparse, output, adjoint_a=True) / n)
        )
    )


@pytest.mark.parametrize('loss', [of_counted_rows, by_own_integers, spectrum_of_each, sparse_sums])
@BOTH
def test_integers_and_sparse_sums_are_exact(loss, static, caplog):
    compare(with_loss(lambda y, p: 0.1 * loss(y, p)), INTEGERS, 3, static=static)
    assert 'of all rows of' not in caplog.text and WARNING not in caplog.text


def test_integers_that_a_shard_lacks_are_no_sum(caplog):
    def loss(classes, output):
        missing = tf.size(tf.setdiff1d(tf.range(7), classes[:, 0])[0])
        return tf.reduce_mean(tf.square(output)) * tf.cast(missing, tf.float32)

    train(with_loss(loss), INTEGERS[:1], 3)
    assert 'counts what differs among the rows' in caplog.text


@BOTH
def test_rows_that_are_divided_by_a_number_of_integers_are_warned_of(static, caplog):
    def loss(classes, output):
        positive = tf.cast(1 + tf.reduce_sum(tf.minimum(classes, 1)), tf.float32)
        return tf.reduce_sum(squares(tf.cast(classes, tf.float32), output) / positive)

    data = [(features, abs(3 * labels).astype('int32')) for features, labels in batches(steps=1)]
    train(with_loss(loss), data, 3, static=static)
    assert 'is a value of all rows of a shard' in caplog.text


@BOTH
def test_rows_of_a_branch_that_goes_by_the_shard_are_warned_of(static, behavior, caplog):
    def loss(labels, output):
        large = tf.reduce_mean(labels) > 0.5
        return tf.reduce_mean(tf.cond(large, lambda: squares(labels, output), lambda: output**2))

    train(with_loss(loss), batches(steps=1), 3, static=static)
    assert WARNING in caplog.text


@BOTH
def test_rows_of_a_branch_that_goes_by_how_many_they_are(static, behavior, caplog):
    def loss(labels, output):
        some = tf.shape(output)[0] > 0
        kept = tf.cond(some, lambda: squares(labels, output), lambda: tf.zeros_like(output))
        return tf.reduce_mean(kept)

    compare(with_loss(loss), batches(), 3, static=static)
    assert WARNING not in caplog.text


def columns(labels, output):
    """Slices, sums, sorts and rolls within rows."""
    wide = tf.concat([output, output**2, labels], 1)
    parts = tf.split(wide, 3, axis=1)
    top, _ = tf.nn.top_k(wide, 2)
    net = wide[:, 1:] + tf.cumsum(wide, 1)[:, :2] + tf.roll(wide, 1, 1)[:, :-1] + top
    return tf.reduce_mean(tf.square(net)) + tf.reduce_mean(parts[0] * parts[2])


def all_of_them(labels, output):
    n = tf.shape(labels)[0]
    return tf.reduce_mean(squares(labels[0:], output[:n])[::1][()])


def chosen_by_what_they_are(labels, output):
    chosen = tf.boolean_mask(squares(labels, output)[:, 0], labels[:, 0] > -1)
    return tf.reduce_sum(chosen) / tf.cast(tf.size(labels), tf.float32)


def tokens_at_positions(labels, output):
    """As BERT gathers what is masked: positions in the batch, of each row's own tokens."""
    tokens = tf.stack([output, output**2, labels, output - labels], 1)
    positions = tf.cast(labels > 0, tf.int32) + tf.constant([[0, 2]])
    offsets = tf.reshape(tf.range(tf.shape(tokens)[0]) * 4, [-1, 1])
    flat = tf.gather(tf.reshape(tokens, [-1, 1]), tf.reshape(positions + offsets, [-1]))
    return tf.reduce_mean(tf.square(flat - 1))


def attention(labels, output):
    """Tokens of a row meet those of the same row."""
    tokens = tf.stack([output, output**2, labels], 1)
    scores = tf.nn.softmax(tf.matmul(tokens, tokens, transpose_b=True))
    pairs = tf.square(tokens[:, :, None] - tokens[:, None, :])
    return tf.reduce_mean(tf.square(tf.matmul(scores, tokens) - 1)) + 0.1 * tf.reduce_mean(pairs)


def time_major(labels, output):
    steps = tf.transpose(tf.stack([output, output**2, labels], 1), [1, 0, 2])
    return tf.reduce_mean(tf.square(steps[1:] - steps[:-1])) + tf.reduce_mean(steps[-1] ** 2)


def looked_up_once(labels, output):
    """As lookups of sparse ids do: each different id once, then back to the rows."""
    table = tf.get_variable('table', [5, 1])
    ids, back = tf.unique(tf.cast(tf.abs(labels[:, 0]) * 3, tf.int32) % 5)
    return tf.reduce_mean(squares(tf.gather(tf.gather(table, ids), back), output))


def covariance(labels, output):
    wide = tf.concat([output, output**2, labels], 1)
    n = tf.cast(tf.shape(wide)[0], tf.float32)
    means = tf.reduce_sum(wide, 0) / n
    products = tf.einsum('bi,bj->ij', wide, wide) / n
    return tf.reduce_sum(tf.square(products - means[:, None] * means[None, :]))


def heads_along_rows(labels, output):
    """As transformers put heads along the rows, with masks for each, one like the first row."""
    tokens = tf.stack([output, output**2, labels], 1) * tf.constant([1.0, 2.0])
    rows = tf.shape(tokens)[0]
    heads = tf.concat(tf.split(tokens, 2, 2), 0)
    scores = tf.matmul(heads, heads, transpose_b=True)
    known = tf.tile(tf.cast(tokens[:, :, 0] > 0, tf.float32), [2, 1])
    masked = tf.where(tf.tile(known[:, None], [1, 3, 1]) > 0, scores, tf.ones_like(scores) * -9.0)
    later = tf.linalg.band_part(tf.ones_like(scores[0]), -1, 0)
    later = tf.tile(later[tf.newaxis], [2 * rows, 1, 1])
    masked = tf.where(later > 0, masked, tf.zeros_like(scores[0]) + masked)
    attended = tf.matmul(tf.nn.softmax(masked), heads)
    return tf.reduce_mean(tf.square(tf.concat(tf.split(attended, 2, 0), 2) - 1))


def siamese(labels, output):
    """Two of each row for one network, put together and taken apart again."""
    rows = tf.shape(output)[0]
    both = tf.tanh(tf.concat([output, 2 * labels], 0))
    return tf.reduce_mean(tf.square(both[:rows] - both[rows:] * labels))


def whitened(labels, output):
    """Each row's distance by a covariance, as columns that are solved for."""
    factor = tf.constant([[2.0, 0.0], [0.5, 1.0]])
    apart = tf.concat([output - labels, output], 1)
    return tf.reduce_mean(tf.square(tf.linalg.triangular_solve(factor, tf.transpose(apart))))


def without_padding(labels, output):
    """As transformers take padding away before a layer, in a batch of one, and put it back."""
    tokens = tf.stack([output, output**2, labels], 1) * tf.constant([1.0, 2.0])
    flat = tf.reshape(tokens, [-1, 2])
    places = tf.cast(tf.where(flat[:, 0] > -0.5), tf.int32)
    kept = tf.gather_nd(flat, places)
    kept.set_shape([None, 2])
    layer = tf.squeeze(tf.layers.dense(tf.expand_dims(kept, 0), 2, tf.tanh), 0)
    shape = tf.shape(tokens)
    back = tf.reshape(tf.scatter_nd(places, layer, [shape[0] * shape[1], 2]), shape)
    return tf.reduce_mean(tf.square(tf.reduce_sum(back, [1, 2]) - labels[:, 0]))


@pytest.mark.parametrize(
    'loss',
    [columns, all_of_them, chosen_by_what_they_are, tokens_at_positions, attention]
    + [
        heads_along_rows,
        siamese,
        time_major,
        looked_up_once,
        covariance,
        whitened,
        without_padding,
    ],
    ids=lambda f: f.__name__,
)
@BOTH
def test_rows_that_keep_to_themselves_are_not_warned_of(loss, static, caplog):
    compare(with_loss(lambda y, p: 0.1 * loss(y, p)), batches(), 3, static=static)
    assert WARNING not in caplog.text
    assert 'values of all rows of their shard' not in caplog.text
    assert 'cannot be told' not in caplog.text


def test_values_of_a_shard_behind_an_activation_are_warned_of(caplog):
    def loss(labels, output):
        centred = output - tf.reduce_mean(output * output)
        return tf.reduce_mean(tf.sigmoid(4 * centred) * labels)

    train(with_loss(loss), batches(steps=1), 3, static=False)
    assert 'is a value of all rows of a shard' in caplog.text


def test_a_reduction_that_is_given_is_not_doubted(caplog):
    train(with_loss(ranked), batches(steps=1), 3, loss_reduction='mean')
    assert WARNING not in caplog.text
