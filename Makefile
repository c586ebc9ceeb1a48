# Thin on purpose: the work is in deploy/local, which needs nothing but Python 3.11.
PYTHON ?= python3
LOCAL := $(PYTHON) -m local
# Exported, not set in the recipes: so make starts Python without a shell in between, which would keep a
# SIGTERM to itself.
export PYTHONPATH := deploy

.DEFAULT_GOAL := help
.PHONY: help run analytics test test-quick test-kernel-tls check coverage fuzz bench bench-analytics images \
	e2e-kubernetes docs generate lock base release publish clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: ## broker and cluster on this machine, until Ctrl-C; BROKER=pulsar://host:6650 or BROKER_VERSION=5.0.0-M1
	@$(LOCAL).run

analytics: ## install what the bill of `make run` needs: Spark, Java, Prometheus
	@$(LOCAL).first_bill

test: ## all tests, against a real broker; ARGS="-k name" for pytest
	@$(LOCAL).test $(ARGS)

test-quick: ## the tests that need neither a broker nor a JVM: some four minutes
	@$(LOCAL).test --quick $(ARGS)

test-kernel-tls: ## the tests of kernel TLS alone, in a kernel that has it: User-Mode Linux (two minutes)
	@$(LOCAL).programs test-kernel-tls -s tests/e2e/test_kernel_tls.py tests/e2e/test_kernel_tls_relays.py $(ARGS)

check: ## what CI runs: format, lint, types, import contract, generated files, wheel, tests
	@$(LOCAL).check $(ARGS)

coverage: ## make check, with the coverage that a release must have: twice the time
	@$(LOCAL).check --coverage $(ARGS)

fuzz: ## feed parsers with hostile bytes (Atheris); ARGS="--seconds 60 --parser frames"
	@$(LOCAL).programs fuzz $(ARGS)

bench: ## measure
	@$(LOCAL).programs bench $(ARGS)

bench-analytics: ## measure the analytics; ARGS="--samples 1000000" for less, ARGS=--write for docs/
	@$(LOCAL).programs bench-analytics $(ARGS)

images: ## build the container images (root); ARGS=--twice compares two builds, ARGS=--archives writes dist/
	@$(LOCAL).images $(ARGS)

e2e-kubernetes: ## try images and chart on a real node (root); ARGS="install rollout" for single steps
	@$(LOCAL).e2e_kubernetes $(ARGS)

docs: ## build the documentation's site into build/site; a broken link is an error
	@$(LOCAL).documentation

generate: ## regenerate the protobuf modules, docs/configuration.md and conformance.md, manual pages, the chart's schema
	@$(LOCAL).generate

lock: ## write the hashes of constraints.txt, and deploy/requirements
	@$(LOCAL).lock

base: ## write the digest of the base image's tag into deploy/image/Dockerfile
	@$(LOCAL).base_image

release: ## wheel, sdist, images, chart, with sums, bills of materials, provenance, into dist/ (root; ARGS=--no-images)
	@$(LOCAL).release $(ARGS)

publish: ## push dist/ to a registry and sign it; REGISTRY=host/path, COSIGN_KEY=file
	@$(LOCAL).publish "$(REGISTRY)" $(ARGS)

clean: ## remove what was made in the tree (the Pulsar distribution stays in the cache)
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.* htmlcov build dist
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
