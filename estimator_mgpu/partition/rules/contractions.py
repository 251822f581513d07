"""Products of matrices: the dimensions that are multiplied out are summed over."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.rules.signature import Label, Rule, Signature, rank
from estimator_mgpu.partition.sizes import ONE, Sizes


def matmul(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """`MatMul`: mk,kn->mn."""
    one = ('k', 'm') if op.get_attr('transpose_a') else ('m', 'k')
    two = ('n', 'k') if op.get_attr('transpose_b') else ('k', 'n')
    return Signature([one, two], [('m', 'n')], 'sum')


def batch_matmul(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """`BatchMatMul`: the same for each of the leading dimensions, which are broadcast."""
    one, two = op.inputs
    ends = (
        ('k', 'm') if op.get_attr('adj_x') else ('m', 'k'),
        ('n', 'k') if op.get_attr('adj_y') else ('k', 'n'),
    )
    inputs: list[tuple[Label, ...]] = []
    for tensor, end in zip((one, two), ends):
        dims = sizes.dims(tensor) or []
        lead = rank(tensor, sizes) - 2
        inputs.append(tuple(None if dims[i] == ONE else lead - i for i in range(lead)) + end)
    lead = max(rank(one, sizes), rank(two, sizes)) - 2
    return Signature(inputs, [tuple(range(lead, 0, -1)) + ('m', 'n')], 'sum')


def einsum(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """`Einsum`: by its equation."""
    terms, result = op.get_attr('equation').decode().replace(' ', '').split('->')
    inputs = []
    n = 0  # the dimensions that an ellipsis stands for
    for term, tensor in zip(terms.split(','), op.inputs):
        n = max(n, rank(tensor, sizes) - len(term.replace('...', ''))) if '...' in term else n
    for term, tensor in zip(terms.split(','), op.inputs):
        dims = sizes.dims(tensor) or []
        expanded = _expanded(term, rank(tensor, sizes) - len(term.replace('...', '')))
        inputs.append(
            tuple(
                None if isinstance(label, int) and dims[i] == ONE else label
                for i, label in enumerate(expanded)
            )
        )
        if len(set(term.replace('...', ''))) < len(term.replace('...', '')):
            return None  # A diagonal.
    return Signature(inputs, [_expanded(result, n)], 'sum')


def _expanded(term: str, n: int) -> tuple[Label, ...]:
    """A label for each dimension; numbers for those of an ellipsis, from the last."""
    if '...' not in term:
        return tuple(term)
    before, after = term.split('...')
    return (*before, *range(n, 0, -1), *after)


RULES: dict[str, Rule] = {
    'MatMul': matmul,
    **dict.fromkeys(['BatchMatMul', 'BatchMatMulV2', 'BatchMatMulV3'], batch_matmul),
    'Einsum': einsum,
}
