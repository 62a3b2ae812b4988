# Every target sets the machine up first (as root; what is done already is skipped). `make` alone lists them.
PYTHON := .venv/bin/python
PYTEST := $(PYTHON) -m pytest
BENCHES = $(if $(NAME),bench/$(NAME).py,$(sort $(filter-out bench/_%,$(wildcard bench/*.py))))
C_SOURCES = $(wildcard bpf/*.[ch] bpf/*/*.h pytools/sources/*/*.c pytools/sources/*/*/*.[ch] examples/nccl-net/*.[ch] bench/nccl_empty.c)
PROOFS = $(if $(NAME),tests/prove/$(NAME).py,$(sort $(filter-out tests/prove/_%,$(wildcard tests/prove/*.py))))

# In continuous integration a missing capability is a failure, not a skip.
ifeq ($(CI),true)
export SWERVE_FORBID_SKIPS = 1
endif

# Bytecode is kept, whatever the environment says: every process starts sooner.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-check setup-vm native demo test test-quick test-unit test-kernel test-fabric test-vm bench prove \
	deb check format clean uninstall

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: ## Install packages, virtual environment, mounts, the RDMA tap, the pacer, the NCCL plugin
	@scripts/setup.sh

setup-check: ## Install also what `make check` needs, and the routing daemons that benchmarks compare with
	@scripts/setup.sh check

setup-vm: ## Install also a second kernel with its emulator
	@scripts/setup.sh vm

native: ## Build the C that runs in user space: the RDMA tap, the pacer of probes, the NCCL plugin
	@$(PYTHON) -m pytools.kernel.native

demo: setup ## Run the demo: congest a rail of a lab and steer traffic away from it
	@.venv/bin/swerve demo

# Unit tests work beside the kernel's, the second kernel with the time that is left; what looks at the clock comes last.
test: setup-vm ## Run every test: unit, kernel, again in a second kernel, and fabric
	@$(PYTHON) scripts/run_tests.py

test-quick: setup ## Run the unit tests but the slow ones, with fewer random examples
	@$(PYTHON) scripts/run_tests.py quick

test-unit: setup ## Run the tests that need no root
	@$(PYTEST) tests/unit

test-kernel: setup ## Run the tests of one host's kernel
	@$(PYTEST) tests/kernel

test-fabric: setup ## Run the tests with real traffic between network namespaces
	@$(PYTEST) tests/fabric

test-vm: setup-vm ## Run the tests in the second kernel, every case of them
	@SWERVE_GUEST=all $(PYTEST) tests/vm

bench: setup-check ## Run all benchmarks, as JSON Lines, or one: make bench NAME=ring
	@set -e; for bench in $(BENCHES); do $(PYTHON) $$bench; done

prove: setup ## Run the proofs that take minutes, or one: make prove NAME=restarts
	@set -e; for proof in $(PROOFS); do echo "== $$proof" >&2; $(PYTHON) $$proof; done

deb: setup ## Build the Debian package with man pages and completion, dist/swerve_*.deb (docs/service.md)
	@$(PYTHON) scripts/build_deb.py

check: setup-check ## Check format, lint, types, direction of imports, links, commands shown in the pages
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m mypy --config-file tests/mypy.ini tests bench scripts
	$(PYTHON) -m mypy --config-file tests/mypy.ini tests/vm/conftest.py
	clang-format --dry-run -Werror $(C_SOURCES)
	$(PYTEST) -q tests/unit/test_imports.py
	$(PYTHON) scripts/check_licences.py
	$(PYTHON) scripts/check_links.py
	$(PYTHON) scripts/check_commands.py

format: setup-check ## Bring Python and C into the house format
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	clang-format -i $(C_SOURCES)

clean: ## Remove what was built, not the environment
	rm -rf build dist pytools/sources/rdma/tap/swerve-tap.so pytools/sources/probing/swerve-pacer pytools/sources/jobs/nccl/*.so bench/*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find pytools steering tests bench scripts -name __pycache__ -type d -prune -exec rm -rf {} +

uninstall: clean ## Remove the environment too (packages and mounts stay: others may use them)
	rm -rf .venv .setup
