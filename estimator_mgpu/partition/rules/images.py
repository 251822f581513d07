"""Ops on images: each image by itself, or each box or pixel."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.plan import FULL, IndicesOfRows, Label, SizesOf
from estimator_mgpu.partition.rules.notation import (
    Operand,
    Rule,
    Signature,
    parse,
    require,
    table,
)
from estimator_mgpu.partition.rules.row_indices import are_rows
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import Size

_IMAGES: tuple[Label, ...] = ('n', None, None, None)
_BOXES: tuple[Label, ...] = ('n', None)  # of which an image has one or several


def _crop(op: tf.Operation, sizes: Sizes) -> Signature:
    """`CropAndResize`: images, boxes, the number of each box's image, and the size of crops.

    By boxes (b), towers need all images. If each image has as many boxes, one after another, they
    need no images but their own.
    """
    images, boxes, numbers, _ = op.inputs
    by_boxes = parse('* b_ b * -> b___').signature(op, sizes)
    own = _numbers_of_own(numbers, sizes.dims(images), sizes)
    if own is None:
        return by_boxes
    dims = [require(sizes.dims(boxes))[0], None, None, None]
    return _by_images([_IMAGES, _BOXES, own, FULL], _IMAGES, dims, by_boxes)


def _gradient_of_boxes(op: tf.Operation, sizes: Sizes) -> Signature:
    """`CropAndResizeGradBoxes`: the crops' gradients, images, boxes, and numbers."""
    _, images, boxes, numbers = op.inputs
    by_boxes = parse('b___ * b_ b -> b_').signature(op, sizes)
    own = _numbers_of_own(numbers, sizes.dims(images), sizes)
    if own is None:
        return by_boxes
    return _by_images([_IMAGES, _IMAGES, _BOXES, own], _BOXES, sizes.dims(boxes), by_boxes)


def _gradient_of_images(op: tf.Operation, sizes: Sizes) -> Signature:
    """`CropAndResizeGradImage`: the crops' gradients, boxes, numbers, and the images' sizes."""
    _, _, numbers, image_sizes = op.inputs
    by_boxes = parse('b___ b_ b * -> * (sum)').signature(op, sizes)
    dims = sizes.entries(image_sizes)
    own = _numbers_of_own(numbers, dims, sizes)
    if own is None:
        return by_boxes
    return _by_images([_IMAGES, _BOXES, own, SizesOf(_IMAGES)], _IMAGES, dims, by_boxes)


def _numbers_of_own(
    numbers: tf.Tensor, image_dims: Sequence[Size] | None, sizes: Sizes
) -> IndicesOfRows | None:
    """The operand for the boxes' images, if each image has its boxes in its place; or None."""
    if not image_dims or not are_rows(numbers, image_dims[0], sizes):
        return None
    return IndicesOfRows(('n',), image_dims[0])


def _by_images(
    inputs: Sequence[Operand],
    output: tuple[Label, ...],
    dims: Sequence[Size | None] | None,
    by_boxes: Signature,
) -> Signature:
    """The signature by images (n), of which each has its boxes one after another."""
    return Signature(inputs, [output], dims=[dims], in_blocks={'n': False}, otherwise=by_boxes)


_RULES: dict[str, Rule] = {
    'DepthToSpace ExtractImagePatches SpaceToDepth': 'n... -> n...',
    'ResizeArea ResizeBicubic ResizeBilinear': 'n... * -> n...',
    'ResizeNearestNeighbor ResizeNearestNeighborGrad': 'n... * -> n...',
    'ResizeBicubicGrad ResizeBilinearGrad': 'n... n... -> n...',
    'CropAndResize': _crop,
    'CropAndResizeGradBoxes': _gradient_of_boxes,
    'CropAndResizeGradImage': _gradient_of_images,
    'CombinedNonMaxSuppression': 'b___ b__ * * * * -> b__ b_ b_ b',
    # Colors. Contrast depends on all pixels of an image, hue and saturation on one.
    'AdjustContrastv2': 'S___ * -> S___',
    'AdjustHue AdjustSaturation': 'S_ * -> S_',
    'HSVToRGB RGBToHSV': 'S_ -> S_',
}
RULES = table(_RULES)
