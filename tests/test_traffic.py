"""What machines send each other in a step."""

import collections
import re

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.cluster import saving
from estimator_mgpu.devices import machine_of
from estimator_mgpu.partition.byte_counts import bytes_of
from models import floats
from test_samples import SAMPLES
from towers import NAMES, nodes_of_a_step

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(SAMPLES))
    import benchmark_models
    import traffic

RING = {2: 1.0, 3: 4 / 3}  # 2 (M - 1) / M of the variables' bytes, each way


@pytest.mark.core
@pytest.mark.parametrize('machines', RING)
def test_dense_gradients_as_in_a_ring(machines):
    sent, received, variables = traffic.count(traffic.dense, machines)
    assert variables == 4 * (4 * 128 + 11 * 128 * 128 + 12 * 128 + 128 + 1)
    assert len(sent) == len(received) == machines
    assert max(*sent.values(), *received.values()) <= 1.1 * RING[machines] * variables
    # Variables alone are half of that.
    assert min(*sent.values(), *received.values()) > RING[machines] / 2 * variables


@pytest.mark.core
@pytest.mark.parametrize('machines', RING)
def test_of_tables_only_the_rows_used(machines):
    sent, received, variables = traffic.count(traffic.embedding, machines)
    rows = traffic.ROWS * 4 * 6 * (16 * 4 + 8)  # of six tables, each with the id and its gradient
    network = 4 * (4 * 6 * 16 * 8 + 8 + 8 + 1)
    assert max(*sent.values(), *received.values()) <= 2 * rows + 1.1 * RING[machines] * network
    assert variables > 50_000 * 16 * 4 * 6


@pytest.mark.parametrize('model_fn', [traffic.dense, traffic.embedding])
def test_edges_are_what_tensorflow_sends(model_fn, three_machines):
    """The same count by what the parts of a real step's graph receive from each other."""
    features, labels = floats(traffic.ROWS, 4), floats(traffic.ROWS, 1)
    with tf.Graph().as_default() as graph:
        spec, batch = traffic.build(model_fn, 3)
        config = tf.ConfigProto()
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        initializer = tf.global_variables_initializer()
        saving.place_on_chief(graph)
        with tf.Session(three_machines, config=config) as session:
            session.run(initializer)
            fed = dict(zip(batch, [features, labels]))
            nodes = nodes_of_a_step(session, spec.train_op, fed)
        ops = {op.name: op for op in graph.get_operations() if op.outputs}
        received = collections.Counter()
        for node in nodes:
            if node.op == '_Recv' and not node.attr['tensor_name'].s.startswith(b'_'):
                ends = [node.attr[f'{end}_device'].s.decode() for end in ('send', 'recv')]
                source, target = (machine_of(device.replace('/replica:0', '')) for device in ends)
                name = re.sub(r'edge_\d+_', '', node.attr['tensor_name'].s.decode())
                op, _, index = name.partition(':')
                if source != target and op in ops:  # Others stand for control edges.
                    received[target] += bytes_of(ops[op].outputs[int(index or 0)])
    _, expected, _ = traffic.count(model_fn, 3)
    assert set(received) == set(expected)
    for task, size in received.items():
        # The loss isn't asked for here, nor are constants sent that are made anew.
        assert size == pytest.approx(expected[task], rel=0.01)


def several_words(rows, seed):
    """Features of clicks with ragged columns of one to three words."""
    features = benchmark_models.click_features(words=5000)(rows, seed)
    counts = 1 + tf.random.stateless_uniform([rows], [seed, 3], 0, 3, tf.int32)
    for name, words in features.items():
        if name.startswith('word'):
            drawn = [words, words + 'x', tf.reverse(words, [0])]
            features[name] = tf.RaggedTensor.from_tensor(tf.concat(drawn, 1), counts)
    return features


def to_sparse(features):
    """Features of which the ragged ones have become sparse."""
    return {
        name: tensor.to_sparse() if isinstance(tensor, tf.RaggedTensor) else tensor
        for name, tensor in features.items()
    }


@pytest.mark.parametrize(
    'features',
    [
        benchmark_models.click_features(words=5000),
        lambda rows, seed: to_sparse(several_words(rows, seed)),
        several_words,
    ],
    ids=['dense', 'sparse', 'ragged'],
)
def test_ids_and_their_rows_once(features, three_machines):
    """Each machine prepares the ids of its own examples, so it sends no features of them."""
    logits = benchmark_models.deepfm(buckets=1000, width=4, layers=[8])
    model = benchmark_models.Model(
        logits=lambda features: logits(to_sparse(features)),
        optimizer=lambda: tf.train.AdagradOptimizer(0.1),
        features=features,
        classes=2,
        batch=600,
    )
    moved = traffic.count_clicks(model, three_machines, traffic.devices_of(3, 2))
    assert len(moved.sent) == len(moved.received) == 3
    sent = sum(moved.sent.values())
    assert sent == sum(moved.received.values())
    # The rest is scalars, sizes say.
    assert moved.needed < sent < moved.needed + 8 * moved.messages
    assert 8 * moved.messages < 0.05 * moved.needed


def test_small_constants_are_not_sent():
    """Each device has a copy of those with up to 1024 entries."""

    def model_fn(features):
        wide = {f'{n}': tf.matmul(features, tf.constant(floats(1, n))) for n in (1024, 1025)}
        return tf.estimator.EstimatorSpec('infer', predictions=wide)

    with tf.Graph().as_default() as graph:
        estimator_mgpu.replicate(model_fn, devices=2)(tf.placeholder(tf.float32, [None, 1]))
    added = [op for op in graph.get_operations() if NAMES.is_added(op.name) and op.type == 'Const']
    copied = [op.outputs[0].shape.num_elements() for op in added]
    assert copied.count(1024) == 2 and 1025 not in copied
