"""TensorLists and Optionals: which ops on them run on every device, with one device's results."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from estimator_mgpu import check_rule
from estimator_mgpu.partition.placements import REPLICATE, SizeList
from estimator_mgpu.partition.rules import lists
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import RowSpace, Size

ROWS = np.random.RandomState(0).randn(7, 3).astype(np.float32)
ops = tf.raw_ops
VECTORS = {'element_shape': [-1], 'element_dtype': tf.float32}


def of_columns(x):
    """A list with an element for each column, which has an entry for each example."""
    return ops.TensorListFromTensor(tensor=tf.transpose(x), element_shape=[-1])


def of_examples(x):
    """A list with an element for each example."""
    return ops.TensorListFromTensor(tensor=x, element_shape=[3])


def first_of(elements):
    return ops.TensorListGetItem(input_handle=elements, index=0, **VECTORS)


def two_values(x):
    """An Optional of two values, and the second one of them."""
    optional = ops.OptionalFromValue(components=[x, 2 * x])
    values = ops.OptionalGetValue(
        optional=optional, output_types=[tf.float32] * 2, output_shapes=[[None, 3]] * 2
    )
    return values[1]


def beside_a_list(x):
    """The examples, given on together with an empty list."""
    empty = ops.EmptyTensorList(element_shape=-1, max_num_elements=3, element_dtype=tf.float32)
    return ops.IdentityN(input=[x, empty])[0]


def popped(elements):
    return ops.TensorListPopBack(input_handle=elements, **VECTORS)[1]


SHARDED = {
    'TensorListGetItem': lambda x: first_of(of_columns(x)),
    'TensorListStack': lambda x: ops.TensorListStack(input_handle=of_columns(x), **VECTORS),
    'TensorListLength': lambda x: ops.TensorListLength(input_handle=of_columns(x)),
    'TensorListResize': lambda x: first_of(
        ops.TensorListResize(input_handle=of_columns(x), size=5)
    ),
    'TensorListSetItem': lambda x: first_of(
        ops.TensorListSetItem(input_handle=of_columns(x), index=0, item=tf.exp(x[:, 0]))
    ),
}
ONCE = {
    'TensorListFromTensor': lambda x: first_of(of_examples(x)),
    'TensorListGather': lambda x: ops.TensorListGather(
        input_handle=of_columns(x), indices=[2, 0], **VECTORS
    ),
    'TensorListConcatV2': lambda x: ops.TensorListConcatV2(
        input_handle=of_columns(x), leading_dims=tf.zeros([0], tf.int64), **VECTORS
    )[0],
    'AddN': lambda x: first_of(ops.AddN(inputs=[of_columns(x), of_columns(tf.sort(x, 0))])),
    'OptionalFromValue': two_values,
    'TensorListPushBack': lambda x: popped(
        ops.TensorListPushBack(input_handle=of_columns(tf.ones([2, 2])), tensor=x[:, 0])
    ),
    'IdentityN': beside_a_list,
}


@pytest.mark.parametrize('op_type', [*SHARDED, *ONCE])
def test_list(op_type):
    sharded = check_rule({**SHARDED, **ONCE}[op_type], ROWS)
    assert (op_type in sharded) == (op_type in SHARDED)


def test_a_list_of_sizes():
    """Only if they depend on the number of examples; a list of others is the same on all towers."""
    batch = RowSpace('batch', None)
    dims = [batch.size, Size(3), Size(5)]
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None, 3, 5])
        sizes = Sizes()
        sizes.set_dims(x, dims)
        shape = tf.shape(x)
        assert lists.list_with(shape[:1], REPLICATE, batch, sizes) == SizeList((dims[0],))
        assert lists.list_with(shape[1:], REPLICATE, batch, sizes) is None


def size_of(x):
    return ops.Shape(input=x)[0]


def sizes_in_a_loop(x):
    """The examples, and an array of how many there are, once for each of three steps."""
    body = lambda i, net, sizes: (i + 1, tf.tanh(net), sizes.write(i, size_of(net)))  # noqa: E731
    _, net, sizes = tf.while_loop(lambda i, *_: i < 3, body, [0, x, tf.TensorArray(tf.int32, 3)])
    return net, sizes


def times(x, size):
    return x * tf.cast(size, tf.float32)


def one_size(x):
    net, sizes = sizes_in_a_loop(x)
    return times(net, sizes.read(1))


def sum_of_sizes(x):
    net, sizes = sizes_in_a_loop(x)
    return times(net, tf.reduce_sum(sizes.stack()))


def sums_of_sizes_in_a_loop(x):
    def body(i, net):
        sizes = tf.TensorArray(tf.int32, 2).write(0, size_of(net)).write(1, size_of(net))
        return i + 1, times(tf.tanh(net), tf.reduce_sum(sizes.stack()))

    return tf.while_loop(lambda i, _: i < 3, body, [0, x])[1]


def beside(x, value, other):
    """In each step, an array has two elements, of which the first one is taken out."""

    def body(i, net):
        elements = tf.TensorArray(value.dtype, 2).write(0, value).write(1, other(net))
        return i + 1, times(tf.tanh(net), elements.read(0))

    return tf.while_loop(lambda i, _: i < 3, body, [0, x])[1]


def number_beside_a_size(x):
    return beside(x, tf.constant(3), size_of)


def all_beside_examples(x):
    return beside(x, tf.sort(x, axis=0), tf.exp)


def popped_size(x):
    """Of a list that a loop makes."""
    scalars = {'element_shape': tf.zeros([0], tf.int32), 'element_dtype': tf.int32}
    empty = ops.EmptyTensorList(max_num_elements=-1, **scalars)

    def body(i, sizes):
        return i + 1, ops.TensorListPushBack(input_handle=sizes, tensor=size_of(tf.tanh(x)))

    _, sizes = tf.while_loop(lambda i, _: i < 3, body, [0, empty])
    size = ops.TensorListPopBack(input_handle=sizes, **scalars)[1]
    return times(x, tf.ensure_shape(size, []))


def optional_size(x):
    """What a branch returns."""
    choice = tf.placeholder_with_default(True, [])
    with_size = lambda y: (y, ops.OptionalFromValue(components=[size_of(y)]))  # noqa: E731
    net, optional = tf.cond(choice, lambda: with_size(tf.tanh(x)), lambda: with_size(tf.exp(x)))
    [size] = ops.OptionalGetValue(optional=optional, output_types=[tf.int32], output_shapes=[[]])
    return times(net, size)


def test_what_is_taken_out_of_a_list(behavior):
    """Sizes are those of the global batch, and what was put in full is taken out in full."""
    programs = [one_size, sum_of_sizes, sums_of_sizes_in_a_loop, popped_size, optional_size]
    programs += [number_beside_a_size, all_beside_examples]
    towers.compare_outputs(programs, [ROWS, ROWS[:2]], 3, static=False)
