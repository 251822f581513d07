"""The graph of a replicated model_fn: the model's own, divided over the devices.

In: a call of the model_fn, and the options of `replicate()`. Out: the EstimatorSpec, whose results
are those of the global batch. `partition` divides the graph; here is what comes before and after.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import predictor, steps
from estimator_mgpu.batches import batch, end_of_data, unknown_ranks
from estimator_mgpu.checkpoints import checkpoint_files, large_checkpoints
from estimator_mgpu.cluster import join, saving
from estimator_mgpu.devices import host_of
from estimator_mgpu.errors import step_errors
from estimator_mgpu.memory.auto_microbatches import AutoMicrobatches
from estimator_mgpu.model_fns import refused_gradients
from estimator_mgpu.model_fns.spec_results import (
    decide_order,
    result_ops,
    results_of_step,
    with_full_values,
)
from estimator_mgpu.optimizer import gradients_by_call
from estimator_mgpu.partition import fetches
from estimator_mgpu.partition.divide import divide
from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.order import check, facts
from estimator_mgpu.partition.rewrites.recomputation.recompute import recompute_activations
from estimator_mgpu.partition.rewrites.recomputation.step_ops import StepOps
from estimator_mgpu.partition.variable_devices import place_variables
from estimator_mgpu.reports.start_of_training import log_sharding
from estimator_mgpu.tf_internals import graph_defs, graphs, op_types, private, tf_estimator
from estimator_mgpu.tf_internals.garbage_collection import no_garbage_collection


def build(
    call: Callable[..., Any],
    arguments: dict[str, Any],
    options: dict[str, Any],
    devices: list[str],
    machines: dict[str, list[str]] | None,
) -> Any:
    """Builds the default graph for all towers, and returns its EstimatorSpec.

    Args:
      call: calls the model_fn; on a device, if it's given one.
      arguments: the arguments of the model_fn, by name.
      options: the checked arguments of `replicate()`, by name.
      devices: on which the graph is to run, one a chain of towers.
      machines: the devices of each machine; None on one machine.
    """
    features = arguments.get('features')
    labels = arguments.get('labels')
    mode: Any = arguments.get('mode')
    if arguments.get('config') is not None and _is_export((features, labels), mode):
        return call()  # A SavedModel is loaded on any machine, so it names no device.

    auto = options['microbatches']
    if isinstance(auto, AutoMicrobatches):
        noted = functools.partial(auto.noted, mode)
        options = {**options, 'microbatches': auto.count(mode), 'noted': noted}

    graph = tf.get_default_graph()
    ops_before = len(graph.get_operations())
    # The tensors are listed before the model_fn is called: it may take some out of a dict.
    tensors = end_of_data.tensors_of(features, labels)
    spec, step = _built(call, features, labels, options, devices, machines)

    results = result_ops(spec)
    end_of_data.hold_writes(graph, tensors, results)
    if step.facts is not None:
        not_held, _ = end_of_data.writes_to_hold(graph, tensors, results)
        check.check(step.facts, graph, results, step.names, step.tower_devices, not_held)

    spec = _with_scaffold(spec, waits_for_tasks=bool(machines))
    spec = step_errors.explain_errors(spec)
    if step.plan is not None or step.recomputation is not None:
        refused_gradients.refuse(graph, ops_before)
    steps.record(step)
    graph_defs.serialize_once(graph)
    graph_defs.write_text_by_c()
    if mode in (None, tf_estimator.estimator.ModeKeys.TRAIN):
        log_sharding(options['devices'], options['microbatches'], arguments.get('config'))
    return spec


def _is_export(features_and_labels: Sequence[Any], mode: str | None) -> bool:
    """Whether Estimator builds a graph to export: the batch is fed, and no step is trained."""
    if predictor.is_fed(tf.get_default_graph()):
        return False
    trains = mode == tf_estimator.estimator.ModeKeys.TRAIN
    if trains and tf.get_collection(private.GLOBAL_STEP_READ):
        return False  # Estimator has read the global step before it trains; a batch may be fed.
    leaves = tf.nest.flatten(features_and_labels, expand_composites=True)
    ops = [leaf.op for leaf in leaves if tf.is_tensor(leaf)]
    return any(op.type in op_types.PLACEHOLDERS for op in graphs.ancestors(ops))


def _built(
    call: Callable[..., Any],
    features: Any,
    labels: Any,
    options: dict[str, Any],
    devices: list[str],
    machines: dict[str, list[str]] | None,
) -> tuple[Any, steps.Step]:
    """Calls the model_fn, and divides its graph if there are several towers.

    Args:
      call: as for `build()`; so are `options`, `devices` and `machines`.
      features: what the model_fn is called with.
      labels: likewise.

    Returns:
      The EstimatorSpec and a `Step`.
    """
    graph = tf.get_default_graph()
    existing_ops = {op.name for op in graph.get_operations()}
    tensors = end_of_data.tensors_of(features, labels)
    broadcast = options['broadcast']
    has_one_tower = len(devices) == 1 and options['microbatches'] == 1

    if has_one_tower:
        leaves = batch.leaves_of(features, labels, broadcast)
        spec = call('' if options['devices'] is None else devices[0])
    else:
        global_batch = batch.look_at(features, labels, broadcast)
        spec = call()

    with no_garbage_collection():
        open_pairs = decide_order(spec)
        if has_one_tower:
            step = steps.Step(batch.examples_of(leaves), spec.loss, devices)
        else:
            servers = [f'{name}/device:CPU:0' for name in machines or () if '/job:ps' in name]
            place_variables(options['variables'], servers or devices, existing_ops)
            global_batch = unknown_ranks.shapes_told_by_model(global_batch)
            spec, step = _divided(spec, global_batch, devices, existing_ops, options)

        if step.plan is None:
            before = facts.noted(graph, result_ops(spec))
            recomputation = None
            if _recomputes(spec, options):
                recomputation = recompute_activations(
                    StepOps(tensors, spec.loss, results_of_step(spec), existing_ops)
                )
            step = step._replace(facts=before, recomputation=recomputation)
    return spec, step._replace(open_pairs=open_pairs)


def _divided(
    spec: Any,
    global_batch: batch.Batch,
    devices: list[str],
    existing_ops: set[str],
    options: dict[str, Any],
) -> tuple[Any, steps.Step]:
    """Divides the default graph; returns its EstimatorSpec and a `Step`.

    Args:
      spec: the EstimatorSpec that the model_fn has returned.
      global_batch: the features and labels.
      devices: on which the graph is to run, one a chain of towers.
      existing_ops: the names of ops that were there before the model_fn was called.
      options: the checked arguments of `replicate()`, by name; and `noted`, which the number of
        examples goes through, if there is one.
    """
    graph = tf.get_default_graph()
    static = global_batch.static
    with tf.control_dependencies(None), tf.name_scope('batch/'), tf.device(host_of(devices[0])):
        total = global_batch.total() if static is None and global_batch.leaves else None
        if total is not None and 'noted' in options:
            total = options['noted'](total)

    division = Division(
        graph,
        global_batch,
        total,
        devices,
        existing_ops=existing_ops,
        batch_norm=options['batch_norm'],
        turns=options['microbatches'],
        results=result_ops(spec),
        step_results=results_of_step(spec),
        gradient_calls=gradients_by_call(graph),
        recomputed_loss=spec.loss if _recomputes(spec, options) else None,
    )
    try:
        towers = divide(division)
    except Exception as error:
        reason = str(error).rstrip('.')
        raise RuntimeError(
            f'Dividing the graph over the devices failed: {reason}. Please report the model, or '
            'mend your own rule; meanwhile replicate(devices=1) trains it on one device.'
        ) from error

    examples = total if static is None else static
    step = steps.Step(
        examples,
        spec.loss,
        devices,
        unknown=global_batch.unknown_titles,
        has_arrays=global_batch.has_arrays,
    )
    if towers is None:
        return spec, step._replace(nothing_is_sharded=True)
    spec = with_full_values(spec, towers)
    fetches.give_values(graph, towers.make_values_of_stateful_ops())
    return spec, step._replace(
        loss=spec.loss,
        plan=division.plan,
        schedule=towers.schedule,
        recomputation=division.recomputation,
        names=towers.names,
        facts=division.facts,
        tower_devices=[tower.device for tower in towers.towers],
    )


def _recomputes(spec: Any, options: dict[str, Any]) -> bool:
    """Whether activations are computed again, as it was asked for and there are gradients."""
    trains = spec.mode == tf_estimator.estimator.ModeKeys.TRAIN
    return options['recompute'] and trains and spec.train_op is not None


def _with_scaffold(spec: Any, waits_for_tasks: bool) -> Any:
    """An EstimatorSpec with a scaffold that sees to checkpoints and other tasks.

    `MonitoredSession` finalizes it before the first session, and again before each one after a
    fault.
    """
    scaffold = spec.scaffold or tf.train.Scaffold()
    finalize = scaffold.finalize

    def finalize_for_session() -> Any:
        result = finalize()  # Now there is a saver.
        graph = tf.get_default_graph()
        checkpoint_files.explain_restore_errors(scaffold.saver)
        large_checkpoints.save_without_copies(graph)
        if waits_for_tasks:
            saving.place_on_chief(graph)
            join.chief().begin_session()
        return result

    scaffold.finalize = finalize_for_session
    return spec._replace(scaffold=scaffold)
