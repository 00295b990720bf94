# Needs Python 3.11 or later, make and a C compiler; everything else goes into .venv.
PYTHON ?= python3
JOBS ?= $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
PYTEST_ARGS ?=
GPU_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo bench evidence gpu docs test test-all published lint format wheel wheel-check clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 16

venv: $(STAMP)  ## create .venv and install everything, if anything changed

$(STAMP): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"{sys.executable} is Python {sys.version.split()[0]}: expected 3.11 or later; name another with `make PYTHON=python3.12 ...`")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

# Two recipes: one on the baseline's own model, and one that adds tables of n-grams to it, which is another model.
GPT := benchmarks/gpt/baseline.yaml
demo: $(STAMP)  ## the found recipes beside the tuned baseline on the GPT: both curves, and the time to the same loss
	$(BIN)/lightning-eff bench --baseline baseline=$(GPT) --recipe recipe=$(GPT),benchmarks/gpt/stacks/muon_grown.yaml \
		--recipe recipe_with_tables=$(GPT),benchmarks/gpt/stacks/muon_grown_ngrams.yaml \
		--target val_loss --budget 30rs --seeds 2 --controls none --threads 1 --jobs $(JOBS) --rounds 3 --evaluations 8 \
		--out lightning_logs/demo

QUICK := $(GPT),benchmarks/gpt/quick.yaml
bench: $(STAMP)  ## the honest comparison in about two minutes: a recipe, its control, three seeds
	$(BIN)/lightning-eff bench --baseline baseline=$(QUICK) \
		--recipe length_warmup=$(QUICK),benchmarks/gpt/recipes/length_warmup.yaml \
		--target val_loss --budget 4rs --seeds 3 --threads 1 --jobs $(JOBS) --rounds 6 --evaluations 5 --out lightning_logs/bench

evidence: $(STAMP)  ## every technique on the reference tasks, hours; and docs/evidence.md from what it found
	for task in gpt vit bert; do $(BIN)/python benchmarks/evidence.py run $$task --jobs $(JOBS) || exit; done
	$(BIN)/python benchmarks/evidence.py page
	$(BIN)/python -m docs.making facts

docs: $(VENV)/.docs  ## build the site into build/site: a broken link fails
	$(BIN)/python -W ignore -m docs.making pages build
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --clean --config-file build/mkdocs.yml

$(VENV)/.docs: $(STAMP)
	$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@

# One torch thread per worker: tests are small, and more threads than cores slow all of them down.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --maxprocesses 8 --dist worksteal $(if $(K),--technique $(K))
test: $(STAMP)  ## ten minutes: every technique; K=name for all tests of one, PYTEST_ARGS="-k name" for a part, JOBS=0 without workers
	$(PYTEST) -m 'not slow$(if $(K),, and not full)' $(PYTEST_ARGS)

test-full: $(STAMP)  ## run everything but the slow tests, half an hour on two cores; K, PYTEST_ARGS and JOBS as for test
	$(PYTEST) -m 'not slow' $(PYTEST_ARGS)

test-all: $(STAMP)  ## run everything, the slow tests too: hours; K, PYTEST_ARGS and JOBS as for test
	$(PYTEST) -m '' $(PYTEST_ARGS)

# Packages of others, in an environment of their own: torch first, and their own requirements beside the tested versions.
PUBLISHED := build/published/venv
published: $(PUBLISHED)/.installed  ## train published packages' modules with the techniques, and write docs/works_with.md
	$(PUBLISHED)/bin/python -W ignore -m tests.published run
	$(PUBLISHED)/bin/python -W ignore -m tests.published page
	$(BIN)/python -m pytest -n 0 tests/published

$(PUBLISHED)/.installed: $(STAMP) tests/published/installing.py $(wildcard tests/published/packages/*.py)
	@test -e $(PUBLISHED)/bin/python || $(PYTHON) -m venv $(PUBLISHED)
	$(PUBLISHED)/bin/python -m pip --disable-pip-version-check install -c constraints.txt torch
	$(PUBLISHED)/bin/python -m pip --disable-pip-version-check install -c constraints.txt -e '.[dev]'
	$(PUBLISHED)/bin/python -W ignore -m tests.published install
	@touch $@

lint: $(STAMP)  ## ruff and pyright
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@mkdir -p build/typing/lightning_eff && touch build/typing/lightning_eff/__init__.py
	@ln -sfn ../../../kernels build/typing/lightning_eff/kernels
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --warnings

format: $(STAMP)  ## mend what ruff can mend
	$(BIN)/ruff check --fix --exit-zero
	$(BIN)/ruff format

gpu: $(STAMP)  ## what a GPU gives, in units of at most 90 s; again to go on; GPU_ARGS="--tiny" on a CPU
	@status=0; $(BIN)/python -W ignore -m benchmarks.gpu $(GPU_ARGS) || status=$$?; \
		$(BIN)/python -W ignore -m benchmarks.gpu.page || exit; exit $$status

wheel: $(STAMP)  ## build the wheel into dist/
	rm -rf build/lib build/bdist.* dist
	$(PIP) wheel --quiet --no-deps --wheel-dir dist .

# The clean environment has the wheel, and sees what else .venv holds without its editable install: site-packages reached
# through a .pth file is searched, but its own .pth files are not read.
CHECK := build/wheel-check
wheel-check: wheel  ## install the wheel in a clean environment and compare it with the tree
	rm -rf $(CHECK)
	$(BIN)/python -m venv $(CHECK)
	$(CHECK)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps dist/*.whl
	diff -r -x kernels -x __pycache__ lightning_eff $(CHECK)/lib/python3*/site-packages/lightning_eff
	diff -r -x __pycache__ kernels $(CHECK)/lib/python3*/site-packages/lightning_eff/kernels
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(CHECK)/lib/python3*/site-packages)/venv.pth
	cd $(CHECK) && bin/python -I -c 'import lightning_eff, lightning_eff.kernels as k, sys; files = lightning_eff.__file__, k.__file__; print(*files, sep="\n"); assert all(f.startswith(sys.prefix) for f in files)'
	cd $(CHECK) && bin/lightning-eff --help > /dev/null

clean:  ## remove what was built and what runs left behind; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache lightning_logs checkpoints
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
