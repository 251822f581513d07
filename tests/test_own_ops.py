"""`register_rule` and `check_rule`: ops of one's own are sharded, by rules that hold."""

import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
import towers
from estimator_mgpu import check_rule, register_rule
from estimator_mgpu.custom_ops.dimensions import Dimension
from estimator_mgpu.custom_ops.op_calls import Call
from estimator_mgpu.partition.propagation.matching import Match
from estimator_mgpu.partition.rules import RULES
from estimator_mgpu.partition.sizes import ONE
from models import batches, floats, spec_of, step

ROWS = floats(7, 3)


@pytest.fixture(autouse=True)
def no_rules_are_left():
    before = dict(RULES)
    RULES.pop('Dawsn', None)  # Examples in docs register rules as well.
    RULES.pop('Cross', None)
    yield
    RULES.clear()
    RULES.update(before)


@pytest.fixture(scope='module')
def ops(tmp_path_factory):
    """The module of the op that centered.cc has."""
    if not shutil.which('g++'):
        pytest.skip('there is no g++ to compile an op with')
    library = tmp_path_factory.mktemp('ops') / 'centered.so'
    source = pathlib.Path(__file__).with_name('centered.cc')
    flags = [*tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags()]
    command = ['g++', '-std=c++17', '-shared', '-fPIC', '-w', '-o', library, source, *flags]
    subprocess.run(command, check=True)
    return tf.load_op_library(str(library))


def by_axis(op, sizes):
    return 'n_ -> n_' if op.get_attr('axis') == 1 else None


@pytest.mark.core
def test_a_compiled_op(ops):
    """Along each row it's divided, and over the batch it isn't; both are one device's."""

    def model_fn(features, labels, mode):
        net = ops.centered(features, axis=1) + ops.centered(features, axis=0)
        loss = tf.reduce_mean(tf.square(net @ tf.get_variable('w', [3, 1]) - labels))
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss, step()))

    def what_runs_once():
        estimator = estimator_mgpu.Estimator(model_fn, devices=2)
        found = estimator.explain(lambda: tf.data.Dataset.from_tensors(batches(7)[0]))
        return {op.name: op.why for op in found.once if 'Centered' in op.name}

    assert what_runs_once() == dict.fromkeys(['Centered', 'Centered_1'], 'no rule for Centered')
    register_rule('Centered', by_axis)
    assert what_runs_once() == {'Centered_1': 'this Centered needs all examples'}
    towers.compare(model_fn, batches(7), 3)
    assert check_rule(lambda x: ops.centered(x, axis=1), ROWS) == {'Centered'}
    assert check_rule(lambda x: ops.centered(x, axis=0), ROWS) == set()


@pytest.mark.core
def test_a_rule_that_does_not_hold(ops):
    register_rule('Centered', 'row by row')
    assert check_rule(lambda x: ops.centered(x, axis=1), ROWS) == {'Centered'}
    with pytest.raises(AssertionError, match='Mismatched elements'):
        check_rule(lambda x: ops.centered(x, axis=0), ROWS)


@pytest.mark.core
@pytest.mark.parametrize('rule', ['elementwise', 'row by row', 'S_ -> S_', lambda op, _: 'S -> S'])
def test_an_op_of_tensorflow_without_a_rule(rule):
    register_rule('Dawsn', lambda op, sizes: None)
    assert check_rule(tf.math.special.dawsn, ROWS) == set()
    register_rule('Dawsn', rule)
    assert check_rule(tf.math.special.dawsn, ROWS) == {'Dawsn'}


def test_ops_that_are_not_tried_alone():
    """Then the function as a whole says that a rule doesn't hold."""
    register_rule('EuclideanNorm', 'n_ * -> _ (sum)')
    with pytest.raises(AssertionError, match='Mismatched elements'):
        check_rule(lambda x: tf.raw_ops.EuclideanNorm(input=x, axis=0), ROWS, types=[])


def test_an_op_that_gives_what_it_is_given():
    same = lambda x: tf.reshape(x + 1, tf.shape(x))  # noqa: E731
    assert check_rule(same, ROWS) == {'AddV2', 'Reshape'}


def test_an_op_in_a_loop():
    register_rule('Dawsn', 'elementwise')
    inside = check_rule(lambda x: tf.map_fn(tf.math.special.dawsn, tf.transpose(x)), ROWS)
    assert inside > {'Dawsn', 'StatelessWhile'}


@pytest.mark.parametrize('value', [1.0, 1e8, np.inf])
def test_a_rule_that_does_not_hold_beside_large_numbers(value):
    register_rule('EuclideanNorm', 'n_ * -> _ (sum)')
    rows = ROWS.copy()
    rows[0, 0] = value
    with pytest.raises(AssertionError, match='Mismatched elements'):
        check_rule(lambda x: tf.raw_ops.EuclideanNorm(input=x, axis=0), rows)


@pytest.mark.core
@pytest.mark.parametrize(
    ('rule', 'message'),
    [
        (
            'S S -> S',
            "Cross, 'S S -> S', is wrong along dimension 1 of input 0 of 'Cross', .* fails",
        ),
        ('nS n_ -> nS', 'dimension 1 of input 0'),
        ('_a S_ -> Sa', 'dimension 1 of input 0'),
        ('n_ n_ -> * (sum)', 'dimension 0 of input 0 .* shape'),
        ('n_ m_ -> n_ (sum)', 'dimension 0 of input 0'),
        (lambda op, sizes: 'ab ab -> ab', 'rule for Cross is wrong along dimension 1 of input 0'),
    ],
)
def test_a_rule_that_does_not_hold_along_another_dimension(rule, message):
    """Along dimension 0 alone, that of the examples, the first three do."""
    register_rule('Cross', rule)
    with pytest.raises(AssertionError, match=f'(?s){message}'):
        check_rule(tf.linalg.cross, ROWS, ROWS + 1)


def test_a_mean_of_integers():
    """No division of integers has a kernel. Then no op of the graph runs, in any trial."""
    register_rule('HistogramFixedWidth', '_k * * -> * (mean)')
    register_rule('Cross', 'S S -> S')  # which doesn't hold
    function = lambda x: [tf.linalg.cross(x, x), tf.histogram_fixed_width(x, [0.0, 1.0], 4)]  # noqa: E731
    with pytest.raises(AssertionError, match='(?s)makes an op that .* no kernel for: .*RealDiv'):
        check_rule(function, ROWS)


def joined(x):
    return tf.raw_ops.ReduceJoin(inputs=tf.as_string(x), reduction_indices=[0])


def logarithm(x):
    return tf.raw_ops.MatrixLogarithm(input=tf.cast(tf.linalg.diag(x), tf.complex64))


def integral(x):
    return tf.raw_ops.Dawsn(x=x)


@pytest.mark.parametrize(
    ('function', 'op_type', 'rule', 'message'),
    [
        (joined, 'ReduceJoin', 'n_ * -> * (sum)', "string by 'sum'. Legal is no reduction."),
        (logarithm, 'MatrixLogarithm', 'n__ -> * (max)', "complex64 by 'max'. Legal is sum or"),
        (integral, 'Dawsn', 'n_ -> * (any)', "float32 by 'any'. Legal is sum or mean or"),
    ],
)
def test_reductions_that_a_type_has_not(function, op_type, rule, message):
    register_rule(op_type, rule)
    with pytest.raises(RuntimeError, match=re.escape(f'its rule reduces {message}')):
        check_rule(function, ROWS)


def test_a_rule_that_holds_along_other_dimensions():
    register_rule('Cross', 'S_ S_ -> S_')
    stacked = floats(4, 2, 3)
    assert check_rule(tf.linalg.cross, stacked, stacked + 1) == {'Cross'}


def test_ops_that_are_tried():
    """Those that the outputs need, in a `tf.function`, too, of the types that are asked for."""
    register_rule('Cross', 'S S -> S')
    assert check_rule(lambda x: [x + 1, tf.linalg.cross(x, x)][0], ROWS) == {'AddV2', 'Cross'}
    with pytest.raises(AssertionError, match='The rule for Cross'):
        check_rule(tf.function(lambda x: tf.linalg.cross(x, x) + 1), ROWS)
    function = lambda x: tf.linalg.cross(x, x) + 1  # noqa: E731
    assert check_rule(function, ROWS, types=['AddV2']) == {'AddV2', 'Cross'}
    with pytest.raises(AssertionError, match='The rule for Cross'):
        check_rule(function, ROWS, types={'Cross'})


@pytest.mark.parametrize('types', ['Softmax', ['Sotfmax']])
def test_types_that_have_no_rule(types):
    with pytest.raises(ValueError, match=f'types=.*{types[0]}.*: give a list of types of ops that'):
        check_rule(tf.nn.softmax, ROWS, types=types)


def test_a_rule_that_fails():
    register_rule('Cross', lambda op, sizes: 1 / 0)
    with pytest.raises(RuntimeError, match=r"'Cross' \(a Cross\): ZeroDivisionError: division by"):
        check_rule(tf.linalg.cross, ROWS, ROWS)


def test_one_letter_for_dimensions_that_differ():
    register_rule('ImageProjectiveTransformV3', 'n... _n * * -> n...')
    message = r'It has one letter for dimensions of inputs \[0, 1\], which have \[7, 8\] entries'
    with pytest.raises(AssertionError, match=message):
        check_rule(moved, floats(7, 4, 4, 2), SHIFTS)


def test_one_letter_for_an_entry_of_a_shape_that_differs():
    register_rule('ImageProjectiveTransformV3', 'n... n_ #n_ * -> n...')
    message = r'It has one letter for dimensions of inputs \[0, 1, 2\], which have \[7, 7, 4\] entr'
    with pytest.raises(AssertionError, match=message):
        check_rule(moved, floats(7, 4, 4, 2), SHIFTS)


def test_ops_in_v1_loops_are_sharded():
    """They aren't tried one by one, as what they are given can't be fetched."""
    register_rule('Cross', 'S S -> S')
    with towers.behavior_of('v1'):
        loop = lambda x: tf.while_loop(  # noqa: E731
            lambda i, x: i < 2, lambda i, x: (i + 1, tf.linalg.cross(x, x + 1)), [0, x]
        )
        assert 'Cross' in check_rule(loop, ROWS)


def test_what_an_op_does_not_take():
    """Three rows in place of the one that becomes a vector: it isn't held against the rule."""
    assert check_rule(lambda x: tf.reshape(x[:1], [3]) + x, ROWS) == {'AddV2'}


def test_a_shape_that_has_a_multiple_of_the_size():
    """Of [4, 6] reshaped to [8, 3], three examples give [6, 3]."""
    given, shape = np.zeros([4, 6]), np.array([8, 3])
    with tf.Graph().as_default():
        call = Call(tf.reshape(tf.constant(given), shape).op, [given, shape], [0])
    dimension = Dimension(call, axes={0: 0}, positions={1: 0}, size=4, tried=4)
    assert dimension.input_with(0, 3).shape == (3, 6)
    assert dimension.shape_with(1, 3).tolist() == [6, 3]


def right_for_one_entry(op, sizes):
    return 'S_ -> S_' if sizes.dims(op.inputs[0])[-1].static == 1 else 'S -> S'


@pytest.mark.parametrize('rule', ['S -> S', right_for_one_entry], ids=['text', 'function'])
def test_a_dimension_of_one_entry(rule, monkeypatch):
    """It's made longer, and the rule is asked about the longer one."""
    monkeypatch.setitem(RULES, 'Softmax', rule)
    with pytest.raises(AssertionError, match='(?s)Softmax.* dimension 1 .*With 3 entries'):
        check_rule(tf.nn.softmax, ROWS[:, :1])


def moved(images, shifts):
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=shifts,
        output_shape=[4, 4],
        fill_value=0.0,
        interpolation='BILINEAR',
    )


SHIFTS = np.array([[1, 0, i / 3, 0, 1, -i / 2, 0, 0] for i in range(7)], np.float32)


@pytest.mark.core
@pytest.mark.parametrize('static', [True, False])
@pytest.mark.parametrize('rule', ['n... n_ * * -> n...', 'N... N_ * * -> N...'])
def test_one_transform_for_all_images(rule, static):
    """An input of one row, that is known beforehand or only when the step runs, is repeated."""
    register_rule('ImageProjectiveTransformV3', rule)
    images = floats(7, 4, 4, 2)

    def function(images):
        shape = [1 if static else None, 8]
        return moved(images, tf.placeholder_with_default(SHIFTS[:1], shape))

    divided = check_rule(function, images)
    assert ('ImageProjectiveTransformV3' in divided) == static
    assert 'ImageProjectiveTransformV3' in check_rule(moved, images, SHIFTS)


@pytest.mark.core
@pytest.mark.parametrize('count', [7, 1])
def test_one_image_for_all_transforms(count):
    """A batch of one example is repeated, too, beside as many rows as may be."""
    register_rule('ImageProjectiveTransformV3', 'n... n_ * * -> n...')
    images = floats(7, 4, 4, 2)

    def model_fn(features, labels, mode):
        scale = tf.get_variable('scale', [], initializer=tf.ones_initializer())
        loss = scale * tf.reduce_mean(moved(images, features) * tf.range(7.0)[:, None, None, None])
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss, step()))

    towers.compare(model_fn, [(SHIFTS[:count], None)], 2, static=False)


@pytest.mark.parametrize(
    ('function', 'rows', 'message'),
    [
        (tf.add, [ROWS, ROWS], 'With 7 entries there, and 1 in input 0'),
        (lambda x: moved(x, SHIFTS[:1]), [floats(7, 4, 4, 2)], 'With 1 entries there, and 7 in'),
    ],
)
def test_what_may_be_repeated_is_never_sliced(function, rows, message, monkeypatch):
    """If it were, this would be found."""
    register_rule('ImageProjectiveTransformV3', 'n... n_ * * -> n...')
    check_rule(function, *rows)
    monkeypatch.setattr(Match, '_must_be_equal', lambda *_: True)
    with pytest.raises(AssertionError, match=message):
        check_rule(function, *rows)


def unknown(x, dtype=tf.float32):
    """The same numbers, of which nobody knows how many they are."""
    result = tf.numpy_function(lambda x: x.astype(dtype.as_numpy_dtype), [x], dtype)
    result.set_shape([None, *x.shape[1:]])
    return result


@pytest.mark.core
@pytest.mark.parametrize(
    ('op_type', 'function'),
    [
        ('ConcatV2', lambda x: tf.concat([x, unknown(x)], 1)),
        ('Pack', lambda x: tf.stack([unknown(x), x], 1)),
        ('MatMul', lambda x: tf.matmul(x, unknown(x), transpose_a=True)),
        ('BatchMatMulV2', lambda x: tf.matmul(x[:, None], unknown(x)[:, :, None])),
        ('Select', lambda x: tf.raw_ops.Select(condition=unknown(x[:, 0], tf.bool), x=x, y=2 * x)),
        (
            'SparseSoftmaxCrossEntropyWithLogits',
            lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(
                logits=x, labels=unknown(tf.cast(x[:, 0] > 0, tf.int32), tf.int32)
            ),
        ),
    ],
)
def test_sizes_that_tensorflow_demands_to_be_equal(op_type, function):
    """A tensor of as many rows as the batch, or else the op fails, is sliced."""
    once = {'BatchMatMulV2'}  # It repeats one matrix.
    assert (op_type in check_rule(function, ROWS, types=[])) == (op_type not in once)


def test_what_is_not_known_to_be_of_the_batch():
    """A rule that takes it for one row is wrong where there are more."""

    def rule(op, sizes):
        size = sizes.dims(op.inputs[1])[0]
        return 'S_ S_ -> S_' if size.rows or size.static else 'S_ * -> S_'

    register_rule('Cross', rule)
    with pytest.raises(
        AssertionError, match='With 7 entries there, and 7 in input 1, a tower fails'
    ):
        check_rule(tf.linalg.cross, ROWS, ROWS + 1)


@pytest.mark.parametrize('result', [5, None, []], ids=repr)
def test_a_function_that_makes_no_tensor(result):
    with pytest.raises(TypeError, match='It has to make a tensor, or a nest of tensors'):
        check_rule(lambda x: result, ROWS)


def test_one_row_that_is_repeated(monkeypatch):
    """TensorFlow takes it for a sum, and no other number, so it's tried beside more rows."""

    def rule(op, sizes):
        return 'n_ n_ -> n_' if sizes.dims(op.inputs[1])[0] != ONE else 'n_ n_ -> * (sum)'

    monkeypatch.setitem(RULES, 'AddV2', rule)
    with pytest.raises(
        AssertionError, match='With 7 entries there, and 1 in input 1, a tower fails: Inp'
    ):
        check_rule(lambda x, y: tf.raw_ops.AddV2(x=x, y=y), ROWS, ROWS)


def test_what_is_compared():
    """Numbers that are none, strings, and nests of tensors, of several arrays."""
    assert check_rule(tf.sqrt, ROWS) == {'Sqrt'}  # nan of those below 0
    assert 'NotEqual' in check_rule(tf.sparse.from_dense, ROWS)
    assert 'Sum' in check_rule(lambda x: tf.metrics.mean(x)[1], ROWS)
    assert check_rule(tf.strings.length, np.array([b'a', b'bc', b'd', b'e'])) == {'StringLength'}
    types = check_rule(lambda x, y: {'sum': x + y, 'all': [tf.reduce_sum(x)]}, ROWS, ROWS * 2)
    assert types == {'AddV2', 'Sum'}


# Types and rules that cannot be, with the error that says so.
REFUSED = {
    'no type': (3, 'S -> S', TypeError, 'give a type by name, and a text or a function'),
    'no rule': ('Dawsn', None, TypeError, r"register_rule\('Dawsn', None\): give a type by name"),
    'a list': ('Dawsn', ['S -> S'], TypeError, 'give a type by name, and a text or a function'),
    'a function of one argument': (
        'Cross',
        lambda op: 'S_ S_ -> S_',
        TypeError,
        r'The rule for Cross is a function of \(op\), .*Give a function \(op, sizes\)',
    ),
    'no text of a rule': ('Dawsn', 'by rows', ValueError, "'by rows' isn't a rule.*'mk kn -> mn"),
    'another number of inputs': (
        'Cross',
        'S_ -> S_',
        ValueError,
        "'S_ -> S_' is no rule for Cross: the rule is for the inputs 'S_', and the op has 2[.]",
    ),
    'another number of outputs': (
        'Cross',
        'S S -> S S',
        ValueError,
        "the rule is for the outputs 'S S', and the op has 1. Give a word for each",
    ),
    'a rule of the package': ('Softmax', 'elementwise', ValueError, 'Softmax has a rule already'),
    'a loop': ('StatelessWhile', 'S+ -> S+', ValueError, 'StatelessWhile has a rule already'),
    'a branch of TensorFlow 1': ('Switch', 'S * -> S S', ValueError, 'Switch has a rule already'),
    'a list op': ('TensorListStack', 'S * -> S', ValueError, 'TensorListStack has a rule already'),
    'a selection': ('Where', 'S -> *', ValueError, 'Where has a rule already'),
    'entries': ('SparseReshape', 'S * * -> S *', ValueError, 'SparseReshape has a rule already'),
    'a question of shape': ('Shape', 'S -> *', ValueError, 'Shape has a rule already'),
    'calls Python': (
        'PyFunc',
        'row by row',
        ValueError,
        'PyFunc cannot have a .*call Python',
    ),
    'draws': ('RandomGamma', 'n * -> n', ValueError, 'RandomGamma cannot .*draw random numbers'),
    'writes': ('ResourceScatterAdd', '* n n -> *', ValueError, 'ResourceScatterAdd cannot'),
    'writes to a reference': ('ScatterAdd', '* n n -> *', ValueError, 'ScatterAdd cannot'),
    'misspelled': (
        'Dawsm',
        'elementwise',
        ValueError,
        "no ops of the type 'Dawsm'. Did you mean Dawsn[?] Load an op of your own before",
    ),
    'not loaded': (
        'EntirelyMyOwn',
        'elementwise',
        ValueError,
        r"type 'EntirelyMyOwn'. Load an op of your own before .* by tf.load_op_library\(\)",
    ),
}


@pytest.mark.core
@pytest.mark.parametrize('case', REFUSED)
def test_what_cannot_have_a_rule(case):
    op_type, rule, error, message = REFUSED[case]
    before = RULES.get(op_type)
    with pytest.raises(error, match=f'(?s){message}'):
        register_rule(op_type, rule)
    assert RULES.get(op_type) is before


def test_an_op_that_draws_what_its_place_says():
    """TensorFlow calls it stateless: the numbers follow from a seed, and from the places."""
    register_rule('StatelessRandomUniformV2', '#S * * * -> S')
    with pytest.raises(AssertionError, match='The rule for StatelessRandomUniformV2.* is wrong'):
        check_rule(lambda x: x + tf.random.stateless_uniform(tf.shape(x), [1, 2]), ROWS)


def test_an_op_of_any_number_of_inputs():
    """Only the op knows how many it has."""
    register_rule('QuantizedConcat', '* n_ n_ * * * * -> n_ * *')
    assert 'QuantizedConcat' in RULES


def test_an_op_of_any_number_of_outputs():
    register_rule('DecodeCSV', 'n * * -> n n')
    lines = np.array(['1,2', '3,4', '5,6', '7,8', '9,0'])
    assert check_rule(lambda x: tf.io.decode_csv(x, [[0], [0]]), lines) == {'DecodeCSV'}


def test_a_function_of_python_itself():
    """It can't be asked for its arguments."""
    register_rule('Cross', max)
    with pytest.raises(RuntimeError, match=r"'Cross' \(a Cross\): TypeError: '>' not supported"):
        check_rule(tf.linalg.cross, ROWS, ROWS)


def test_a_rule_that_is_replaced():
    register_rule('Dawsn', 'row by row')
    register_rule('Dawsn', 'elementwise')
    assert RULES['Dawsn'] == 'elementwise'


@pytest.mark.parametrize(
    ('returned', 'message'),
    [
        (3, 'TypeError: the rule for Cross returned 3. A rule returns a text, such as'),
        (['S S -> S'], r"TypeError: the rule for Cross returned \['S S -> S'\]"),
        ('by rows', "ValueError: 'by rows' isn't a rule: it has another form"),
        ('S -> S', "ValueError: the rule is for the inputs 'S', and the op has 2"),
    ],
    ids=repr,
)
def test_a_function_that_returns_no_rule(returned, message):
    """It's called when a graph is divided, or in check_rule."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.linalg.cross(features, features) - labels)
        return spec_of(mode, loss, tf.no_op())

    register_rule('Cross', lambda op, sizes: returned)
    named = rf"'Cross' \(a Cross\): {message}"
    with pytest.raises(RuntimeError, match=named):
        check_rule(tf.linalg.cross, ROWS, ROWS)
    with pytest.raises(RuntimeError, match=f'{named}.*mend your own rule'):
        towers.train(model_fn, batches(7, steps=1), 2)


@pytest.mark.parametrize('rule', ['n__ n__ -> n__', lambda op, sizes: 'n__ n__ -> n__'])
def test_a_rule_for_other_ranks(rule):
    """It's never used, which check_rule says, and `explain`."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.linalg.cross(features, features) - labels)
        return spec_of(mode, loss, tf.no_op())

    register_rule('Cross', rule)
    why = "'n__' in the rule for Cross is for 3 dimensions, and its input 0 has 2"
    with pytest.raises(AssertionError, match=f"rule for Cross.* doesn't fit 'Cross': {why}. Write"):
        check_rule(tf.linalg.cross, ROWS, ROWS)
    explanation = estimator_mgpu.Estimator(model_fn, devices=2).explain(
        lambda: tf.data.Dataset.from_tensors(batches(7)[0])
    )
    assert [op.why for op in explanation.once if op.name == 'Cross'] == [why]

    stacked = floats(4, 2, 3)
    assert check_rule(tf.linalg.cross, stacked, stacked + 1) == {'Cross'}


def test_a_rule_for_other_ranks_of_an_output():
    register_rule('Cross', 'n_ n_ -> n__')
    with pytest.raises(AssertionError, match="'n__' .* for 3 dimensions, and its output 0 has 2"):
        check_rule(tf.linalg.cross, ROWS, ROWS)


def test_a_rule_of_the_package_for_other_ranks(monkeypatch):
    """Such an op runs once, which is no mistake of the user's."""
    monkeypatch.setitem(RULES, 'Softmax', 'n__ -> n__')
    assert check_rule(tf.nn.softmax, ROWS) == set()


def drawn_in_python(x):
    return tf.numpy_function(lambda x: x + np.random.rand(*x.shape), [x], tf.float64)


@pytest.mark.parametrize(
    ('function', 'ops'),
    [
        (lambda x: x + tf.random.uniform(tf.shape(x), name='noise'), r"'noise/.*' \(a RandomUni"),
        (tf.function(lambda x: tf.nn.dropout(x, rate=0.5)), r'\(a RandomUniform\)'),
        (lambda x: tf.map_fn(lambda row: tf.random.shuffle(row), x), r"'map/while' \(a While\)"),
        (drawn_in_python, r"'PyFunc' \(a PyFunc\)"),
        (lambda x: x * np.random.rand(), 'Perhaps it draws random numbers in Python'),
    ],
    ids=['an op', 'a function', 'a loop', 'Python', 'Python, before the graph'],
)
def test_a_function_that_draws_random_numbers(function, ops):
    with pytest.raises(ValueError, match=f'other numbers each time it runs.*{ops}.*as an array'):
        check_rule(function, ROWS)


def test_random_numbers_with_a_seed():
    """They are the same in each run, so they are compared."""
    drawn = lambda x: x + tf.random.uniform(tf.shape(x), seed=3)  # noqa: E731
    assert 'AddV2' in check_rule(drawn, ROWS)
    register_rule('EuclideanNorm', 'n_ * -> _ (sum)')
    with pytest.raises(AssertionError, match='Mismatched elements'):
        check_rule(lambda x: tf.raw_ops.EuclideanNorm(input=drawn(x), axis=0), ROWS)


@pytest.mark.parametrize(
    ('arrays', 'count', 'message'),
    [
        ([], 3, r'no arrays .*check_rule\(function, np.random.randn\(7, 3\)\)'),
        ([ROWS, 2.0], 3, r'shapes \[7, 3\], \[\]. Each has to have the examples .*lambda x'),
        ([ROWS, ROWS[:5]], 3, r'shapes \[7, 3\], \[5, 3\]. Each .* as many as the others'),
        ([ROWS[:3]], 3, r'shapes \[3, 3\], so 3 examples are too few for 3 towers.*Give 4 '),
        ([ROWS], 1, 'towers=1: give the number of shards .*2 or more'),
        ([ROWS], 2.5, 'towers=2.5: give the number of shards'),
    ],
    ids=['none', 'a scalar', 'other sizes', 'few examples', 'one tower', 'no number of towers'],
)
def test_arguments_that_do_not_do(arrays, count, message):
    with pytest.raises(ValueError, match=message):
        check_rule(tf.math.special.dawsn, *arrays, towers=count)
