"""Train a TensorFlow Estimator's model_fn on several devices, with the numbers of one."""

from estimator_mgpu.compat import estimator
from estimator_mgpu.contrib import TowerOptimizer, replicate_model_fn
from estimator_mgpu.devices import session_config
from estimator_mgpu.hooks import ProgressHook, ThroughputHook
from estimator_mgpu.replicate import current_tower, replicate
from estimator_mgpu.replicated_estimator import Estimator, replicate_estimator
from estimator_mgpu.verification import verify

__version__ = '0.1.0'

__all__ = [
    'Estimator',
    'ProgressHook',
    'ThroughputHook',
    'TowerOptimizer',
    'current_tower',
    'estimator',
    'replicate',
    'replicate_estimator',
    'replicate_model_fn',
    'session_config',
    'verify',
]
