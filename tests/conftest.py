"""What all tests share."""

import pytest
import tensorflow.compat.v1 as tf
from absl import logging


@pytest.fixture(params=['v2', 'v1'])
def behavior(request):
    """TensorFlow 2's loops, variables and shapes, or those of `tf.disable_v2_behavior()`."""
    if request.param == 'v2':
        yield request.param
        return
    tf.disable_control_flow_v2()
    tf.disable_resource_variables()
    tf.disable_v2_tensorshape()
    yield request.param
    tf.enable_control_flow_v2()
    tf.enable_resource_variables()
    tf.enable_v2_tensorshape()


@pytest.fixture(autouse=True)
def quiet():
    """Python's logging in tests: absl's lines, so that caplog has them."""
    logging.set_verbosity(logging.INFO)
    yield
