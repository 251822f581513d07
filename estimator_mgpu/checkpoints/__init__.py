"""Checkpoints are those of one device. Here is what goes wrong with their files, or takes too much.

- `checkpoint_files`: what is wrong with the files of a model_dir, in a sentence. They are checked
  before each call of an Estimator or a predictor, and errors of the call are explained.
- `large_checkpoints`: no device copies its variables to save them.
"""
