"""Prints the peak memory of a step on the busiest device, as a part of what one device needs.

    python samples/memory.py --models=cnn,transformer --devices=4

The peak is computed from TensorFlow's trace (`RunMetadata`) of the outputs and the scratch space
of all ops: activations, gradients and updates. Variables, which stay from step to step, aren't
counted. With four devices, 25% is a perfect split. Small batches with large layers need more, as
each device computes a gradient of every weight.
"""

from __future__ import annotations

import itertools

import benchmark_models
import tensorflow.compat.v1 as tf
from absl import app, flags

import estimator_mgpu

FLAGS = flags.FLAGS
flags.DEFINE_multi_enum(
    'models', ['cnn', 'transformer', 'lstm'], benchmark_models.MODELS, 'Models.'
)
flags.DEFINE_integer('devices', 4, 'Number of logical CPU devices.', lower_bound=2)


def peaks(model, devices):
    """Runs two steps of a model; returns by device the bytes that the second one has at most."""
    metadata = tf.RunMetadata()
    options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
    chosen = benchmark_models.MODELS[model]
    model_fn = estimator_mgpu.replicate(chosen.model_fn, devices=devices)
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        batch = tf.data.make_one_shot_iterator(chosen.dataset(chosen.batch)).get_next()
        spec = model_fn(*batch, estimator_mgpu.estimator.ModeKeys.TRAIN)
        with tf.Session(config=estimator_mgpu.session_config(devices)) as session:
            session.run(tf.global_variables_initializer())
            session.run(spec.train_op)  # The first step makes what lasts.
            session.run(spec.train_op, options=options, run_metadata=metadata)
    found = {}
    for stats in metadata.step_stats.dev_stats:
        used = [memory for node in stats.node_stats for memory in node.memory]
        records = [(r.alloc_micros, r.alloc_bytes) for m in used for r in m.allocation_records]
        # What is freed has a negative size.
        found[stats.device] = max(itertools.accumulate(size for _, size in sorted(records)))
    return found


def main(argv):
    tf.logging.set_verbosity(tf.logging.ERROR)
    print(f'{"model":12} {"one device, MB":>16} {"the busiest of " + str(FLAGS.devices):>20}')
    for name in FLAGS.models:
        [one], busiest = peaks(name, 1).values(), max(peaks(name, FLAGS.devices).values())
        print(f'{name:12} {one / 1e6:16.1f} {busiest / one:20.0%}', flush=True)


if __name__ == '__main__':
    app.run(main)
