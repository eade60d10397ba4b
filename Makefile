# Every target builds the environment that it needs if that is missing, or older than what it is
# built from. Those beside .venv are large, or pin what others do not want.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed
DOCS := .venv-docs
ENGINES := .venv-engines
MEGATRON := .venv-megatron
NOTEBOOK := .venv-notebook
NIXL := .venv-nixl
RAY := .venv-ray
TRL := .venv-trl
VERL := .venv-verl
TORCH := $(shell grep '^torch==' constraints.txt)
TRITON := triton==3.6.0
CHECKED := deltasync tests docs/examples docs/images $(if $(wildcard benchmarks/*.py),benchmarks)
JUPYTEXT := $(NOTEBOOK)/bin/jupytext --quiet
# In rules for environments: of the one that is built. pip reads dependency groups from 25.1 on.
INSTALL = $(@D)/bin/pip install --disable-pip-version-check
VENV = (test -x $(@D)/bin/pip || $(PYTHON) -m venv $(@D)) && $(INSTALL) -q "pip>=25.1"
EXTRAS := cli,metrics,plot,store,traces

.PHONY: demo test lint types layers docs package notebook notebook-outputs bench \
  engines test-engines gpu-engines test-megatron test-nixl \
  test-ray test-trl test-verl clean

demo: $(STAMP)
	$(BIN)/deltasync demo

# Four files at once keep two cores busy: many tests wait for other processes. Not more, since
# some take gigabytes. tests/conftest.py says which begin first.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy $(CHECKED)

layers: $(STAMP)
	$(BIN)/lint-imports --no-logo

docs: $(STAMP) $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	$(BIN)/python -m pytest -q tests/test_docs.py -k site

# The wheel and the source distribution, and a user's program against the installed wheel alone.
package: $(STAMP)
	rm -rf dist build/package
	$(BIN)/python -m hatchling build -d dist -t sdist -t wheel
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv build/package
	build/package/bin/pip install --disable-pip-version-check -q "$(TORCH)"
	build/package/bin/pip install --disable-pip-version-check -q -c constraints.txt \
	  "$$(echo dist/deltasync-*.whl)[cli,store]"
	cp tests/package/consumer.py build/package/
	cd build/package && bin/python consumer.py && bin/deltasync --version \
	  && ../../$(BIN)/mypy --strict --config-file /dev/null --python-executable bin/python consumer.py

# The .py is the source. The .ipynb beside it adds outputs at full size, and is not written here.
notebook: $(NOTEBOOK)/.installed
	$(JUPYTEXT) --to py:percent --output - notebooks/sparsity.ipynb | diff notebooks/sparsity.py -
	sed 's/^scale = "full"/scale = "toy"/' notebooks/sparsity.py \
	  | $(JUPYTEXT) --from py:percent --to ipynb --output $(NOTEBOOK)/sparsity.ipynb
	$(NOTEBOOK)/bin/python -m pytest -q --nbmake --nbmake-timeout=600 --timeout=900 \
	  $(NOTEBOOK)/sparsity.ipynb

# Full size: some ten minutes. Its outputs and the pictures of docs/sparsity.md are of one run.
notebook-outputs: $(NOTEBOOK)/.installed
	sed 's|^images = None|images = "../docs/images"|' notebooks/sparsity.py \
	  | $(JUPYTEXT) --from py:percent --to ipynb --output notebooks/sparsity.ipynb
	$(NOTEBOOK)/bin/jupyter execute --inplace --timeout=3600 notebooks/sparsity.ipynb
	$(JUPYTEXT) --update --to ipynb notebooks/sparsity.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks

engines: $(ENGINES)/.installed

test-engines: $(ENGINES)/.installed
	OMP_NUM_THREADS=1 VLLM_LOGGING_LEVEL=ERROR $(ENGINES)/bin/python -m pytest -q -W default \
	  tests/engines

# What a GPU machine without a network needs to run real engines: see tests/engines/gpu/pack.py.
gpu-engines: $(STAMP)
	$(BIN)/python -m tests.engines.gpu.pack make $(ENGINES)/gpu-work $(ENGINES)/gpu
	$(BIN)/python -m tests.engines.gpu.pack make --engine sglang \
	  $(ENGINES)/gpu-work-sglang $(ENGINES)/gpu-sglang

test-megatron: $(MEGATRON)/.installed
	OMP_NUM_THREADS=1 $(MEGATRON)/bin/python -m pytest -q -W default tests/megatron

# Twice: through the kernel of one host, and as between hosts without RDMA.
test-nixl: $(NIXL)/.installed
	OMP_NUM_THREADS=1 $(NIXL)/bin/python -m pytest -q tests/transports/test_nixl.py
	OMP_NUM_THREADS=1 UCX_TLS=tcp $(NIXL)/bin/python -m pytest -q tests/transports/test_nixl.py

test-ray: $(RAY)/.installed
	OMP_NUM_THREADS=1 $(RAY)/bin/python -m pytest -q tests/ray tests/integrations/test_torchrun.py

test-trl: $(TRL)/.installed
	OMP_NUM_THREADS=1 $(TRL)/bin/python -m pytest -q -W default tests/trl

# Ray is asked for 16 CPUs, which need not be there.
test-verl: $(VERL)/.installed
	OMP_NUM_THREADS=1 RAY_AUTH_MODE=disabled $(VERL)/bin/python -m pytest -q -W default tests/verl

clean:
	rm -rf .venv .venv-* build dist site demo-out .pytest_cache .mypy_cache .ruff_cache \
	  .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes alone and first: an exact version by itself takes the build that the index of this
# machine prefers, and the second call then leaves it as it is.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "deltasync needs Python 3.11 or newer: make PYTHON=...")'
	$(VENV)
	$(INSTALL) "$(TORCH)"
	$(BIN)/python -c 'import triton' 2>/dev/null || test "$$(uname -s)" != Linux || \
	  $(INSTALL) "$(TRITON)"
	$(INSTALL) -c constraints.txt -e '.[$(EXTRAS),triton]' --group dev
	touch $@

$(NIXL)/.installed $(RAY)/.installed: .venv-%/.installed: pyproject.toml constraints.txt
	$(VENV)
	$(INSTALL) "$(TORCH)"
	$(INSTALL) -c constraints.txt -e '.[$*,$(EXTRAS)]' --group test
	touch $@

$(NOTEBOOK)/.installed: pyproject.toml constraints.txt
	$(VENV)
	$(INSTALL) "$(TORCH)"
	$(INSTALL) -c constraints.txt -e '.[files,plot]' --group notebook
	touch $@

$(ENGINES)/.installed $(MEGATRON)/.installed $(TRL)/.installed $(VERL)/.installed: \
    .venv-%/.installed: pyproject.toml constraints-%.txt
	$(VENV)
	$(INSTALL) "$(TORCH)"
	$(INSTALL) --no-deps -r constraints-$*.txt
	$(INSTALL) --no-deps -e .
	touch $@

$(DOCS)/.installed: pyproject.toml constraints.txt
	$(VENV)
	$(INSTALL) -c constraints.txt --group docs
	touch $@
