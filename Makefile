# PYTHONSAFEPATH keeps the repository root off sys.path: the folder kernels/ must not shadow an installed package.
export PYTHONSAFEPATH := 1
# Tests start hundreds of processes: each would compile every source it imports, torch's too, were the results not kept.
unexport PYTHONDONTWRITEBYTECODE
BASE_PYTHON ?= python3
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# Tests run in as many processes as there are processors, each with one thread of its own; neighbours stay together.
PARALLEL := -n logical --maxprocesses 8 --dist worksteal

.PHONY: demo test check lint format types test-gpu test-plain-cpu test-all explore mutants learned-costs bench-solvers wheel kernels kernels-check sanitize docs docs-serve docs-check clean

$(STAMP): pyproject.toml setup.py constraints.txt
	$(BASE_PYTHON) -m venv $(VENV)
	$(PYTHON) -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $(STAMP)

demo: $(STAMP) ## train a small GPT on two workers under a plan, and show every step
	$(VENV)/bin/qsync-opt demo

# Compiled first, so that no test waits for it.
LOOPS := $(PYTHON) -P -c "from qsync_opt.formulations.assignment import prepare; prepare()"

test test-all test-plain-cpu explore docs-check: export OMP_NUM_THREADS := 1

test: $(STAMP) ## the CPU tests that a developer runs
	$(LOOPS)
	$(PYTHON) -m pytest -q $(PARALLEL) -m "not gpu and not slow" --ignore=tests/docs

test-all: $(STAMP) docs-check ## the rest: slow tests, and those of the documentation
	$(LOOPS)
	$(PYTHON) -m pytest -q $(PARALLEL) -m "slow and not gpu" --ignore=tests/docs

# Without the processor's 16-bit, 8-bit and 512-bit instructions, as on most laptops and many cloud machines.
test-plain-cpu: export ATEN_CPU_CAPABILITY := avx2
test-plain-cpu: export ONEDNN_MAX_CPU_ISA := AVX2
# Neither nvcc nor which blocks share code depends on them.
test-plain-cpu: $(STAMP) ## kernels, execution, profiles and demo as on a processor with AVX2 alone
	$(PYTHON) -m pytest -q $(PARALLEL) -m "not gpu and not slow" tests/kernels tests/runtimes/torch/execution \
		tests/runtimes/torch/profiling tests/runtimes/torch/demo \
		--ignore=tests/kernels/compilation --ignore=tests/runtimes/torch/execution/test_compiled_blocks.py

explore: $(STAMP) ## property tests on examples that no run has tried, for about two minutes; prints the seeds
	$(LOOPS)
	$(PYTHON) -P tests/property/explore.py --seconds 110 -- $(PARALLEL)

mutants: $(STAMP) ## small wrong changes to the modules that compute: whether the tests notice; an hour
	$(PYTHON) benchmarks/mutants.py

learned-costs: $(STAMP) ## fit the model of learned costs that comes with the package to the records
	$(VENV)/bin/qsync-opt costs fit $(sort $(wildcard benchmarks/records/costs-*.json.gz)) \
		--output qsync_opt/costs/learned/laws.npz

test-gpu: $(STAMP)
	$(PYTHON) -m pytest -q -m gpu

check: lint types test ## the one command before a commit

lint: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/codespell

format: $(STAMP)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

types: $(STAMP)
	$(VENV)/bin/mypy

# The theme prints an advertisement for its successor unless it is told not to.
docs docs-serve: export NO_MKDOCS_2_WARNING := 1

docs: $(STAMP) ## the documentation site in site/; a warning is an error
	$(PYTHON) -m mkdocs build --strict

docs-serve: $(STAMP) ## the same, served at http://127.0.0.1:8000 and rebuilt on change
	$(PYTHON) -m mkdocs serve

# One process more than processors: a page waits for its commands, and the longest ones are begun last.
docs-check: $(STAMP) ## the built site, and every code block of the documentation
	$(PYTHON) -m pytest -q -n $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --maxprocesses 8 --dist worksteal tests/docs

bench-solvers: $(STAMP) ## how near, sure and fast the solvers are; half an hour on two cores that are otherwise idle
	$(PYTHON) benchmarks/solvers.py --cores 0,1

kernels: $(STAMP) ## compile the CUDA kernels for every target
	$(PYTHON) -m qsync_opt.kernels.compilation

kernels-check: $(STAMP) ## that they compile for every target, as quickly as the compiler can; keeps nothing
	$(PYTHON) -m qsync_opt.kernels.compilation --check

sanitize: $(STAMP) ## on a CUDA card: memory checks and race checks of the CUDA kernels
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 $(PYTHON) tests/gpu/sanitizer_cases.py
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck --error-exitcode 1 $(PYTHON) tests/gpu/sanitizer_cases.py

wheel: $(STAMP)
	$(PYTHON) tests/packaging/check_wheel.py

clean:
	rm -rf build dist site *.egg-info demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis
