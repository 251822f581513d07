"""Measures the time of one device, of replicate() and of MirroredStrategy, side by side.

    python samples/benchmark.py --models=mlp,deep --towers=2,8 --rounds=3
    python samples/benchmark.py --devices=GPU --towers=2,4
    python samples/benchmark.py --devices=GPU:0 --setups=replicate --towers=2
    python samples/benchmark.py --setups=replicate,optimized --models=deep
    python samples/benchmark.py --setups=replicate,other --other=../estimator_mgpu-0.1
    python samples/benchmark.py --setups=replicate --models=transformer --towers=2 --microbatches=8
    python samples/benchmark.py --setups=plain,replicate,machines --models=deepfm --towers=2,4
    python samples/benchmark.py --legacy

Each set-up runs in a process of its own, and each round runs every set-up once. As machines are
noisy, only runs of the same round are compared: the tables give the medians of these ratios, and
their minimum and maximum in brackets. Start-up is the time from the call of train() to the end of
the first step. It includes the checkpoint that Estimator writes before this step.

One device and MirroredStrategy use Estimator's default session config. The set-up `optimized` is
replicate() with this config, too; otherwise replicate() uses session_config(), which turns off some
of TensorFlow's graph optimizers. The set-up `plain` is one device with the config of several ones.
The set-up `other` is replicate() of another version of the package. It gets those of the options
that it supports.

The set-up `machines` is Estimator on as many processes of this machine as there are towers, with
one CPU device each, which send each other messages as several machines do. Each draws its own part
of the batch, by `input='machine'`. Its memory is that of the chief.

With --legacy all set-ups run below tf.disable_v2_behavior(), so with reference variables and the
loops of TensorFlow 1.

The model `cnn` has batch normalization. replicate() uses the statistics of the whole batch. With
--batch_norm=device it uses those of each device, as MirroredStrategy does.
"""

from __future__ import annotations

import inspect
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import benchmark_models
import loopback
import tensorflow.compat.v1 as tf
from absl import app, flags

import estimator_mgpu

estimator = estimator_mgpu.estimator  # tf.estimator, also where TensorFlow no longer has it

FLAGS = flags.FLAGS

LIMIT = 900  # Seconds for one run: MirroredStrategy on 16 CPU devices was seen to hang.
ONE, REPLICATE, MIRRORED = 'one device', 'replicate', 'MirroredStrategy'
OPTIMIZED, OTHER, PLAIN, MACHINES = 'optimized', 'other', 'plain', 'machines'
SETUPS = REPLICATE, MIRRORED, OPTIMIZED, OTHER, PLAIN, MACHINES
MEASURES = {  # What a run gives, and the unit it's printed in.
    'build': 's',
    'session': 's',
    'first_step': 's',
    'start_up': 's',
    'step': 'ms',
    'examples': '1/s',
    'memory': 'MB',
    'nodes': '',
}

MODELS = {**benchmark_models.MODELS, **benchmark_models.LARGE}
flags.DEFINE_list(
    'models', list(benchmark_models.MODELS), f'Models to run, of {", ".join(MODELS)}.'
)
flags.DEFINE_list('towers', ['2', '4', '8'], 'Numbers of towers.')
flags.DEFINE_list(
    'setups', [REPLICATE, MIRRORED], f'Set-ups to compare with one device, of {", ".join(SETUPS)}.'
)
flags.DEFINE_enum(
    'devices',
    'CPU',
    ['CPU', 'GPU', 'GPU:0'],
    'Logical CPU devices, GPUs, or one GPU for all towers.',
)
flags.DEFINE_string('variables', None, 'The argument variables= of replicate().')
flags.DEFINE_enum(
    'batch_norm', 'batch', ['batch', 'device'], 'The argument batch_norm= of replicate().'
)
flags.DEFINE_integer('microbatches', 1, 'The argument microbatches= of replicate().', lower_bound=1)
flags.DEFINE_bool('legacy', False, 'Run all set-ups below tf.disable_v2_behavior().')
flags.DEFINE_string('other', None, 'Directory with another estimator_mgpu/, for the set-up other.')
flags.DEFINE_integer('rounds', 3, 'How many times each set-up runs.', lower_bound=1)
flags.DEFINE_float(
    'seconds', 5, 'For how long steps are measured, after the first ones.', lower_bound=0
)
flags.DEFINE_string('output', 'benchmark', 'Output files: this name with .md, .json and .png.')
flags.DEFINE_string('run', None, 'Internal: the run of this process, as JSON.')
flags.DEFINE_string('run_dir', None, 'Internal: the directory for checkpoints of this run.')

for flag, legal in (('models', MODELS), ('setups', SETUPS)):
    flags.register_validator(
        flag,
        lambda given, legal=legal: given and set(given) <= set(legal),
        f'give some of {", ".join(legal)}',
    )
flags.register_validator(
    'towers',
    lambda given: given and all(count.isdigit() and int(count) > 1 for count in given),
    'give numbers of 2 or more, such as 2,4,8',
)


@flags.multi_flags_validator(['devices', 'towers', 'variables'])
def _check_replicate(given):
    devices = tower_devices(given['devices'], max(map(int, given['towers'])))
    try:
        estimator_mgpu.session_config(devices)
        estimator_mgpu.replicate(
            lambda features: None, devices=devices, **chosen_variables(given['variables'])
        )
    except ValueError as error:
        raise flags.ValidationError(str(error)) from None
    return True


@flags.multi_flags_validator(['setups', 'other'])
def _check_other(given):
    if OTHER in given['setups'] and not given['other']:
        raise flags.ValidationError(f'the set-up {OTHER} needs --other=DIR')
    if given['other'] and not pathlib.Path(given['other'], 'estimator_mgpu').is_dir():
        raise flags.ValidationError(f'--other={given["other"]} has no directory estimator_mgpu')
    return True


def tower_devices(kind, towers):
    return [f'/device:{kind}' if ':' in kind else f'/device:{kind}:{i}' for i in range(towers)]


def chosen_variables(variables):
    return {'variables': variables} if variables else {}


class Clock(tf.train.SessionRunHook):
    """Times a training, and ends it after some seconds of steps.

    Args:
      seconds: how long steps are timed.
      untimed: how many steps come before that.
    """

    def __init__(self, seconds, untimed=5):
        self._seconds = seconds
        self._untimed = untimed
        self.start = time.perf_counter()
        self.ends = []

    def begin(self):
        self.built = time.perf_counter()
        self.nodes = len(tf.get_default_graph().get_operations())

    def after_create_session(self, session, coord):
        self.created = time.perf_counter()

    def after_run(self, run_context, run_values):
        self.ends.append(time.perf_counter())
        timed = self.ends[self._untimed :]
        if len(timed) > 10 and timed[-1] - timed[0] > self._seconds:
            run_context.request_stop()

    def results(self, batch):
        ends = self.ends[self._untimed :]
        step = statistics.median(after - before for before, after in zip(ends, ends[1:]))
        return {
            'build': self.built - self.start,
            'session': self.created - self.built,
            'first_step': self.ends[0] - self.created,
            'start_up': self.ends[0] - self.start,
            'step': 1000 * step,
            'examples': batch / step,
            'memory': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            'nodes': self.nodes,
        }


def measure(model, setup, towers):
    """Trains a model for some seconds and returns what was measured."""
    used = pathlib.Path(estimator_mgpu.__file__).resolve()
    if setup == OTHER and pathlib.Path(FLAGS.other).resolve() not in used.parents:
        sys.exit(f'estimator_mgpu was imported from {used.parent}, not from --other={FLAGS.other}')
    if FLAGS.legacy:
        tf.disable_v2_behavior()
    tf.get_logger().propagate = False

    chosen = MODELS[model]
    model_fn = chosen.model_fn
    devices = tower_devices(FLAGS.devices, towers)
    own = setup in (REPLICATE, OTHER, PLAIN)
    base = None if own else estimator.Estimator(model_fn).config.session_config
    session_config = estimator_mgpu.session_config(devices, base)

    rows = chosen.batch
    strategy = None
    if setup in (REPLICATE, OPTIMIZED, OTHER):
        model_fn = replicated(model_fn, devices)
    elif setup == MACHINES:
        model_fn = replicated(model_fn, tower_devices(FLAGS.devices, 1), input='machine')
    elif setup == MIRRORED:
        strategy = mirrored_strategy(devices)
        rows //= towers  # Its batch is that of one replica.

    def input_fn(input_context=None):
        if setup != MACHINES:
            return chosen.dataset(rows)
        return chosen.dataset(rows // towers, seed=input_context.input_pipeline_id)

    config = estimator.RunConfig(
        session_config=None if setup == MACHINES else session_config,
        train_distribute=strategy,
        tf_random_seed=1,
    )
    kind = estimator_mgpu.Estimator if setup == MACHINES else estimator.Estimator
    clock = Clock(FLAGS.seconds)
    kind(model_fn, FLAGS.run_dir, config).train(input_fn, hooks=[clock])
    return {
        'version': estimator_mgpu.__version__,
        'legacy': not tf.resource_variables_enabled(),
        **clock.results(chosen.batch),
    }


def replicated(model_fn, devices, **options):
    """A replicated model_fn, with those of the flags' options that this version supports."""
    options |= {**chosen_variables(FLAGS.variables), 'batch_norm': FLAGS.batch_norm}
    options['microbatches'] = FLAGS.microbatches
    known = inspect.signature(estimator_mgpu.replicate).parameters
    supported = {name: value for name, value in options.items() if name in known}
    return estimator_mgpu.replicate(model_fn, devices=devices, **supported)


def mirrored_strategy(devices):
    """A MirroredStrategy, and the logical CPU devices for it."""
    if FLAGS.devices == 'CPU':
        [cpu] = tf.config.list_physical_devices('CPU')
        parts = [tf.config.LogicalDeviceConfiguration()] * len(devices)
        tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(devices)


def run_all(runs):
    """Runs each set-up in its own process, round by round; yields what each measured."""
    for number in range(FLAGS.rounds):
        for run in runs:
            with tempfile.TemporaryDirectory() as model_dir:
                measured = run_apart(run, model_dir)
            if measured:
                print(run, f'start-up {measured["start_up"]:.1f} s, step {measured["step"]:.1f} ms')
                yield {**run, 'round': number, **measured}


def run_apart(run, model_dir):
    """Returns what a run measures in a process of its own, or None if it fails.

    A run on several machines has further processes, which are workers.
    """
    command = [sys.executable, __file__, f'--run={json.dumps(run)}', f'--run_dir={model_dir}']
    command += [f'--devices={FLAGS.devices}', f'--towers={",".join(FLAGS.towers)}']
    command += [f'--seconds={FLAGS.seconds}', f'--batch_norm={FLAGS.batch_norm}']
    command += [f'--variables={FLAGS.variables}'] if FLAGS.variables else []
    command += [f'--microbatches={FLAGS.microbatches}']
    command += ['--legacy'] if FLAGS.legacy else []
    environment = dict(os.environ)
    if run['setup'] == OTHER:
        command.append(f'--other={FLAGS.other}')
        paths = filter(None, (os.path.abspath(FLAGS.other), os.environ.get('PYTHONPATH')))
        environment['PYTHONPATH'] = os.pathsep.join(paths)

    workers = []
    if run['setup'] == MACHINES:
        chief, *others = map(json.dumps, loopback.tf_configs(run['towers']))
        environment['TF_CONFIG'] = chief
        quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}
        workers = [
            subprocess.Popen(command, env={**environment, 'TF_CONFIG': other}, **quiet)
            for other in others
        ]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT, env=environment
        )
        for worker in workers:
            worker.wait(LIMIT)
    except subprocess.TimeoutExpired:
        print(f'{run} failed: it did not end in {LIMIT} seconds', file=sys.stderr)
        return None
    finally:
        for worker in workers:
            worker.kill()
    if process.returncode:
        last = process.stderr.strip().splitlines()[-1]
        print(f'{run} failed: {last}', file=sys.stderr)
        return None
    return json.loads(process.stdout.splitlines()[-1])


def ratios(results, measure, of, to):
    """Returns the ratios of a measure between two set-ups' runs of the same rounds."""
    rounds = [{r['round']: r[measure] for r in results if matches(r, which)} for which in (of, to)]
    return [rounds[0][number] / rounds[1][number] for number in rounds[0] if number in rounds[1]]


def matches(result, which):
    return all(result[key] == value for key, value in which.items())


def describe(values):
    if len(values) < 2:
        return f'{values[0]:.2f}' if values else '-'
    return f'{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})'


def tables(results):
    """Returns the tables, in Markdown."""
    lines = ['Medians:', '', row('model', 'set-up', 'towers', *map(heading, MEASURES))]
    lines.append(row(*['---'] * (3 + len(MEASURES))))
    setups = dict.fromkeys((r['model'], r['setup'], r['towers']) for r in results)
    for model, setup, towers in setups:
        which = {'model': model, 'setup': setup, 'towers': towers}
        own = [r for r in results if matches(r, which)]
        medians = [statistics.median(r[measure] for r in own) for measure in MEASURES]
        lines.append(row(model, setup, towers, *(f'{m:.4g}' for m in medians)))
    headings = 'start-up', 'step', 'memory', 'nodes', 'build a further tower'
    lines += ['', 'Ratios:', '', row('model', 'set-up', 'towers', 'to', *headings)]
    lines.append(row(*['---'] * 9))
    for model, setup, towers in setups:
        which = {'model': model, 'setup': setup, 'towers': towers}
        for base, count in ((ONE, 1), (MIRRORED, towers), (OTHER, towers)):
            to = {'model': model, 'setup': base, 'towers': count}
            if to in (which, {**which, 'setup': ONE}) or (*to.values(),) not in setups:
                continue
            found = {m: ratios(results, m, which, to) for m in (*MEASURES,)}
            further = [(r - 1) / (towers - 1) for r in found['build']] if base == ONE else []
            cells = [describe(found[m]) for m in ('start_up', 'step', 'memory', 'nodes')]
            lines.append(row(model, setup, towers, base, *cells, describe(further)))
    return '\n'.join(lines)


def heading(measure):
    unit = MEASURES[measure]
    return measure.replace('_', ' ') + (f' ({unit})' if unit else '')


def row(*cells):
    return '| ' + ' | '.join(map(str, cells)) + ' |'


def plot(results, path):
    """Draws how start-up, step, memory and nodes grow with the towers, a column a model."""
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    models = list(dict.fromkeys(r['model'] for r in results))
    measures = 'start_up', 'step', 'memory', 'nodes'
    figure, axes = pyplot.subplots(
        len(measures), len(models), figsize=(3.2 * len(models), 9), squeeze=False, sharex=True
    )
    for column, model in zip(axes.T, models):
        for axis, measure in zip(column, measures):
            one = {'model': model, 'setup': ONE, 'towers': 1}
            for color, setup in enumerate(SETUPS):
                counts = sorted({r['towers'] for r in results if matches(r, {'setup': setup})})
                found = {
                    n: ratios(results, measure, {**one, 'setup': setup, 'towers': n}, one)
                    for n in counts
                }
                found = {n: values for n, values in found.items() if values}
                if found and setup == REPLICATE:
                    found = {1: [1.0], **found}
                if found:
                    middle = [statistics.median(values) for values in found.values()]
                    axis.plot(list(found), middle, 'o-', color=f'C{color}', label=setup)
            axis.axhline(1, color='gray', linewidth=0.8)
            axis.margins(y=0.15)
            axis.set_ylim(bottom=0)
            axis.set_xscale('log', base=2)
            axis.xaxis.set_major_formatter('{x:.0f}')
        column[0].set_title(model)
        column[-1].set_xlabel('towers')
    for axis, measure in zip(axes[:, 0], measures):
        axis.set_ylabel(f'{measure.replace("_", "-")} / one device')
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f'{argv[1]!r} is no flag, such as --towers=2 is.')
    if FLAGS.run:
        print(json.dumps(measure(**json.loads(FLAGS.run))))
        return
    output = pathlib.Path(FLAGS.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    runs = []
    for model in FLAGS.models:
        runs.append({'model': model, 'setup': ONE, 'towers': 1})
        for towers in map(int, FLAGS.towers):
            runs += [{'model': model, 'setup': setup, 'towers': towers} for setup in FLAGS.setups]
    results = []
    for result in run_all(runs):
        results.append(result)
        found = {'tensorflow': tf.__version__, 'devices': FLAGS.devices, 'runs': results}
        pathlib.Path(f'{output}.json').write_text(json.dumps(found, indent=1))
    if results:
        print(tables(results))
        pathlib.Path(f'{output}.md').write_text(tables(results) + '\n')
        plot(results, f'{output}.png')
    failed = len(runs) * FLAGS.rounds - len(results)
    if failed:
        sys.exit(f'{failed} of {len(runs) * FLAGS.rounds} runs failed; standard error says how.')


if __name__ == '__main__':
    app.run(main)
