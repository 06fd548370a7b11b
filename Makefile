# The single door. Each goal sets up what it needs, in .venv; Python 3.11 or later, a C compiler and make suffice.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
export PATH := $(abspath $(BIN)):$(PATH)
SENTENCE := "Colibri sends every word to two of eight experts."
SOURCES := $(shell find src models scripts meson.build meson.options pyproject.toml -type f -not -path '*/__pycache__/*')

.PHONY: run test test-arm bench benchmarks-page debug release lint clean
.DEFAULT_GOAL := run

run: $(VENV)/wheel
	@printf '%s' $(SENTENCE) | $(BIN)/colibri tokenize - --format text
	@echo
	@$(BIN)/colibri infer --text $(SENTENCE)

test: lint
	$(BIN)/python scripts/check_wheel.py $(VENV)/dist
	$(BIN)/python -m mypy.stubtest colibri_cli._core --mypy-config-file pyproject.toml
	$(BIN)/python -m pytest

# The kernels on Arm, under qemu-user: Debian's gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user.
test-arm: $(VENV)/tools
	COLIBRI_TEST_ARM=1 $(BIN)/python -m pytest tests/kernels/test_driver.py --noconftest

bench: $(VENV)/wheel
	$(BIN)/colibri bench

# docs/benchmarks.md, from the run in docs/benchmarks/results.json.
benchmarks-page: $(VENV)/wheel
	$(BIN)/python scripts/benchmarks_page.py

# Bounds checks in Cython, ASan and UBSan in C, in an environment of its own; then the kernels' tests on it.
debug: build/debug/installed
	ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
	  build/debug/venv/bin/python -m pytest tests/kernels tests/unit -q

# For this machine alone: the wheel that this leaves in dist/ may not run elsewhere.
release: $(VENV)/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist . \
	  -Csetup-args=-Dc_args=-march=native
	$(BIN)/python -m pip install --quiet --force-reinstall --no-deps dist/colibri_cli-*.whl
	@echo "installed in $(VENV), and kept as $$(ls dist/colibri_cli-*.whl)"

lint: $(VENV)/wheel
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/cython-lint src/colibri_cli/_core.pyx src/colibri_cli/_core.pxd
	$(BIN)/clang-format --dry-run --Werror src/colibri_cli/kernels/*.[ch] src/colibri_cli/include/*.h \
	  tests/c/*.c examples/c/*.c

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What builds, tests and lints.
$(VENV)/tools: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --group build --group test --group lint
	touch $@

# The package as a user gets it: built as a wheel and installed, nothing editable.
$(VENV)/wheel: $(VENV)/tools $(SOURCES)
	rm -rf $(VENV)/dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(VENV)/dist .
	$(BIN)/python -m pip install --quiet --force-reinstall --no-deps $(VENV)/dist/colibri_cli-*.whl
	$(BIN)/python -m pip install --quiet $(VENV)/dist/colibri_cli-*.whl
	touch $@

build/debug/installed: $(VENV)/tools $(SOURCES)
	rm -rf build/debug && mkdir -p build/debug
	$(PYTHON) -m venv build/debug/venv
	build/debug/venv/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	build/debug/venv/bin/python -m pip install --quiet --group build --group test
	build/debug/venv/bin/python -m pip install --quiet --no-build-isolation . \
	  -Csetup-args=-Dbuildtype=debugoptimized -Csetup-args=-Dchecks=true \
	  -Csetup-args=-Db_sanitize=address,undefined -Csetup-args=-Db_lundef=false
	touch $@
