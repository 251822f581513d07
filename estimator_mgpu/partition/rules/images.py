"""Convolutions, pooling, resizing: rows come first; filters' gradients are sums over them."""

from __future__ import annotations

from .signature import Rule, by

_ALONE, _EACH, _GRADIENT = 'n... -> n...', 'n... * -> n...', 'n... n... n... -> n...'
_FILTER = 'n... * n... -> * (sum)'
_NORM = 'FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3'
_NORM_GRAD = 'FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3'
_GIVEN, _GIVEN_GRAD = {False: 'n... *+ -> n... *+'}, {False: 'n... n... *+ -> n... *+ (sum)'}

RULES: dict[str, Rule] = {
    'Conv2D Conv3D DepthwiseConv2dNative Dilation2D ResizeArea': _EACH,
    'ResizeBicubic ResizeBilinear ResizeNearestNeighbor ResizeNearestNeighborGrad': _EACH,
    'Conv2DBackpropInput DepthwiseConv2dNativeBackpropInput': '#n___ * n___ -> n___',
    'Conv3DBackpropInputV2': '#n____ * n____ -> n____',
    'Dilation2DBackpropInput': 'n... * n... -> n...',
    'Conv2DBackpropFilter Conv3DBackpropFilterV2 Dilation2DBackpropFilter': _FILTER,
    'DepthwiseConv2dNativeBackpropFilter': _FILTER,
    'AvgPool AvgPool3D MaxPool MaxPool3D LRN DepthToSpace SpaceToDepth ExtractImagePatches': _ALONE,
    'MaxPoolV2': 'n... * * -> n...',
    'MaxPoolWithArgmax': by('include_batch_in_index', {False: 'n... -> n... n...'}),
    'AvgPoolGrad': '#n___ n___ -> n___',
    'AvgPool3DGrad': '#n____ n____ -> n____',
    'LRNGrad MaxPoolGrad MaxPool3DGrad MaxPoolGradGrad MaxPool3DGradGrad': _GRADIENT,
    'MaxPoolGradV2': 'n... n... n... * * -> n...',
    'MaxPoolGradWithArgmax': by('include_batch_in_index', {False: 'n... n... n... -> n...'}),
    'ResizeBicubicGrad ResizeBilinearGrad': 'n... n... -> n...',
    'CropAndResize': '* b_ b * -> b___',
    'CropAndResizeGradBoxes': 'b___ * b_ b -> b_',
    'CropAndResizeGradImage': 'b___ b_ b * -> * (sum)',
    'CombinedNonMaxSuppression': 'b___ b__ * * * * -> b__ b_ b_ b',
    'AdjustHue AdjustSaturation': 'S_ * -> S_',
    'AdjustContrastv2': 'S___ * -> S___',
    'HSVToRGB RGBToHSV': 'S_ -> S_',
    _NORM: by('is_training', _GIVEN),
    _NORM_GRAD: by('is_training', _GIVEN_GRAD),
}
OF_DEVICE = {  # in place of these rules, where each device takes its own statistics
    _NORM: by('is_training', _GIVEN | {True: 'n... *+ -> n... *+ (mean)'}),
    _NORM_GRAD: by('is_training', _GIVEN_GRAD | {True: 'n... n... * =+ -> n... *+ (sum)'}),
}
