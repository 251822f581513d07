"""Convolutions, pooling, resizing: rows come first; filters' gradients are sums over them."""

from __future__ import annotations

from estimator_mgpu.partition.rules.signature import by, table

_NORM = 'FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3'
_NORM_GRADIENT = 'FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3'
_GIVEN = {False: 'n... *+ -> n... *+'}
_GIVEN_GRADIENT = {False: 'n... n... *+ -> n... *+ (sum)'}
_OWN = {True: 'n... *+ -> n... *+ (mean)'}
_OWN_GRADIENT = {True: 'n... n... * =+ -> n... *+ (sum)'}

RULES = table(
    {
        'Conv2D Conv3D DepthwiseConv2dNative Dilation2D': 'n... * -> n...',
        'Conv2DBackpropInput DepthwiseConv2dNativeBackpropInput': '#n___ * n___ -> n___',
        'Conv3DBackpropInputV2': '#n____ * n____ -> n____',
        'Dilation2DBackpropInput': 'n... * n... -> n...',
        'Conv2DBackpropFilter Conv3DBackpropFilterV2': 'n... * n... -> * (sum)',
        'DepthwiseConv2dNativeBackpropFilter': 'n... * n... -> * (sum)',
        'Dilation2DBackpropFilter': 'n... * n... -> * (sum)',
        'AvgPool AvgPool3D MaxPool MaxPool3D LRN': 'n... -> n...',
        'MaxPoolV2': 'n... * * -> n...',
        'MaxPoolWithArgmax': by('include_batch_in_index', {False: 'n... -> n... n...'}),
        'AvgPoolGrad': '#n___ n___ -> n___',
        'AvgPool3DGrad': '#n____ n____ -> n____',
        'MaxPoolGrad MaxPool3DGrad LRNGrad': 'n... n... n... -> n...',
        'MaxPoolGradGrad MaxPool3DGradGrad': 'n... n... n... -> n...',
        'MaxPoolGradV2': 'n... n... n... * * -> n...',
        'MaxPoolGradWithArgmax': by('include_batch_in_index', {False: 'n... n... n... -> n...'}),
        'ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor': 'n... * -> n...',
        'ResizeBicubicGrad ResizeBilinearGrad': 'n... n... -> n...',
        'ResizeNearestNeighborGrad': 'n... * -> n...',
        'CropAndResize': '* b_ b * -> b___',
        'CropAndResizeGradBoxes': 'b___ * b_ b -> b_',
        'CropAndResizeGradImage': 'b___ b_ b * -> * (sum)',
        'DepthToSpace SpaceToDepth ExtractImagePatches': 'n... -> n...',
        'AdjustHue AdjustSaturation': 'S_ * -> S_',
        'AdjustContrastv2': 'S___ * -> S___',
        'HSVToRGB RGBToHSV': 'S_ -> S_',
        _NORM: by('is_training', _GIVEN),
        _NORM_GRADIENT: by('is_training', _GIVEN_GRADIENT),
    }
)

OF_DEVICE = table(
    {
        _NORM: by('is_training', {**_GIVEN, **_OWN}),
        _NORM_GRADIENT: by('is_training', {**_GIVEN_GRADIENT, **_OWN_GRADIENT}),
    }
)
"""In place of the rules of these ops, where each device takes its own statistics."""
