"""A user's script, which every machine of a cluster starts: it trains, evaluates and predicts.

`python cluster_script.py MODEL_DIR OPTIONS`, where OPTIONS are main()'s, in JSON. What a test looks
at are lines `NAME JSON`.
"""

import json
import multiprocessing
import os
import re
import sys
import time

import numpy as np
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.cluster import end_of_chief, ending, reach, serve, task, watch
from models import floats, of_all_modes, weights

STEPS = 20


def dropped(features):
    """A network with a variable for each device, and dropout by the step's random numbers."""
    hidden = tf.nn.tanh(tf.matmul(features, weights('first', 4, 8)))
    for layer in range(4):
        hidden += tf.nn.tanh(tf.matmul(hidden, weights(f'hidden{layer}', 8, 8)))
    seed = tf.stack([7, tf.cast(tf.train.get_global_step(), tf.int32)])
    kept = tf.random.stateless_uniform(tf.shape(hidden), seed) < 0.7
    return tf.matmul(tf.where(kept, hidden, tf.zeros_like(hidden)), weights('last', 8, 1))


def input_fn():
    """Batches of 15, 15, 15 and 5 rows, in another order each time."""
    data = tf.data.Dataset.from_tensor_slices((floats(50, 4), floats(50, 1)))
    return data.shuffle(50, seed=3).batch(15).repeat()


def remaining():
    """The batches that are left at a session's first step."""
    return input_fn().skip(tf.train.get_global_step())


def hang():
    tell('HANGS', True)
    while True:  # A signal that comes right before it sleeps is handled a second later.
        time.sleep(1)


def hanging(where):
    """An input_fn that hangs, or whose generator does, after two batches."""
    if where == 'input_fn':
        hang()

    def batches():
        for _ in range(2):
            yield floats(15, 4), floats(15, 1)
        hang()

    specs = tuple(tf.TensorSpec([None, size], tf.float32) for size in (4, 1))
    data = tf.data.Dataset.from_generator(batches, output_signature=specs)
    return data.prefetch(2) if where == 'close' else data


def own_parts(input_context):
    """Each machine's part of the rows of these."""
    n, i = input_context.num_input_pipelines, input_context.input_pipeline_id

    def part(*batch):
        rows = tf.shape(batch[0])[0]
        return tuple(tensor[rows * i // n : rows * (i + 1) // n] for tensor in batch)

    return remaining().map(part)


class TellSteps(tf.train.SessionRunHook):
    """Prints each step, and the devices on which a session multiplied matrices.

    It sleeps after each step, until the test has made the file `hurry`.
    """

    def __init__(self, sleep, hurry):
        self.sleep = sleep
        self.hurry = hurry

    def after_create_session(self, session, coord):
        self.devices = set()

    def before_run(self, context):
        traced = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
        return tf.train.SessionRunArgs(None, options=traced)

    def after_run(self, context, values):
        for device in values.run_metadata.step_stats.dev_stats:
            if any(node.node_name.endswith('/MatMul') for node in device.node_stats):
                self.devices.add(device.device.replace('/replica:0', ''))
        tell('STEP', int(context.session.run(tf.train.get_global_step())))
        if not os.path.exists(self.hurry):
            time.sleep(self.sleep)

    def end(self, session):
        tell('DEVICES', sorted(self.devices))
        tell('VARIABLES', {variable.op.name: variable.device for variable in tf.global_variables()})


class Scarce(tf.train.SessionRunHook):
    """After one step, it raises the error of a device whose memory is too small, once."""

    def __init__(self, step):
        self.step = step

    def after_run(self, context, values):
        if context.session.run(tf.train.get_global_step()) == self.step:
            self.step = 0
            message = 'OOM when allocating a tensor [[{{node MatMul}}]]'  # as of an op
            raise tf.errors.ResourceExhaustedError(None, None, message)


class AfterStep(tf.train.SessionRunHook):
    """Calls a function after each step."""

    def __init__(self, call):
        self.call = call

    def after_run(self, context, values):
        self.call()


def exit_by_error(argument):
    """Ends the script, without sys.exit()."""
    raise SystemExit(argument)


class HangsAfterSave(tf.train.CheckpointSaverListener):
    """Hangs once the first checkpoint after some steps is complete."""

    def after_save(self, session, global_step_value):
        if global_step_value:
            hang()


class Forks(tf.train.SessionRunHook):
    """After step 3, it forks a process, which gets SIGTERM."""

    def after_run(self, context, values):
        if context.session.run(tf.train.get_global_step()) != 3:
            return
        child = multiprocessing.get_context('fork').Process(target=time.sleep, args=[1000])
        child.start()
        child.terminate()
        child.join(60)
        tell('FORKED', child.exitcode)
        child.kill()


def fork_one_that_exits():
    """Forks a process, and waits for its end."""
    child = os.fork()
    if not child:
        sys.exit(3)
    os.waitpid(child, 0)


class WaitsToSave(tf.train.CheckpointSaverListener):
    """Has the last save wait until the test has made the file `save`."""

    def __init__(self, last_step, file):
        self.last_step = last_step
        self.file = file

    def before_save(self, session, global_step_value):
        tell('SAVES', int(global_step_value))
        while global_step_value == self.last_step and not os.path.exists(self.file):
            time.sleep(0.1)


def tell(name, value):
    print(name, json.dumps(value), flush=True)


def told(text, name):
    """Returns all that has been told by a name."""
    return [json.loads(line) for line in re.findall(rf'^{name} (.*)$', text, re.MULTILINE)]


def serve_at(address):
    """Lets this process's server be at another address than TF_CONFIG's, as on another machine."""
    server = tf.train.Server

    def elsewhere(jobs, job, index, *args):
        addresses = list(jobs[job])
        addresses[index] = address
        return server({**jobs, job: addresses}, job, index, *args)

    tf.train.Server = elsewhere


def cut_off(addresses):
    """Gives TensorFlow's server, in the place of addresses, one that nobody listens at."""
    server = tf.train.Server

    def cut(jobs, *args, **kwargs):
        cut_jobs = {
            job: ['127.0.0.1:1' if address in addresses else address for address in tasks]
            for job, tasks in jobs.items()
        }
        return server(cut_jobs, *args, **kwargs)

    tf.train.Server = cut


def watch_closely():
    """Lets the chief notice within 8 seconds, rather than 20, that a task doesn't answer.

    At its end, it waits 3 seconds, rather than 30, for tasks that are away. After SIGTERM it has 4
    seconds, rather than 7. Other tasks look every 3 seconds, rather than 30, whether the chief
    answers. A process waits 1 second, rather than 30, for another one that is the same task.
    """
    reach._TIMEOUT = 1
    task._TWIN_PATIENCE = 1
    watch._ASK_EVERY = 2
    watch._ANSWER_WITHIN = 5
    watch._LOG_AFTER = 8
    watch._LOG_EVERY = 12
    watch._LATER_THAN_OTHERS = 8
    end_of_chief._FOR_MAIN_THREAD = 4
    end_of_chief._WAIT_FOR_LOST = 3
    ending._READ_EVERY = 3
    serve._CHECK_EVERY = 3
    task._TWIN_PATIENCE = 5


def leave(status, error):
    """How the script ends."""
    if error:
        raise RuntimeError(error)
    if status is not None:
        sys.exit(status)


def main(
    model_dir,
    devices=2,
    stops=(STEPS,),
    parts=False,
    sleep=0,
    limit=300,
    step_limit=0,
    status=None,
    error=None,
    unreached=(),
    elsewhere='',
    v1=False,
    closely=False,
    scarce_at=0,
    hangs='',
    waits_to_save=False,
    forks=False,
    exits_in='',
):
    """Calls train() up to each of `stops`, or with `parts` train_and_evaluate().

    Args:
      model_dir: the Estimator's.
      devices: the number of devices of each machine.
      stops: the last step of each training.
      parts: whether each machine reads its own part of the batch, in train_and_evaluate().
      sleep: seconds after each step, up to when the test calls `Cluster.hurry()`.
      limit: seconds that others are waited for.
      step_limit: seconds of each call of the session.
      status: what sys.exit() is called with at the end.
      error: of a RuntimeError at the end.
      unreached: addresses at which TensorFlow, in this process, finds nobody.
      elsewhere: another address of this task, as of another machine.
      v1: whether variables are as below tf.disable_v2_behavior().
      closely: whether this task waits less long, as by `watch_closely()`.
      scarce_at: after this step, memory is too small once, and two micro-batches are needed.
      hangs: where the input hangs: in `input_fn`, or in a `generator`; or after training, in
        `evaluate` or `predict`, or as evaluation is interrupted in a hook, to `close` the session.
        Or the script hangs `after_save`, in a listener, or in its own `cleanup`, once train() has
        come to its end.
      waits_to_save: whether the last save waits for the test.
      forks: whether the chief forks other processes: in a step, and after each training.
      exits_in: where SystemExit(status) is raised: in a `hook`, or in the `input_fn`, or, by the
        `script` itself, rather than by sys.exit(), at the end.
    """
    if elsewhere:
        serve_at(elsewhere)
    if v1:
        tf.disable_resource_variables()
    if closely:
        watch_closely()
    tf.logging.set_verbosity(tf.logging.INFO)
    session_config = None
    if step_limit:
        session_config = tf.ConfigProto(operation_timeout_in_ms=int(1000 * step_limit))
    config = tf.estimator.RunConfig(
        model_dir,
        save_checkpoints_steps=5,
        session_creation_timeout_secs=limit,
        session_config=session_config,
    )
    if unreached:
        cut_off(unreached)
    options = {'devices': devices, 'input': 'machine' if parts else 'chief'}
    if scarce_at:
        options['microbatches'] = 'auto'
    estimator = estimator_mgpu.Estimator(of_all_modes(dropped), config=config, **options)
    folder = os.path.dirname(model_dir)
    hooks = [TellSteps(sleep, os.path.join(folder, 'hurry')), Scarce(scarce_at)]
    if forks:
        hooks.append(Forks())
    if exits_in == 'hook':
        hooks.append(AfterStep(lambda: exit_by_error(status)))
    if parts:
        train = tf.estimator.TrainSpec(own_parts, stops[-1], hooks)
        evaluation = tf.estimator.EvalSpec(input_fn, 4, start_delay_secs=0, throttle_secs=1)
        tf.estimator.train_and_evaluate(estimator, train, evaluation)
        leave(status, error)
        return
    hanging_input_fn = lambda: hanging(hangs)  # noqa: E731
    train_input_fn = hanging_input_fn if hangs in ('input_fn', 'generator') else remaining
    if exits_in == 'input_fn':
        train_input_fn = lambda: exit_by_error(status)  # noqa: E731
    for stop in stops:
        listeners = [WaitsToSave(stop, os.path.join(folder, 'save'))] if waits_to_save else []
        if hangs == 'after_save':
            listeners.append(HangsAfterSave())
        try:
            estimator.train(train_input_fn, hooks, None, stop, listeners)
        finally:
            if hangs == 'cleanup':
                hang()
        eval_input_fn = hanging_input_fn if hangs in ('evaluate', 'close') else input_fn
        eval_hooks = [AfterStep(lambda: time.sleep(1000))] if hangs == 'close' else []
        result = estimator.evaluate(eval_input_fn, 4, eval_hooks)
        tell('EVALUATED', {name: float(value) for name, value in result.items()})
        if forks:
            fork_one_that_exits()
    predict_input_fn = hanging_input_fn if hangs == 'predict' else lambda: input_fn().take(2)
    found = estimator.predict(predict_input_fn)
    tell('PREDICTED', np.stack([one['output'] for one in found]).tolist())
    if exits_in == 'script':
        exit_by_error(status)
    leave(status, error)


if __name__ == '__main__':
    main(sys.argv[1], **json.loads(sys.argv[2]))
