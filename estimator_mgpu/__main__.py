"""`python -m estimator_mgpu`: a report on the environment, to paste into a bug."""

import argparse
import sys

from estimator_mgpu import environment

if __name__ == '__main__':
    usage = argparse.ArgumentParser('python -m estimator_mgpu', description=environment.__doc__)
    usage.epilog = 'Exit status 1 says that something is wrong, and the report what to do about it.'
    usage.parse_args()
    sys.exit(environment.main())
