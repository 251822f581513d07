"""Draws how-it-works.svg from the graph of a replicated model_fn: `python docs/draw_graph.py`.

With the argument `-`, the picture goes to stdout.

Ops are put into boxes by where they are and what they're for, which is told from their names,
devices and types. Arrows are there where tensors go from one box to another.
"""

import pathlib
import sys

import tensorflow.compat.v1 as tf

import estimator_mgpu

PATH = pathlib.Path(__file__).with_name('how-it-works.svg')
TOWERS = 3
WIDTH, HEIGHT, LEFT, TOP, COLUMN, ROW = 190, 82, 16, 56, 232, 118
TITLES = ['input_fn', 'slices', 'towers', 'sums', 'the one optimizer']
FILLS = ['#eeeeee', '#fff3d6', '#d9e8fb', '#dcf2dc', '#f9dcd9']


def model_fn(features, labels, mode):
    net = features
    for i in range(TOWERS):
        net = tf.nn.tanh(net @ tf.get_variable(f'layer{i}', [8, 8]))
    loss = tf.reduce_mean(tf.square(net - labels))
    train_op = tf.train.AdamOptimizer().minimize(loss, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def build():
    """Returns the ops that a step of training runs."""
    with tf.Graph().as_default() as graph:
        tf.train.get_or_create_global_step()
        rows = tf.zeros([12, 8])
        dataset = tf.data.Dataset.from_tensors((rows, rows))
        features, labels = tf.data.make_one_shot_iterator(dataset).get_next()
        devices = [f'/cpu:{i}' for i in range(TOWERS)]
        replicated = estimator_mgpu.replicate(model_fn, devices=devices)
        spec = replicated(features, labels, tf.estimator.ModeKeys.TRAIN)
    run, left = set(), [spec.train_op]
    while left:
        op = left.pop()
        if op not in run:
            run.add(op)
            left += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return [op for op in graph.get_operations() if op in run]


def index_of(op):
    """Returns the number of an op's device."""
    return tf.DeviceSpec.from_string(op.device).device_index or 0


def box_of(op):
    """Returns (column, device's number) of an op; None for what isn't drawn."""
    if op.type == 'IteratorGetNext':
        return 0, 0
    if op.type == 'StridedSlice' and op.inputs[0].op.type == 'IteratorGetNext':
        return 1, 0
    if op.type == 'ResourceApplyAdam':
        return 4, index_of(op.inputs[0].op)  # It runs where the variable is.
    if '/replicate/tower_' in op.name:
        return 2, index_of(op)
    if 'replicate/AddN' in op.name:
        return 3, index_of(op)
    return None


def boxes_of(ops):
    """Returns the ops of each box, in the graph's order."""
    boxes = {}
    for op in ops:
        box = box_of(op)
        if box is not None:
            boxes.setdefault(box, []).append(op)
    return boxes


def lines_of(box, ops):
    """Returns what to write into a box."""
    column, device = box
    where = f'/device:CPU:{device}'
    if column == 0:
        shape = ops[0].outputs[0].shape.as_list()
        return ['IteratorGetNext', f'the batch: {shape[0]} rows']
    if column == 1:
        rows = [op.outputs[0].shape.as_list()[0] for op in ops[:TOWERS]]
        return [f'{len(ops)} Slice ops', 'shards of ' + ', '.join(map(str, rows)) + ' rows']
    if column == 2:
        layers = sum(op.type == 'MatMul' and 'gradients/' not in op.name for op in ops)
        return [where, 'copies of the ops', f'{layers} MatMul, and their gradients']
    if column == 3:
        return [where, *(f'{op.type} of {len(op.inputs)} gradients' for op in ops)]
    return [where, *(f'{op.type}: {op.inputs[0].op.name}' for op in ops)]


def center(box):
    column, device = box
    middle = (TOWERS - 1) / 2 if column < 2 else device
    return LEFT + column * COLUMN + WIDTH / 2, TOP + middle * ROW + HEIGHT / 2


def arrows_of(boxes):
    """Returns pairs of boxes between which a tensor goes, from left to right."""
    where = {op: box for box, ops in boxes.items() for op in ops}
    found = set()
    for op, box in where.items():
        seen, left = set(), [tensor.op for tensor in op.inputs]
        while left:  # Back over what isn't drawn.
            before = left.pop()
            if before in where:
                if where[before][0] < box[0]:
                    found.add((where[before], box))
            elif before not in seen:
                seen.add(before)
                left += [tensor.op for tensor in before.inputs]
    return sorted(found)


def draw(boxes):
    """Returns the picture as SVG."""
    width = 2 * LEFT + (len(TITLES) - 1) * COLUMN + WIDTH
    height = TOP + (TOWERS - 1) * ROW + HEIGHT + 16
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12" text-anchor="middle">',
        '<defs><marker id="end" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#666"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for column, title in enumerate(TITLES):
        x, _ = center((column, 0))
        lines.append(f'<text x="{x:g}" y="30" font-size="15" font-weight="bold">{title}</text>')
    for start, end in arrows_of(boxes):
        (x1, y1), (x2, y2) = center(start), center(end)
        lines.append(
            f'<line x1="{x1 + WIDTH / 2:g}" y1="{y1:g}" x2="{x2 - WIDTH / 2:g}" y2="{y2:g}" '
            'stroke="#666" marker-end="url(#end)"/>'
        )
    for box, ops in sorted(boxes.items()):
        x, y = center(box)
        lines.append(
            f'<rect x="{x - WIDTH / 2:g}" y="{y - HEIGHT / 2:g}" width="{WIDTH}" '
            f'height="{HEIGHT}" rx="6" fill="{FILLS[box[0]]}" stroke="#666"/>'
        )
        told = lines_of(box, ops)
        for i, line in enumerate(told):
            y_line = y + 4 + 18 * (i - (len(told) - 1) / 2)
            lines.append(f'<text x="{x:g}" y="{y_line:g}">{line}</text>')
    return '\n'.join([*lines, '</svg>', ''])


def main():
    picture = draw(boxes_of(build()))
    if sys.argv[1:] == ['-']:
        sys.stdout.write(picture)
    else:
        PATH.write_text(picture)


if __name__ == '__main__':
    main()
