"""The samples, run as a newcomer runs them."""

import json
import os
import pathlib
import re
import subprocess
import sys

import nbclient
import nbformat
import pytest
import tensorflow.compat.v1 as tf

from forks import Popen, output_of

SAMPLES = pathlib.Path(__file__).resolve().parent.parent / 'samples'


def run_python(*command, gpus='-1', apart=True):
    """Returns the lines that `python *command` prints, when run in samples/.

    It runs in a process that is forked from one that has imported TensorFlow.

    Args:
      command: the name of a sample, or '-c' and a program; then arguments.
      gpus: what CUDA_VISIBLE_DEVICES is.
      apart: whether standard error is left out of the lines.
    """
    return output_of(command, SAMPLES, apart, CUDA_VISIBLE_DEVICES=gpus).splitlines()


# TensorFlow is imported once. Each sample has a process of its own, as they define the same flags.
TRY_FLAGS = """
import importlib, json, os, sys
from absl.testing import flagsaver
import estimator_mgpu

for name, wrong in json.loads(sys.argv[1]).items():
    if os.fork():
        os.wait()
        continue
    sample = importlib.import_module(name)
    for flag in wrong:
        with flagsaver.flagsaver():
            try:
                sample.main(sample.FLAGS(['sample', flag]))
            except Exception as error:
                print('ERROR', json.dumps([name, flag, str(error)]), flush=True)
    os._exit(0)
"""


def flag_errors(wrong):
    """Runs samples with wrong flags.

    Args:
      wrong: a list of flags for each name of a sample.

    Returns:
      The message of the error, for each pair of a name and a flag.
    """
    lines = run_python('-c', TRY_FLAGS, json.dumps(wrong))
    errors = [json.loads(line[len('ERROR') :]) for line in lines if line.startswith('ERROR ')]
    return {(name, flag): message for name, flag, message in errors}


def numbers(pattern, line):
    """Returns the numbers in the places of # in a pattern that is the whole line."""
    found = re.fullmatch(re.escape(pattern).replace('\\#', r'([\d.,]+)'), line)
    assert found, line
    return [float(number.replace(',', '')) for number in found.groups()]


PNG = b'\x89PNG'
DIGITS = 'accuracy # on 360 held-out digits (devices=#, # steps)'


@pytest.mark.core
def test_digits_draws_the_same_on_two_devices_as_on_one(tmp_path):
    pictures = []
    for devices in (2, 1):
        model_dir = tmp_path / str(devices)
        flags = f'--devices={devices}', '--train_steps=100', f'--model_dir={model_dir}'
        lines = run_python('digits.py', *flags, apart=False)
        assert ('Devices: /device:CPU:0' in lines) == (devices == 1) and len(lines) <= 30
        accuracy, *other = numbers(DIGITS, lines[-1])
        assert accuracy > 0.9 and other == [devices, 100]
        pictures.append((model_dir / 'confusion.png').read_bytes())
    assert pictures[0].startswith(PNG) and pictures[0] == pictures[1]


# What a sample's last line says, and from what to what the numbers in it may be.
TRAINED = {
    'wide_deep.py --train_steps=200': (
        'accuracy #, AUC # on 189 held-out voters (devices=#, # steps; the more frequent '
        'answer alone is right for #)',
        [(0.8, 1), (0.88, 1), (2, 2), (200, 200), (0.58, 0.583)],
    ),
    'gan.py --train_steps=1000': (
        '# of 100 drawings are read as the digit that was asked for (devices=#, # steps)',
        [(60, 100), (2, 2), (1000, 1000)],  # 10 by chance
    ),
    'char_rnn.py --train_steps=120 --units=64 --length=50 --prompts=def,for': (
        '# bits per character of a held-out text of # characters; the frequencies of characters '
        'alone give # (devices=#, # steps)',
        [(1, 4), (90_000, 100_000), (4.5, 5), (2, 2), (120, 120)],
    ),
    'bert_like.py --train_steps=120 --warmup_steps=20 --hidden=32 --layers=1': (
        'accuracy # on # held-out lines of # packages, # of them from the most frequent package '
        '(devices=#, # steps)',
        [(0.45, 1), (1000, 10_000), (9, 9), (0, 0.3), (2, 2), (120, 120)],
    ),
}


@pytest.mark.parametrize('command', TRAINED)
def test_trains_on_two_devices(command, tmp_path):
    lines = run_python(*command.split(), '--devices=2', f'--model_dir={tmp_path}')
    pattern, ranges = TRAINED[command]
    found = numbers(pattern, lines[-1])
    assert all(low <= one <= high for one, (low, high) in zip(found, ranges)), lines[-1]
    if 'gan' in command:
        assert (tmp_path / 'drawn.png').read_bytes().startswith(PNG)
    if 'char_rnn' in command:
        pattern = r"--- 'def' continues:\ndef(.{50})\n--- 'for' continues:\nfor(.{50})\n---"
        written = re.fullmatch(pattern, '\n'.join(lines[1:-1]), re.DOTALL)
        assert written, lines
        assert written[1] != written[2]


def test_notebook(tmp_path):
    """Its cells run, and show tables, a picture, and a progress bar that is a widget."""
    notebook = nbformat.read(SAMPLES / 'notebook.ipynb', as_version=4)
    client = nbclient.NotebookClient(notebook, resources={'metadata': {'path': str(tmp_path)}})
    client.execute(env={**os.environ, 'CUDA_VISIBLE_DEVICES': '-1', 'TF_CPP_MIN_LOG_LEVEL': '3'})

    outputs = [output for cell in notebook.cells for output in cell.get('outputs', [])]
    printed = ''.join(output.text for output in outputs if output.get('name') == 'stdout')
    assert re.search(r'\n0 of \d+ differ from one device', printed)
    assert float(re.search('accuracy (.*) on 4000 points', printed)[1]) > 0.9
    shown = {kind: data for output in outputs for kind, data in output.get('data', {}).items()}
    assert '<td style="text-align: left">/device:CPU:1</td>' in shown['text/html']
    assert 'image/png' in shown
    assert 'application/vnd.jupyter.widget-view+json' in shown


def test_separate_trains_two_models_at_a_time(tmp_path):
    rates = '0.001', '0.003', '0.01'
    flags = [f'--learning_rates={",".join(rates)}', '--train_steps=50', f'--model_dir={tmp_path}']
    lines = run_python('separate.py', '--devices=2', *flags)
    rows = [line.split() for line in lines[-3:]]
    assert [row[:2] for row in rows] == [[rate, 'CPU'] for rate in rates]
    # Two start at once; the third does when one of them is done.
    starts, ends = ([float(row[i]) for row in rows] for i in (2, 4))
    assert max(starts[:2]) < min(ends[:2])
    assert starts[2] >= min(ends[:2])
    for rate, row in zip(rates, rows):
        assert float(row[-1]) > 0.5
        assert tf.train.latest_checkpoint(str(tmp_path / rate)).endswith('model.ckpt-50')


def test_separate_gives_each_process_one_gpu():
    """Of those that this process sees itself."""
    code = (
        'import separate\n'
        'separate.tf.config.list_physical_devices = lambda kind: [0, 1]\n'
        'separate.tf.config.get_logical_device_configuration = lambda gpu: None\n'
        'for devices in ("", "1", "/gpu:1,CPU:0"):\n'
        '    separate.FLAGS(["", f"--devices={devices}"])\n'
        '    print(separate.visible_devices())'
    )
    assert run_python('-c', code, gpus='5,7')[-3:] == ["['5', '7']", "['5']", "['7', '']"]


@pytest.mark.core
def test_machines_train_as_one_device_though_a_worker_is_killed(tmp_path):
    flags = '--devices=1', '--train_steps=60', f'--model_dir={tmp_path}'
    lines = run_python('machines.py', *flags)
    killed = lines.index('worker1 was killed (-9), and is started again')
    assert lines[killed - 1].startswith('chief: step 40 of 60')
    assert lines[killed + 1] == 'chief: starts at step 30'
    assert 'ended: chief0 with 0, worker0 with 0, worker1 with 0' in lines[killed:]
    variables, difference = lines[-1].split(' variables from one device: ')
    assert variables == 'largest difference of 11'  # the step; 5 variables, each with a momentum
    assert float(difference) < 1e-5
    assert len(lines) <= 25
    logs = {'chief0.log', 'worker0.log', 'worker1.log', 'alone.log'}
    assert {path.name for path in tmp_path.glob('*.log')} == logs


def test_machines_fails_if_the_chief_does(tmp_path):
    (tmp_path / 'machines').write_text('')  # in the place of the directory for checkpoints
    command = [sys.executable, SAMPLES / 'machines.py', f'--model_dir={tmp_path}']
    process = Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with process:
        _, said = process.communicate(timeout=300)
    assert process.returncode == 1
    assert 'chief has failed (1): see its log.' in said
    assert 'Error' in (tmp_path / 'chief0.log').read_text()


def test_storm(tmp_path):
    """A short one, in which the chief is killed, too; those of 25 events last minutes.

    Its machines are forks: each is a process with connections of its own, and is killed, stopped
    and cut off as any other. It's only back sooner, as it needn't import TensorFlow.
    """
    flags = '--devices=1', '--events=7', '--pause=2', '--stopped=3', '--train_steps=30', '--seed=1'
    flags += ('--nomove',)  # Forks can't be in another network.
    lines = run_python('storm.py', *flags, f'--model_dir={tmp_path}')
    assert (
        sum(bool(re.match(r'\d\. (kill|stop|cut|freeze) [a-z]+\d$', line)) for line in lines) == 7
    )
    assert lines[-2] == 'ended: chief0 with 0, worker0 with 0, worker1 with 0, ps0 with 0'
    assert float(lines[-1].rpartition(' ')[2]) < 1e-5


def test_memory():
    """No device has the whole batch, nor for the shape that gradients of convolutions ask for."""
    header, line = run_python('memory.py', '--models=cnn,cnn', '--devices=4')[-3::2]
    assert header.endswith('the busiest of 4') and line.startswith('cnn')
    assert 20 <= int(line.split()[-1].rstrip('%')) <= 100 / 4 * 1.15


def test_memory_as_the_batch_grows(tmp_path):
    """Most of it are activations, of which each micro-batch has a fourth."""
    output = f'--output={tmp_path / "memory.svg"}'
    options = ['--models=mlp', '--batches=2048', '--microbatches=1,4', output]
    lines = run_python('memory.py', *options)[-2:]
    one, four = [float(line.split()[-1]) for line in lines]
    assert one / 4 < four < 0.6 * one
    assert (tmp_path / 'memory.svg').exists()


def test_time_of_micro_batches(tmp_path):
    """Each is compared with a step without: so this one, too, takes about its own time."""
    options = ['--models=mlp', '--batches=64,128', '--microbatches=1,4', '--recompute', '--time']
    lines = run_python('memory.py', *options, f'--output={tmp_path / "memory.svg"}')[-6:]
    title, *rows = [line.split('  ', 1)[0] for line in lines]
    assert title == 'mlp' and lines[0].split()[1:] == ['64', '128', 'examples,', 'time']
    assert rows == [
        'microbatches=1',
        'microbatches=4',
        'microbatches=1, recompute',
        'microbatches=4, recompute',
        '4 separate steps',
    ]
    for line in lines[1:]:
        assert all(float(ratio) > 0 for ratio in line.split()[-2:])


def test_growth(tmp_path):
    """By a smaller model for several devices than the sample's own, which has 5,000 ops."""
    code = 'import growth; growth.MANY_OPS = 200; growth.app.run(growth.main)'
    output = f'--output={tmp_path / "growth.svg"}'
    lines = run_python('-c', code, '--ops=100,200', '--devices=2,3', '--columns=2,3', output)
    devices = [line.split()[3] for line in lines[-8:]]
    assert devices == ['8', '8', '2', '3', '2', '2', '2', '2']
    assert (tmp_path / 'growth.svg').stat().st_size > 1000


PROMPTS = 'give prompts of ASCII characters, all equally long'
RATES = 'give numbers above 0, each of them once'
UNKNOWN = 'in devices is unknown: it names no numbered CPU or GPU'
WRONG = {
    'digits': {
        'devices=2': "'devices=2' is no flag, such as --devices=2 is.",
        '--devices=0': 'devices=0 leaves nothing to run on',
        '--devices=/device:GPU': f"'/device:GPU' {UNKNOWN}",
        '--devices=GPU:0': "asks for '/device:GPU:0', but this machine has no GPU",
        '--devices=two': f"'two' {UNKNOWN}",
    },
    'char_rnn': {
        '--prompts=def,class': PROMPTS,
        '--prompts=': PROMPTS,
        '--prompts=d\u00e9f,for': PROMPTS,
        '--temperature=0': 'temperature',
    },
    'memory': {
        '--time': 'need --batches',
        '--recompute': 'need --batches',
        '--models=cnn,none': 'give some of mlp, cnn, deep, embed, wide, lstm, deepfm, transformer',
    },
    'separate': {f'--learning_rates={given}': RATES for given in ('', '0.1,0.10', '0.1,fast', '0')},
    'benchmark': {
        '--models=mlp,none': 'give some of mlp, cnn, deep, embed, wide, lstm, deepfm',
        '--setups=horovod': 'give some of replicate, MirroredStrategy, optimized, other',
        '--setups=other': 'the set-up other needs --other=DIR',
        '--other=nowhere': '--other=nowhere has no directory estimator_mgpu',
        '--towers=1': 'give numbers of 2 or more',
        '--towers=two': 'give numbers of 2 or more',
        '--devices=GPU': "asks for '/device:GPU:0', but this machine has no GPU",
        '--variables=disk': "variables='disk' is not known. Legal are cpu, first, spread",
    },
}


def test_wrong_flags_are_told_at_once():
    errors = flag_errors({name: list(flags) for name, flags in WRONG.items()})
    for name, flags in WRONG.items():
        for flag, expected in flags.items():
            message = errors.get((name, flag), 'no error')
            assert expected in message, f'{name}.py {flag}: {message}'
