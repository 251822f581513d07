"""Feeds batches of arrays: a placeholder for each array of a feature, and what a batch has for it.

In: a batch like those to come, or the tensors of a `serving_input_receiver_fn`. Out: an `Input` for
each feature. Each batch is then taken apart into features, which are checked by their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.batches import batch
from estimator_mgpu.tf_internals import op_types

_COMPOSITE_TENSORS = (tf.SparseTensor, tf.RaggedTensor)
_COMPOSITE_VALUES = (tf.SparseTensorValue, tf.ragged.RaggedTensorValue)  # as a session gives them


class Input(NamedTuple):
    """What a feature is fed to."""

    spec: tf.TypeSpec
    placeholders: list[tf.Tensor]  # several for a sparse or ragged tensor
    has_examples: bool  # along dimension 0, as far as is known


class _Value(NamedTuple):
    """A feature of a batch."""

    spec: tf.TypeSpec
    arrays: list[np.ndarray]  # one for each placeholder of the input


def check_arrays(features: Any) -> None:
    """Raises TypeError if what is given for a batch makes batches."""
    if callable(features) or isinstance(features, tf.compat.v2.data.Dataset):
        raise TypeError(
            f'The predictor was given {features!r} as features. Give a batch of arrays, rather '
            'than a dataset or an input_fn; a function that makes inputs is named: '
            'serving_input_receiver_fn=function.'
        )


def placeholders_for(
    features: Any, broadcast: Sequence[str]
) -> tuple[Any, dict[batch.Path, Input]]:
    """Makes placeholders for batches like the given one, and of any size.

    Args:
      features: a batch of arrays, or `tf.TypeSpec`s in place of arrays, which are taken as they
        are.
      broadcast: names of features that have no examples.

    Returns:
      The features for the model_fn, and their inputs by path.
    """
    exact_specs = map_leaves(_spec_of, features)
    with_examples = batch.leaves_of(exact_specs, None, broadcast)
    inputs = {}

    def tensor_for(path: batch.Path, leaf: Any) -> Any:
        spec = _spec_of(path, leaf)
        has_examples = path in with_examples and spec.shape.rank != 0
        if has_examples and not isinstance(leaf, tf.TypeSpec):
            spec = _of_any_size(spec)

        parts = tf.nest.flatten(spec, expand_composites=True)
        placeholders = [tf.placeholder(part.dtype, part.shape) for part in parts]
        inputs[path] = Input(spec, placeholders, has_examples)
        return tf.nest.pack_sequence_as(spec, placeholders, expand_composites=True)

    return map_leaves(tensor_for, features), inputs


def received(serving_input_receiver_fn: Callable[[], Any]) -> tuple[Any, dict[batch.Path, Input]]:
    """Calls a user's function for what is fed.

    Returns:
      The features for the model_fn, and the inputs by path, which needn't be the features.
    """
    receiver = serving_input_receiver_fn()
    if not hasattr(receiver, 'receiver_tensors'):
        raise TypeError(
            f'The serving_input_receiver_fn returned {receiver!r}. It has to return a '
            'tf.estimator.export.ServingInputReceiver, as for export_saved_model().'
        )
    inputs = {}
    for name, tensor in receiver.receiver_tensors.items():
        placeholders = tf.nest.flatten(tensor, expand_composites=True)
        spec = tf.type_spec_from_value(tensor)
        inputs['features', name] = Input(spec, placeholders, has_examples=False)
    return receiver.features, inputs


def _spec_of(path: batch.Path, leaf: Any) -> tf.TypeSpec:
    """What is known of an array, or of what is like one."""
    return leaf if isinstance(leaf, tf.TypeSpec) else _value_of(path, leaf).spec


def _of_any_size(spec: Any) -> tf.TypeSpec:
    """What is known of all batches, by that of one: it may have any number of examples.

    The other dimensions of a sparse tensor often follow from the largest example of a batch, so
    these are any, too.
    """
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec([None] * spec.shape.rank, spec.dtype)
    shape = [None, *spec.shape.as_list()[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return tf.TensorSpec(shape, spec.dtype)


def feed_of(
    inputs: Mapping[batch.Path, Input], features: Any
) -> tuple[dict[tf.Tensor, np.ndarray], int | None]:
    """Takes a batch apart; fails if it isn't what inputs take.

    Returns:
      Its arrays, by placeholder, and how many examples it has; None if it isn't known.
    """
    leaves: dict[batch.Path, Any] = {}
    map_leaves(leaves.__setitem__, features)
    _check_names(inputs, leaves)

    feed: dict[tf.Tensor, np.ndarray] = {}
    examples = {}
    for path, leaf in leaves.items():
        expected = inputs[path]
        value = _value_of(path, leaf, expected.spec)
        if not expected.spec.is_compatible_with(value.spec):
            raise ValueError(
                f'{batch.title(path)} is {_described(value.spec)}. This predictor takes '
                f'{_described(expected.spec)}. Convert it; or tell estimator.predictor(features) '
                'what may vary, by a tf.TensorSpec in place of each array: '
                'tf.TensorSpec([None, None], tf.float32), say.'
            )
        feed.update(zip(expected.placeholders, value.arrays))
        if expected.has_examples:
            examples[path] = value.spec

    differing = batch.differing_sizes(examples)
    if differing:
        raise ValueError(
            f'Each feature needs an entry for each example, but their numbers differ: {differing}. '
            "What isn't per example, such as a vocabulary, is named in replicate(broadcast=[...])."
        )
    sizes = [spec.shape[0] for spec in examples.values() if spec.shape.rank]
    return feed, sizes[0] if sizes else None


def _check_names(inputs: Mapping[batch.Path, Input], leaves: Mapping[batch.Path, Any]) -> None:
    """Raises ValueError if a feature is missing, or if there is one that has no input."""
    missing = []
    for path, expected in inputs.items():
        has_default = expected.placeholders[0].op.type == op_types.PLACEHOLDER_WITH_DEFAULT
        if path not in leaves and not has_default:
            missing.append(_name(path))
    unknown = [_name(path) for path in leaves if path not in inputs]

    wrong = []
    if missing:
        wrong.append(f'lacks {", ".join(missing)}')
    if unknown:
        wrong.append(f'has {", ".join(unknown)}')
    if wrong:
        legal = [f'{_name(path)} ({_described(known.spec)})' for path, known in inputs.items()]
        raise ValueError(
            f'The batch {" and ".join(wrong)}. This predictor takes {", ".join(legal)}.'
        )


def _name(path: batch.Path) -> str:
    """What messages call a feature: "feature 'user/age'", or 'an array without a name'."""
    return batch.title(path) if path[1:] else 'an array without a name'


def _described(spec: Any) -> str:
    """What messages call a spec: `float32 of shape [None, 3]`."""
    kinds = {tf.SparseTensorSpec: 'sparse ', tf.RaggedTensorSpec: 'ragged '}
    shape = 'any shape' if spec.shape.rank is None else f'shape {spec.shape.as_list()}'
    return f'{kinds.get(type(spec), "")}{spec.dtype.name} of {shape}'


def map_leaves(function: Callable[[batch.Path, Any], Any], features: Any) -> Any:
    """Replaces each leaf of a batch by what a function of its path and of it returns.

    As in `tf.data`, dicts and tuples are structure, and a list is an array.
    """

    def replaced(nest: Any, path: batch.Path) -> Any:
        if isinstance(nest, Mapping):
            return {key: replaced(value, (*path, key)) for key, value in nest.items()}
        if isinstance(nest, tuple) and not isinstance(nest, _COMPOSITE_VALUES):
            names = getattr(nest, '_fields', range(len(nest)))
            values = [replaced(value, (*path, name)) for name, value in zip(names, nest)]
            return type(nest)(*values) if hasattr(nest, '_fields') else tuple(values)
        return function(path, nest)

    return replaced(features, ('features',))


def _value_of(path: batch.Path, leaf: Any, expected: Any = None) -> _Value:
    """Takes a feature of a batch apart into arrays.

    Args:
      path: the keys that lead to the feature.
      leaf: an array, or what can be made one.
      expected: the spec of its input, if there is one: what has no type of its own, such as a list
        of floats, gets that one.
    """
    if tf.is_tensor(leaf) and tf.is_symbolic_tensor(leaf):
        raise TypeError(
            f'{batch.title(path)} is {leaf!r}, which is of a graph. Give arrays, or eager tensors.'
        )
    if isinstance(leaf, _COMPOSITE_TENSORS):
        parts = tf.nest.flatten(leaf, expand_composites=True)
        return _Value(tf.type_spec_from_value(leaf), list(map(np.asarray, parts)))
    try:
        if isinstance(leaf, _COMPOSITE_VALUES):
            return _composite_value(leaf)
        array = _array_of(leaf, None if expected is None else expected.dtype)
        return _Value(tf.TensorSpec(array.shape, tf.as_dtype(array.dtype)), [array])
    except (TypeError, ValueError) as error:
        takes = '' if expected is None else f' of {_described(expected)}'
        raise TypeError(
            f'{batch.title(path)} is a {type(leaf).__name__} that makes no array{takes}: '
            f'{str(error).rstrip(".")}. '
            'Give arrays, eager tensors or lists, in dicts and tuples as the model_fn takes them.'
        ) from error


def _array_of(leaf: Any, dtype: tf.DType | None = None) -> np.ndarray:
    """Makes an array as TensorFlow would: of Python's floats, one of float32, unless told so."""
    if hasattr(leaf, '__array__'):
        return np.asarray(leaf)
    return tf.make_ndarray(tf.make_tensor_proto(leaf, dtype))


def _composite_value(value: Any) -> _Value:
    """Takes a `SparseTensorValue` or a `RaggedTensorValue` apart, in the order of `tf.nest`."""
    if isinstance(value, tf.SparseTensorValue):
        arrays = list(map(_array_of, value))
        dtype = tf.as_dtype(arrays[1].dtype)
        return _Value(tf.SparseTensorSpec(value.dense_shape, dtype), arrays)
    splits = value.nested_row_splits
    spec = tf.RaggedTensorSpec(value.shape, value.dtype, len(splits), splits[0].dtype)
    return _Value(spec, [value.flat_values, *splits])
