"""Train a TensorFlow Estimator on several devices, and get the same results as on one.

Start with `replicate`, which decorates a model_fn, or with `Estimator`.
"""

from typing import TYPE_CHECKING

from estimator_mgpu import quiet_tensorflow  # noqa: F401  # before TensorFlow is imported
from estimator_mgpu.contrib import replicate_model_fn
from estimator_mgpu.custom_ops.check_rule import check_rule
from estimator_mgpu.custom_ops.register_rule import register_rule
from estimator_mgpu.derived_estimators import replicate_estimator
from estimator_mgpu.devices import session_config
from estimator_mgpu.hooks import ProgressHook, ThroughputHook
from estimator_mgpu.optimizer import TowerOptimizer
from estimator_mgpu.replicate import replicate
from estimator_mgpu.replicated_estimator import Estimator
from estimator_mgpu.reports.verify import verify
from estimator_mgpu.tf_internals.tf_estimator import estimator

__version__ = '0.3.0'

__all__ = [
    'Estimator',
    'ProgressHook',
    'ThroughputHook',
    'TowerOptimizer',
    'check_rule',
    'estimator',
    'register_rule',
    'replicate',
    'replicate_estimator',
    'replicate_model_fn',
    'session_config',
    'verify',
]

if not TYPE_CHECKING:  # To type checkers, it would say that the module has any name.

    def __getattr__(name: str) -> object:
        gone = ' any more: a model_fn is called once, with the global batch. Leave it out'
        why = gone if name == 'current_tower' else ''
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}{why}')
