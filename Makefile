# make quick        set up .venv and run the main job; ends by naming the report
# make test         the test suite, in three processes for two cores (PARALLEL= for one process, or where pytest-xdist is missing);
#                   TORCH=2.14.1 runs fp8core, its contracts and the planted faults on that torch, in an environment of its own
# make test-nightly the slow tests alone: more processes, more compiled cases
# make test-cluster a real Slurm and torchrun of two nodes each on this machine, and what goes wrong on them; root, Debian's
#                   slurm-wlm, munge and iproute2
# make check        format, lint, types, import contracts, weight of each room
# make coverage     line coverage of timing and environment, at least 95 %
# make bench        speed bars (harness overhead)
# make aot          reports/published/studies/kernels.md: every kernel compiled for sm_90 with two Tritons and its machine code read; no GPU needed
# make aot-check    limits of the cast kernels, in that machine code (`make test` holds those of the installed Triton); 21 s
# make gate         numerics, counts and bytes against the committed baseline; ARGS=update after a change that was meant
# make gpu          .ci/gpu on a GPU machine: kernels checked, training steps, casts, sweeps and a loss, in slots of 8.5 minutes;
#                   run it again to continue. ARGS=dry_run=true prints the commands, ARGS=device=cpu rehearses it all here, in some minutes
# make gpu-tests    the tests that need a GPU: 1.5 minutes on an H200 with 16 cores (2026-11-27; some were added since)
# make published    reports/published, docs/evidence.md, docs/compatibility.md and reports/published/studies/plain-casts.md, from results/published;
#                   refuses runs whose code is that of no commit and sentences that leave out what their rows hold;
#                   the page of advice from predictions, some minutes
# make studies      error rates of the gate and of the loss verdict, simulated, into their pages; half an hour; fails where a promise is missed
# make docs         the documentation as a site in build/site, which opens from disk; search wants python -m http.server -d build/site
# make PY=python3 … uses the environment that is already there and installs nothing

PYTHON ?= python3
VENV := $(if $(TORCH),build/torch-$(TORCH),.venv)
ifdef PY
  READY :=
else
  PY := $(VENV)/bin/python
  READY := $(VENV)/.ready
endif
TESTS ?= $(if $(TORCH),tests/fp8core tests/faults tests/contracts)
ARGS ?=
TRITON_36 ?= build/triton-3.6.0
# with PY= mkdocs-material and mkdocstrings are that environment's, of the extra `docs`
DOCS_TOOLS ?= $(if $(READY),build/docs-tools)
# by path, since collecting all of them takes a minute
GPU_TESTS ?= tests/fp8core/test_gpu.py tests/fp8core/test_either_device.py tests/fp8core/test_torch_mm.py tests/fp8core/kernels \
  tests/harness/training/models/test_gpu.py tests/harness/engine/test_either_device.py tests/faults/cheats
PARALLEL ?= -n logical --maxprocesses 8 --dist worksteal


.PHONY: quick test test-near test-map test-nightly test-cluster check format coverage bench aot aot-check docs gate gpu gpu-tests wheels published studies setup clean

quick: $(READY)
	$(PY) -m harness sweep=quick $(ARGS)

test: $(READY)
	$(PY) -m compileall -q fp8core harness
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -m 'not slow and not benchmark_bar and not clients and not cluster' --durations=25 $(PARALLEL) $(ARGS) $(TESTS)

MAP ?= $(CURDIR)-map# which test runs which line: outside of the repository

test-near: $(READY)
	OMP_NUM_THREADS=1 $(PY) reports/studies/mutations.py near --state $(MAP) $(ARGS)

test-map: $(READY)
	$(PY) reports/studies/mutations.py map --state $(MAP) --workers 2 $(ARGS)

test-nightly: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -m 'slow and not benchmark_bar and not clients and not cluster' --durations=25 $(PARALLEL) $(ARGS)

test-cluster: $(READY)
	$(PY) -m pytest -q -n0 -m cluster --durations=0 tests/cluster $(ARGS)

check: $(READY)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -c "from importlinter.cli import lint_imports_command as main; main()"
	$(PY) reports/studies/house.py --weight

format: $(READY)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

# The CUDA path of these modules runs on fake events and a fake NVML; this holds that it all does.
coverage: $(READY)
	$(PY) -m pytest -q tests/harness/timing/test_timing.py tests/harness/timing/test_timers.py tests/harness/machine/test_environment.py \
	  tests/harness/machine/test_gpu_monitor.py --cov=harness.timing.rounds --cov=harness.timing.timers --cov=harness.machine.environment \
	  --cov=harness.machine.gpu_monitor --cov-report=term-missing --cov-fail-under=95

bench: $(READY)
	$(PY) -m pytest -q -m benchmark_bar $(ARGS)

aot: $(READY) $(TRITON_36)
	PYTHONPATH=$(CURDIR):$$PYTHONPATH $(PY) reports/studies/kernel_facts.py $(TRITON_36)

aot-check: $(READY) $(TRITON_36)
	PYTHONPATH=$(TRITON_36) $(PY) -c 'import triton; assert triton.__version__ == "3.6.0", triton.__version__'
	PYTHONPATH=$(TRITON_36) OMP_NUM_THREADS=1 $(PY) -m pytest -q -m 'not slow' $(PARALLEL) tests/fp8core/kernels/test_bars.py

# The Triton that torch 2.11 on the GPU machine brings, beside the installed one; about 200 MB, once.
build/triton-3.6.0: $(READY)
	rm -rf $@ $@.partial
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $@.partial triton==3.6.0
	mv $@.partial $@

docs: $(READY) $(DOCS_TOOLS)
	PYTHONPATH=$(DOCS_TOOLS):$$PYTHONPATH NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build $(ARGS)
	@echo build/site/index.html

# What builds the site, beside the environment, which needs none of it.
build/docs-tools: pyproject.toml constraints.txt | $(READY)
	rm -rf $@ $@.partial
	mkdir -p build
	$(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > build/docs-tools.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt --target $@.partial -r build/docs-tools.txt
	mv $@.partial $@
	touch $@

gate: $(READY)
	PY=$(PY) .ci/gate $(ARGS)

gpu: $(READY)
	$(if $(WHEELS),$(PY) -m pip install -q --no-index --no-deps --upgrade --target build/site $(WHEELS)/*.whl)
	PYTHONPATH=$(if $(WHEELS),build/site:)$$PYTHONPATH PY=$(PY) .ci/gpu $(ARGS)

gpu-tests: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -m gpu --benchmark-disable $(PARALLEL) $(GPU_TESTS) $(ARGS)
	$(PY) -m pytest -q -m gpu tests/harness/timing/test_timers.py

wheels: $(READY)
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps -c constraints.txt -w wheels \
	  hydra-core omegaconf "antlr4-python3-runtime==4.9.*" itables torchao

published: $(READY)
	PYTHONPATH=$(CURDIR):$$PYTHONPATH $(PY) reports/studies/provenance.py
	PYTHONPATH=$(CURDIR):$$PYTHONPATH OMP_NUM_THREADS=1 $(PY) reports/studies/ledger.py
	PYTHONPATH=$(CURDIR):$$PYTHONPATH $(PY) reports/studies/published_page.py results/published reports/published/mfu.html
	PYTHONPATH=$(CURDIR):$$PYTHONPATH $(PY) reports/studies/published_results.py
	OMP_NUM_THREADS=1 $(PY) reports/studies/advice_page.py reports/published/advice.html
	$(PY) reports/studies/advice_map.py reports/published/advice.json
	PYTHONPATH=$(CURDIR):$$PYTHONPATH $(PY) reports/studies/compatibility_page.py results/published > docs/compatibility.md
	PYTHONPATH=$(CURDIR):$$PYTHONPATH $(PY) reports/studies/plain_casts.py results/published reports/published/studies/plain-casts.md

studies: $(READY)
	PYTHONPATH=$(CURDIR):$$PYTHONPATH OMP_NUM_THREADS=1 $(PY) reports/studies/gate_error_rates.py reports/published/studies/gate-error-rates.md; broken=$$?; \
	PYTHONPATH=$(CURDIR):$$PYTHONPATH OMP_NUM_THREADS=1 $(PY) reports/studies/verdict_error_rates.py reports/published/studies/loss-verdict-error-rates.md && exit $$broken

setup: $(READY)

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, this is {v.major}.{v.minor}; name another with make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(VENV)/constraints.txt
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[test,peers,dev]'
	touch $@

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache
