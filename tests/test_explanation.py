"""`Estimator.explain()`, and what the log says as training starts."""

import json
import re
from collections import Counter

import pytest
import tensorflow.compat.v1 as tf
import tf_slim
from matplotlib.figure import Figure

import estimator_mgpu
from estimator_mgpu.devices import has_useless_passes
from estimator_mgpu.partition.micro_batches.schedule import Join, Schedule
from estimator_mgpu.reports import pictures, start_of_training
from estimator_mgpu.reports.notebooks import Table, html_of
from models import floats, spec_of, step

TOWERS = ['/device:CPU:0', '/device:CPU:1', '/device:CPU:2']


def by_sgd(mode, loss):
    return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss, step()))


def model_fn(features, labels, mode):
    """Variables of 90, 60 and 30 floats, with a slot each: spread, one on each of 3 devices."""
    output = sum(
        tf.reduce_sum(tf.matmul(features, tf.get_variable(name, [3, size])), 1, keepdims=True)
        for name, size in (('a', 30), ('b', 20), ('c', 10))
    )
    loss = tf.reduce_mean(tf.square(output - labels))
    return spec_of(mode, loss, tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, step()))


def batch_of(rows):
    return lambda: tf.data.Dataset.from_tensors((floats(rows, 3), floats(rows, 1)))


def explain(model_fn=model_fn, rows=12, input_fn=None, devices=2, **options):
    estimator = estimator_mgpu.Estimator(model_fn, devices=devices, **options)
    return estimator.explain(input_fn or batch_of(rows))


@pytest.mark.core
def test_spread(capsys):
    found = explain(devices=TOWERS)
    assert found.towers == TOWERS
    assert found.examples_per_tower == [4, 4, 4]
    # A variable and its slot: twice 4 bytes a float. Estimator's int64 global step is nowhere.
    assert found.variables == {'(no device)': 8, **dict(zip(TOWERS, (720, 480, 240)))}
    # Of each variable, to the two other devices, and as much of gradients back; the rows of the
    # others from the first device, with those of the loss's gradient, and two numbers of the
    # optimizer; and losses back.
    variables, rows = (360, 240, 120), 4 * (3 + 1 + 1) * 4 + 2 * 4
    moved = [2 * size + sum(variables) - size for size in variables]
    sent = moved[0] + 2 * rows, moved[1] + 4, moved[2] + 4
    received = moved[0] + 2 * 4, moved[1] + rows, moved[2] + rows
    assert [t[:2] for t in found.traffic.values()] == list(zip(sent, received))
    assert list(found.traffic) == TOWERS and found.traffic[TOWERS[1]].messages == 2 + 2 + 1 + 1
    assert found.gradients == [('a', 360, TOWERS[0]), ('b', 240, TOWERS[1]), ('c', 120, TOWERS[2])]
    assert '  b: 240B, summed on /device:CPU:1\n' in str(found)
    assert 'much more' not in str(found)
    assert found.once == [] and found.sharded > 5
    assert '  0 run once, unsharded, on the global batch' in str(found)
    assert capsys.readouterr().out == f'{found}\n'


@pytest.mark.parametrize('variables', ['spread', 'first', 'cpu'])
def test_the_readme_gives_these_bytes(variables):
    """What it says that goes in and out of the busiest device, and the batch and some numbers."""

    def even(features, labels, mode):
        """As many bytes on each of 4 devices: of 400 in all, or 1600 with spreading them."""
        output = sum(features[:, :1] @ tf.get_variable(f'w{i}', [1, 25]) for i in range(4))
        loss = tf.reduce_mean(tf.square(tf.reduce_sum(output, 1, keepdims=True) - labels))
        return by_sgd(mode, loss)

    towers = [f'/device:CPU:{i + (variables == "cpu")}' for i in range(4)]
    found = explain(even, devices=towers, variables=variables)
    v, n = 4 * 100, 4
    busiest = {'spread': 4 * (n - 1) * v / n, 'first': 2 * (n - 1) * v, 'cpu': 2 * n * v}
    most = max(moved.sent + moved.received for moved in found.traffic.values())
    assert busiest[variables] <= most <= busiest[variables] + 12 * (3 + 1 + 1) * 4 + 40


def test_a_device_with_much_more_than_others(gpus):
    """Examples of 600 kB are gathered on one of four devices, sorted, and sent back.

    It receives 9 of them and sends 9, the others 3 each: the mean of what is moved is half of 18.
    """

    def large(features, labels, mode):
        net = features @ tf.get_variable('w', [3, 10])
        net = tf.tanh(tf.tile(net, [1, 15_000]))
        net = tf.tanh(tf.sort(net, axis=0))
        return by_sgd(mode, tf.reduce_mean(tf.reduce_sum(tf.square(net - labels), 1)))

    gpus(None, None, None, None)
    told = str(explain(large, devices=4))
    text = '/device:GPU:0 sends and receives 2.0 times the mean of all devices'
    assert text in told and told.count('the mean of all devices') == 1


def test_examples_per_tower():
    assert explain(rows=2, devices=3).examples_per_tower == [1, 1, 0]
    found = explain(input_fn=lambda: batch_of(12)().unbatch().batch(5))
    assert found.examples_per_tower is None
    assert '  /device:CPU:1: its share of the examples\n' in str(found)
    found = explain(devices=1)
    assert found.towers == TOWERS[:1] and found.examples_per_tower == [12]
    assert found.traffic == {} and found.sharded == 0 and found.once == []
    assert sum(found.variables.values()) == 2 * 4 * 180 + 8


def test_of_a_table_rows_are_counted():
    def model_fn(features, labels, mode):
        table = tf.get_variable('table', [1000, 2])
        net = tf.nn.embedding_lookup(table, tf.cast(features[:, 0], tf.int32))
        loss = tf.reduce_mean(tf.square(net @ tf.get_variable('w', [2, 1]) - labels))
        return spec_of(mode, loss, tf.train.AdagradOptimizer(0.1).minimize(loss, step()))

    found = explain(model_fn)
    assert found.gradients[0] == ('table', None, TOWERS[0])
    # To the second device 6 rows: of features, of labels, of the loss's gradient, and of the table;
    # w, a learning rate. Back ids, gradients of the table's rows and w, and the loss.
    sent, received = 6 * (4 + 8) + 8 + 4, 6 * (12 + 4 + 4 + 8) + 8 + 4
    assert found.traffic[TOWERS[1]][:2] == (sent, received)
    assert '  table: gathered rows, summed on /device:CPU:0\n' in str(found)


def test_batches_that_are_fed(tmp_path):
    """By the hook of an input_fn of TensorFlow 1; nothing is written, and training goes on."""
    x, y = {'x': floats(12, 3)}, floats(12, 1)
    input_fn = tf.estimator.inputs.numpy_input_fn(x, y, 12, shuffle=False)

    def of_dict(features, labels, mode):
        return model_fn(features['x'], labels, mode)

    estimator = estimator_mgpu.Estimator(of_dict, str(tmp_path), devices=2)
    found = estimator.explain(input_fn)
    assert found.towers == TOWERS[:2] and sum(g.bytes for g in found.gradients) == 720
    assert list(tmp_path.iterdir()) == []
    estimator.train(input_fn)


def lines_of(caplog):
    return [r.getMessage() for r in caplog.records if 'The input_fn gives' in r.getMessage()]


@pytest.mark.parametrize(
    'devices, rows, line',
    [
        (2, 12, '/device:CPU:0 (6), /device:CPU:1 (6).'),
        (2, 11, '/device:CPU:0 (6), /device:CPU:1 (5).'),
        (1, 11, '/device:CPU:0 (11).'),
    ],
)
def test_the_log_says_how_the_batch_is_divided(devices, rows, line, caplog):
    estimator = estimator_mgpu.Estimator(model_fn, devices=devices)
    estimator.train(batch_of(rows))
    estimator.evaluate(batch_of(rows))  # It says it once a training.
    [found] = lines_of(caplog)
    assert f'its examples go to {line}' in found


def test_where_nobody_logs_it_nobody_looks_what_runs_once(monkeypatch):
    """In a large graph, that takes a while."""
    monkeypatch.setattr(start_of_training, '_run_once', None)
    tf.logging.set_verbosity(tf.logging.WARN)
    explain()


def own(**passes):
    """A user's own session config, with some settings of TensorFlow's graph optimizer."""
    return tf.ConfigProto(graph_options={'rewrite_options': passes})


@pytest.mark.parametrize(
    'session, devices, is_slow',
    [
        (None, 2, False),
        (own(), 1, False),
        (own(), 2, True),
        (own(constant_folding='OFF'), 2, True),
        (own(disable_meta_optimizer=True), 2, False),
        (estimator_mgpu.session_config(2), 2, False),
    ],
    ids=['default', 'one device', 'own', 'partly off', 'off', 'ours'],
)
def test_the_log_says_that_graph_optimizers_are_on(session, devices, is_slow, caplog):
    config = tf.estimator.RunConfig(session_config=session)
    explain(config=config, devices=devices)
    [line] = lines_of(caplog)
    assert ('They are off in estimator_mgpu.session_config(devices)' in line) == is_slow


def test_passes_that_are_useless_on_gpus():
    """The default keeps layout and remapping there."""
    gpus = ['/job:a/device:GPU:0', '/job:a/device:GPU:1']
    config = estimator_mgpu.session_config(gpus)
    assert not has_useless_passes(config, gpus)
    config.MergeFrom(own(constant_folding='ON'))
    assert has_useless_passes(config, gpus)


def ranked(features, labels, mode):
    """Sorts a batch's rows, by each feature: that takes all of them."""
    order = tf.sort(features, 0, name='order')
    with tf.variable_scope('net'):
        net = tf.matmul(order, tf.get_variable('w', [3, 1]))
    loss = tf.reduce_mean(tf.square(net - labels))
    return by_sgd(mode, loss)


FLOATS = 12 * 3 * 4  # bytes of a batch's features


def test_updates_of_a_table_give_nothing(behavior):
    """An update of a reference variable gives all of the variable, which isn't computed."""

    def model_fn(features, labels, mode):
        ids = tf.cast(features[:, 0], tf.int32)
        found = tf.nn.embedding_lookup(tf.get_variable('table', [1000, 3]), ids)
        return by_sgd(mode, tf.reduce_mean(tf.square(tf.reduce_sum(found, 1) - labels[:, 0])))

    assert sum(op.share for op in explain(model_fn).once) < 0.05


def test_updates_of_all_of_a_table_are_not_of_the_batch(behavior):
    """Adam updates all rows of a table, of which the batch has a few."""

    def model_fn(features, labels, mode):
        ids = tf.cast(features[:, 0], tf.int32)
        found = tf.nn.embedding_lookup(tf.get_variable('table', [1000, 3]), ids)
        loss = tf.reduce_mean(tf.square(tf.reduce_sum(found, 1) - labels[:, 0]))
        return spec_of(mode, loss, tf.train.AdamOptimizer(0.1).minimize(loss, step()))

    scopes = explain(model_fn).scopes
    assert 0 < scopes['Adam']['once'] < 1000 * 3 * 4


@pytest.mark.core
def test_what_runs_once():
    """`tf.sort` sorts what was transposed, by `TopKV2`, and transposes that: values and indices."""
    found = explain(ranked)
    all_bytes = sum(sum(sizes.values()) for sizes in found.scopes.values())
    top, transposed = found.once
    assert (top.name, top.why) == ('order/TopKV2', 'this TopKV2 needs all examples')
    assert top.gathered == FLOATS and top.share == pytest.approx(2 * FLOATS / all_bytes)
    assert top.line.startswith('test_explanation.py:')
    # It isn't given rows, but what was made of them.
    assert (transposed.name, transposed.why) == ('order/transpose_1', top.why)
    assert transposed.gathered == 0
    assert f'{top.share:.1%} order/TopKV2, 144B, {top.line}, {top.why}\n' in str(found)
    # Negated, transposed; and negated again, where it's divided again.
    assert found.scopes['order'] == {'shard': 3 * FLOATS, 'once': 3 * FLOATS}
    # The product, and its gradients by the features and, as sums, by w.
    assert found.scopes['net'] == {'shard': 12 * 4 + FLOATS, 'partial': 3 * 4}


def test_examples_of_unknown_size():
    """A row of what they are reshaped to may be a part of an example, unless `set_shape` tells."""

    def model_fn(features, labels, mode):
        net = tf.layers.dense(tf.reshape(features, [-1, 3]), 1)
        return by_sgd(mode, tf.reduce_mean(net - labels))

    def reasons(*shape):
        def with_shape(features, labels):
            features = tf.py_function(lambda x: x, [features], tf.float32)
            features.set_shape(shape)
            return features, labels

        found = explain(model_fn, input_fn=lambda: batch_of(12)().map(with_shape))
        return {op.name: op.why for op in found.once}

    assert 'Reshape' not in reasons(None, 3)
    assert re.search(r'may mix .*, as the shape \(.*\) does not', reasons(None, None)['Reshape'])


def test_lines_are_those_of_the_program():
    """Of the deepest of its own functions; not of an installed library."""

    def layer(net):
        return tf.layers.dense(tf.sort(net, 0, name='own'), 3, name='net')  # here

    def model_fn(features, labels, mode):
        net = tf.sort(tf_slim.fully_connected(layer(features), 3), 0, name='direct')
        loss = tf.reduce_mean(tf_slim.flatten(tf.sort(net, 0)) - labels)
        return by_sgd(mode, loss)

    lines = {op.name: op.line for op in explain(model_fn).once}
    first = layer.__code__.co_firstlineno
    assert lines['own/TopKV2'] == f'test_explanation.py:{first + 1}'
    assert lines['direct/TopKV2'] == f'test_explanation.py:{first + 4}'


def test_what_a_function_does():
    """Its ops have the lines in it, also once they are part of the graph."""
    ordered = tf.function(lambda net: tf.sort(net, 0))  # here
    found = explain(lambda features, labels, mode: ranked(ordered(features), labels, mode))
    lines = [op.line for op in found.once if op.name.endswith('TopKV2')]
    first = test_what_a_function_does.__code__.co_firstlineno
    assert f'test_explanation.py:{first + 2}' in lines
    assert len(lines) == 2 and '' not in lines


def test_a_loop_that_would_end_otherwise_than_it_starts(behavior):
    """Its variable is replicated at first, and then each tower's is the maximum of its examples.

    In a loop of TensorFlow 1, the towers' maxima are reduced.
    """

    def model_fn(features, labels, mode):
        body = lambda i, _: (i + 1, tf.reduce_max(features * 2))  # noqa: E731
        _, largest = tf.while_loop(lambda i, _: i < 3, body, [0, 0.0])
        return by_sgd(mode, tf.reduce_sum(largest * tf.get_variable('w', [3])))

    reason = "in it, a Replicate() becomes a Partial(reduce='max'"
    assert (reason in str(explain(model_fn))) == (behavior == 'v2')


def test_fused_ops_that_nobody_runs():
    """Sums take the place of the batch normalization that a layer made, and of its gradient."""

    def model_fn(features, labels, mode):
        image = tf.reshape(features, [-1, 3, 1, 1])
        for _ in range(2):
            image = tf.layers.batch_normalization(tf.layers.conv2d(image, 2, 1), training=True)
        loss = tf.losses.mean_squared_error(labels, tf.reduce_mean(image, [1, 2, 3])[:, None])
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            return by_sgd(mode, loss)

    assert explain(model_fn).once == []


def test_gradients_that_are_made_once_go_nowhere():
    """Nothing can be divided; the decomposition is given the feature itself."""

    def model_fn(features, labels, mode):
        net = tf.matmul(tf.linalg.qr(features)[1], tf.get_variable('w', [3, 1]))
        return by_sgd(mode, tf.reduce_sum(tf.square(net)) + 0 * tf.reduce_sum(labels))

    found = explain(model_fn)
    assert found.gradients == [('w', 0, TOWERS[0])]
    [decomposed] = [op for op in found.once if op.name == 'Qr']
    assert decomposed.why == 'no rule for Qr'
    assert decomposed.gathered == 0  # It is whole already.


@pytest.mark.parametrize('rows', [lambda: (floats(12, 3), floats(12, 1)), batch_of(1)])
def test_nothing_is_sharded(rows, caplog):
    """Constants, and fewer rows than devices where their number is known."""
    found = explain(input_fn=rows)
    assert found.sharded == 0 and found.once == []
    assert 'ops\n  none is sharded: all run once, on the global batch' in str(found)
    assert '0 run once' not in str(found)
    assert 'Nothing is sharded: fewer examples than devices, or none in a dense' in caplog.text
    of_arrays = 'NumPy arrays become constants of the graph. Let the input_fn give tensors: tf.data'
    assert (of_arrays in caplog.text) == isinstance(rows(), tuple)


def test_rows_that_may_not_be_the_batchs():
    """After a Python function, nobody knows how many rows there are."""

    def model_fn(features, labels, mode):
        net = tf.numpy_function(lambda x: x, [features], tf.float32)
        net.set_shape([None, 3])
        net = tf.matmul(net, tf.get_variable('w', [3, 1]))
        return by_sgd(mode, tf.reduce_mean(tf.square(net - labels)))

    whys = {op.name: op.why for op in explain(model_fn).once}
    assert whys['sub'] == "the examples of this Sub's inputs may not be the batch's"
    assert 'MatMul' not in whys  # It's divided by itself.


def test_more_than_ten(caplog):
    """The log says what costs most: who runs out of memory finds what one device has whole."""

    def model_fn(features, labels, mode):
        net = tf.add_n([tf.sort(features * i, 0, name=f'order{i}') for i in range(12)])
        return by_sgd(mode, tf.reduce_mean(net * tf.get_variable('w', [3])))

    found = explain(model_fn)
    assert len(found.once) > 12
    assert str(found).endswith(f'\n  and {len(found.once) - 10} more')
    [line] = lines_of(caplog)
    share = sum(op.share for op in found.once)
    assert f' {found.sharded} ops are sharded. {share:.0%} of all output' in line
    assert line.endswith(f'{found.once[0].name} and more that run once: {found.once[0].why}.')


def sums_of_products(features):
    """A loop that needs all examples, and gives a number."""
    w = tf.get_variable('w', [3, 300])

    def body(i, total):
        return i + 1, total + tf.reduce_max(tf.cumsum(tf.matmul(features, w)))

    return tf.while_loop(lambda i, _: i < 4, body, (0, 0.0), name='loop')[1]


def test_a_loop_counts_as_what_runs_in_it(behavior, caplog):
    """Of its products, each [12, 300], of one step; the log says how many run once."""

    def model_fn(features, labels, mode):
        net = tf.layers.dense(features, 10)
        loss = tf.reduce_mean(net) + tf.stop_gradient(sums_of_products(features))
        return by_sgd(mode, loss)

    found = explain(model_fn)
    top = found.once[0]
    assert 'loop' in top.name and top.share > 0.8
    all_bytes = sum(sum(sizes.values()) for sizes in found.scopes.values())
    assert top.share * all_bytes >= 2 * 12 * 300 * 4  # `Cumsum` gives as much.
    [line] = lines_of(caplog)
    assert ' 1 of 3 matrix products and convolutions run once, most of them in ' in line


def test_the_log_is_silent_on_what_costs_little(caplog):
    def model_fn(features, labels, mode):
        net = tf.layers.dense(features, 1000)
        return by_sgd(mode, tf.reduce_mean(net) + tf.reduce_mean(tf.sort(features[:, 0]) * 1.0))

    found = explain(model_fn)
    assert 0 < sum(op.share for op in found.once) < 0.05
    [line] = lines_of(caplog)
    assert line.endswith(f' {found.sharded} ops are sharded.')


def test_as_a_dict():
    found = explain(ranked)
    told = json.loads(json.dumps(found.as_dict()))
    assert told['towers'] == TOWERS[:2] and list(told['traffic']) == TOWERS[:2]
    assert list(told['traffic'][TOWERS[0]]) == ['sent', 'received', 'messages']
    assert told['once'][0]['name'] == 'order/TopKV2' and told['once'][0]['gathered'] == FLOATS
    assert told['gradients'] == [{'variable': 'net/w', 'bytes': 12, 'device': TOWERS[0]}]
    assert told['scopes'] == found.scopes and told['sent'] == found.sent


def test_what_each_device_sends_to_each_other_one():
    found = explain(devices=TOWERS)
    assert found.sent.keys() == found.traffic.keys() == set(TOWERS)
    for device, moved in found.traffic.items():
        assert device not in found.sent[device]
        assert sum(found.sent[device].values()) == moved.sent
        assert sum(sizes.get(device, 0) for sizes in found.sent.values()) == moved.received


def test_in_a_notebook():
    """Devices, gradients and ops as tables; as text, one line instead of a long tuple."""
    found = explain(ranked, devices=['/cpu:0', '/cpu:1', '/cpu:1'])
    text = repr(found)
    assert text == f'<Explanation: 3 towers; {found.sharded} ops are sharded, 2 run once>'
    cells = cells_of(found._repr_html_())
    device, examples, *_ = cells[cells.index(TOWERS[1]) :]
    assert (device, examples) == (TOWERS[1], '4 + 4')
    assert 'net/w' in cells and 'order/TopKV2' in cells
    assert '(no device)' not in cells  # The global step's device isn't known.

    many = found._replace(once=found.once * 6)._repr_html_()
    assert many.count('order/TopKV2') == 5 and 'and 2 more' in cells_of(many)


def cells_of(html):
    return re.findall(r'<td[^>]*>(.*?)</td>', html)


def test_html_is_escaped():
    table = Table('<a>', ['&'], [['<b>', 1]])
    assert cells_of(html_of([table, Table('empty', ['x'], [])])) == ['&lt;b&gt;', '1']
    assert '<a>' not in html_of([table]) and 'empty' not in html_of([table])


def test_drawing(tmp_path):
    found, path = explain(ranked), tmp_path / 'plan.svg'
    found.draw(str(path))
    svg = path.read_text()
    texts = re.findall(r'<!-- (.*?) -->', svg)
    assert {'order', 'net', 'runs once, on one device', 'CPU:0: 6 examples', 'to CPU:1'} <= {*texts}
    bars = Counter(re.findall(r'style="fill: (#\w+)"/>', svg.partition('legend_1')[0].lower()))
    colors = [color.lower() for color in pictures._COLORS.values()]
    assert all(bars[color] >= 2 for color in colors), bars
    explain(devices=1).draw(str(path))
    assert 'A step on one device: nothing is sharded' in path.read_text()


@pytest.mark.parametrize('path', [5, '', 'plan', '.svg'], ids=repr)
def test_a_drawing_without_a_format(path):
    with pytest.raises(ValueError, match=r"names no file of a picture.*draw\('plan.svg'\)"):
        explain(ranked).draw(path)


def test_bars():
    """None is empty, and those of less than 1% of all output share one."""
    scopes = {
        'large': {'shard': 1000, 'once': 200},
        'empty': {'shard': 0},
        'small': {'shard': 5},
        'smaller': {'partial': 3, 'once': 1},
    }
    small = {'shard': 5, 'partial': 3, 'once': 1}
    assert pictures.bars_of(scopes) == [('large', scopes['large']), ('2 smaller scopes', small)]
    many = pictures.bars_of({f'scope{i}': {'shard': 1000 + i} for i in range(30)})
    assert [bar.label for bar in many][:1] == ['scope6'] and many[-1].label == '6 smaller scopes'


def test_no_bar_ends_at_the_frame():
    axes = Figure().subplots()
    pictures._draw_bars(axes, [pictures.Bar('net', {'shard': 900, 'once': 100})])
    assert axes.get_xlim()[1] > 1100
    assert [text.get_text() for text in axes.texts] == ['1.00kB']


def test_no_bars():
    axes = Figure().subplots()
    pictures._draw_bars(axes, [])
    assert not axes.axison  # There is neither a frame nor a scale.
    assert [text.get_text() for text in axes.texts] == ['All ops run once, on the global batch.']


@pytest.mark.parametrize(
    'device, short',
    [('/device:GPU:0', 'GPU:0'), ('/job:worker/task:1/device:CPU:0', 'worker 1, CPU:0')],
)
def test_names_of_devices_in_a_picture(device, short):
    assert pictures._short_name(device) == short


@pytest.mark.parametrize('count', [8, 9])
def test_devices_in_a_picture(count):
    """Of nine, each has a color for each other one instead of a number; the last has no tower."""
    axes = Figure().subplots()
    names = [f'/device:CPU:{i}' for i in range(count)]
    devices = [pictures.Device(name, '4', 1000, ['a', 'b', 'c']) for name in names]
    devices[-1] = devices[-1]._replace(examples='', variables=[])
    pictures._draw_devices(axes, devices, {names[0]: {names[1]: 2000}})
    [colors] = axes.images
    assert colors.get_array()[0, 1] == colors.get_array().sum() == 2000
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[0] == 'CPU:0: 4 examples\n1.00kB of variables\na, b and 1 more'
    assert labels[-1] == f'CPU:{count - 1}\n1.00kB of variables'
    assert len(axes.texts) == (0 if count == 9 else 8 * 7)
    assert ('darkest: 2.00kB' in axes.get_xlabel()) == (count == 9)


def test_what_would_save_too_little():
    """Most activations are needed for a mean of all examples; there is nothing to compute again."""

    def with_mean(features, labels, mode):
        net = features
        for _ in range(3):
            net = tf.layers.dense(net, 9, tf.nn.tanh)
        net = tf.layers.dense(net - tf.reduce_mean(net, 0), 1)
        return by_sgd(mode, tf.reduce_mean(tf.square(net - labels)))

    text = str(explain(with_mean, microbatches=2))
    assert 'micro-batches\n  none, as they would save only ' in text
    found = explain(recompute=True)
    said = 'no op, as that would save too little of all activations'
    assert f'computed twice\n  {said}' in str(found)
    assert f'computed twice: {said}' in cells_of(found._repr_html_())


RUNS = ' Each device runs 3 micro-batches one after another, and keeps'
SAVES = {
    0.3: ' microbatches=3 is left out: it would save only 30% of the activations, as the others '
    'are kept until all examples have reached mean; more devices would help.',
    0.6: f'{RUNS} 60% of the activations for one of them at a time. The others are kept '
    'until all examples have reached mean.',
    1.0: f'{RUNS} 100% of the activations for one of them at a time.',
}


@pytest.mark.parametrize('share', SAVES)
def test_the_log_says_what_micro_batches_save(share):
    with tf.Graph().as_default():
        tf.reduce_mean(tf.zeros([4, 3]), 0, name='mean')
        schedule = Schedule(3, set(), share, [Join('mean', 1 - share)])
        assert start_of_training._micro_batches(schedule) == SAVES[share]


def test_the_log_warns_that_there_is_no_gpu(caplog):
    for devices, warns in (None, True), (1, False):
        caplog.clear()
        explain(devices=devices)
        [record] = [r for r in caplog.records if 'The input_fn gives' in r.getMessage()]
        assert ('TensorFlow finds no GPU' in record.getMessage()) == warns
        assert (record.levelname == 'WARNING') == warns
