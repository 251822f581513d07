"""Types of ops that dividing a graph has to tell from others, by what they are."""

CONST, FILL, GROUP, IDENTITY, READ = 'Const', 'Fill', 'NoOp', 'Identity', 'ReadVariableOp'
ENSURE = 'EnsureShape'
ALIKE = {'ZerosLike': 0, 'OnesLike': 1}  # make a tensor like another, of entries of this value
_SAME = ('Identity', 'PreventGradient', 'Snapshot', 'StopGradient')
VIEWS = (*_SAME, 'ExpandDims', 'Reshape', 'Squeeze', 'Transpose')
"""What can be taken of towers' partial results, be they reduced before or after."""
SUMS = {  # of partial sums only; which inputs these are, as in LINEAR
    **dict.fromkeys(['Add', 'AddN', 'AddV2', 'Neg', 'Pack', 'Sub'], slice(None)),
    'StridedSliceGrad': slice(-1, None),  # only the last, which comes out between zeros
}
LINEAR = {**SUMS, **dict.fromkeys(VIEWS, slice(1)), 'ConcatV2': slice(-1)}
"""Which inputs are partial results, of which it makes one like these; others are whole."""
SIZES = frozenset(['Shape', 'ShapeN', 'Size', 'Rank'])  # look only at a tensor's dimensions
BROADCAST_AXES = 'BroadcastGradientArgs'  # tells which dimensions gradients are summed over
EMPTY_LISTS = ('EmptyTensorList', 'TensorListReserve', 'OptionalNone')  # without elements
LISTS = ('TensorList', 'Optional')  # what the types of ops on these begin with
CALLS = ('PartitionedCall', 'StatefulPartitionedCall')
LOOPS = ('While', 'StatelessWhile')
BRANCHES = ('If', 'StatelessIf', 'Case', 'StatelessCase')
CALLERS = (*LOOPS, *BRANCHES, *CALLS)  # call functions
NORMS = {f'FusedBatchNorm{v}': f'FusedBatchNormGrad{v}' for v in ('', 'V2', 'V3')}  # with gradients
ENTER, EXIT = ('Enter', 'RefEnter'), ('Exit', 'RefExit')  # a v1 loop's begin and end
NEXT = ('NextIteration', 'RefNextIteration')  # a v1 loop's way back
MERGE = ('Merge', 'RefMerge')  # where a v1 loop's way back, or branches, come together
READS = (READ, 'ResourceGather', 'ResourceGatherNd', 'VariableShape')
"""What looks at a variable and leaves it as it is, though it counts as having state."""
REFERENCES = (
    *('RefIdentity', 'RefSelect', 'RefSwitch', *ENTER, *EXIT, *NEXT, *MERGE),
    *('IsVariableInitialized', 'LookupTableFind', 'LookupTableSize', 'LookupTableExport'),
)
"""What takes a reference, such as a variable of TensorFlow 1's kind, and leaves it as it is."""
KEEPS = ('AssignVariableOp', 'SaveV2')  # may keep a variable's value beyond the step
PASSING = (*ENTER, *MERGE, 'Identity', 'RefIdentity', 'RefSwitch', 'Switch')
"""What passes a variable on, into loops and branches of TensorFlow 1, say."""
SAVING = ('MergeV2Checkpoints', 'Save', 'SaveSlices', 'SaveV2')  # write checkpoints
RESTORE = 'RestoreV2'  # reads one
STATE = (
    *('VarHandleOp', 'Variable', 'VariableV2'),
    *('HashTableV2', 'MutableDenseHashTableV2', 'MutableHashTableV2'),
    *('MutableHashTableOfTensorsV2', 'ConditionalAccumulator', 'SparseConditionalAccumulator'),
    'ResourceConditionalAccumulator',
)
"""What makes a variable, a table or an accumulator: they keep what is written to them."""
LOOKUPS = ('LookupTableExportV2', 'LookupTableFindV2', 'LookupTableSizeV2', 'VarIsInitializedOp')
"""What looks at a table, or whether a variable has a value, and leaves it as it is."""
FED = ('Placeholder', 'PlaceholderV2', 'PlaceholderWithDefault')
