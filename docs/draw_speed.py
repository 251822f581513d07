"""Draws speed.svg of what samples/benchmark.py measured: `python docs/draw_speed.py RUNS.json`.

Of each model on eight devices, relative to one device in the same round: start-up and step, of
replicate() and of MirroredStrategy. Bars are medians.
"""

import json
import pathlib
import statistics
import sys

import matplotlib
from matplotlib import pyplot

sys.path.append(str(pathlib.Path(__file__).parent.parent / 'samples'))
from benchmark import ratios  # noqa: E402

PATH = pathlib.Path(__file__).with_name('speed.svg')
TOWERS = 8
SETUPS = {'replicate': 'tab:blue', 'MirroredStrategy': 'tab:orange'}


def ratio(runs, model, setup, measure):
    """Returns the median ratio to one device."""
    of = {'model': model, 'setup': setup, 'towers': TOWERS}
    return statistics.median(ratios(runs, measure, of, {**of, 'setup': 'one device', 'towers': 1}))


def main(path):
    runs = json.loads(pathlib.Path(path).read_text())['runs']
    models = list(dict.fromkeys(run['model'] for run in runs))
    matplotlib.rcParams['svg.hashsalt'] = 'speed'  # The same picture of the same runs.
    figure, both = pyplot.subplots(1, 2, figsize=(9, 3.2), layout='constrained')
    for axes, measure in zip(both, ('start_up', 'step')):
        for shift, (setup, color) in zip((-0.2, 0.2), SETUPS.items()):
            values = [ratio(runs, model, setup, measure) for model in models]
            places = [i + shift for i in range(len(models))]
            axes.bar_label(axes.bar(places, values, 0.4, label=setup, color=color), fmt='%.1f')
        axes.axhline(1, color='black', linewidth=0.8)
        axes.set_xticks(range(len(models)), models, rotation=30)
        axes.set_title(f'{measure.replace("_", "-")} on {TOWERS} CPU devices / one device')
        axes.margins(y=0.15)
    both[1].legend()
    figure.savefig(PATH, metadata={'Date': None})


if __name__ == '__main__':
    main(sys.argv[1])
