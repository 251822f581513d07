"""The table of rules: for each type of op what it does along which dimensions.

An op whose type isn't here runs once, on the whole batch, which is exact.
"""

from __future__ import annotations

from estimator_mgpu.partition.rules import dimensions as dims
from estimator_mgpu.partition.rules.notation import Rule, by, table
from estimator_mgpu.tf_internals import op_types

_ENTRIES = """
    Abs Acos Acosh Add AddN AddV2 Angle ApproximateEqual AsString Asin Asinh Atan Atan2 Atanh
    BesselI0e BesselI1e Betainc BitwiseAnd BitwiseOr BitwiseXor Bucketize Cast Ceil CheckNumerics
    CheckNumericsV2 ClipByValue Complex ComplexAbs Conj Cos Cosh DecodeBase64 DeepCopy Digamma Div
    DivNoNan Elu EluGrad EncodeBase64 Equal Erf Erfc Erfinv Exp Expm1 FakeQuantWithMinMaxArgs
    FakeQuantWithMinMaxArgsGradient Floor FloorDiv FloorMod Greater GreaterEqual Identity Igamma
    IgammaGradA Igammac Imag Inv InvGrad Invert IsFinite IsInf IsNan LeakyRelu LeakyReluGrad
    LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod
    Mul MulNoNan Ndtri Neg NextAfter NotEqual OnesLike Polygamma PopulationCount Pow
    PreventGradient Real RealDiv Reciprocal ReciprocalGrad RegexFullMatch RegexReplace Relu Relu6
    Relu6Grad ReluGrad RightShift Rint Round Rsqrt RsqrtGrad SelectV2 Selu SeluGrad Sigmoid
    SigmoidGrad Sign Sin Sinh Snapshot Softplus SoftplusGrad Softsign SoftsignGrad Sqrt SqrtGrad
    Square SquaredDifference StaticRegexFullMatch StaticRegexReplace StopGradient StringJoin
    StringLength StringLower StringStrip StringToHashBucket StringToHashBucketFast
    StringToHashBucketStrong StringToNumber StringUpper Sub Substr Tan Tanh TanhGrad TruncateDiv
    TruncateMod Xdivy Xlog1py Xlogy ZerosLike Zeta
"""
_ALONE, _EACH, _GRADIENT = 'n... -> n...', 'n... * -> n...', 'n... n... n... -> n...'
_FILTER = 'n... * n... -> * (sum)'
_NORM, _NORM_GRAD = ' '.join(op_types.BATCH_NORMS), ' '.join(op_types.BATCH_NORMS.values())
_GIVEN, _GIVEN_GRAD = {False: 'n... *+ -> n... *+'}, {False: 'n... n... *+ -> n... *+ (sum)'}

_PRODUCTS: dict[str, Rule] = {
    'MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3': dims.matmul,
    'Einsum': dims.einsum,
    'BiasAdd': by('data_format', {b'NHWC': 'Sc c -> Sc', b'NCHW': 'ncS c -> ncS'}),
    'BiasAddGrad': by('data_format', {b'NHWC': 'Sc -> c (sum)', b'NCHW': 'ncS -> c (sum)'}),
    'Softmax LogSoftmax FFT IFFT HSVToRGB RGBToHSV': 'S_ -> S_',
    'SoftmaxCrossEntropyWithLogits': 'S_ S_ -> S S_',
    'SparseSoftmaxCrossEntropyWithLogits': 'n_ n -> n n_',
    'LSTMBlockCell': 'n_ n_ n_ * * * * * -> n_+',
    'LSTMBlockCellGrad': 'n_ n_ n_ * * * * * n_+ -> n_ n_ * * * (sum)',
    'BlockLSTM BlockLSTMV2': '* _n_ n_ n_ * * * * * -> _n_+',
    'BlockLSTMGrad BlockLSTMGradV2': '* _n_ n_ n_ * * * * * _n_+ -> _n_ n_ n_ *+ (sum)',
    'GRUBlockCell': 'n_ n_ * * * * -> n_+',
    'GRUBlockCellGrad': 'n_ n_ * * * * n_+ -> n_+',
    'InTopK': 'n_ n -> n',
    'InTopKV2': 'n_ n * -> n',
    'TopKV2': 'S_ * -> S_ S_',
    'NthElement': 'S_ * -> S',
    'LowerBound UpperBound': 'n_ nm -> nm',
    'FakeQuantWithMinMaxVarsPerChannel': 'S_ * * -> S_',
    'FakeQuantWithMinMaxVarsPerChannelGradient': 'S_ S_ * * -> S_ * * (sum)',
    'RFFT IRFFT AdjustHue AdjustSaturation': 'S_ * -> S_',
    'RFFT2D IRFFT2D': 'S__ * -> S__',
    'FFT2D IFFT2D Cholesky MatrixInverse': 'S__ -> S__',
    'CholeskyGrad MatrixSolve MatrixTriangularSolve': 'S__ S__ -> S__',
    'SelfAdjointEigV2': by('compute_v', {True: 'S__ -> S_ S__', False: 'S__ -> S_ *'}),
    'MatrixDeterminant': 'S__ -> S',
    'LogMatrixDeterminant': 'S__ -> S S',
    'MatrixBandPart': 'S__ * * -> S__',
    'MatrixDiag MatrixDiagV2 MatrixDiagV3': 'S_ *+ -> S__...',  # not of diagonals of one matrix
    'MatrixDiagPart': 'S__ -> S_',
    'MatrixDiagPartV2 MatrixDiagPartV3': 'S__ * * -> S...',
    'MatrixSetDiag': 'S__ S_ -> S__',
    'MatrixSetDiagV2 MatrixSetDiagV3': 'S__ S... * -> S__',
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
    'AvgPoolGrad AvgPool3DGrad': '#n... n... -> n...',
    'LRNGrad MaxPoolGrad MaxPool3DGrad MaxPoolGradGrad MaxPool3DGradGrad': _GRADIENT,
    'MaxPoolGradV2': 'n... n... n... * * -> n...',
    'MaxPoolGradWithArgmax': by('include_batch_in_index', {False: 'n... n... n... -> n...'}),
    'ResizeBicubicGrad ResizeBilinearGrad': 'n... n... -> n...',
    'CropAndResize': '* b_ b * -> b___',
    'CropAndResizeGradBoxes': 'b___ * b_ b -> b_',
    'CropAndResizeGradImage': 'b___ b_ b * -> * (sum)',
    'CombinedNonMaxSuppression': 'b___ b__ * * * * -> b__ b_ b_ b',
    'AdjustContrastv2': 'S___ * -> S___',
    _NORM: by('is_training', _GIVEN),
    _NORM_GRAD: by('is_training', _GIVEN_GRAD),
}
_OTHERS: dict[str, Rule] = {
    _ENTRIES: 'S+ -> S',
    'Select': dims.select,
    op_types.ENSURE_SHAPE: dims.ensure_shape,
    'IdentityN': dims.each,
    'FakeQuantWithMinMaxVars': 'S * * -> S',
    'FakeQuantWithMinMaxVarsGradient': 'S S * * -> S * * (sum)',
    'Fill': '#S * -> S',
    'BroadcastTo': 'S #S -> S',
    'RandomStandardNormal RandomUniform TruncatedNormal': dims.unseeded,
    'All Any Max Mean Min Prod Sum': dims.reduction,
    'L2Loss': 'S -> * (sum)',
    'Cumsum Cumprod CumulativeLogsumexp ReverseV2': dims.along(1, 'all * -> all'),
    'Roll SplitV': dims.along(2, 'all * * -> all+'),
    'ReverseSequence': dims.reverse_sequence,
    'ConcatV2': dims.along(-1, 'all+ * -> all'),
    'Split': dims.along(0, '* all -> all+'),
    'ArgMax ArgMin': dims.along(1, 'all * -> left'),
    'Unpack': dims.along('axis', 'all -> left+'),
    'Pack': dims.along('axis', 'left+ -> all'),
    'ExpandDims': dims.along(1, 'left * -> all'),
    'OneHot': dims.along('axis', 'left * * * -> all'),
    'Squeeze': dims.squeeze,
    'Transpose ConjugateTranspose': dims.transpose,
    'Gather': '_P I -> IP',
    'GatherV2': dims.gather,
    'ResourceGather': by('batch_dims', {0: '* I -> I...'}),
    'GatherNd ResourceGatherNd': '* I_ -> I...',
    'LookupTableFind LookupTableFindV2': '* S * -> S...',
    'UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum': dims.segments,
    'Reshape': dims.reshape,
    'StridedSlice StridedSliceGrad': dims.strided_slice,
    'Slice': dims.slice_,
    'Pad PadV2 MirrorPad MirrorPadGrad': dims.pad,
    'Tile': dims.tile,
}
_OF_DEVICE: dict[str, Rule] = {
    _NORM: by('is_training', _GIVEN | {True: 'n... *+ -> n... *+ (mean)'}),
    _NORM_GRAD: by('is_training', _GIVEN_GRAD | {True: 'n... n... * =+ -> n... *+ (sum)'}),
}
PRODUCTS = table(_PRODUCTS)  # worth dividing rows that aren't the batch's
RULES = table(_OTHERS) | PRODUCTS
OF_DEVICE = table(_OF_DEVICE)  # in place of these, where each device takes its own statistics
