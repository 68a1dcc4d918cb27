# Daily commands; `make help` lists them. Each sets up what it needs by itself.
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench wheel bundle lock clean
BENCH_ARGS ?= --quick
TEST_WORKERS ?= 3 # processes; tests wait more than they compute

help: ## list these commands
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-8s %s\n", $$1, $$2}'

setup: ## everything for development: .venv, broker, models
	@.ci/setup.sh test

demo: ## a coordinator and an agent on this machine; watch the seam move (3 minutes, more on a busy machine)
	@.ci/setup.sh demo
	@.venv/bin/python -m benchmarks.demo --out demo.jsonl

test: ## the whole suite, on real models, brokers and clients
	@.ci/setup.sh test
	@.venv/bin/python -m pytest -n $(TEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

lint: ## ruff, mypy --strict, import contracts
	@.ci/setup.sh lint
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports

bench: ## every figure of the README, quick by default (BENCH_ARGS= for full runs)
	@.ci/setup.sh test
	@for b in queue_incident text_overhead footprint planner estimator transports wire split_switch split_burst split_replay \
	  dispatch_plan disco_replay handoff cancel gateway routing routing_quality semantic_cache limits_flood soak; do \
	  echo "== $$b"; .venv/bin/python -m benchmarks.$$b --json build/$$b.json $(BENCH_ARGS) || exit 1; done

wheel: ## build the wheel and the source archive into dist/
	@.ci/setup.sh lint
	@.venv/bin/python -m build --outdir dist

bundle: ## an installer with every wheel for devices without a package index (BUNDLE_ARGS="--arch aarch64 --extras onnx,llama")
	@.ci/setup.sh lint
	@firmware_scripts/bundle.sh $(BUNDLE_ARGS)

lock: ## write the lock files of the test set-up anew
	@.ci/setup.sh lint
	@.ci/lock.sh

clean: ## remove .venv, .setup and build results (pulled models stay in the user's cache)
	rm -rf .venv .setup build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache demo.jsonl
