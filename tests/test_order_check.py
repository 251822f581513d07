"""The check of a divided graph finds whatever breaks one device's order, and nothing else.

Each mutant of a divided graph lacks one control edge, or has something that doesn't belong there.
Whether a missing edge matters is told here from the graph of the undecorated model_fn.
"""

import contextlib
import itertools
import re

import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu import steps
from estimator_mgpu.batches import end_of_data
from estimator_mgpu.model_fns.spec_results import result_ops
from estimator_mgpu.partition.order import check, facts
from estimator_mgpu.tf_internals import graphs, private
from models import floats, sgd, spec_of, step
from test_order import counts_by_hand, usual
from towers import NAMES, TRAIN, behavior_of, built, compare

pytestmark = pytest.mark.core
BATCHES = [(floats(8, 3), floats(8, 1))]
# Of loops, branches and calls, edges between ops don't tell what runs when; nor do those of ops
# that use what TensorFlow takes apart.
TAKEN_APART = ('If', 'While', 'StatelessWhile')
NOT_TRIED = ('Switch', 'Merge', 'NextIteration', 'Enter', 'Stack', *TAKEN_APART)
MODELS = {f.__name__: f for f in (counts_by_hand, usual)}


def model(function):
    """Registers a model_fn."""
    MODELS[function.__name__] = function
    return function


def squares(features, labels):
    net = tf.layers.dense(tf.layers.dense(features, 4, tf.nn.tanh, name='a'), 1, name='b')
    return tf.reduce_mean(tf.square(net - labels))


@model
def two_steps(features, labels, mode):
    with tf.variable_scope('net', reuse=tf.AUTO_REUSE):
        with tf.control_dependencies([sgd(squares(features, labels))]):
            loss = squares(features, labels)
            return spec_of(mode, loss, sgd(loss))


@model
def averages_of_variables(features, labels, mode):
    loss = squares(features, labels)
    with tf.control_dependencies([sgd(loss)]):
        averages = tf.train.ExponentialMovingAverage(0.5).apply(tf.trainable_variables())
    return spec_of(mode, loss, averages)


@model
def linear(features, labels, mode):
    """Its gradients follow from no read."""
    loss = tf.reduce_mean(tf.layers.dense(tf.layers.dense(features, 4), 1) * labels)
    return spec_of(mode, loss, sgd(loss))


@model
def seen_before_the_loss(features, labels, mode):
    seen = tf.get_variable('seen', [3], trainable=False, initializer=tf.zeros_initializer())
    with tf.control_dependencies([seen.assign_add(tf.reduce_sum(features, 0))]):
        loss = squares(tf.identity(features), labels) * tf.reduce_sum(seen)
    return spec_of(mode, loss, sgd(loss))


@model
def seen_in_a_branch(features, labels, mode):
    seen = tf.get_variable('seen', [3], trainable=False, initializer=tf.zeros_initializer())

    def counted():
        with tf.control_dependencies([seen.assign_add(tf.reduce_sum(features, 0))]):
            return tf.identity(features)

    net = tf.cond(step() >= 0, counted, lambda: features)
    with tf.control_dependencies([net]):
        loss = squares(features, labels) * tf.reduce_sum(seen)
    return spec_of(mode, loss, sgd(loss))


@model
def scaled_after_a_branch(features, labels, mode):
    """Only one of the branches waits for the first read of the scale by itself."""
    scale, seen = (
        tf.get_variable(name, initializer=floats(3), trainable=False, use_resource=True)
        for name in ('scale', 'seen')
    )
    with tf.control_dependencies([seen.assign_add(scale.read_value())]):
        net = tf.identity(features)

    def scaled():
        with tf.control_dependencies([scale.assign_add([1.0, 1, 1])]):
            return tf.identity(net)

    net = tf.cond(step() < 1, scaled, lambda: tf.identity(net))
    with tf.control_dependencies([net]):
        loss = squares(net * scale.assign(scale * 0.5), labels)
    return spec_of(mode, loss, sgd(loss))


@model
def seen_in_a_table(features, labels, mode):
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
    keys = tf.range(3, dtype=tf.int64)
    before = table.lookup(keys)
    with tf.control_dependencies([before]):
        written = table.insert(keys, before + tf.reduce_sum(features, 0))
    with tf.control_dependencies([written]):
        loss = squares(tf.identity(features), labels) * tf.reduce_sum(table.lookup(keys))
    return spec_of(mode, loss, sgd(loss))


@model
def recurrent(features, labels, mode):
    w = tf.get_variable('w', initializer=floats(3, 3))
    turn = lambda i, x: (i + 1, tf.tanh(tf.matmul(x, w)))  # noqa: E731
    net = tf.while_loop(lambda i, _: i < 2, turn, [0, features])[1]
    loss = squares(net, labels)
    return spec_of(mode, loss, sgd(loss))


@model
def two_losses(features, labels, mode):
    """Like those of a GAN."""
    first = squares(features, labels)
    second = tf.reduce_mean(tf.square(tf.layers.dense(features, 2, name='c'))) + first
    variables = tf.trainable_variables()
    momentum = tf.train.MomentumOptimizer(0.1, 0.9)
    train_ops = [momentum.minimize(first, var_list=variables[:2])]
    train_ops.append(sgd(second))
    return spec_of(mode, first + second, *train_ops)


@model
def counted_and_printed(features, labels, mode):
    count = tf.get_variable('count', [], trainable=False, initializer=tf.zeros_initializer())
    loss = squares(features, labels)
    with tf.control_dependencies([loss]):
        read = tf.identity(count + 0.0)
    with tf.control_dependencies([read]):
        written = count.assign_add(1.0)
    with tf.control_dependencies([written]):
        shown = tf.numpy_function(lambda x: x, [count + 0.0], tf.float32)
    return spec_of(mode, loss, sgd(loss), shown)


class Divided:
    """A divided graph, with what the check needs."""

    def __init__(self, spec):
        self.graph = tf.get_default_graph()
        self.step = steps.of_graph(self.graph)
        self.results = result_ops(spec)
        iterators = [op for op in self.graph.get_operations() if op.type == 'IteratorGetNext']
        self.batch = [tensor for op in iterators for tensor in op.outputs]

    def complaint(self):
        """What the check says; '' if it finds nothing."""
        not_held, _ = end_of_data.writes_to_hold(self.graph, self.batch, self.results)
        names, devices = self.step.names, self.step.tower_devices
        try:
            check.check(self.step.facts, self.graph, self.results, names, devices, not_held)
        except RuntimeError as error:
            return str(error)
        return ''


@contextlib.contextmanager
def divided(model_fn, towers=2, **options):
    with built(model_fn, BATCHES, towers, TRAIN, epochs=1, **options) as (spec, _):
        yield Divided(spec)


@contextlib.contextmanager
def waiting_for(op, before):
    """An op waits for these, and for no others, for a while."""
    present = op.control_inputs
    private.remove_control_inputs(op)
    private.add_control_inputs(op, before)
    yield
    private.remove_control_inputs(op)
    private.add_control_inputs(op, present)


def uses_taken_apart(op):
    """Whether an op uses the result of a branch or loop, or a tower's slice of it."""
    used = [tensor.op for tensor in op.inputs]
    return any(
        op.type in TAKEN_APART or (op.type == 'StridedSlice' and uses_taken_apart(op))
        for op in used
    )


def original(op):
    copy = NAMES.copy_of(op.name)
    return op.name if copy is None else copy.op_name


def in_place_of(op):
    """The name of the user's op; of what a branch was taken apart into, of what chooses it."""
    return re.sub('/(then|else)_branch/.*', '', original(op))


def variables_of(op):
    """The variables that an op reads or writes, by name; of a copy, those of the user's op."""
    with contextlib.suppress(KeyError):
        op = op.graph.get_operation_by_name(original(op))
    found = set()
    for tensor in op.inputs:
        while tensor.op.type in ('Identity', 'Enter', 'Switch', 'RefEnter', 'RefSwitch'):
            tensor = tensor.op.inputs[0]
        if tensor.op.type in ('VarHandleOp', 'VariableV2', 'MutableHashTableV2'):
            found.add(tensor.op.name)
    return found if op.type not in ('Identity', 'Enter', 'Switch', 'RefSwitch') else set()


def writes(op):
    return op.type.startswith(('Assign', 'Apply', 'ResourceApply', 'LookupTableInsert'))


def inputs_in_order(ops):
    """What ops directly wait for, operands first: of each op after those that it waits for."""
    return {op: graphs.direct_inputs(op) for op in graphs.topological_order(list(ops))}


def pairs_in_order(inputs):
    """Pairs of ops of which the second waits for the first, and one writes what both touch.

    It has to wait whichever branches are taken.
    """
    touching = {op: variables for op in inputs if (variables := variables_of(op))}
    found = set()
    for op in touching:
        for other in ancestors_in(inputs, [op]) & touching.keys() - {op}:
            if touching[op] & touching[other] and (writes(op) or writes(other)):
                found.add((other, op))
    for waits in steps_by_branches(inputs):
        before = {b: ancestors_in(waits, [b]) for b in touching if b in waits}
        found = {(a, b) for a, b in found if not {a, b} <= waits.keys() or a in before[b]}
    return found


def steps_by_branches(inputs):
    """For each way that the branches can go: the ops that run, and what each of them waits for."""
    decided = {}  # by branch: what decides which way it goes
    for op in inputs:
        if op.type == 'Switch' and op.inputs[1].op.type != 'LoopCond':
            decided[op] = predicate_of(op)
    predicates = sorted(set(decided.values()), key=lambda op: op.name)
    for ways in itertools.product((0, 1), repeat=len(predicates)):
        yield what_runs(inputs, decided, dict(zip(predicates, ways)))


def what_runs(inputs, decided, way_of):
    """The ops that run if each predicate's switches go one way, and what each of them waits for."""
    waits = {}

    def has_value(tensor):
        goes = decided.get(tensor.op)
        taken = goes is None or tensor.value_index == way_of[goes]
        return tensor.op.type == 'NextIteration' or (tensor.op in waits and taken)

    for op, befores in inputs.items():
        operands = [tensor.op for tensor in op.inputs if has_value(tensor)]
        controls = befores[len(op.inputs) :]
        missing = len(op.inputs) - len(operands) + len(set(controls) - waits.keys())
        if not missing or (op.type == 'Merge' and operands):
            waits[op] = [*operands, *controls]
    ways_back = [op for op in inputs if op.type == 'NextIteration']
    return {**waits, **{op: inputs[op] for op in ways_back}}


def ancestors_in(waits, ops):
    seen = set(ops)
    stack = list(seen)
    while stack:
        new = set(waits[stack.pop()]) - seen
        seen |= new
        stack += new
    return seen


def predicate_of(switch):
    """The op that decides which way a switch goes."""
    op = switch.inputs[1].op
    while op.type in ('Identity', 'Switch'):
        op = op.inputs[0].op
    return op


def state_of(inputs, results, in_order):
    """What a mutant must not lose: pairs in order, what results run, and writes after the batch."""
    step_ops = ancestors_in(inputs, results)
    pairs = {
        p
        for p in pairs_in_order({op: befores for op, befores in inputs.items() if op in step_ops})
        if (in_place_of(p[0]), in_place_of(p[1])) in in_order
    }
    with_effects = ('PyFunc', 'EagerPyFunc')
    run = {
        (result.name, op.name)
        for result in results
        for op in ancestors_in(inputs, [result])
        if writes(op) or op.type in with_effects
    }
    batch = {op for op in step_ops if op.type == 'IteratorGetNext'}
    held = {op.name for op in step_ops if writes(op) and ancestors_in(inputs, [op]) & batch}
    return pairs | run | held


@pytest.mark.parametrize('towers', [{'towers': 2}, {'towers': 3}, {'microbatches': 2}], ids=str)
@pytest.mark.parametrize('name', MODELS)
def test_each_edge_that_matters_is_missed_by_the_check(name, towers, behavior):
    """If it's taken out; no other one is."""
    model_fn = MODELS[name]
    with built(model_fn, BATCHES, 0, TRAIN, epochs=1) as (spec, _):
        ops = tf.get_default_graph().get_operations()
        in_order = {(a.name, b.name) for a, b in pairs_in_order(inputs_in_order(ops))}

    with divided(model_fn, **towers) as made:
        in_order |= {(pair.first, pair.second) for pair in made.step.open_pairs}
        assert made.complaint() == ''
        inputs = inputs_in_order(graphs.ancestors(made.results))
        whole = state_of(inputs, made.results, in_order)
        mutants = [
            (op, before)
            for op in inputs
            for before in op.control_inputs
            if not op.type.startswith(NOT_TRIED) and not before.type.startswith(NOT_TRIED)
            if not uses_taken_apart(before)
        ]
        assert mutants
        for op, before in mutants:
            others = [other for other in op.control_inputs if other is not before]
            fewer = {**inputs, op: [*(tensor.op for tensor in op.inputs), *others]}
            lost = whole - state_of(fewer, made.results, in_order)
            with waiting_for(op, others):
                complaint = made.complaint()
            # What gives a loop its variables is waited for, though no edge of one op says so.
            is_spare = before.name.startswith('batch/') and not lost
            assert is_spare or bool(lost) == bool(complaint), f'{before.name} -> {op.name}: {lost}'


def test_what_does_not_belong_there_is_found(behavior):
    with divided(usual) as made:
        ops = made.graph.get_operations()
        [*_, write] = [op for op in ops if 'Apply' in op.type]
        first, second = (
            made.graph.get_operation_by_name(NAMES.copy('dense/MatMul', tower))
            for tower in range(2)
        )
        with waiting_for(second, [first]):
            assert f'{second.name} waits for {first.name}, which waits for another tower.' in (
                made.complaint()
            )
        with waiting_for(first, [write]):
            assert 'These wait for each other: ' in made.complaint()

        with made.graph.as_default():
            fed = tf.placeholder(tf.float32, [], 'fed')
            p = tf.placeholder(tf.bool, [], 'p')
            dead, _ = tf.raw_ops.Switch(data=1.0, pred=p)
            dead = tf.identity(dead, 'dead')
        with waiting_for(made.results[0], [fed.op]), waiting_for(fed.op, [first]):
            assert 'fed may be fed, so it cannot wait for' in made.complaint()
        with waiting_for(write, [dead.op]):
            assert f'{write.name} waits for dead, in a branch that may not be taken.' in (
                made.complaint()
            )


def test_an_order_that_only_one_branch_keeps_is_no_order():
    with behavior_of('v1'), divided(scaled_after_a_branch) as made:
        operation = made.graph.get_operation_by_name
        read, write = operation('Read/ReadVariableOp'), operation('AssignVariableOp')
        merges = [operation(NAMES.copy('cond/Merge', tower)) for tower in range(2)]
        with contextlib.ExitStack() as stack:
            for op in graphs.ancestors([write]) - graphs.ancestors(merges):
                if op.control_inputs:
                    stack.enter_context(waiting_for(op, merges))
            assert read in graphs.ancestors([write])
            assert f'{write.name} no longer waits for {read.name}' in made.complaint()


def by_turns(features, labels, mode):
    """One of two optimizers writes to a variable; with the other one, it's read for a gradient."""
    matrix = tf.get_variable('matrix', [3, 4])
    net = features @ matrix
    penalty = tf.reduce_mean(tf.square(net))
    loss = tf.reduce_mean(tf.square(tf.layers.dense(tf.tanh(net), 1, name='b') - labels))
    train_op = tf.cond(
        tf.equal(step() % 2, 0),
        lambda: tf.train.RMSPropOptimizer(0.01).minimize(loss, step(), [matrix]),
        lambda: tf.train.AdagradOptimizer(0.1).minimize(loss + penalty, step()),
    )
    return spec_of(mode, loss, train_op)


def test_what_never_runs_in_the_same_step_has_no_order(behavior):
    compare(by_turns, BATCHES * 4, 2)


def test_a_value_that_is_sent_before_a_write_is_found(monkeypatch):
    """Of a reference variable: another device has to be sent what was written."""
    with behavior_of('v1'), divided(two_steps) as made:
        reads = [
            op
            for op in made.graph.get_operations()
            if '/later_read' in op.name and op.inputs[0].op.type == 'VariableV2'
        ]
        assert reads
        for read in reads:
            [reference] = read.inputs
            early = next(op for op in reference.consumers() if op.name.endswith('/read'))
            users = [
                (user, index)
                for user in read.outputs[0].consumers()
                for index, operand in enumerate(user.inputs)
                if operand is read.outputs[0]
            ]
            for user, index in users:
                private.set_input(user, index, early.outputs[0])
        monkeypatch.setattr(check, '_SHOWN', 99)
        assert 'after which it has to be read' in made.complaint()


def test_users_switch_it_on(monkeypatch):
    monkeypatch.delenv(facts.VARIABLE)
    with built(usual, BATCHES, 2, TRAIN):
        assert steps.of_graph(tf.get_default_graph()).facts is None
    for value, is_on in (('1', True), ('0', False), ('', False)):
        monkeypatch.setenv(facts.VARIABLE, value)
        with tf.Graph().as_default() as graph:
            assert (facts.noted(graph, []) is not None) == is_on
