"""Tells which share of a step's heavy kernels the busiest device runs, model by model.

    python samples/shares.py
    python samples/shares.py --models=lstm,gan --devices=4 --whole

Heavy are matrix products, convolutions, softmax, tanh, sigmoid and lookups, with their gradients.
They are counted as TensorFlow traced them (`RunMetadata`), those inside of functions and loops each
time that they ran. Of four devices each has 25% if all is divided.
"""

from __future__ import annotations

import shares_models
from absl import app, flags

from estimator_mgpu import steps

FLAGS = flags.FLAGS
flags.DEFINE_list('models', list(shares_models.MODELS), 'Which models.')
flags.DEFINE_integer('devices', 4, 'How many logical CPU devices.', lower_bound=2)
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
