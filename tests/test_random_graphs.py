"""Random model_fns train, evaluate and predict on several devices as on one, in float64."""

import hypothesis
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import random_graphs
import towers
from estimator_mgpu import steps
from random_graphs import (
    EVEN,
    OPS,
    PRODUCTS_OF_PARTS,
    RESHAPED_PRODUCTS,
    SHARDED,
    SHARDED_TYPES,
    SIMPLE,
    Case,
)

MODES = tf.estimator.ModeKeys
RTOL = 1e-10
FLOOR = 1e-3  # What is smaller may be rounding of what isn't.

# Models with sizes inside loops, branches and functions: their numbers are compared as well where
# the graph knows how many examples a batch has.
LOOPS = """
    across_in_a_branch blocks_in_a_loop clipped_by_row_in_a_loop cond
    cond_by_rows_in_a_loop_in_a_cond cond_in_a_loop cond_of_blocks cond_of_several
    cond_on_placeholders drawn_in_branches dynamic_rnn embedded_in_a_loop function_in_a_loop
    function_of_autograph function_of_sizes hessian imported large_zeros loop_with_effects
    loop_with_rows_summed loops_in_branches map_fn mapped_apart nested_loops pairs_first
    read_then_written recurrent recurrent_arrays recurrent_lengths scan shape_in_a_loop
    size_in_a_loop sizes_in_a_loop switch_case switch_case_across trained_in_a_loop two_sequences
    while_any while_counted while_loop while_whole written_rows
"""

# An op of these types is worth sharding in any model.
PRODUCTS = {
    'BatchMatMulV2',
    'Conv2D',
    'Conv2DBackpropFilter',
    'Conv2DBackpropInput',
    'MatMul',
}


def check(case, modes=(MODES.EVAL, MODES.PREDICT)):
    """Compares several devices with one, from the same values; returns the training on several.

    All of TensorFlow's graph optimizers run in training: they rely on the shapes and the order that
    the towers' ops claim to have.
    """
    with towers.behavior_of(case.behavior):
        return _check(case, modes)


def _check(case, modes):
    model_fn = random_graphs.model_fn_of(case)
    batches = random_graphs.batches_of(case)
    shared = {'static': case.static, 'epochs': case.epochs}
    trained = {'optimized': True, **shared}
    try:
        one = towers.train(model_fn, batches, 0, **trained)
    except tf.errors.UnknownError as error:
        assert 'pyfunc' in str(error)
        return None  # TensorFlow differentiates a Python function once, and this has two losses.
    if not all(np.isfinite(v).all() for v in one.values.values()):
        return None  # One device diverges.
    if not one.values['global_step']:
        assert case.behavior == 'v1' and 'updates_first' in case.beside
        return None  # Gradients of TensorFlow 1's loops don't end if they wait for a tensor.
    ours = towers.train(model_fn, batches, case.towers, values=one.start, **trained)
    exact = {'rtol': RTOL, 'floor': FLOOR}
    towers.assert_close([ours.values, ours.losses], [one.values, one.losses], **exact)
    for mode in modes:
        shared.update(values=one.values, mode=mode)
        data = [(x, y if mode == MODES.EVAL else None) for x, y in batches]
        found, expected = (towers.evaluate(model_fn, data, n, **shared) for n in (case.towers, 0))
        towers.assert_close(found, expected, **exact)
    return ours


def case_of(name, sizes, static, loss='mean', **more):
    return Case(
        [name, 'dense'], [loss], ['momentum'], 'none', ['mean'], sizes, static, 3, 1, **more
    )


# A loop in a branch: the branch isn't taken.
IDLE_LOOP = Case(
    ops=['keras_lstm', 'masked_centered'],
    losses=['cross_entropy'],
    optimizers=['rmsprop'],
    clip='none',
    metrics=[],
    sizes=[2, 2],
    static=False,
    towers=3,
    seed=21,
    behavior='v1',
)


@pytest.mark.no_cover
@pytest.mark.core
@hypothesis.example(IDLE_LOOP)
@hypothesis.given(random_graphs.cases)
def test_random_model(case):
    check(case)


def check_each(name, sizes, static=False, modes=(MODES.EVAL,), **more):
    """Compares a model of one op; returns the training on several devices."""
    run = check(case_of(name, sizes, static, **more), modes)
    assert run is not None, 'TensorFlow itself cannot train this model.'
    return run


def assert_sharded(graph, name, static):
    """Asserts what the model says of its ops, and that products run on every device."""
    plan = steps.of_graph(graph).plan
    unsharded = {}
    for op_name, (reason, _) in plan.once.items():
        op_type = graph.get_operation_by_name(op_name).type
        # The loss subtracts the labels, whose examples aren't known to be those of the output.
        if op_type != 'Sub' and 'this Sub' not in reason:
            unsharded.setdefault(op_type, []).append(f'{op_name}: {reason}')

    for op_type, reasons in unsharded.items():
        assert name not in SHARDED, reasons
        if name not in (PRODUCTS_OF_PARTS if static else RESHAPED_PRODUCTS):
            assert op_type not in PRODUCTS, reasons

    sharded = {graph.get_operation_by_name(op_name).type for op_name in plan.ops}
    op_type, always = SHARDED_TYPES.get(name, (None, False))
    if op_type and (always or static):
        assert sharded & {op_type, f'Stateless{op_type}', f'Stateful{op_type}'}, unsharded


@pytest.mark.parametrize('name', sorted(OPS | EVEN))
def test_each_op(name):
    """On batches of another size each. Evaluation has no more of a simple model than training."""
    modes = () if name in SIMPLE else (MODES.EVAL,)
    run = check_each(name, [12, 6, 2] if name in EVEN else [7, 2, 1], modes=modes)
    assert_sharded(run.graph, name, static=False)


@pytest.mark.parametrize('name', sorted(OPS | EVEN))
def test_each_op_where_the_batch_size_is_known(name):
    """Only models with sizes inside loops, branches and functions are run; graphs show the rest."""
    if name in LOOPS.split():
        graph = check_each(name, [7, 7], static=True, modes=()).graph
    else:
        case = case_of(name, [12 if name in EVEN else 7], static=True)
        model_fn = random_graphs.model_fn_of(case)
        graph = towers.graph_of(model_fn, random_graphs.batches_of(case), case.towers)
    assert_sharded(graph, name, static=True)


@pytest.mark.no_cover
@pytest.mark.parametrize('name', sorted((OPS | EVEN).keys() - SIMPLE))
def test_each_op_in_v1(name):
    """By TensorFlow 1's behavior, those with variables, loops or gradients."""
    check_each(name, [12, 12], static=True, modes=(), behavior='v1')


# What is written in the forward pass, or by what no example reaches.
WRITING = """
    averages_in_a_branch counted embedded_apart functions_with_effects loop_with_effects
    moving_mean regularized_apart spectral_norm statistics_multiplied
"""


@pytest.mark.no_cover
@pytest.mark.parametrize('name', WRITING.split())
def test_what_writes_to_the_end_of_the_data(name, behavior):
    """On batches of 6, 6 and 2 rows, twice."""
    check_each(name, [6, 6, 2], epochs=2, behavior=behavior)


def test_what_writes_in_a_loop_on_one_device():
    """The loop's rows come from the batch, what it counts doesn't."""
    check(case_of('loop_with_effects', [6], True, epochs=2)._replace(towers=1))


@pytest.mark.no_cover
@pytest.mark.parametrize('name', ['row_norm', 'embedded', 'dynamic_rnn'])
def test_a_batch_without_rows(name):
    """Between others. A mean of nothing is nan on one device, too, so it's a sum here."""
    check_each(name, [5, 0, 2], loss='sum', modes=(MODES.EVAL, MODES.PREDICT))
