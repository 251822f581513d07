"""tf.estimator, and Keras 2 where tf-keras is installed: see docs/tensorflow-2.16.md."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.tools import module_util
from tensorflow.python.util import tf_export

from estimator_mgpu.argument_checks import check_input_fn

_REMOVED = {
    'distribute.estimator_training': 'For the devices of one machine use estimator_mgpu.replicate.',
    'tpu.session_support': 'Estimators on TPUs need TensorFlow 2.15.',
    'tpu.tpu_embedding': 'TPU embeddings need TensorFlow 2.15.',
    'tpu.tpu_embedding_gradient': 'TPU embeddings need TensorFlow 2.15.',
}
# What model code for Keras 2 runs into: tf.layers and tf.nn.rnn_cell, tf-keras asked for but not
# installed, attributes and modules of tf.keras, and `from tensorflow.compat.v1.layers import`.
_KERAS_ERRORS = r"Keras (3|cannot be)|_tf_keras|'DenseFeatures'|compat.v1.(keras'|layers.__init__)"


def check_tensorflow(version: str) -> None:
    """Raises ImportError if this version of TensorFlow is not supported."""
    if not (2, 15) <= _minor(version) <= (2, 21):
        raise ImportError(
            'estimator_mgpu runs on TensorFlow 2.15 to 2.21, and this is TensorFlow '
            f'{version}. Install a supported one: pip install "tensorflow>=2.15,<2.22"'
        )


def before_each_run_config(call: Callable[[], None]) -> None:
    """Has a function called before a RunConfig is made, which then reads TF_CONFIG."""
    original = _run_config_module.RunConfig.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        call()
        original(self, *args, **kwargs)

    _run_config_module.RunConfig.__init__ = init


def before_each_evaluation(call: Callable[[Any], None]) -> None:
    """Has a function called each time that train_and_evaluate() looks for a new checkpoint.

    Args:
      call: the function, of the estimator. An evaluator looks again and again.
    """
    evaluator = _training_module._TrainingExecutor._Evaluator
    original = evaluator.evaluate_and_export

    @functools.wraps(original)
    def evaluate_and_export(self: Any) -> Any:
        call(self._estimator)
        return original(self)

    evaluator.evaluate_and_export = evaluate_and_export


def strategies_of(config: Any) -> dict[str, Any]:
    """Returns the strategies of tf.distribute that a RunConfig has, by its arguments' names.

    Args:
      config: a RunConfig, or None.
    """
    # The first one sets the others, too.
    names = ('experimental_distribute', 'train_distribute', 'eval_distribute')
    strategies = {name: getattr(config, f'_{name}', None) for name in names}
    return {name: strategy for name, strategy in strategies.items() if strategy is not None}


def features_and_labels(estimator: Any, input_fn: Any, mode: str) -> tuple[Any, Any, list[Any]]:
    """Returns the features and labels of an input_fn, and the hooks of a session that has them."""
    check_input_fn(input_fn)
    return estimator._get_features_and_labels_from_input_fn(input_fn, mode)


def global_step_of(estimator: Any, graph: tf.Graph) -> Any:
    """Returns the global step that an estimator makes to train; None if its model brings one."""
    return estimator._create_and_assert_global_step(graph)


def spec_of(estimator: Any, features: Any, labels: Any, mode: str) -> Any:
    """Returns what an estimator's model_fn gives, called as the estimator calls it."""
    return estimator._call_model_fn(features, labels, mode, estimator.config)


def as_estimator_spec(spec: Any) -> Any:
    """Returns what a model_fn gives; an EstimatorSpec in place of a TPUEstimatorSpec."""
    return spec.as_estimator_spec() if hasattr(spec, 'as_estimator_spec') else spec


def predictions_of(estimator: Any, spec: Any, checkpoint_path: str | None, keys: Any) -> Any:
    """Returns those of an EstimatorSpec's predictions that `predict()` would fetch.

    Without a checkpoint, it adds the warm start to the graph.

    Args:
      estimator: the estimator whose model_fn has built the default graph.
      spec: the model_fn's EstimatorSpec.
      checkpoint_path: the checkpoint that will be restored, if there is one.
      keys: as predict_keys of `predict()`.
    """
    estimator._maybe_warm_start(checkpoint_path)
    return estimator._extract_keys(spec.predictions, keys)


def legacy_keras_remedy(error: Exception) -> str | None:
    """Returns what to do about an error of Keras 2 code that met Keras 3; None for other errors."""
    if not re.search(_KERAS_ERRORS, str(error)):
        return None
    major, minor = _minor(tf.__version__)
    return (
        'tf.layers, and tf.keras as Keras 2, need tf-keras on this TensorFlow: '
        f'pip install "tf-keras~={major}.{minor}.0", and import estimator_mgpu before Keras is '
        'first used. The environment variable TF_USE_LEGACY_KERAS has to be 1 or unset, and is '
        f'{os.environ.get("TF_USE_LEGACY_KERAS", "unset")}.'
    )


def _minor(version: str) -> tuple[int, ...]:
    """(2, 15) of '2.15.1'; () of what is no version."""
    return tuple(map(int, re.findall(r'\d+', version)[:2]))


def _namespaces() -> Iterator[tuple[Any, str]]:
    """TensorFlow's public namespaces, each with the version of its API."""
    # These imports make a second `tf.compat.v1` and v2; callers may hold either.
    importlib.import_module('tensorflow.compat.v1')
    importlib.import_module('tensorflow.compat.v2')
    for name, module in list(sys.modules.items()):
        if re.fullmatch(r'tensorflow|tensorflow(\._api\.v2)?(\.compat\.v[12])+', name):
            yield module, 'v1' if name.endswith('v1') else 'v2'


def _choose_keras() -> None:
    """Makes tf.keras Keras 2 where that is possible and nobody has chosen."""
    if 'TF_USE_LEGACY_KERAS' in os.environ or not importlib.util.find_spec('tf_keras'):
        return
    names = {'v1': 'keras layers', 'v2': 'keras initializers losses metrics optimizers'}
    found = [getattr(module, name) for module, api in _namespaces() for name in names[api].split()]
    # A KerasLazyLoader says whether it was used; anything else is no lazy loader any more.
    used = any(getattr(one, '_tfll_initialized', True) for one in found)
    if used or 'tensorflow.keras' in sys.modules:
        return
    os.environ['TF_USE_LEGACY_KERAS'] = '1'
    # Lazy attributes follow the variable; `from tensorflow.keras import` goes by older paths.
    for module, api in _namespaces():
        keras = f'tf_keras.api._{api}.keras'
        layers = f'{keras}.__internal__.legacy.layers'
        for name in (keras, layers) if api == 'v1' else (keras,):
            module.__path__.insert(0, module_util.get_parent_dir_for_name(name))


def _restore_removed() -> None:
    """Adds what tensorflow-estimator imports from TensorFlow, where it is missing."""
    for module, advice in _REMOVED.items():
        name = f'tensorflow.python.{module}'
        if name not in sys.modules and not importlib.util.find_spec(name):
            sys.modules[name] = _RemovedModule(name, advice)
    if not hasattr(tf_export, 'ESTIMATOR_API_NAME'):
        tf_export.ESTIMATOR_API_NAME = tf_export.TENSORFLOW_API_NAME


class _RemovedModule(types.ModuleType):
    """Any name can be imported from it, and none can be called but what RunConfig needs."""

    def should_run_distribute_coordinator(self, config: Any) -> bool:
        return False

    def init_run_config(self, config: Any, tf_config: dict[str, Any]) -> None:
        """Prepares a RunConfig that has distribution strategies, for one machine."""
        given = 'experimental_distribute' if config._experimental_distribute else None
        if tf_config.get('cluster') and given is None:
            given = 'train_distribute' if config._train_distribute else 'eval_distribute'
            given += ', on the machines of TF_CONFIG,'
        if given is not None:
            raise NotImplementedError(
                f'What {given} needs was removed from TensorFlow 2.16. Leave it out, and '
                'use estimator_mgpu.replicate or estimator_mgpu.Estimator.'
            )
        config._init_distributed_setting_from_environment_var(tf_config)

    def __getattr__(self, name: str) -> type:
        if name.startswith('__'):
            raise AttributeError(f'module {self.__name__!r} has no attribute {name!r}')
        told = f'{self.__name__}.{name} was removed from TensorFlow 2.16. {self.__doc__}'

        def fail(*args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(told)

        return type(name, (), {'__new__': fail})  # for isinstance()


def _publish_estimator() -> None:
    """Sets the attribute `estimator` of TensorFlow's namespaces, where it is missing."""
    try:
        importlib.import_module('tensorflow_estimator')
    except ImportError as error:
        remedy = legacy_keras_remedy(error) or 'pip install "tensorflow-estimator==2.15.0"'
        raise ImportError(
            f'TensorFlow {tf.__version__} has no tf.estimator of its own, and the package '
            f'tensorflow-estimator cannot be imported ({error}). Remedy: {remedy}'
        ) from error
    for module, api in _namespaces():
        if not hasattr(module, 'estimator'):
            name = f'tensorflow_estimator.python.estimator.api._{api}.estimator'
            module.estimator = importlib.import_module(name)
            sys.modules.setdefault(f'{module.__name__}.estimator', module.estimator)  # to import


def _estimator_namespaces() -> dict[str, Any]:
    """The modules of tf.estimator's API, by their public names."""
    modules = {}
    for api in ('v1', 'v2'):
        for name in ('estimator', 'estimator.experimental'):
            module = importlib.import_module(
                f'tensorflow_estimator.python.estimator.api._{api}.{name}'
            )
            modules[f'tf.compat.{api}.{name}'] = module
    return modules


def _missing_estimator(module: str, name: str) -> Any:
    """Raises AttributeError, as a module without a name does, but says where the name is now."""
    text = f'module {module!r} has no attribute {name!r}'
    for public, other in _estimator_namespaces().items():
        if name in dir(other):  # Not hasattr(), which would come here.
            text += f'; it is {public}.{name}'
            break
    if name.startswith('BoostedTrees'):
        text += (
            ': tensorflow-estimator 2.15 has no boosted trees any more. TensorFlow Decision '
            'Forests trains such, without an Estimator'
        )
    raise AttributeError(text)


def _is_no_advice(record: logging.LogRecord) -> bool:
    """False for TensorFlow's advice against tf.estimator, which the log then leaves out."""
    texts = [argument for argument in record.args or () if isinstance(argument, str)]
    return 'Use tf.keras instead.' not in texts  # Values of bfloat16 don't compare with a str.


check_tensorflow(tf.__version__)
if _minor(tf.__version__) > (2, 15):
    _choose_keras()
    _restore_removed()
    _publish_estimator()
for _module in _estimator_namespaces().values():
    _module.__getattr__ = functools.partial(_missing_estimator, _module.__name__)
tf.get_logger().addFilter(_is_no_advice)
# TensorFlow 2.20 writes graphs as text with an option of which newer versions of protobuf warn.
warnings.filterwarnings('ignore', 'float_format is deprecated', UserWarning)
estimator: Any = tf.compat.v1.estimator

# Only now does TensorFlow have what these modules import. The rest of the package takes them from
# here, and so never before.
_estimator_module: Any = importlib.import_module('tensorflow_estimator.python.estimator.estimator')
EstimatorV2: Any = _estimator_module.EstimatorV2
_run_config_module: Any = importlib.import_module(
    'tensorflow_estimator.python.estimator.run_config'
)
_training_module: Any = importlib.import_module('tensorflow_estimator.python.estimator.training')
get_default_session_config: Any = _run_config_module.get_default_session_config
