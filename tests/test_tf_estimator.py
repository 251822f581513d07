"""`tf.estimator` and Keras 2: what importing the package does, each time in a fresh process."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf

from estimator_mgpu.tf_internals import tf_estimator

HAS_ESTIMATOR = tf.__version__.startswith('2.15.')
only_215 = pytest.mark.skipif(not HAS_ESTIMATOR, reason='only TensorFlow 2.15')
only_216_on = pytest.mark.skipif(HAS_ESTIMATOR, reason='only TensorFlow 2.16 and later')

pytestmark = pytest.mark.core

# One variable that goes from 0 towards 1 with gradient 2 (w - 1): 0.2, then 0.36.
MODEL = """
import tensorflow.compat.v1 as v1

def model_fn(features, labels, mode):
    w = v1.get_variable('w', [], initializer=v1.zeros_initializer())
    loss = v1.reduce_mean(v1.square(w - features))
    step = v1.train.get_or_create_global_step()
    train_op = v1.train.GradientDescentOptimizer(0.1).minimize(loss, step)
    return v1.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

def input_fn():
    return v1.data.Dataset.from_tensors([1.0, 1.0]).repeat()

def train(config=None):
    estimator = v1.estimator.Estimator(model_fn, config=config)
    train_spec = v1.estimator.TrainSpec(input_fn, max_steps=2)
    v1.estimator.train_and_evaluate(
        estimator, train_spec, v1.estimator.EvalSpec(input_fn, steps=1, throttle_secs=0)
    )
    assert abs(estimator.get_variable_value('w') - 0.36) < 1e-6
"""

# There is no advice against Estimators, and there is what TensorFlow says else.
ADVICE = """
import io, logging
said = io.StringIO()
tf.get_logger().addHandler(logging.StreamHandler(said))
tf_estimator.estimator.RunConfig()
tf.compat.v1.train.StopAtStepHook(1)
assert not said.getvalue(), said.getvalue()
tf.compat.v1.to_float(1)
assert 'Use `tf.cast` instead.' in said.getvalue()
"""


def run(script, before='', after='', **environment):
    """Runs a script in a new Python process, in which Keras has not been chosen."""
    variables = {k: v for k, v in os.environ.items() if k != 'TF_USE_LEGACY_KERAS'}
    variables.update(environment, CUDA_VISIBLE_DEVICES='-1', TF_CPP_MIN_LOG_LEVEL='2')
    variables['PYTHONPATH'] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, '-c', before + textwrap.dedent(script) + after]
    done = subprocess.run(command, env=variables, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-5000:]


def test_versions():
    for version in ('2.15.0', '2.16.0rc0', '2.21.3', '2.21.0-dev20260101'):
        tf_estimator.check_tensorflow(version)
    for version in ('1.15.5', '2.2.0', '2.14.1', '2.22.0', '2.22.0-dev2026', '3.0.0', 'unknown'):
        told = rf'2\.15 to 2\.21, .* {version}\. .*pip install "tensorflow>=2\.15,<2\.22"'
        with pytest.raises(ImportError, match=told):
            tf_estimator.check_tensorflow(version)


@pytest.mark.parametrize('given', [1.5, [1.5, 2.5]], ids=['scalar', 'array'])
def test_values_are_logged(given, caplog):
    """Of any type: a loss of bfloat16 is, as training ends."""
    value = np.array(given, tf.bfloat16.as_numpy_dtype)[()]
    tf.compat.v1.logging.info('Loss for final step: %s.', value)
    assert f'Loss for final step: {value}.' in caplog.text


def test_advice_against_estimators_is_not_logged(caplog):
    advice = 'From %s: Estimator (from %s) is deprecated.\nInstructions for updating:\n%s'
    tf.compat.v1.logging.warning(advice, 'train.py', 'estimator', 'Use tf.keras instead.')
    tf.compat.v1.logging.warning('%s is not there.', 'train.py')
    assert [record.getMessage() for record in caplog.records] == ['train.py is not there.']


KERAS_3 = [
    '`dense` is not available with Keras 3.',
    "module 'keras._tf_keras.keras.layers' has no attribute 'DenseFeatures'",
    'Keras cannot be imported. Check that it is installed.',
    "No module named 'tensorflow.compat.v1.keras'",
    "cannot import name 'dense' from 'tensorflow.compat.v1.layers' "
    '(/tensorflow/_api/v2/compat/v1/layers/__init__.py)',
]


def test_legacy_keras_remedy(monkeypatch):
    monkeypatch.setenv('TF_USE_LEGACY_KERAS', '0')
    for message in KERAS_3:
        remedy = tf_estimator.legacy_keras_remedy(AttributeError(message))
        assert f'pip install "tf-keras~=2.{tf.__version__.split(".")[1]}.0"' in remedy
        assert remedy.endswith('TF_USE_LEGACY_KERAS has to be 1 or unset, and is 0.')
    error = ValueError('Input 0 of layer "dense" is incompatible with the layer')
    assert tf_estimator.legacy_keras_remedy(error) is None


@only_215
def test_touches_nothing_on_215():
    run(
        """
        import os, sys
        import tensorflow as tf

        def state():
            modules = {n: m for n, m in sys.modules.items() if n.startswith('tensorflow')}
            namespaces = tf, tf.compat.v1, tf.compat.v2
            return modules, dict(os.environ), [dict(vars(space)) for space in namespaces]

        before = state()
        from estimator_mgpu.tf_internals import tf_estimator
        assert tf_estimator.estimator is before[2][1]['estimator']
        after = state()
        assert before[0].keys() <= after[0].keys()  # what is imported lazily may be, now
        assert all(after[0][name] is module for name, module in before[0].items())
        assert before[1] == after[1]
        for old, new in zip(before[2], after[2]):
            assert old.keys() <= new.keys()
            for name, value in old.items():  # what was loaded lazily is the module itself, now
                assert new[name] is value or 'LazyLoader' in type(value).__name__, name
        """,
        after=ADVICE,
    )


@only_216_on
def test_estimator_and_keras_2():
    run(
        """
        import os
        import tensorflow as tf
        early = tf.compat.v1, tf.compat.v2

        from estimator_mgpu.tf_internals import tf_estimator
        import tensorflow.compat.v1 as v1
        from tensorflow.compat.v1 import estimator
        from tensorflow.estimator import Estimator
        from tensorflow.estimator.export import ServingInputReceiver

        for space in early[0], tf.compat.v1, v1, tf.compat.v1.compat.v1:
            assert space.estimator is estimator is tf_estimator.estimator
        for space in tf, early[1], tf.compat.v2:
            assert space.estimator.Estimator is Estimator
        assert Estimator is not estimator.Estimator

        assert os.environ['TF_USE_LEGACY_KERAS'] == '1'
        from tensorflow.keras.layers import Dense
        from tensorflow.compat.v1.layers import dense
        assert Dense is tf.keras.layers.Dense and Dense.__module__.startswith('tf_keras.')
        with tf.Graph().as_default():
            x = v1.placeholder(tf.float32, [None, 3])
            for layer in early[0].layers.dense, v1.layers.dense, dense:
                assert layer(x, 2).shape.as_list() == [None, 2]
        """,
        after=ADVICE,
    )


@only_216_on
def test_without_tf_keras():
    run(
        """
        import json, os, sys
        sys.modules['tf_keras'] = None  # As if it were not installed.
        import tensorflow as tf
        from estimator_mgpu.tf_internals import tf_estimator
        from tensorflow.python.distribute import estimator_training
        from tensorflow.python.tpu import session_support, tpu_embedding, tpu_embedding_gradient

        def error_of(function, *args, **kwargs):
            try:
                function(*args, **kwargs)
            except Exception as error:
                return error
            raise AssertionError('no error')

        assert 'TF_USE_LEGACY_KERAS' not in os.environ
        assert tf.keras.__version__.startswith('3.')
        train()
        for name in 'dense', 'Dense', 'batch_normalization':
            error = error_of(lambda: getattr(v1.layers, name))
            assert 'pip install "tf-keras~=' in tf_estimator.legacy_keras_remedy(error), error

        for module, name in [
            (estimator_training, 'estimator_evaluate'),
            (session_support, 'GracefulShutdownHook'),
            (tpu_embedding, 'AdagradParameters'),
            (tpu_embedding_gradient, 'create_dummy_table_variables'),
        ]:
            error = error_of(getattr(module, name), 0.1, clip=True)
            assert isinstance(error, NotImplementedError)
            assert f'{module.__name__}.{name} was removed from TensorFlow 2.16.' in str(error)
        assert not hasattr(tpu_embedding, '__path__')

        strategy = tf.distribute.MirroredStrategy(['/cpu:0'])
        train(v1.estimator.RunConfig(train_distribute=strategy, eval_distribute=strategy))
        cluster, task = {'worker': ['a:1', 'b:1']}, {'type': 'worker', 'index': 0}
        os.environ['TF_CONFIG'] = json.dumps({'cluster': cluster, 'task': task})
        error = error_of(v1.estimator.RunConfig, train_distribute=strategy)
        assert 'use estimator_mgpu.replicate' in str(error), error
        """,
        before=MODEL,
    )


@only_216_on
def test_leaves_what_others_chose():
    run(
        """
        import os
        import tensorflow as tf
        tf.estimator = 'of somebody else'
        from estimator_mgpu.tf_internals import tf_estimator
        assert os.environ['TF_USE_LEGACY_KERAS'] == '0'
        assert tf.keras.__version__.startswith('3.')
        assert tf.estimator == 'of somebody else'
        train()
        """,
        before=MODEL,
        TF_USE_LEGACY_KERAS='0',
        PYTHONWARNINGS='error::UserWarning',  # No warning comes that a user couldn't mend.
    )


@only_216_on
def test_keras_in_use_and_no_tensorflow_estimator():
    run(
        """
        import os, sys
        import tensorflow as tf
        tf.keras.layers
        sys.modules['tensorflow_estimator'] = None  # As if it were not installed.
        try:
            from estimator_mgpu.tf_internals import tf_estimator
        except ImportError as error:
            assert 'pip install "tensorflow-estimator==2.15.0"' in str(error), error
        else:
            raise AssertionError('no error')
        assert 'TF_USE_LEGACY_KERAS' not in os.environ
        """
    )
