"""Which tasks of a cluster write and read checkpoints, and that these see the model_dir."""

import contextlib
import types
from unittest import mock

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from cluster_script import dropped
from estimator_mgpu.cluster import join, saving
from estimator_mgpu.cluster.chief import Chief
from estimator_mgpu.cluster.notes import Notes
from estimator_mgpu.tf_internals import graphs
from models import floats, of_all_modes
from towers import TRAIN

CHIEF, WORKER, OTHER = TASKS = [f'/job:{task}' for task in ('chief/task:0', 'worker/task:0')] + [
    '/job:worker/task:1'
]
MACHINES = {task: [f'{task}/device:CPU:{i}' for i in range(2)] for task in TASKS}


@pytest.fixture(autouse=True)
def joined(three_machines, tmp_path, monkeypatch):
    """This process is the chief, and all tasks are there."""
    task = mock.MagicMock(others=[])
    task.notes_on = lambda name, seconds: Notes(name, three_machines, seconds)
    chief = Chief(task)
    chief._model_dir = str(tmp_path)
    chief._restarts = mock.Mock()
    chief._meet = lambda prepare: prepare()
    monkeypatch.setattr(join, '_chief', chief)


def on_a_worker(features):
    """A model that itself puts a variable on a worker."""
    with tf.device(MACHINES[WORKER][0]):
        own = tf.get_variable('own', [4, 1], use_resource=True)
    return dropped(features) + features @ own


def with_an_iterator(features):
    """A model with an iterator on a worker, whose place checkpoints keep."""
    with tf.device(MACHINES[WORKER][0]):
        dataset = tf.data.Dataset.from_tensors(0.0).repeat()
        iterator = tf.data.make_one_shot_iterator(dataset)
        place = tf.data.experimental.make_saveable_from_iterator(iterator)
        tf.add_to_collection(tf.GraphKeys.SAVEABLE_OBJECTS, place)
    return dropped(features) + iterator.get_next()


@contextlib.contextmanager
def finalized(forward):
    """The graph of a training on three machines, with the saver that Estimator gives it."""
    with tf.Graph().as_default() as graph:
        tf.train.get_or_create_global_step()
        config = types.SimpleNamespace(machines=MACHINES, master='')
        model_fn = estimator_mgpu.replicate(of_all_modes(forward), devices=2)
        features, labels = tf.constant(floats(12, 4)), tf.constant(floats(12, 1))
        spec = model_fn(features=features, labels=labels, mode=TRAIN, config=config)
        saver = tf.train.Saver(sharded=True, defer_build=True, save_relative_paths=True)
        tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
        spec.scaffold.finalize()
        yield graph, spec.scaffold


def tasks_of(session, fetch, feed, *kinds):
    """The tasks that ran ops of some types."""
    options, found = tf.RunOptions(output_partition_graphs=True), tf.RunMetadata()
    session.run(fetch, feed, options, found)
    devices = [n.device for part in found.partition_graphs for n in part.node if n.op in kinds]
    return {device.replace('/replica:0', '').partition('/device')[0] for device in devices}


@pytest.mark.parametrize(
    'forward, in_v2, in_v1',
    [
        (dropped, {CHIEF}, {*TASKS}),
        (on_a_worker, {CHIEF, WORKER}, {*TASKS}),
        (with_an_iterator, {CHIEF, WORKER}, {*TASKS}),
    ],
    ids=['spread', 'on a worker', 'an iterator'],
)
def test_who_saves_and_restores(forward, in_v2, in_v1, behavior, three_machines, tmp_path):
    """It's the chief, but for what a saver finds on another task. Variables are on all."""
    expected = in_v1 if behavior == 'v1' else in_v2
    with finalized(forward) as (graph, scaffold):
        saver = scaffold.saver.saver_def
        assert {v.device for v in tf.trainable_variables()} == {*sum(MACHINES.values(), [])}
        assert saving.saving_tasks(graph) == expected
        constants = [op for op in graph.get_operations() if op.type == 'Const']
        on_no_task = [op for op in constants if '/job:' not in op.device]
        assert all(graphs.colocated_with(op) for op in on_no_task)
        feed = {saver.filename_tensor_name: str(tmp_path / 'model.ckpt')}
        with tf.Session(three_machines) as session:
            session.run([scaffold.init_op, scaffold.local_init_op])
            saved = tasks_of(session, saver.save_tensor_name, feed, 'SaveV2')
            merged = tasks_of(session, saver.save_tensor_name, feed, 'MergeV2Checkpoints')
            restored = tasks_of(session, saver.restore_op_name, feed, 'RestoreV2')
    assert saved == restored == expected and merged <= expected


def test_a_task_that_saves_has_to_see_the_model_dir(behavior, tmp_path, monkeypatch):
    read_file = tf.io.read_file
    with finalized(dropped):
        pass
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr(tf.io, 'read_file', lambda path: read_file(f'/elsewhere{path}'))
    if behavior == 'v2':
        with finalized(dropped):
            return  # Nobody but the chief needs it.
    match = f'^{WORKER} has .* does not see model_dir=.{tmp_path}. of {CHIEF}. Give a directory'
    with pytest.raises(ValueError, match=match), finalized(dropped):
        pass
    assert not [*tmp_path.iterdir()]


@pytest.mark.core
def test_while_it_is_saved(tmp_path):
    """From the beginning, up to the file of the graph, but not in what listeners do."""

    class Saver(tf.train.Saver):
        def save(self, *args, **kwargs):
            found.append(saving.is_saving())
            return super().save(*args, **kwargs)

        def export_meta_graph(self, *args, **kwargs):
            found.append(saving.is_saving())
            return super().export_meta_graph(*args, **kwargs)

    class Asks(tf.train.CheckpointSaverListener):
        def after_save(self, session, global_step_value):
            found.append(saving.is_saving())

    found = []
    with tf.Graph().as_default(), tf.Session() as session:
        tf.get_variable('v', [])
        tf.train.create_global_step()
        folder = str(tmp_path)
        hook = tf.train.CheckpointSaverHook(folder, 1, saver=Saver(), listeners=[Asks()])
        hook.begin()
        session.run(tf.global_variables_initializer())
        hook.after_create_session(session, None)
    assert found == [True, True, False]
