"""Products of matrices, and ops on matrices, which are the last two dimensions.

A product of matrices can be sharded along the dimension over which it sums as well: the gradient of
a dense layer's weights is such a product, whose result is a partial sum on each tower.
"""

from __future__ import annotations

import string

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.rules.notation import NotSharded, Rule, by_attribute, table
from estimator_mgpu.partition.size_inference import Sizes


def _matmul(op: tf.Operation, sizes: Sizes) -> str:
    """'Smk Skn -> Smn (sum)' for `MatMul` and batches of products, with transposed operands."""
    is_matmul = op.type == 'MatMul'
    x = 'km' if op.get_attr('transpose_a' if is_matmul else 'adj_x') else 'mk'
    y = 'nk' if op.get_attr('transpose_b' if is_matmul else 'adj_y') else 'kn'
    return f'S{x} S{y} -> Smn (sum)'


def _einsum(op: tf.Operation, sizes: Sizes) -> str:
    """`Einsum`: its equation is a rule already: '...i,ij->...j' is 'Sa ab -> Sb (sum)'.

    Capitals stand for several dimensions in a rule, so the equation's letters are replaced.
    """
    equation = op.get_attr('equation').decode().replace(' ', '').replace('...', '.')
    terms = equation.replace('->', ',').split(',')
    for term in terms:
        if len(set(term)) < len(term):
            raise NotSharded  # It takes a diagonal: 'ii->i'.

    letters = sorted(set(equation) - set('.,->'))
    marks = {'.': 'S'}
    marks.update(zip(letters, string.ascii_lowercase))
    words = [''.join(marks[letter] for letter in term) or '*' for term in terms]
    return f'{" ".join(words[:-1])} -> {words[-1]} (sum)'


_RULES: dict[str, Rule] = {
    'BatchMatMul BatchMatMulV2 BatchMatMulV3 MatMul': _matmul,
    'Einsum': _einsum,
    'Cholesky MatrixInverse': 'S__ -> S__',
    'CholeskyGrad MatrixSolve MatrixTriangularSolve': 'S__ S__ -> S__',
    'LogMatrixDeterminant': 'S__ -> S S',
    'MatrixBandPart': 'S__ * * -> S__',
    'MatrixDeterminant': 'S__ -> S',
    # Each vector is the diagonal of a matrix. V2 and V3 also take several diagonals of one matrix,
    # as for k=(-1, 1). Then the output has no more dimensions than the input: the rule doesn't fit,
    # and the op runs once. The ... asks for an output of known rank.
    'MatrixDiag MatrixDiagV2 MatrixDiagV3': 'S_ *+ -> S__...',
    'MatrixDiagPart': 'S__ -> S_',
    'MatrixDiagPartV2 MatrixDiagPartV3': 'S__ * * -> S...',
    'MatrixSetDiag': 'S__ S_ -> S__',
    'MatrixSetDiagV2 MatrixSetDiagV3': 'S__ S... * -> S__',
    # Without eigenvectors, the second output is empty.
    'SelfAdjointEigV2': by_attribute('compute_v', {True: 'S__ -> S_ S__', False: 'S__ -> S_ *'}),
}
RULES = table(_RULES)
