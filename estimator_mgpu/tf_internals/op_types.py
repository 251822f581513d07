"""Types of ops that the package has to tell apart by what they do, each with the reason why."""

# Ops that towers' graphs are built of, or that are looked for by their type.
CONST = 'Const'
FILL = 'Fill'
NO_OP = 'NoOp'
IDENTITY = 'Identity'
READ_VARIABLE = 'ReadVariableOp'
DISABLE_COPIES = 'DisableCopyOnRead'
ENSURE_SHAPE = 'EnsureShape'
CAST = 'Cast'
RESHAPE = 'Reshape'
SLICE = 'Slice'

ZEROS_ONES_LIKE = {'ZerosLike': 0, 'OnesLike': 1}
"""Ops that fill a tensor of another one's shape, and by what: they need no value, only a shape."""

STOP_GRADIENT = 'StopGradient'
_IDENTITIES = ('Identity', 'PreventGradient', 'Snapshot', STOP_GRADIENT)
VIEWS = (*_IDENTITIES, 'ExpandDims', RESHAPE, 'Squeeze')
"""Ops whose output is in the memory of their first input."""
REARRANGEMENTS = (*VIEWS, 'Transpose')
"""Ops that keep all entries: it's the same to reduce partial results before or after these."""

TAKE_SLICES = ('ConcatV2', 'GatherV2', 'Reshape', 'StridedSlice')
"""Ops that take a tower's slice of a full value."""

PASS_SLICES = (*TAKE_SLICES, 'Cast')
"""Ops that may be on the way from such a slice to the copy that uses it."""

# The ops of a v1 loop: where it begins and ends, its way back, where that joins its begin, its
# condition, and where a step goes on or ends. Branches begin at a `Switch`, too, and join at a
# `Merge`. Walks over a graph must not run in circles.
ENTER = ('Enter', 'RefEnter')
EXIT = ('Exit', 'RefExit')
NEXT_ITERATION = ('NextIteration', 'RefNextIteration')
MERGE = ('Merge', 'RefMerge')
LOOP_CONDITION = 'LoopCond'
SWITCH = ('Switch', 'RefSwitch')
"""Has its value on one of two outputs; the other one is dead, and so is what depends on it."""
FORWARDS = (*ENTER, *EXIT, *NEXT_ITERATION, *MERGE, *SWITCH)
"""Ops of v1 control flow that give what they are given, without a copy."""
GENERATOR_DATASET = 'GeneratorDataset'
"""Gives what a Python generator gives."""
V1_LOOP = 'v1 loop'
"""The type of a whole v1 loop, in place of its ops: there is no op of this type."""
PASS_ON = ('Identity', 'Switch')
"""Ops whose outputs are their first input."""

HANDLE_PREFIXES = ('TensorArray', 'Stack')
"""How the types of ops begin that use a TensorArray or a stack, v1 loops' lists, by a handle."""
NEW_HANDLES = ('TensorArrayV3', 'StackV2')
"""TensorArrays and stacks without elements."""
STACK_PUSH = 'StackPushV2'
HANDLES = (*NEW_HANDLES, 'TensorArrayGradV3', 'StackPopV2')
"""Where handles come from."""

LIST_PUSH = 'TensorListPushBack'
KEEPS = (STACK_PUSH, LIST_PUSH)
"""Ops by which the steps of loops keep what gradients need."""
LIST_READS = ('TensorListGetItem', 'TensorArrayReadV3')
"""Ops that give the element of a list that has a number."""
LIST_WRITES = ('TensorListSetItem', 'TensorArrayWriteV3')
"""Ops that put a value into a list, in the place that has a number."""

SUMS_OF_TWO = ('Add', 'AddV2')
LESS = 'Less'
LOGICAL_AND = 'LogicalAnd'

UNIQUE = 'Unique'
"""Gives the different entries of a vector, and for each entry its place among these."""
UNSORTED_SEGMENT_SUM = 'UnsortedSegmentSum'
"""Sums up the rows that have the same number, such as an id, or an id's place."""
UNSORTED_SEGMENTS = (
    *('UnsortedSegmentMax', 'UnsortedSegmentMin', 'UnsortedSegmentProd'),
    UNSORTED_SEGMENT_SUM,
)
"""The same, and those that take the largest of them, the smallest, or their product."""

REDUCTIONS = ('All', 'Any', 'Max', 'Mean', 'Min', 'Prod', 'Sum')
"""Ops that combine entries: if these are of several examples, towers have partial results."""

PARTIAL_SUM_INPUTS = {
    **dict.fromkeys(['Add', 'AddN', 'AddV2', 'Neg', 'Pack', 'Sub'], slice(None)),
    'StridedSliceGrad': slice(-1, None),  # only the last input, which is put between zeros
}
"""Linear ops, and which of their inputs may be partial sums: the output then is one as well."""

PARTIAL_INPUTS = {
    **PARTIAL_SUM_INPUTS,
    **dict.fromkeys([*REARRANGEMENTS, *SWITCH], slice(1)),
    'ConcatV2': slice(-1),
}
"""The same, with ops for which the partial results may be of any reduction, such as a maximum."""

PRODUCT_PREFIXES = (
    *('MatMul', 'BatchMatMul', 'SparseMatMul', 'Einsum', 'Conv2D', 'Conv3D', 'DepthwiseConv2d'),
    *('CudnnRNN', 'BlockLSTM', 'GRUBlockCell', 'LSTMBlockCell'),
)
"""How the types of matrix products and convolutions begin, which take most of a step's time."""

SHAPE_QUERIES = frozenset(['Shape', 'ShapeN', 'Size', 'Rank'])
"""Ops that ask only for dimensions: nothing has to be gathered for them."""
SHAPE_OUTPUTS = {
    'SparseReshape': 1,
    **dict.fromkeys(['RaggedTensorToSparse', 'SparseConcat', 'SparseSlice'], 2),
    **dict.fromkeys(['SparseCross', 'SparseCrossHashed', 'SparseCrossV2'], 2),
    **dict.fromkeys(['StringSplit', 'StringSplitV2'], 2),
}
"""Ops that give a sparse tensor, and which of their outputs is its shape."""
BROADCAST_GRADIENT_ARGS = 'BroadcastGradientArgs'
"""Gives the dimensions over which a gradient is summed, computed from two shapes."""

OPTIONAL = 'OptionalFromValue'
NO_OPTIONAL = 'OptionalNone'
OPTIONAL_VALUE = 'OptionalGetValue'
LIST_POP = 'TensorListPopBack'
LIST_PREFIXES = ('TensorList', 'Optional')
"""How the types of ops on lists and optionals begin: these can't be gathered."""
EMPTY_LISTS = ('EmptyTensorList', 'TensorListReserve', NO_OPTIONAL)
"""Lists without elements, so that each tower can make its own."""

PARTITIONED_CALLS = ('PartitionedCall', 'StatefulPartitionedCall')
LOOPS = ('While', 'StatelessWhile')
IFS = ('If', 'StatelessIf')
BRANCHES = (*IFS, 'Case', 'StatelessCase')
FUNCTION_CALLERS = frozenset([*LOOPS, *BRANCHES, *PARTITIONED_CALLS])
"""Ops that call functions: whether they can be sharded depends on the functions' ops."""
MUST_COMPILE = '_XlaMustCompile'
"""The attribute of a function, or of a call, that says that XLA has to compile it."""
STAYS_A_CALL = frozenset(['_noinline', MUST_COMPILE])
"""Attributes, of functions and of calls, that say that a function has to be called."""

BATCH_NORMS = {f'FusedBatchNorm{v}': f'FusedBatchNormGrad{v}' for v in ('', 'V2', 'V3')}
"""Fused batch normalization, with its gradient: they need statistics of the global batch."""
GIVES_MOMENTS = '_gives_moments'
"""The attribute of a fused batch normalization that was added for its mean and variance."""
MOMENT_OUTPUTS = slice(1, 3)
"""Which of its outputs are the mean and the variance."""

CONVOLUTION_KERNEL_GRADIENT = 'Conv2DBackpropFilter'
BIAS_GRADIENT = 'BiasAddGrad'
"""oneDNN computes it and the gradient of a convolution's kernel at once, if they use one tensor."""

VALUE_READS = (READ_VARIABLE, 'ResourceGather', 'ResourceGatherNd')
DEEP_COPY = 'DeepCopy'
VARIABLE_READS = frozenset([*VALUE_READS, 'VariableShape', DEEP_COPY])
"""Ops that only read a variable: TensorFlow calls them stateful, but they have no side effect."""
REFERENCE_READS = frozenset(
    [
        *('RefIdentity', 'RefSelect', 'RefSwitch', *ENTER, *EXIT, *NEXT_ITERATION, *MERGE),
        *('IsVariableInitialized', 'LookupTableFind', 'LookupTableSize', 'LookupTableExport'),
    ]
)
"""Ops that take a reference, such as a v1 variable, without a write to it: no side effect."""
LOOKUPS = ('Gather', 'GatherNd', 'GatherV2')
"""Ops that take some rows of their first input, such as a reference variable."""
SPARSE_SEGMENTS = tuple(
    f'SparseSegment{reduction}{ending}'
    for reduction in ('Mean', 'SqrtN', 'Sum')
    for ending in ('', 'WithNumSegments')
)
"""Ops that take some rows of their first input, such as a variable's value, and add them up."""
FORWARD_VARIABLES = (*ENTER, *MERGE, 'Identity', 'RefIdentity', 'RefSwitch', 'Switch')
"""Ops that pass a variable on, for example into a v1 loop: what uses them uses the variable."""

ASSERT = 'Assert'
CHECKS = (ASSERT, 'CheckNumerics', 'CheckNumericsV2')
"""Ops that do nothing, or fail."""

CHECKPOINT_WRITES = ('MergeV2Checkpoints', 'Save', 'SaveSlices', 'SaveV2')
CHECKPOINT_READ = 'RestoreV2'

REFERENCE_VARIABLES = ('Variable', 'VariableV2')
STATE_HOLDERS = (
    *('VarHandleOp', *REFERENCE_VARIABLES),
    *('HashTableV2', 'MutableDenseHashTableV2', 'MutableHashTableV2'),
    *('MutableHashTableOfTensorsV2', 'ConditionalAccumulator', 'SparseConditionalAccumulator'),
    'ResourceConditionalAccumulator',
)
"""Variables, tables and accumulators: they keep what a step writes, so writes wait for a batch."""
STATE_QUERIES = (
    'LookupTableExportV2',
    'LookupTableFindV2',
    'LookupTableSizeV2',
    'VarIsInitializedOp',
)
"""Ops that only look at a table, or whether a variable has a value: no batch is needed for that."""

HANDLE_QUERIES = ('IsVariableInitialized', 'VarIsInitializedOp', 'VariableShape')
"""Ops that ask of a variable what no step changes."""

PLACEHOLDER_WITH_DEFAULT = 'PlaceholderWithDefault'
FED = ('Placeholder', 'PlaceholderV2')
"""Ops that only have a value if they are fed: a step never runs what they wait for."""
PLACEHOLDERS = (*FED, PLACEHOLDER_WITH_DEFAULT)
"""Ops whose values may be fed: there, a batch doesn't end. One with a default runs what it waits
for unless it's fed. So that counts, but others can't rely on a wait that is added to it."""

IDENTITY_N = 'IdentityN'
"""As many identities, of which none is there before all are: `tf.custom_gradient` makes it."""

MAY_SHARE_MEMORY = frozenset(
    [
        *('Identity', 'IdentityN', 'PreventGradient', 'Print', 'Snapshot', 'StopGradient'),
        *('CheckNumerics', 'CheckNumericsV2', 'EnsureShape', 'PlaceholderWithDefault'),
        *('BroadcastTo', 'Bitcast', 'ExpandDims', 'Reshape', 'Squeeze', 'Transpose'),
        *('AddN', 'ConcatV2', 'Pack', 'Pad', 'PadV2', 'ReverseV2', 'Tile', 'Max', 'Mean', 'Min'),
        *('Prod', 'Sum', 'Slice', 'Split', 'SplitV', 'StridedSlice', 'Unpack'),
        *('Enter', 'Exit', 'Merge', 'NextIteration', 'Switch'),
    ]
)
"""Ops whose output may lie in the memory of an input, at least for some shapes: if that is a
reference variable's, a write to the variable shows in the output."""
