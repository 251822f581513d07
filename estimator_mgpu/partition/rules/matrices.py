"""Vectors and matrices, each by itself, in the last dimensions; and their products."""

from __future__ import annotations

import string
from functools import partial

import tensorflow.compat.v1 as tf

from .signature import Rule, by, rank
from .sizes import Sizes


def matmul(op: tf.Operation, sizes: Sizes, a: str, b: str, lead: str = '') -> str:
    """A product of matrices, which attributes transpose."""
    one, two = 'km' if op.get_attr(a) else 'mk', 'nk' if op.get_attr(b) else 'kn'
    return f'{lead}{one} {lead}{two} -> {lead}mn (sum)'


def einsum(op: tf.Operation, sizes: Sizes) -> str | None:
    """`Einsum`: by its equation, whose ellipsis is matched from the last too."""
    equation = op.get_attr('equation').decode().replace(' ', '').replace('...', '.')
    terms = equation.replace('->', ',').split(',')
    if any(term.count(c) > 1 for term in terms for c in term):
        return None  # A diagonal.
    named = zip(sorted(set(equation) - set('.,->')), string.ascii_lowercase)
    letters = {'.': 'S', **dict(named)}
    *given, made = (''.join(letters[c] for c in term) or '*' for term in terms)
    return f'{" ".join(given)} -> {made} (sum)'


def matrix_diag(op: tf.Operation, sizes: Sizes) -> str | None:
    """A matrix for each vector, if vectors aren't diagonals of one matrix."""
    return 'S_ *+ -> S__' if rank(op.outputs[0], sizes) > rank(op.inputs[0], sizes) else None


RULES: dict[str, Rule] = {
    'MatMul': partial(matmul, a='transpose_a', b='transpose_b'),
    'BatchMatMul BatchMatMulV2 BatchMatMulV3': partial(matmul, a='adj_x', b='adj_y', lead='S'),
    'Einsum': einsum,
    'BiasAdd': by('data_format', {b'NHWC': 'Sc c -> Sc', b'NCHW': 'ncS c -> ncS'}),
    'BiasAddGrad': by('data_format', {b'NHWC': 'Sc -> c (sum)', b'NCHW': 'ncS -> c (sum)'}),
    'Softmax LogSoftmax FFT IFFT': 'S_ -> S_',
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
    'RFFT IRFFT': 'S_ * -> S_',
    'RFFT2D IRFFT2D': 'S__ * -> S__',
    'FFT2D IFFT2D Cholesky MatrixInverse': 'S__ -> S__',
    'CholeskyGrad MatrixSolve MatrixTriangularSolve': 'S__ S__ -> S__',
    'SelfAdjointEigV2': by('compute_v', {True: 'S__ -> S_ S__', False: 'S__ -> S_ *'}),
    'MatrixDeterminant': 'S__ -> S',
    'LogMatrixDeterminant': 'S__ -> S S',
    'MatrixBandPart': 'S__ * * -> S__',
    'MatrixDiag MatrixDiagV2 MatrixDiagV3': matrix_diag,
    'MatrixDiagPart': 'S__ -> S_',
    'MatrixDiagPartV2 MatrixDiagPartV3': 'S__ * * -> S...',
    'MatrixSetDiag': 'S__ S_ -> S__',
    'MatrixSetDiagV2 MatrixSetDiagV3': 'S__ S... * -> S__',
}
