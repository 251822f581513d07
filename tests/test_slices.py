"""Large values are sent in slices, so that no device sends and receives much more than others."""

import collections

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.devices import CHIEF, machine_of
from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.partition.messages import slices
from estimator_mgpu.partition.messages.exchange import Handed, Vector, add_up
from estimator_mgpu.partition.messages.slices import Sent, Slices
from estimator_mgpu.partition.towers import build_towers
from estimator_mgpu.tf_internals import op_types
from models import floats, sgd, spec_of
from test_samples import SAMPLES
from towers import NAMES, compare, session, train

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(SAMPLES))
    import traced_memory
    import traffic

pytestmark = pytest.mark.core
MB = 1 << 20
GPUS = [f'/device:GPU:{i}' for i in range(4)]


def test_one_large_value_by_hand():
    """Of 9 MB on the first of four devices, beside another value: in three slices.

    The owner sends the first slice to all, the second one to device 1, which sends it to 2 and 3,
    and the third one to 2, which sends it to 1 and 3. So the owner sends five times 3 MB. With its
    gradient of 9 MB, 1 sends 15 MB, too, and so does 2. In a ring, it would be 13.5 MB.
    """
    found = Slices({'w': Sent(9 * MB, GPUS[0], True), 'bias': Sent(4, GPUS[3], True)}, GPUS)
    slices = found.of_value('w', 9 * MB)
    assert slices == found.of_sum(9 * MB, GPUS[0], 9 * MB)
    assert [entries for entries, _ in slices] == [3 * MB] * 3
    above = [{GPUS.index(d): GPUS.index(to) for d, to in tree.items()} for _, tree in slices]
    assert above == [{1: 0, 2: 0, 3: 0}, {1: 0, 2: 1, 3: 1}, {2: 0, 3: 2, 1: 2}]


def test_two_slices_by_hand():
    """A value and nothing else, on 8 devices: in two slices, as then messages are twice as many.

    The owner sends 1, 2 and 3 the first slice, and 3 the second one. Each of five others has two
    devices below it in one tree, and none in the other: it sends its gradient, and the value once.
    In a ring, it would be 1.75 times the value, rather than twice.
    """
    devices = [f'/device:GPU:{i}' for i in range(8)]
    sent = {'w': Sent(8 * MB, devices[0], True)}
    slices = Slices(sent, devices).of_value('w', 8 * MB)
    below = [collections.Counter(map(devices.index, tree.values())) for _, tree in slices]
    assert below == [{0: 3, 1: 2, 2: 2}, {0: 1, 3: 2, 4: 2, 5: 2}]
    counted = count(sent, devices)
    assert counted.messages == 2 * 2 * 7
    assert max(counted.sent.values()) == max(counted.received.values()) == 2 * 8 * MB
    assert counted.hops == 3


@pytest.mark.parametrize('owner', range(7))
def test_machines_are_sent_a_slice_once(owner):
    """Also if they have 4, 2 and 1 devices."""
    counts = {CHIEF: 4, '/job:worker/task:0': 2, '/job:worker/task:1': 1}
    devices = [f'{task}/device:GPU:{i}' for task, count in counts.items() for i in range(count)]
    sent = {'w': Sent(8 * MB, devices[owner], True), 'bias': Sent(4, devices[0], True)}
    for _, tree in Slices(sent, devices).of_value('w', 8 * MB):
        assert {*tree, devices[owner]} == set(devices)
        links = [(machine_of(device), machine_of(above)) for device, above in tree.items()]
        machines = [machine for machine, sender in links if machine != sender]
        assert sorted(machines) == sorted({*counts} - {machine_of(devices[owner])})


def test_as_few_as_needed():
    """Only what would make a device send more than others; nothing that is small, or a part."""
    even = {f'w{i}': Sent(MB, device, True) for i, device in enumerate(GPUS)}
    for sent in [
        even,
        {'w': Sent(slices._SMALL // 3, GPUS[0], True)},
        {'w': Sent(9 * MB, GPUS[0], False)},
        {'w': Sent(9 * MB, '/device:CPU:0', True)},
        {},
    ]:
        assert Slices(sent, GPUS).of_value('w', 100) == Slices(sent, GPUS).of_value('w0', 100) == []
        assert Slices(sent, GPUS).of_sum(MB, GPUS[0], 100) == []
    assert Slices({'w': Sent(9 * MB, GPUS[0], True)}, GPUS[:2]).of_value('w', 100) == []

    larger = {**even, 'w0': Sent(2 * MB, GPUS[0], True), 'v': Sent(MB, GPUS[0], True)}
    found = Slices(larger, GPUS)
    assert found.of_value('w0', 2 * MB) and found.of_sum(2 * MB, GPUS[0], 2 * MB)
    assert (
        found.of_value('v', MB) == found.of_value('w1', MB) == found.of_sum(MB, GPUS[0], MB) == []
    )


def test_a_user_who_puts_an_op_on_the_host():
    """The host of GPUs hands on no slices: it's sent the value as a whole."""

    def model_fn(features):
        w = tf.get_variable('w', [64, 4000])
        with tf.device('/device:CPU:0'):
            return tf.estimator.EstimatorSpec('infer', predictions=tf.matmul(features, w))

    devices = [f'{CHIEF}{device}' for device in GPUS]
    with tf.Graph().as_default() as graph:
        estimator_mgpu.replicate(model_fn, devices=devices)(tf.placeholder(tf.float32, [16, 64]))
        copies = [op for op in graph.get_operations() if op.type == 'MatMul' and 'tower' in op.name]
        operands = {op.inputs[1].op for op in copies}
    assert len(copies) == 4 and not any(op.type == 'Reshape' for op in operands)


def test_one_of_two_alike():
    """If one variable of two that are alike isn't sliced, one of the gradients isn't."""
    sent = {name: Sent(2 * MB, GPUS[0], True) for name in ('v', 'w')}
    sent |= {f'w{i}': Sent(MB, GPUS[i], True) for i in (1, 2, 3)}
    found = Slices(sent, GPUS)
    values = [bool(found.of_value(name, 2 * MB)) for name in ('v', 'w')]
    assert sorted(values) == [False, True]
    sums = [bool(found.of_sum(2 * MB, GPUS[0], 2 * MB)) for _ in sent]
    assert sums[:4] == 2 * values


@pytest.mark.parametrize('use_resource', [True, False], ids=['resource', 'reference'])
def test_a_table_of_which_rows_are_sent(use_resource, monkeypatch):
    """It isn't sent, unless what is looked up in is computed from it."""

    def model_fn(features):
        tables = {name: tf.get_variable(name, [20, 3]) for name in ('rows', 'sums', 'scaled')}
        filled, _ = tf.sparse.fill_empty_rows(features, 0)
        rows = [
            tf.nn.embedding_lookup(tables['rows'], filled.values),
            tf.gather(tf.tanh(tables['scaled'], name='tanh'), filled.values),
        ]
        sums = tf.sparse_segment_sum(tables['sums'], filled.values, filled.indices[:, 0])
        return tf.estimator.EstimatorSpec('infer', predictions={'rows': tf.add_n(rows), 's': sums})

    def find_sent(plan, *args):
        sharded.update(plan.ops)
        sent.update(slices.find_sent(plan, *args))
        return sent

    sharded, sent = {}, {}
    monkeypatch.setattr(build_towers, 'find_sent', find_sent)
    with tf.Graph().as_default() as graph, tf.variable_scope('', use_resource=use_resource):
        ids = tf.sparse_placeholder(tf.int32, [None, 4])
        estimator_mgpu.replicate(model_fn, devices=3)(ids)
        types = {graph.get_operation_by_name(name).type for name in sharded}
    assert types & set(op_types.SPARSE_SEGMENTS) and types & set(op_types.LOOKUPS)
    assert list(sent) == ['tanh:0']


def resnet():
    """The variables of ResNet-50, in entries, but for the small ones of batch normalization."""
    sizes = [7 * 7 * 3 * 64, 2048 * 1000]
    before = 64
    for width, blocks in [(64, 3), (128, 4), (256, 6), (512, 3)]:
        sizes.append(before * 4 * width)
        for _ in range(blocks):
            sizes += [before * width, 9 * width * width, 4 * width * width]
            before = 4 * width
    return sizes


def bert():
    """Those of BERT-base, if the gradient of its table is dense."""
    layer = [*[768 * 768] * 4, *[768 * 3072] * 2, 3072, *[768] * 9]
    return [30522 * 768, 512 * 768, 2 * 768, *layer * 12, 768 * 768]


def vgg():
    channels = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    convolutions = [9 * before * after for before, after in zip(channels, channels[1:])]
    return [*convolutions, 25088 * 4096, 4096 * 4096, 4096 * 1000]


class Recorder:
    """In place of a `NodeBuilder`: counts what devices send each other of values of bytes.

    Attributes:
      sent: bytes, by device.
      received: the same.
      messages: how many.
      hops: how many of these follow each other at most, of a value's or of a gradient's.
    """

    def __init__(self):
        self.sent, self.received, self.messages = collections.Counter(), collections.Counter(), 0
        self._values = {}  # device, size and hops, by name
        self._arrived = set()

    def add(self, op, values, device, size=None, **attrs):
        name = f'{op}{values}{device}:0'
        if name not in self._values:
            size = size or sum(self.use(value, device) for value in values)
            hops = max((self._hops_to(value, device) for value in values), default=0)
            self._values[name] = device, size, hops
        return name

    def use(self, name, device):
        """Notes that a device needs a value; returns its size."""
        source, size, _ = self._values[name]
        if source != device and (name, device) not in self._arrived:
            self._arrived.add((name, device))
            self.sent[source] += size
            self.received[device] += size
            self.messages += 1
        return size

    def _hops_to(self, name, device):
        source, _, hops = self._values[name]
        return hops + (source != device)

    @property
    def hops(self):
        return max(self._hops_to(*arrived) for arrived in self._arrived)

    def split(self, value, sizes, device):
        assert sum(sizes) == self.use(value, device)
        if len(sizes) == 1:
            return [value]
        return [self.add(f'{value}[{n}]', [], device, size) for n, size in enumerate(sizes)]

    def concat(self, values, axis, device):
        return self.add('concat', values, device) if len(values) > 1 else values[0]

    def sum(self, values, device):
        [size] = {self.use(value, device) for value in values}
        return self.add('sum', values, device, size) if len(values) > 1 else values[0]


def count(sent, devices):
    """Counts what devices send each other of values, and of their gradients."""
    found = Slices(sent, devices)
    nodes = Recorder()
    for name, (size, owner, _) in sent.items():
        value = Vector(nodes.add(name, [], owner, size), owner, owner)
        gradients = [
            Vector(nodes.add(f'gradient of {name}', [], device, size), device, device)
            for device in devices
        ]
        slices = found.of_value(name, size)
        if not slices:
            for device, gradient in zip(devices, gradients):
                nodes.use(value.name, device)
                nodes.use(gradient.name, owner)
            continue
        handed = Handed(nodes, slices, value)
        for device in devices:
            assert nodes.use(handed.on(device), device) == size
        sums = add_up(nodes, found.of_sum(size, owner, size), gradients, owner)
        assert sum(nodes.use(total, owner) for total in sums) == size
    return nodes


@pytest.mark.parametrize('devices', [3, 4, 5, 6, 7, 8, 12, 16, 64])
@pytest.mark.parametrize('sizes', [resnet, bert, vgg], ids=lambda f: f.__name__)
def test_on_paper(sizes, devices):
    """Bytes in and out of each device, relative to a ring; each variable is on the emptiest."""
    load = dict.fromkeys([f'/device:GPU:{i}' for i in range(devices)], 0)
    sent = {}
    for number, size in enumerate(sorted(sizes(), reverse=True)):
        owner = min(load, key=load.get)
        sent[str(number)] = Sent(4 * size, owner, True)
        load[owner] += 4 * size

    counted = count(sent, list(load))
    needed = 2 * sum(4 * size for size in sizes()) * (devices - 1)
    assert sum(counted.sent.values()) == sum(counted.received.values()) == needed
    assert max(*counted.sent.values(), *counted.received.values()) <= 1.1 * needed / devices
    assert counted.messages <= 2 * 2 * (devices - 1) * len(sent)
    assert counted.hops <= (2 if devices < 5 else 4)


@pytest.mark.no_cover
@pytest.mark.parametrize('network', ['mlp', 'softmax', 'cnn', 'transformer'])
@pytest.mark.parametrize('devices', [4, 8])
def test_no_device_is_a_hot_spot(network, devices):
    """In the graph of a step; `samples/traffic.py` counts more devices."""
    counted = traffic.count_on_devices(network, devices)
    assert len(counted.sent) == len(counted.received) == devices
    assert max(*counted.sent.values(), *counted.received.values()) <= 1.1 * counted.ring


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ('network', 'hops'), [('mlp', {6: 5, 16: 7, 64: 9}), ('softmax', {6: 7, 16: 7, 64: 9})]
)
def test_few_messages(network, hops, monkeypatch):
    """At most twice as many as without slices, of which few wait for each other."""
    for devices, expected in hops.items():
        sliced = traffic.count_on_devices(network, devices)
        assert max(*sliced.sent.values(), *sliced.received.values()) <= 1.1 * sliced.ring
        assert sliced.hops == expected
        with monkeypatch.context() as patch:
            patch.setattr(slices, '_SMALL', 1 << 30)
            whole = traffic.count_on_devices(network, devices)
        assert sliced.messages <= 2 * whole.messages


@pytest.mark.no_cover
def test_memory_of_the_owner(monkeypatch):
    """It adds up gradients of a large variable with at most three times the variable's bytes."""
    monkeypatch.setattr(slices, 'memory_of', lambda device: device)
    model = traffic.ON_DEVICES['softmax']
    metadata = tf.RunMetadata()
    options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        batch = tf.data.make_one_shot_iterator(model.dataset(model.batch)).get_next()
        spec = estimator_mgpu.replicate(model.model_fn, devices=4)(*batch, 'train')
        largest = max(tf.trainable_variables(), key=bytes_of)
        with session(4) as sess:
            sess.run(tf.global_variables_initializer())
            sess.run(spec.train_op)  # The first step makes what lasts.
            sess.run(spec.train_op, options=options, run_metadata=metadata)
    [peak] = [
        traced_memory.peak(stats)
        for stats in metadata.step_stats.dev_stats
        if stats.device.endswith(largest.device)
    ]
    assert bytes_of(largest) < peak <= 3 * bytes_of(largest)


@pytest.mark.parametrize('network', ['mlp', 'softmax', 'cnn'])
def test_no_machine_is_a_hot_spot(network):
    """Each of eight machines with four devices sends and receives a variable about once.

    Of batch normalization's statistics, each sends what its devices have together.
    """
    counted = traffic.count_on_devices(network, 4, machines=8)
    assert counted.machines <= 1.1 * 2 * 7 / 8
    assert max(*counted.sent.values(), *counted.received.values()) <= 1.3 * counted.ring


def wide(features, labels, mode):
    """Of 60,000 weights, 58,800 are in one layer."""
    net = tf.nn.tanh(tf.layers.dense(features, 200))
    net = tf.nn.tanh(tf.layers.dense(net, 294))
    loss = tf.reduce_mean(tf.square(tf.layers.dense(net, 1) - labels))
    return spec_of(mode, loss, sgd(loss, 0.1))


BATCHES = [(floats(n, 3, seed=n), floats(n, 1, seed=10 + n)) for n in (9, 2, 7)]


def slices_in(graph):
    """By device, the sizes of the sums that it makes of slices of 58,800 entries."""
    sizes = collections.defaultdict(list)
    for op in graph.get_operations():
        if op.type == 'AddN' and NAMES.is_added(op.name):
            shape = op.outputs[0].shape
            if shape.rank == 1 and shape.num_elements() > 9000:
                sizes[op.device].append(shape.num_elements())
    return sizes


@pytest.mark.parametrize('microbatches', [1, 2])
def test_the_same_sums(microbatches, behavior, monkeypatch):
    """As without slices, also with towers that have no example; and as one device."""
    options = dict(static=False, microbatches=microbatches)
    shared = train(wide, BATCHES, 4, **options)
    assert not slices_in(shared.graph)  # CPU devices share their memory.
    monkeypatch.setattr(slices, 'memory_of', lambda device: device)
    one, sliced = compare(wide, BATCHES, 4, **options)[::-1]
    sizes = slices_in(sliced.graph)
    assert len(sizes) == 4  # devices
    assert max(map(max, sizes.values())) < 200 * 294 / 2

    monkeypatch.setattr(slices, '_SMALL', 1 << 30)
    whole = train(wide, BATCHES, 4, values=one.start, **options)
    assert not slices_in(whole.graph)
    for name, value in whole.values.items():
        np.testing.assert_allclose(sliced.values[name], value, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(sliced.losses, whole.losses, rtol=1e-6)


@pytest.mark.parametrize('most', [1, 2, 5])
@pytest.mark.parametrize('devices', [3, 8])
def test_in_trees(devices, most, behavior, monkeypatch):
    """Of any depth, as one device; also if some devices have no example."""
    monkeypatch.setattr(slices, 'memory_of', lambda device: device)
    monkeypatch.setattr(slices, '_MOST_SLICES', most)
    sliced, _ = compare(wide, BATCHES, devices, static=False)
    sizes = [size for of_device in slices_in(sliced.graph).values() for size in of_device]
    assert len(sizes) >= most and {size // 100 for size in sizes} == {588 // most}


def test_on_three_machines(three_machines):
    """With two devices each; a variable is trained as in one process."""
    tasks = ['/job:chief/task:0', '/job:worker/task:0', '/job:worker/task:1']
    devices = [f'{task}/device:CPU:{i}' for task in tasks for i in range(2)]
    features, labels = floats(9, 3), floats(9, 1)

    def steps_of(target, devices):
        with tf.Graph().as_default() as graph:
            tf.train.get_or_create_global_step()
            batch = tf.placeholder(tf.float32, [9, 3]), tf.placeholder(tf.float32, [9, 1])
            spec = estimator_mgpu.replicate(wide, devices=devices)(*batch, 'train')
            variables = {v.op.name: v for v in tf.trainable_variables()}
            opened = tf.Session(target) if target else session(0)
            with opened as sess:
                sess.run(tf.global_variables_initializer())
                for name, variable in sorted(variables.items()):
                    variable.load(0.1 * floats(*variable.shape, seed=len(name)), sess)
                for _ in range(2):
                    sess.run(spec.train_op, dict(zip(batch, [features, labels])))
                return sess.run(variables), graph

    expected, _ = steps_of(None, 1)
    found, graph = steps_of(three_machines, devices)
    assert {machine_of(device) for device in slices_in(graph)} == set(tasks)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-7)
