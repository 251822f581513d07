"""Models drawn at random: several devices train, evaluate and predict as one.

A long run, of other models each time: pytest tests/test_random_models.py --hypothesis-profile=long
"""

import hypothesis

from random_models import batches_of, cases, model_fn_of, preprocess
from towers import behavior_of, compare_modes


@hypothesis.given(cases)
def test_as_on_one_device(case):
    # All is computed in float64, except what tf.losses and Keras' losses compute.
    exact = all(isinstance(loss, str) and 'keras' not in loss for loss in case.losses)
    with behavior_of('v2' if case.v2 else 'v1'):
        compare_modes(
            model_fn_of(case),
            lambda: batches_of(case),
            case.towers,
            rtol=1e-9 if exact else 1e-5,
            static=case.static,
            preprocess=preprocess,
        )
