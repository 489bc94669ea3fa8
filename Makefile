# Each target makes .venv and installs on first use, and again when pyproject.toml or the lock file changes.
PYTHON ?= python3
EXTRAS ?= dev,qlora,deepspeed,wandb
BIN := .venv/bin

.PHONY: finetune test test-slow test-size check lock clean

finetune: .venv/installed
	$(BIN)/python jobs/finetune.py conf/finetune.yaml

test: .venv/installed check
	$(BIN)/python -m pytest -n 2

test-slow: .venv/installed ## the rows that take minutes of a real cluster each
	$(BIN)/python -m pytest -m slow

test-size: .venv/installed ## the size this is made for, on CPUs and without a cluster, under ten minutes: limits in counts
	$(BIN)/python -m pytest -m size -n 2

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/mypy

.venv/installed: pyproject.toml requirements.lock
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c requirements.lock -e ".[$(EXTRAS)]"
	touch $@

lock: ## the versions of this environment, for reproducible installs
	$(BIN)/pip freeze --exclude-editable | sed 's/+cpu$$//' > requirements.lock

clean:
	rm -rf .venv build *.egg-info
