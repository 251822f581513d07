"""Trains a wide and deep model on several devices to predict votes from the answers in a survey.

    python samples/wide_deep.py --devices=2

The model is a canned estimator, which has no model_fn to decorate, so the sample uses
replicate_estimator(). The wide part is a linear model of categories and pairs of categories,
trained by FTRL. The deep part is a network of embeddings and numbers, trained by Adagrad.

The data is the American National Election Study of 1996, which comes with statsmodels: 944
people, their age, income, education, party and views, and whether they would vote for Clinton (0)
or Dole (1). The ROC curve is drawn to roc.png.
"""

from __future__ import annotations

import pathlib

import common
import matplotlib
import tensorflow.compat.v1 as tf
from absl import app, flags
from sklearn import metrics, model_selection
from statsmodels.datasets import anes96

import estimator_mgpu

estimator = estimator_mgpu.estimator  # tf.estimator, also where TensorFlow no longer has it
fc = tf.feature_column

FLAGS = flags.FLAGS

flags.adopt_module_key_flags(common)
flags.DEFINE_integer('batch_size', 64, 'Examples in a global batch.', lower_bound=1)
flags.DEFINE_integer('train_steps', 300, 'Steps to train.', lower_bound=1)

# Each is a number that stands for a category, and how many categories there are.
CATEGORIES = {
    'PID': 7,  # Party, from 0, a strong Democrat, to 6, a strong Republican.
    'selfLR': 8,  # From 1, extremely liberal, to 7, extremely conservative: their own views,
    'ClinLR': 8,  # those that they take for Clinton's,
    'DoleLR': 8,  # and for Dole's.
    'educ': 8,  # From 1, grade school, to 7, a doctorate.
}
# Each is a number as such, and how it's brought near 0 to 1.
NUMBERS = {
    'age': lambda years: years / 100,
    'income': lambda bracket: bracket / 24,
    'TVnews': lambda days: days / 7,  # On how many days of a week they see news on TV.
    'logpopul': lambda log: log / 10,  # Of the inhabitants of their town, in thousands.
}


def feature_columns():
    """Returns the columns of the wide part, and those of the deep part."""
    categories = {
        name: fc.categorical_column_with_identity(name, size) for name, size in CATEGORIES.items()
    }
    numbers = [fc.numeric_column(name, normalizer_fn=scale) for name, scale in NUMBERS.items()]
    ages = fc.bucketized_column(fc.numeric_column('age'), [25, 35, 45, 55, 65])
    crossed = [
        fc.crossed_column(['PID', 'selfLR'], hash_bucket_size=100),
        fc.crossed_column([ages, 'educ'], hash_bucket_size=100),
    ]
    embedded = [fc.embedding_column(column, dimension=4) for column in categories.values()]
    return [*categories.values(), ages, *crossed], [*embedded, *numbers]


def load_voters():
    """Returns features and labels of 755 voters to train on, and of 189 held out."""
    table = anes96.load_pandas().data
    tables = model_selection.train_test_split(
        table, test_size=0.2, stratify=table['vote'], random_state=0
    )
    kinds = {**dict.fromkeys(CATEGORIES, 'int64'), **dict.fromkeys(NUMBERS, 'float32')}
    for part in tables:
        features = {name: part[name].to_numpy(kind) for name, kind in kinds.items()}
        yield features, part['vote'].to_numpy('int32')


def main(argv):
    common.start(argv)
    train, test = load_voters()

    def train_input_fn():
        dataset = tf.data.Dataset.from_tensor_slices(train)
        return dataset.shuffle(len(train[1]), seed=FLAGS.seed).repeat().batch(FLAGS.batch_size)

    def test_input_fn():
        return tf.data.Dataset.from_tensor_slices(test).batch(FLAGS.batch_size)

    wide, deep = feature_columns()
    canned = estimator.DNNLinearCombinedClassifier(
        linear_feature_columns=wide,
        linear_optimizer=tf.train.FtrlOptimizer(0.02, l2_regularization_strength=0.1),
        dnn_feature_columns=deep,
        dnn_optimizer=tf.train.AdagradOptimizer(0.02),
        dnn_hidden_units=[32, 16],
        dnn_dropout=0.2,
        config=estimator.RunConfig(FLAGS.model_dir, tf_random_seed=FLAGS.seed),
    )
    classifier = estimator_mgpu.replicate_estimator(canned, devices=common.devices())
    progress = estimator_mgpu.ProgressHook(steps=FLAGS.train_steps)
    classifier.train(train_input_fn, [progress], steps=FLAGS.train_steps)
    result = classifier.evaluate(test_input_fn)

    said = [prediction['probabilities'][1] for prediction in classifier.predict(test_input_fn)]
    matplotlib.use('Agg')  # Draws to files, without a screen.
    picture = pathlib.Path(classifier.model_dir) / 'roc.png'
    metrics.RocCurveDisplay.from_predictions(test[1], said).figure_.savefig(picture)
    print(f'ROC curve: {picture}')
    chance = max(result['label/mean'], 1 - result['label/mean'])
    print(
        f'accuracy {result["accuracy"]:.4f}, AUC {result["auc"]:.4f} on {len(test[1])} held-out '
        f'voters (devices={common.devices()}, {result["global_step"]} steps; the '
        f'more frequent answer alone is right for {chance:.4f})'
    )


if __name__ == '__main__':
    app.run(main)
