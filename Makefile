# Every target builds .venv first if it is missing or older than what it is built from.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed
ENGINES := .venv-engines
RAY := .venv-ray
VERL := .venv-verl
# The last without sessions of updates.
OLD_SGLANG := 0.5.20
TORCH := $(shell grep '^torch==' constraints.txt)
TRITON := triton==3.6.0
CHECKED := deltasync tests docs/examples $(if $(wildcard benchmarks/*.py),benchmarks)
NOTEBOOK_ENV := .venv-notebook
JUPYTEXT := $(NOTEBOOK_ENV)/bin/jupytext --quiet

.PHONY: demo test test-engines test-ray test-verl lint types layers docs notebook notebook-outputs bench clean

demo: $(STAMP)
	$(BIN)/deltasync demo

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy $(CHECKED)

layers: $(STAMP)
	$(BIN)/lint-imports --no-logo

docs: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/test_docs.py

# The .py is the source. The .ipynb beside it adds outputs at full size, and is not written here.
notebook: $(NOTEBOOK_ENV)/.installed
	$(JUPYTEXT) --to py:percent --output - notebooks/sparsity.ipynb | diff notebooks/sparsity.py -
	sed 's/^scale = "full"/scale = "toy"/' notebooks/sparsity.py \
	  | $(JUPYTEXT) --from py:percent --to ipynb --output $(NOTEBOOK_ENV)/sparsity.ipynb
	$(NOTEBOOK_ENV)/bin/python -m pytest -q --nbmake --nbmake-timeout=600 --timeout=900 \
	  $(NOTEBOOK_ENV)/sparsity.ipynb

# Full size: some ten minutes. Its outputs and the pictures of docs/sparsity.md are of one run.
notebook-outputs: $(NOTEBOOK_ENV)/.installed
	sed 's|^images = None|images = "../docs/images"|' notebooks/sparsity.py \
	  | $(JUPYTEXT) --from py:percent --to ipynb --output notebooks/sparsity.ipynb
	$(NOTEBOOK_ENV)/bin/jupyter execute --inplace --timeout=3600 notebooks/sparsity.ipynb
	$(JUPYTEXT) --update --to ipynb notebooks/sparsity.py

$(NOTEBOOK_ENV)/.installed: pyproject.toml constraints.txt
	test -x $(NOTEBOOK_ENV)/bin/pip || $(PYTHON) -m venv $(NOTEBOOK_ENV)
	$(NOTEBOOK_ENV)/bin/pip install --disable-pip-version-check "$(TORCH)"
	$(NOTEBOOK_ENV)/bin/pip install --disable-pip-version-check \
	  -c constraints.txt -e '.[notebook,test]'
	touch $@

bench: $(STAMP)
	$(BIN)/python -m benchmarks

# Engines live in an environment of their own: they are large, and pin what others do not want.
test-engines: $(ENGINES)/.installed
	-PIP=$(ENGINES)/bin/pip tests/engines/vllm_own/fetch.sh $(ENGINES)/vllm-tests
	OMP_NUM_THREADS=1 VLLM_LOGGING_LEVEL=ERROR $(ENGINES)/bin/python -m pytest -q -W default \
	  tests/engines --support docs/integrations/support.md

$(ENGINES)/.installed: pyproject.toml constraints-engines.txt
	test -x $(ENGINES)/bin/pip || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/pip install --disable-pip-version-check "$(TORCH)"
	$(ENGINES)/bin/pip install --disable-pip-version-check --no-deps -r constraints-engines.txt
	$(ENGINES)/bin/pip install --disable-pip-version-check --no-deps -e .
	$(ENGINES)/bin/pip install --disable-pip-version-check --no-deps --upgrade \
	  --target $(ENGINES)/sglang-$(OLD_SGLANG) sglang==$(OLD_SGLANG)
	touch $@

test-ray: $(RAY)/.installed
	OMP_NUM_THREADS=1 $(RAY)/bin/python -m pytest -q tests/ray tests/integrations/test_torchrun.py

$(RAY)/.installed: pyproject.toml constraints.txt
	test -x $(RAY)/bin/pip || $(PYTHON) -m venv $(RAY)
	$(RAY)/bin/pip install --disable-pip-version-check "$(TORCH)"
	$(RAY)/bin/pip install --disable-pip-version-check -c constraints.txt -e '.[ray,test]'
	touch $@

# verl wants a transformers of its own; ray asks for 16 CPUs, which need not be there.
test-verl: $(VERL)/.installed
	OMP_NUM_THREADS=1 RAY_AUTH_MODE=disabled $(VERL)/bin/python -m pytest -q -W default tests/verl

$(VERL)/.installed: pyproject.toml constraints-verl.txt
	test -x $(VERL)/bin/pip || $(PYTHON) -m venv $(VERL)
	$(VERL)/bin/pip install --disable-pip-version-check "$(TORCH)"
	$(VERL)/bin/pip install --disable-pip-version-check --no-deps -r constraints-verl.txt
	$(VERL)/bin/pip install --disable-pip-version-check --no-deps -e .
	touch $@

clean:
	rm -rf .venv $(NOTEBOOK_ENV) build dist site demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes alone and first: an exact version by itself takes the build that the index of this
# machine prefers, and the second call then leaves it as it is.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "deltasync needs Python 3.11 or newer: make PYTHON=...")'
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -c 'import triton' 2>/dev/null || test "$$(uname -s)" != Linux || \
	  $(BIN)/pip install --disable-pip-version-check "$(TRITON)"
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
