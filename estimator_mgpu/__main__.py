"""`python -m estimator_mgpu`: a report on the environment, to paste into a bug."""

import sys

from estimator_mgpu import environment

if __name__ == '__main__':
    sys.exit(environment.main())
