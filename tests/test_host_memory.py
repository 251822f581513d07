"""What a step copies between the memory of GPUs and of the host; no GPU is needed to tell."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu.model_fns.spec_results import result_ops
from estimator_mgpu.partition.nodes import host_memory
from estimator_mgpu.tf_internals import kernels
from test_samples import SAMPLES

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(SAMPLES))
    import shares_models
    import traffic

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(not tf.test.is_built_with_cuda(), reason='needs the kernels for GPUs'),
]

# Two GPUs would copy more than one does, if nothing were kept on the host; and of cnn, the variable
# of whose shape a gradient asks together with that of the batch.
MODELS = ['cnn', 'gru', 'viterbi', 'bags_of_words', 'detection', 'ragged_reductions']


@pytest.mark.parametrize('name', MODELS)
def test_two_gpus_copy_no_more_to_the_host_than_one(name):
    """Loops are functions here: what is decided in each step of a loop isn't looked at."""
    one, two = (len(traffic.count_copies(name, gpus).down) for gpus in (1, 2))
    assert two <= one


def test_what_is_counted():
    """What a step decides by has to come from the GPU, and the batch goes there."""
    with tf.Graph().as_default():
        with tf.device('/device:CPU:0'):
            batch = tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensors([[1.0]])).get_next()
        with tf.device('/device:GPU:0'):
            total = tf.reduce_sum(batch * 2.0, name='total')
            size = tf.shape(batch * 3.0)  # Its kernel leaves it on the host.
        with tf.device('/device:CPU:0'):
            text = tf.strings.as_string(total)
            length = tf.identity(size)
        copied = traffic.copies([text.op, length.op])
    assert copied.down == ['total:0']
    assert set(copied.up) == {batch.name}


def moved(nodes, from_graph=(), stays=()):
    """The names of nodes that move to the host, of those on the GPU."""
    on_gpu = {node.name for node in nodes if kernels.is_gpu(node.device)}
    inputs = {tensor.op.name: tensor for tensor in from_graph}
    host_memory.move_to_host(nodes, inputs, lambda node: node.name not in stays)
    return {node.name for node in nodes if node.name in on_gpu and not kernels.is_gpu(node.device)}


def test_what_moves_to_the_host():
    """Nodes between others on the host, also several in a row; not what the GPU makes or needs."""
    with tf.Graph().as_default() as graph:
        with tf.device('/job:worker/task:1/device:CPU:0'):
            ids = tf.placeholder(tf.int64, [None], name='ids')
        with tf.device('/job:worker/task:1/device:GPU:2'):
            offset = tf.constant(3, tf.int64, name='offset')
            counted = tf.subtract(ids, offset, name='counted')
            doubled = tf.add(counted, counted, name='doubled')
            for_gpu = tf.subtract(ids, 5, name='for_gpu')
            made_there = tf.cast(tf.floor(tf.ones([2]), name='floor'), tf.int64, name='made_there')
            number = tf.identity(tf.constant(1), name='number')  # On the host in any case.
        with tf.device('/job:worker/task:1/device:CPU:0'):
            tf.strings.as_string(tf.concat([doubled, made_there], 0), name='text')
            tf.identity(number)
        with tf.device('/job:worker/task:1/device:GPU:2'):
            tf.square(for_gpu, name='square')
    stay = ['floor', 'square']
    nodes = list(graph.as_graph_def().node)
    assert moved(nodes, stays=stay) == {'offset', 'counted', 'doubled'}
    assert {n.device for n in nodes if n.name == 'doubled'} == {'/job:worker/task:1/device:CPU:0'}

    # One that stays keeps its neighbors there.
    assert moved(list(graph.as_graph_def().node), stays=[*stay, 'doubled']) == set()

    # What comes from the graph is on the host if its device says so.
    nodes = [node for node in graph.as_graph_def().node if node.name != 'ids']
    assert moved(nodes, [ids], stay) == {'offset', 'counted', 'doubled'}
    ids.op._set_device('')
    nodes = [node for node in graph.as_graph_def().node if node.name != 'ids']
    assert moved(nodes, [ids], stay) == set()


@pytest.mark.parametrize('name', ['bags_of_words', 'detection', 'wide_and_deep'])
def test_the_same_results(name, gpus, behavior):
    """The graph for two GPUs, run on a CPU by soft placement, as the model on one device."""

    def run(devices):
        with tf.Graph().as_default():
            tf.set_random_seed(1)
            spec, feed = shares_models.spec_of(name, devices)
            config = tf.ConfigProto(allow_soft_placement=True)
            results = spec.predictions if spec.loss is None else [spec.loss]
            with tf.Session(config=config) as session:
                session.run([tf.global_variables_initializer(), tf.tables_initializer()])
                for number, variable in enumerate(tf.global_variables()):
                    if variable.dtype.base_dtype.is_floating:
                        draws = np.random.default_rng(number).normal(size=variable.shape)
                        variable.load(0.1 * draws, session)
                for _ in range(2):
                    session.run(result_ops(spec), feed)
                return tf.nest.flatten(session.run(results, feed))

    expected = run(1)
    gpus(None, None)
    for one, other in zip(expected, run(2)):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
