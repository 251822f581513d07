"""Prints how many bytes machines and devices send each other in a step, and what GPUs wait for.

    python traffic.py
    python traffic.py --machines= --clicks= --networks=cnn --gpus=4,64 --copied=lstm,bags_of_words
    python traffic.py --machines= --clicks= --networks=mlp --gpus= --clusters=1,8,32 --copied=

There is one line for each model and number of machines, with two devices each. It gives the
largest number of bytes that a machine sends, and that a machine receives. The larger of both is
also given relative to the bytes of all trained variables. For comparison, a ring all-reduce on M
machines moves 2 (M - 1) / M of them each way.

The second table is of DeepFM, which hashes and looks up 26 columns of words, with
`input='machine'`: machines with one device each, which are servers in this process. A step runs,
and each tensor counts that one machine sends to another. What they need are dense variables, with
their gradients, and of tables on other machines each tower's different ids, their rows, and the
gradients of these. The last number is what is sent, relative to that.

The third table is of the devices of one machine, and then of machines with four GPUs each: what
the busiest device sends and receives relative to a ring of all devices; the same of the busiest
machine, relative to a ring of machines; how many messages there are, and how many of them follow
each other on the longest path; how many ops the graph has, and how long it takes to divide it,
relative to the model_fn. The batch, which comes from the host, isn't counted.

The fourth table counts the tensors that a step copies from the memory of GPUs to that of the host,
and back. A GPU waits for the first kind: the host has to know them before it tells the GPU what to
do next. What one GPU copies comes from the model; each of two may do the same.

All but the second table is counted in the graph: no step is run, and no GPU is needed.
"""

from __future__ import annotations

import collections
import re
import time
from collections.abc import Mapping
from typing import NamedTuple

import benchmark_models
import loopback
import numpy as np
import shares_models
import tensorflow.compat.v1 as tf
from absl import app, flags

import estimator_mgpu
from estimator_mgpu.cluster import machine_input, saving
from estimator_mgpu.devices import CHIEF, device_spec, machine_of
from estimator_mgpu.model_fns.spec_results import result_ops
from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.reports import traffic
from estimator_mgpu.tf_internals import graphs, kernels, op_types

FLAGS = flags.FLAGS
flags.DEFINE_list('machines', ['2', '3', '4'], 'Numbers of machines.')
flags.DEFINE_list('clicks', ['2', '4'], 'Numbers of machines that look up ids.')
flags.DEFINE_list('gpus', ['1', '2', '4', '8', '16', '32', '64'], 'Numbers of GPUs of one machine.')
flags.DEFINE_list('clusters', ['2', '4', '8', '16', '32'], 'Numbers of machines with four GPUs.')
flags.DEFINE_list(
    'networks',
    ['mlp', 'softmax', 'cnn', 'transformer', 'deep'],
    'Models on the GPUs of one machine.',
)
flags.DEFINE_list(
    'copied',
    ['mlp', 'cnn', 'embed', 'lstm', 'transformer', 'wide_and_deep', 'bags_of_words', 'detection'],
    'Models whose copies between GPU and host are counted: of benchmark.py or of shares.py.',
)
ROWS = 12
HOST = f'{CHIEF}/device:CPU:0'


def dense(features, labels, mode):
    """Layers of many weights, and gradients clipped by their common norm."""
    net = features
    for _ in range(12):
        net = tf.layers.dense(net, 128, tf.nn.relu)
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(net, 1))
    optimizer = tf.train.AdamOptimizer()
    gradients, variables = zip(*optimizer.compute_gradients(loss))
    pairs = zip(tf.clip_by_global_norm(gradients, 1.0)[0], variables)
    train_op = optimizer.apply_gradients(pairs, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def embedding(features, labels, mode):
    """Rows looked up in large tables, with sparse gradients."""
    ids = tf.cast(features * 0, tf.int32)
    tables = [tf.get_variable(f'table{i}', [50_000, 16]) for i in range(6)]
    found = [tf.nn.embedding_lookup(table, ids) for table in tables]
    net = tf.layers.dense(tf.reshape(tf.concat(found, 2), [ROWS, 4 * 6 * 16]), 8, tf.nn.relu)
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(net, 1))
    train_op = tf.train.AdagradOptimizer(0.1).minimize(loss, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


MODELS = {'dense': dense, 'embedding': embedding}


def devices_of(machines, count, kind='CPU'):
    """The devices of a chief and workers, so many of each, the chief's first."""
    tasks = [CHIEF, *(f'/job:worker/task:{i}' for i in range(machines - 1))]
    return [f'{task}/device:{kind}:{i}' for task in tasks for i in range(count)]


def build(model_fn, machines):
    """Builds a model in the default graph, for two devices of each machine."""
    tf.train.get_or_create_global_step()
    batch = tf.placeholder(tf.float32, [ROWS, 4]), tf.placeholder(tf.float32, [ROWS, 1])
    replicated = estimator_mgpu.replicate(model_fn, devices=devices_of(machines, 2))
    return replicated(*batch, tf.estimator.ModeKeys.TRAIN), batch


def between_machines(messages):
    """Those of the messages of devices that go from one machine to another, by the machines."""
    of_machines = [
        message._replace(source=machine_of(message.source), target=machine_of(message.target))
        for message in messages
    ]
    return [message for message in of_machines if message.source != message.target]


def totals(messages):
    """The bytes of messages by who sends them, and by who receives them."""
    sent = collections.Counter()
    received = collections.Counter()
    for message in messages:
        sent[message.source] += message.size
        received[message.target] += message.size
    return sent, received


def count(model_fn, machines):
    """Returns the bytes that each task sends, that it receives, and those of trained variables."""
    with tf.Graph().as_default() as graph:
        spec, _ = build(model_fn, machines)
        saving.place_on_chief(graph)
        messages = traffic.messages([spec.train_op, spec.loss.op], CHIEF)
        sent, received = totals(between_machines(messages))
        return sent, received, sum(map(bytes_of, tf.trainable_variables()))


class Moved(NamedTuple):
    """What machines send each other in a step of a model that looks up ids.

    Attributes:
      sent: bytes, by machine.
      received: the same.
      messages: how many tensors are sent.
      needed: the bytes that have to be sent, if nothing is sent twice.
    """

    sent: Mapping[str, int]
    received: Mapping[str, int]
    messages: int
    needed: int


def count_clicks(model, target, devices):
    """Runs a step of DeepFM with `input='machine'`, and counts what machines send each other.

    Args:
      model: a `benchmark_models.Model`.
      target: of a session on all machines.
      devices: those of towers, equally many of each machine. They have equal shares of the batch.
    """
    machines = list(dict.fromkeys(map(machine_of, devices)))

    def input_fn(input_context=None):
        return model.dataset(model.batch // len(machines), input_context.input_pipeline_id)

    with tf.Graph().as_default() as graph:
        tf.train.get_or_create_global_step()
        features, labels = machine_input.read(lambda fn: fn(), input_fn, devices)()
        words = {name: words for name, words in features.items() if name.startswith('word')}
        replicated = estimator_mgpu.replicate(model.model_fn, devices=devices, input='machine')
        spec = replicated(features, labels, tf.estimator.ModeKeys.TRAIN)
        variables = tf.trainable_variables()
        initializers = [tf.global_variables_initializer(), tf.tables_initializer()]
        saving.place_on_chief(graph)
        messages = traffic.messages([spec.train_op, spec.loss.op], CHIEF)
        crossing = [message for message in between_machines(messages) if message.is_tensor]
        config = tf.ConfigProto()
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        with tf.Session(target, config=config) as session:
            session.run(initializers)
            fetches = [message.name for message in crossing], words, spec.train_op
            values, words, _ = session.run(fetches)

    measured = []
    for message, value in zip(crossing, values):
        size = sum(map(len, value.flat)) if value.dtype == object else value.nbytes
        measured.append(message._replace(size=size))
    sent, received = totals(measured)
    needed = sum(bytes_needed(variable, words, devices) for variable in variables)
    return Moved(sent, received, len(crossing), needed)


def bytes_needed(variable, words, devices):
    """The bytes that machines need of a variable that one of them has, with its gradients.

    Args:
      variable: a table of the words of a column, or another variable.
      words: by column, those of the global batch, dense, sparse or ragged.
      devices: those of towers.
    """
    home = machine_of(variable.device)
    column = re.search(r'word\d+', variable.op.name)
    if column is None:
        return 2 * (len(set(map(machine_of, devices))) - 1) * bytes_of(variable)

    rows, width = variable.shape.as_list()
    words = words[column[0]]
    if isinstance(words, tf.ragged.RaggedTensorValue):
        count = len(words.row_splits) - 1
        lengths = np.diff(words.row_splits)
        tower_of_word = np.repeat(np.arange(count) * len(devices) // count, lengths)
        words = words.values
    elif isinstance(words, tf.SparseTensorValue):
        tower_of_word = words.indices[:, 0] * len(devices) // words.dense_shape[0]
        words = words.values
    else:
        tower_of_word = np.arange(words.size) * len(devices) // words.size
    with tf.Graph().as_default():
        ids = tf.strings.to_hash_bucket_fast(words.ravel(), rows)
        with tf.Session() as session:
            pairs = set(zip(tower_of_word, session.run(ids)))
    count = sum(machine_of(devices[tower]) != home for tower, _ in pairs)
    return count * (ids.dtype.size + 2 * 4 * width)


def softmax(features):
    """A layer of many classes, with 98% of all weights."""
    return tf.layers.dense(tf.layers.dense(features, 64, tf.nn.relu), 4000)


ON_DEVICES = {
    **benchmark_models.MODELS,
    'softmax': benchmark_models.Model(
        softmax, benchmark_models._momentum, benchmark_models._images(64), 4000, 64
    ),
}


class Exchanged(NamedTuple):
    """What the devices of a machine send each other in a step.

    Attributes:
      sent: bytes, by device.
      received: the same.
      messages: how many there are.
      hops: how many follow each other on the longest path.
      ring: the bytes that each device would send, and receive, in a ring.
      machines: what the busiest machine sends or receives, relative to all variables.
      ops: how many the graph has.
      dividing: the time to divide it, relative to that of the model_fn.
    """

    sent: Mapping[str, int]
    received: Mapping[str, int]
    messages: int
    hops: int
    ring: float
    machines: float
    ops: int
    dividing: float


def build_on_devices(name, devices):
    """Builds one of `ON_DEVICES` in the default graph.

    Returns:
      The ops that a step is run for, and how long it took to divide the graph, relative to the
      model_fn.
    """
    model = ON_DEVICES[name]
    built = []

    def model_fn(features, labels, mode):
        start = time.process_time()
        spec = model.model_fn(features, labels, mode)
        built.append(time.process_time() - start)
        return spec

    tf.train.get_or_create_global_step()
    with tf.device(HOST):
        dataset = model.dataset(max(model.batch, len(devices)))
        batch = tf.data.make_one_shot_iterator(dataset).get_next()
    start = time.process_time()
    spec = estimator_mgpu.replicate(model_fn, devices=devices)(*batch, 'train')
    [of_model_fn] = built
    dividing = (time.process_time() - start - of_model_fn) / of_model_fn
    return [spec.train_op, spec.loss.op], dividing


def count_on_devices(name, count, machines=1):
    """Counts what the GPUs of a machine, or of several ones, send each other in a step."""
    devices = devices_of(machines, count, 'GPU')
    with tf.Graph().as_default() as graph:
        results, dividing = build_on_devices(name, devices)
        variables = sum(map(bytes_of, tf.trainable_variables()))

    messages = []
    for message in traffic.messages(results, HOST):
        if {device_spec(end).device_type for end in (message.source, message.target)} == {'GPU'}:
            messages.append(message)
    sent, received = totals(messages)
    by_machines = [max(sizes.values(), default=0) for sizes in totals(between_machines(messages))]
    busiest = max(by_machines) / variables
    ring = 2 * (len(devices) - 1) / len(devices) * variables
    ops = len(graph.get_operations())
    longest = hops(results, HOST)
    return Exchanged(sent, received, len(messages), longest, ring, busiest, ops, dividing)


def hops(results, first):
    """How many messages follow each other on the longest path to the ops that a step runs.

    Ops without a device count as on the first one.
    """
    devices = {op: traffic.device_of_op(op, first) for op in graphs.ancestors(results)}
    counts = {}
    for op in graphs.topological_order(list(devices)):
        counts[op] = max(
            (
                counts[before] + (devices[before] != devices[op])
                for before in graphs.direct_inputs(op)
                if before in counts  # All but the way back of a loop.
            ),
            default=0,
        )
    return max(counts.values())


class Copies(NamedTuple):
    """The tensors that a step copies between the memory of a GPU and that of its host.

    Attributes:
      down: the names of those that go from a GPU to the host.
      up: the names of those that go back, once for each GPU.
    """

    down: list[str]
    up: list[str]


def count_copies(name, gpus):
    """Lists what a step of a model copies between the memory of GPUs and of the host."""
    devices = devices_of(1, gpus, 'GPU')
    with tf.Graph().as_default():
        if name in ON_DEVICES:
            return copies(build_on_devices(name, devices)[0])
        spec, _ = shares_models.spec_of(name, devices)
        return copies(result_ops(spec))


def copies(results):
    """Lists what is copied between the memory of GPUs and of the host when ops run.

    A tensor is copied once to each memory in which it's needed. An op without a device counts as on
    the first GPU, if there is a kernel, as TensorFlow chooses. In a loop, it counts once.
    """
    nodes = {}
    for op in graphs.ancestors(results):
        nodes[op] = tf.NodeDef()
        nodes[op].CopyFrom(op.node_def)
        is_fed = op.type in op_types.PLACEHOLDERS
        device = traffic.device_of_op(op, HOST if is_fed else f'{CHIEF}/device:GPU:0')
        nodes[op].device = kernels.device_for(op.node_def, device)

    copied = set()
    for op, node in nodes.items():
        for tensor, is_taken_on_host in zip(op.inputs, kernels.inputs_on_host(node)):
            source = nodes[tensor.op]
            is_made_on_host = kernels.outputs_on_host(source)[tensor.value_index]
            if is_made_on_host != is_taken_on_host:
                copied.add((tensor.name, HOST if is_taken_on_host else node.device))
    down = sorted(name for name, memory in copied if memory == HOST)
    return Copies(down, sorted(name for name, memory in copied if memory != HOST))


def main(_):
    tf.logging.set_verbosity(tf.logging.ERROR)
    if FLAGS.machines:
        print_machines()
    if FLAGS.clicks:
        print_clicks()
    if FLAGS.gpus or FLAGS.clusters:
        print_devices()
    if FLAGS.copied:
        print_copies()


def print_devices():
    count_on_devices('mlp', 2)  # What TensorFlow does once.
    print(
        'model        machines  GPUs  sent, of a ring  received  by machines  messages  hops     '
        'ops  dividing'
    )
    sizes = [(1, int(count)) for count in FLAGS.gpus] + [(int(m), 4) for m in FLAGS.clusters]
    for name in FLAGS.networks:
        for machines, count in sizes:
            exchanged = count_on_devices(name, count, machines)
            sent, received = (
                max(moved.values(), default=0) / (exchanged.ring or 1) for moved in exchanged[:2]
            )
            of_machines = exchanged.machines / (2 * (machines - 1) / machines or 1)
            print(
                f'{name:12} {machines:8} {machines * count:5} {sent:16.2f} {received:9.2f} '
                f'{of_machines:12.2f} {exchanged.messages:9} {exchanged.hops:5} {exchanged.ops:7} '
                f'{exchanged.dividing:9.2f}',
                flush=True,
            )


def print_clicks():
    print('model      machines  sent, kB  received, kB  messages  of what is needed')
    for count in map(int, FLAGS.clicks):
        servers = [
            tf.train.Server(config['cluster'], config['task']['type'], config['task']['index'])
            for config in loopback.tf_configs(count)
        ]
        model = benchmark_models.MODELS['deepfm']
        moved = count_clicks(model, servers[0].target, devices_of(count, 1))
        out, into = max(moved.sent.values()), max(moved.received.values())
        print(
            f'{"deepfm":10} {count:8} {out / 1e3:9.1f} {into / 1e3:13.1f} {moved.messages:9} '
            f'{sum(moved.sent.values()) / moved.needed:18.4f}',
            flush=True,
        )


def print_copies():
    print('model          from one GPU  from two  to one GPU  to two')
    for name in FLAGS.copied:
        one, two = (count_copies(name, gpus) for gpus in (1, 2))
        print(
            f'{name:14} {len(one.down):12} {len(two.down):9} {len(one.up):11} {len(two.up):7}',
            flush=True,
        )


def print_machines():
    print('model      machines  sent, kB  received, kB  of the variables  a ring')
    for name, model_fn in MODELS.items():
        for machines in map(int, FLAGS.machines):
            sent, received, variables = count(model_fn, machines)
            out, into = max(sent.values()), max(received.values())
            part, ring = max(out, into) / variables, 2 * (machines - 1) / machines
            print(
                f'{name:10} {machines:8} {out / 1e3:9.1f} {into / 1e3:13.1f} {part:17.4f} '
                f'{ring:7.4f}'
            )


if __name__ == '__main__':
    app.run(main)
