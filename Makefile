# Everything here works from a fresh clone with python3 >= 3.10 (with its venv module), GPU or not: the first target
# that needs it makes the environment in .venv and installs gemmkit there.
#
#   make demo                          the examples, on real data; in the emulator where there is no GPU
#   make test [PYTEST_ARGS=...]        tests that need no GPU: of those with many cases, a sample (5 to 10
#                                      minutes on two cores)
#   make test-all [PYTEST_ARGS=...]    all of them, and all that is drawn: edited programs, programs, expressions, bad calls,
#                                      seeded faults, compiled kernels (hours on two cores)
#   make test-gpu [PYTEST_ARGS=...]    the tests that need one (ten minutes on 16 cores, for compiling)
#   make test-gpu-smoke                a sample of these, before each landing (minutes)
#   make sanitize                      a sample of kernels under compute-sanitizer (GPU)
#   make gate                          registers, spills and instructions of some fifty kernels are those of
#                                      tools/sass_gate/stored.json (minutes, no GPU)
#   make bench [BENCH_ARGS=...]        every measurement, on a GPU, into bench/results (an hour and more)
#   make wheel                         wheel and source distribution into dist/, checked and tried; nothing is published
#   make docs                          the site, into site/, in an environment of its own (.venv-docs)
#   make lint, make venv, make clean
#
#   make test PYTHON=python3.12        makes the environment with another Python
#   make test VENV=path                another environment: made when it is not there; one that somebody else made is
#                                      used as it is, and nothing is installed into it
#   make venv CUDA=12                  the CUDA release of the toolkit wheels (default: what the driver speaks, or 13)

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=

# A driver for CUDA 12 does not load what CUDA 13 compiles. The wheels of 13 compile without any driver.
CUDA ?= $(shell nvidia-smi 2>/dev/null | grep -q 'CUDA Version: 12\.' && echo 12 || echo 13)
CONSTRAINTS := $(if $(filter 12,$(CUDA)),constraints-common.txt,constraints.txt)

PY := $(VENV)/bin/python
STAMP := $(VENV)/.gemmkit-installed-cu$(CUDA)
LINT_STAMP := $(VENV)/.gemmkit-installed-lint

# .venv is ours. So is another environment that is not there yet, or that has the mark of one made here.
ifneq ($(VENV),.venv)
ifneq ($(wildcard $(VENV)/bin/python),)
ifeq ($(wildcard $(VENV)/.gemmkit-made),)
FOREIGN := yes
endif
endif
endif
READY := $(if $(FOREIGN),,$(STAMP))
LINT_READY := $(if $(FOREIGN),,$(LINT_STAMP))

# Some images of Python set it. Each worker of pytest would then compile all of the sources and rewrite all assertions anew (7 s
# of 13 before the first test), and each process that a test starts would read gemmkit's sources.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all test-gpu test-gpu-smoke sanitize gate lint bench docs wheel venv clean
.DEFAULT_GOAL := help

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

demo: $(READY)
	$(PY) -m gemmkit demo

test: $(READY)
	$(PY) -m pytest -q -m "not gpu" -n 2 --dist worksteal --sample $(PYTEST_ARGS)

test-all: $(READY)
	$(PY) -m pytest -q -m "not gpu" -n 2 $(PYTEST_ARGS)
	$(PY) -m tests.stale.run --edits 1000 --seed 1
	GEMMKIT_DRAWN_EXPRESSIONS=5000 $(PY) -m pytest -q -m "not gpu" -n 2 tests/lang/test_drawn_expressions.py
	$(PY) -m tests.bad_calls --count 10000 --seed 11 --jobs 2
	$(PY) -m tests.resolved_calls --count 20000 --seed 1 --jobs 2
	$(PY) -m tests.drawn_programs --count 1000 --seed 1 --jobs 2
	$(PY) -m tests.mutation
	$(PY) -m tests.ptx_machine --cases 60 --seed 1 --jobs 2

test-gpu: $(READY)
	$(PY) -m pytest -q -m gpu -n 14 $(PYTEST_ARGS)

test-gpu-smoke: $(READY)
	$(PY) -m pytest -q -m gpu -n 16 --dist worksteal --sample $(PYTEST_ARGS)

sanitize: $(READY)
	compute-sanitizer --report-api-errors no --tool memcheck --error-exitcode 9 $(PY) -m bench.sanitized
	compute-sanitizer --report-api-errors no --tool racecheck --error-exitcode 9 $(PY) -m bench.sanitized

gate: $(READY)
	$(PY) -m tools.sass_gate check

lint: $(LINT_READY)
	$(PY) -m ruff check .
	$(PY) -m mypy

wheel:
	$(PYTHON) -m tools.wheel --out dist

docs: .venv-docs/.made
	.venv-docs/bin/python -m mkdocs build --strict --quiet
	@echo "site/index.html"

.venv-docs/.made: requirements-docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install -q --disable-pip-version-check -r requirements-docs.txt
	@touch $@

bench: $(READY)
	$(PY) -m bench.all $(BENCH_ARGS)

venv: $(READY)

$(VENV)/.gemmkit-made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "gemmkit needs Python >= 3.10; '$(PYTHON)' is not that (or not there)." \
	         "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "'$(PYTHON)' cannot make an environment: its venv or ensurepip module is missing." \
	         "Install it (Debian, Ubuntu: apt install python3-venv), name another Python (make PYTHON=...)," \
	         "or name an environment that has gemmkit's dependencies (make VENV=path ...)." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(STAMP): pyproject.toml constraints.txt constraints-common.txt | $(VENV)/.gemmkit-made
	@echo "Installing gemmkit and the CUDA $(CUDA) toolkit wheels into $(VENV) (once; a few minutes)"
	$(PY) -m pip install -q --disable-pip-version-check -e ".[cu$(CUDA),test]" -c $(CONSTRAINTS)
	@touch $@

$(LINT_STAMP): $(STAMP)
	$(PY) -m pip install -q --disable-pip-version-check -e ".[lint]" -c $(CONSTRAINTS)
	@touch $@

clean:
	rm -rf .venv .venv-docs site build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
