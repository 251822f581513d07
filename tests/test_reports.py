"""What hooks and summaries show is the whole batch's, or else it's said to be a shard's."""

import collections

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import batches, floats, spec_of, step
from towers import assert_close, behavior_of, session

TRAIN, EVAL, PREDICT = (
    getattr(tf.estimator.ModeKeys, mode) for mode in ('TRAIN', 'EVAL', 'PREDICT')
)
EAGER = tf.compat.v2.constant(0.5) if tf.executing_eagerly() else None
DATA = [(x, (np.abs(x[:, 0]) * 3).astype(np.int64) % 3) for x, _ in batches(steps=3)]


class Own(collections.namedtuple('Own', 'a b')):
    """Made of other arguments than its entries."""

    def __new__(cls, a):
        return super().__new__(cls, a, a + 1)


class Holds(tf.train.SessionRunHook):
    """Fetches what it was given, as any hook of a user's does."""

    def __init__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        self.seen = []

    def before_run(self, run_context):
        return tf.train.SessionRunArgs([self.args, self.kwargs])

    def after_run(self, run_context, run_values):
        self.seen.append(run_values.results)


def logits_of(features):
    kernel = tf.get_variable('kernel', initializer=floats(3, 3))
    return tf.matmul(features, kernel)


def sgd(loss):
    return tf.train.GradientDescentOptimizer(0.1).minimize(loss, step())


def show(model_fn, towers, mode=TRAIN, static=True, data=DATA, names=(), run=True, **options):
    """Returns what a step after the other shows: by hooks, in summaries, and by names.

    Args:
      model_fn: one that needs no initial values of somebody else.
      towers: how many; 0 runs the model_fn as it is, undecorated.
      mode: what to run.
      static: whether the graph knows the batch size.
      data: the batches.
      names: of tensors.
      run: whether to run more than what is shown.
      **options: for `replicate()`.
    """
    with tf.Graph().as_default() as graph:
        tf.train.get_or_create_global_step()
        rows = [len(data[0][0]) if static else None]
        features = tf.placeholder(tf.float32, [*rows, 3])
        labels = tf.placeholder(tf.int64, rows)
        replicated = estimator_mgpu.replicate(model_fn, devices=max(towers, 1), **options)
        spec = (replicated if towers else model_fn)(features=features, labels=labels, mode=mode)
        hooks = {
            TRAIN: [*spec.training_hooks, *spec.training_chief_hooks],
            EVAL: spec.evaluation_hooks,
            PREDICT: spec.prediction_hooks,
        }[mode]
        fetched = [graph.get_tensor_by_name(name) for name in names]
        merged = tf.summary.merge_all()
        fetched.append(tf.constant('') if merged is None else merged)
        results = {
            TRAIN: [spec.train_op, spec.loss],
            EVAL: [update for _, update in spec.eval_metric_ops.values()],
            PREDICT: [spec.predictions],
        }[mode]
        found = []
        with session(towers) as sess:
            sess.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            for hook in hooks:
                hook.begin()
            for batch in data:
                args = [hook.before_run(None) for hook in hooks]
                fetches = [[a and a.fetches for a in args], fetched, results if run else []]
                fetches[0] = [tf.no_op() if f is None else f for f in fetches[0]]
                held, others, _ = sess.run(fetches, dict(zip([features, labels], batch)))
                for hook, values in zip(hooks, held):
                    hook.after_run(None, tf.train.SessionRunValues(values, None, None))
                summary = tf.Summary.FromString(others.pop())
                tags = {value.tag: value.simple_value for value in summary.value}
                found.append((held, others, tags))
            values = {name: value for name, (value, _) in spec.eval_metric_ops.items()}
            return found, sess.run(values)


def compare(model_fn, towers=3, **options):
    ours, one = (show(model_fn, n, **options) for n in (towers, 0))
    assert_close(ours, one, 1e-5)
    return one


def losses(features, labels, mode):
    """The official models' way, and what else is made of sums and means over rows."""
    logits = logits_of(features)
    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    correct = tf.equal(tf.argmax(logits, 1), labels)
    accuracy = tf.reduce_mean(tf.cast(correct, tf.float32))
    tf.identity(loss, name='cross_entropy')
    tf.summary.scalar('loss', loss)
    named = tf.identity(accuracy, name='named')
    tf.summary.scalar('accuracy', named)
    tf.summary.scalar('rmse', tf.sqrt(tf.reduce_mean(tf.square(logits))))
    tf.summary.scalar('right', tf.reduce_sum(tf.cast(correct, tf.int32)))
    tf.summary.scalar('rows', tf.shape(features)[0])
    tf.summary.scalar('masked', tf.reduce_mean(tf.boolean_mask(logits, correct) + 1))
    tf.summary.scalar('rate', tf.get_variable('rate', initializer=0.1, trainable=False))
    tf.summary.scalar('total', loss + 0.1 * tf.nn.l2_loss(logits))
    hook = Holds(loss, [accuracy, 2 * loss], [{'a': {'per_class': tf.reduce_mean(logits, 0)}}])
    grads = tf.train.GradientDescentOptimizer(0.1).compute_gradients(loss)
    tf.summary.scalar('norm', tf.global_norm([g for g, _ in grads]))
    tf.summary.scalar('relative', tf.global_norm([g for g, _ in grads]) / loss)
    spec = spec_of(mode, loss, sgd(loss))
    return spec._replace(
        training_hooks=[hook], evaluation_hooks=[hook], training_chief_hooks=[Holds(loss=loss)]
    )


NAMES = ['cross_entropy:0', 'named:0']


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('towers', [1, 3, 5], ids='towers={}'.format)
def test_losses(towers, static, behavior):
    one, _ = compare(losses, towers, static=static, names=NAMES)
    first, second = one[:2]
    assert first[2]['rows'] == 12 and first[2]['loss'] != second[2]['loss']
    compare(losses, towers, mode=EVAL, static=static, names=NAMES)


@pytest.mark.parametrize('rows', [1, 2], ids='rows={}'.format)
def test_fewer_rows_than_devices(rows):
    data = [(x[:rows], y[:rows]) for x, y in DATA]
    compare(losses, 4, static=False, data=data, names=NAMES)


def test_what_is_not_shown_is_not_computed():
    """The other towers' shares of a summary that a step doesn't fetch."""
    calls = []

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(logits_of(features)))
        counted = tf.numpy_function(lambda x: calls.append(1) or x, [features], tf.float32)
        tf.summary.scalar('mean', tf.reduce_mean(tf.ensure_shape(counted, features.shape)))
        return spec_of(mode, loss, sgd(loss))

    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        replicated = estimator_mgpu.replicate(model_fn, devices=3)
        spec = replicated(features=tf.constant(DATA[0][0]), labels=None, mode=TRAIN)
        with session(3) as sess:
            sess.run(tf.global_variables_initializer())
            sess.run([spec.loss, spec.train_op])
            assert not calls
            value = tf.Summary.FromString(sess.run(tf.summary.merge_all())).value[0]
            assert len(calls) == 3
    np.testing.assert_allclose(value.simple_value, DATA[0][0].mean(), rtol=1e-5)


def with_metrics(features, labels, mode):
    logits = logits_of(features)
    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    found = {
        'accuracy': tf.metrics.accuracy(labels, tf.argmax(logits, 1)),
        'mean': tf.metrics.mean(tf.reduce_mean(logits)),
        'positives': tf.metrics.true_positives(labels > 0, logits[:, 0] > 0),
        'auc': tf.metrics.auc(labels > 0, tf.nn.sigmoid(logits[:, 0]), num_thresholds=9),
    }
    tf.identity(found['accuracy'][1], name='train_accuracy')
    for name, (_, update) in found.items():
        tf.summary.scalar(name, update)
    hooks = [Holds(**{name: update for name, (_, update) in found.items()})]
    hooks.append(Holds(tf.group(*(update for _, update in found.values()))))
    spec = spec_of(mode, loss, sgd(loss))
    metrics = found if mode == EVAL else {}
    return spec._replace(training_hooks=hooks, evaluation_hooks=hooks, eval_metric_ops=metrics)


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('mode', [TRAIN, EVAL])
@pytest.mark.parametrize('towers', [1, 3, 5], ids='towers={}'.format)
def test_metrics_that_are_shown(towers, mode, static, behavior):
    """Every row counts once, however many look at the updates."""
    options = dict(mode=mode, static=static, names=['train_accuracy:0'])
    compare(with_metrics, towers, **options)


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('mode', [TRAIN, EVAL])
def test_metrics_that_only_summaries_show(mode, static):
    def model_fn(features, labels, mode):
        return with_metrics(features, labels, mode)._replace(training_hooks=[], evaluation_hooks=[])

    compare(model_fn, mode=mode, static=static)


def test_updates_of_metrics_that_only_a_hook_runs():
    """Not those that Estimator runs, but a part of these by itself."""
    compare(with_metrics, mode=EVAL, static=False, run=False)


def test_logging_tensor_hook(behavior):
    """By tensors, and by names of what only gives one; what it prints is what one device does."""
    printed = collections.defaultdict(list)

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(logits_of(features)), name='mean')
        tf.identity(loss, name='named')
        tf.identity(2 * loss, name='doubled')
        own = printed[len(printed)]
        hooks = [
            tf.train.LoggingTensorHook(
                {'loss': loss, 'named': 'named:0', 'op': 'doubled'},
                every_n_iter=1,
                formatter=lambda values: own.append(values) or 'logged',
            ),
            tf.train.LoggingTensorHook(
                ['named:0', 'doubled'],
                every_n_iter=1,
                formatter=lambda v: own.append(v) or 'logged',
            ),
        ]
        return spec_of(mode, loss, sgd(loss))._replace(training_hooks=hooks)

    for towers in (3, 0):
        show(model_fn, towers)
    assert len(printed[0]) == 2 * len(DATA)
    for ours, one in zip(printed[0], printed[1]):
        assert ours.keys() == one.keys()
        for key in one:
            np.testing.assert_allclose(ours[key], one[key], rtol=1e-5)


def test_a_hook_that_is_made_once(caplog):
    """Its names are those of each graph that Estimator builds with it, on one device, too."""
    logged = []
    names = ['named', 'mean:0']
    hook = tf.train.LoggingTensorHook(names, every_n_iter=1, formatter=logged.append)

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(logits_of(features)), name='mean')
        tf.identity(loss, name='named')
        return spec_of(mode, loss, sgd(loss))._replace(training_hooks=[hook, hook])

    for towers in (3, 2, 0):
        show(model_fn, towers)
    assert len(logged) == 6 * len(DATA)
    third = len(logged) // 3
    for first, second, one in zip(logged[:third], logged[third:], logged[2 * third :]):
        np.testing.assert_allclose(first['named'], second['named'], rtol=1e-5)
        np.testing.assert_allclose(first['named'], one['named'], rtol=1e-5)
    assert caplog.text.count("A LoggingTensorHook shows 'mean:0' by its name") == 2


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('mode', [TRAIN, EVAL, PREDICT])
def test_rows(mode, static, behavior):
    """A hook that looks at examples gets all of the batch's, in their order."""
    logged = []

    def model_fn(features, labels, mode):
        logits = logits_of(features)
        loss = tf.reduce_mean(tf.square(logits))
        named = tf.identity(logits, name='named')
        tf.identity(logits, name='logged')
        hooks = [
            Holds(logits=logits, best=[tf.argmax(logits, 1)], text=tf.as_string(features)),
            Holds(named, [named.op]),
            tf.train.LoggingTensorHook(['logged'], every_n_iter=1, formatter=logged.append),
        ]
        return tf.estimator.EstimatorSpec(
            mode,
            loss=loss,
            predictions=tf.argmax(logits, 1),
            train_op=sgd(loss),
            training_hooks=hooks,
            evaluation_hooks=hooks,
            prediction_hooks=hooks,
        )

    compare(model_fn, 5, mode=mode, static=static, names=['named:0'])
    for ours, one in zip(logged[: len(DATA)], logged[len(DATA) :]):
        np.testing.assert_allclose(ours['logged'], one['logged'], rtol=1e-5)
    assert len(logged) == 2 * len(DATA)


def count_of(rows):
    """A metric of a user's own, of variables that no collection of metrics has."""
    count = tf.get_variable(
        'count',
        [],
        initializer=tf.zeros_initializer(),
        trainable=False,
        collections=[tf.GraphKeys.LOCAL_VARIABLES],
    )
    large = tf.reduce_sum(tf.cast(tf.abs(rows) > 0.5, tf.float32))
    return tf.identity(count), count.assign_add(tf.sqrt(large))


def test_a_metric_of_a_users_own(behavior):
    """In an evaluation by what Estimator runs it counts as well, and in training as a write."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(logits_of(features)))
        value, update = count_of(features[:, 0])
        tf.summary.scalar('update', update)
        hooks = [Holds(update=update)]
        return spec_of(mode, loss, sgd(loss))._replace(
            training_hooks=hooks, evaluation_hooks=hooks, eval_metric_ops={'own': (value, update)}
        )

    compare(model_fn, mode=EVAL)
    compare(model_fn, mode=TRAIN)


def test_the_largest_so_far(behavior):
    """An update that is a variable where they're resources, of one shard after another."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(logits_of(features)))
        largest = tf.get_variable(
            'largest',
            initializer=-9.0,
            trainable=False,
            collections=[tf.GraphKeys.LOCAL_VARIABLES],
        )
        update = largest.assign(tf.maximum(largest, tf.reduce_max(features)))
        metrics = {'largest': (tf.identity(largest), update)}
        hooks = [Holds(update)]
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, evaluation_hooks=hooks, eval_metric_ops=metrics
        )

    one, _ = compare(model_fn, mode=EVAL)
    assert one[0][0][0][0][0] == DATA[0][0].max()


def test_what_is_made_of_a_mean_and_the_largest_so_far(behavior):
    """The mean is the whole batch's still, though it's shown together with what isn't."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(logits_of(features)))
        mean = tf.metrics.mean(loss)
        largest = tf.get_variable(
            'largest',
            initializer=-9.0,
            trainable=False,
            collections=[tf.GraphKeys.LOCAL_VARIABLES],
        )
        update = largest.assign(tf.maximum(largest, tf.reduce_max(features)))
        metrics = {'mean': mean, 'largest': (tf.identity(largest), update)}
        tf.summary.scalar('sum', mean[1] + update)
        hooks = [Holds(mean[1] / update)]
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, evaluation_hooks=hooks, eval_metric_ops=metrics
        )

    compare(model_fn, mode=EVAL)
    compare(model_fn, mode=EVAL, static=False)


def test_rows_added_up_by_position_are_no_error_where_they_are_only_shown(caplog):
    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(logits_of(features)))
        tf.summary.scalar('rows', tf.reduce_mean(tf.metrics.mean_tensor(features)[1]))
        return spec_of(mode, loss, sgd(loss))

    assert len(show(model_fn, 3)[0]) == len(DATA)
    assert "'rows' (ScalarSummary)\" adds up batches row by row" in caplog.text


def test_a_text_that_a_branch_makes():
    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(logits_of(features)))
        text = tf.cond(step() >= 0, lambda: tf.as_string(loss), lambda: tf.constant(''))
        return spec_of(mode, loss, sgd(loss))._replace(training_hooks=[Holds(text)])

    assert len(show(model_fn, 3)[0]) == len(DATA)


def test_metrics_beside_values_of_the_batch(caplog):
    """What follows from sums is exact; a mean of largest rows goes by one shard after another."""

    def sums(features, labels, mode):
        logits = logits_of(features)
        loss = tf.reduce_mean(tf.square(logits))
        _, mean = tf.metrics.mean(logits[:, 0])
        _, other = tf.metrics.mean(labels + 1)
        tf.summary.scalar('ratio', mean / other)
        tf.summary.scalar('both', mean + 2 * tf.reduce_mean(logits[:, 0]))
        with tf.control_dependencies([mean]):
            later = tf.identity(tf.reduce_mean(logits), name='later')
        return spec_of(mode, loss, sgd(loss))._replace(training_hooks=[Holds(later, mean + loss)])

    for static in (True, False):
        compare(sums, static=static, names=['later:0'])
    assert "of one device's shard" not in caplog.text

    def largest(features, labels, mode):
        loss = tf.reduce_mean(tf.square(logits_of(features)))
        value, update = tf.metrics.mean(tf.reduce_max(features))
        return spec_of(mode, loss, sgd(loss))._replace(training_hooks=[Holds(update + loss, value)])

    show(largest, 3)
    assert caplog.text.count("of one device's shard") == 1


def test_summaries_that_write():
    """What they write is what a train_op would."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(logits_of(features)))
        last = tf.get_variable('last', [], initializer=tf.zeros_initializer(), trainable=False)
        tf.summary.scalar('written', tf.assign(last, 0.9 * last + 0.1 * loss))
        average = tf.train.ExponentialMovingAverage(0.9)
        with tf.control_dependencies([average.apply([loss])]):
            tf.summary.scalar('average', tf.identity(average.average(loss)))
        metrics = {'last': (last, tf.no_op())} if mode == EVAL else {}
        return spec_of(mode, loss, sgd(loss))._replace(eval_metric_ops=metrics)

    for mode in (TRAIN, EVAL):
        one, _ = compare(model_fn, mode=mode)
        assert one[0][2]['written'] != one[1][2]['written']


def test_texts_comparisons_and_merged_summaries_of_whole_values(caplog):
    def model_fn(features, labels, mode):
        logits = logits_of(features)
        loss = tf.reduce_mean(tf.square(logits))
        tf.summary.scalar('summarized', loss)
        hooks = [
            Holds(tf.as_string(tf.round(100 * loss)), loss > tf.reduce_mean(logits)),
            tf.train.SummarySaverHook(save_steps=1, summary_op=tf.summary.merge_all()),
        ]
        return spec_of(mode, loss, sgd(loss))._replace(
            training_hooks=hooks[:1], evaluation_hooks=hooks
        )

    compare(model_fn)
    with tf.Graph().as_default():
        replicated = estimator_mgpu.replicate(model_fn, devices=3)
        tf.train.get_or_create_global_step()
        replicated(features=tf.constant(DATA[0][0]), labels=None, mode=EVAL)
    assert "of one device's shard" not in caplog.text


def test_complex_values():
    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(logits_of(features)))
        turned = tf.cast(features, tf.complex64) * tf.constant(1 + 2j, tf.complex64)
        tf.summary.scalar('sum', tf.abs(tf.reduce_sum(turned)))
        tf.summary.scalar('mean', tf.math.imag(tf.reduce_mean(turned)))
        return spec_of(mode, loss, sgd(loss))

    for static in (True, False):
        compare(model_fn, static=static)
    compare(model_fn, 5, static=False)


def test_what_hooks_share_they_go_on_sharing():
    shared = {}

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(logits_of(features)))
        shared.update(loss=loss, stop=False)
        hooks = [Holds(), Holds()]
        for hook in hooks:
            hook.shared = shared
        return spec_of(mode, loss, sgd(loss))._replace(training_hooks=hooks)

    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        replicated = estimator_mgpu.replicate(model_fn, devices=2)
        spec = replicated(features=tf.constant(DATA[0][0]), labels=None, mode=TRAIN)
    first, second = spec.training_hooks
    assert first.shared is second.shared is shared and shared['loss'] is spec.loss


def test_what_python_makes_of_a_metric_runs_once():
    calls = []

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(logits_of(features)))
        metric = tf.metrics.mean(features)
        drawn = tf.numpy_function(lambda x: calls.append(1) or x, [metric[0]], tf.float32)
        return spec_of(mode, loss, sgd(loss))._replace(
            evaluation_hooks=[Holds(drawn)], eval_metric_ops={'mean': metric}
        )

    show(model_fn, 3, mode=EVAL)
    assert len(calls) == len(DATA)


def test_hooks_of_hooks():
    class Wraps(tf.train.SessionRunHook):
        def __init__(self, inner):
            self.inner, self.me = inner, self

        def before_run(self, run_context):
            return self.inner.before_run(run_context)

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(logits_of(features)))
        return spec_of(mode, loss, sgd(loss))._replace(training_hooks=[Wraps(Holds(loss))])

    compare(model_fn)


@pytest.mark.parametrize('of', [tf.where, tf.sparse.from_dense], ids=['where', 'sparse'])
def test_places_of_rows_in_a_shard_are_warned_of(of, caplog):
    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(logits_of(features)))
        hook = Holds(of(tf.cast(labels > 0, tf.int32)))
        return spec_of(mode, loss, sgd(loss))._replace(training_hooks=[hook])

    show(model_fn, 3)
    assert 'WARNING' in {record.levelname for record in caplog.records}


@pytest.mark.parametrize('reduction, expected', [('sum', 12.0), ('mean', 4.0)])
def test_a_loss_that_was_said_to_be_a_sum_or_a_mean(reduction, expected):
    """By hand: 12 rows over 3 towers, each of which has a loss of 4."""

    def model_fn(features, labels, mode):
        unknown = tf.py_function(lambda x: tf.cast(len(x), tf.float32), [features], tf.float32)
        unknown.set_shape([])
        loss = unknown + 0 * tf.reduce_sum(logits_of(features))
        tf.summary.scalar('loss', loss)
        return spec_of(mode, loss, sgd(loss))._replace(training_hooks=[Holds(loss)])

    [(held, _, tags), *_], _ = show(model_fn, 3, loss_reduction=reduction)
    assert held[0][0][0] == tags['loss'] == expected


def test_what_cannot_be_told_is_said(caplog):
    def model_fn(features, labels, mode):
        logits = logits_of(features)
        loss = tf.reduce_mean(tf.square(logits))
        largest = tf.reduce_max(logits)
        tf.summary.scalar('largest', largest)
        tf.identity(largest, name='named')
        hook = Holds(tf.reduce_min(logits), finite=tf.reduce_all(tf.is_finite(logits)))
        return spec_of(mode, loss, sgd(loss))._replace(training_hooks=[hook])

    [(held, _, tags), *_], _ = show(model_fn, 3)
    logits = DATA[0][0][:4] @ floats(3, 3)
    np.testing.assert_allclose(tags['largest'], logits.max(), rtol=1e-5)
    np.testing.assert_allclose(held[0][0][0], logits.min(), rtol=1e-5)
    told = {r.levelname: r.message for r in caplog.records if 'of one device' in r.message}
    assert "'largest' (ScalarSummary) shows 'Max:0' of one device's shard" in told['INFO']
    assert 'A Holds shows ' in told['WARNING']


def test_what_towers_cannot_have_is_the_first_ones(caplog):
    """Values of a queue happen once: this was no error, so it's none now that they're shown."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(logits_of(features)))
        queue = tf.FIFOQueue(9, [tf.float32], [[]])
        with tf.control_dependencies([queue.enqueue(2.0)]):
            scale = queue.dequeue()
        tf.summary.scalar('scaled', tf.reduce_mean(scale * features))
        return spec_of(mode, loss, sgd(loss))

    [(_, _, tags), *_], _ = show(model_fn, 3)
    np.testing.assert_allclose(tags['scaled'], 2 * DATA[0][0][:4].mean(), rtol=1e-5)
    assert "'scaled' (ScalarSummary) shows" in caplog.text


def test_shapes_that_differ_among_shards_do_not_fail(caplog):
    """Means over as many values as the shard's longest row has."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(logits_of(features)))
        longest = tf.reduce_max(labels) + 1
        cut = tf.sequence_mask(labels, longest, dtype=tf.float32)
        tf.summary.scalar('cut', tf.reduce_max(tf.reduce_mean(cut, 0)))
        return spec_of(mode, loss, sgd(loss))._replace(training_hooks=[Holds(cut)])

    show(model_fn, 3)
    assert caplog.text.count("of one device's shard") == 2


def test_other_things_that_hooks_have():
    """What isn't of the batch, or no tensor at all, stays as it is, and so do containers."""
    point = collections.namedtuple('point', 'x y')
    kept = {}

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(logits_of(features)))
        variable = tf.trainable_variables()[0]
        kept.update(one=[variable, 'mean:0'], two={'a': 1}, three=point(1, 'loss'), four={3})
        hook, plain = tf.train.SessionRunHook(), tf.train.SessionRunHook()
        hook.kept, hook.where = kept, point(loss, [loss])
        hook.counts = collections.Counter(a=2)
        hook.sparse = tf.sparse.from_dense(features)
        with tf.Graph().as_default() as hook.graph:
            hook.other = tf.reduce_mean(tf.zeros([2]), name=loss.op.name)
        hook.eager = EAGER
        hook.itself = [hook]
        hook.itself.append(hook.itself)
        hook.own = Own(3)
        hook.slices = tf.IndexedSlices(features, labels)
        plain.same = same = [1, {'b': variable}]
        assert same is plain.same
        kept['same'] = same
        return spec_of(mode, loss, sgd(loss))._replace(training_hooks=[hook, plain])

    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        replicated = estimator_mgpu.replicate(model_fn, devices=2)
        spec = replicated(features=tf.constant(DATA[0][0]), labels=tf.range(12), mode=TRAIN)
    hook, plain = spec.training_hooks
    assert hook.kept is kept and plain.same is kept['same']
    assert isinstance(hook.where, point) and hook.where.x is hook.where.y[0] is spec.loss
    assert hook.counts == collections.Counter(a=2)
    assert hook.other.graph is hook.graph and hook.eager is EAGER and hook.own == (3, 4)
    assert hook.itself[1] is hook.itself
    assert isinstance(hook.sparse, tf.SparseTensor) and isinstance(hook.slices, tf.IndexedSlices)


def test_what_a_step_waits_for_is_no_report():
    """An identity that the update waits for is not only shown."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(logits_of(features)))
        with tf.control_dependencies([tf.identity(loss)]):
            train_op = sgd(loss)
        return spec_of(mode, loss, train_op)

    compare(model_fn)


def test_v1_branches_are_left_as_they_are(caplog):
    """The graph doesn't tell which of them is taken, or that it's the same on all devices."""

    def model_fn(features, labels, mode):
        mean = tf.reduce_mean(logits_of(features))
        loss = mean**2

        def inside():
            tf.identity(mean, name='inside')
            return mean

        tf.summary.scalar('branch', tf.cond(tf.shape(features)[1] > 2, inside, lambda: 0.0))
        return spec_of(mode, loss, sgd(loss))

    with behavior_of('v1'):
        [(_, _, tags), *_], _ = show(model_fn, 3)
    np.testing.assert_allclose(tags['branch'], (DATA[0][0][:4] @ floats(3, 3)).mean(), rtol=1e-5)
    assert "'branch' (ScalarSummary) shows 'cond/Merge:0'" in caplog.text
