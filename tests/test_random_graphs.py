"""Random model_fns train, evaluate and predict on several devices as on one, in float64."""

import re

import hypothesis
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import random_graphs
import towers
from estimator_mgpu import steps
from random_graphs import EVEN, OPS, SIMPLE, Case

MODES = tf.estimator.ModeKeys
RTOL = 1e-10
FLOOR = 1e-3  # What is smaller may be rounding of what isn't.

# Each TensorFlow has other gradients of these.
BY_VERSION = """
    clipped_by_row_in_a_loop embedded_parts embedded_sparse pieces_by_variable third_derivatives
"""
LOOPS = """
    clipped_by_row_in_a_loop cond cond_by_rows_in_a_loop_in_a_cond cond_in_a_loop cond_of_several
    cond_on_placeholders dynamic_rnn embedded_in_a_loop function_in_a_loop function_of_autograph
    function_of_sizes hessian large_zeros loop_with_effects loop_with_rows_summed map_fn
    nested_loops pairs_first read_then_written recurrent recurrent_arrays recurrent_lengths scan
    shape_in_a_loop size_in_a_loop sizes_in_a_loop switch_case while_any while_counted while_loop
    while_whole written_rows
"""
# What runs once, by its type, and in which models of one op.
WHOLE = {
    'AddV2': 'python_row',
    'Assert': 'asserted',
    'AssignAddVariableOp': 'loop_with_effects',
    'CTCBeamSearchDecoder': 'decoded',
    'ConcatV2': 'masked_centered',
    'Cumsum': 'cumsum_rows long ragged_dense while_whole',
    'DenseBincount': 'class_weights',
    'EagerPyFunc': 'python_dense python_repeated python_row python_rows',
    'Einsum': 'diagonals',
    'GatherV2': 'clipped_by_row',
    'Greater': 'cond_by_rows_in_a_loop_in_a_cond function_of_autograph while_rows',
    'MatrixDiagPartV3': 'diagonal',
    'Mul': 'masked_twice python_rows',
    'PyFunc': 'numpy_function python_unknown',
    'RandomShuffle': 'shuffled',
    'Reshape': (
        'clipped_by_row groups interleaved pairs_first pairs_with_left ragged_dense taped '
        'unique_dense variables'
    ),
    'Roll': 'roll_rows',
    'ScatterNd': 'masked_dense without_all without_padding',
    'Softmax': 'batch_softmax',
    'StridedSlice': (
        'checkpointed first_row halves last_row masked_images masked_twice python_repeated '
        'while_counted written_rows'
    ),
    'StringSplitV2': 'padded_words reduced_words',
    'Sum': 'padded_words pairs_first python_row reduced_words',
    'TanhGrad': 'masked_centered',
    'TensorArrayV2Write': 'hessian',
    'TensorListFromTensor': 'map_fn scan',
    'TopKV2': 'hardest quantile ranked sort_rows',
    'Transpose': 'clipped_by_row',
    'Unique': 'embedded embedded_mean keras_lstm table_lookup unique_dense',
    'Where': (
        'masked masked_centered masked_dense masked_images masked_twice pairs_with_left '
        'ragged_dense without_all without_padding'
    ),
    'in it, mul needs a sum over all rows': 'loop_with_rows_summed',
    'its lists are used whole': 'embedded_in_a_loop nested_loops pairs_first',
    'rows say when it ends': 'while_any',
}
# What else does where the graph doesn't know how many rows there are, or where it does.
UNKNOWN = {
    'AddN': 'pairs_first',
    'AddV2': 'by_index pairs_first while_whole',
    'BroadcastTo': 'repeated_dense',
    'Cast': 'size_in_a_loop',
    'MatMul': 'cond_of_several',
    'OptionalFromValue': 'cond_in_a_loop',
    'PartitionedCall': 'function_of_sizes',
    'Shape': 'sizes_in_a_loop',
    'Squeeze': 'expanded',
    'Sum': 'embedded_in_a_loop ragged_dense repeated_dense unique_dense variables',
    'TensorScatterAdd': 'scattered_column',
    'UnsortedSegmentSum': 'clipped_by_row taped',
    'cond:2 is a size that goes by rows': 'cond_of_several',
}
KNOWN = {
    'AddN': 'cond_of_several',
    'Roll': 'function_of_sizes',
    'SelectV2': 'cond_by_rows_in_a_loop_in_a_cond',
    'StridedSlice': 'quantile',
    'Sum': 'python_rows written_rows',
    'TanhGrad': 'nested_loops',
    'UnsortedSegmentSum': 'unique_dense',
    'Where': 'repeated_dense',
    'zeros:0 has rows, or sums, in some branches only': 'embedded_in_a_loop',
}


def check(case, modes=(MODES.EVAL, MODES.PREDICT)):
    """Compares several devices with one, from the same values; returns the training on several."""
    with towers.behavior_of(case.behavior):
        return _check(case, modes)


def _check(case, modes):
    model_fn = random_graphs.model_fn_of(case)
    batches = random_graphs.batches_of(case)
    shared = {'static': case.static, 'epochs': case.epochs}
    try:
        one = towers.train(model_fn, batches, 0, **shared)
    except tf.errors.UnknownError as error:
        assert 'pyfunc' in str(error)
        return None  # TensorFlow differentiates a Python function once, and this has two losses.
    if not all(np.isfinite(v).all() for v in one.values.values()):
        return None  # One device diverges.
    ours = towers.train(model_fn, batches, case.towers, values=one.start, **shared)
    exact = {'rtol': RTOL, 'floor': FLOOR}
    towers.assert_close([ours.values, ours.losses], [one.values, one.losses], **exact)
    for mode in modes:
        shared.update(values=one.values, mode=mode)
        data = [(x, y if mode == MODES.EVAL else None) for x, y in batches]
        found, expected = (towers.evaluate(model_fn, data, n, **shared) for n in (case.towers, 0))
        towers.assert_close(found, expected, **exact)
    return ours


@pytest.mark.core
@hypothesis.given(random_graphs.cases)
def test_random_model(case):
    check(case)


def case_of(name, sizes, static, loss='mean', **more):
    return Case(
        [name, 'dense'], [loss], ['momentum'], 'none', ['mean'], sizes, static, 3, 1, **more
    )


def check_each(name, sizes, static=False, modes=(MODES.EVAL,), **more):
    """Compares a model of one op; returns how it's divided."""
    ours = check(case_of(name, sizes, static, **more), modes)
    assert ours is not None
    return plan_of(ours)


def plan_of(run):
    return steps.of_graph(run.graph).plan


def assert_whole(plan, name, more):
    """Asserts what runs once, though it's given rows; all else runs in towers."""
    reasons = [reason.rpartition(': ')[2] for reason, _ in plan.once.values()]
    types = [re.search(r'[A-Z]\w+', reason) for reason in reasons]
    found = {found[0] if found else reason for found, reason in zip(types, reasons)}
    if name not in BY_VERSION.split():
        expected = {t for table in (WHOLE, more) for t in table if name in table[t].split()}
        assert found - {'Sub'} == expected  # The loss's, whose rows aren't known to be the batch's.


@pytest.mark.parametrize('name', sorted(OPS | EVEN))
def test_each_op(name):
    """On batches of another size each."""
    plan = check_each(name, [12, 6, 2] if name in EVEN else [7, 2, 1])
    assert_whole(plan, name, UNKNOWN)


@pytest.mark.parametrize('name', sorted(OPS | EVEN))
def test_each_op_where_rows_are_known(name):
    """Numbers are compared where functions have sizes of their own."""
    if name in LOOPS.split():
        plan = check_each(name, [7, 7], static=True, modes=())
    else:
        case = case_of(name, [12 if name in EVEN else 7], static=True)
        model_fn, batches = random_graphs.model_fn_of(case), random_graphs.batches_of(case)
        plan = plan_of(towers.train(model_fn, batches, 3, steps=0))
    assert_whole(plan, name, KNOWN)


@pytest.mark.parametrize('name', sorted((OPS | EVEN).keys() - SIMPLE))
def test_each_op_in_v1(name):
    """By TensorFlow 1's behavior, those with variables, loops or gradients."""
    check_each(name, [12, 12], static=True, modes=(), behavior='v1')


# What is written in the forward pass, or by what no example reaches.
WRITING = """
    averages_in_a_branch counted embedded_apart functions_with_effects loop_with_effects
    moving_mean regularized_apart spectral_norm statistics_multiplied
"""


@pytest.mark.parametrize('name', WRITING.split())
def test_what_writes_to_the_end_of_the_data(name, behavior):
    """On batches of 6, 6 and 2 rows, twice."""
    check_each(name, [6, 6, 2], epochs=2, behavior=behavior)


def test_what_writes_in_a_loop_on_one_device():
    """The loop's rows come from the batch, what it counts doesn't."""
    check(case_of('loop_with_effects', [6], True, epochs=2)._replace(towers=1))


@pytest.mark.parametrize('name', ['row_norm', 'embedded', 'dynamic_rnn'])
def test_a_batch_without_rows(name):
    """Between others. A mean of nothing is nan on one device, too, so it's a sum here."""
    check_each(name, [5, 0, 2], loss='sum', modes=(MODES.EVAL, MODES.PREDICT))
