"""Layers and losses: convolutions, pooling, normalization, softmax, recurrent cells.

All can be sharded by examples. Convolutions, pooling and normalization aren't sharded along height,
width or channels: windows overlap, and statistics are of all entries. The gradient of weights is a
partial sum on each tower.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import MOMENTS
from estimator_mgpu.partition.rules.notation import (
    NotSharded,
    Rule,
    Signature,
    by_attribute,
    parse,
    table,
)
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.tf_internals import op_types

_NORMS = ' '.join(op_types.BATCH_NORMS)
_NORM_GRADIENTS = ' '.join(op_types.BATCH_NORMS.values())
# Fused batch normalization with given statistics, as in evaluation. In training, statistics are
# those of the global batch: `rewrites/batch_norm.py` replaces the op by one that gives these, and
# one that applies them.
_NORM_OF_GIVEN = 'n... *+ -> n... *+'
_NORM_GRADIENT_OF_GIVEN = 'n... n... *+ -> n... *+ (sum)'


def _like_logits(text: str) -> Rule:
    """A rule of a text for ops whose last output has the shape of the first input, the logits."""

    def rule(op: tf.Operation, sizes: Sizes) -> Signature:
        signature = parse(text).signature(op, sizes)
        dims = [None] * (len(op.outputs) - 1)
        return signature._replace(dims=[*dims, sizes.dims(op.inputs[0])])

    return rule


def _norm(op: tf.Operation, sizes: Sizes) -> str | Signature:
    """The rule for fused batch normalization with given statistics, or for its statistics."""
    if not op.get_attr('is_training'):
        return _NORM_OF_GIVEN
    if op_types.GIVES_MOMENTS not in op.node_def.attr:
        raise NotSharded
    signature = parse(_NORM_OF_GIVEN).signature(op, sizes)
    outputs = range(len(op.outputs))
    unused = [index for index in outputs if index not in outputs[op_types.MOMENT_OUTPUTS]]
    return signature._replace(reduce=MOMENTS, unused=unused)


_DENSE: dict[str, Rule] = {
    # Products are in `linear_algebra`.
    'BiasAdd': by_attribute('data_format', {b'NHWC': 'Sc c -> Sc', b'NCHW': 'ncS c -> ncS'}),
    'BiasAddGrad': by_attribute(
        'data_format', {b'NHWC': 'Sc -> c (sum)', b'NCHW': 'ncS -> c (sum)'}
    ),
    # Softmax, and losses, of the last dimension.
    'LogSoftmax Softmax': _like_logits('S_ -> S_'),
    'SoftmaxCrossEntropyWithLogits': _like_logits('S_ S_ -> S S_'),
    'SparseSoftmaxCrossEntropyWithLogits': _like_logits('n_ n -> n n_'),
}
DENSE = table(_DENSE)
"""Rules for dense layers, softmax and its losses. Their kernels do without rows."""

_RULES: dict[str, Rule] = {
    # Convolutions.
    'Conv2D Conv3D DepthwiseConv2dNative Dilation2D': 'n... * -> n...',
    # The first input is the shape of the gradient, which has the examples' number in it.
    'Conv2DBackpropInput DepthwiseConv2dNativeBackpropInput': '#n___ * n___ -> n___',
    'Conv3DBackpropInputV2': '#n____ * n____ -> n____',
    'Dilation2DBackpropInput': 'n... * n... -> n...',
    'Conv2DBackpropFilter Conv3DBackpropFilterV2': 'n... * n... -> * (sum)',
    'DepthwiseConv2dNativeBackpropFilter Dilation2DBackpropFilter': 'n... * n... -> * (sum)',
    # Pooling.
    'AvgPool AvgPool3D MaxPool MaxPool3D': 'n... -> n...',
    'AvgPoolGrad AvgPool3DGrad': '#n... n... -> n...',
    'MaxPoolGrad MaxPool3DGrad MaxPoolGradGrad MaxPool3DGradGrad': 'n... n... n... -> n...',
    'MaxPoolV2': 'n... * * -> n...',
    'MaxPoolGradV2': 'n... n... n... * * -> n...',
    # With the batch in the index, entries are counted from the batch's first.
    'MaxPoolWithArgmax': by_attribute('include_batch_in_index', {False: 'n... -> n... n...'}),
    'MaxPoolGradWithArgmax': by_attribute(
        'include_batch_in_index', {False: 'n... n... n... -> n...'}
    ),
    # Normalization.
    'LRN': 'n... -> n...',
    'LRNGrad': 'n... n... n... -> n...',
    _NORMS: _norm,
    _NORM_GRADIENTS: by_attribute('is_training', {False: _NORM_GRADIENT_OF_GIVEN}),
    # Recurrent cells, whose weights and biases each tower needs in full.
    'GRUBlockCell': 'n_ n_ * * * * -> n_+',
    'GRUBlockCellGrad': 'n_ n_ * * * * n_+ -> n_+',
    'LSTMBlockCell': 'n_ n_ n_ * * * * * -> n_+',
    'LSTMBlockCellGrad': 'n_ n_ n_ * * * * * n_+ -> n_ n_ * * * (sum)',
    # The sequence is time-major: [time, batch, depth].
    'BlockLSTM BlockLSTMV2': '* _n_ n_ n_ * * * * * -> _n_+',
    'BlockLSTMGrad BlockLSTMGradV2': '* _n_ n_ n_ * * * * * _n_+ -> _n_ n_ n_ *+ (sum)',
    # Quantization, with a minimum and a maximum for each channel.
    'FakeQuantWithMinMaxVarsPerChannel': 'S_ * * -> S_',
    'FakeQuantWithMinMaxVarsPerChannelGradient': 'S_ S_ * * -> S_ * * (sum)',
}
RULES = DENSE | table(_RULES)

_OF_DEVICE: dict[str, Rule] = {
    # Statistics that the op gives, for moving averages, are the mean of the towers'.
    _NORMS: by_attribute('is_training', {False: _NORM_OF_GIVEN, True: 'n... *+ -> n... *+ (mean)'}),
    # The statistics and reserved values are those of the same tower.
    _NORM_GRADIENTS: by_attribute(
        'is_training',
        {False: _NORM_GRADIENT_OF_GIVEN, True: 'n... n... * =+ -> n... *+ (sum)'},
    ),
}
OF_DEVICE = table(_OF_DEVICE)  # rules for `batch_norm='device'`: each tower has its own statistics
