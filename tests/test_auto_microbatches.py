"""`microbatches='auto'`: more micro-batches if memory is too small, and the same results."""

import concurrent.futures
import copy
import functools
import threading
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.partition.rules import RULES
from models import batches, floats, of_all_modes, predict, sgd
from towers import assert_close, saved_in

MODES = tf.estimator.ModeKeys
[(FEATURES, LABELS)] = batches(12, steps=1)
OutOfMemory = tf.errors.ResourceExhaustedError


class Memory:
    """A sharded op that runs out of memory if a tower has more than so many examples."""

    def __init__(self):
        self.limit = 100
        self.most = 0  # examples that a tower has had

    def __call__(self, features):
        def check(rows):
            if len(rows) > self.limit:
                raise MemoryError(f'OOM when allocating {len(rows)} rows')
            self.most = max(self.most, len(rows))
            return rows

        checked = tf.py_func(check, [features], features.dtype, stateful=False)
        checked.set_shape(features.shape)
        return checked


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setitem(RULES, 'PyFuncStateless', 'n... -> n...')
    return Memory()


def estimator_of(memory, model_dir=None, devices=2, forward=predict, microbatches='auto', **config):
    model_fn = of_all_modes(lambda features: forward(memory(features)), sgd)
    config = tf.estimator.RunConfig(
        tf_random_seed=1, save_summary_steps=None, checkpoint_save_graph_def=False, **config
    )
    return estimator_mgpu.Estimator(
        model_fn, model_dir, config, devices=devices, microbatches=microbatches
    )


def counts_of(estimator):
    """How many micro-batches were found, for training, evaluation and prediction."""
    auto = estimator._model_fn.replicate_options['microbatches']
    return tuple(auto.count(mode) for mode in (MODES.TRAIN, MODES.EVAL, MODES.PREDICT))


def input_fn(static=False, rows=12):
    data = tf.data.Dataset.from_tensor_slices((FEATURES[:rows], LABELS[:rows]))
    return data.repeat(3).batch(rows, drop_remainder=static)


class Calls:
    """An input_fn that is counted."""

    def __init__(self, of=input_fn):
        self.count = 0
        self.of = of

    def __call__(self):
        self.count += 1
        return self.of()


class Shrink(tf.train.SessionRunHook):
    """Leaves less memory after some steps. It notes what is called, and the global steps."""

    def __init__(self, memory, after, limit):
        self.memory = memory
        self.after = after
        self.limit = limit
        self.noted = []

    def begin(self):
        self.noted.append('begin')

    def before_run(self, run_context):
        return tf.train.SessionRunArgs(tf.train.get_global_step())

    def after_run(self, run_context, run_values):
        step = int(run_context.session.run(tf.train.get_global_step()))
        self.noted.append(step)
        if step == self.after:
            self.memory.limit = self.limit

    def end(self, session):
        self.noted.append('end')


@pytest.mark.core
def test_training(memory, tmp_path, behavior, caplog):
    """Two devices with 6 examples each, and memory for 2. The batch size is static below v1."""
    read = functools.partial(input_fn, static=behavior == 'v1')
    expected = estimator_of(memory, str(tmp_path / 'one'), devices=1, microbatches=1)
    expected.train(read, steps=3)

    memory.limit = 2
    calls = Calls(read)
    estimator = estimator_of(memory, str(tmp_path / 'auto'))
    estimator.train(calls, steps=3)
    assert counts_of(estimator) == (4, 1, 1)
    assert calls.count == 3  # with 1, 2 and 4 micro-batches
    assert_close(saved_in(tmp_path / 'auto'), saved_in(tmp_path / 'one'), 1e-5)
    assert caplog.text.count('Out of memory') == 2
    assert 'each device runs 4 micro-batches' in caplog.text

    estimator.train(calls, steps=2)
    assert calls.count == 4
    assert saved_in(tmp_path / 'auto')['global_step'] == 5


def test_from_the_last_checkpoint(memory, tmp_path, caplog):
    """It begins at step 1, and the step after step 4 has too little memory."""

    def train(name, limit, **end):
        memory.limit = 100
        estimator = estimator_of(memory, str(tmp_path / name), save_checkpoints_steps=2)
        read = lambda: input_fn().repeat()  # noqa: E731
        estimator.train(read, steps=1)
        hook = Shrink(memory, after=4, limit=limit)
        estimator.train(read, hooks=[hook], **end)
        return saved_in(tmp_path / name), hook.noted

    expected, _ = train('plenty', 100, steps=5)
    assert expected['global_step'] == 6
    for end in dict(steps=5), dict(max_steps=6):
        values, noted = train('_'.join(end), 3, **end)
        assert_close(values, expected, 1e-5)
        # The checkpoints are those of steps 1, 3, 5 and 6.
        assert noted == ['begin', 2, 3, 4, 'begin', 4, 5, 6, 'end']
    assert caplog.text.count('Training goes on from model.ckpt-3: steps made since then') == 2


def test_evaluation_starts_over(memory):
    estimator = estimator_of(memory)
    expected = estimator.evaluate(input_fn)
    memory.limit = 3
    hook = Shrink(memory, after=0, limit=3)
    assert estimator.evaluate(input_fn, hooks=[hook]) == pytest.approx(expected)
    assert hook.noted[:2] == ['begin', 'begin'] and hook.noted[-1] == 'end'
    assert counts_of(estimator) == (1, 2, 1)


@pytest.mark.parametrize('single', [True, False], ids=['examples', 'batches'])
def test_predictions_are_given_once(single, memory):
    """Memory is too small for the second batch, of which nothing was given yet."""
    features = floats(30, 3)
    read = lambda: tf.data.Dataset.from_tensor_slices(features).batch(12)  # noqa: E731
    estimator = estimator_of(memory)
    expected = list(estimator.predict(read, yield_single_examples=single))

    predictions = []
    for prediction in estimator.predict(read, yield_single_examples=single):
        predictions.append(prediction)
        memory.limit = 2
    assert len(predictions) == len(expected) == (30 if single else 3)
    assert_close(predictions, expected, 1e-5)
    assert counts_of(estimator) == (1, 1, 4)


def test_a_predictor(memory):
    """Memory is too small for the second call, which builds two more graphs like the first one."""
    estimator = estimator_of(memory, forward=lambda x: tf.reduce_sum(x, 1, keepdims=True))
    noted = []
    hook = tf.train.SessionRunHook()
    hook.begin = lambda: noted.append('begin')
    hook.after_run = lambda context, values: noted.append('run')
    hook.end = lambda session: noted.append('end')
    with estimator.predictor(tf.TensorSpec([None, None], tf.float32), hooks=[hook]) as predict:
        expected = predict(FEATURES)
        memory.limit = 2
        assert_close(predict(FEATURES), expected, 1e-5)
        assert predict(floats(5, 4))['output'].shape == (5, 1)
    assert noted == ['begin', 'run', 'begin', 'begin', 'run', 'run', 'end']
    assert counts_of(estimator) == (1, 1, 4)


def test_a_predictor_in_several_threads(memory):
    """All calls find at once that memory is too small: that raises the number only once."""
    estimator = estimator_of(memory)
    with estimator.predictor() as predict, concurrent.futures.ThreadPoolExecutor(3) as threads:
        expected = predict(FEATURES)
        memory.limit = 3
        for predictions in threads.map(predict, [FEATURES] * 9):
            assert_close(predictions, expected, 1e-5)
    assert counts_of(estimator) == (1, 1, 2)


def test_a_predictor_that_is_closed_between_two_attempts(memory):
    """A call has given the session up, and waits for another call to leave it."""
    running, released = threading.Event(), threading.Event()

    def forward(features):
        def wait(batch):
            if len(batch) == 2:
                running.set()
                assert released.wait(60)
            return batch

        wide = tf.reshape(tf.tile(features, [1, 8]), [-1, 8, 3])  # what micro-batches save
        waited = tf.py_func(wait, [tf.reduce_mean(wide, 1)], tf.float32)
        waited.set_shape([None, 3])
        return waited

    estimator = estimator_of(memory, forward=forward)
    predict = estimator.predictor(tf.TensorSpec([None, 3], tf.float32))
    memory.limit = 3
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        in_the_way = threads.submit(predict, FEATURES[:2])
        assert running.wait(60)
        call = threads.submit(predict, FEATURES)
        while counts_of(estimator) != (1, 1, 2):
            assert not call.done()
            time.sleep(0.01)
        closing = threads.submit(predict.close)
        while not predict._is_closed:
            time.sleep(0.01)
        released.set()
        assert_close(call.result(), {'output': FEATURES}, 1e-6)
        assert_close(in_the_way.result(), {'output': FEATURES[:2]}, 1e-6)
        closing.result()
    with pytest.raises(RuntimeError, match='This predictor is closed'):
        predict(FEATURES)


def test_a_predictor_whose_batch_has_too_few_examples(memory):
    estimator = estimator_of(memory)
    with estimator.predictor() as predict:
        memory.limit = 0
        with pytest.raises(OutOfMemory, match='a batch has too few examples for more') as raised:
            predict(FEATURES[:2])
    assert 'a smaller batch' not in str(raised.value)


def test_train_and_evaluate(memory, tmp_path):
    """Evaluation has other batches, and so needs another number of micro-batches."""
    results = []
    for limit, devices in (100, 1), (1, 2):
        memory.limit = limit
        estimator = estimator_of(memory, str(tmp_path / str(devices)), devices=devices)
        results.append(
            tf.estimator.train_and_evaluate(
                estimator,
                tf.estimator.TrainSpec(lambda: input_fn(rows=4).repeat(), max_steps=3),
                tf.estimator.EvalSpec(lambda: input_fn(rows=6), steps=2),
            )[0]
        )
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert counts_of(estimator) == (2, 3, 1)


def test_evaluation_that_fails_ends_training(memory, tmp_path):
    """Training isn't tried again, as its own steps have enough memory."""
    calls = Calls(lambda: input_fn(rows=2).repeat())

    def eval_input_fn():
        memory.limit = 0
        return input_fn(rows=2)

    estimator = estimator_of(memory, str(tmp_path), save_checkpoints_steps=1)
    with pytest.raises(OutOfMemory, match='a batch has too few examples for more'):
        tf.estimator.train_and_evaluate(
            estimator,
            tf.estimator.TrainSpec(calls, max_steps=3),
            tf.estimator.EvalSpec(eval_input_fn, throttle_secs=0),
        )
    assert calls.count == 1


@pytest.mark.parametrize('static', [False, True], ids=['dynamic', 'static'])
def test_up_to_one_example(static, memory, caplog):
    """Five examples on two devices: one has three, so the last attempt has three micro-batches."""
    memory.limit = 0
    calls = Calls(functools.partial(input_fn, static, rows=5))
    with pytest.raises(OutOfMemory) as raised:
        estimator_of(memory).train(calls, steps=1)
    assert 'a batch has too few examples for more. To need less memory' in str(raised.value)
    assert 'OOM when allocating' in str(raised.value)
    assert calls.count == (2 if static else 3)


def test_what_micro_batches_would_not_save(memory):
    """Most activations are needed for a mean of all examples: no third attempt is made."""

    def normalized(features):
        for _ in range(3):
            mean, variance = tf.nn.moments(features, [0])
            features = tf.nn.batch_normalization(features, mean, variance, None, None, 1e-3)
            features = tf.layers.dense(features, 9, tf.tanh)
        return tf.layers.dense(features, 1)

    memory.limit = 2
    calls = Calls()
    estimator = estimator_of(memory, forward=normalized)
    match = 'they would save only .* of the activations .the others are kept until all'
    with pytest.raises(OutOfMemory, match=match) as raised:
        estimator.train(calls, steps=1)
    assert 'Each device had 1 micro-batch(es), and more would not help' in str(raised.value)
    assert calls.count == 2


def sized(features, rows):
    """A sharded op that has no memory for a tensor of the given number of rows."""

    def fail(batch):
        raise MemoryError(f'OOM when allocating tensor with shape[{rows(len(batch))},3]')

    failing = tf.py_func(fail, [features], tf.float32, stateful=False, name='large')
    failing.set_shape(features.shape)
    return failing


@pytest.mark.parametrize('static', [False, True], ids=['dynamic', 'static'])
@pytest.mark.parametrize(
    'rows, attempts',
    [(lambda examples: 99, 2), (lambda examples: max(examples, 3), 4)],
    ids=['constant', 'at least 3'],
)
def test_what_does_not_shrink(rows, attempts, static, memory):
    """Micro-batches have 12, 6, 3 and 2 examples. The last doubling doesn't help."""
    calls = Calls(functools.partial(input_fn, static))
    estimator = estimator_of(lambda features: sized(features, rows), devices=1)
    tried = 2 ** (attempts - 1)
    match = (
        f'allocating tensor with shape.{rows(0)},3.. Each device had {tried} micro-batch.es., and '
        'more would not help: the op large needed as much memory with fewer of them. To need less '
        'memory on each device, use more devices, '
    )
    with pytest.raises(OutOfMemory, match=match):
        estimator.train(calls, steps=1)
    assert calls.count == attempts
    assert counts_of(estimator) == (1, 1, 1)  # More haven't helped.


def test_an_op_that_runs_once_does_not_shrink(memory):
    """It needs the whole batch, on one device."""

    def sorted_by_first(features):
        return tf.layers.dense(sized(tf.sort(features, 0), lambda examples: examples), 1)

    calls = Calls()
    estimator = estimator_of(lambda features: features, forward=sorted_by_first)
    match = 'the op large, which runs once, unsharded, needed as much .* use recompute'
    with pytest.raises(OutOfMemory, match=match):
        estimator.train(calls, steps=1)
    assert calls.count == 2


@pytest.mark.parametrize('first', [36, 0], ids=['one-shot', 'anew'])
def test_what_a_generator_has_given(first, memory, caplog):
    """The third step fails. The next attempt begins behind its batch, or with the first one."""
    numbers = [(np.full([3], number, 'float32'), np.zeros([1], 'float32')) for number in range(999)]
    one_shot = iter(numbers)
    noted = []

    def read():
        types = tf.float32, tf.float32
        generator = lambda: one_shot if first else iter(numbers)  # noqa: E731
        return tf.data.Dataset.from_generator(generator, types, ([3], [1])).batch(12)

    def forward(features):
        note = lambda batch: (noted.append(batch[0, 0]), batch)[1]  # noqa: E731
        noting = tf.py_func(note, [features], tf.float32, stateful=False)
        noting.set_shape(features.shape)
        return predict(noting)

    estimator = estimator_of(memory, devices=1, forward=forward)
    estimator.train(read, hooks=[Shrink(memory, after=2, limit=6)], steps=3)
    assert noted[:2] == [0, 12]
    # TensorFlow may have taken further examples, of which no step has got any.
    assert noted[2] >= first if first else noted[2] == 0
    assert noted[3] == noted[2] + 6
    lost = 'If that is one which cannot begin anew, the examples of at least 3 batch(es) are lost'
    assert lost in caplog.text


def test_no_word_of_generators_without_one(memory, caplog):
    memory.limit = 6
    estimator_of(memory, devices=1).train(input_fn, steps=1)
    assert 'Out of memory' in caplog.text and 'generator' not in caplog.text


@pytest.mark.parametrize('hint', [None, tf.TensorSpec([None, 3], tf.float32)], ids=['', 'opened'])
def test_a_predictor_takes_no_more_micro_batches_than_examples(hint, memory):
    """Of a large batch that fitted, and of one with three examples that never fits."""
    estimator = estimator_of(memory)
    with estimator.predictor(hint) as predict:
        memory.limit = 2
        assert len(predict(FEATURES)['output']) == 12
        assert counts_of(estimator) == (1, 1, 4)
        memory.limit = 0
        with pytest.raises(OutOfMemory, match='had 4 micro-batch.* a batch has too few examples'):
            predict(FEATURES[:3])
        memory.limit = 2
        assert len(predict(FEATURES)['output']) == 12
    assert counts_of(estimator) == (1, 1, 4)


def test_a_predictor_keeps_no_micro_batches_that_did_not_help(memory):
    estimator = estimator_of(memory)
    built = []
    hook = tf.train.SessionRunHook()
    hook.begin = lambda: built.append(counts_of(estimator)[2])
    with estimator.predictor(hooks=[hook]) as predict:
        memory.limit = 0
        with pytest.raises(OutOfMemory, match='had 2 micro-batch.* a batch has too few examples'):
            predict(FEATURES[:3])
        memory.limit = 6
        assert len(predict(FEATURES)['output']) == 12
        assert len(predict(FEATURES[:3])['output']) == 3
    assert built == [1, 2, 1]
    assert counts_of(estimator) == (1, 1, 1)


def raises(error):
    """An input_fn's batch, or a variable's value, that has too little memory."""

    def fail():
        raise error

    return tf.py_func(fail, [], tf.float32)


def test_variables_that_do_not_fit(memory):
    def forward(features):
        value = raises(MemoryError('OOM when allocating w'))
        value.set_shape([3, 1])
        return tf.matmul(features, tf.get_variable('w', initializer=value))

    calls = Calls()
    with pytest.raises(OutOfMemory, match='before the first step, as variables') as raised:
        estimator_of(memory, forward=forward).train(calls, steps=1)
    assert 'use more devices, or variables=' in str(raised.value)
    assert calls.count == 1


def test_nothing_is_sharded(memory):
    """Two examples on three devices."""
    memory.limit = 1
    calls = Calls(functools.partial(input_fn, static=True, rows=2))
    with pytest.raises(OutOfMemory, match='nothing is sharded') as raised:
        estimator_of(memory, devices=3).train(calls, steps=1)
    assert 'more devices' not in str(raised.value)
    assert calls.count == 1


def no_memory_for_the_input():
    fail = lambda *batch: (raises(MemoryError('OOM when allocating the input')), batch[1])  # noqa: E731
    return input_fn().map(fail).map(lambda x, y: (tf.ensure_shape(x, [12, 3]), y))


def test_other_resources(memory, tmp_path):
    """The memory of an input pipeline or of an input_fn's own session, and the disk."""
    estimator = estimator_of(memory, str(tmp_path))
    calls = Calls(no_memory_for_the_input)
    with pytest.raises(OutOfMemory, match='OOM when allocating the input'):
        estimator.train(calls, steps=1)

    def in_a_session_of_its_own():
        with tf.Graph().as_default(), tf.Session() as session:
            session.run(raises(MemoryError('OOM when allocating at the begin')))

    with pytest.raises(OutOfMemory, match='OOM when allocating at the begin'):
        estimator.train(in_a_session_of_its_own, steps=1)

    class DiskIsFull(tf.train.SessionRunHook):
        def after_run(self, run_context, run_values):
            raise OutOfMemory(None, None, f'{tmp_path}/model.ckpt; No space left on device')

    calls_of_second = Calls()
    with pytest.raises(OutOfMemory, match="can't be written to: .* No space left"):
        estimator.train(calls_of_second, [DiskIsFull()], steps=1)
    assert calls.count == calls_of_second.count == 1
    assert counts_of(estimator) == (1, 1, 1)


def test_errors_that_no_op_has_raised(memory, tmp_path):
    """But a hook, a saving listener or the input_fn: the error stays as it is."""
    error = OutOfMemory(None, None, 'OOM when allocating in Python')
    calls = Calls()

    def fail(*args):
        raise error

    hook = tf.train.SessionRunHook()
    hook.after_run = fail
    listener = tf.train.CheckpointSaverListener()
    listener.after_save = fail
    estimator = estimator_of(memory, str(tmp_path))
    for read, options in (
        (calls, dict(hooks=[hook])),
        (calls, dict(saving_listeners=[listener])),
        (Calls(fail), {}),
    ):
        with pytest.raises(OutOfMemory) as raised:
            estimator.train(read, steps=1, **options)
        assert raised.value is error
    assert calls.count == 2 and counts_of(estimator) == (1, 1, 1)


def test_an_input_of_an_evaluation_ends_training(memory, tmp_path):
    """Training isn't tried again, as its own steps have enough memory."""
    calls = Calls(lambda: input_fn(rows=12).repeat())
    estimator = estimator_of(memory, str(tmp_path))
    with pytest.raises(OutOfMemory, match='OOM when allocating the input'):
        tf.estimator.train_and_evaluate(
            estimator,
            tf.estimator.TrainSpec(calls, max_steps=1),
            tf.estimator.EvalSpec(no_memory_for_the_input),
        )
    assert calls.count == 1


def test_a_replicated_estimator(memory):
    """Also a copy of one: it has a number of its own."""
    memory.limit = 3
    plain = tf.estimator.Estimator(of_all_modes(lambda features: predict(memory(features))))
    estimator = estimator_mgpu.replicate_estimator(plain, devices=2, microbatches='auto')
    copied = copy.deepcopy(estimator)
    estimator.train(input_fn, steps=1)
    assert counts_of(estimator)[0] == 2 and counts_of(copied)[0] == 1
    assert memory.most == 3
    assert estimator.explain(input_fn).microbatches == 2
    assert "'microbatches': 'auto'" in repr(estimator._model_fn.replicate_options)


@pytest.mark.parametrize('called', [estimator_mgpu.replicate, estimator_mgpu.session_config])
def test_not_without_an_estimator(called):
    with pytest.raises(ValueError, match="microbatches='auto' is for estimator_mgpu.Estimator"):
        called(devices=2, microbatches='auto')


@pytest.mark.parametrize('microbatches', ['Auto', 'AUTO', '8'])
def test_texts_that_are_no_number(microbatches):
    with pytest.raises(ValueError, match="Give 1 or more: .* take 'auto', too"):
        estimator_mgpu.Estimator(predict, devices=2, microbatches=microbatches)


def test_an_option_that_is_misspelled():
    with pytest.raises(TypeError, match='^Estimator.. takes no microbatch: .* Is microbatches mea'):
        estimator_mgpu.Estimator(predict, microbatch='auto')
    plain = tf.estimator.Estimator(of_all_modes(predict))
    with pytest.raises(TypeError, match='^replicate_estimator.. takes no device: .* Is devices'):
        estimator_mgpu.replicate_estimator(plain, device=2)
