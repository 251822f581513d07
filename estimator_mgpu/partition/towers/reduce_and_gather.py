"""How towers' results are reduced and gathered: sums, means, concatenations.

They make the value for the global batch from what each tower has of it, on the device that needs
it: a gradient is summed on the device of its variable, as `once_devices` decides. Of sparse
gradients (`IndexedSlices`), indices and values are gathered like other shards; the variable's
update adds them up.

In: the names of the towers' local values, in the order of the towers. Out: the name of the value
for the global batch, on one device. A tower without examples computes on the first example, so what
it has is left out of a gather, and replaced by the reduction's neutral element.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import relay
from estimator_mgpu.partition.messages import exchange
from estimator_mgpu.partition.messages.slices import Part, Slices
from estimator_mgpu.partition.nodes.node_builder import NodeBuilder, second_output
from estimator_mgpu.partition.sizes import ONE, Size, full_size, per_row
from estimator_mgpu.partition.tower import Chain
from estimator_mgpu.partition.towers.shards import SelectionShards, Shards, index_type

PAIRWISE_OPS = dict(max='Maximum', min='Minimum', prod='Mul', all='LogicalAnd', any='LogicalOr')
"""For each reduction but the sum, the op that combines two partial results."""


def gather(
    shards: Shards,
    values: Sequence[str],
    dtype: tf.DType,
    axis: int,
    dims: Sequence[Size],
    device: str,
) -> str:
    """Concatenates the towers' shards on a device: all examples, in the order of the batch.

    The shards of a chain are concatenated on its device, and sent as one. Towers without examples
    come last, in each chain and in the batch, so one cut at the end drops what they have.

    Args:
      values: the shards, one for each tower.
      axis: the dimension along which they are sharded.
      dims: of the concatenation.
      device: where the result is made.
    """
    of_chains = [
        _concat_chain(shards, chain, values, dtype, axis, dims[axis]) for chain in shards.chains
    ]
    gathered = shards.nodes.concat(of_chains, axis, dtype, device)
    if shards.active is None:
        return gathered
    index = index_type(dims[axis])
    extent = (0, shards.size_value(dims[axis], None, index))
    return shards.cut(gathered, dtype, axis, extent, device, index)


def _concat_chain(
    shards: Shards,
    chain: Chain,
    values: Sequence[str],
    dtype: tf.DType,
    axis: int,
    size: Size,
) -> str:
    """Concatenates the shards of a chain of towers; `size` is that of all shards together."""
    device = chain[0].device
    joined = shards.nodes.concat([values[tower.number] for tower in chain], axis, dtype, device)
    if shards.active is None or len(chain) == 1:
        return joined

    factor = per_row(size, shards.rows)
    assert factor is not None
    index = index_type(size)
    extent = (0, shards.count_of_chain(factor, chain, index))
    return shards.cut(joined, dtype, axis, extent, device, index)


def gather_selection(
    shards: Shards, values: Sequence[str], dtype: tf.DType, axis: int, device: str
) -> str:
    """Concatenates the rows of a selection that towers have picked.

    What a tower without examples has picked is dropped before that: no other tower knows how many
    rows these are. A device with one tower sends what it has picked, which may be there already: a
    table's device has been given the ids.

    Args:
      shards: those that rows were picked from.
      values: what each tower has picked.
      axis: the dimension along which the rows are.
      device: where the result is made.
    """
    nodes = shards.nodes
    of_chains = []
    for chain in shards.chains:
        picked = []
        cut_on = chain[0].device if len(chain) > 1 else device
        for tower in chain:
            value = values[tower.number]
            if shards.active is not None and tower.number > 0:
                is_active = shards.active[tower.number]
                limit = nodes.add('SelectV2', [is_active, tf.int32.max, 0], nodes.host, T=tf.int32)
                value = shards.cut(value, dtype, axis, (0, limit), cut_on)
            picked.append(value)
        of_chains.append(nodes.concat(picked, axis, dtype, chain[0].device))
    return nodes.concat(of_chains, axis, dtype, device)


def gather_blocks(
    shards: Shards,
    values: Sequence[str],
    dtype: tf.DType,
    axis: int,
    dims: Sequence[Size],
    device: str,
) -> str:
    """Gathers shards that are in blocks: the first block of each tower, then the second of each.

    They are concatenated along a dimension of their own: [blocks, rows] instead of [blocks * rows].
    """
    apart = []
    for tower, value in zip(shards.towers, values):
        _, row_count = shards.extent(ONE, tower)
        blocks = shards.reshape_blocks(
            value, dtype, axis, dims, row_count, tower.device, apart=True
        )
        apart.append(blocks)
    dims_apart = [*dims[:axis], ONE, full_size(shards.rows), *dims[axis + 1 :]]
    gathered = gather(shards, apart, dtype, axis + 1, dims_apart, device)
    return shards.reshape_blocks(gathered, dtype, axis, dims, shards.total, device, apart=False)


def reduce(
    shards: Shards, values: Sequence[str], dtype: tf.DType, reduction: str, device: str
) -> str:
    """Reduces the towers' partial results on a device; `reduction` is that of a `Partial`."""
    if reduction == 'mean':
        return _reduce_mean(shards, values, dtype, device)
    if shards.active is not None:
        values = _without_empty_towers(shards, values, dtype, reduction)

    of_chains = [_combine_chain(shards, chain, values, dtype, reduction) for chain in shards.chains]
    return _combine_chains(shards, of_chains, dtype, reduction, device)


def sum_in_slices(
    shards: Shards,
    values: Sequence[str],
    dtype: tf.DType,
    slices: Slices,
    parts: Sequence[Part],
    shape: Sequence[int],
    device: str,
) -> str:
    """Sums the towers' partial results in slices, on several devices, put together on one.

    Args:
      values: the partial results, one for each tower.
      slices: has the grid in which devices exchange slices.
      parts: the slices.
      shape: of a partial result.
      device: where the slices are put together.
    """
    nodes = shards.nodes
    if shards.active is not None:
        values = _without_empty_towers(shards, values, dtype, 'sum')
    vectors = []
    for chain in shards.chains:
        running = _combine_chain(shards, chain, values, dtype, 'sum')
        source = chain[0].device
        vector = nodes.add('Reshape', [running, [-1]], source, T=dtype)
        vectors.append(exchange.Vector(vector, source, slices.position(source)))
    sums = exchange.add_up(nodes, slices, parts, vectors, dtype)
    return nodes.add(
        'Reshape', [nodes.concat(sums, 0, dtype, device), list(shape)], device, T=dtype
    )


def _combine_chains(
    shards: Shards, of_chains: Sequence[str], dtype: tf.DType, reduction: str, device: str
) -> str:
    """Combines the partial results of chains of towers on a device.

    Those of each machine are combined there first, and sent once.
    """
    combined = [
        _combine(shards, [of_chains[number] for number in numbers], dtype, reduction, combining)
        for combining, numbers in _by_machine(shards, device).items()
    ]
    return _combine(shards, combined, dtype, reduction, device)


def _by_machine(shards: Shards, device: str) -> Mapping[str, list[int]]:
    """The numbers of each machine's chains, by the device there that combines what they have.

    On the machine of the device that needs the result, it's this device.
    """
    devices = [tower.device for tower in shards.towers]
    machines = defaultdict[str, list[int]](list)
    for number, chain in enumerate(shards.chains):
        machines[relay(devices, chain[0].device, device) or device].append(number)
    return machines


def _combine_chain(
    shards: Shards, chain: Chain, values: Sequence[str], dtype: tf.DType, reduction: str
) -> str:
    """Combines the partial results of a chain of towers, one after the other, on their device.

    For example, a running sum of a gradient: each turn adds its own, and leaves nothing else.
    """
    running = values[chain[0].number]
    for tower in chain[1:]:
        running = _combine(shards, [running, values[tower.number]], dtype, reduction, tower.device)
    return running


def _reduce_mean(shards: Shards, values: Sequence[str], dtype: tf.DType, device: str) -> str:
    """Averages the towers' means, weighted by how many examples each has; in float32 at least."""
    nodes = shards.nodes
    wide = dtype if dtype.size > 2 else tf.float32
    weighted = []
    for value, count, tower in zip(values, shards.counts, shards.towers):
        mean = nodes.cast(value, dtype, wide, tower.device)
        weight = nodes.tensor(count, wide)
        weighted.append(nodes.add('Mul', [mean, weight], tower.device, T=wide))

    total = reduce(shards, weighted, wide, 'sum', device)
    count = nodes.tensor(shards.total, wide)
    mean = nodes.add('RealDiv', [total, count], device, T=wide)
    return nodes.cast(mean, wide, dtype, device)


def reduce_moments(
    shards: Shards,
    means: Sequence[str],
    variances: Sequence[str],
    dtype: tf.DType,
    factor: Size,
    device: str,
) -> tuple[str, str]:
    """Combines the towers' means and unbiased variances, by the formula of Chan et al. (1979).

    With m of the M entries on a tower:

        mean = sum(m / M * its mean)
        variance = sum((m - 1) / (M - 1) * its variance + m / (M - 1) * (its mean - mean) ** 2)

    Those of each machine are combined there first, and sent once.

    Args:
      means: vectors, one for each tower.
      variances: vectors, too; that of a tower with one entry is ignored.
      factor: how many entries an example has.

    Returns:
      The mean and the unbiased variance of all entries, which is 0 for one entry.
    """
    nodes = shards.nodes
    if shards.active is not None:
        means = _without_empty_towers(shards, means, dtype, 'sum')
        variances = _without_empty_towers(shards, variances, dtype, 'sum')

    # What each chain sends as one message, in rows: mean, variance, mean, variance, and so on.
    rows = []
    for chain in shards.chains:
        vectors = []
        for tower in chain:
            vectors += [means[tower.number], variances[tower.number]]
        types = {'T': dtype, 'N': len(vectors)}
        rows.append(nodes.add('Pack', vectors, chain[0].device, **types))

    def combine(rows: Sequence[str], counts: str, number: int, device: str) -> tuple[str, str]:
        weights = _weights_of_moments(shards, counts, dtype, factor)
        joined = nodes.concat(rows, 0, dtype, device)
        return _combine_moments(nodes, joined, number, weights, dtype, device)

    machines = _by_machine(shards, device)
    if len(machines) in (1, len(shards.towers)):
        counts = nodes.tensor(list(shards.counts), dtype)
        return combine(rows, counts, len(shards.towers), device)

    rows_of_machines = []
    totals = []
    for combining, numbers in machines.items():
        towers = [tower for number in numbers for tower in shards.chains[number]]
        counts = nodes.tensor([shards.counts[tower.number] for tower in towers], dtype)
        moments = combine([rows[number] for number in numbers], counts, len(towers), combining)
        rows_of_machines.append(nodes.add('Pack', moments, combining, T=dtype, N=2))
        totals.append(nodes.add('Sum', [counts, 0], nodes.host, T=dtype, Tidx=tf.int32))
    counts = nodes.add('Pack', totals, nodes.host, T=dtype, N=len(totals))
    return combine(rows_of_machines, counts, len(machines), device)


def _combine_moments(
    nodes: NodeBuilder,
    rows: str,
    number: int,
    weights: tuple[str, str, str],
    dtype: tf.DType,
    device: str,
) -> tuple[str, str]:
    """Combines the moments of so many towers, or machines; `reduce_moments` says how.

    Args:
      rows: mean, variance, mean, variance, and so on.
      weights: of each mean, variance and squared difference, as columns.
    """
    of_mean, of_variance, of_difference = weights

    def add(op_type: str, *inputs: str) -> str:
        return nodes.add(op_type, inputs, device, T=dtype)

    def add_up(rows: str) -> str:
        return nodes.add('Sum', [rows, 0], device, T=dtype, Tidx=tf.int32)

    pairs = nodes.add('Reshape', [rows, [number, 2, -1]], device, T=dtype)
    means = nodes.add('Unpack', [pairs], device, T=dtype, num=2, axis=1)
    variances = second_output(means)
    mean = add_up(add('Mul', means, of_mean))
    squares = add('Mul', add('SquaredDifference', means, mean), of_difference)
    return mean, add_up(add('AddV2', add('MulNoNan', variances, of_variance), squares))


def _weights_of_moments(
    shards: Shards, counts: str, dtype: tf.DType, factor: Size
) -> tuple[str, str, str]:
    """The weights of means, variances and squared differences, as columns.

    Args:
      counts: how many examples each mean is of, a vector of floats.
    """
    nodes = shards.nodes

    def add(op_type: str, *inputs: str) -> str:
        return nodes.add(op_type, inputs, nodes.host, T=dtype)

    with nodes.for_many():
        zero = nodes.const(0, dtype, nodes.host)
        one = nodes.const(1, dtype, nodes.host)
        of_example = nodes.tensor(shards.size_value(factor, None, tf.int64), dtype, tf.int64)
        column = nodes.add('ExpandDims', [counts, 1], nodes.host, T=dtype, Tdim=tf.int32)
        entries = add('Mul', column, of_example)
        total = nodes.add('Sum', [counts, 0], nodes.host, T=dtype, Tidx=tf.int32)
        all_entries = add('Mul', total, of_example)

        divisor = add('Maximum', add('Sub', all_entries, one), one)
        of_variance = add('RealDiv', add('Maximum', add('Sub', entries, one), zero), divisor)
        # A machine may have no example.
        of_mean = add('DivNoNan', entries, all_entries)
        return of_mean, of_variance, add('RealDiv', entries, divisor)


def _without_empty_towers(
    shards: Shards, values: Sequence[str], dtype: tf.DType, reduction: str
) -> list[str]:
    """Replaces the results of towers without examples by the neutral element.

    It's a `where`, as what such a tower has may be inf or nan, which a product with 0 would keep.
    The first tower is left as it is: if it has no example, or is the only one that has some, it has
    computed on all there are. But it may have no rows of a selection, of which others have some.
    """
    assert shards.active is not None
    neutral = _neutral_element(dtype, reduction)
    kept = 0 if isinstance(shards, SelectionShards) else 1
    replaced = list(values[:kept])
    for value, is_active, tower in zip(values[kept:], shards.active[kept:], shards.towers[kept:]):
        operands = [is_active, value, shards.nodes.const(neutral, dtype, tower.device)]
        replaced.append(shards.nodes.add('SelectV2', operands, tower.device, T=dtype))
    return replaced


def _neutral_element(dtype: tf.DType, reduction: str) -> Any:
    """The value that changes nothing if it's reduced with others: 0 for a sum."""
    neutral = {'sum': 0, 'prod': 1, 'all': True, 'any': False}
    if reduction in neutral:
        return neutral[reduction]
    if dtype.is_floating:
        return -np.inf if reduction == 'max' else np.inf
    return dtype.min if reduction == 'max' else dtype.max


def _combine(
    shards: Shards, values: Sequence[str], dtype: tf.DType, reduction: str, device: str
) -> str:
    """Combines partial results on a device; a single one stays where it is."""
    if len(values) == 1:
        return values[0]
    if reduction == 'sum':
        return shards.nodes.sum(values, dtype, device)

    attrs = {} if dtype == tf.bool else {'T': dtype}
    combined = values[0]
    for value in values[1:]:
        combined = shards.nodes.add(PAIRWISE_OPS[reduction], [combined, value], device, **attrs)
    return combined
