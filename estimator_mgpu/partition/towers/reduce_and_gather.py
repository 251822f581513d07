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
from estimator_mgpu.partition.messages.slices import Slice, Slices
from estimator_mgpu.partition.nodes.node_builder import NodeBuilder, Number, second_output
from estimator_mgpu.partition.sizes import ONE, Size, per_row
from estimator_mgpu.partition.tower import Chain
from estimator_mgpu.partition.towers.shards import SelectionShards, Shards, index_type

PAIRWISE_OPS = dict(max='Maximum', min='Minimum', prod='Mul', all='LogicalAnd', any='LogicalOr')
"""For each reduction but the sum, the op that combines two partial results."""


def gather(
    shards: Shards, values: Sequence[str], axis: int, dims: Sequence[Size], device: str
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
    of_chains = [_concat_chain(shards, chain, values, axis, dims[axis]) for chain in shards.chains]
    gathered = shards.nodes.concat(of_chains, axis, device)
    if shards.active is None:
        return gathered
    extent = (0, shards.size_value(dims[axis], None, index_type(dims[axis])))
    return shards.cut(gathered, axis, extent, device)


def _concat_chain(
    shards: Shards, chain: Chain, values: Sequence[str], axis: int, size: Size
) -> str:
    """Concatenates the shards of a chain of towers; `size` is that of all shards together."""
    device = chain[0].device
    joined = shards.nodes.concat([values[tower.number] for tower in chain], axis, device)
    if shards.active is None or len(chain) == 1:
        return joined

    factor = per_row(size, shards.rows)
    assert factor is not None
    extent = (0, shards.count_of_chain(factor, chain, index_type(size)))
    return shards.cut(joined, axis, extent, device)


def gather_selection(shards: Shards, values: Sequence[str], axis: int, device: str) -> str:
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
                limit = nodes.add('SelectV2', [is_active, tf.int32.max, 0], nodes.host)
                value = shards.cut(value, axis, (0, limit), cut_on)
            picked.append(value)
        of_chains.append(nodes.concat(picked, axis, chain[0].device))
    return nodes.concat(of_chains, axis, device)


def gather_blocks(
    shards: Shards, values: Sequence[str], axis: int, dims: Sequence[Size], device: str
) -> str:
    """Gathers shards that are in blocks: the first block of each tower, then the second of each.

    They are concatenated along a dimension of their own: [blocks, rows] instead of [blocks * rows].
    """
    apart = []
    for tower, value in zip(shards.towers, values):
        row_count = shards.local_size(ONE, tower)
        apart.append(shards.reshape_blocks(value, axis, dims, row_count, tower.device, apart=True))
    dims_apart = [*dims[:axis], ONE, shards.rows.size, *dims[axis + 1 :]]
    gathered = gather(shards, apart, axis + 1, dims_apart, device)
    return shards.reshape_blocks(gathered, axis, dims, shards.total, device, apart=False)


def reduce(shards: Shards, values: Sequence[str], reduction: str, device: str) -> str:
    """Reduces the towers' partial results on a device; `reduction` is that of a `Partial`."""
    if reduction == 'mean':
        return _reduce_mean(shards, values, device)
    values = _without_empty_towers(shards, values, reduction)
    of_chains = [_combine_chain(shards, chain, values, reduction) for chain in shards.chains]
    # Those of each machine are combined there first, and sent once.
    combined = [
        _combine(shards, [of_chains[number] for number in numbers], reduction, combining)
        for combining, numbers in _by_machine(shards, device).items()
    ]
    return _combine(shards, combined, reduction, device)


def sum_in_slices(
    shards: Shards,
    values: Sequence[str],
    slices: Slices,
    slices_of_sum: Sequence[Slice],
    shape: Sequence[int],
    device: str,
) -> str:
    """Sums the towers' partial results in slices, on several devices, put together on one.

    Args:
      values: the partial results, one for each tower.
      slices: knows which devices add them up.
      slices_of_sum: those that it has chosen.
      shape: of a partial result.
      device: where the slices are put together.
    """
    nodes = shards.nodes
    values = _without_empty_towers(shards, values, 'sum')
    vectors = []
    for chain in shards.chains:
        running = _combine_chain(shards, chain, values, 'sum')
        source = chain[0].device
        vector = nodes.add('Reshape', [running, [-1]], source)
        vectors.append(exchange.Vector(vector, source, slices.member(source)))
    sums = exchange.add_up(nodes, slices_of_sum, vectors, slices.member(device))
    return nodes.add('Reshape', [nodes.concat(sums, 0, device), list(shape)], device)


def _by_machine(shards: Shards, device: str) -> Mapping[str, list[int]]:
    """The numbers of each machine's chains, by the device there that combines what they have.

    On the machine of the device that needs the result, it's this device.
    """
    devices = [tower.device for tower in shards.towers]
    machines = defaultdict[str, list[int]](list)
    for number, chain in enumerate(shards.chains):
        machines[relay(devices, chain[0].device, device) or device].append(number)
    return machines


def _combine_chain(shards: Shards, chain: Chain, values: Sequence[str], reduction: str) -> str:
    """Combines the partial results of a chain of towers, one after the other, on their device.

    For example, a running sum of a gradient: each turn adds its own, and leaves nothing else.
    """
    running = values[chain[0].number]
    for tower in chain[1:]:
        running = _combine(shards, [running, values[tower.number]], reduction, tower.device)
    return running


def _reduce_mean(shards: Shards, values: Sequence[str], device: str) -> str:
    """Averages the towers' means, weighted by how many examples each has; in float32 at least."""
    nodes = shards.nodes
    dtype = nodes.dtype(values[0])
    wide = dtype if dtype.size > 2 else tf.float32
    weighted = []
    for value, count, tower in zip(values, shards.counts, shards.towers):
        mean = nodes.cast(value, wide, tower.device)
        weight = nodes.tensor(count, wide)
        weighted.append(nodes.add('Mul', [mean, weight], tower.device))

    total = reduce(shards, weighted, 'sum', device)
    count = nodes.tensor(shards.total, wide)
    mean = nodes.add('RealDiv', [total, count], device)
    return nodes.cast(mean, dtype, device)


def reduce_moments(
    shards: Shards,
    means: Sequence[str],
    variances: Sequence[str],
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
    means = _without_empty_towers(shards, means, 'sum')
    variances = _without_empty_towers(shards, variances, 'sum')
    moments = [_packed(shards, chain, means, variances) for chain in shards.chains]
    counts = shards.counts
    machines = _by_machine(shards, device)
    if 1 < len(machines) < len(shards.towers):  # Otherwise no machine has several to combine.
        moments, counts = _moments_of_machines(shards, machines, moments, factor)
    return _combine_moments(shards, moments, counts, shards.total, factor, device)


def _packed(shards: Shards, chain: Chain, means: Sequence[str], variances: Sequence[str]) -> str:
    """What a chain sends as one message: the mean and variance of its first tower, and so on."""
    vectors = []
    for tower in chain:
        vectors += [means[tower.number], variances[tower.number]]
    return shards.nodes.add('Pack', vectors, chain[0].device)


def _moments_of_machines(
    shards: Shards, machines: Mapping[str, list[int]], of_chains: Sequence[str], factor: Size
) -> tuple[list[str], list[str]]:
    """Combines the moments of each machine's chains.

    Returns:
      The mean and variance of each machine, packed; and how many examples each machine has.
    """
    nodes = shards.nodes
    moments = []
    totals = []
    for device, numbers in machines.items():
        towers = [tower for number in numbers for tower in shards.chains[number]]
        counts = [shards.counts[tower.number] for tower in towers]
        total = nodes.add('Sum', [nodes.tensor(counts, tf.int64), 0], nodes.host)
        packed = [of_chains[number] for number in numbers]
        of_machine = _combine_moments(shards, packed, counts, total, factor, device)
        moments.append(nodes.add('Pack', of_machine, device))
        totals.append(total)
    return moments, totals


def _combine_moments(
    shards: Shards,
    packed: Sequence[str],
    counts: Sequence[Number],
    total: Number,
    factor: Size,
    device: str,
) -> tuple[str, str]:
    """Combines means and variances by the formula of `reduce_moments`.

    Args:
      packed: in rows a mean, a variance, the next mean, the next variance, and so on.
      counts: how many examples each pair is of.
      total: the sum of the counts.
      factor: how many entries an example has.
      device: where they are combined.
    """
    nodes = shards.nodes
    entries_of_example = shards.size_value(factor, None, tf.int64)
    dtype = nodes.dtype(packed[0])
    of_mean, of_variance, of_difference = _weights(nodes, counts, total, entries_of_example, dtype)

    rows = nodes.concat(packed, 0, device)
    pairs = nodes.add('Reshape', [rows, [len(counts), 2, -1]], device)
    means = nodes.add('Unpack', [pairs], device, num=2, axis=1)
    variances = second_output(means)

    def add(op_type: str, *inputs: str) -> str:
        return nodes.add(op_type, inputs, device)

    def add_up(rows: str) -> str:
        return nodes.add('Sum', [rows, 0], device)

    mean = add_up(add('Mul', means, of_mean))
    squares = add('Mul', add('SquaredDifference', means, mean), of_difference)
    return mean, add_up(add('AddV2', add('MulNoNan', variances, of_variance), squares))


def _weights(
    nodes: NodeBuilder,
    counts: Sequence[Number],
    total: Number,
    entries_of_example: Number,
    dtype: tf.DType,
) -> tuple[str, str, str]:
    """The weights of means, variances and squared differences, as columns."""

    def add(op_type: str, *inputs: str) -> str:
        return nodes.add(op_type, inputs, nodes.host)

    with nodes.for_many():
        zero = nodes.const(0, dtype, nodes.host)
        one = nodes.const(1, dtype, nodes.host)
        of_example = nodes.tensor(entries_of_example, dtype)
        column = nodes.add('ExpandDims', [nodes.tensor(list(counts), dtype), 1], nodes.host)
        entries = add('Mul', column, of_example)
        all_entries = add('Mul', nodes.tensor(total, dtype), of_example)

        divisor = add('Maximum', add('Sub', all_entries, one), one)
        of_variance = add('RealDiv', add('Maximum', add('Sub', entries, one), zero), divisor)
        of_mean = add('DivNoNan', entries, all_entries)  # A machine may have no example.
        return of_mean, of_variance, add('RealDiv', entries, divisor)


def _without_empty_towers(shards: Shards, values: Sequence[str], reduction: str) -> Sequence[str]:
    """Replaces the results of towers without examples, if there may be any, by the neutral element.

    It's a `where`, as what such a tower has may be inf or nan, which a product with 0 would keep.
    The first tower is left as it is: if it has no example, or is the only one that has some, it has
    computed on all there are. But it may have no rows of a selection, of which others have some.
    """
    if shards.active is None:
        return values
    dtype = shards.nodes.dtype(values[0])
    neutral = _neutral_element(dtype, reduction)
    kept = 0 if isinstance(shards, SelectionShards) else 1
    replaced = list(values[:kept])
    for value, is_active, tower in zip(values[kept:], shards.active[kept:], shards.towers[kept:]):
        operands = [is_active, value, shards.nodes.const(neutral, dtype, tower.device)]
        replaced.append(shards.nodes.add('SelectV2', operands, tower.device))
    return replaced


def _neutral_element(dtype: tf.DType, reduction: str) -> Any:
    """The value that changes nothing if it's reduced with others: 0 for a sum."""
    neutral = {'sum': 0, 'prod': 1, 'all': True, 'any': False}
    if reduction in neutral:
        return neutral[reduction]
    if dtype.is_floating:
        return -np.inf if reduction == 'max' else np.inf
    return dtype.min if reduction == 'max' else dtype.max


def _combine(shards: Shards, values: Sequence[str], reduction: str, device: str) -> str:
    """Combines partial results on a device; a single one stays where it is."""
    if len(values) == 1:
        return values[0]
    if reduction == 'sum':
        return shards.nodes.sum(values, device)

    combined = values[0]
    for value in values[1:]:
        combined = shards.nodes.add(PAIRWISE_OPS[reduction], [combined, value], device)
    return combined
