# Everything here installs what it needs into a virtual environment inside the checkout; `make help` lists the targets.
# To use another interpreter or environment: make test PYTHON=python3.12 VENV=.venv-3.12

PYTHON ?= python3
VENV ?= .venv
PYTEST ?= $(VENV)/bin/pytest
# Further options of the command in `make run`: make run RUN_FLAGS='--wait all --steps 1000'
RUN_FLAGS ?=

OLDEST_PYTHON = 3.10
NEWER_PYTHONS = 3.12 3.13
# PyTorch comes first, and pinned, so that a machine can provide a build without CUDA, a tenth of the size.
TORCH ?= torch==2.13.0
# The oldest NumPy that pyproject.toml allows, and the newest there is.
OLDEST_NUMPY = numpy==1.23.5
NEWEST_NUMPY = numpy

# Twice quiet: only errors are shown. pip is brought up to date first: that of Python 3.10 (23.0) does not find versions
# that fit the oldest NumPy within ten minutes, a new one does within half a minute.
PIP_FLAGS = --quiet --quiet --disable-pip-version-check

# A virtual environment is made anew for another interpreter only by `make clean`; what is in it is brought up to date
# when pyproject.toml changes. Each stamp says: these extras are installed.
RUN_STAMP = $(VENV)/.installed-run
DEV_STAMP = $(VENV)/.installed-dev
BENCH_STAMP = $(VENV)/.installed-bench

# What `make bench` compares with: nothing, unless peers are named, of gymnasium sb3 tianshou pufferlib torchrl rllib ray
# envpool. All but gymnasium have a virtual environment of their own, since they ask for different versions of the same
# libraries. One that cannot be installed here is left out.
# make bench BENCH_PEERS="gymnasium sb3" BENCH_FLAGS="--seconds 5" BENCH_OUT=out/b
BENCH_PEERS ?=
BENCH_INSTALLED = $(filter-out gymnasium,$(BENCH_PEERS))
BENCH_FLAGS ?=
BENCH_OUT ?= out/bench
BENCH_ENVS = 'gymnasium>=1.0' 'ale-py>=0.10' 'opencv-python-headless>=4.6'
BENCH_sb3 = stable-baselines3
BENCH_tianshou = tianshou
BENCH_pufferlib = pufferlib-core
BENCH_torchrl = torchrl
BENCH_rllib = 'ray[rllib]'
BENCH_ray = 'ray>=2.40' attrs cattrs cloudpickle
BENCH_envpool = envpool
# Those that need PyTorch. Not PufferLib, which pins one itself, nor EnvPool, which needs none.
TORCH_PEERS = sb3 tianshou torchrl rllib

# What tests need everywhere; the extra `test` has what some compare with, too.
TEST_TOOLS = 'pytest>=8' 'pytest-mock>=3.12' 'pytest-timeout>=2.3' 'pytest-xdist>=3.5' 'hypothesis>=6.90' 'psutil>=5.9'

# What OpenEnv's servers need. OpenEnv itself is installed without what it asks for (Gradio, the hub, …), which only its pages
# and its command need. GEM pins older versions of what it needs for some of its environments.
OPENENV = fastapi uvicorn fastmcp httpx textarena reasoning-gym
OPENENV_ALONE = 'openenv>=0.10' gem-llm

# ML-Agents asks for Python 3.10 and for older libraries than this one does. It works with these, and without those that it
# does not need for training (gym, PettingZoo, huggingface-hub).
MLAGENTS = mlagents==1.1.0 mlagents_envs==1.1.0
MLAGENTS_NEEDS = 'numpy==1.23.5' 'protobuf==3.20.3' 'setuptools<81' grpcio h5py 'onnx==1.15.0' Pillow PyYAML tensorboard
MLAGENTS_PYTHON ?= $(shell for candidate in python3.11 "$$HOME"/.pyenv/versions/3.11.*/bin/python3.11; do \
    if "$$candidate" -c pass 2>/dev/null; then echo "$$candidate"; break; fi; done)

# Each folder of tests names its suites, or a file where others of its folder belong elsewhere; see envmanager_tests/suites.py.
# `make test` runs the first, and loads no PyTorch and starts no engine.
SUITE ?= core
OTHER_SUITES = bench cli docs godot many recording start-methods systems training vectors waiting

# Every command and worker that a test starts imports the package: from bytecode, even if the shell forbids to write any.
export PYTHONDONTWRITEBYTECODE =

# On a machine with nothing else to do: how late, in seconds, a call may come back, and a process be gone. Elsewhere ten
# times that.
STRICT = ENVMANAGER_SLACK_S=2

.DEFAULT_GOAL = help
.PHONY: help run test test-all $(OTHER_SUITES:%=test-%) test-portable faults check docs soak bench bench-agents bench-fleets bench-godot bench-kept bench-killed bench-vectors bench-waiting coverage \
    ray godot addon godot4 test-ray test-envpool test-openenv test-mlagents test-wine test-wine-contracts test-matrix clean
.DELETE_ON_ERROR:

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1|/' | awk -F'|' '{printf "make %-18s %s\n", $$1, $$2}'

run: $(RUN_STAMP) ## run eight uneven simulators: one is slow, one crashes, the run goes on
	@echo "Eight simulators: worker 5 is slow (100 ms a step, the others about 4 ms), and"
	@echo "worker 2 crashes every few seconds. It is replaced alone; the others go on."
	@echo "This takes 15 seconds; Ctrl-C ends it."
	@echo
	@cd docs/examples && $(abspath $(VENV))/bin/envmanager run uneven_simulators.toml $(RUN_FLAGS)
	@echo
	@echo "The code is in docs/examples/uneven_simulators.py. Waiting for all eight in each"
	@echo "step, as most libraries do, is about twenty times as slow:"
	@echo "    make run RUN_FLAGS='--wait all --steps 1000'"

# Five at once on two cores: a good part of the tests waits for something.
SIDE_BY_SIDE = $(PYTEST) -n 5 --dist worksteal

test: $(DEV_STAMP) ## run the tests of a suite: those of every change, or another: make test SUITE=training
	$(SIDE_BY_SIDE) $(SUITE:%=--suite=%)

test-all: $(DEV_STAMP) ## run the tests of all suites in one go, as before a merge
	$(SIDE_BY_SIDE) --suite=core $(OTHER_SUITES:%=--suite=%)

$(OTHER_SUITES:%=test-%): test-%: $(DEV_STAMP)
	$(SIDE_BY_SIDE) --suite=$*

test-portable: $(DEV_STAMP) ## run the tests of worker processes over the portable transport
	ENVMANAGER_TRANSPORT=portable $(SIDE_BY_SIDE) --suite=portable

faults: $(DEV_STAMP) ## run everything about faults and mix-ups, under every start method
	$(STRICT) $(PYTEST) -n 3 --dist worksteal --suite=faults

check: $(DEV_STAMP) ## format, lint, types, architecture, how much there is to read, and that the scripts for Godot 3 are up to date
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy
	$(PYTEST) -q --suite=check envmanager_tests/architecture
	$(VENV)/bin/python tools/house.py
	$(VENV)/bin/python tools/addon3.py --check

docs: $(DEV_STAMP) ## build the documentation into site/, and run the code and the commands of its pages
	$(SIDE_BY_SIDE) --suite=docs

soak: $(DEV_STAMP) ## run the long tests and measurements, one after the other
	$(STRICT) $(PYTEST) -m load -rP

bench: $(BENCH_STAMP) $(BENCH_INSTALLED:%=.venv-bench-%/.tried) ## measure, beside the libraries in BENCH_PEERS; results in out/bench
	mkdir -p $(BENCH_OUT)
	pythons=""; for peer in $(BENCH_INSTALLED); do \
	    if [ -e .venv-bench-$$peer/.installed ]; then pythons="$$pythons --python $$peer=.venv-bench-$$peer/bin/python"; fi; \
	done; \
	$(VENV)/bin/python -m benchmarks --contenders "ours $(BENCH_PEERS:%=,%)" $$pythons --out $(BENCH_OUT)/bench.json --plot $(BENCH_OUT) $(BENCH_FLAGS)

# make bench-agents AGENTS_FLAGS="groups"
AGENTS_FLAGS ?= groups

bench-agents: .venv-openenv/.installed ## measure hung steps, lost rollouts, full servers, and sessions whose processes are killed
	.venv-openenv/bin/python -W ignore -m benchmarks.agents $(AGENTS_FLAGS)

# The plugin of the peer is kept outside of the checkout, at the commit that the tool names.
GODOT_RL_PLUGIN ?= $(HOME)/.cache/envmanager/godot_rl_agents_plugin
GODOT_WORKLOADS = godot,godot-4,godot-8,godot-uneven,godot-start

bench-godot: $(BENCH_STAMP) .venv-bench-godot_rl/.tried ## measure Godot engines beside godot_rl_agents; results in out/bench-godot
	tools/get_godot_rl_plugin.sh $(GODOT_RL_PLUGIN) || echo "the plugin of godot_rl_agents cannot be fetched here: it is left out" >&2
	mkdir -p out/bench-godot
	python=""; \
	if [ -e .venv-bench-godot_rl/.installed ]; then python="--python godot_rl=.venv-bench-godot_rl/bin/python"; fi; \
	ENVMANAGER_BENCH_GODOT_RL=$(GODOT_RL_PLUGIN) $(VENV)/bin/python -m benchmarks --contenders ours,godot_rl $$python --rounds 3 --seconds 0.6 \
	    --workload $(GODOT_WORKLOADS) --out out/bench-godot/bench.json $(BENCH_FLAGS)
	$(VENV)/bin/python -m benchmarks.godot_tables out/bench-godot/bench.json | tee out/bench-godot/tables.md

# make bench-kept KEPT_FLAGS="rows --only CartPole Hopper --rows 100000"
KEPT_FLAGS ?= rows

bench-kept: $(DEV_STAMP) ## compare runs in which workers are killed with the same runs without; LunarLander needs gymnasium[box2d]
	$(VENV)/bin/python -W ignore -m benchmarks.kept $(KEPT_FLAGS)

# make bench-killed KILLED_FLAGS="matrix --only ppo 'rounds, 4' --kills 20"
KILLED_FLAGS ?= matrix

bench-killed: $(DEV_STAMP) ## kill trainings at random moments, and compare their weights with those of the same trainings without kills
	$(VENV)/bin/python -W ignore -m benchmarks.killed $(KILLED_FLAGS)

# make bench-fleets FLEETS_FLAGS="leak --steps 20000"; the parts cluster and ppo need Ray
FLEETS_FLAGS ?= starts

bench-fleets: $(DEV_STAMP) ## measure workers that leak or start all at once, and with the environment of test-ray clusters that change
	python=$(VENV)/bin/python; case "$(FLEETS_FLAGS)" in cluster*|ppo*) $(MAKE) .venv-ray/.installed; python=.venv-ray/bin/python;; esac; \
	$$python -W ignore -m benchmarks.fleets $(FLEETS_FLAGS)

bench-vectors: .venv-envpool/.installed ## measure what a manager adds to vector environments
	.venv-envpool/bin/python -m benchmarks.vectors

# make bench-waiting WAITING_FLAGS="--only sleepers --seconds 20"
WAITING_FLAGS ?=

bench-waiting: .venv-openenv/.installed .venv-bench-torchrl/.tried ## measure thousands of environments that wait, beside threads, TorchRL and bare asyncio
	torchrl=""; if [ -e .venv-bench-torchrl/.installed ]; then torchrl="--torchrl .venv-bench-torchrl/bin/python"; fi; \
	.venv-openenv/bin/python -m benchmarks.waiting $$torchrl $(WAITING_FLAGS)

coverage: $(DEV_STAMP) ## run the tests and measure what they cover, worker processes included
	$(VENV)/bin/coverage erase
	$(VENV)/bin/coverage run -m pytest -n 2 -m "not load and not untraced"
	-$(VENV)/bin/coverage combine --quiet # a worker that was killed leaves half a data file, which it complains of
	$(VENV)/bin/coverage report --fail-under=95

ray: .venv-ray/.installed ## run CartPoles in actors of a Ray cluster on this machine
	.venv-ray/bin/envmanager run --env CartPole-v1 --n-envs 32 --manager ray --n-workers 2 --steps 20000

godot: $(RUN_STAMP) ## play a demo game in two engines of Godot; brings godot3-server where there is no engine
	tools/have_godot.sh
	$(VENV)/bin/envmanager run --env demo:rolling_ball --manager godot --n-envs 8 --n-workers 2 --steps 4000

addon: $(RUN_STAMP) ## pack the addon for Godot 4 and for Godot 3, for the Asset Library; the zips are in dist
	$(VENV)/bin/python tools/make_addon.py dist

godot4: .godot4/godot4 ## bring Godot 4 from Debian sid into .godot4
	@echo "Godot 4 is here. Use it: export ENVMANAGER_GODOT=$(abspath .godot4/godot4)"

.godot4/godot4:
	tools/get_godot4.sh .godot4

test-ray: .venv-ray/.installed ## run the tests of managers on a Ray cluster, of three nodes on this machine
	.venv-ray/bin/pytest --suite=ray

test-envpool: .venv-envpool/.installed ## run the tests of EnvPool's pools, and of vectors written in JAX
	.venv-envpool/bin/pytest -n 2 --suite=envpool

test-openenv: .venv-openenv/.installed ## run the tests of environments of texts: sessions on OpenEnv servers, TextArena, …
	.venv-openenv/bin/pytest -n 2 --suite=openenv

test-mlagents: .venv-mlagents/.installed ## run the tests of the bridge to ML-Agents, which train with its own trainers
	.venv-mlagents/bin/pytest -n 2 --suite=mlagents

# A Windows Python under Wine, kept outside of the checkout. It finds missing names, and mistakes with files, sockets and
# handles; it is no judge of speed.
WINE_PYTHON ?= $(HOME)/.cache/envmanager/wine-python

test-wine: | $(VENV)/bin/python ## run the first steps on Windows' Python under Wine, which is set up outside of the checkout
	PYTHON=$(VENV)/bin/python tools/get_wine_python.sh $(WINE_PYTHON)
	PYTHONPATH=Z:$(CURDIR) timeout --kill-after=10 900 $(WINE_PYTHON)/python -m envmanager_tests.first_steps

test-wine-contracts: | $(VENV)/bin/python ## run the contracts of managers and of faults over workers under Wine, for half an hour
	PYTHON=$(VENV)/bin/python tools/get_wine_python.sh $(WINE_PYTHON)
	PYTHONPATH=Z:$(CURDIR) ENVMANAGER_TRANSPORT=portable $(WINE_PYTHON)/python -m pytest -p no:cacheprovider --timeout 120 -rs \
	    -W ignore::DeprecationWarning -k "TestSeveralEnvsPerWorker or TestForkserver" envmanager_tests/contract/test_managers.py \
	    envmanager_tests/faults/test_fault_contract.py

test-matrix: $(addprefix test-,$(OLDEST_PYTHON) $(NEWER_PYTHONS)) ## all tests but soaks, on other Pythons, oldest and newest NumPy

clean: ## remove virtual environments and whatever was built
	rm -rf .venv .venv-*/ .godot4 build dist site out .coverage .coverage.* .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
	    { echo "envmanager needs Python 3.10 or newer; '$(PYTHON)' is not. Try: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "Making a virtual environment in $(VENV), once."
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install $(PIP_FLAGS) --upgrade pip

$(RUN_STAMP): pyproject.toml | $(VENV)/bin/python
	@echo "Installing envmanager and Gymnasium into it: 10 to 60 seconds."
	@$(VENV)/bin/python -m pip install $(PIP_FLAGS) --editable '.[gymnasium,cli]'
	@touch $@

$(DEV_STAMP): pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) $(TORCH)
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --editable '.[dev]'
	@touch $@ $(RUN_STAMP)

$(BENCH_STAMP): pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --editable '.[bench]'
	@touch $@ $(RUN_STAMP)

.venv-bench-%/.tried:
	$(PYTHON) -m venv .venv-bench-$*
	.venv-bench-$*/bin/python -m pip install $(PIP_FLAGS) --upgrade pip
	if $(if $(filter $*,$(TORCH_PEERS)),.venv-bench-$*/bin/python -m pip install $(PIP_FLAGS) $(TORCH) &&) \
	    .venv-bench-$*/bin/python -m pip install $(PIP_FLAGS) $(BENCH_ENVS) $(BENCH_$*); \
	then touch .venv-bench-$*/.installed; else echo "$* cannot be installed here and is left out" >&2; fi
	@touch $@

# Ray brings many libraries, in versions of its own choice.
.venv-ray/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install $(PIP_FLAGS) --upgrade pip
	.venv-ray/bin/python -m pip install $(PIP_FLAGS) $(TORCH)
	.venv-ray/bin/python -m pip install $(PIP_FLAGS) --editable '.[dev,ray]'
	@touch $@

# EnvPool brings the assets of all its environments, most of a gigabyte.
.venv-envpool/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-envpool
	.venv-envpool/bin/python -m pip install $(PIP_FLAGS) --upgrade pip
	.venv-envpool/bin/python -m pip install $(PIP_FLAGS) --editable '.[gymnasium,atari,dm-env,envpool]' $(TEST_TOOLS) jax
	@touch $@

.venv-openenv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-openenv
	.venv-openenv/bin/python -m pip install $(PIP_FLAGS) --upgrade pip
	.venv-openenv/bin/python -m pip install $(PIP_FLAGS) --editable '.[gymnasium,cli,openenv,mcp]' $(TEST_TOOLS) $(OPENENV)
	.venv-openenv/bin/python -m pip install $(PIP_FLAGS) --no-deps --ignore-requires-python $(OPENENV_ALONE)
	@touch $@

# It asks for much that its connection does not need (SB3, ONNX, TensorBoard, the hub).
.venv-bench-godot_rl/.tried:
	$(PYTHON) -m venv .venv-bench-godot_rl
	.venv-bench-godot_rl/bin/python -m pip install $(PIP_FLAGS) --upgrade pip
	if .venv-bench-godot_rl/bin/python -m pip install $(PIP_FLAGS) numpy 'gymnasium==1.0.0' && \
	    .venv-bench-godot_rl/bin/python -m pip install $(PIP_FLAGS) --no-deps godot-rl==0.8.2; \
	then touch .venv-bench-godot_rl/.installed; else echo "godot_rl cannot be installed here and is left out" >&2; fi
	@touch $@

.venv-mlagents/.installed: pyproject.toml
	@test -n "$(MLAGENTS_PYTHON)" || { echo "make test-mlagents needs Python 3.11: pyenv install 3.11" >&2; exit 1; }
	$(MLAGENTS_PYTHON) -m venv .venv-mlagents
	.venv-mlagents/bin/python -m pip install $(PIP_FLAGS) --upgrade pip
	.venv-mlagents/bin/python -m pip install $(PIP_FLAGS) $(TORCH)
	.venv-mlagents/bin/python -m pip install $(PIP_FLAGS) --editable . $(MLAGENTS_NEEDS) $(TEST_TOOLS)
	.venv-mlagents/bin/python -m pip install $(PIP_FLAGS) --no-deps --ignore-requires-python $(MLAGENTS)
	@touch $@

# A pyenv shim exists for interpreters that it then refuses to start, so each candidate is tried.
define test_on
.PHONY: test-$(1)
test-$(1): .venv-$(1)/.installed-test
	.venv-$(1)/bin/pytest -n 5 --dist worksteal -m "not load"

.venv-$(1)/.installed-test: pyproject.toml
	@found=""; \
	for candidate in python$(1) "$$$$HOME"/.pyenv/versions/$(1).*/bin/python$(1); do \
	    if [ -z "$$$$found" ] && "$$$$candidate" -c pass 2>/dev/null; then found="$$$$candidate"; fi; \
	done; \
	if [ -z "$$$$found" ]; then \
	    echo "python$(1) is neither on PATH nor among pyenv's versions. Install it: pyenv install $(1)" >&2; exit 1; \
	fi; \
	"$$$$found" -m venv .venv-$(1)
	.venv-$(1)/bin/python -m pip install $(PIP_FLAGS) --upgrade pip
	.venv-$(1)/bin/python -m pip install $(PIP_FLAGS) --editable '.[environments,cli,tensorboard,test]' '$(2)'
	@touch $$@
endef
$(eval $(call test_on,$(OLDEST_PYTHON),$(OLDEST_NUMPY)))
$(foreach python,$(NEWER_PYTHONS),$(eval $(call test_on,$(python),$(NEWEST_NUMPY))))
