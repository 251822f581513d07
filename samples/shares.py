"""Prints, for each model, the share of a step's heavy kernels that the busiest device runs.

    python samples/shares.py
    python samples/shares.py --models=lstm,gan --devices=4 --whole

Heavy kernels are matrix products, convolutions, softmax, tanh, sigmoid and lookups, with their
gradients. They are counted in TensorFlow's trace (`RunMetadata`); a kernel inside of a function
or a loop counts each time that it runs. With four devices, 25% is a perfect split.
"""

from __future__ import annotations

import shares_models
from absl import app, flags

from estimator_mgpu import steps

FLAGS = flags.FLAGS
flags.DEFINE_list('models', list(shares_models.MODELS), 'Models to run.')
flags.DEFINE_integer('devices', 4, 'Number of logical CPU devices.', lower_bound=2)
flags.DEFINE_bool('whole', False, 'Whether to list the ops that run once, and why.')
flags.register_validator(
    'models',
    lambda models: set(models) <= set(shares_models.MODELS),
    f'Legal are {", ".join(shares_models.MODELS)}.',
)


def main(argv):
    print(f'{"model":22} heavy kernels  of which on the busiest of {FLAGS.devices} devices')
    for name in FLAGS.models:
        kernels, graph = shares_models.kernels_of(name, FLAGS.devices)
        count = sum(kernels.values())
        print(f'{name:22} {count:13}  {max(kernels.values()) / count:4.0%}', flush=True)
        for op, (why, _) in steps.of_graph(graph).plan.once.items() if FLAGS.whole else ():
            print(f'  {op}: {why}')


if __name__ == '__main__':
    app.run(main)
