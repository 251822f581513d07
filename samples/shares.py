"""Prints, for each model, what the busiest device does, and what runs once.

    python samples/shares.py
    python samples/shares.py --models=lstm,gan --devices=4 --whole
    python samples/shares.py --legacy

The first figure is the busiest device's share of a step's heavy kernels: matrix products,
convolutions, softmax, tanh, sigmoid and lookups, with their gradients. They are counted in
TensorFlow's trace (`RunMetadata`); a kernel inside of a function or a loop counts each time that it
runs. With four devices, 25% is a perfect split. The second one is the share of ops that run once,
by the bytes of their output, with the type of the largest of them. Of a loop, one step counts.
With --legacy, models run below tf.disable_v2_behavior(), so with the loops and branches of
TensorFlow 1.
"""

from __future__ import annotations

import shares_models
import tensorflow.compat.v1 as tf
from absl import app, flags

from estimator_mgpu import steps
from estimator_mgpu.reports.work import ops_run_once, works_of

FLAGS = flags.FLAGS
flags.DEFINE_list('models', list(shares_models.MODELS), 'Models to run.')
flags.DEFINE_integer('devices', 4, 'Number of logical CPU devices.', lower_bound=2)
flags.DEFINE_bool('whole', False, 'Whether to list the ops that run once, and why.')
flags.DEFINE_bool('legacy', False, 'Whether models run below tf.disable_v2_behavior().')
flags.register_validator(
    'models',
    lambda models: set(models) <= set(shares_models.MODELS),
    f'Legal are {", ".join(shares_models.MODELS)}.',
)


def main(argv):
    if FLAGS.legacy:
        tf.disable_v2_behavior()
    print(f'{"model":22} on the busiest of {FLAGS.devices} devices  runs once')
    for name in FLAGS.models:
        kernels, graph = shares_models.kernels_of(name, FLAGS.devices)
        plan = steps.of_graph(graph).plan
        busiest = max(kernels.values()) / sum(kernels.values())

        once = ops_run_once(plan, works_of(plan))
        share = sum(op.share for op in once)
        largest = graph.get_operation_by_name(once[0].name).type if share >= 0.01 else ''
        print(f'{name:22} {busiest:27.0%} {share:10.0%} {largest}'.rstrip(), flush=True)
        for op, (why, _) in plan.once.items() if FLAGS.whole else ():
            print(f'  {op}: {why}')


if __name__ == '__main__':
    app.run(main)
