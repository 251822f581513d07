"""Ops on images: each image by itself, or each box or pixel."""

from __future__ import annotations

from estimator_mgpu.partition.rules.notation import Rule, table

_RULES: dict[str, Rule] = {
    'DepthToSpace ExtractImagePatches SpaceToDepth': 'n... -> n...',
    'ResizeArea ResizeBicubic ResizeBilinear': 'n... * -> n...',
    'ResizeNearestNeighbor ResizeNearestNeighborGrad': 'n... * -> n...',
    'ResizeBicubicGrad ResizeBilinearGrad': 'n... n... -> n...',
    # By boxes (b), of which each names its image: towers need all images.
    'CropAndResize': '* b_ b * -> b___',
    'CropAndResizeGradBoxes': 'b___ * b_ b -> b_',
    'CropAndResizeGradImage': 'b___ b_ b * -> * (sum)',
    'CombinedNonMaxSuppression': 'b___ b__ * * * * -> b__ b_ b_ b',
    # Colors. Contrast depends on all pixels of an image, hue and saturation on one.
    'AdjustContrastv2': 'S___ * -> S___',
    'AdjustHue AdjustSaturation': 'S_ * -> S_',
    'HSVToRGB RGBToHSV': 'S_ -> S_',
}
RULES = table(_RULES)
