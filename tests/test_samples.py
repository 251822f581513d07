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


def run_sample(name: str, *flags: str) -> str:
    """Returns the last line that a sample prints."""
    done = subprocess.run(
        [sys.executable, str(SAMPLES / name), *flags],
        env={**os.environ, 'CUDA_VISIBLE_DEVICES': '-1'},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout.splitlines()[-1]


def accuracy_and_steps(line: str) -> tuple[float, int]:
    pattern = r'accuracy (\S+) on 360 held-out digits \(devices=\d+, (\d+) steps\)'
    found = re.fullmatch(pattern, line)
    assert found, line
    return float(found[1]), int(found[2])


@pytest.mark.core
def test_digits_trains_on_two_devices_and_continues_on_one(tmp_path):
    model_dir = f'--model_dir={tmp_path}'

    line = run_sample('digits.py', '--devices=2', '--train_steps=400', model_dir)
    accuracy, steps = accuracy_and_steps(line)
    assert accuracy > 0.97
    assert steps == 400
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / 'model.ckpt-400')

    line = run_sample('digits.py', '--devices=1', '--train_steps=50', model_dir)
    accuracy, steps = accuracy_and_steps(line)
    assert accuracy > 0.97
    assert steps == 450
