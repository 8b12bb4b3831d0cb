# `make demo` and `make test` set everything up in .venv first; nothing else is needed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
export HF_HUB_OFFLINE = 1

.PHONY: setup demo test mutants check format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(wildcard shm_broadcast/native/* device_comm/native/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[server,demo,dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/group-coordinator demo

test: $(STAMP)
	$(BIN)/python -m pytest

mutants: $(STAMP)
	$(BIN)/python -m tests.mutants

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info
