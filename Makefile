# The only needs are git, make and Python 3.11 to 3.13.
PYTHON ?= python3
BIN := .venv/bin
RUN := runs/digits

.PHONY: quickstart test soak lint bench

# Trains the embedded example, evaluates it and samples from it.
quickstart: .venv/installed
	$(BIN)/python train.py --config=configs/digits.py --workdir=$(RUN)
	$(BIN)/python -m sparse_transformer.sample --workdir=$(RUN) --num=16
	@echo "patterns in $(RUN)/patterns.png; bits per dim of the test split:"
	$(BIN)/python eval.py --workdir=$(RUN)

test: .venv/installed
	$(BIN)/python -m pytest -n auto

# What takes too long for every day: faults, devices, 20,000 steps, fuzzing.
soak: .venv/installed
	$(BIN)/python -m pytest -m soak

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Attention beside its peers: tables, and JSON in benchmarks/results.
bench: .venv/installed
	$(BIN)/python benchmarks/attention.py

.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@
