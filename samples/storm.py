"""Trains on four machines while tasks fail at random, and compares the result with one device.

    python samples/storm.py --events=25 --seed=1

The machines are four processes on this machine: a chief, two workers and a ps. Again and again,
one of them is killed and started again, or stopped for a while, or its connections are reset; or a
worker is started again while the chief is stopped; or a machine is lost, and its task starts on
another one, at another address with the same name. Connections are only reset on Linux as root (by
`ss -K`), and tasks only move where root may have a network of its own (by `unshare`). At the end,
the variables have to be the same as after an undisturbed training on one device.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import common
import loopback
import machines
import tensorflow.compat.v1 as tf
from absl import app, flags

import estimator_mgpu

FLAGS = flags.FLAGS

flags.adopt_module_key_flags(common)
flags.declare_key_flag('train_steps')  # of machines.py
FLAGS.set_default('train_steps', 200)  # Rounding grows with the steps.
flags.DEFINE_integer('events', 25, 'Number of faults.', lower_bound=1)
flags.DEFINE_float('pause', 6.0, 'Average number of seconds between two faults.')
flags.DEFINE_boolean('move', True, 'Move tasks to other addresses, if the system lets this.')
flags.DEFINE_float('stopped', 8.0, 'Average number of seconds for which a process is stopped.')

TASKS = [('chief', 0), ('worker', 0), ('worker', 1), ('ps', 0)]
INSIDE = 'STORM_HAS_ITS_OWN_NETWORK'  # environment variable
NETWORK = '10.77.0.'  # the addresses in it
STORM = 'storm'  # a file that is there as long as the storm: see TakeTime


class TakeTime(tf.train.SessionRunHook):
    """Makes each step of the storm take a while, and the last step but one as long as the storm.

    So training doesn't end before it.
    """

    def __init__(self, file):
        self.file = file

    def after_run(self, run_context, run_values):
        step = run_context.session.run(tf.train.get_global_step())
        while self.file.exists():
            time.sleep(0.3)
            if step != FLAGS.train_steps - 1:
                break


def train():
    """Trains in this process, which is a task of a cluster if TF_CONFIG says so."""
    config = estimator_mgpu.estimator.RunConfig(
        FLAGS.model_dir,
        tf_random_seed=FLAGS.seed,
        save_checkpoints_steps=5,
        session_creation_timeout_secs=300,
    )
    estimator = estimator_mgpu.Estimator(machines.model_fn, config=config, devices=common.devices())
    hook = TakeTime(pathlib.Path(FLAGS.model_dir).parent / STORM)
    estimator.train(machines.input_fn, [machines.Tell(), hook], max_steps=FLAGS.train_steps)


def name_of(task):
    """Such as worker0."""
    job, index = task
    return f'{job}{index}'


class Cluster:
    """The processes, and what happens to them."""

    def __init__(self, root):
        self.root = root
        self.addresses = dict(zip(TASKS, loopback.free_addresses(len(TASKS))))
        self.running = {}
        self.hosts = {}  # by task, the last part of its address, such as 3 of 10.77.0.3
        if INSIDE in os.environ:
            self.enter_network()
        for task in TASKS:
            self.start(task)

    def start(self, task):
        jobs = {}
        for (job, _), address in self.addresses.items():
            jobs.setdefault(job, []).append(address)
        job, index = task
        self.running[task] = machines.start(
            name_of(task),
            self.root,
            {'cluster': jobs, 'task': {'type': job, 'index': index}},
            f'--model_dir={self.root / "machines"}',
            f'--devices={FLAGS.devices}',
            script=__file__,
        )

    def enter_network(self):
        """Gives each task a name, and the name an address."""
        self.names = self.root / 'hosts'
        self.names.touch()
        subprocess.run(['mount', '--bind', self.names, '/etc/hosts'], check=True)
        subprocess.run(['ip', 'link', 'set', 'lo', 'up'], check=True)
        for task in TASKS:
            self.give_address(task)
            port = self.addresses[task].rpartition(':')[2]
            self.addresses[task] = f'{name_of(task)}:{port}'

    def give_address(self, task):
        """Gives a task's name an address that no task has had."""
        self.hosts[task] = max(self.hosts.values(), default=0) + 1
        self.change_address('add', task)
        lines = [f'{NETWORK}{number} {name_of(one)}\n' for one, number in self.hosts.items()]
        self.names.write_text('127.0.0.1 localhost\n' + ''.join(lines))

    def change_address(self, verb, task):
        address = f'{NETWORK}{self.hosts[task]}/32'
        subprocess.run(['ip', 'address', verb, address, 'dev', 'lo'], check=True)

    def move(self, task):
        """A machine is lost, and closes no connection; its task starts at another address."""
        self.change_address('del', task)
        self.running[task].kill()
        self.running[task].wait()
        self.give_address(task)
        self.start(task)

    def kill(self, task):
        """A process dies, and is started again."""
        process = self.running[task]
        process.kill()
        process.wait()
        self.start(task)

    def stop(self, task):
        """A process is stopped for a while, as is a machine that swaps or migrates."""
        process = self.running[task]
        process.send_signal(signal.SIGSTOP)
        seconds = random.uniform(0.0, 2 * FLAGS.stopped)
        threading.Timer(seconds, process.send_signal, [signal.SIGCONT]).start()

    def freeze(self, task):
        """The chief is stopped, while another task dies, and is started again.

        If the task is the chief itself, that's the first worker.
        """
        if task == TASKS[0]:
            task = TASKS[1]
        chief = self.running[TASKS[0]]
        chief.send_signal(signal.SIGSTOP)
        self.kill(task)
        host, _, port = self.addresses[task].rpartition(':')
        while self.running[task].poll() is None:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
                break
            time.sleep(0.3)
        chief.send_signal(signal.SIGCONT)

    def cut(self, task):
        """All of a process's connections are reset."""
        port = self.addresses[task].rpartition(':')[2]
        ends = f'( sport = :{port} or dport = :{port} )'
        command = ['ss', '-K', '-t', 'state', 'established', ends]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def storm(cluster):
    """Lets faults happen to tasks, at random."""
    events = [cluster.kill, cluster.stop, cluster.freeze]
    if cluster.hosts:
        events.append(cluster.move)
    else:
        print('Tasks do not move: this needs root, `unshare`, `mount` and `ip`, and no --nomove.')
    if os.geteuid() == 0 and shutil.which('ss'):
        events.append(cluster.cut)
    else:
        print('Connections are not cut: this needs root and ss.')
    for count in range(FLAGS.events):
        time.sleep(random.uniform(0.0, 2 * FLAGS.pause))
        event, task = random.choice(events), random.choice(TASKS)
        if cluster.running[task].poll() is not None:
            sys.exit(f'{name_of(task)} has ended in the storm: see its log.')
        print(f'{count + 1}. {event.__name__} {name_of(task)}', flush=True)
        event(task)


def go_into_network():
    """Has this program start again in a network of its own, if the system lets it."""
    if not FLAGS.move or INSIDE in os.environ or os.geteuid() != 0:
        return
    if not all(map(shutil.which, ('unshare', 'mount', 'ip'))):
        return
    unshare = ['unshare', '--net', '--mount']
    if subprocess.run([*unshare, 'true'], stderr=subprocess.DEVNULL).returncode == 0:
        os.environ[INSIDE] = '1'
        os.execvp('unshare', [*unshare, sys.executable, *sys.argv])


def main(argv):
    if 'TF_CONFIG' in os.environ:
        common.start(argv)
        return train()
    go_into_network()
    common.start(argv)
    random.seed(FLAGS.seed)
    root = pathlib.Path(FLAGS.model_dir or tempfile.mkdtemp())
    root.mkdir(parents=True, exist_ok=True)
    print(f'Checkpoints and logs are in {root}.')
    (root / STORM).touch()
    cluster = Cluster(root)
    try:
        storm(cluster)
        (root / STORM).unlink()
        ends = {name_of(task): process.wait(300) for task, process in cluster.running.items()}
        print('ended:', ', '.join(f'{name} with {status}' for name, status in ends.items()))
        if any(ends.values()):
            sys.exit('All should have ended with 0.')
        options = [f'--model_dir={root / "alone"}']
        alone = machines.start('alone', root, {}, *options, script=__file__)
        alone.communicate()
    finally:
        for process in cluster.running.values():
            process.kill()
    machines.compare_with_one_device(root)


if __name__ == '__main__':
    app.run(main)
