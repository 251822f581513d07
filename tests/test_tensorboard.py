"""TensorBoard draws a replicated model as on one device.

It draws a box for each outermost scope, and sets those aside that have many neighbors: then their
edges aren't drawn, and what only these connect falls into islands. `drawn` follows its rules, those
of `extractHighDegrees()` in TensorBoard's `render.ts`.
"""

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import spec_of, step
from towers import TRAIN


def network(features, labels, mode):
    net = tf.reshape(features, [-1, 4, 4, 1])
    net = tf.layers.conv2d(net, 4, 2, activation=tf.nn.relu)
    net = tf.layers.flatten(tf.layers.max_pooling2d(net, 2, 2))
    for _ in range(4):
        net = tf.layers.dense(net, 8, activation=tf.nn.relu)
        net = tf.layers.dropout(net, training=True)
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(net, 1))
    return spec_of(mode, loss, tf.train.AdamOptimizer().minimize(loss, step()))


def graph_def_of(devices, static):
    with tf.Graph().as_default() as graph:
        tf.train.get_or_create_global_step()
        rows = 16 if static else None
        features = tf.placeholder(tf.float32, [rows, 16], 'features')
        labels = tf.placeholder(tf.float32, [rows, 1], 'labels')
        estimator_mgpu.replicate(network, devices=devices)(features, labels, TRAIN)
        return graph.as_graph_def()


def scope_of(name):
    return name.lstrip('^').partition(':')[0].partition('/')[0]


def edges_of(graph_def):
    """The edges between outermost scopes; for each, whether there is data, or only control."""
    # A constant is drawn as a part of what uses it. In 'batch', the examples are counted.
    constants = {node.name for node in graph_def.node if node.op == 'Const'}
    edges = {}
    for node in graph_def.node:
        for name in node.input:
            edge = scope_of(name), scope_of(node.name)
            is_within = edge[0] == edge[1] or 'batch' in edge
            if name.lstrip('^') not in constants and not is_within:
                edges[edge] = edges.get(edge, False) or not name.startswith('^')
    return edges


def quartiles(degrees):
    ordered = sorted(degrees.values())
    return ordered[round(len(ordered) * 0.25)], ordered[round(len(ordered) * 0.75)]


def drawn(graph_def):
    """The edges that are drawn, and the boxes that are set aside."""
    edges = edges_of(graph_def)
    boxes = {scope for edge in edges for scope in edge}
    assert len(boxes) >= 15  # Of fewer boxes, none are set aside.

    def degrees(end):
        found = {}
        for box in boxes:
            has_data = [data for edge, data in edges.items() if edge[end] == box]
            found[box] = sum(has_data) or len(has_data)
        return found

    into, out_of = degrees(1), degrees(0)
    first, third = quartiles(into)
    aside = {box for box in boxes if into[box] > max(third + (third - first), 4)}
    first, third = quartiles(out_of)
    aside |= {box for box in boxes if out_of[box] > max(third + 4 * (third - first), 4)}
    return {edge for edge, data in edges.items() if data and aside.isdisjoint(edge)}, aside


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
def test_towers_are_in_the_boxes_of_one_device(static):
    edges, aside = drawn(graph_def_of(1, static))
    assert ('conv2d', 'max_pooling2d') in edges and ('dense_3', 'dropout_3') in edges
    edges_of_several, aside_of_several = drawn(graph_def_of(8, static))
    assert edges_of_several == edges
    assert aside_of_several - {'replicate'} == aside
