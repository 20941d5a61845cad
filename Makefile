# `make train` and `make test` need Python 3.11 or newer and nothing else: they make their own virtual environment.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: train test test-quick test-slow test-oldest chaos asan-native check docs wheels bare image bench clean

train: $(VENV)/.installed ## train the default recipe on a simulated 2x2 torus
	$(BIN)/podscale train digits --pod.virtual 2x2 --plan.summation torus

# A file's tests stay in one process, so that what they share is made once. Files run in the order of tests/conftest.py.
PYTEST := $(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder --durations=20
UNIT := tests --ignore=tests/integration --ignore=tests/faults

test-quick: $(VENV)/.installed-dev ## the unit tests, in two minutes
	$(PYTEST) $(UNIT) --quick

test: $(VENV)/.installed-dev ## the tests
	$(PYTEST)

test-slow: $(VENV)/.installed-dev ## all tests, also those that take minutes
	PODSCALE_TEST_XLA=newer $(PYTEST) -m "slow or not slow"

OLDEST := build/oldest/bin

test-oldest: ## the unit tests with the oldest versions that pyproject.toml allows
	$(PYTHON) -m venv build/oldest
	$(OLDEST)/python -m pip install --quiet uv
	$(OLDEST)/uv pip install --quiet --python $(OLDEST)/python --resolution lowest-direct --editable '.[dev]'
	$(OLDEST)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder $(UNIT) --quick

SECONDS ?= 600
SEED ?= 0

chaos: $(VENV)/.installed-dev ## a slice of the randomized fault campaign: make chaos SECONDS=600 SEED=1 [STORE=--bucket]
	$(BIN)/python tests/faults/chaos.py --seconds $(SECONDS) --seed $(SEED) $(STORE)

asan-native: $(VENV)/.installed-dev ## the native decoder under sanitizers, on 10,000 damaged JPEGs
	$(BIN)/python tests/faults/native_asan.py

check: $(VENV)/.installed-dev ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.installed-dev ## the documentation as a site, in build/site
	$(BIN)/mkdocs build --strict --site-dir build/site

wheels: ## the source archive and wheels for Linux in dist, twice: the same bytes
	$(PYTHON) packaging/build_wheels.py --out dist --twice

bare: ## install the wheel into a bare system and train there (needs root and debootstrap)
	packaging/bare_system.sh dist

STAGE ?= cpu

image: ## a container image on a base that debootstrap makes (needs root and buildah): make image STAGE=cuda
	packaging/build_image.sh $(STAGE) dist

bench: $(VENV)/.installed ## the training step on this machine
	$(BIN)/podscale bench step

PARTS := pyproject.toml setup.py $(wildcard native/*/*)

$(VENV)/.installed: $(PARTS)
	$(call install,.)
	@touch $@

$(VENV)/.installed-dev: $(PARTS)
	$(call install,.[dev])
	@touch $(VENV)/.installed $@

define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "podscale needs Python 3.11 or newer, not " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '$(1)'
endef

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/podscale/data/_native*.so src/podscale/processes/_abort*.so
