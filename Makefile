# Needs only make and Python 3.9 or later; everything else is installed into .venv/.
#
#   make digits   trains samples/digits.py on two devices
#   make test     builds the wheel, installs it and tests what is installed
#   make setup    installs what make test needs; make wheel, only the wheel
#   make test-gpu runs the core tests on eight GPUs, or on the parts of one
#   make coverage says which lines and branches of the package the tests run
#   make lint     ruff and mypy
#   make matrix   make test on every supported TensorFlow
#   make docs     the documentation, into site/
#   make dist     the wheel and the source distribution, into dist/
#   make clean    removes all of it

PYTHON ?= python3
# A TensorFlow such as 2.15; by default the newest that this Python can have.
TF ?=
DEVICES ?= 2
# More arguments for pytest, such as ARGS='-k gradients'.
ARGS ?=
# One process for tests more than this machine has cores, as tests of clusters mostly wait.
WORKERS ?= 3

python := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
venv := .venv/python$(python)-tensorflow$(or $(TF),-newest)
pins := $(if $(TF),'tensorflow==$(TF).*' 'tf-keras==$(TF).*')
pip := $(venv)/bin/python -m pip --disable-pip-version-check -q -q
# Python compiles a module when it's first imported, which most never are.
install := $(pip) install --no-compile
# The directory itself stands for the files that are added or removed.
sources := pyproject.toml setup.cfg setup.py $(shell find estimator_mgpu -name '*.py' -o -type d ! -name __pycache__)

# The tests are for the installed copy, whatever the caller's path says.
unexport PYTHONPATH
# TensorFlow is compiled once, rather than in each of the tests' processes: 9 s of CPU to import it, then 4.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: digits wheel setup test test-gpu coverage lint matrix docs dist clean
.DELETE_ON_ERROR:

digits: $(venv)/samples.stamp
	$(venv)/bin/python samples/digits.py --devices=$(DEVICES)

# From within the environment, so that nothing finds estimator_mgpu/ in the current directory.
test: $(venv)/test.stamp
	cd $(venv) && bin/pytest -q -n $(WORKERS) --dist worksteal $(ARGS) $(CURDIR)/tests

setup: $(venv)/test.stamp

wheel: $(venv)/wheel.stamp

# Beside the CPU-only TensorFlow, CUDA's own libraries: another 4 GB. Messages are counted on CPUs.
test-gpu: $(venv)/test.stamp
	$(install) 'tensorflow[and-cuda]' $(pins)
	cd $(venv) && bin/pytest -q -m core -k 'not messages_of' --gpus=8 $(ARGS) $(CURDIR)/tests

# This takes one and a half times as long as the tests, so not every change has to pass it. It also counts
# lines that only other processes run: tasks of several machines, and programs whose imports are tested.
coverage:
	$(MAKE) test ARGS='--cov --cov-config=$(CURDIR)/pyproject.toml --cov-report=term-missing:skip-covered \
	  --cov-fail-under=98 $(ARGS)'

lint: $(venv)/test.stamp
	$(venv)/bin/ruff check .
	$(venv)/bin/ruff format --check .
	$(venv)/bin/mypy

matrix:
	.ci/matrix

docs: $(venv)/docs.stamp
	$(venv)/bin/mkdocs build --strict

dist: $(venv)/dist.stamp
	rm -rf build dist
	$(venv)/bin/python -m build
	$(venv)/bin/python -m twine check --strict dist/*
	rm -rf build *.egg-info

clean:
	rm -rf .venv build dist site *.egg-info

# A wheel of the same version replaces the one that is installed only by force. What it requires,
# and an extra's requirements, are then looked up, and installed only where they are missing.
$(venv)/%.stamp: $(venv)/wheel.stamp
	$(install) "$$(ls $(venv)/dist/*.whl)[$*]" $(pins)
	touch $@

$(venv)/wheel.stamp: $(venv)/bin/pip $(sources)
	rm -rf build $(venv)/dist
	$(pip) wheel --no-deps --wheel-dir $(venv)/dist .
	rm -rf build *.egg-info
	$(install) --no-deps --force-reinstall $(venv)/dist/*.whl
	touch $@

$(venv)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 9) and "Set PYTHON to a Python of \
	3.9 or later, such as python3.12.")'
	@echo 'Setting up $(venv): 3 GB, some minutes.'
	$(PYTHON) -m venv $(venv)
	$(install) --upgrade pip
