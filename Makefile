# make serve   set up, fetch the model (MODEL, else the profile's), serve on PORT (default 3000)
# make test    set up, lint, type-check, run the tests
PYTHON ?= python3
PORT ?= 3000
MODEL ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: serve setup test test-full lint bento clean
.DEFAULT_GOAL := serve

serve: $(VENV)/.served
	$(if $(MODEL),export WAVELANE_MODELS__0__SOURCE='$(MODEL)';) \
	$(BIN)/python -m runners.loading.sources && exec $(BIN)/bentoml serve service:Wavelane --port $(PORT)

setup: $(VENV)/.tested

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-full: lint
	WAVELANE_TEST_EXAMPLES=50000 WAVELANE_TEST_FUZZ_FILES=10000 WAVELANE_TEST_API_REQUESTS=10000 \
	WAVELANE_TEST_SCHEMA_STEP=1 $(BIN)/python -m pytest -n 2 --dist loadfile --timeout 3600

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bento: $(VENV)/.served
	$(BIN)/bentoml build

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "Python 3.11 to 3.13 is needed; name one: make PYTHON=python3.11 …" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip==26.3
	@touch $@

# torch first: a plain `pip install torch==…` takes the build that the machine's index prefers.
$(VENV)/.served: $(VENV)/.created requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check $$(grep '^torch==' requirements.txt)
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/.tested: $(VENV)/.served requirements-dev.txt
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements-dev.txt
	@touch $@
