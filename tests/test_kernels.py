"""With hard placement, all that is placed on a GPU has a kernel there; no GPU is needed to tell."""

import functools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import kernels as registered

import estimator_mgpu
from estimator_mgpu.devices import device_spec
from estimator_mgpu.tf_internals import graphs, kernels
from models import sgd, spec_of
from test_samples import SAMPLES, run_python
from towers import behavior_of

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(SAMPLES))
    import benchmark_models
    import feature_columns_models
    import shares_models
    import traffic

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(not tf.test.is_built_with_cuda(), reason='needs the kernels for GPUs'),
]


@functools.cache
def kernels_on_gpus(op_type):
    """What each kernel takes: the types, or the texts, by the attribute's name."""
    found = registered.get_registered_kernels_for_op(op_type).kernel
    return [
        {c.name: {*c.allowed_values.list.type, *c.allowed_values.list.s} for c in kernel.constraint}
        for kernel in found
        if kernel.device_type in ('GPU', 'DEFAULT') and not kernel.label
    ]


def runs_on_gpus(node):
    """By what TensorFlow lists, for a node of a graph, whose attributes are all there."""
    for taken in kernels_on_gpus(node.op):
        if all(allowed.issuperset(entries(node.attr[name])) for name, allowed in taken.items()):
            return True
    return False


def entries(attr):
    if attr.HasField('list'):
        return [*attr.list.type, *attr.list.s]
    return [attr.type] if attr.HasField('type') else [attr.s]


def is_on_gpu(device):
    return bool(device) and device_spec(device).device_type == 'GPU'


def without_kernel(graph):
    """What is on a GPU, or has to be as a variable is, without a kernel there: also in functions.

    Ops that no step runs count, too: TensorFlow places them.
    """
    missing = set()
    for op in graph.get_operations():
        devices = {op.device}
        for tensor in op.inputs:
            is_reference = graphs.is_reference_variable(tensor) and op.op_def.input_arg[0].is_ref
            if tensor.dtype == tf.resource or is_reference:
                devices.add(tensor.op.device)
        devices.update(graph.get_operation_by_name(n).device for n in graphs.colocated_with(op))
        if any(map(is_on_gpu, devices)) and not runs_on_gpus(op.node_def):
            missing.add((op.type, op.name))
    library = graph.as_graph_def().library.function
    names = {function.signature.name for function in library}
    for function in library:
        for node in function.node_def:
            if is_on_gpu(node.device) and node.op not in names and not runs_on_gpus(node):
                missing.add((node.op, f'{function.signature.name}: {node.name}'))
    return missing


def test_what_has_a_kernel():
    """Floats can be put together on a GPU, and texts cannot; and so it's for functions."""
    with tf.Graph().as_default() as graph:
        numbers = tf.concat([tf.zeros([2]), tf.zeros([1])], 0)
        words = tf.concat([['a'], ['b']], 0)
        upper = tf.while_loop(
            lambda i, _: i < 3, lambda i, x: (i + 1, tf.strings.upper(x)), [0, words]
        )
        sums = tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, x * 2), [0, numbers])
    for tensor, on_gpu in [(numbers, True), (words, False)]:
        assert kernels.has_gpu_kernel(tensor.op.node_def) is on_gpu
        device = kernels.device_for(tensor.op.node_def, '/job:chief/task:0/device:GPU:3')
        assert device == '/job:chief/task:0/device:' + ('GPU:3' if on_gpu else 'CPU:0')
    for output, on_gpu in [(sums[1], True), (upper[1], False)]:
        [loop] = [op for op in graphs.ancestors([output.op]) if op.type.endswith('While')]
        assert kernels.has_gpu_kernel(loop.node_def)
        assert kernels.has_gpu_kernel(loop.node_def, graph) is on_gpu
    assert kernels.device_for(words.op.node_def, '/device:CPU:1') == '/device:CPU:1'


@pytest.mark.parametrize('version', ['v2', 'v1'])
@pytest.mark.parametrize('name', shares_models.MODELS)
def test_models_of_many_kinds(name, version, gpus):
    gpus(None, None)
    with behavior_of(version), tf.Graph().as_default() as graph:
        shares_models.spec_of(name, 2)
    on_gpus = [op for op in graph.get_operations() if is_on_gpu(op.device)]
    assert len(on_gpus) > 20
    assert not without_kernel(graph)


@pytest.mark.parametrize('name', [*benchmark_models.MODELS, *traffic.MODELS])
def test_models_that_are_measured(name, gpus, behavior):
    gpus(None, None)
    with tf.Graph().as_default() as graph:
        tf.train.get_or_create_global_step()
        if name in traffic.MODELS:
            model_fn = traffic.MODELS[name]
            batch = [tf.placeholder(tf.float32, [traffic.ROWS, size]) for size in (4, 1)]
        else:
            model = benchmark_models.MODELS[name]
            model_fn = model.model_fn
            batch = tf.data.make_one_shot_iterator(model.dataset(model.batch)).get_next()
        estimator_mgpu.replicate(model_fn, devices=2)(*batch, 'train')
    assert not without_kernel(graph)


@pytest.mark.parametrize('name', feature_columns_models.MODELS)
def test_feature_columns(name, gpus):
    gpus(None, None)
    with tf.Graph().as_default() as graph:
        feature_columns_models.build(name, 2, 16)
    assert not without_kernel(graph)


BUILD_WHAT_IS_TRAINED = """
import importlib, sys
sys.path.insert(0, {tests!r})
import tensorflow.compat.v1 as tf
from absl import app
import estimator_mgpu
from estimator_mgpu.reports import explain
import test_kernels

listed = tf.config.list_physical_devices
tf.config.list_physical_devices = lambda kind=None: [0, 1] if kind == 'GPU' else listed(kind)
tf.config.get_logical_device_configuration = lambda gpu: None

def train(self, input_fn, *unused, **also_unused):
    with tf.Graph().as_default() as graph:
        explain._build_for_training(self, input_fn, graph)
        print(len(graph.get_operations()), test_kernels.without_kernel(graph))
    sys.exit()

estimator_mgpu.estimator.Estimator.train = train
estimator_mgpu.Estimator.train = train
app.run(importlib.import_module({sample!r}).main, ['sample', '--devices=2'])
"""


@pytest.mark.parametrize('sample', ['digits', 'wide_deep', 'gan', 'char_rnn', 'bert_like'])
def test_samples(sample):
    program = BUILD_WHAT_IS_TRAINED.format(tests=str(SAMPLES.parent / 'tests'), sample=sample)
    count, missing = run_python('-c', program)[-1].split(maxsplit=1)
    assert int(count) > 500 and missing == 'set()'


def test_variables_whose_updates_have_no_kernel(gpus, behavior):
    """RMSProp updates rows of a table on the CPU only; Adagrad has a kernel for GPUs."""

    def model_fn(features, labels, mode):
        losses = []
        for name in optimizers:
            table = tf.get_variable(name, [7, 3])
            losses.append(tf.reduce_sum(tf.nn.embedding_lookup(table, features)))
        updates = [optimizer.minimize(loss) for loss, optimizer in zip(losses, optimizers.values())]
        return spec_of(mode, sum(losses), *updates)

    optimizers = {'rms': tf.train.RMSPropOptimizer(0.1), 'ada': tf.train.AdagradOptimizer(0.1)}
    gpus(None, None)
    with tf.Graph().as_default() as graph:
        ids = tf.placeholder(tf.int32, [4])
        estimator_mgpu.replicate(model_fn, devices=2)(features=ids, labels=None, mode='train')
        found = {v.op.name: v.device for v in tf.global_variables()}
    assert not without_kernel(graph)
    assert found['rms'] == found['rms/RMSProp'] == '/device:CPU:0'
    assert is_on_gpu(found['ada']) and found['ada'] == found['ada/Adagrad']


def test_variables_that_functions_use(gpus, behavior):
    """They are on the host only if the op that uses them there has no kernel on GPUs."""

    def model_fn(features, labels, mode):
        table = tf.get_variable('table', [7, 3], use_resource=True)
        moment = tf.get_variable('moment', [7, 3], use_resource=True)
        weight = tf.get_variable('weight', [3], use_resource=True)

        @tf.function(autograph=False)
        def with_text(x):
            text = tf.strings.as_string(tf.reduce_sum(x), name='text')
            return x * weight + tf.strings.to_number(text)

        @tf.function(autograph=False)
        def update(ids):
            tf.raw_ops.ResourceSparseApplyRMSProp(
                var=table.handle,
                ms=moment.handle,
                mom=moment.handle,
                lr=0.1,
                rho=0.9,
                momentum=0.0,
                epsilon=1e-6,
                grad=tf.ones([4, 3]),
                indices=ids,
            )
            return ids

        loss = tf.reduce_mean(with_text(tf.nn.embedding_lookup(table, features)))
        return spec_of(mode, loss, tf.group(update(features)))

    gpus(None, None)
    with tf.Graph().as_default():
        ids = tf.placeholder(tf.int32, [4])
        estimator_mgpu.replicate(model_fn, devices=2)(features=ids, labels=None, mode='train')
        found = {v.op.name: v.device for v in tf.global_variables()}
    assert found['table'] == found['moment'] == '/device:CPU:0'
    assert is_on_gpu(found['weight'])


def test_what_uses_a_handle_moves_along():
    """With an op that has no kernel on GPUs; otherwise, NodeDefs stay as they are."""
    with tf.Graph().as_default() as graph, graph.device('/device:GPU:0'):
        table = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[2, 1], name='table')
        read = tf.raw_ops.ReadVariableOp(resource=table, dtype=tf.float32, name='read')
        pair = tf.identity_n([read, read], name='pair')
        tf.tanh(pair[0], name='tanh')
        rates = dict(lr=0.1, rho=0.9, momentum=0.0, epsilon=1e-6)
        slots = dict(ms=table, mom=table)
        rows = dict(grad=[[1.0]], indices=[0])
        tf.raw_ops.ResourceSparseApplyRMSProp(var=table, **slots, **rates, **rows, name='update')
    nodes = {node.name: node for node in graph.as_graph_def().node}
    attributes = {name: set(node.attr) for name, node in nodes.items()}
    kernels.place(list(nodes.values()))
    on_host = {name for name, node in nodes.items() if not is_on_gpu(node.device)}
    assert on_host == {'table', 'read', 'update'}
    assert {name: set(node.attr) for name, node in nodes.items()} == attributes


def test_a_batch_without_a_device_stays_on_the_host(gpus):
    """Its sizes are asked for there, and so is whether it's there: else all of it would be sent."""

    def model_fn(features, labels, mode):
        net = tf.layers.dense(tf.concat([features['a'], features['b']], 1), 1)
        counter = tf.get_variable('counter', [], initializer=tf.zeros_initializer())
        loss = tf.reduce_mean(tf.square(net - labels))
        return spec_of(mode, loss, sgd(loss, 0.1), tf.assign_add(counter, 1.0))

    gpus(None, None)
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        arrays = {'a': np.zeros([8, 3], 'f'), 'b': np.zeros([8, 2], 'f')}, np.zeros([8, 1], 'f')
        dataset = tf.data.Dataset.from_tensor_slices(arrays).batch(4)
        features, labels = tf.data.make_one_shot_iterator(dataset).get_next()
        assert not labels.device
        estimator_mgpu.replicate(model_fn, devices=2)(features, labels, 'train')
        consumers = {op for t in [*features.values(), labels] for op in t.consumers()}
    added = [op for op in consumers if 'batch/' in op.name or 'replicate/' in op.name]
    assert {op.type for op in added} >= {'Identity', 'ShapeN', 'StridedSlice'}
    assert {op.device for op in added} == {'/device:CPU:0'}
