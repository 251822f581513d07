"""Checkpoints that cannot be written or read: what is said and kept; names of directories."""

import os
import shutil

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.checkpoints import checkpoint_files
from models import batches, of_all_modes, predict
from towers import assert_close, saved_in

pytestmark = pytest.mark.core

model_fn = of_all_modes(predict)
LAST, BEFORE = 'model.ckpt-6', 'model.ckpt-4'
DATA, INDEX = f'{LAST}.data-00000-of-00001', f'{LAST}.index'


def input_fn():
    return tf.data.Dataset.from_tensors(batches(steps=1)[0]).repeat()


def estimator_in(model_dir, fn=model_fn, **options):
    config = tf.estimator.RunConfig(
        str(model_dir), tf_random_seed=1, save_checkpoints_steps=2, keep_checkpoint_max=3
    )
    return estimator_mgpu.Estimator(fn, config=config, devices=2, **options)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A model_dir with checkpoints of steps 2, 4 and 6."""
    model_dir = tmp_path_factory.mktemp('trained')
    estimator_in(model_dir).train(input_fn, max_steps=6)
    return model_dir


@pytest.fixture
def model_dir(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / 'model')


def listed(model_dir):
    """What files hold, but for those of summaries: two of one second share a file."""
    files = [path for path in model_dir.iterdir() if path.is_file()]
    return {path.name: path.read_bytes() for path in files if 'tfevents' not in path.name}


def train(estimator):
    estimator.train(input_fn, max_steps=8)


def train_and_evaluate(estimator):
    spec = tf.estimator.EvalSpec(input_fn, 1)
    tf.estimator.train_and_evaluate(estimator, tf.estimator.TrainSpec(input_fn, 8), spec)


def serving_input_fn():
    features = tf.placeholder(tf.float32, [None, 3])
    return tf.estimator.export.TensorServingInputReceiver(features, features)


CALLS = {
    'train': train,
    'train_and_evaluate': train_and_evaluate,
    'evaluate': lambda estimator: estimator.evaluate(input_fn, steps=1),
    'predict': lambda estimator: next(estimator.predict(input_fn)),
    'export': lambda estimator: estimator.export_saved_model(
        os.path.join(estimator.model_dir, 'export'), serving_input_fn
    ),
    'warm start': lambda estimator: estimator_in(
        os.path.join(estimator.model_dir, 'other'), warm_start_from=estimator.model_dir
    ).train(input_fn, steps=1),
}


def cut(name, size):
    return lambda model_dir: os.truncate(model_dir / name, size)


def spoil(model_dir):
    (model_dir / DATA).write_bytes(bytes(len((model_dir / DATA).read_bytes())))


def delete(name):
    return lambda model_dir: (model_dir / name).unlink()


def replace_by_directory(model_dir):
    (model_dir / 'checkpoint').unlink()
    (model_dir / 'checkpoint').mkdir()


DATA_LOSS, NOT_FOUND = tf.errors.DataLossError, tf.errors.NotFoundError
TORN, MISSING = f"The checkpoint .*/{LAST} can't be read: ", f'names .*/{INDEX} is not there'
UNREADABLE = "checkpoint, which names the last checkpoint, can't be read"
DAMAGES = {
    'short data': (cut(DATA, 50), DATA_LOSS, f'{TORN}Read less bytes'),
    'empty data': (cut(DATA, 0), DATA_LOSS, f'{TORN}Read less bytes'),
    'zeros': (spoil, DATA_LOSS, f'{TORN}.*Checksum does not match'),
    'no data': (delete(DATA), NOT_FOUND, f'{TORN}.*{DATA}; No such file'),
    'short index': (cut(INDEX, 50), DATA_LOSS, f'{TORN}.*not an sstable'),
    'no index': (delete(INDEX), ValueError, MISSING),
    'empty state': (cut('checkpoint', 0), ValueError, UNREADABLE),
    'no state': (
        lambda model_dir: (model_dir / 'checkpoint').write_bytes(b'\0\1\2'),
        ValueError,
        UNREADABLE,
    ),
    'a directory': (replace_by_directory, ValueError, UNREADABLE),
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_checkpoint_that_cannot_be_read(damage, model_dir):
    """The last line says which file, what is kept and what to do; nothing is changed."""
    spoil_it, error, message = DAMAGES[damage]
    spoil_it(model_dir)
    before = listed(model_dir)
    usable = LAST if 'state' in damage or damage == 'a directory' else BEFORE
    for name, call in CALLS.items():
        if (name, damage) in (('warm start', 'short index'), ('export', 'no data')):
            continue  # TensorFlow reads it without an op, or has a text of its own.
        with pytest.raises(error) as info:
            call(estimator_in(model_dir))
        last_line = str(info.value).splitlines()[-1]
        assert type(info.value) is error
        assert info.match(message) and f'{usable} has all its files: to go on from it' in last_line
        assert f'"{usable}" as the only line of {model_dir}/checkpoint.' in last_line
        if message.startswith(TORN):
            assert f'remove the checkpoint ({LAST}.*) and write' in last_line
            assert isinstance(info.value.__cause__, tf.errors.OpError)
    after = listed(model_dir)
    assert {name: after.get(name) for name in before} == before


def test_the_remedy(model_dir):
    """What the message says to do lets training go on as from an earlier checkpoint."""
    DAMAGES['short data'][0](model_dir)
    with pytest.raises(DATA_LOSS):
        train(estimator_in(model_dir))
    for path in model_dir.glob(f'{LAST}.*'):
        path.unlink()
    (model_dir / 'checkpoint').write_text(f'model_checkpoint_path: "{BEFORE}"')
    expected = saved_in(model_dir)
    assert expected['global_step'] == 4
    steps = []

    class Watch(tf.train.SessionRunHook):
        def after_create_session(self, session, coord):
            steps.append(session.run(tf.train.get_global_step()))

    estimator_in(model_dir).train(input_fn, [Watch()], max_steps=6)
    assert steps == [4]
    assert saved_in(model_dir)['global_step'] == 6


def test_no_other_checkpoint(tmp_path):
    estimator = estimator_in(tmp_path)
    estimator.train(input_fn, max_steps=1)
    for name in ('model.ckpt-0', 'model.ckpt-1'):
        (tmp_path / f'{name}.data-00000-of-00001').unlink()
    match = rf'No other checkpoint in {tmp_path} has all its files: to begin anew, remove the ch'
    with pytest.raises(NOT_FOUND, match=match):
        estimator.evaluate(input_fn, steps=1)


def test_a_checkpoint_that_is_given(model_dir):
    """By its path: the file `checkpoint` doesn't matter."""
    estimator = estimator_in(model_dir)
    expected = estimator.evaluate(input_fn, steps=1, checkpoint_path=str(model_dir / BEFORE))
    (model_dir / 'checkpoint').write_text('')
    found = estimator.evaluate(input_fn, steps=1, checkpoint_path=str(model_dir / BEFORE))
    assert found == expected and found['global_step'] == 4
    cut(DATA, 50)(model_dir)
    with pytest.raises(DATA_LOSS, match=f'{TORN}.*{BEFORE} has all its files'):
        estimator.evaluate(input_fn, 1, None, str(model_dir / LAST))
    with pytest.raises(DATA_LOSS, match=f'{TORN}.*{BEFORE} has all its files'):
        estimator.export_saved_model(
            str(model_dir / 'export'), serving_input_fn, checkpoint_path=str(model_dir / LAST)
        )


class Fault(tf.train.SessionRunHook):
    """Loses the session at a step, once, with the last checkpoint's data cut off."""

    def __init__(self, model_dir):
        self.model_dir, self.count = model_dir, 0

    def before_run(self, context):
        self.count += 1
        if self.count == 3:
            DAMAGES['short data'][0](self.model_dir)
            raise tf.errors.AbortedError(None, None, 'a worker has gone')


@pytest.mark.parametrize('replicated', [True, False], ids=['Estimator', 'plain'])
def test_a_torn_checkpoint_after_a_fault(replicated, model_dir):
    """TensorFlow's OutOfRangeError would be taken for the end of the data."""
    (model_dir / 'checkpoint').write_text(f'model_checkpoint_path: "{BEFORE}"')
    estimator = estimator_in(model_dir)
    if not replicated:
        config = estimator.config.replace(save_checkpoints_steps=100)
        fn = estimator_mgpu.replicate(model_fn, devices=2)
        estimator = tf.estimator.Estimator(fn, config=config)
        (model_dir / 'checkpoint').write_text(f'model_checkpoint_path: "{LAST}"')
    with pytest.raises(DATA_LOSS, match=f'{TORN}Read less bytes'):
        estimator.train(input_fn, [Fault(model_dir)], max_steps=20)


def test_what_cannot_be_written(model_dir):
    """A directory, and a file, where TensorFlow wants to make the other."""
    kept = saved_in(model_dir)
    (model_dir / 'model.ckpt-8_temp').write_text('')
    match = (
        rf"^{model_dir} can't be written to: {model_dir}/model.ckpt-8_temp.*; .*\. The checkpoints "
        f'are kept, and training goes on from {LAST}. Make room there, or let this process write'
    )
    with pytest.raises(tf.errors.FailedPreconditionError, match=match) as info:
        estimator_in(model_dir).train(input_fn, max_steps=8)
    assert isinstance(info.value.__cause__, tf.errors.FailedPreconditionError)
    assert_close(saved_in(model_dir), kept, 0)
    (model_dir / 'eval').write_text('')
    with pytest.raises(tf.errors.FailedPreconditionError, match='/eval is not a directory. The ch'):
        estimator_in(model_dir).evaluate(input_fn, steps=1)
    with pytest.raises(tf.errors.FailedPreconditionError, match='There is no checkpoint yet'):
        estimator_in(model_dir / 'eval' / 'below').train(input_fn, max_steps=1)


@pytest.mark.parametrize(
    'error',
    [tf.errors.ResourceExhaustedError, tf.errors.PermissionDeniedError, RuntimeError],
)
def test_a_full_disk(error, model_dir):
    """As TensorFlow says it of a SaveV2, of a file written in Python, and of one of summaries."""
    reason = f'{model_dir}/part-0; No space left on device'
    trace = f"Graph execution error:\n\nDetected at node 'save'\nNode: 'save/SaveV2'\n{reason}\n"
    messages = [
        f'{trace}\t [[{{{{node save/SaveV2}}}}]]',
        f'From /job:ps/replica:0/task:0:\n{reason}\n\t [[{{{{node save/SaveV2}}}}]]',
        f"Node: 'a'\nNode: 'b'\n2 root error(s) found.\n  (0) RESOURCE_EXHAUSTED: {reason}\n\t [[",
        f'{reason}\n\tFailed to flush 2 events',
    ]
    for message in messages:
        given = RuntimeError(message) if error is RuntimeError else error(None, None, message)
        with pytest.raises(error) as info, checkpoint_files.checked_files(str(model_dir)):
            raise given
        assert str(info.value) == (
            f"{model_dir} can't be written to: {reason}. The checkpoints are kept, and training "
            f'goes on from {LAST}. Make room there, or let this process write there, and start '
            'again.'
        )
        assert info.value.__cause__ is given
    for text in (f'model_checkpoint_path: "{BEFORE}"', ''):  # before the last was noted; torn
        kept = f'training goes on from {BEFORE}' if text else 'There is no checkpoint yet'
        with (
            pytest.raises(error, match=kept),
            checkpoint_files.checked_files(str(model_dir)),
        ):
            (model_dir / 'checkpoint').write_text(text)
            raise given
        (model_dir / 'checkpoint').write_text(f'model_checkpoint_path: "{BEFORE}"')


def test_errors_of_something_else(model_dir):
    """They stay as they are: a graph that has changed, files of the model's own, no reason."""
    for message in ('OOM when allocating tensor', f'{model_dir}2/a; Read-only file system', ''):
        given = tf.errors.ResourceExhaustedError(None, None, message)
        with pytest.raises(tf.errors.ResourceExhaustedError) as info:
            with checkpoint_files.checked_files(str(model_dir)):
                raise given
        assert info.value is given
    given = tf.errors.NotFoundError(None, None, f'{model_dir}/words; No such file or directory')
    with pytest.raises(NOT_FOUND) as info, checkpoint_files.checked_files(str(model_dir)):
        raise given
    assert info.value is given

    def wider(features, labels, mode):
        tf.get_variable('new', [])
        return model_fn(features, labels, mode)

    with pytest.raises(NOT_FOUND, match='new not found in checkpoint') as info:
        estimator_in(model_dir, wider).evaluate(input_fn, steps=1)
    assert 'has all its files' not in str(info.value)


NAMES = ['two wörds, lr=0.1]', "{a,b} %d~ quo'te\nnew line"]


@pytest.mark.parametrize('name', NAMES)
def test_a_name_with_other_characters(name, tmp_path):
    """Training goes on, evaluates, and deletes its own old checkpoints."""
    model_dir = tmp_path / name
    for stop in (6, 10):
        estimator_in(model_dir).train(input_fn, max_steps=stop)
        assert estimator_in(model_dir).evaluate(input_fn, steps=1)['global_step'] == stop
    kept = [path.name for path in model_dir.iterdir() if path.suffix == '.index']
    assert sorted(kept) == [f'model.ckpt-{step}.index' for step in (10, 6, 8)]


PATTERNS = {'run[lr=0.1]': r'\[', 'a*b/model': r'\*', 'q?': r'\?', '[\\': r'\[ and \\'}


@pytest.mark.parametrize('name', PATTERNS)
def test_a_name_that_tensorflow_takes_for_a_pattern(name, tmp_path, model_dir):
    """It's refused before anything is trained, in each place that takes a path of checkpoints."""
    path = str(tmp_path / name)
    match = f' has {PATTERNS[name]}, and TensorFlow takes .* Give a name without '
    estimator = estimator_in(model_dir)
    uses = [
        lambda: estimator_in(path),
        lambda: estimator.evaluate(input_fn, 1, checkpoint_path=path),
        lambda: next(estimator.predict(input_fn, checkpoint_path=path)),
        lambda: estimator_in(model_dir, warm_start_from=path).train(input_fn, steps=1),
    ]
    for use in uses:
        with pytest.raises(ValueError, match=match):
            use()


def test_what_tensorflow_takes_for_a_pattern(tmp_path):
    """Why: if this fails, its paths are no patterns any more, and such names may be allowed."""
    plain = tf.estimator.Estimator(model_fn, str(tmp_path / 'run[1]'))
    plain.train(input_fn, max_steps=2)
    assert (tmp_path / 'run[1]' / 'model.ckpt-2.index').exists()
    assert plain.evaluate(input_fn, steps=1)['global_step'] == 0


def test_checkpoints_of_tensorflow_1(tmp_path):
    """Their paths may be patterns."""
    path = str(tmp_path / 'model.ckpt-1-?????-of-00001')
    (tmp_path / 'checkpoint').write_text(f'model_checkpoint_path: "{path}"')
    with pytest.raises(ValueError, match='to begin anew, remove'):
        checkpoint_files.check(str(tmp_path))
    (tmp_path / 'model.ckpt-1-00000-of-00001').write_text('')
    checkpoint_files.check(str(tmp_path))


def test_errors_of_other_files(tmp_path):
    """A directory that the input reads as a file, though the model_dir is in it."""

    def reads_a_directory():
        lines = tf.data.TextLineDataset(str(tmp_path))
        return lines.map(lambda line: (tf.zeros([3]), tf.zeros([1]))).batch(2)

    estimator = estimator_in(tmp_path / 'model')
    with pytest.raises(tf.errors.FailedPreconditionError) as info:
        estimator.train(reads_a_directory)
    assert info.value.op.type == 'IteratorGetNext' and "can't be written" not in str(info.value)


def test_a_directory_in_the_place_of_data(model_dir):
    """It can't be read, whatever TensorFlow calls that."""
    (model_dir / DATA).unlink()
    (model_dir / DATA).mkdir()
    with pytest.raises(tf.errors.FailedPreconditionError) as info:
        estimator_in(model_dir).evaluate(input_fn, steps=1)
    assert info.match(f"The checkpoint {model_dir}/{LAST} can't be read: .*; Is a directory")
    assert f'{BEFORE} has all its files: to go on from it, remove the checkpoint' in str(info.value)


def test_errors_of_hooks(tmp_path):
    """Whatever file of the model_dir they speak of."""

    class Fails(tf.train.SessionRunHook):
        def begin(self):
            raise RuntimeError(f'{tmp_path}/vocabulary was not found')

    with pytest.raises(RuntimeError, match='/vocabulary was not found$'):
        estimator_in(tmp_path).train(input_fn, [Fails()])


def test_a_directory_in_the_place_of_a_checkpoint(model_dir):
    with pytest.raises(ValueError, match=f"{model_dir}' is a directory. Give a checkpoint in it"):
        estimator_in(model_dir).evaluate(input_fn, 1, checkpoint_path=str(model_dir))


@pytest.mark.parametrize('call', ['train', 'evaluate', 'predict'])
def test_a_checkpoint_of_other_shapes(model_dir, call, behavior):
    """TensorFlow lets resource variables take them, and fails for others."""

    def widen(features):
        with tf.variable_scope('net'):
            net = features @ tf.get_variable('w', [3, 5]) + tf.get_variable('b', [5])
            return net @ tf.get_variable('v', [5, 1])

    files = listed(model_dir)
    match = (
        rf'{LAST} is of a model with other shapes: there, net/.* has .*, and the model .* '
        r'\(and \d more\)\. Use a new model_dir'
    )
    with pytest.raises(ValueError, match=match):
        CALLS[call](estimator_in(model_dir, of_all_modes(widen)))
    assert listed(model_dir).items() >= files.items()


def test_a_saver_that_restores_from_other_names(model_dir):
    """The checkpoint has a variable of the same name and another shape, which isn't restored."""

    def renamed(features):
        with tf.variable_scope('net'):
            return features @ tf.get_variable('b', [3, 4]) @ tf.get_variable('v', [4, 1])

    def fn(features, labels, mode):
        spec = of_all_modes(renamed)(features, labels, mode)
        b, v = tf.global_variables('net/[bv]:')
        names = {'net/w': b, 'net/v': v, 'global_step': tf.train.get_global_step()}
        return spec._replace(scaffold=tf.train.Scaffold(saver=tf.train.Saver(names)))

    predictions = estimator_in(model_dir, fn).predict(lambda: input_fn().take(1))
    saved = saved_in(model_dir)
    expected = batches(steps=1)[0][0] @ saved['net/w'] @ saved['net/v']
    assert_close([row['output'] for row in predictions], list(expected), 1e-5)
