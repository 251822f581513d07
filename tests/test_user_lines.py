"""Added ops say where the user's program made those that they serve; so do errors."""

import functools
import io
import site
import sys
import traceback

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.errors import step_errors, user_lines
from estimator_mgpu.partition.rules import RULES
from estimator_mgpu.tf_internals import private
from estimator_mgpu.tf_internals.tracebacks import Tracebacks
from models import batches, floats, sgd, spec_of, weights
from towers import MODES, NAMES, TRAIN, tower_of

pytestmark = pytest.mark.core


@tf.function
def in_function(net):
    return tf.nn.softplus(net)  # here


FUNCTION_LINE = in_function.python_function.__code__.co_firstlineno + 2


def of_all_kinds(features, labels, mode):
    """Its graph is rewritten, shards, gathers, and has a loop."""
    net = in_function(tf.matmul(features, weights('w', 3, 4)))
    net = tf.layers.batch_normalization(net[:, None, None, :], training=True, fused=True)[:, 0, 0]
    net = tf.nn.dropout(net, rate=0.1) + tf.sort(net, 0)
    longest = tf.while_loop(lambda i: i < 3, lambda i: i + 1, [0])
    joint = tf.while_loop(lambda x: ~tf.reduce_all(x > 1), lambda x: x + tf.exp(x), [net])
    net = net * tf.cast(longest, tf.float32) + joint + tf.reduce_mean(net, 0)
    loss = tf.reduce_mean(tf.square(tf.reduce_sum(net, 1) - labels[:, 0]))
    likes = tf.reduce_sum(tf.ones_like(net)) + tf.reduce_sum(tf.norm(net, axis=1))
    return spec_of(mode, loss + likes, sgd(loss))


def graph_of(model_fn, static=True, devices=2, **options):
    """The graph of a model_fn on several devices."""
    with tf.Graph().as_default() as graph:
        tf.train.get_or_create_global_step()
        features, labels = floats(8, 3), floats(8, 1)
        if static:
            inputs = tf.constant(features), tf.constant(labels)
        else:
            inputs = tf.placeholder(tf.float32, [None, 3]), tf.placeholder(tf.float32, [None, 1])
        estimator_mgpu.replicate(model_fn, devices=devices, **options)(*inputs, TRAIN)
        return graph


def added_with_places(graph):
    """The ops that were added; each is for one of the program's lines."""
    ops = graph.get_operations()
    # As tfdbg and the profiler read them.
    for op in ops:
        for filename, line_number, function, _ in op.traceback:
            assert filename and line_number > 0 and function, op.name

    added = [op for op in ops if NAMES.is_added(op.name)]
    assert [op.name for op in added if place_of(op) is None] == []
    return added


def test_all_ops_have_tracebacks(behavior):
    graph = graph_of(of_all_kinds, static=behavior == 'v1')
    added = added_with_places(graph)
    assert {op.type for op in added} >= {'AddN', 'ConcatV2', 'StridedSlice'}

    copies = [op for op in added if tower_of(op.name) == 1]
    assert len(copies) > 25
    for copy in copies:
        original = graph.get_operation_by_name(NAMES.copy_of(copy.name).op_name)
        assert place_of(copy) == place_of(original), copy.name

    inlined = [op for op in graph.get_operations() if op.type == 'Softplus']
    assert len(inlined) == 1 + 2
    assert {place_of(op) for op in inlined} == {(__file__, FUNCTION_LINE)}


def test_gates_have_tracebacks(behavior):
    added = added_with_places(graph_of(checked, microbatches=2))
    assert any(op.name.endswith('/gate_1') for op in added)


def place_of(op):
    """The file and the line that made an op."""
    frame = user_lines.frame_of(op)
    return frame and (frame.filename, frame.lineno)


def doubled(features, labels, mode):
    net = tf.multiply(features, 2.0, name='double')  # here
    loss = tf.losses.mean_squared_error(labels, tf.matmul(net, weights('w', 1, 1)))
    return spec_of(mode, loss, sgd(loss))


def test_tensorflows_debugger(tmp_path, monkeypatch, capsys):
    """Its user types commands: before a step it's run, then its tensors are looked at."""
    debug = pytest.importorskip('tensorflow.python.debug')
    copy = NAMES.copy('double', 1)
    commands = ['run', f'node_info -t {copy}', f'print_tensor {copy}:0', 'run -t 9', '']
    monkeypatch.setattr(sys, 'stdin', io.StringIO('\n'.join(commands)))
    hook = debug.LocalCLIDebugHook(dump_root=str(tmp_path / 'dump'))

    batch = np.float32([[1], [2], [3], [4]])
    estimator = estimator_mgpu.Estimator(doubled, str(tmp_path / 'model'), devices=2)
    estimator.train(lambda: tf.data.Dataset.from_tensors((batch, batch)).repeat(2), [hook])

    _, first_step, of_node, of_tensor, _ = capsys.readouterr().out.split('tfdbg> ')
    assert f'{NAMES.copy("double", 0)}:0' in first_step and f'{copy}:0' in first_step
    last_frame = of_node[of_node.rindex(f': {__file__}') :]
    line = str(doubled.__code__.co_firstlineno + 1)
    assert last_frame.split()[2:6] == ['Line:', line, 'Function:', 'doubled']
    assert 'array([[6.],\n       [8.]], dtype=float32)' in of_tensor
    assert estimator.get_variable_value('global_step') == 2


def test_an_imported_op_has_none(behavior):
    """Then the ops that serve it have the line that divides the graph."""

    def model_fn(features, labels, mode):
        with tf.Graph().as_default() as graph:
            tf.nn.tanh(tf.placeholder(tf.float32, [None, 3], 'x'), name='y')
        [net] = tf.import_graph_def(graph.as_graph_def(), {'x': features}, ['y:0'], name='in')
        loss = tf.reduce_mean(tf.square(tf.matmul(net, weights('w', 3, 1)) - labels))
        return spec_of(mode, loss, sgd(loss))

    graph = graph_of(model_fn)
    assert graph.get_operation_by_name('in/y').traceback is None
    copy = graph.get_operation_by_name(NAMES.copy('in/y', 1))
    assert len(copy.traceback) > 0 and user_lines.frame_of(copy) is None


def test_an_op_with_nothing_but_the_lines_of_the_user():
    """TensorFlow then takes none of them for the user's."""
    with tf.Graph().as_default():
        one, two = tf.constant(1).op, tf.constant(2).op
    private.set_traceback(two, one.traceback.get_user_frames())
    assert len(two.traceback.get_user_frames()) == 0
    assert list(Tracebacks().of(two)) == list(two.traceback) == list(Tracebacks().of(one))


def test_wherever_tensorflow_is_installed(monkeypatch):
    """Its packages need not be where Python looks for installed ones."""
    monkeypatch.setattr(site, 'getsitepackages', list)
    monkeypatch.setattr(site, 'getusersitepackages', lambda: '/nowhere')
    with tf.Graph().as_default():
        made = tf.layers.dense(tf.zeros([2, 3]), 1)  # here
    first = test_wherever_tensorflow_is_installed.__code__.co_firstlineno
    assert place_of(made.op) == (__file__, first + 5)


def test_lines_of_pythons_library_are_passed_over():
    tanh = functools.singledispatch(tf.nn.tanh)
    with tf.Graph().as_default():
        made = tanh(tf.zeros([2, 3]))  # here
    first = test_lines_of_pythons_library_are_passed_over.__code__.co_firstlineno
    assert place_of(made.op) == (__file__, first + 3)


def checked(features, labels, mode):
    net = tf.matmul(features, weights('w', 3, 1))
    net = tf.check_numerics(net, 'net', name='check')  # here
    if mode == MODES.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions=net)
    loss = tf.losses.mean_squared_error(labels, net)
    return spec_of(mode, loss, sgd(loss))


CHECK = f'File "{__file__}", line {checked.__code__.co_firstlineno + 2}, in checked'


def with_nan(row, static=True):
    """An input_fn whose batch of 12 has a number that is none."""
    features = floats(12, 3)
    features[row] = float('nan')

    def input_fn():
        dataset = tf.data.Dataset.from_tensor_slices((features, floats(12, 1)))
        return dataset.batch(12, drop_remainder=static)

    return input_fn


@pytest.mark.parametrize(
    'row, static, microbatches, where',
    [
        (9, True, 1, 'tower 2, on /device:CPU:2, with examples 8 to 11 of 0 to 11'),
        (9, True, 2, 'tower 4, on /device:CPU:2, with examples 8 to 9 of 0 to 11'),
        (4, False, 1, 'tower 1, on /device:CPU:1, with its share of the examples'),
    ],
)
def test_an_error_names_the_line(row, static, microbatches, where, tmp_path):
    estimator = estimator_mgpu.Estimator(
        checked, str(tmp_path), devices=3, microbatches=microbatches
    )
    with pytest.raises(tf.errors.InvalidArgumentError) as info:
        estimator.train(with_nan(row, static))
    reason, last = str(info.value).splitlines()
    assert reason == 'net : Tensor had NaN values'
    assert last == f'check ran in {where}. It was made by {CHECK}'
    cause = info.value.__cause__
    assert isinstance(cause, tf.errors.InvalidArgumentError)
    assert CHECK in cause.message  # as on one device
    assert info.value.op is cause.op and cause.op.type == 'CheckNumerics'


def test_an_error_in_prediction_names_the_line(tmp_path):
    estimator = estimator_mgpu.Estimator(checked, str(tmp_path), devices=2)
    estimator.train(lambda: tf.data.Dataset.from_tensors(batches(4, 1)[0]))
    with pytest.raises(tf.errors.InvalidArgumentError, match='examples 6 to 11 .* in checked$'):
        list(estimator.predict(with_nan(9)))


def test_an_error_of_one_device_stays_as_it_is(tmp_path):
    estimator = estimator_mgpu.Estimator(checked, str(tmp_path), devices=1)
    with pytest.raises(tf.errors.InvalidArgumentError) as info:
        estimator.train(with_nan(9))
    assert info.value.op.name == 'check'


def looked_up(net):
    """Its op fails for numbers that are none."""
    bad = tf.cast(tf.is_nan(net), tf.int32)
    return net + tf.gather([0.0], bad, name='look_up')  # here


LOOK_UP = f'File "{__file__}", line {looked_up.__code__.co_firstlineno + 3}, in looked_up'


@tf.function(experimental_attributes={'_noinline': True})
def called(net):
    return looked_up(net)


def in_branch(net, branch=looked_up):
    return tf.cond(tf.shape(net)[1] > 0, lambda: branch(net), lambda: net)


def in_loop(net, body=looked_up):
    return tf.while_loop(lambda i, _: i < 2, lambda i, net: (i + 1, body(net)), [0, net])[1]


def in_branch_of_loop(net):
    branches = [lambda: net, lambda: looked_up(net)]
    return in_loop(net, lambda net: tf.switch_case(tf.constant(1), branches))


def check(net):
    return tf.check_numerics(net, 'net', name='check')  # here


CHECK_LINE = f'line {check.__code__.co_firstlineno + 1}, in check'


def asserted(net, name='asserted'):
    """Two assertions, of which the second fails."""
    holds = tf.debugging.assert_less(tf.zeros_like(net), 1.0)
    fails = tf.debugging.assert_less(net, 1e9, name=name)  # here
    with tf.control_dependencies([holds, fails]):
        return tf.identity(net)


ASSERTED_LINE = f'line {asserted.__code__.co_firstlineno + 3}, in asserted'


def error_of(function):
    """The error of a step of `function(features)` on three devices, one of which has a NaN."""
    features = floats(12, 1)
    features[9] = float('nan')

    def model_fn(features, labels, mode):
        return tf.estimator.EstimatorSpec(mode, predictions=function(features))

    with tf.Graph().as_default():
        replicated = estimator_mgpu.replicate(model_fn, devices=3)
        batch = tf.placeholder_with_default(features, [12, 1])
        spec = replicated(batch, None, MODES.PREDICT)
        creator = tf.train.ChiefSessionCreator(config=estimator_mgpu.session_config(3))
        with tf.train.MonitoredSession(creator, spec.prediction_hooks) as session:
            with pytest.raises(tf.errors.InvalidArgumentError) as info:
                session.run(spec.predictions)
    return info.value


@pytest.mark.parametrize(
    'function, path',
    [
        (called, 'PartitionedCall/f/look_up'),
        (in_branch, 'cond/then_branch/look_up'),
        (in_loop, 'while/body/look_up'),
        (in_branch_of_loop, 'while/body/switch_case/indexed_case/branches_1/look_up'),
    ],
    ids=['call', 'branch', 'loop', 'branch of a loop'],
)
def test_an_error_in_a_function_names_the_line(function, path):
    reason, last = str(error_of(function)).splitlines()
    assert reason == 'indices[1,0] = 1 is not in [0, 1)'  # in the tower's function
    where = 'tower 2, on /device:CPU:2, with examples 8 to 11 of 0 to 11'
    assert last == f'{path} ran in {where}. It was made by {LOOK_UP}'


def asserted_integers(net):
    ids = tf.cast(tf.is_nan(net), tf.int32)
    return tf.cast(in_loop(ids, lambda ids: asserted_ids(ids)), tf.float32)


def asserted_ids(ids):
    with tf.control_dependencies([tf.debugging.assert_less(ids, 1, name='asserted')]):  # here
        return tf.identity(ids)


def asserted_steps(net):
    """The same on all towers."""

    def body(i, net):
        least = tf.cond(i > 0, lambda: tf.nn.relu(i - 1), lambda: i)
        with tf.control_dependencies([tf.debugging.assert_less(least, 0, name='asserted')]):
            return i + 1, tf.identity(net)

    return tf.while_loop(lambda i, _: i < 2, body, [0, net])[1]


def until_large(net):
    """All examples decide when the loop ends."""
    goes_on = lambda i, net: tf.reduce_min(tf.abs(net)) < 3 * i  # noqa: E731
    return tf.while_loop(goes_on, lambda i, net: (i - 1, check(net)), [2.0, net])[1]


IN_TOWER_2 = ' ran in tower 2, on /device:CPU:2, with examples 8 to 11 of 0 to 11'


@pytest.mark.parametrize(
    'function, line, of_v2, of_v1',
    [
        (lambda net: in_loop(net, check), CHECK_LINE, 'while/body/check', 'while/check'),
        (lambda net: in_branch(net, check), CHECK_LINE, 'cond/then_branch/check', 'cond/check'),
        (
            lambda net: in_loop(net, asserted),
            ASSERTED_LINE,
            'while/body/asserted/Assert/AssertGuard/else_branch/Assert',
            None,
        ),
        (
            asserted_integers,
            'in asserted_ids',
            'while/body/asserted/Assert/Assert',
            'while/asserted/Assert/Assert',
        ),
    ],
    ids=['check in a loop', 'check in a branch', 'assertion', 'assertion of integers'],
)
def test_checks_in_loops_and_branches_are_sharded(function, line, of_v2, of_v1, behavior):
    path = of_v1 if behavior == 'v1' else of_v2
    last = str(error_of(function)).splitlines()[-1]
    assert last.endswith(line)
    if path is None:
        # All towers make the steps together, and assert the same.
        assert last.startswith('while/asserted/Assert/AssertGuard/Assert ran in tower ')
        assert 'of 0 to 11, in a joint loop. ' in last
    else:
        assert last.startswith(path + IN_TOWER_2)


def test_an_assertion_in_a_loop_that_is_the_same_on_all_towers(behavior):
    last = str(error_of(asserted_steps)).splitlines()[-1]
    scope = 'while' if behavior == 'v1' else 'while/body'
    assert last.startswith(f'{scope}/asserted/Assert/Assert ran in tower ')


def ranked_in_loop(net):
    return in_loop(tf.sort(net, 0), lambda net: check(tf.sort(net, 0)))


def scheduled(net):
    """An assertion that doesn't depend on the batch."""
    step = tf.cast(tf.train.get_or_create_global_step(), tf.float32)
    with tf.control_dependencies([tf.debugging.assert_less(1.0, tf.exp(step), name='asserted')]):
        return net + 1.0


GUARD = 'asserted/Assert/AssertGuard'


@pytest.mark.parametrize(
    'function, line, of_v2, of_v1, where',
    [
        (ranked_in_loop, CHECK_LINE, 'while/body/check', 'while/check', ', on the global batch: '),
        (
            lambda net: ranked_in_loop(ranked_in_loop(net)),
            CHECK_LINE,
            'while/body/check',
            'while/check',
            ', on the global batch: in it, ',
        ),
        (
            lambda net: ranked_in_loop(net) * ranked_in_loop(tf.ones([1, 1])),
            CHECK_LINE,
            'while/body/check',
            'while/check',
            ', on the global batch: in it, ',
        ),
        (
            asserted,
            ASSERTED_LINE,
            f'{GUARD}/else_branch/Assert',
            f'{GUARD}/Assert',
            ', on the global batch: ',
        ),
        (
            tf.function(asserted),
            ASSERTED_LINE,
            f'StatefulPartitionedCall/inlined/{GUARD}/else_branch/Assert',
            f'StatefulPartitionedCall/inlined/{GUARD}/else_branch/Assert',
            ', on the global batch: ',
        ),
        (
            scheduled,
            'in scheduled',
            f'{GUARD}/else_branch/Assert',
            f'{GUARD}/Assert',
            ', for all towers. ',
        ),
    ],
    ids=['loop', 'two loops', 'a loop without examples', 'assertions', 'function', 'schedule'],
)
def test_an_error_of_what_runs_once_names_the_line(function, line, of_v2, of_v1, where, behavior):
    path = of_v1 if behavior == 'v1' else of_v2
    last = str(error_of(function)).splitlines()[-1]
    assert last.startswith(f'{path} ran once{where}') and last.endswith(line)


@pytest.mark.parametrize('body', [looked_up, in_branch], ids=['op', 'branch'])
def test_a_function_that_is_called_twice(body):
    """TensorFlow doesn't say in which of its calls an op has failed, or one of a branch in it."""

    @tf.function(experimental_attributes={'_noinline': True})
    def ranked(net):
        return body(tf.sort(net, 0))

    error = error_of(lambda net: ranked(ranked(net)))
    assert '{{node look_up}}' in error.message and 'ran once' not in str(error)


def test_the_end_of_data_stays_what_it_is():
    """An error of a subclass would not end training."""
    op = graph_of(checked).get_operation_by_name(NAMES.copy('check', 1))
    error = tf.errors.OutOfRangeError(None, op, 'queue is closed')
    assert raised(error) is error


def test_an_op_that_the_model_fn_has_not_made():
    with graph_of(checked).as_default() as graph:
        saver = tf.train.Saver()
    save = graph.get_operation_by_name(saver.saver_def.save_tensor_name.partition(':')[0])
    error = tf.errors.NotFoundError(None, save, 'no such directory')
    assert raised(error) is error


class Runs(tf.train.SessionRunHook):
    """Counts the runs of a session."""

    count = 0

    def after_create_session(self, session, coord):
        run = session.run

        def counted(*args, **kwargs):
            self.count += 1
            return run(*args, **kwargs)

        session.run = counted


def test_a_session_whose_run_another_hook_has_replaced():
    runs = Runs()
    with tf.Graph().as_default():
        three = tf.constant(3.0)
        hooks = [runs, step_errors.ExplainErrorsHook()]
        with tf.train.MonitoredSession(hooks=hooks) as session:
            assert session.run(three) == 3.0
    assert runs.count == 1


def test_the_run_of_a_session_that_is_gone():
    with tf.Graph().as_default():
        session = tf.Session()
        step_errors.ExplainErrorsHook().after_create_session(session, None)
    run = session.run
    assert run.__name__ == 'run'  # as that of any session
    session.close()
    del session
    with pytest.raises(RuntimeError, match='This session no longer exists.'):
        run([])


def test_an_error_of_a_plain_estimator_names_the_line(tmp_path):
    config = tf.estimator.RunConfig(session_config=estimator_mgpu.session_config(3))
    replicated = estimator_mgpu.replicate(devices=3)(checked)
    estimator = tf.estimator.Estimator(replicated, str(tmp_path), config)
    with pytest.raises(tf.errors.InvalidArgumentError, match='examples 8 to 11 .* in checked$'):
        estimator.train(with_nan(9))


def ranked(features, labels, mode):
    order = tf.sort(features, 0, name='order')
    loss = tf.reduce_mean(tf.square(tf.matmul(order, weights('w', 3, 1)) - labels))
    return spec_of(mode, loss, sgd(loss))


def raised(error):
    """The error that is raised in place of another one."""
    with pytest.raises(type(error)) as info, step_errors.op_errors_explained():
        raise error
    return info.value


def out_of_memory(name, model_fn=ranked, **options):
    """What is said if an op of a divided graph gets no memory."""
    op = graph_of(model_fn, **options).get_operation_by_name(name)
    message = 'OOM when allocating tensor with shape[12,3]'
    error = raised(tf.errors.ResourceExhaustedError(None, op, message))
    first, last = str(error).splitlines()
    assert first == message
    return last


def test_what_helps_if_memory_is_short():
    said = out_of_memory(NAMES.copy('MatMul', 1))
    assert 'MatMul ran in tower 1, on /device:CPU:1, with examples 4 to 7 of 0 to 7. ' in said
    assert 'use replicate(microbatches=2), more devices, recompute=True' in said
    assert said.endswith('in ranked')
    said = out_of_memory('order/TopKV2')
    assert said.startswith('order/TopKV2 ran once, on the global batch: this TopKV2 needs all')
    assert 'microbatches' not in said and 'explain()' in said

    of_function = 'OOM when allocating tensor\n\t [[{{node inner}}]]\n\t [[call]]'
    said = str(raised(tf.errors.ResourceExhaustedError(None, None, of_function)))
    assert 'To need less memory on each device, use more micro-batches, more devices,' in said


def test_what_helps_if_it_is_unknown_which_op_has_failed(monkeypatch):
    monkeypatch.setattr(step_errors, '_failed_op', None)  # So calling it fails.
    said = out_of_memory(NAMES.copy('MatMul', 1))
    assert said.startswith('To need less memory on each device, use replicate(microbatches=2), ')


def test_recomputation_is_not_advised_if_it_is_on():
    said = out_of_memory(NAMES.copy('MatMul', 1), recompute=True)
    assert 'use replicate(microbatches=2), more devices, a smaller batch, or variables=' in said


def test_what_helps_if_nothing_is_sharded():
    """There are 8 examples for 9 devices."""
    said = out_of_memory('MatMul', devices=9)
    assert 'device, use recompute=True for deep networks, a smaller batch, or variables=' in said


@pytest.mark.parametrize('asked, advised', [(2, 4), (3, 4), (4, None)])
def test_no_more_micro_batches_than_examples(asked, advised):
    """Each of the two devices has four examples."""
    said = out_of_memory(NAMES.copy('check', 1), checked, microbatches=asked)
    assert f'replicate(microbatches={advised})' in said or not advised
    assert ('microbatches' in said) == ('a smaller batch' in said) == bool(advised)


def test_micro_batches_that_were_left_out_are_not_advised():
    """All is normalized by a mean of all examples."""

    def normalized(features, labels, mode):
        for layer in range(3):
            mean, variance = tf.nn.moments(features, [0])
            features = tf.nn.batch_normalization(features, mean, variance, None, None, 1e-3)
            features = tf.tanh(tf.matmul(features, weights(f'w{layer}', 3, 3)))
        loss = tf.reduce_mean(tf.square(tf.matmul(features, weights('w', 3, 1)) - labels))
        return spec_of(mode, loss, sgd(loss))

    said = out_of_memory(NAMES.copy('MatMul', 1), normalized, microbatches=4)
    assert 'with examples 4 to 7 of 0 to 7' in said
    assert 'use more devices, recompute' in said and 'microbatches' not in said


def masked(features, labels, mode):
    left = tf.boolean_mask(features, features[:, 0] > 0)
    net = tf.tanh(tf.matmul(left, weights('w', 3, 1)), name='left')
    loss = tf.reduce_mean(tf.square(net))
    return spec_of(mode, loss, sgd(loss))


def test_rows_that_are_no_examples_have_no_numbers():
    said = out_of_memory(NAMES.copy('left', 1), masked)
    assert 'left ran in tower 1, on /device:CPU:1, with its share of the rows. ' in said


def test_names_of_the_user_that_look_like_a_copy():
    """It's the user's own op, which is none of a tower."""

    def model_fn(features, labels, mode):
        tf.constant(1.0, name='x/replicate/tower_9/y')
        return checked(features, labels, mode)

    graph = graph_of(model_fn)
    op = graph.get_operation_by_name('x/replicate/tower_9/y')
    said = str(raised(tf.errors.InvalidArgumentError(None, op, 'wrong')))
    assert said.splitlines()[1].startswith('x/replicate/tower_9/y ran once, for all towers. ')
    copy = graph.get_operation_by_name('check/replicate_1/tower_1')
    assert 'tower 1' in str(raised(tf.errors.InvalidArgumentError(None, copy, 'wrong')))


class OwnError(tf.errors.InvalidArgumentError):
    def __init__(self, op):
        super().__init__(None, op, 'own')


def test_errors_that_cannot_be_made_anew_stay_as_they_are():
    error = OwnError(graph_of(checked).get_operation_by_name(NAMES.copy('check', 1)))
    assert raised(error) is error


@pytest.mark.parametrize(
    'message',
    [
        'OOM when allocating tensor\n\t [[{{node Pad}}]]\n\t [[IteratorGetNext]]',
        'OOM when allocating in a hook',
        '/data/x; No space left on device\n\t [[{{node WriteFile}}]]',
        'Received message larger than max (9 vs. 4)\n\t [[{{node MatMul}}]]',
    ],
    ids=['input', 'hook', 'disk', 'gRPC'],
)
def test_other_resources(message):
    error = tf.errors.ResourceExhaustedError(None, None, message)
    assert raised(error) is error


def test_what_helps_if_xla_refuses_several_cpus():
    message = 'Multiple CPU devices [/device:CPU:1,/device:CPU:0]'
    first, last = str(raised(tf.errors.InternalError(None, None, message))).splitlines()
    assert first == message and 'Leave out global_jit_level and --tf_xla_cpu_global_jit' in last


def test_other_errors_stay_as_they_are():
    error = tf.errors.UnavailableError(None, None, 'Socket closed')
    assert raised(error) is error


def test_an_error_of_an_imported_op():
    """Nobody knows the line that made it."""

    def imported(net):
        with tf.Graph().as_default() as graph:
            tf.check_numerics(tf.placeholder(tf.float32, [None, 1], 'x'), 'net', name='check')
        [net] = tf.import_graph_def(graph.as_graph_def(), {'x': net}, ['check:0'], name='in')
        return net

    _, last = str(error_of(imported)).splitlines()
    assert last == 'in/check ran in tower 2, on /device:CPU:2, with examples 8 to 11 of 0 to 11.'


def test_an_error_of_an_op_that_was_added(monkeypatch):
    """Shards that aren't alike can't be gathered."""
    monkeypatch.setitem(RULES, 'PyFuncStateless', 'n... -> n...')

    def other_shards(net):
        wider = lambda x: np.repeat(x, 1 + np.isnan(x).any(), 1)  # noqa: E731
        shards = tf.numpy_function(wider, [net], tf.float32, stateful=False)
        shards.set_shape([12, None])
        return net + tf.stop_gradient(tf.reduce_sum(tf.sort(shards, 0)))  # here

    line = other_shards.__code__.co_firstlineno + 4
    _, last = str(error_of(other_shards)).splitlines()
    assert 'ran on /device:CPU:0, for an op of all towers. It was made by' in last
    assert f'line {line}, in other_shards' in last


def word_of(ids):
    return {}[float(ids[0])]  # here


WORD_OF = f'File "{__file__}", line {word_of.__code__.co_firstlineno + 1}, in word_of'


def examples():
    return tf.data.Dataset.from_tensor_slices((floats(12, 3), floats(12, 1)))


def mapped(call):
    return lambda: examples().map(lambda x, y: (tf.ensure_shape(call(x), [3]), y)).batch(12)


def generated():
    def generate():
        yield floats(1, 3)[0], floats(1, 1)[0]
        word_of(floats(1, 3)[0])

    signature = tf.TensorSpec([3]), tf.TensorSpec([1])
    return tf.data.Dataset.from_generator(generate, output_signature=signature).batch(12)


def without_a_dataset():
    ids = tf.numpy_function(word_of, [floats(12, 1)[:, 0]], tf.float32)
    return tf.zeros([12, 3]) + tf.ensure_shape(ids, []), tf.zeros([12, 1])


def of_words(features, labels, mode):
    ids = tf.numpy_function(word_of, [features[0]], tf.float32)
    return checked(features + tf.ensure_shape(ids, []), labels, mode)


@pytest.mark.parametrize(
    'input_fn, model_fn, where',
    [
        (mapped(lambda x: tf.numpy_function(word_of, [x], tf.float32)), checked, 'in the dataset'),
        (mapped(lambda x: tf.py_function(word_of, [x], tf.float32)), checked, 'in the dataset'),
        (generated, checked, 'in the dataset'),
        (without_a_dataset, checked, ''),
        (lambda: examples().batch(12), of_words, 'once, on the global batch'),
    ],
    ids=['numpy_function', 'py_function', 'generator', 'no dataset', 'model_fn'],
)
def test_an_error_of_python_is_told_once(input_fn, model_fn, where, tmp_path):
    """Ops on all devices need its result, and TensorFlow tells it once for each."""
    estimator = estimator_mgpu.Estimator(model_fn, str(tmp_path), devices=3)
    with pytest.raises(tf.errors.OpError, match='KeyError') as info:
        estimator.train(input_fn)
    text = ''.join(traceback.format_exception(None, info.value, info.value.__traceback__))
    assert text.count('return {}[float(ids[0])]') == 1
    last = text.splitlines()[-1]
    assert where in last and last.endswith(f'The error was raised by {WORD_OF}')
    assert type(info.value.__context__) is tf.errors.UnknownError  # TensorFlow's


def test_an_error_of_a_dataset_names_the_line(tmp_path):
    """Also without a Python function, and wherever the model_fn has an op of the same name."""

    def named(features, labels, mode):
        return checked(in_branch(tf.identity(features, name='look_up')), labels, mode)

    def bad(x, y):
        return tf.gather(x, [0, 1, 9], name='look_up'), y  # here

    estimator = estimator_mgpu.Estimator(named, str(tmp_path), devices=3)
    with pytest.raises(tf.errors.InvalidArgumentError) as info:
        estimator.train(lambda: examples().map(bad).batch(12))
    reason, last = str(info.value).splitlines()
    assert reason == 'indices[2] = 9 is not in [0, 3)'
    line = bad.__code__.co_firstlineno + 1
    made_by = f'It was made by File "{__file__}", line {line}, in bad'
    assert last == f'look_up ran in the dataset that the input_fn gives. {made_by}'


def test_an_error_of_a_dataset_without_functions(tmp_path):
    estimator = estimator_mgpu.Estimator(checked, str(tmp_path / 'model'), devices=3)
    with pytest.raises(tf.errors.NotFoundError, match='No such file') as info:
        estimator.train(
            lambda: tf.data.TFRecordDataset(str(tmp_path / 'none')).map(parsed).batch(9)
        )
    assert str(info.value).splitlines()[1:] == ["It's of the dataset that the input_fn gives."]


def parsed(record):
    return tf.io.decode_raw(record, tf.float32)[:3], tf.zeros([1])
