"""Models of many kinds: their numbers, and which share of the work the busiest device has."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from test_samples import SAMPLES, flag_errors, run_python

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(SAMPLES))
    import feature_columns_models
    import shares_models

pytestmark = [pytest.mark.core, pytest.mark.no_cover]


ON_GPUS = bool(tf.config.list_physical_devices('GPU'))  # Ops without a kernel are on the CPU.
LEGACY = [
    *('lstm', 'gru', 'fused_block_cell', 'scan', 'while_loop', 'branches', 'functions'),
    *('bidirectional_crf', 'viterbi', 'greedy_decoder', 'deepfm'),
]
# Of those that do more on one device: each example is looked at once, or all towers look up rows of
# its memory, or of its table.
LARGEST_SHARES = {'examples_one_by_one': 0.6, 'memory_with_ages': 0.42, 'sparse_and_ragged': 0.4}
# Of batches of 16 examples only.
ONE_SIZE = ['examples_one_by_one']
# Of batches of other sizes, down to fewer examples than devices, in either behavior.
OTHER_SIZES = {
    **dict.fromkeys(['anchors', 'crops', 'interleaved_batches', 'mapped_images'], (7, 2)),
    **dict.fromkeys(['memory_with_ages', 'mixup', 'train_steps_in_a_loop'], (7, 2)),
    **dict.fromkeys(['speaker_centroids', 'steps_on_slices', 'temporal_segments'], (12, 4)),
}


def first(size, examples):
    """So many of the examples that are fed for one feature."""
    if isinstance(examples, tf.SparseTensorValue):
        kept = examples.indices[:, 0] < size
        shape = [size, *examples.dense_shape[1:]]
        return tf.SparseTensorValue(examples.indices[kept], examples.values[kept], shape)
    if isinstance(examples, tf.ragged.RaggedTensorValue):
        splits = examples.row_splits[: size + 1]
        return tf.ragged.RaggedTensorValue(examples.values[: splits[-1]], splits)
    return examples[:size]


def found(name, devices, static, sizes=(shares_models.ROWS,), values=None):
    """What a step gives, with the variables after it, on a batch of each of these sizes.

    Each step begins with the same values. 0 `devices` are one.

    Returns:
      What the steps give; the values; the busiest device's share of the first step's heavy kernels.
    """
    metadata = tf.RunMetadata()
    traced = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
    steps, shares = [], []
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        spec, batch = shares_models.spec_of(name, devices or 1, static)
        variables = {v.op.name: v for v in tf.global_variables()}
        fetches = [spec.predictions] if spec.train_op is None else [spec.loss, spec.train_op]
        with towers.session(devices) as session:
            for size in sizes:
                values = towers.initialize(session, values or {})
                feed = {tensor: first(size, examples) for tensor, examples in batch.items()}
                made = session.run(fetches, feed, traced, metadata)[0]
                steps.append([made, session.run(variables)])
                kernels = shares_models.heavy_kernels(metadata).values()
                assert len(kernels) == max(devices, 1) or size < shares_models.ROWS or ON_GPUS
                shares.append(max(kernels) / sum(kernels))
    return steps, values, shares[0]


def check(name, *ways):
    """Compares with one device: in each way, which is a number of devices and `static`.

    Batches have 16 examples. Where their size is dynamic, others have 14, which four devices can't
    share evenly, or a model's own other sizes.
    """
    sizes = [shares_models.ROWS]
    if name not in ONE_SIZE:
        sizes += OTHER_SIZES.get(name, [14])
    expected, values, _ = found(name, 0, False, sizes)
    assert all(np.isfinite(value).all() for value in tf.nest.flatten(expected))
    for devices, static in ways:
        count = 1 if static else len(sizes)
        ours, _, busiest = found(name, devices, static, sizes[:count], values)
        towers.assert_close(ours, expected[:count], 1e-5)
    assert 0.25 <= busiest <= LARGEST_SHARES.get(name, 0.35) or ON_GPUS


@pytest.mark.parametrize('name', shares_models.MODELS)
def test_as_on_one_device(name):
    """With batches whose size the graph knows, and with batches whose size it doesn't know."""
    if name in ONE_SIZE:
        check(name, (3, True), (3, False), (4, False))
    else:
        check(name, (3, True), (4, False))


@pytest.mark.parametrize('name', [*LEGACY, *OTHER_SIZES])
def test_as_on_one_device_below_disable_v2_behavior(name):
    """Loops and branches of TensorFlow 1, and reference variables."""
    with towers.behavior_of('v1'):
        check(name, (4, False))


def test_the_table():
    header, *table = run_python('shares.py', '--models=lstm,after_python', '--devices=2')[-3:]
    assert header.split(maxsplit=1) == ['model', 'on the busiest of 2 devices  runs once']
    assert table[0].split() == ['lstm', '50%', '0%']
    name, busiest, once, largest = table[1].split()
    assert (name, busiest, largest) == ('after_python', '50%', 'EagerPyFunc')
    assert 1 <= int(once.removesuffix('%')) <= 20
    lines = run_python('shares.py', '--models=after_python', '--whole')
    assert '  EagerPyFunc: no rule for EagerPyFunc' in lines


def test_models_that_are_none():
    flag = '--models=lstm,rnn'
    errors = flag_errors({'shares': [flag], 'feature_columns': [flag]})
    assert 'Legal are lstm, gru' in errors['shares', flag]
    assert 'Legal are one_table, many_tables' in errors['feature_columns', flag]


def test_the_table_of_feature_columns():
    """All ops of three devices, with what makes each table's ids on the table's device."""
    flags = '--devices=2,3', '--examples=16', '--steps=2', '--ops=1'
    lines = run_python('feature_columns.py', *flags)
    names = ['one_table', 'many_tables', 'strings', 'weighted', 'sparse', 'indicators']
    header, *table = lines[-1 - 3 * len(names) :]
    assert header == f'{"model":14}   of 2   of 3  devices: on the busiest one'
    assert [line.split()[0] for line in table[::3]] == names
    for line in table[::3]:
        of_two, of_three = [int(share.removesuffix('%')) for share in line.split()[1:]]
        assert 50 <= of_two < 100 and 33 <= of_three < 100
    assert all(' us, ' in line for line in [*table[1::3], *table[2::3]])


def test_lookups_of_a_table_run_where_it_is():
    """Each device makes the ids of its examples, for 26 tables on four devices."""
    with tf.Graph().as_default():
        train_op, feed = feature_columns_models.build('many_tables', 4, 16)
        with towers.session(4) as session:
            session.run(tf.global_variables_initializer())
            nodes = towers.nodes_of_a_step(session, train_op, feed)
    for kind in ('GatherNd', 'SparseFillEmptyRows', 'SparseSegmentMean', 'SparseSegmentMeanGrad'):
        devices = [node.device for node in nodes if node.op == kind]
        assert [devices.count(device) for device in set(devices)] == [26] * 4, kind
    lookups = [node.device for node in nodes if node.op == 'ResourceGather']
    assert len(lookups) == 26 * 4 and len(set(lookups)) == 4
    assert max(map(lookups.count, lookups)) <= 7 * 4


def test_the_update_of_a_part_runs_where_it_is():
    """Its ids are put together there, and the gradients of these are added up."""
    with tf.Graph().as_default():
        train_op, feed = feature_columns_models.build('one_table', 4, 16, parts=4)
        with towers.session(4) as session:
            session.run(tf.global_variables_initializer())
            nodes = towers.nodes_of_a_step(session, train_op, feed)
    for kind in ('Unique', 'UnsortedSegmentSum', 'ResourceSparseApplyAdagrad'):
        devices = [node.device for node in nodes if node.op == kind]
        assert len(set(devices)) == 4 and len({devices.count(d) for d in devices}) == 1, kind
