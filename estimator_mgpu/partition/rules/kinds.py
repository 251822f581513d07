"""Types of ops that dividing a graph has to tell from others, by what they are."""

CONST, FILL, GROUP, IDENTITY, READ = 'Const', 'Fill', 'NoOp', 'Identity', 'ReadVariableOp'
ALIKE = {'ZerosLike': 0, 'OnesLike': 1}
"""What makes a tensor like another, with the value of its entries."""
_SAME = ('Identity', 'PreventGradient', 'Snapshot', 'StopGradient')
VIEWS = (*_SAME, 'ExpandDims', 'Reshape', 'Squeeze', 'Transpose')
"""What can be taken of towers' partial results, be they reduced before or after."""
SUMS = ('Add', 'AddN', 'AddV2', 'Neg', 'Pack', 'Sub')
"""What can be taken of partial sums."""
JOINS, PADDINGS = ('ConcatV2',), ('StridedSliceGrad',)  # The last input comes out between zeros.
SIZES = frozenset(['Shape', 'ShapeN', 'Size', 'Rank'])
"""What looks at nothing but a tensor's dimensions."""
BROADCAST_AXES = 'BroadcastGradientArgs'
"""What tells which dimensions gradients are summed over."""
EMPTY_LISTS = ('EmptyTensorList', 'TensorListReserve', 'OptionalNone')
"""What makes a TensorList, or an Optional, without elements."""
LISTS = ('TensorList', 'Optional')
"""What the types of ops on these begin with."""
CALLS = ('PartitionedCall', 'StatefulPartitionedCall')
LOOPS = ('While', 'StatelessWhile')
BRANCHES = ('If', 'StatelessIf', 'Case', 'StatelessCase')
NEXT = ('NextIteration', 'RefNextIteration')
"""A v1 loop's way back."""
READS = (READ, 'ResourceGather', 'ResourceGatherNd', 'VariableShape')
"""What looks at a variable and leaves it as it is, though it counts as having state."""
KEEPS = ('AssignVariableOp', 'SaveV2')
"""What may keep a variable's value beyond the step."""
FED = ('Placeholder', 'PlaceholderV2', 'PlaceholderWithDefault')
