"""Trains several separate models at the same time, each on one device and in its own process.

    python samples/separate.py --devices=2 --learning_rates=0.0003,0.001,0.003,0.01

You don't need estimator_mgpu for this: it trains one model on several devices. To train several
models, start a process for each, which sees one GPU only. CUDA_VISIBLE_DEVICES chooses the GPU, and
has to be set before TensorFlow starts. In its process the GPU is /device:GPU:0, so the script that
runs there needs no change.

This sample runs digits.py once for each learning rate. If there are more learning rates than
devices, each device takes the next one when it has finished. Without GPUs, the processes share the
CPU.
"""

from __future__ import annotations

import os
import pathlib
import queue
import re
import subprocess
import sys
import tempfile
import time
from concurrent import futures

import common
import tensorflow.compat.v1 as tf
from absl import app, flags

FLAGS = flags.FLAGS

flags.adopt_module_key_flags(common)
flags.DEFINE_list(
    'learning_rates', ['0.0003', '0.001', '0.003', '0.01'], 'Learning rates, one for each model.'
)
flags.DEFINE_integer('train_steps', 200, 'Steps to train.', lower_bound=1)

SCRIPT = pathlib.Path(__file__).with_name('digits.py')


@flags.validator('learning_rates', message='give numbers above 0, each of them once')
def _are_learning_rates(given):
    try:
        rates = [float(rate) for rate in given]
    except ValueError:
        return False
    return min(rates, default=0) > 0 and len(set(rates)) == len(rates)


def visible_devices():
    """Returns what CUDA_VISIBLE_DEVICES has to be for each device, '' where that is a CPU."""
    devices = common.devices()
    gpus = len(tf.config.list_physical_devices('GPU'))  # Lists them, without reserving any.
    if devices is None:
        devices = gpus or 1
    if isinstance(devices, int):
        devices = [f'/device:{"GPU" if gpus else "CPU"}:{i}' for i in range(devices)]
    specs = [tf.DeviceSpec.from_string('/' + device.lstrip('/')) for device in devices]
    # If this process sees some GPUs only, its GPU 0 is the first of these.
    seen = os.environ.get('CUDA_VISIBLE_DEVICES') or ','.join(map(str, range(gpus)))
    return [seen.split(',')[s.device_index] if s.device_type == 'GPU' else '' for s in specs]


def train(learning_rate, device, model_dir):
    """Trains a model in a process that sees this device only; returns its row of the table."""
    command = [
        sys.executable,
        str(SCRIPT),
        '--devices=1',
        f'--learning_rate={learning_rate}',
        f'--train_steps={FLAGS.train_steps}',
        f'--seed={FLAGS.seed}',
        f'--model_dir={model_dir}',
        '--verbosity=info',
    ]
    environment = {**os.environ, 'CUDA_VISIBLE_DEVICES': device}
    start = time.time()
    with open(f'{model_dir}.log', 'w') as log:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
    found = re.search(r'accuracy (\S+)', done.stdout)
    result = found[1] if found else 'failed: its log says why'
    return learning_rate, f'GPU {device}' if device else 'CPU', start, time.time(), result


def main(argv):
    common.start(argv)
    root = pathlib.Path(FLAGS.model_dir or tempfile.mkdtemp())
    root.mkdir(parents=True, exist_ok=True)
    free = queue.Queue()
    for device in visible_devices():
        free.put(device)

    def train_on_a_free_device(learning_rate):
        device = free.get()
        try:
            return train(learning_rate, device, root / learning_rate)
        finally:
            free.put(device)

    start = time.time()
    with futures.ThreadPoolExecutor(max_workers=free.qsize()) as pool:
        rows = list(pool.map(train_on_a_free_device, FLAGS.learning_rates))

    print(f'Checkpoints, logs and pictures are in {root}.\n')
    print(f'{"learning rate":>13}  {"device":6}  {"from":>6}  {"to":>6}  accuracy')
    for learning_rate, device, begin, end, result in rows:
        times = f'{begin - start:4.0f} s  {end - start:4.0f} s'
        print(f'{learning_rate:>13}  {device:6}  {times}  {result}')
    if any('failed' in result for *_, result in rows):
        sys.exit(1)


if __name__ == '__main__':
    app.run(main)
