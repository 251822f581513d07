"""Types of ops that dividing a graph has to tell from others, by what they are."""

CONST, FILL, NO_OP, IDENTITY, READ_VARIABLE = 'Const', 'Fill', 'NoOp', 'Identity', 'ReadVariableOp'
ENSURE_SHAPE = 'EnsureShape'
ZEROS_ONES_LIKE = {
    'ZerosLike': 0,
    'OnesLike': 1,
}  # make a tensor like another, of entries of this value
_IDENTITIES = ('Identity', 'PreventGradient', 'Snapshot', 'StopGradient')
REARRANGEMENTS = (*_IDENTITIES, 'ExpandDims', 'Reshape', 'Squeeze', 'Transpose')
"""What can be taken of towers' partial results, be they reduced before or after."""
PARTIAL_SUM_INPUTS = {  # of partial sums only; which inputs these are, as in PARTIAL_INPUTS
    **dict.fromkeys(['Add', 'AddN', 'AddV2', 'Neg', 'Pack', 'Sub'], slice(None)),
    'StridedSliceGrad': slice(-1, None),  # only the last, which comes out between zeros
}
PARTIAL_INPUTS = {
    **PARTIAL_SUM_INPUTS,
    **dict.fromkeys(REARRANGEMENTS, slice(1)),
    'ConcatV2': slice(-1),
}
"""Which inputs are partial results, of which it makes one like these; others are whole."""
SHAPE_QUERIES = frozenset(['Shape', 'ShapeN', 'Size', 'Rank'])  # look only at a tensor's dimensions
BROADCAST_GRADIENT_ARGS = (
    'BroadcastGradientArgs'  # tells which dimensions gradients are summed over
)
EMPTY_LISTS = ('EmptyTensorList', 'TensorListReserve', 'OptionalNone')  # without elements
LIST_PREFIXES = ('TensorList', 'Optional')  # what the types of ops on these begin with
PARTITIONED_CALLS = ('PartitionedCall', 'StatefulPartitionedCall')
LOOPS = ('While', 'StatelessWhile')
BRANCHES = ('If', 'StatelessIf', 'Case', 'StatelessCase')
FUNCTION_CALLERS = (*LOOPS, *BRANCHES, *PARTITIONED_CALLS)  # call functions
BATCH_NORMS = {
    f'FusedBatchNorm{v}': f'FusedBatchNormGrad{v}' for v in ('', 'V2', 'V3')
}  # with gradients
ENTER, EXIT = ('Enter', 'RefEnter'), ('Exit', 'RefExit')  # a v1 loop's begin and end
NEXT_ITERATION = ('NextIteration', 'RefNextIteration')  # a v1 loop's way back
MERGE = ('Merge', 'RefMerge')  # where a v1 loop's way back, or branches, come together
VARIABLE_READS = (READ_VARIABLE, 'ResourceGather', 'ResourceGatherNd', 'VariableShape')
"""What looks at a variable and leaves it as it is, though it counts as having state."""
REFERENCE_READS = (
    *('RefIdentity', 'RefSelect', 'RefSwitch', *ENTER, *EXIT, *NEXT_ITERATION, *MERGE),
    *('IsVariableInitialized', 'LookupTableFind', 'LookupTableSize', 'LookupTableExport'),
)
"""What takes a reference, such as a variable of TensorFlow 1's kind, and leaves it as it is."""
KEEP_READ_VALUES = ('AssignVariableOp', 'SaveV2')  # may keep a variable's value beyond the step
FORWARD_VARIABLES = (*ENTER, *MERGE, 'Identity', 'RefIdentity', 'RefSwitch', 'Switch')
"""What passes a variable on, into loops and branches of TensorFlow 1, say."""
CHECKPOINT_WRITES = ('MergeV2Checkpoints', 'Save', 'SaveSlices', 'SaveV2')  # write checkpoints
CHECKPOINT_READ = 'RestoreV2'  # reads one
STATE_HOLDERS = (
    *('VarHandleOp', 'Variable', 'VariableV2'),
    *('HashTableV2', 'MutableDenseHashTableV2', 'MutableHashTableV2'),
    *('MutableHashTableOfTensorsV2', 'ConditionalAccumulator', 'SparseConditionalAccumulator'),
    'ResourceConditionalAccumulator',
)
"""What makes a variable, a table or an accumulator: they keep what is written to them."""
STATE_QUERIES = (
    'LookupTableExportV2',
    'LookupTableFindV2',
    'LookupTableSizeV2',
    'VarIsInitializedOp',
)
"""What looks at a table, or whether a variable has a value, and leaves it as it is."""
PLACEHOLDERS = ('Placeholder', 'PlaceholderV2', 'PlaceholderWithDefault')
