"""Trains an LSTM on several devices to write Python, one character at a time.

    python samples/char_rnn.py --devices=2

The model is trained on the source code of Python's standard library, and evaluated on a part that
it hasn't seen. It then continues the texts of --prompts. With more --train_steps, the result
looks more like Python.
"""

from __future__ import annotations

import math

import common
import numpy as np
import python_source
import tensorflow.compat.v1 as tf
from absl import app, flags

import estimator_mgpu

estimator = estimator_mgpu.estimator  # tf.estimator, also where TensorFlow no longer has it

FLAGS = flags.FLAGS

flags.adopt_module_key_flags(common)
flags.DEFINE_integer('batch_size', 64, 'Examples in a global batch.', lower_bound=1)
flags.DEFINE_integer('train_steps', 500, 'Steps to train.', lower_bound=1)
flags.DEFINE_float('learning_rate', 0.01, 'Learning rate of Adam.')
flags.DEFINE_integer('units', 128, 'Number of units of the LSTM.', lower_bound=1)
flags.DEFINE_list('prompts', ['def read', 'class Po'], 'Texts to continue, all of the same length.')
flags.DEFINE_integer('length', 200, 'Number of characters to write.', lower_bound=1)
flags.DEFINE_float(
    'temperature', 0.5, 'A lower value gives less surprising text.', lower_bound=0.01
)

WINDOW = 64  # Characters of a training example.
CHARACTERS = '\n' + ''.join(map(chr, range(32, 127)))


def encode(text):
    """Returns the positions of characters in CHARACTERS, without those that aren't there."""
    codes = np.frombuffer(text.encode('ascii', 'ignore'), np.uint8).astype('int32')
    codes = np.where(codes == ord('\n'), 0, codes - 31)
    return codes[(codes >= 0) & (codes < len(CHARACTERS))]


@flags.validator('prompts', message='give prompts of ASCII characters, all equally long')
def _are_equally_long(prompts):
    lengths = {len(encode(prompt)) for prompt in prompts}
    return len(lengths) == 1 and lengths == {len(prompt) for prompt in prompts} - {0}


def decode(codes):
    return ''.join(CHARACTERS[code] for code in codes)


def model_fn(features, labels, mode, params):
    """An ordinary model_fn: nothing in it knows of devices.

    Args:
      features: characters, [rows, time].
      labels: the character that follows each.
    """
    units, classes = params['units'], len(CHARACTERS)
    # What a character adds to the LSTM's four gates, and what the last output adds.
    characters = tf.get_variable('characters', [classes, 4 * units])
    recurrent = tf.get_variable('recurrent', [units, 4 * units])
    gates_bias = tf.get_variable('gates_bias', [4 * units], initializer=tf.zeros_initializer())
    kernel = tf.get_variable('kernel', [units, classes])
    bias = tf.get_variable('bias', [classes], initializer=tf.zeros_initializer())

    def lstm(state, codes):
        output, memory = state
        gates = tf.gather(characters, codes) + output @ recurrent + gates_bias
        enter, keep, leave, new = tf.split(gates, 4, axis=1)
        memory = tf.sigmoid(keep + 1) * memory + tf.sigmoid(enter) * tf.tanh(new)
        return tf.sigmoid(leave) * tf.tanh(memory), memory

    nothing = tf.zeros([tf.shape(features)[0], units])
    outputs, memories = tf.scan(lstm, tf.transpose(features), (nothing, nothing))

    if mode == estimator.ModeKeys.PREDICT:

        def write(state, _):
            output, memory, _ = state
            logits = (output @ kernel + bias) / params['temperature']
            codes = tf.random.categorical(logits, 1, dtype=tf.int32)[:, 0]
            return (*lstm((output, memory), codes), codes)

        start = outputs[-1], memories[-1], features[:, -1]
        *_, written = tf.scan(write, tf.range(params['length']), start)
        return estimator.EstimatorSpec(mode, predictions={'codes': tf.transpose(written)})

    logits = tf.tensordot(outputs, kernel, 1) + bias
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.transpose(labels), logits)
    loss = tf.reduce_mean(losses)
    train_op = None
    if mode == estimator.ModeKeys.TRAIN:
        optimizer = tf.train.AdamOptimizer(params['learning_rate'])
        gradients, variables = zip(*optimizer.compute_gradients(loss))
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)  # Of the whole batch's gradient.
        train_op = optimizer.apply_gradients(
            zip(gradients, variables), global_step=tf.train.get_global_step()
        )
    bits = {'bits': tf.metrics.mean(losses / math.log(2))}
    return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=bits)


def windows(codes):
    """Cuts a text into rows: what is seen, and what follows each character of it."""
    rows = codes[: len(codes) // (WINDOW + 1) * (WINDOW + 1)].reshape(-1, WINDOW + 1)
    return rows[:, :-1], rows[:, 1:]


def main(argv):
    common.start(argv)
    codes = encode(python_source.text())
    train, test = windows(codes[100_000:]), windows(codes[:100_000])
    shares = np.bincount(codes) / len(codes)
    by_frequency = -sum(share * math.log2(share) for share in shares if share)

    def train_input_fn():
        dataset = tf.data.Dataset.from_tensor_slices(train)
        return dataset.shuffle(len(train[0]), seed=FLAGS.seed).repeat().batch(FLAGS.batch_size)

    def test_input_fn():
        return tf.data.Dataset.from_tensor_slices(test).batch(FLAGS.batch_size)

    def prompts_input_fn():
        prompts = np.stack([encode(prompt) for prompt in FLAGS.prompts])
        return tf.data.Dataset.from_tensors(prompts)

    writer = estimator_mgpu.Estimator(
        model_fn,
        FLAGS.model_dir,
        config=estimator.RunConfig(tf_random_seed=FLAGS.seed),
        params=FLAGS.flag_values_dict(),
        devices=common.devices(),
    )
    progress = estimator_mgpu.ProgressHook(steps=FLAGS.train_steps)
    writer.train(train_input_fn, [progress], steps=FLAGS.train_steps)
    result = writer.evaluate(test_input_fn)

    for prompt, prediction in zip(FLAGS.prompts, writer.predict(prompts_input_fn)):
        print(f'--- {prompt!r} continues:\n{prompt}{decode(prediction["codes"])}')
    print('---')
    print(
        f'{result["bits"]:.3f} bits per character of a held-out text of {test[0].size:,} '
        f'characters; the frequencies of characters alone give {by_frequency:.3f} '
        f'(devices={common.devices()}, {result["global_step"]} steps)'
    )


if __name__ == '__main__':
    app.run(main)
