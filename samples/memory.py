"""Prints the peak memory of a step: on several devices, or as the batch grows.

    python samples/memory.py --models=cnn,transformer --devices=4
    python samples/memory.py --models=transformer --batches=32,64,128 --microbatches=1,4,16
    python samples/memory.py --models=transformer --batches=128 --microbatches=1,2,8 --time
    python samples/memory.py --models=cnn --batches=512 --batch_norm=device

The first command prints the peak of the busiest device, as a part of what one device needs. With
four devices, 25% is a perfect split. Small batches with large layers need more, as each device
computes a gradient of every weight. The second command measures one device, for each size of the
batch and each number of micro-batches, and draws that. With --recompute it also measures each with
`recompute=True`.

The third command also prints how long a step takes, relative to one without micro-batches. For
comparison, `separate steps` are as many steps as there are micro-batches, each with its part of the
batch: many small ops take longer than a few large ones. All of these run in turns in one process,
and each figure is the median of the rounds.

The last command lets each micro-batch of the CNN have batch statistics of its own. With those of
the whole batch, micro-batches would save little.

The peak is computed from TensorFlow's trace (`RunMetadata`) of the outputs and the scratch space
of all ops: activations, gradients and updates. Variables, which stay from step to step, aren't
counted.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time

import benchmark_models
import matplotlib
import tensorflow.compat.v1 as tf
import traced_memory
from absl import app, flags

import estimator_mgpu

FLAGS = flags.FLAGS
KNOWN = ', '.join(benchmark_models.MODELS)
flags.DEFINE_list('models', ['cnn', 'transformer', 'lstm'], f'Models, of {KNOWN}.')
flags.register_validator(
    'models',
    lambda given: given and set(given) <= set(benchmark_models.MODELS),
    f'give some of {KNOWN}',
)
flags.DEFINE_integer('devices', 4, 'Number of logical CPU devices.', lower_bound=2)
flags.DEFINE_list('batches', [], 'Numbers of examples in a batch, if it is to grow.')
flags.DEFINE_list('microbatches', ['1', '2', '4', '8'], 'Numbers of micro-batches.')
flags.DEFINE_bool('recompute', False, 'Also measure recompute=True.')
flags.DEFINE_bool('time', False, 'Also measure the time of a step, as the batch grows.')
flags.DEFINE_enum(
    'batch_norm', 'batch', ['batch', 'device'], 'The argument batch_norm= of replicate().'
)
flags.DEFINE_integer('rounds', 5, 'How many times each step is timed.', lower_bound=1)
flags.DEFINE_string('output', 'memory.svg', 'Output file of the plot.')
for flag in ('batches', 'microbatches'):
    flags.register_validator(
        flag,
        lambda given: all(count.isdigit() and int(count) > 0 for count in given),
        'give numbers of 1 or more, such as 1,2,4',
    )

flags.register_multi_flags_validator(
    ['batches', 'recompute', 'time'],
    lambda given: given['batches'] or not (given['recompute'] or given['time']),
    '--recompute and --time need --batches',
)


@contextlib.contextmanager
def training(model, devices, batch_size, **options):
    """Yields a function that runs a step, in a session of its own.

    Args:
      model: its name.
      devices: how many.
      batch_size: how many examples a batch has.
      **options: those of `replicate()`.
    """
    chosen = benchmark_models.MODELS[model]
    model_fn = estimator_mgpu.replicate(
        chosen.model_fn, devices=devices, batch_norm=FLAGS.batch_norm, **options
    )
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        batch = tf.data.make_one_shot_iterator(chosen.dataset(batch_size)).get_next()
        spec = model_fn(*batch, estimator_mgpu.estimator.ModeKeys.TRAIN)
        microbatches = options.get('microbatches', 1)
        config = estimator_mgpu.session_config(devices, microbatches=microbatches)
        with tf.Session(config=config) as session:
            session.run(tf.global_variables_initializer())
            yield functools.partial(session.run, spec.train_op)


def peaks(model, devices, batch_size=None, **options):
    """Runs two steps of a model; returns by device the bytes that the second one has at most.

    Args:
      model: its name.
      devices: how many.
      batch_size: how many examples a batch has; by default as many as in `benchmark.py`.
      **options: those of `replicate()`.
    """
    metadata = tf.RunMetadata()
    run_options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
    batch_size = batch_size or benchmark_models.MODELS[model].batch
    with training(model, devices, batch_size, **options) as step:
        step()  # The first step makes what lasts.
        step(options=run_options, run_metadata=metadata)
    return {stats.device: traced_memory.peak(stats) for stats in metadata.step_stats.dev_stats}


def times(model, batch_size, choices):
    """Times a step of a model on one device.

    Args:
      model: its name.
      batch_size: how many examples a batch has.
      choices: the options of `replicate()`, by title.

    Returns:
      By title, the median of how long a step takes relative to one without options. Beside the
      choices there is `N separate steps` for each number of micro-batches.
    """
    counts = sorted({options['microbatches'] for options in choices.values()} - {1})
    ratios = {}
    with contextlib.ExitStack() as stack:

        def begin(size, **options):
            """Returns a function that runs a step, after the first ones."""
            step = stack.enter_context(training(model, 1, size, **options))
            for _ in range(3):
                step()
            return step

        plain = begin(batch_size)
        steps = {title: (begin(batch_size, **options), 1) for title, options in choices.items()}
        for count in counts:
            steps[f'{count} separate steps'] = begin(-(-batch_size // count)), count

        for _ in range(FLAGS.rounds):
            base = timed(plain, 1)
            for title, (step, number) in steps.items():
                ratios.setdefault(title, []).append(timed(step, number) / base)
    return {title: statistics.median(found) for title, found in ratios.items()}


def timed(step, number):
    """The seconds that a number of steps take."""
    start = time.perf_counter()
    for _ in range(number):
        step()
    return time.perf_counter() - start


def compare_devices():
    """Prints the peak of the busiest device of several."""
    print(f'{"model":12} {"one device, MB":>16} {"the busiest of " + str(FLAGS.devices):>20}')
    for name in FLAGS.models:
        [one], busiest = peaks(name, 1).values(), max(peaks(name, FLAGS.devices).values())
        print(f'{name:12} {one / 1e6:16.1f} {busiest / one:20.0%}', flush=True)


def grow_batches():
    """Prints and draws the peak of one device, by the size of the batch."""
    choices = choices_of_options()
    batch_sizes = [int(size) for size in FLAGS.batches]
    tables = {}
    for name in FLAGS.models:
        print(f'{name:24}' + ''.join(f'{size:>10}' for size in batch_sizes) + ' examples, MB')
        tables[name] = {}
        for title, options in choices.items():
            megabytes = []
            for size in batch_sizes:
                [peak] = peaks(name, 1, size, **options).values()
                megabytes.append(peak / 1e6)
            tables[name][title] = megabytes
            print(f'{title:24}' + ''.join(f'{size:10.1f}' for size in megabytes), flush=True)
        if FLAGS.time:
            print_times(name, choices, batch_sizes)
    draw(tables, batch_sizes)


def print_times(name, choices, batch_sizes):
    """Prints how long steps of a model take, relative to one without micro-batches."""
    columns = [times(name, size, choices) for size in batch_sizes]
    print(f'{name:24}' + ''.join(f'{size:>10}' for size in batch_sizes) + ' examples, time')
    for title in columns[0]:
        cells = ''.join(f'{column[title]:10.2f}' for column in columns)
        print(f'{title:24}{cells}', flush=True)


def choices_of_options():
    """The options of `replicate()` to measure, by a title."""
    choices = {}
    for recompute in [False, True] if FLAGS.recompute else [False]:
        for count in FLAGS.microbatches:
            title = f'microbatches={count}'
            options = {'microbatches': int(count)}
            if recompute:
                title += ', recompute'
                options['recompute'] = True
            choices[title] = options
    return choices


def draw(tables, batch_sizes):
    """Draws a plot for each model, with a line for each choice of options.

    Args:
      tables: the peaks in MB, one for each size, by model and title.
      batch_sizes: those sizes.
    """
    matplotlib.use('Agg')
    matplotlib.rcParams['svg.hashsalt'] = 'memory'  # The same picture of the same peaks.
    from matplotlib import pyplot

    width = 4.5 * len(tables)
    figure, [plots] = pyplot.subplots(
        1, len(tables), figsize=(width, 3.5), layout='constrained', squeeze=False
    )
    for axes, (name, lines) in zip(plots, tables.items()):
        for title, megabytes in lines.items():
            axes.plot(batch_sizes, megabytes, 'o--' if 'recompute' in title else 'o-', label=title)
        axes.set(title=name, xlabel='examples in a batch', ylabel='peak of a step, MB')
        axes.set(xlim=(0, None), ylim=(0, None))
    plots[0].legend()
    figure.savefig(FLAGS.output, metadata={'Date': None})


def main(argv):
    tf.logging.set_verbosity(tf.logging.ERROR)
    if FLAGS.batches:
        grow_batches()
    else:
        compare_devices()


if __name__ == '__main__':
    app.run(main)
