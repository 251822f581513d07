"""Prints, for models of feature columns, which part of the time of all ops the busiest device has.

    python feature_columns.py
    python feature_columns.py --models=one_table,strings --devices=4 --ops=10
    python feature_columns.py --models=one_table --devices=4 --parts=4

Times are those of TensorFlow's trace (`RunMetadata`), without the ops that only send or receive.
With four devices, 25% is a perfect split.
"""

from __future__ import annotations

import collections

import feature_columns_models
import tensorflow.compat.v1 as tf
from absl import app, flags

import estimator_mgpu

FLAGS = flags.FLAGS
_NO_WORK = ('_Recv', '_Send', '_HostRecv', '_HostSend', 'NoOp')

flags.DEFINE_list('models', list(feature_columns_models.MODELS), 'Models to run.')
flags.DEFINE_list('devices', ['2', '4', '8'], 'Numbers of logical CPU devices.')
flags.DEFINE_integer('examples', 2048, 'Examples in a batch.', lower_bound=8)
flags.DEFINE_integer('parts', 1, 'Parts of each table, made by a partitioner.', lower_bound=1)
flags.DEFINE_integer('steps', 20, 'Steps that are measured.', lower_bound=1)
flags.DEFINE_integer('ops', 0, 'How many of the longest ops of the busiest device to list.')
flags.register_validator(
    'models',
    lambda models: set(models) <= set(feature_columns_models.MODELS),
    f'Legal are {", ".join(feature_columns_models.MODELS)}.',
)


def op_times(name, devices, rows, steps, parts=1):
    """Runs steps of a model, whose tables have so many parts.

    Returns:
      Microseconds by device, type of op and name: the fewest of all steps, as other programs may
      have slowed an op down.
    """
    options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
    fewest = {}
    with tf.Graph().as_default():
        train_op, feed = feature_columns_models.build(name, devices, rows, parts)
        with tf.Session(config=estimator_mgpu.session_config(devices)) as session:
            session.run([tf.global_variables_initializer(), tf.tables_initializer()])
            for _ in range(steps):
                metadata = tf.RunMetadata()
                session.run(train_op, feed, options, metadata)
                for key, duration in _times_of_a_step(metadata).items():
                    fewest[key] = min(duration, fewest.get(key, duration))
    return fewest


def _times_of_a_step(metadata):
    times = {}
    for stats in metadata.step_stats.dev_stats:
        for node in stats.node_stats:
            kind = node.timeline_label.partition(' = ')[2].partition('(')[0]
            if kind not in _NO_WORK:
                duration = node.op_end_rel_micros - node.op_start_rel_micros
                times[stats.device, kind, node.node_name] = duration
    return times


def busiest(times):
    """The device whose ops take longest, and its part of the time of all ops."""
    by_device = collections.Counter()
    for (device, *_), duration in times.items():
        by_device[device] += duration
    device, duration = by_device.most_common(1)[0]
    return device, duration / sum(by_device.values())


def main(argv):
    del argv
    numbers = [int(number) for number in FLAGS.devices]
    titles = ''.join(f'{f"of {number}":>7}' for number in numbers)
    print(f'{"model":14}{titles}  devices: on the busiest one')
    for name in FLAGS.models:
        shares, longest = [], []
        for number in numbers:
            times = op_times(name, number, FLAGS.examples, FLAGS.steps, FLAGS.parts)
            device, share = busiest(times)
            shares.append(share)
            of_device = collections.Counter(
                {key: n for key, n in times.items() if key[0] == device}
            )
            longest += of_device.most_common(FLAGS.ops)

        print(f'{name:14}{"".join(f"{share:7.0%}" for share in shares)}', flush=True)
        for (device, _, op), duration in longest:
            print(f'  {device}: {duration} us, {op}')


if __name__ == '__main__':
    app.run(main)
