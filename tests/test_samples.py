"""The samples, run as a newcomer runs them."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest
import tensorflow.compat.v1 as tf

SAMPLES = pathlib.Path(__file__).resolve().parent.parent / 'samples'


def run_python(*arguments: str, gpus: str = '-1', errors: int = subprocess.PIPE) -> list[str]:
    """Returns the lines that Python prints, when run in samples/."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=SAMPLES,
        env={**os.environ, 'CUDA_VISIBLE_DEVICES': gpus},
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-5000:] + (done.stderr or '')[-5000:]
    return done.stdout.splitlines()


def run_sample(name: str, *flags: str) -> str:
    """Returns the last line that a sample prints."""
    return run_python(str(SAMPLES / name), *flags)[-1]


def flag_errors(name: str, *wrong: str) -> list[str]:
    """Returns what a sample says of each of some wrong flags."""
    code = (
        f'import sys, {name} as sample\n'
        'from absl.testing import flagsaver\n'
        'for flag in sys.argv[1:]:\n'
        '    with flagsaver.flagsaver():\n'
        "        try: print(sample.FLAGS(['sample', flag]))\n"
        '        except sample.flags.Error as error: print(error)'
    )
    return run_python('-c', code, *wrong)[-len(wrong) :]


def numbers(pattern: str, line: str) -> list[float]:
    """Returns the numbers in the places of # in a pattern that is the whole line."""
    found = re.fullmatch(re.escape(pattern).replace('\\#', r'([\d.,]+)'), line)
    assert found, line
    return [float(number.replace(',', '')) for number in found.groups()]


def is_png(path: pathlib.Path) -> bool:
    return path.read_bytes().startswith(b'\x89PNG')


DIGITS = 'accuracy # on 360 held-out digits (devices=#, # steps)'


@pytest.mark.core
def test_digits_trains_on_two_devices_and_continues_on_one(tmp_path):
    model_dir = f'--model_dir={tmp_path}'

    line = run_sample('digits.py', '--devices=2', '--train_steps=400', model_dir)
    accuracy, devices, steps = numbers(DIGITS, line)
    assert accuracy > 0.97
    assert (devices, steps) == (2, 400)
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / 'model.ckpt-400')
    assert is_png(tmp_path / 'confusion.png')

    flags = '--devices=1', '--train_steps=50', model_dir
    lines = run_python('digits.py', *flags, errors=subprocess.STDOUT)
    assert 'Devices: /device:CPU:0' in lines and len(lines) <= 30
    accuracy, devices, steps = numbers(DIGITS, lines[-1])
    assert accuracy > 0.97
    assert (devices, steps) == (1, 450)


def test_wide_deep_tells_voters():
    line = run_sample('wide_deep.py', '--devices=2', '--train_steps=200')
    accuracy, auc, devices, steps, chance = numbers(
        'accuracy #, AUC # on 189 held-out voters (devices=#, # steps; to say the same of all '
        'would be right for #)',
        line,
    )
    assert chance == pytest.approx(110 / 189, abs=1e-4)
    assert accuracy > 0.8
    assert 0.88 < auc <= 1
    assert (devices, steps) == (2, 200)


def test_gan_draws_the_digits_that_it_is_asked_for(tmp_path):
    flags = '--devices=2', '--train_steps=2000', f'--model_dir={tmp_path}'
    read, devices, steps = numbers(
        '# of 100 drawings are read as the digit that was asked for (devices=#, # steps)',
        run_sample('gan.py', *flags),
    )
    assert read > 60  # 10 by chance.
    assert (devices, steps) == (2, 2000)
    assert is_png(tmp_path / 'drawn.png')


def test_char_rnn_learns_more_than_frequencies_and_writes():
    flags = '--devices=2', '--train_steps=120', '--units=64', '--length=50', '--prompts=def,for'
    lines = run_python('char_rnn.py', *flags)
    bits, characters, by_frequency, devices, steps = numbers(
        '# bits a character of # unseen ones; their frequencies alone give # (devices=#, # steps)',
        lines[-1],
    )
    assert bits < by_frequency - 0.5
    assert 90_000 < characters < 100_000
    assert (devices, steps) == (2, 120)
    pattern = r"--- 'def' goes on:\ndef(.{50})\n--- 'for' goes on:\nfor(.{50})\n---"
    written = re.fullmatch(pattern, '\n'.join(lines[1:-1]), re.DOTALL)
    assert written, lines
    assert written[1] != written[2]


def test_bert_like_tells_packages(tmp_path):
    model_dir = f'--model_dir={tmp_path}'
    flags = '--devices=2', '--train_steps=200', '--warmup_steps=20', '--hidden=32', '--layers=1'
    accuracy, lines, packages, most, devices, steps = numbers(
        'accuracy # on # held-out lines of # packages, the most frequent of which has # of them '
        '(devices=#, # steps)',
        run_sample('bert_like.py', *flags, model_dir),
    )
    assert accuracy > 0.45
    assert most < 0.3
    assert lines > 1000
    assert (packages, devices, steps) == (9, 2, 200)
    slots = [name for name, _ in tf.train.list_variables(str(tmp_path)) if 'adam_v' in name]
    assert 'logits/kernel/adam_v' in slots


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
    done = subprocess.run(
        [sys.executable, SAMPLES / 'machines.py', f'--model_dir={tmp_path}'],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert 'chief has failed (1): see its log.' in done.stderr
    assert 'Error' in (tmp_path / 'chief0.log').read_text()


@pytest.mark.parametrize(
    ('devices', 'expected'),
    [('', ['5', '7']), ('1', ['5']), ('/gpu:1,CPU:0', ['7', ''])],
    ids=['all', 'count', 'list'],
)
def test_separate_gives_each_process_one_gpu(devices, expected):
    """Of those that this process sees itself."""
    code = (
        'import separate; separate.tf.config.list_physical_devices = lambda kind: [0, 1]; '
        'separate.tf.config.get_logical_device_configuration = lambda gpu: None; '
        f'separate.FLAGS(["", "--devices={devices}"]); print(separate.visible_devices())'
    )
    assert run_python('-c', code, gpus='5,7') == [str(expected)]


@pytest.mark.parametrize('sample', ['digits', 'separate'])
def test_devices_that_are_none_are_told_at_once(sample):
    wrong = {
        '0': 'devices=0 leaves nothing to run on',
        '-1': 'devices=-1 leaves nothing to run on',
        '/device:GPU': "'/device:GPU' in devices is unknown: it names no numbered CPU or GPU",
        'GPU:0': "asks for '/device:GPU:0', but this machine has no GPU",
        'two': "'two' in devices is unknown: it names no numbered CPU or GPU",
    }
    messages = flag_errors(sample, *(f'--devices={devices}' for devices in wrong))
    for message, expected in zip(messages, wrong.values()):
        assert expected in message


@pytest.mark.parametrize(
    ('sample', 'message', 'wrong'),
    [
        (
            'char_rnn',
            'give prompts of ASCII characters, all equally long',
            ['--prompts=def,class', '--prompts=', '--prompts=d\u00e9f,for'],
        ),
        ('char_rnn', 'temperature', ['--temperature=0']),
        (
            'separate',
            'give numbers above 0, each of them once',
            [f'--learning_rates={given}' for given in ('', '0.1,0.10', '0.1,fast', '0')],
        ),
    ],
    ids=['prompts', 'temperature', 'learning_rates'],
)
def test_other_wrong_flags_are_told_at_once(sample, message, wrong):
    assert all(message in told for told in flag_errors(sample, *wrong))


def test_what_is_no_flag_is_told_at_once():
    code = (
        'import digits\n'
        "try: digits.main(['digits', 'devices=2'])\n"
        'except digits.app.UsageError as error: print(error)'
    )
    assert run_python('-c', code)[-1] == "'devices=2' is no flag, such as --devices=2 is."
