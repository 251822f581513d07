"""A user's script, which every machine of a cluster starts: it trains, evaluates and predicts.

`python cluster_script.py MODEL_DIR OPTIONS`, where OPTIONS is a JSON object of:

  devices: how many on this machine, by default 2.
  stops: the steps up to which each call of train() goes; with `evaluates` the last one counts.
  evaluates: whether it's tf.estimator.train_and_evaluate() that is called.
  sleep: seconds after each step.
  limit: session_creation_timeout_secs.
  fails: what the model_fn raises.

What the test looks at are lines `NAME JSON`, see `tell()`.
"""

import json
import re
import sys
import time

import numpy as np
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import adam, floats, of_all_modes, weights

STEPS = 20


def dropped(features):
    """A small network with dropout, whose randomness comes from the step."""
    if options.get('fails'):
        raise ValueError(options['fails'])
    hidden = tf.nn.tanh(tf.matmul(features, weights('first', 4, 8)))
    seed = tf.stack([7, tf.cast(tf.train.get_global_step(), tf.int32)])
    kept = tf.random.stateless_uniform(tf.shape(hidden), seed) < 0.7
    return tf.matmul(tf.where(kept, hidden, tf.zeros_like(hidden)), weights('second', 8, 1))


def input_fn():
    """Batches of 15, 15, 15 and 5 rows, in another order each time."""
    data = tf.data.Dataset.from_tensor_slices((floats(50, 4), floats(50, 1)))
    return data.shuffle(50, seed=3).batch(15).repeat()


class Slow(tf.train.SessionRunHook):
    """Takes its time after each step, and tells where matrices were multiplied in a session."""

    def after_create_session(self, session, coord):
        self.devices = set()

    def before_run(self, context):
        traced = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
        return tf.train.SessionRunArgs(tf.train.get_global_step(), options=traced)

    def after_run(self, context, values):
        for device in values.run_metadata.step_stats.dev_stats:
            if any(node.node_name.endswith('MatMul') for node in device.node_stats):
                self.devices.add(device.device.replace('/replica:0', ''))
        time.sleep(options.get('sleep', 0))

    def end(self, session):
        tell('DEVICES', sorted(self.devices))


def tell(name, value):
    print(name, json.dumps(value), flush=True)


def told(text, name):
    """What `tell()` has written, of all times."""
    return [json.loads(line) for line in re.findall(rf'^{name} (.*)$', text, re.MULTILINE)]


def main(model_dir):
    tf.logging.set_verbosity(tf.logging.INFO)
    config = tf.estimator.RunConfig(
        model_dir,
        save_checkpoints_steps=5,
        session_creation_timeout_secs=options.get('limit', 100),
    )
    devices = options.get('devices', 2)
    estimator = estimator_mgpu.Estimator(of_all_modes(dropped, adam), config=config, devices=devices)

    def hooks():
        return [Slow(), tf.data.experimental.CheckpointInputPipelineHook(estimator)]

    stops = options.get('stops', [STEPS])
    if options.get('evaluates'):
        train = tf.estimator.TrainSpec(input_fn, stops[-1], hooks())
        evaluation = tf.estimator.EvalSpec(input_fn, 4, start_delay_secs=0, throttle_secs=1)
        tf.estimator.train_and_evaluate(estimator, train, evaluation)
        return
    for stop in stops:
        estimator.train(input_fn, hooks(), max_steps=stop)
        result = estimator.evaluate(input_fn, steps=4)
        tell('EVALUATED', {name: float(value) for name, value in result.items()})
    found = estimator.predict(lambda: input_fn().take(2))
    tell('PREDICTED', np.stack([one['output'] for one in found]).tolist())


if __name__ == '__main__':
    options = json.loads(sys.argv[2])
    main(sys.argv[1])
