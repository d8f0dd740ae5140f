# Two commands for users: `make demo` and `make test`. The rest is for those who keep the fork.
SHELL := bash
PY := .venv/bin/python
.DEFAULT_GOAL := help

.PHONY: help setup venv demo test test-ranks test-nightly test-gpu lint docs wheel lock clean

help:
	@echo "make demo          set everything up, then train dense, upcycle and train the MoE on this machine (minutes)"
	@echo "make test          set everything up, then run the tests"
	@echo "make test-ranks    the tests on many processes over gloo"
	@echo "make test-nightly  the slow tests"
	@echo "make test-gpu      the tests that need a GPU (one, or two)"
	@echo "make setup         only set up: .venv, the patched Megatron under build/megatron"
	@echo "make lint          ruff, mypy, hadolint, shellcheck"
	@echo "make docs          the API reference from the docstrings: build/api/index.html"
	@echo "make wheel         one wheel that holds the patched Megatron and megatron_ext: dist/"
	@echo "make lock          rewrite tools/requirements/*.txt from pyproject.toml and upstream.toml"

setup:
	@bash tools/setup/setup.sh all

venv:
	@bash tools/setup/setup.sh venv

demo: setup
	@bash examples/moe/quickstart.sh

test: setup lint
	@bash tools/setup/system.sh
	@$(PY) -m pytest tests -m "not gpu and not nightly and not ranks"

test-ranks: setup
	@# Two processes: tests/ranks forks its ranks, which must not inherit a process group.
	@$(PY) -m pytest tests/ranks -m ranks --durations=5
	@$(PY) -m pytest tests --ignore=tests/ranks -m "ranks and not nightly" --durations=5

test-nightly: setup
	@bash tools/setup/system.sh
	@$(PY) -m pytest tests -m "nightly and not gpu" --durations=20

test-gpu: setup
	@PYTHON=$(CURDIR)/$(PY) bash tests/gpu/run.sh

lint: venv
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@.venv/bin/hadolint docker/Dockerfile docker/Dockerfile.cpu
	@.venv/bin/shellcheck $$(git ls-files -co --exclude-standard '*.sh' '*.sbatch' .ci/run)

docs: setup
	@$(PY) tools/setup/reference.py

wheel: venv
	@$(PY) -m pip wheel -q --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

lock:
	@$(PY) tools/setup/lock.py

clean:
	rm -rf build .venv
