"""Where variables live, and what has to be there with them."""

import collections

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.nodes.node_builder import NodeBuilder
from estimator_mgpu.partition.once_devices import place_ops
from estimator_mgpu.partition.plan import Plan
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import RowSpace
from estimator_mgpu.tf_internals.private import import_nodes
from models import ROWS, batches, predict, regression, spec_of, step
from towers import TRAIN, compare, nodes_of_a_step, session, tower_of

CPUS = ['/device:CPU:0', '/device:CPU:1', '/device:CPU:2']
CHOICES = pytest.mark.parametrize('variables', ['cpu', 'first', 'spread'])


def build_in(graph, model_fn, devices=3, **options):
    with graph.as_default():
        tf.train.get_or_create_global_step()
        batch = tf.placeholder(tf.float32, [ROWS, 3]), tf.placeholder(tf.float32, [ROWS, 1])
        estimator_mgpu.replicate(model_fn, devices=devices, **options)(*batch, TRAIN)


def build(model_fn, devices=3, **options):
    """Returns the devices of variables, by name."""
    with tf.Graph().as_default() as graph:
        build_in(graph, model_fn, devices, **options)
        return {v.op.name: v.device for v in tf.global_variables()}


def of_sizes(*sizes):
    """Returns a model_fn with a variable for each of several numbers of entries."""

    def model_fn(features, labels, mode):
        output = sum(
            tf.reduce_sum(features) * tf.reduce_sum(tf.get_variable(f'w{i}', [size]))
            for i, size in enumerate(sizes)
        )
        loss = tf.reduce_mean(tf.square(output - labels))
        return spec_of(mode, loss, tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, step()))

    return model_fn


def test_variables_are_spread_by_bytes():
    """The largest first, each onto the device with the fewest bytes so far."""
    found = build(of_sizes(10, 40, 90, 30, 60, 50))
    # 90 to 0, 60 to 1, 50 to 2, 40 to 2, 30 to 1, and 10 to one with 90.
    expected = {2: 0, 4: 1, 5: 2, 1: 2, 3: 1, 0: 0}
    assert {i: found[f'w{i}'] for i in expected} == {i: CPUS[k] for i, k in expected.items()}
    assert all(found[f'w{i}/Momentum'] == found[f'w{i}'] for i in expected)


def by_hand(features, labels, mode):
    """Moments in variables that are made as BERT's optimizer does, and a moving average."""
    loss = tf.reduce_mean(tf.square(predict(features) - labels))
    trained = tf.trainable_variables()
    gradients = tf.gradients(loss, trained)
    updates = [step().assign_add(1)]
    with tf.control_dependencies(gradients):
        for gradient, variable in zip(gradients, trained):
            moment = tf.get_variable(
                f'{variable.op.name}/moment', variable.shape, initializer=tf.zeros_initializer()
            )
            updates.append(variable.assign_sub(0.01 * moment.assign(0.9 * moment + gradient)))
    with tf.control_dependencies(updates):
        averaged = tf.train.ExponentialMovingAverage(0.9).apply(trained)
    return spec_of(mode, loss, averaged)


def test_what_is_named_under_a_variable_is_with_it():
    found = build(by_hand)
    assert set(found.values()) == {'', *CPUS}
    for name in ('net/w', 'net/b', 'net/v'):
        assert found[f'{name}/moment'] == found[name]
        assert found[f'{name}/ExponentialMovingAverage'] == found[name]


@CHOICES
def test_one_place(variables):
    """But for a device of the model's own."""

    def model_fn(features, labels, mode):
        with tf.device('/cpu:2'):
            w = tf.get_variable('own', [3, 1])
        return by_hand(features, labels + 0 * features @ w, mode)

    found = build(model_fn, devices=['/cpu:1', '/cpu:0'], variables=variables)
    assert found['own'] == CPUS[2]
    expected = {'cpu': CPUS[:1], 'first': CPUS[1:2], 'spread': CPUS[:2]}
    assert {found[name] for name in found if 'net/' in name} == {*expected[variables]}


def of_everything(features, labels, mode):
    """Reads of all kinds, of variables that end up on different devices."""
    table = tf.get_variable('table', [7, 3], partitioner=tf.fixed_size_partitioner(2))
    ids = tf.cast(tf.abs(features[:, 0]) * 3, tf.int32) % 7
    net = features + tf.nn.embedding_lookup(table, ids)
    w, b = tf.get_variable('w', [3, 3]), tf.get_variable('b', [3])
    _, net = tf.while_loop(
        lambda i, _: i < 3, lambda i, x: (i + 1, tf.nn.tanh(x @ w + b)), [0, net]
    )
    net = tf.cond(tf.reduce_sum(w) > 0, lambda: net + b, lambda: net @ w)
    net = tf.layers.batch_normalization(net, training=True)
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(net, 1))
    optimizer = tf.train.AdamOptimizer(0.01, epsilon=1e-3)
    gradients, variables = zip(*optimizer.compute_gradients(loss))
    clipped, _ = tf.clip_by_global_norm(gradients, 0.1)
    train_op = optimizer.apply_gradients(zip(clipped, variables), step())
    return spec_of(mode, loss, train_op, *tf.get_collection(tf.GraphKeys.UPDATE_OPS))


@pytest.mark.no_cover
@CHOICES
@pytest.mark.parametrize('model_fn', [of_everything, by_hand], ids=lambda f: f.__name__)
def test_training(model_fn, variables, behavior):
    given = [(features, labels + 2) for features, labels in batches(steps=5)]
    compare(model_fn, given, 3, variables=variables, static=False)


def test_seeded_masks_are_spread():
    """Each is drawn once, and the largest one is alone on its device."""

    def model_fn(features, labels, mode):
        hidden = features
        for seed, units in enumerate([4, 16, 4, 4]):
            hidden = tf.nn.dropout(tf.layers.dense(hidden, units), rate=0.5, seed=seed)
        loss = tf.reduce_mean(tf.square(tf.layers.dense(hidden, 1) - labels))
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss, step()))

    graph = tf.Graph()
    build_in(graph, model_fn, devices=2)
    ops = graph.get_operations()
    masks = [op for op in ops if op.type == 'RandomUniform' and op.name.startswith('dropout')]
    assert [mask.device for mask in masks] == [CPUS[0], CPUS[1], CPUS[0], CPUS[0]]
    compare(model_fn, batches(steps=2), 2)


def test_constants_are_made_where_they_are_used():
    """On a GPU, too; but sizes, which kernels take from the memory of the host, are there."""
    host, gpu = '/device:CPU:0', '/device:GPU:0'
    places = {(tf.int32, host): gpu, (tf.int64, host): gpu, (tf.float32, gpu): gpu}
    with tf.Graph().as_default() as graph:
        nodes = NodeBuilder(graph, 'replicate', host, None)
        used = [nodes.add('Neg', [nodes.const(1, dtype, device)], gpu) for dtype, device in places]
        size = nodes.const([1, 1], tf.int64, host)
        reshaped = nodes.add('Reshape', [used[-1], size], gpu)
        nodes.build()
        found = [graph.get_tensor_by_name(name).op.inputs[0].device for name in used]
        assert graph.get_tensor_by_name(reshaped).op.inputs[1].device == host
    assert found == list(places.values())


def test_a_compiled_function_has_its_variables_where_one_is_already():
    def model_fn(features, labels, mode):
        with tf.device(CPUS[1]):
            fixed = tf.get_variable('fixed', [3, 1], use_resource=True)
        free = tf.get_variable('free', [1], use_resource=True)
        output = tf.function(lambda x: x @ fixed + free, jit_compile=True)(features)
        return spec_of(mode, tf.reduce_mean(tf.square(output - labels)), tf.no_op())

    devices = build(model_fn)
    assert devices['fixed'] == devices['free'] == CPUS[1]


def test_texts_are_not_moved():
    """A GPU has no kernel for most of their ops."""
    with tf.Graph().as_default() as graph:
        text = tf.strings.as_string(tf.zeros([1000]))
        number = tf.strings.to_number(text)
        w = tf.get_variable('w', [1000], use_resource=True)
        with tf.device(CPUS[1]):
            tf.assign_add(w, tf.exp(number, name='exp') * 1.0)
        division = Division(graph, devices=CPUS)
        division.plan = Plan(RowSpace('batch', 2), [], [], {}, {}, {}, Sizes())  # nothing sharded
        place_ops(division)
    assert graph.get_operation_by_name('exp').device == CPUS[1] and not number.op.device


def nodes_to_import():
    """Returns a GraphDef with x; y, which is colocated with it; and z, which is given `one`."""
    nodes = tf.GraphDef()
    nodes.node.add(name='x', op='NoOp', device=CPUS[0])
    nodes.node.add(name='y', op='NoOp', device=CPUS[1]).attr['_class'].list.s.append(b'loc:@x')
    z = nodes.node.add(name='z', op='Identity', input=['one:0'])
    z.attr['T'].type = tf.int32.as_datatype_enum
    return nodes


def test_imported_nodes_keep_their_devices():
    """`tf.import_graph_def` would give them those of `tf.device` and of colocated ops instead."""
    with tf.Graph().as_default() as graph:
        one = tf.constant(1, name='one')
        with tf.device(CPUS[2]), tf.colocate_with(one), tf.control_dependencies([one]):
            with tf.Graph().as_default():
                import_nodes(graph, nodes_to_import(), {'one:0': one})
    x, y, z = (graph.get_operation_by_name(name) for name in 'xyz')
    assert [op.device for op in (x, y, z)] == [CPUS[0], CPUS[1], '']
    assert z.inputs[0] is one
    assert x.control_inputs == y.control_inputs == z.control_inputs == []
    assert [op.colocation_groups() for op in (x, y, z)] == [[b'loc:@x'], [b'loc:@x'], [b'loc:@z']]


def test_other_imports_are_as_ever():
    """An import by `import_nodes` leaves nothing behind, also if it has failed."""
    with tf.Graph().as_default() as graph:
        one = tf.constant(1, name='one')
        with pytest.raises(tf.errors.InvalidArgumentError, match='one'):
            import_nodes(graph, nodes_to_import(), {})
        import_nodes(graph, nodes_to_import(), {'one:0': one})
        first = tf.no_op()
        with tf.device(CPUS[2]), tf.control_dependencies([first]):
            tf.import_graph_def(nodes_to_import(), {'one:0': one}, name='later')
    x, y, z = (graph.get_operation_by_name(f'later/{name}') for name in 'xyz')
    assert [op.device for op in (x, y, z)] == [CPUS[0], CPUS[0], CPUS[2]]
    assert x.control_inputs == y.control_inputs == [first]


def test_what_runs_is_on_its_device():
    """Read from what the run itself executed on each device, without soft placement."""
    minimize = tf.train.MomentumOptimizer(0.1, 0.9).minimize
    model_fn = regression(lambda loss: minimize(loss, step()))
    with tf.Graph().as_default(), session(3) as sess:
        tf.train.get_or_create_global_step()
        batch = map(tf.constant, batches(9)[0])
        spec = estimator_mgpu.replicate(model_fn, devices=3)(*batch, TRAIN)
        sess.run(tf.global_variables_initializer())
        nodes = nodes_of_a_step(sess, [spec.loss, spec.train_op])
    found = {node.name: int(node.device.rpartition(':')[2]) for node in nodes}
    for name, device in {'net/w': 0, 'net/b': 1, 'net/v': 2}.items():
        assert found[name] == found[f'{name}/Momentum'] == device
        assert found[f'Momentum/update_{name}/ResourceApplyMomentum'] == device
    products = collections.Counter()
    for node in nodes:
        tower = tower_of(node.name)
        if tower is not None and node.op not in ('_Send', '_Recv', '_HostSend', '_HostRecv'):
            assert found[node.name] == tower, node
            products[tower] += node.op.endswith('MatMul')  # or fused with what follows
    # The forward pass and the gradient of each tower, two layers.
    assert products == dict.fromkeys(range(3), 5)
