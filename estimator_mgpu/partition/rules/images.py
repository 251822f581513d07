"""Convolutions, pooling, resizing: rows come first; filters' gradients are sums over them."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.rules.signature import (
    WHOLE,
    Entries,
    Label,
    Operand,
    Part,
    Rule,
    Signature,
    labels,
    rank,
)
from estimator_mgpu.partition.sizes import Sizes


def _rows(tensor: tf.Tensor, sizes: Sizes) -> tuple[Label, ...]:
    return ('row', *[None] * (rank(tensor, sizes) - 1))


def first(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """The first input row by row; the others (filters, sizes) are whole."""
    inputs = [_rows(op.inputs[0], sizes)] + [WHOLE] * (len(op.inputs) - 1)
    return Signature(inputs, [_rows(t, sizes) for t in op.outputs])


def all_inputs(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """All inputs have rows."""
    return Signature([_rows(t, sizes) for t in op.inputs], [_rows(t, sizes) for t in op.outputs])


def input_gradient(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """The gradient of what a filter was applied to, whose sizes are an input."""
    shape = Entries(_rows(op.outputs[0], sizes))
    return Signature([shape, WHOLE, _rows(op.inputs[2], sizes)], [_rows(op.outputs[0], sizes)])


def pool_gradient(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """The gradient of an average, by the sizes of what was averaged."""
    shape = Entries(_rows(op.outputs[0], sizes))
    return Signature([shape, _rows(op.inputs[1], sizes)], [_rows(op.outputs[0], sizes)])


def filter_gradient(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """The gradient of a filter: a sum over rows."""
    whole = tuple([None] * rank(op.outputs[0], sizes))
    inputs: list[Operand] = [_rows(op.inputs[0], sizes), WHOLE, _rows(op.inputs[2], sizes)]
    return Signature(inputs, [whole], 'sum')


def resize_gradient(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """The gradient of resizing, by the image or by its sizes."""
    other = _rows(op.inputs[1], sizes) if rank(op.inputs[1], sizes) == 4 else WHOLE
    return Signature([_rows(op.inputs[0], sizes), other], [_rows(op.outputs[0], sizes)])


def batch_norm_inference(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Normalization by given statistics, which come out again."""
    if op.get_attr('is_training'):
        return None
    outputs = [
        labels(t, sizes) if i else _rows(t, sizes) for i, t in enumerate(op.outputs) if i < 5
    ]
    outputs += [()] * (len(op.outputs) - len(outputs))
    return Signature([_rows(op.inputs[0], sizes), WHOLE, WHOLE, WHOLE, WHOLE], outputs)


def batch_norm_of_device(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Normalization by the statistics of each device's rows, whose mean is what others see."""
    if not op.get_attr('is_training'):
        return batch_norm_inference(op, sizes)
    outputs = [() if i else _rows(t, sizes) for i, t in enumerate(op.outputs)]
    inputs = [_rows(op.inputs[0], sizes)] + [WHOLE] * (len(op.inputs) - 1)
    return Signature(inputs, outputs, 'mean')


def batch_norm_gradient_of_device(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Its gradient."""
    if not op.get_attr('is_training'):
        return batch_norm_inference_gradient(op, sizes)
    inputs: list[Operand] = [_rows(op.inputs[0], sizes), _rows(op.inputs[1], sizes), WHOLE]
    inputs += [Part()] * (len(op.inputs) - 3)
    return Signature(
        inputs, [() if i else _rows(t, sizes) for i, t in enumerate(op.outputs)], 'sum'
    )


def batch_norm_inference_gradient(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Its gradient, which sums those of scale and offset over rows."""
    if op.get_attr('is_training'):
        return None
    inputs: list[Operand] = [_rows(op.inputs[0], sizes), _rows(op.inputs[1], sizes)] + [WHOLE] * (
        len(op.inputs) - 2
    )
    outputs = [() if i else _rows(t, sizes) for i, t in enumerate(op.outputs)]
    return Signature(inputs, outputs, 'sum')


def crop_and_resize(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """A crop for each box, of any of the images."""
    return Signature([WHOLE, ('box', None), ('box',), WHOLE], [('box', None, None, None)])


_FIRST = """
    AvgPool AvgPool3D Conv2D Conv3D DepthToSpace DepthwiseConv2dNative Dilation2D
    ExtractImagePatches LRN MaxPool MaxPool3D MaxPoolV2 ResizeArea
    ResizeBicubic ResizeBilinear ResizeNearestNeighbor SpaceToDepth
    AdjustHue AdjustSaturation
"""
_ALL = 'LRNGrad MaxPoolGrad MaxPoolGradGrad MaxPool3DGrad MaxPool3DGradGrad'

RULES: dict[str, Rule] = {
    **dict.fromkeys(_FIRST.split(), first),
    **dict.fromkeys(_ALL.split(), all_inputs),
    'Conv2DBackpropInput': input_gradient,
    'Conv3DBackpropInputV2': input_gradient,
    'DepthwiseConv2dNativeBackpropInput': input_gradient,
    'AvgPoolGrad': pool_gradient,
    'AvgPool3DGrad': pool_gradient,
    'Conv2DBackpropFilter': filter_gradient,
    'Conv3DBackpropFilterV2': filter_gradient,
    'DepthwiseConv2dNativeBackpropFilter': filter_gradient,
    'ResizeBilinearGrad': resize_gradient,
    'ResizeBicubicGrad': resize_gradient,
    'ResizeNearestNeighborGrad': resize_gradient,
    'FusedBatchNormV3': batch_norm_inference,
    'FusedBatchNormV2': batch_norm_inference,
    'FusedBatchNormGradV3': batch_norm_inference_gradient,
    'FusedBatchNormGradV2': batch_norm_inference_gradient,
    'CropAndResize': crop_and_resize,
}

OF_DEVICE: dict[str, Rule] = {
    **dict.fromkeys(['FusedBatchNormV2', 'FusedBatchNormV3'], batch_norm_of_device),
    **dict.fromkeys(
        ['FusedBatchNormGradV2', 'FusedBatchNormGradV3'], batch_norm_gradient_of_device
    ),
}
"""In place of the rules of these ops, where each device takes its own statistics."""
