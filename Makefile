# Needs git, make and Python 3.11 to 3.14, and nothing else. The newest Python
# found, on the PATH or among pyenv's, makes the environments, before 3.14, on
# which the tests have not run yet: JAX's releases for 3.11 are slower on CPUs.
# PYTHON=... names another.
find = $(firstword $(foreach python, \
  python$(1) $(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python3) python3, \
  $(shell $(python) -c "import sys; '%d.%d' % sys.version_info[:2] == '$(1)' \
  and print('$(python)')" 2>/dev/null)))
PYTHON ?= $(or $(call find,3.13),$(call find,3.12),$(call find,3.11),$(call \
  find,3.14),$(error needs Python 3.11 to 3.14, none found; make PYTHON=...))
BIN := .venv/bin
RUN := runs/digits
APART := .venv/apart
TARGETS := .venv/targets
DOCS := .venv/docs
PEERS := .venv/peers

# pip says nothing while it downloads.
INSTALLS = @echo "installs the packages of $^ into $(@D)$(SIZE)"

.PHONY: quickstart sample test tools-test soak lint package docs tutorial bench \
  accelerator targets targets-test compiled results

# Trains the bundled example, samples from it and evaluates it.
quickstart: .venv/installed
	$(BIN)/python train.py --config=configs/digits.py --workdir=$(RUN)
	$(BIN)/python -m sparse_transformer.sample --workdir=$(RUN) --num=16
	@echo "patterns in $(RUN)/patterns.png; bits per dim of the test split:"
	$(BIN)/python eval.py --workdir=$(RUN)

# Draws from a network in weights/.
sample: .venv/installed
	$(BIN)/python -m sparse_transformer.sample \
	  --workdir=weights/digits.safetensors

test: .venv/installed
	$(BIN)/python -m pytest -n auto --dist worksteal

# Tests that take minutes: faults, devices, 20,000 steps, fuzzing.
soak: .venv/installed
	$(BIN)/python -m pytest -m soak

# Tests of benchmarks/ and of what makes docs/, which are run by hand.
tools-test: .venv/installed
	$(BIN)/python -m pytest -m tools

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Builds the wheel and the sources, and checks them. Installs each with JAX and
# NumPy alone, on every Python that is found, and runs the README's example there,
# in another folder.
package:
	rm -rf build dist *.egg-info $(APART)
	$(PYTHON) -m venv $(APART)/build
	$(APART)/build/bin/pip install --quiet --disable-pip-version-check build twine
	$(APART)/build/bin/python -m build --outdir dist
	$(APART)/build/bin/twine check --strict dist/*
	sed -n '/^```python$$/,/^```$$/{/^```/!p;}' README.md > $(APART)/example.py
	@$(foreach version, 3.11 3.12 3.13, \
	  $(call try,$(version),$(call find,$(version))) &&) true

# Tries what was built in an environment of Python $(1), the program $(2).
try = $(if $(2),$(2) -m venv $(APART)/$(1) && \
  for file in dist/*.whl dist/*.tar.gz; do \
    echo "Python $(1): $$file" && $(APART)/$(1)/bin/pip install --quiet \
      --disable-pip-version-check $$file && \
    (cd $(APART) && $(1)/bin/python example.py) || exit 1; \
  done,echo "Python $(1): not found and not tried")

# Makes the gallery from the catalogue of patterns, and site/ from all of docs,
# and runs the code on the pages.
docs: .venv/installed $(DOCS)/installed
	$(BIN)/python docs/make.py
	$(BIN)/python -m pytest -m docs
	$(DOCS)/bin/mkdocs build --strict

# Runs the tutorial again, and stores its outputs in it.
tutorial: .venv/installed
	$(BIN)/pip install --quiet nbconvert ipykernel
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/jupyter nbconvert --to notebook \
	  --execute --ExecutePreprocessor.record_timing=False \
	  --inplace docs/tutorial.ipynb
	$(BIN)/jupyter nbconvert --coalesce-streams --inplace docs/tutorial.ipynb

# Makes the tables and figures of README.md and docs/ again from the records in
# benchmarks/results; fails if they differed.
results: .venv/installed
	$(BIN)/python -m benchmarks.readme

# Measures attention and its peers: prints tables, writes benchmarks/results.
bench: .venv/installed $(PEERS)/installed
	$(BIN)/python -m benchmarks.attention

# Checks the code on a GPU or TPU, and measures it there. JAX's packages for the
# device are installed first; an older driver needs DEVICE=cuda12. Flags:
# make accelerator FLAGS="--parts=setup,correctness --minutes=8".
comma := ,
DEVICE ?= $(if $(wildcard /dev/nvidia0),cuda13,$(if $(wildcard /dev/accel0 \
  /dev/vfio/0),tpu))
accelerator: .venv/installed
	$(if $(DEVICE),$(BIN)/pip install --quiet "jax[$(DEVICE)]")
	$(if $(DEVICE),JAX_PLATFORMS=$(DEVICE:cuda%=cuda)$(comma)cpu) \
	  $(BIN)/python -m benchmarks.accelerator $(FLAGS)

# Installs the compilers for GPUs and TPUs, for explain --target. They need
# Python 3.12 or newer.
targets: $(TARGETS)/cuda/installed $(TARGETS)/tpu/installed

# Compiles kernels and presets, and checks launches, memory and registers.
targets-test: .venv/installed targets
	REQUIRE_TARGETS=1 $(BIN)/python -m pytest -m targets tests/targets

# Compiles the presets that have no record yet; writes benchmarks/results.
compiled: .venv/installed targets
	$(BIN)/python -m benchmarks.compiled
	$(BIN)/python -m benchmarks.traffic

$(TARGETS)/%/installed: requirements-%.txt
	$(INSTALLS)
	@$(PYTHON) -c "import sys; sys.version_info >= (3, 12) or sys.exit( \
	  'make targets needs Python 3.12 or newer: make targets PYTHON=...')"
	$(PYTHON) -m venv --clear $(TARGETS)/$*
	$(TARGETS)/$*/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

$(DOCS)/installed: requirements-docs.txt
	$(INSTALLS)
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

# If it fails, attention is measured without peers.
$(PEERS)/installed: benchmarks/requirements-peers.txt
	$(INSTALLS)
	-$(PYTHON) -m venv --clear $(PEERS) && $(PEERS)/bin/pip install --quiet \
	  --disable-pip-version-check -r $< && touch $@

.venv/installed: SIZE = : downloads about 310 MB, a few minutes
.venv/installed: requirements.txt requirements-train.txt \
  requirements-data.txt requirements-dev.txt
	$(INSTALLS)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check $(^:%=-r %)
	touch $@
