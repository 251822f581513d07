"""Random programs: model_fns that read and write what steps share, each access after those before.

A program is a list of statements, drawn from a seed. Each takes the examples `x`, rows of `WIDTH`
float64 numbers, and gives as many of them; on the way it reads or writes variables. It waits for
the accesses of the statement before it, in one of the ways that TensorFlow has for that, so one
device has only one order to run them in. Several devices have to come to the same numbers.

As a script, it looks for programs that don't:

    python tests/random_programs.py --seeds=0:300 --behavior=v1 --shrink
"""

import argparse
import collections
import contextlib
import functools
import random
import tempfile
import time
import traceback
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import estimator_mgpu
import towers
from estimator_mgpu.partition.micro_batches import schedule
from estimator_mgpu.partition.rewrites.recomputation import cuts

WIDTH = 3
STEPS = 3
MOST_PLACES = 2  # inside one another
IDS = 4
SECONDS = 20  # A step that takes longer hangs.
RTOL = 1e-8
FLOOR = 1e-3  # What is smaller may be rounding of what isn't.

SHAPES = {'w': [WIDTH, WIDTH], 'b': [WIDTH], 's': []}  # of the variables
VARIABLES = [*SHAPES]
INPUTS = ['placeholders', 'placeholders', 'defaults', 'iterator', 'iterators']


class Statement(NamedTuple):
    """One statement; a body among its arguments is a list of statements."""

    kind: str
    args: dict[str, Any]
    wait: str  # How it waits for the statement before: a name in WAITS.
    delay: str = ''  # What it computes before, to be late: a name in DELAYS.

    @property
    def bodies(self):
        """The arguments that are lists of statements, by name."""
        return {name: value for name, value in self.args.items() if isinstance(value, list)}

    def altered(self, **args):
        """The statement with other arguments."""
        return self._replace(args={**self.args, **args})

    def lines(self, indent=''):
        """Yields a line, and more lines for bodies."""
        values = [f'{k}={v}' for k, v in self.args.items() if k not in self.bodies]
        late = f', late by {self.delay}' if self.delay else ''
        yield f'{indent}{" ".join([self.kind, *values])} after {self.wait}{late}'
        for name, body in self.bodies.items():
            yield f'{indent}  {name}:' + ('' if body else ' nothing')
            for statement in body:
                yield from statement.lines(indent + '    ')


class Program(NamedTuple):
    """All that is drawn."""

    seed: int
    statements: list[Statement]
    inputs: str  # one of INPUTS
    sizes: list[int]  # examples of each step's batch
    static: bool  # whether the graph knows the batch size
    references: bool  # whether variables are TensorFlow 1's; those that functions use never are
    towers: int
    microbatches: int
    recompute: bool
    loss: str = (
        'all'  # the last one that's 'minimized', or one of what 'all' statements have come to
    )

    def __repr__(self):
        options = [f'devices={self.towers}', f'microbatches={self.microbatches}']
        if self.recompute:
            options.append('recompute=True')
        loss = {'minimized': 'that is minimized', 'all': 'of all statements'}[self.loss]
        size = 'static' if self.static else 'dynamic'
        variables = 'reference' if self.references else 'resource'
        head = f'Program {self.seed}: {", ".join(options)}; {size} batches of {self.sizes} from '
        head += f'{self.inputs}; {variables} variables; the loss {loss}'
        lines = [line for statement in self.statements for line in statement.lines('  ')]
        return '\n'.join([head, *lines])


# How the model_fn is built.


class Builder:
    """Builds the graph of a program's statements.

    `after` is what the next statement has to wait for: ops or tensors that come after each access
    so far. `variables` and `features` are by name; `feeds` says what else a step is fed.
    """

    def __init__(self, program, features, labels):
        self.features, self.labels = features, labels
        self.after = []
        self.feeds = {}
        self.losses = []  # those that optimizers minimize
        self._later = []  # functions of the examples, by which values that were read are used
        self._count = 0

        # What no statement makes by itself.
        kinds = {each.kind for each, _ in walk(program.statements)}
        self.slow_matrix = tf.constant(0.004, tf.float64, [240, 240])  # It takes a while.
        if 'table' in kinds:
            default = tf.constant(0.3, tf.float64)
            self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float64, default)
        if 'loaded' in kinds:
            self.module = tf2.saved_model.load(saved_module().name)

        self.variables = {}
        in_functions = variables_in_functions(program.statements)
        for i, (name, shape) in enumerate(SHAPES.items()):
            self.variables[name] = tf.get_variable(
                name,
                initializer=0.5 * np.random.RandomState(i).standard_normal(shape),
                trainable=name != 's',
                use_resource=not program.references or name in in_functions,
            )

    def is_reference(self, variable):
        return not hasattr(self.variables[variable], 'handle')

    def name(self, prefix):
        """Another name for each call."""
        self._count += 1
        return f'{prefix}_{self._count}'

    def use_later(self, function):
        """Has the last statement of this body use a value: `function` of its examples."""
        self._later.append(function)

    def run(self, statement, x):
        """Returns what the examples become."""
        kind = KINDS[statement.kind]
        if statement.delay:
            with tf.control_dependencies(self.after):
                x = DELAYS[statement.delay](self, x)
            self.after = [x]
        x, first = WAITS[statement.wait](self, x)
        with tf.control_dependencies(first):
            x, accesses = kind.function(self, x, **statement.args)
        self.after = accesses or self.after
        return x

    def block(self, statements, x, after=()):
        """Returns what the examples become, which comes after all accesses of the statements."""
        outside = self.after, self._later
        self.after, self._later = list(after), []
        for statement in statements:
            x = self.run(statement, x)
        x = self.finish(x)
        self.after, self._later = outside
        return x

    def finish(self, x):
        """Ends a list of statements: returns its examples, which come after all accesses."""
        for function in self._later:
            x = function(x)
        with tf.control_dependencies(self.after):
            return tf.identity(x)


def blend(x, new):
    """The examples, changed: none grows without end, however many statements there are."""
    return 0.7 * x + tf.tanh(new)


def use(x, name, value):
    """The examples, changed by a variable's value."""
    return blend(x, tf.matmul(x, value) if name == 'w' else x * value if name == 's' else x + value)


def walk(statements, places=()):
    """Yields each statement, those in bodies too, and the places it's in, the innermost last."""
    for each in statements:
        yield each, places
        for body in each.bodies.values():
            yield from walk(body, (*places, KINDS[each.kind].opens))


def variables_in_functions(statements):
    """The names of the variables that tf.functions access."""
    names = set()
    for each, places in walk(statements):
        if {'function', 'compiled'} & {*places}:
            names |= {*SHAPES} & {value for value in each.args.values() if isinstance(value, str)}
    return names


@functools.cache
def saved_module():
    """The directory of a module whose function updates a mean in a branch, and then uses it."""

    class Module(tf2.Module):
        def __init__(self):
            self.mean = tf2.Variable(np.zeros(WIDTH), trainable=False)
            self.w = tf2.Variable(np.eye(WIDTH) * 0.8)

        @tf2.function(
            input_signature=[
                tf2.TensorSpec([None, WIDTH], tf2.float64),
                tf2.TensorSpec([], tf2.bool),
            ]
        )
        def __call__(self, x, training):
            if training:
                self.mean.assign(0.6 * self.mean + 0.4 * tf2.reduce_mean(x, 0))
            return tf2.tanh((x - self.mean) @ self.w)

    directory = tempfile.TemporaryDirectory()
    module = Module()
    tf2.saved_model.save(module, directory.name)
    return directory


# How a statement waits for accesses before it: each function returns the examples, and what all
# that the statement makes is to have control edges from.

WAITS = {}


def wait(function):
    WAITS[function.__name__] = function
    return function


@wait
def op(c, x):
    return x, c.after


@wait
def group(c, x):
    return x, [tf.group(*c.after)]


@wait
def identity(c, x):
    with tf.control_dependencies(c.after):
        same = tf.identity(x)
    return x, [same]


@wait
def identities(c, x):
    """The second waits for the first, and that's all there is to it."""
    with tf.control_dependencies(c.after):
        first = tf.identity(x)
    with tf.control_dependencies([first]):
        second = tf.identity(x)
    return second, [second]


@wait
def identity_of_features(c, x):
    with tf.control_dependencies(c.after):
        return x, [tf.identity(c.features['x'])]


@wait
def identity_of_labels(c, x):
    with tf.control_dependencies(c.after):
        return x, [tf.identity(c.labels)]


@wait
def tuples(c, x):
    same, other = tf.tuple([x, tf.reduce_sum(x)], control_inputs=c.after)
    return same, [other]


@wait
def placeholder(c, x):
    """One that isn't fed: it waits."""
    with tf.control_dependencies(c.after):
        return x, [tf.placeholder_with_default(np.float64(1), [])]


@wait
def data(c, x):
    """The statement's op takes the examples, so it waits for them without a control edge."""
    with tf.control_dependencies(c.after):
        return tf.identity(x), []


DELAYS = {}


def delay(function):
    DELAYS[function.__name__] = function
    return function


@delay
def examples(c, x):
    h = tf.tile(x, [1, 240 // WIDTH])
    for _ in range(4):
        h = tf.tanh(tf.matmul(h, c.slow_matrix))
    return x + 1e-3 * h[:, :WIDTH]


@delay
def mean(c, x):
    h = tf.fill([240, 240], tf.reduce_mean(x))
    for _ in range(2):
        h = tf.tanh(tf.matmul(h, c.slow_matrix))
    return x + 1e-3 * tf.reduce_mean(h)


@delay
def constant(c, x):
    """What no example reaches."""
    h = c.slow_matrix
    for _ in range(2):
        h = tf.tanh(tf.matmul(h, c.slow_matrix))
    return x + 1e-3 * tf.reduce_mean(h)


# The kinds of statements: each function returns the examples, and the ops or tensors that come
# after each access of it, if it has any.


class Body(NamedTuple):
    """An argument that is a list of statements."""

    least: int = 1
    most: int = 2


class Kind(NamedTuple):
    function: Any
    inside: set[str]  # the places in which it may stand, besides the program itself
    opens: str  # the place that its bodies are, if it has any
    weight: int
    takes_examples: bool  # whether it's an op that waits for them
    choices: dict[str, Any]  # by argument: values to choose from, or a Body


KINDS = {}


def statement(inside='', opens='', weight=2, takes_examples=False, **choices):
    """Registers a kind of statement; each further argument gives the choices for one of its."""

    def decorate(function):
        places = {*inside.split()}
        KINDS[function.__name__] = Kind(function, places, opens, weight, takes_examples, choices)
        return function

    return decorate


EVERYWHERE = 'branch loop function compiled'


@statement(EVERYWHERE, weight=7, variable=VARIABLES, how=['read_value', 'implicit', 'identity'])
def read(c, x, variable, how):
    v = c.variables[variable]
    value = {'read_value': v.read_value, 'implicit': lambda: v, 'identity': lambda: tf.identity(v)}
    x = use(x, variable, value[how]())
    return x, [x]


@statement(EVERYWHERE, weight=3, variable=VARIABLES)
def read_for_later(c, x, variable):
    """Its value is used by the last statement of the body."""
    value = c.variables[variable].read_value()
    if c.is_reference(variable):
        value = 1.5 * value  # What has been read of a reference is what it is when it's used.
    c.use_later(lambda x: use(x, variable, value))
    return x, [value]


@statement(EVERYWHERE, weight=2, variable=['w', 'b'])
def gather(c, x, variable):
    """A row, or a number, for each example."""
    rows = tf.gather(c.variables[variable], c.features['ids'] % WIDTH)
    x = blend(x, rows if variable == 'w' else rows[:, None])
    return x, [x]


SOURCES = ['batch', 'first', 'constant', 'b']


def _new_value(c, x, variable, source):
    """A value of the variable's shape."""
    if source == 'b':
        return tf.tanh(tf.reduce_sum(c.variables['b'])) * np.full(SHAPES[variable], 0.9)
    if source == 'constant':
        return tf.constant(0.4, tf.float64, SHAPES[variable])
    if source == 'first':
        x = x[:1]
    if variable == 'w':
        return tf.tanh(tf.reduce_mean(x[:, :, None] * x[:, None, :], 0))
    return tf.tanh(tf.reduce_mean(x, 0 if variable == 'b' else [0, 1]))


ASSIGNS = {
    'assign': tf.assign,
    'assign_add': lambda v, value: tf.assign_add(v, 0.3 * value),
    'assign_sub': lambda v, value: tf.assign_sub(v, 0.3 * value),
}


@statement(
    'branch loop function',
    weight=9,
    variable=VARIABLES,
    how=sorted(ASSIGNS),
    source=SOURCES,
    result=['used', 'left'],
)
def write(c, x, variable, how, source, result):
    updated = ASSIGNS[how](c.variables[variable], _new_value(c, x, variable, source))
    if result == 'left':
        return x, [updated.op]
    x = use(x, variable, tf.convert_to_tensor(updated))
    return x, [x]


def _s_is_large(c, x):
    # Where the statement waits by its examples only, this doesn't take them.
    with tf.control_dependencies(c.after):
        return c.variables['s'].read_value() > -0.2


PREDICATES = {
    'always': lambda c, x: tf.reduce_max(x) > -99,
    'never': lambda c, x: tf.reduce_max(x) > 99,
    'batch': lambda c, x: tf.reduce_mean(x) > 0,
    's': _s_is_large,
}


@statement(
    'branch loop function',
    opens='branch',
    weight=6,
    takes_examples=True,
    predicate=sorted(PREDICATES),
    body=Body(),
    otherwise=Body(0, 1),
)
def cond(c, x, predicate, body, otherwise):
    x = tf.cond(
        PREDICATES[predicate](c, x), lambda: c.block(body, x), lambda: c.block(otherwise, x)
    )
    return x, [x]


@statement(
    'branch function',
    opens='loop',
    weight=4,
    takes_examples=True,
    until=['count', 'batch', 's'],
    body=Body(),
)
def loop(c, x, until, body):
    def goes_on(i, x):
        if until == 'count':
            return i < 2
        with tf.control_dependencies([x]):
            value = tf.reduce_mean(x) if until == 'batch' else c.variables['s'].read_value()
        return tf.logical_and(i < 3, value < 0.3)

    if not tf.control_flow_v2_enabled():
        x = tf.identity(x)  # A loop of TensorFlow 1 waits only for what it takes.
    _, x = tf.while_loop(goes_on, lambda i, x: (i + 1, c.block(body, x, after=[x])), (0, x))
    x.set_shape([None, WIDTH])
    return x, [x]


@statement(
    'branch loop function',
    opens='function',
    weight=6,
    takes_examples=True,
    body=Body(),
    calls=[1, 1, 2],
)
def call(c, x, body, calls):
    function = tf2.function(lambda x: c.block(body, x), autograph=False)
    for _ in range(calls):
        x = function(x)
    return x, [x]


@statement('branch loop', opens='compiled', weight=2, takes_examples=True, body=Body())
def compiled(c, x, body):
    function = tf2.function(lambda x: c.block(body, x), autograph=False, jit_compile=True)
    x = function(x)
    return x, [x]


@statement(opens='within', weight=2, body=Body(2, 3))
def within(c, x, body):
    """All of the body has the control edges, and waits in its own ways, too."""
    x = c.block(body, x)
    return x, [x]


@statement('branch', takes_examples=True, training=[True, True, False])
def loaded(c, x, training):
    x = blend(x, c.module(x, tf.constant(training)))
    return x, [x]


OPTIMIZERS = {
    'sgd': lambda name: tf.train.GradientDescentOptimizer(0.2, name=name),
    'momentum': lambda name: tf.train.MomentumOptimizer(0.1, 0.7, name=name),
    'adam': lambda name: tf.train.AdamOptimizer(0.05, epsilon=1e-2, name=name),
}


def _gradients_context(gradients):
    """Within it, gradients wait for what their statement waits for; or they're free.

    Free ones have what they need from the loss, which waits. Those of TensorFlow 1's loops are
    free: they would have the loop itself wait, for what comes after it.
    """
    waits = gradients == 'wait' and tf.control_flow_v2_enabled()
    return contextlib.nullcontext() if waits else tf.control_dependencies(None)


@statement(weight=6, optimizer=sorted(OPTIMIZERS), of=['all', 'this'], gradients=['wait', 'free'])
def minimize(c, x, optimizer, of, gradients):
    """Two layers and a loss; the gradients are of all that came before, or of these alone."""
    x = x if of == 'all' else tf.stop_gradient(x)
    w, b = c.variables['w'], c.variables['b']
    x = tf.tanh(tf.matmul(x, w) + b)
    x = tf.tanh(tf.matmul(x, w) + x)
    loss = tf.reduce_mean(tf.square(x - c.labels))
    c.losses.append(loss)
    optimizer = OPTIMIZERS[optimizer](c.name(optimizer))
    with _gradients_context(gradients):
        # Otherwise, one reference would be updated while another's gradient reads it.
        gate = optimizer.GATE_GRAPH
        pairs = optimizer.compute_gradients(loss, [w, b], gate_gradients=gate)
    return x, [optimizer.apply_gradients(pairs), x]


@statement(weight=2, wrt=VARIABLES, gradients=['wait', 'free'])
def gradient(c, x, wrt, gradients):
    loss = tf.reduce_mean(tf.square(use(x, wrt, c.variables[wrt]) - c.labels))
    with _gradients_context(gradients):
        [slope] = tf.gradients(loss, c.variables[wrt])
    x = use(x, wrt, slope)
    return x, [x]


@statement(weight=2, result=['used', 'left'])
def averages(c, x, result):
    average = tf.train.ExponentialMovingAverage(0.7, name=c.name('average'))
    updated = average.apply([c.variables['w'], c.variables['b']])
    if result == 'used':
        with tf.control_dependencies([updated]):
            x = use(x, 'b', average.average(c.variables['b']))
    return x, [updated, x]


@statement(weight=1, is_fed=[True, False])
def fed(c, x, is_fed):
    """A placeholder; TensorFlow drops control edges to it if it's fed."""
    value = tf.placeholder_with_default(np.full(WIDTH, 0.3), [WIDTH])
    if is_fed:
        c.feeds[value] = np.full(WIDTH, 0.6)
    return use(x, 'b', value), []


@statement('branch', weight=2, how=['insert', 'look up'])
def table(c, x, how):
    if how == 'insert':
        keys = tf.range(tf.constant(WIDTH, tf.int64))
        return x, [c.table.insert(keys, tf.reduce_mean(x, 0))]
    x = blend(x, c.table.lookup(c.features['ids'])[:, None])
    return x, [x]


MIXES = {
    'center': lambda x: x - tf.reduce_mean(x, 0),
    'sort': lambda x: tf.sort(x, 0),
    'first': lambda x: x - 0.3 * x[:1],
    'products': lambda x: 0.2 * tf.matmul(tf.nn.softmax(tf.matmul(x, x, transpose_b=True)), x),
}


@statement(weight=1, count=[4, 8])
def layers(c, x, count):
    """No access: layers that are wide, so that most activations are theirs."""
    h = tf.tile(x, [1, 8])
    for i in range(count):
        matrix = tf.constant(np.random.RandomState(i).randn(8 * WIDTH, 8 * WIDTH) / 8)
        h = blend(h, tf.matmul(h, matrix))
    return x + 0.3 * h[:, :WIDTH], []


@statement(EVERYWHERE, weight=2, how=sorted(MIXES))
def mix(c, x, how):
    """No access: the examples are mixed."""
    return blend(x, MIXES[how](x)), []


# What is drawn.


def draw(seed, behavior='v2'):
    """Returns the program of a seed."""
    chance = random.Random(seed)
    towers_count = chance.choice([1, 2, 2, 2, 3, 3, 4])
    microbatches = chance.choice([1, 1, 2])
    static = chance.random() < 0.5
    inputs = chance.choice(INPUTS)
    least = towers_count * microbatches if static else 1
    size = chance.randint(least, max(least, 6))
    sizes = [size] * STEPS
    if not static and not inputs.startswith('iterator'):
        sizes[1:] = [chance.randint(1, 6) for _ in sizes[1:]]
    elif not static:
        sizes[-1] = chance.randint(1, size)
    recompute = chance.random() < 0.3
    statements = _draw_statements(chance, chance.randint(3, chance.randint(4, 15)))
    if recompute:
        # Gradients of many activations, as it's left out where they have few.
        statements.insert(chance.randrange(len(statements)), draw_kind(chance, 'layers'))
        statements.append(draw_kind(chance, 'minimize').altered(of='all'))
    return Program(
        seed,
        statements,
        inputs,
        sizes,
        static,
        behavior == 'v1' and chance.random() < 0.8,
        towers_count,
        microbatches,
        recompute,
        'minimized' if recompute or chance.random() < 0.5 else 'all',
    )


def _draw_statements(chance, count, places=()):
    return [_draw_statement(chance, places) for _ in range(count)]


def _draw_statement(chance, places):
    """Draws what may stand in all of these places, each of which is in the one before."""
    needed = {*places} - {'within'}
    names = []
    for name, kind in KINDS.items():
        if needed <= kind.inside and not (kind.opens and len(places) == MOST_PLACES):
            names += [name] * kind.weight
    return draw_kind(chance, chance.choice(names), places)


def draw_kind(chance, name, places=()):
    """Draws a statement of a kind."""
    kind = KINDS[name]
    args = {}
    for argument, choices in kind.choices.items():
        if isinstance(choices, Body):
            count = chance.randint(choices.least, choices.most)
            args[argument] = _draw_statements(chance, count, (*places, kind.opens))
        else:
            args[argument] = chance.choice(choices)

    ways = {*WAITS}
    if not kind.takes_examples:
        ways -= {'data'}
    if {*places} - {'within'}:
        ways -= {'placeholder'}
    late = chance.choice(sorted(DELAYS)) if chance.random() < 0.25 else ''
    return Statement(name, args, chance.choice(sorted(ways)), late)


# How it's run.


class Outcome(NamedTuple):
    """What a run came to: of each step the loss and predictions; of the last one the variables."""

    losses: list[Any]
    predictions: list[Any]
    variables: dict[str, Any]


def _batches(program):
    """Features and labels of each step."""
    for i, size in enumerate(program.sizes):
        chance = np.random.RandomState(program.seed * STEPS + i)
        x, y = chance.randn(2, size, WIDTH)
        yield {'x': x, 'ids': chance.randint(0, IDS, [size])}, 0.5 * y


def _inputs(program):
    """Returns features and labels, and what each step feeds of them."""
    batches = list(_batches(program))
    if program.inputs == 'iterator':
        return *_next_of_iterator(batches, program), [{}] * STEPS
    if program.inputs == 'iterators':
        return *(_next_of_iterator(nests, program) for nests in zip(*batches)), [{}] * STEPS

    def make(value):
        shape = [value.shape[0] if program.static else None, *value.shape[1:]]
        if program.inputs == 'defaults':
            return tf.placeholder_with_default(np.zeros_like(value), shape)
        return tf.placeholder(value.dtype, shape)

    inputs = tf.nest.map_structure(make, batches[0])
    pairs = [zip(tf.nest.flatten(inputs), tf.nest.flatten(batch)) for batch in batches]
    return *inputs, [dict(each) for each in pairs]


def _next_of_iterator(nests, program):
    arrays = tf.nest.map_structure(lambda *parts: np.concatenate(parts), *nests)
    dataset = tf.data.Dataset.from_tensor_slices(arrays)
    dataset = dataset.batch(program.sizes[0], drop_remainder=program.static)
    iterator = tf.data.make_initializable_iterator(dataset)
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator.get_next()


def model_fn_of(program, feeds):
    """Returns the model_fn; to `feeds` it adds what a step is fed besides features and labels."""

    def model_fn(features, labels, mode):
        c = Builder(program, features, labels)
        x = features['x']
        predictions = {}
        for i, each in enumerate(program.statements):
            x = c.run(each, x)
            if i % 4 == 1:
                predictions[f'x_{i}'] = x
        predictions['x'] = x = c.finish(x)
        losses = [tf.reduce_mean(tf.square(x - labels))]
        if program.loss == 'minimized':
            losses = c.losses or losses
        feeds.update(c.feeds)
        with tf.control_dependencies(c.after):
            train_op = tf.assign_add(tf.train.get_global_step(), 1)
        return tf.estimator.EstimatorSpec(
            mode, loss=losses[-1], predictions=predictions, train_op=tf.group(train_op)
        )

    return model_fn


def build(program, devices, **options):
    """Builds the program's graph, undecorated if there are no devices.

    Returns:
      A function that runs it in a new session with a config, and returns an `Outcome`.
    """
    saved_module()  # which isn't saved in a graph
    with tf.Graph().as_default() as graph:
        tf.train.get_or_create_global_step()
        features, labels, batches = _inputs(program)
        more = {}
        model_fn = model_fn_of(program, more)
        if devices:
            model_fn = estimator_mgpu.replicate(model_fn, devices=devices, **options)
        spec = model_fn(features=features, labels=labels, mode=towers.TRAIN)
        variables = {v.op.name: v for v in tf.global_variables()}
        initializers = [tf.global_variables_initializer(), tf.tables_initializer()]

    def run(config):
        config.operation_timeout_in_ms = SECONDS * 1000
        losses, predictions = [], []
        with tf.Session(graph=graph, config=config) as session:
            session.run(initializers)
            for batch in batches:
                fetches = [spec.loss, spec.train_op, spec.predictions]
                loss, _, values = session.run(fetches, {**batch, **more})
                losses.append(loss)
                predictions.append(values)
            return Outcome(losses, predictions, session.run(variables))

    return run


@contextlib.contextmanager
def small_savings():
    """Micro-batches and recomputation are left out only if they would save next to nothing."""
    fewer_chained = mock.patch.object(schedule, '_LEAST_SHARE_CHAINED', 0.05)
    with fewer_chained, mock.patch.object(cuts, '_LEAST_SHARE_SAVED', 0.01):
        yield


def on_several(program):
    """Runs a program on its devices."""
    options = {'microbatches': program.microbatches, 'recompute': program.recompute}
    # One device has TensorFlow's graph optimizers by default, which don't keep all orders.
    count = program.towers if program.towers * program.microbatches > 1 else 0
    config = towers.session_config(count, microbatches=program.microbatches)
    with small_savings():
        run = build(program, program.towers, **options)
    return run(config)


def difference(found, expected):
    """What differs first, as text; nothing if nothing does."""
    for i in range(STEPS):
        pairs = {'the loss': (found.losses[i], expected.losses[i])}
        for name, value in expected.predictions[i].items():
            pairs[f'prediction {name}'] = found.predictions[i][name], value
        for name, (ours, one) in pairs.items():
            if not _close(ours, one):
                return f'step {i}, {name}: {_text(ours)}, not {_text(one)}'
    for name, one in expected.variables.items():
        if not _close(found.variables[name], one):
            return f'variable {name}: {_text(found.variables[name])}, not {_text(one)}'
    return ''


def _close(ours, one):
    if np.shape(ours) != np.shape(one):
        return False
    scale = max(np.abs(one).max(), FLOOR) if np.size(one) else 0
    return np.allclose(ours, one, RTOL, RTOL * scale)


def _text(value):
    return np.array2string(np.ravel(value)[:4], precision=6)


REFUSALS = tf.errors.OpError, ValueError, TypeError
"""What TensorFlow itself raises where it can't run a program, or has no gradient of it."""


class Verdict(NamedTuple):
    """`kind` is 'same', 'left out', 'wrong', 'error' or 'timeout'; `text` says more."""

    kind: str
    text: str = ''

    @property
    def fails(self):
        return self.kind not in ('same', 'left out')

    def is_like(self, other):
        """Whether both say the same, but for numbers and names."""
        return self.kind == other.kind and (
            self.kind == 'wrong' or self.text[:60] == other.text[:60]
        )


def check(program, repeats=1):
    """Compares a program on several devices with one device; returns a `Verdict`.

    It's left out where one device itself has no single result. Several devices run it `repeats`
    times, as a missing order shows only at times.
    """
    config = towers.session_config(0)
    narrow = towers.session_config(0)
    narrow.inter_op_parallelism_threads = 1
    try:
        again = build(program, 0)
        one = again(config)
        differs = difference(again(narrow), one)
    except REFUSALS as error:
        return Verdict('left out', f'TensorFlow: {_said(error)}')
    if differs:
        return Verdict('left out', f'one device: {differs}')
    if not all(np.isfinite(v).all() for v in one.variables.values()):
        return Verdict('left out', 'one device diverges')
    if one.variables['global_step'] != STEPS:
        return Verdict('left out', "one device doesn't end")

    for _ in range(repeats):
        try:
            differs = difference(on_several(program), one)
        except tf.errors.DeadlineExceededError as error:
            return Verdict('timeout', _said(error))
        except Exception as error:  # Each is a failure.
            return Verdict('error', _said(error))
        if differs:
            if any(difference(again(config), one) for _ in range(6)):
                return Verdict('left out', 'one device, rarely')
            return Verdict('wrong', differs)
    return Verdict('same')


def _said(error):
    """The type and message of an error, without where ops were made, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f'{f.filename}:{f.lineno}' for f in frames if 'estimator_mgpu' in f.filename]
    lines = [line.strip() for line in str(error).splitlines()]
    noise = 'File "', 'Detected at node', 'Node: ', 'Graph execution error', 'Original stack'
    text = ' '.join(line for line in lines if line and not line.startswith(noise))
    return f'{type(error).__name__} {text[:300]} {places[-1:]}'


# How a failure becomes small.

SIMPLEST = {
    'recompute': False,
    'microbatches': 1,
    'towers': 2,
    'references': False,
    'inputs': 'placeholders',
    'sizes': [6] * STEPS,
    'static': True,
}


def shrink(program, fails, seconds=120):
    """Returns a smaller program that `fails` is still true of."""
    end = time.time() + seconds
    candidates = _smaller(program)
    while time.time() < end:
        smaller = next(candidates, None)
        if smaller is None:
            break
        if fails(smaller):
            program, candidates = smaller, _smaller(smaller)
    return program


def smallest_like(program, verdict):
    """Returns a smaller program with a verdict like this."""
    repeats = 4 if verdict.kind == 'wrong' else 1
    return shrink(program, lambda smaller: check(smaller, repeats).is_like(verdict))


def _smaller(program):
    """Yields programs that have a bit less."""
    count = len(program.statements)
    if count > 3:
        for half in (program.statements[count // 2 :], program.statements[: count // 2]):
            yield program._replace(statements=half)
    for name, value in SIMPLEST.items():
        if getattr(program, name) != value:
            yield program._replace(**{name: value})
    for statements in _smaller_lists(program.statements):
        yield program._replace(statements=statements)


def _smaller_lists(statements):
    """Yields lists of statements with one fewer, or a simpler one."""
    for i in range(len(statements)):
        yield [*statements[:i], *statements[i + 1 :]]
    for i, each in enumerate(statements):
        for smaller in _smaller_statements(each):
            yield [*statements[:i], *smaller, *statements[i + 1 :]]


def _smaller_statements(each):
    """Yields lists of statements in place of one."""
    for name, value in each.bodies.items():
        if KINDS[each.kind].opens != 'compiled':
            yield value  # alone
        for body in _smaller_lists(value):
            yield [each.altered(**{name: body})]
    if each.delay:
        yield [each._replace(delay='')]
    if each.wait != 'op':
        yield [each._replace(wait='op')]


# The script.


def without(statements, names):
    """Returns statements without these kinds; what waits in one of these ways waits by an op."""
    kept = []
    for each in statements:
        if each.kind in names:
            continue
        bodies = {name: without(body, names) for name, body in each.bodies.items()}
        way = 'op' if each.wait in names else each.wait
        kept.append(each.altered(**bodies)._replace(wait=way))
    return kept


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        '--seeds', default='0:100', help='the first one, and the one after the last'
    )
    parser.add_argument('--behavior', default='v2', choices=['v2', 'v1'])
    parser.add_argument('--shrink', action='store_true', help='print the smallest that fails')
    parser.add_argument('--repeats', type=int, default=1, help='runs of each program')
    parser.add_argument(
        '--without', default='', help='kinds of statements and ways to wait, by commas'
    )
    arguments = parser.parse_args()

    tf.logging.set_verbosity(tf.logging.ERROR)
    first, end = map(int, arguments.seeds.split(':'))
    counts = collections.Counter()
    began = time.time()
    with towers.behavior_of(arguments.behavior):
        for seed in range(first, end):
            program = draw(seed, arguments.behavior)
            names = arguments.without.split(',')
            program = program._replace(statements=without(program.statements, names))
            verdict = check(program, arguments.repeats)
            counts[verdict.kind] += 1
            if verdict.kind != 'same':
                print(f'\n{seed} {verdict.kind}: {verdict.text}', flush=True)
            if verdict.fails and arguments.shrink:
                program = smallest_like(program, verdict)
                print(check(program, 5).text)
            if verdict.fails:
                print(program, flush=True)
    print(f'\n{dict(counts)} in {time.time() - began:.0f} s', flush=True)


if __name__ == '__main__':
    main()
