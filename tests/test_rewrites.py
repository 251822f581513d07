"""What each rewrite makes of a small graph, both as text; and that all leave the order of state.

A line is an op: `y = Identity(x) after check` waits for `check` by a control edge. Before it come
the ops that it needs, but for constants, placeholders and variables. After it come, indented, the
ops of the functions that it calls, if the graph knows them.
"""

import functools
import textwrap
import types

import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import random_graphs
from estimator_mgpu.batches.batch import Batch
from estimator_mgpu.partition import divide
from estimator_mgpu.partition.division import NO_BATCH, Division
from estimator_mgpu.partition.once_devices import place_ops
from estimator_mgpu.partition.order import check
from estimator_mgpu.partition.propagation.needless_ops import bypass_needless_ops
from estimator_mgpu.partition.propagation.unused_gradients import find_unused_gradients
from estimator_mgpu.partition.rewrites.batch_norm import expand_batch_norm
from estimator_mgpu.partition.rewrites.identities import bypass_identities, find_unused_ops
from estimator_mgpu.partition.rewrites.inline_calls import inline_calls
from estimator_mgpu.partition.rewrites.later_reads import read_after_writes
from estimator_mgpu.partition.rewrites.loop_handles import bypass_loops_of_handles
from estimator_mgpu.partition.rewrites.loop_waits import remove_loop_waits
from estimator_mgpu.partition.rewrites.read_functions import read_functions
from estimator_mgpu.partition.rewrites.take_apart_branches import take_apart_branches
from estimator_mgpu.partition.rewrites.take_apart_loops import take_apart_loops
from estimator_mgpu.partition.towers.waits import Waits
from estimator_mgpu.tf_internals import function_calls, graphs, op_types, private
from models import sgd, spec_of
from test_order_check import BATCHES, MODELS, squares
from test_random_graphs import WRITING, case_of
from towers import behavior_of, graph_of

pytestmark = pytest.mark.core
QUIET = ('Const', 'Placeholder', 'VarHandleOp', 'VariableV2')


def in_reading_order(ops):
    """These ops and those that they need, each after those that it needs; ways back come last."""
    found, ways_back = [], []
    visited = set()

    def visit(op):
        if op not in visited:
            visited.add(op)
            if op.type in op_types.NEXT_ITERATION:
                ways_back.append(op)
                return
            for before in graphs.direct_inputs(op):
                visit(before)
            found.append(op)

    for op in ops:
        visit(op)
    for op in ways_back:  # What they need may need others.
        for before in graphs.direct_inputs(op):
            visit(before)
        found.append(op)
    return found


def lines_of(ops, unused=()):
    for op in in_reading_order(ops):
        if op.type in QUIET:
            continue
        line = f'{op.name} = {op.type}({", ".join(t.name.removesuffix(":0") for t in op.inputs)})'
        if op.control_inputs:
            line += f' after {", ".join(sorted(before.name for before in op.control_inputs))}'
        if op.device:
            line += f' on {op.device}'
        yield line + (' (unused)' if op.name in unused else '')
        for function in function_calls.function_graphs(op):
            outputs = [output.op for output in function.outputs]
            yield from ('  ' + inner for inner in lines_of([*function.control_outputs, *outputs]))


def text_of(division, scope='', also=()):
    """The ops that the results of a division run, as text.

    Args:
      division: one that goes on.
      scope: what isn't shown of names.
      also: further ops to show.
    """
    ops = [*map(division.op_in_place_of, division.results), *also]
    return '\n'.join(lines_of(ops, division.unused)).replace(scope, '')


def assert_rewritten(steps, results, before, after, x=None, **options):
    """Compares a graph before and after a step of dividing it.

    Args:
      steps: the step, after those that it relies on.
      results: tensors or ops that are wanted of the graph.
      before: the graph as text.
      after: the graph as text, after all steps.
      x: the batch.
      **options: of `text_of`.
    """
    division = Division(
        tf.get_default_graph(),
        NO_BATCH if x is None else Batch([x], x.shape[0], {('features',): x}, {}),
        devices=['/device:CPU:0', '/device:CPU:1'],
        results=[result.op if tf.is_tensor(result) else result for result in results],
        step_results=results,
        recomputed_loss=results[0],
    )
    assert text_of(division, **options) == textwrap.dedent(before).strip()
    for rewrite in steps:
        rewrite(division)
    assert text_of(division, **options) == textwrap.dedent(after).strip()


@pytest.fixture(autouse=True)
def graph():
    """A graph of the test's own."""
    with tf.Graph().as_default() as graph:
        yield graph


def batch_of(*shape):
    return tf.placeholder(tf.float32, shape, 'x')


def variable(*shape):
    return tf.get_variable('w', shape, use_resource=True)


def loaded(graph, output):
    """A tensor of another graph, which becomes a part of the test's by its definition."""
    return tf.import_graph_def(graph.as_graph_def(), return_elements=[output], name='')[0]


def test_read_functions():
    with tf.Graph().as_default() as other:
        tf.exp(tf2.function(lambda a: tf.negative(a, 'b'))(batch_of(3)), 'y')
    before = """
        PartitionedCall = PartitionedCall(x)
        y = Exp(PartitionedCall)
    """
    after = """
        PartitionedCall = PartitionedCall(x)
          b = Neg(a)
          Identity = Identity(b)
        y = Exp(PartitionedCall)
    """
    assert_rewritten([read_functions], [loaded(other, 'y:0')], before, after)


def test_inline_calls():
    w = variable(3)

    @tf.function
    def call(a):
        w.assign_add(tf.reduce_sum(a, 0, name='sum'), name='add')
        return tf.negative(a, 'b')

    x = batch_of(4, 3)
    with tf.control_dependencies([tf.no_op('earlier')]):
        y = tf.exp(call(x), 'y')
    before = """
        earlier = NoOp()
        StatefulPartitionedCall = StatefulPartitionedCall(x, w) after earlier
          sum = Sum(a, sum/reduction_indices)
          add = AssignAddVariableOp(add/w, sum)
          b = Neg(a)
          NoOp = NoOp() after add
          Identity = Identity(b) after NoOp
        y = Exp(StatefulPartitionedCall)
    """
    after = """
        inlined/b = Neg(x)
        inlined/sum = Sum(x, inlined/sum/reduction_indices)
        earlier = NoOp()
        inlined/add = AssignAddVariableOp(w, inlined/sum) after earlier, x
        inlined/NoOp = NoOp() after inlined/add
        inlined/Identity = Identity(inlined/b) after inlined/NoOp
        output = Identity(inlined/Identity) after inlined/add, earlier
        y = Exp(output)
    """
    assert_rewritten([inline_calls], [y], before, after, scope='StatefulPartitionedCall/')


def test_take_apart_loops():
    """The sum over all examples decides when it ends. TensorFlow also counts its steps."""
    x = batch_of(4, 3)
    is_less = lambda a: tf.less(tf.reduce_sum(a, name='sum'), 9.0, 'is_less')  # noqa: E731
    y = tf.exp(tf.while_loop(is_less, lambda a: tf.exp(a, 'b'), [x], name='loop'), 'y')
    before = """
        loop = StatelessWhile(loop/loop_counter, loop/maximum_iterations, x)
          sum = Sum(Placeholder, Const)
          is_less = Less(sum, is_less/y)
          add = AddV2(loop/loop_counter, add/y)
          b = Exp(Placeholder)
        loop/Identity_2 = Identity(loop:2)
        y = Exp(loop/Identity_2)
    """
    after = """
        enter_2 = Enter(x)
        merge_2 = Merge(enter_2, next_2)
        enter_0 = Enter(loop/loop_counter)
        merge_0 = Merge(enter_0, next_0)
        condition/sum = Sum(merge_2, condition/Const)
        condition/is_less = Less(condition/sum, condition/is_less/y)
        goes_on = LoopCond(condition/is_less)
        switch_2 = Switch(merge_2, goes_on)
        exit_2 = Exit(switch_2)
        loop/Identity_2 = Identity(exit_2)
        y = Exp(loop/Identity_2)
        step_2 = Identity(switch_2:1)
        body/b = Exp(step_2)
        next_2 = NextIteration(body/b)
        switch_0 = Switch(merge_0, goes_on)
        step_0 = Identity(switch_0:1)
        body/add = AddV2(step_0, body/add/y)
        next_0 = NextIteration(body/add)
    """
    assert_rewritten([take_apart_loops], [y], before, after, x=x, scope='loop/apart/')


def test_take_apart_branches():
    """A gradient uses what the branch has computed, rather than an Optional of it."""
    x, k = batch_of(4, 3), batch_of(4, 3)
    p = tf.placeholder(tf.bool, [], 'p')
    product = lambda: tf.multiply(tf.negative(x, 'b'), k, 'c')  # noqa: E731
    y = tf.cond(p, product, lambda: tf.constant(1.0, shape=[4, 3]), name='cond')
    [gradient] = tf.gradients(y, k, x, name='g')
    before = """
        cond = StatelessIf(p, x, x_1)
          b = Neg(b/x)
          c = Mul(b, c/x_1)
          OptionalFromValue = OptionalFromValue(b)
          OptionalNone = OptionalNone()
        cond/Identity = Identity(cond)
        g/grad_ys_0 = Identity(x)
        g/cond_grad/StatelessIf = StatelessIf(p, g/grad_ys_0, x_1, cond:1)
          gradients/grad_ys_0 = Identity(gradients/grad_ys_0/g/grad_ys_0)
          gradients/c_grad/Mul = Mul(gradients/grad_ys_0, gradients/c_grad/Mul/c/x_1)
          gradients/b_grad/Neg = Neg(gradients/c_grad/Mul)
          Identity = Identity(gradients/b_grad/Neg)
          gradients/c_grad/Mul_1/OptionalGetValue = OptionalGetValue(gradients/c_grad/Mul_1/b)
          gradients/c_grad/Mul_1 = Mul(gradients/grad_ys_0, gradients/c_grad/Mul_1/OptionalGetValue)
          Identity_1 = Identity(gradients/c_grad/Mul_1)
        g/cond_grad/Identity_1 = Identity(g/cond_grad/StatelessIf:1)
    """
    after = """
        cond/switch = Switch(p, p)
        cond/in_branch_3 = Identity(cond/switch)
        cond/switch_1 = Switch(x, p)
        cond/in_branch_1 = Identity(cond/switch_1:1)
        cond/then_branch/b = Neg(cond/in_branch_1)
        cond/switch_2 = Switch(x_1, p)
        cond/in_branch_2 = Identity(cond/switch_2:1)
        cond/then_branch/c = Mul(cond/then_branch/b, cond/in_branch_2)
        cond/merge = Merge(cond/else_branch/Const, cond/then_branch/c)
        cond/Identity = Identity(cond/merge)
        g/grad_ys_0 = Identity(x)
        switch = Switch(g/grad_ys_0, p)
        in_branch = Identity(switch:1)
        then_branch/gradients/grad_ys_0 = Identity(in_branch)
        then_branch/gradients/c_grad/Mul_1 = Mul(then_branch/gradients/grad_ys_0, cond/then_branch/b)
        then_branch/Identity_1 = Identity(then_branch/gradients/c_grad/Mul_1)
        merge_1 = Merge(else_branch/zeros_like_1, then_branch/Identity_1)
        g/cond_grad/Identity_1 = Identity(merge_1)
    """  # noqa: E501
    of_gradient = 'g/cond_grad/StatelessIf/'
    assert_rewritten([take_apart_branches], [y, gradient], before, after, x, scope=of_gradient)


def v1_loop(x, **options):
    """A loop of TensorFlow 1."""
    with behavior_of('v1'):
        is_less = lambda a: tf.less(tf.reduce_sum(a, name='sum'), 9.0, 'is_less')  # noqa: E731
        twice = lambda a: tf.concat([a, a], 0, 'twice')  # noqa: E731
        shapes = [tf.TensorShape([None, 3])]
        return tf.while_loop(is_less, twice, [x], shapes, name='loop', **options)


def test_bypass_loops_of_handles():
    w = variable(3)
    is_less = lambda a: tf.reduce_all(a < 3, name='is_less')  # noqa: E731
    multiplied = lambda a: tf.multiply(a, w, 'multiplied')  # noqa: E731
    loop = tf.while_loop(is_less, multiplied, [batch_of(4, 3)], name='loop').op.inputs[0].op
    [handle] = [output for output in loop.outputs if output.dtype == tf.resource]
    shape = tf.raw_ops.VariableShape(input=handle, name='shape')
    before = """
        loop = While(loop/loop_counter, loop/maximum_iterations, x, w)
          Less = Less(Placeholder, Less/y)
          is_less = All(Less, Const)
          add = AddV2(loop/loop_counter, add/y)
          multiplied/ReadVariableOp = ReadVariableOp(multiplied/ReadVariableOp/w)
          multiplied = Mul(Placeholder, multiplied/ReadVariableOp)
        shape = VariableShape(loop:3)
    """
    after = """
        shape = VariableShape(w)
    """
    assert_rewritten([bypass_loops_of_handles], [shape], before, after)


def test_what_reads_after_a_loop_that_writes(graph):
    w = variable(3)

    def add(i):
        with tf.control_dependencies([w.assign_add(tf.ones([3]))]):
            return i + 1

    loop = tf.while_loop(lambda i: i < 3, add, [0], name='loop').op.inputs[0].op
    [handle] = [output for output in loop.outputs if output.dtype == tf.resource]
    read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
    bypass_loops_of_handles(Division(graph))
    assert read.op.inputs[0].op is loop


def test_expand_batch_norm():
    """One op gives the moments, another one applies them. The variance is divided by n."""
    x, ones = batch_of(4, 2, 2, 3), tf.ones([3])
    options = {'scale': ones, 'offset': ones, 'mean': [], 'variance': []}
    y = tf.exp(tf.raw_ops.FusedBatchNormV3(x=x, **options, name='norm').y, 'y')
    before = """
        norm = FusedBatchNormV3(x, ones, ones, norm/mean, norm/variance)
        y = Exp(norm)
    """
    after = """
        Identity = Identity(x)
        Identity_1 = Identity(ones)
        Identity_2 = Identity(ones)
        ones_like = Fill(ones_like/Shape/shape_as_tensor, ones_like/Const)
        FusedBatchNormV3 = FusedBatchNormV3(x, ones_like, zeros_like, FusedBatchNormV3/mean, FusedBatchNormV3/variance)
        GatherV2 = GatherV2(Shape, GatherV2/indices, GatherV2/axis)
        Prod = Prod(GatherV2, Const)
        Cast = Cast(Prod)
        sub = Sub(Cast, sub/y)
        truediv = RealDiv(sub, Cast)
        MulNoNan = MulNoNan(FusedBatchNormV3:2, truediv)
        FusedBatchNormV3_1 = FusedBatchNormV3(Identity, Identity_1, Identity_2, FusedBatchNormV3:1, MulNoNan)
        y = Exp(FusedBatchNormV3_1)
    """  # noqa: E501
    assert_rewritten([expand_batch_norm], [y], before, after, scope='norm/moments/')


def test_recompute_activations():
    x = net = batch_of(4, 3)
    for name in 'abc':
        net = tf.tanh(net, name)
    [of_x] = tf.gradients(net, [x], tf.placeholder(tf.float32, [4, 3], 'dy'), name='of')
    before = """
        a = Tanh(x)
        b = Tanh(a)
        c = Tanh(b)
        of/grad_ys_0 = Identity(dy)
        of/c_grad/TanhGrad = TanhGrad(c, of/grad_ys_0)
        of/b_grad/TanhGrad = TanhGrad(b, of/c_grad/TanhGrad)
        of/a_grad/TanhGrad = TanhGrad(a, of/b_grad/TanhGrad)
    """
    after = """
        a = Tanh(x)
        b = Tanh(a)
        c = Tanh(b)
        of/grad_ys_0 = Identity(dy)
        of/c_grad/TanhGrad = TanhGrad(c, of/grad_ys_0)
        of/b_grad/TanhGrad = TanhGrad(b, of/c_grad/TanhGrad)
        recompute/barrier_0 = EnsureShape(x) after of/b_grad/TanhGrad
        recompute/a = Tanh(recompute/barrier_0)
        of/a_grad/TanhGrad = TanhGrad(recompute/a, of/b_grad/TanhGrad)
    """
    assert_rewritten([divide._recompute], [net, of_x], before, after, x=x)


def test_read_after_writes():
    with behavior_of('v1'):
        x, w, ones = batch_of(4, 3), tf.get_variable('w', [3]), tf.ones([3])
        a = tf.multiply(x, w, 'a')
        with tf.control_dependencies([a]):
            write = tf.assign_add(w, ones, name='write')
        with tf.control_dependencies([write]):
            y = tf.multiply(x, w, 'y')
    before = """
        w/read = Identity(w)
        a = Mul(x, w/read)
        write = AssignAdd(w, ones) after a
        y = Mul(x, w/read) after write
    """
    after = """
        w/read = Identity(w)
        a = Mul(x, w/read)
        write = AssignAdd(w, ones) after a
        w/later_read = Identity(w) after write
        w/read/later_read = Identity(w/later_read)
        y = Mul(x, w/read/later_read) after write
    """
    assert_rewritten([divide._find_order, read_after_writes], [y], before, after)


def test_remove_loop_waits():
    x = batch_of(4, 3)
    with tf.control_dependencies([tf.no_op('update')]):
        loop = v1_loop(x)
    before = """
        update = NoOp()
        Enter = Enter(x) after update
        Merge = Merge(Enter, NextIteration)
        sum = Sum(Merge, Const)
        is_less = Less(sum, is_less/y)
        LoopCond = LoopCond(is_less)
        Switch = Switch(Merge, LoopCond)
        Exit = Exit(Switch)
        y = Exp(Exit)
        Identity = Identity(Switch:1)
        twice = ConcatV2(Identity, Identity, twice/axis)
        NextIteration = NextIteration(twice)
    """
    after = before.replace('update = NoOp()\n        ', '').replace(' after update', '')
    steps = [divide._find_order, remove_loop_waits]
    assert_rewritten(steps, [tf.exp(loop, 'y')], before, after, scope='loop/')


def test_bypass_identities():
    x = batch_of(4, 3)
    a, b = tf.tuple([tf.negative(x, 'a'), tf.sin(x, 'b')], 'tied')
    c, d = tf.identity_n([tf.exp(a, 'c'), tf.cos(b, 'd')], 'many')
    with tf.control_dependencies([tf.no_op('check')]):
        checked = tf.identity(c, 'checked')
    before = """
        a = Neg(x)
        b = Sin(x)
        tied/group_deps = NoOp() after a, b
        tied/control_dependency = Identity(a) after tied/group_deps
        c = Exp(tied/control_dependency)
        tied/control_dependency_1 = Identity(b) after tied/group_deps
        d = Cos(tied/control_dependency_1)
        many = IdentityN(c, d)
        check = NoOp()
        checked = Identity(many) after check
        y = AddV2(checked, many:1)
    """
    after = """
        a = Neg(x)
        c = Exp(a)
        b = Sin(x)
        d = Cos(b)
        y = AddV2(c, d)
    """
    steps = [divide._find_order, bypass_identities]
    assert_rewritten(steps, [tf.add(checked, d, 'y')], before, after)


def test_find_unused_ops(graph):
    x = batch_of(4, 3)
    a, b = tf.tuple([tf.negative(x, 'a'), tf.sin(x, 'b')], 'tied')
    before = """
        a = Neg(x)
        b = Sin(x)
        tied/group_deps = NoOp() after a, b
        tied/control_dependency = Identity(a) after tied/group_deps
        tied/control_dependency_1 = Identity(b) after tied/group_deps
        y = AddV2(tied/control_dependency, tied/control_dependency_1)
    """
    after = """
        a = Neg(x)
        b = Sin(x)
        y = AddV2(a, b)
        tied/group_deps = NoOp() after a, b (unused)
    """
    steps = [divide._find_order, bypass_identities, find_unused_ops]
    group = graph.get_operation_by_name('tied/group_deps')
    assert_rewritten(steps, [tf.add(a, b, 'y')], before, after, also=[group])


def test_find_unused_gradients(graph):
    """Of a product with a number, only the gradient of the other factor is asked for."""
    x = batch_of(4, 3)
    net = tf.multiply(x, tf.constant(2.0, name='number'), 'net')
    [of_x] = tf.gradients(net, [x], tf.placeholder(tf.float32, [4, 3], 'dy'), name='of')
    before = """
        of/grad_ys_0 = Identity(dy)
        of/net_grad/Mul = Mul(of/grad_ys_0, number)
        of/net_grad/Mul_1 = Mul(x, of/grad_ys_0)
        of/net_grad/Sum = Sum(of/net_grad/Mul_1, of/net_grad/Sum/reduction_indices)
        of/net_grad/Reshape = Reshape(of/net_grad/Sum, of/net_grad/Shape_1)
    """
    after = """
        of/grad_ys_0 = Identity(dy)
        of/net_grad/Mul = Mul(of/grad_ys_0, number)
        of/net_grad/Mul_1 = Mul(x, of/grad_ys_0) (unused)
        of/net_grad/Sum = Sum(of/net_grad/Mul_1, of/net_grad/Sum/reduction_indices) (unused)
        of/net_grad/Reshape = Reshape(of/net_grad/Sum, of/net_grad/Shape_1) (unused)
    """
    steps = [divide._find_order, find_unused_gradients]
    of_number = graph.get_operation_by_name('of/net_grad/Reshape')
    assert_rewritten(steps, [of_x], before, after, also=[of_number])


def test_bypass_needless_ops():
    x = batch_of(4, 3)
    same = tf.reshape(tf.negative(x, 'a'), tf.shape(x), 'same')
    before = """
        a = Neg(x)
        same = Reshape(a, Shape)
        y = Exp(same)
    """
    after = """
        a = Neg(x)
        y = Exp(a)
    """
    steps = [divide._find_order, divide._plan, bypass_needless_ops]
    assert_rewritten(steps, [tf.exp(same, 'y')], before, after, x=x)


def test_place_ops():
    """The update is computed where its variable is; the sum is sharded, and has no device."""
    x = batch_of(4, 3)
    with tf.device('/device:CPU:1'):
        w = variable(3)
    update = tf.multiply(tf.reduce_sum(x, 0, name='gradient'), -0.1, 'update')
    write = w.assign_add(update, name='write', read_value=False)
    before = """
        gradient = Sum(x, gradient/reduction_indices)
        update = Mul(gradient, update/y)
        write = AssignAddVariableOp(w, update)
    """
    after = """
        gradient = Sum(x, gradient/reduction_indices)
        update = Mul(gradient, update/y) on /device:CPU:1
        write = AssignAddVariableOp(w, update)
    """
    assert_rewritten([divide._find_order, divide._plan, place_ops], [write], before, after, x=x)


# The order of state, between the steps.


def assert_in_order(division):
    """Asserts that a graph touches state as it did when the facts were noted.

    Until its order is found, the graph itself says so. After that, what the order says counts too:
    `towers.waits` adds control edges by it. Here they are added to a copy.
    """
    results = [division.op_in_place_of(op) for op in division.results]
    if not hasattr(division, 'order'):
        check.check(division.facts, division.graph, results)
        return

    no_plan = types.SimpleNamespace(order=())
    nothing = lambda tensor: False  # noqa: E731
    no_towers = types.SimpleNamespace(
        is_size_of_local=nothing, is_made_from_all=nothing, is_made_from_local=nothing
    )
    ops = graphs.topological_order(division.graph.get_operations())
    waits = Waits(ops, {}, no_plan, division.order, no_towers)
    with tf.Graph().as_default() as copy:
        tf.import_graph_def(division.graph.as_graph_def(), name='')

        def in_copy(ops):
            return [copy.get_operation_by_name(op.name) for op in ops]

        for op in waits.ops_with_added():
            private.add_control_inputs(*in_copy([op]), in_copy(waits.added(op)))
        ends = []
        for op, result in zip(division.results, results):
            missing = waits.missing(division.replacements(op.outputs[0])) if op.outputs else []
            with tf.control_dependencies(in_copy([result, *missing])):
                ends.append(tf.no_op('result'))
        check.check(division.facts, copy, ends)


def check_steps(monkeypatch, steps=divide.STEPS):
    """Lets the order be checked after each step from the facts to the plan; returns their names."""
    checked = []

    def checking(rewrite):
        @functools.wraps(rewrite)
        def rewrite_and_check(division):
            rewrite(division)
            assert_in_order(division)
            checked.append(rewrite.__name__)

        return rewrite_and_check

    begin, end = steps.index(divide._note_facts), steps.index(divide._plan)
    middle = [checking(rewrite) for rewrite in steps[begin + 1 : end]]
    monkeypatch.setattr(divide, 'STEPS', (*steps[: begin + 1], *middle, *steps[end:]))
    return checked


CHECKED = """
    bypass_loops_of_handles expand_batch_norm _recompute _find_order read_after_writes
    remove_loop_waits bypass_identities find_unused_ops find_unused_gradients
"""


@pytest.mark.parametrize('recompute', [False, True], ids=['kept', 'recomputed'])
@pytest.mark.parametrize('name', MODELS)
def test_each_step_leaves_the_order(name, recompute, behavior, monkeypatch):
    checked = check_steps(monkeypatch)
    graph_of(MODELS[name], BATCHES, 2, recompute=recompute)
    assert checked == CHECKED.split()


@pytest.mark.parametrize('name', [*WRITING.split(), 'dynamic_rnn', 'masked_centered'])
def test_each_step_leaves_the_order_of_what_is_beside_a_model(name, behavior, monkeypatch):
    checked = check_steps(monkeypatch)
    case = case_of(name, [6], True)
    graph_of(random_graphs.model_fn_of(case), random_graphs.batches_of(case), 2)
    assert checked == CHECKED.split()


def _with_step(step, after):
    """The steps, and one more."""
    index = divide.STEPS.index(after) + 1
    return (*divide.STEPS[:index], step, *divide.STEPS[index:])


def loss_and_count(features, labels):
    """A loss that reads a count."""
    count = tf.get_variable('count', [], trainable=False, initializer=tf.zeros_initializer())
    return squares(features, labels) + count, count


def test_a_step_that_loses_a_wait_is_found(behavior, monkeypatch):
    def model_fn(features, labels, mode):
        one = tf.constant(1.0)
        loss, count = loss_and_count(features, labels)
        with tf.control_dependencies([loss]):
            return spec_of(mode, loss, sgd(loss), count.assign_add(one))

    def lose_waits(division):
        for op in division.graph.get_operations():
            if op.type.startswith('Assign'):
                private.remove_control_inputs(op)

    check_steps(monkeypatch, _with_step(lose_waits, expand_batch_norm))
    with pytest.raises(RuntimeError, match='no longer waits for'):
        graph_of(model_fn, BATCHES, 2)


def test_an_order_that_is_found_too_late_is_found(behavior, monkeypatch):
    """Once an identity is bypassed, nothing in the graph says that its user came later."""

    def model_fn(features, labels, mode):
        one = tf.constant(1.0)
        loss, count = loss_and_count(features, labels)
        with tf.control_dependencies([loss]):
            late = tf.identity(one)
        return spec_of(mode, loss, sgd(loss), count.assign_add(late))

    check_steps(monkeypatch, _with_step(divide._find_order, bypass_identities))
    with pytest.raises(RuntimeError, match='no longer waits for'):
        graph_of(model_fn, BATCHES, 2)
