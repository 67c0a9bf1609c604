# Every command of the project. `make help` lists them.
#
# PYTHON  the Python to make the environment with, or to use as it is
# VENV    the environment's folder; `VENV=` (empty) uses PYTHON's own packages and installs nothing
# RECIPE  section/name, for commands that take one recipe instead of all
#
# THOROUGH=1 for make test: every mutant, generated test and autotune config; THOROUGH="section/name ..." of these
#         recipes alone, THOROUGH=changed of those that differ from the commit before
#
# For make record, and FORCE=1 for make compile too:
# ONLY_STALE=1     only recipes whose record is missing or of older code
# FORCE=1          execute those too that ran here with the present code; otherwise what ran is recorded
# PER_GPU_MODEL=1  each recipe once on each model of GPU; otherwise all GPUs have to be alike
# DASK             a Dask scheduler's address: record on the GPU workers of its cluster
# INSECURE=1       allow DASK=tcp://... on another machine
#
# For make models:
# CASES        words of the cases to measure, as CASES="train base-2048 ours"; all without it
# SECONDS      after which it stops
#
# For make versions:
# TRITON       one or several of the versions listed in docs/_versions/pairs.txt, or next, the newest that was released
# WITH         other packages to install over the pins
# FORCE=1      try what passed before with the same code too
#
# For make measure-versions:
# TRITON       one or several folders, each with another Triton
# NO_FUSION=1  measure the last of them without FP fusion, too

PYTHON ?= python3
VENV ?= .venv

ifeq ($(VENV),)
PY := $(PYTHON)
SITE_READY :=
TEST_READY :=
else
PY := $(VENV)/bin/python
SITE_READY := $(VENV)/.site
TEST_READY := $(VENV)/.test
endif

export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: help html new newest record record-apart trace sanitize libraries models versions measure-versions compile listings check-compiled check-records compare serve test test-gpu peers lint clean \
	targets check-targets
.DEFAULT_GOAL := help

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/:.*  ## /\t/' | expand -t 18

html: $(SITE_READY)  ## execute what changed and build the site into _build/html
	@"$(PY)" -m triton_gallery html

new: $(SITE_READY)  ## begin a recipe RECIPE=section/name: script, test and place in the contents
	@"$(PY)" -m triton_gallery new $(or $(RECIPE),$(error name a recipe: make new RECIPE=section/name))

record: $(SITE_READY)  ## on a GPU host, run recipes and record their outputs; RECIPE=section/name for one
	@"$(PY)" -m triton_gallery record $(if $(ONLY_STALE),--only-stale) $(if $(FORCE),--force) $(if $(PER_GPU_MODEL),--per-gpu-model) \
		$(if $(DASK),--dask $(DASK)) $(if $(INSECURE),--insecure) $(RECIPE)

record-apart: $(SITE_READY)  ## on a GPU host, record one RECIPE=section/name in an environment of what it declares
	@"$(PY)" -m venv _build/env/$(or $(RECIPE),$(error name a recipe: make record-apart RECIPE=section/name))
	@_build/env/$(RECIPE)/bin/python -m pip install -q -r requirements.txt $$("$(PY)" -m triton_gallery needs $(RECIPE))
	@$(MAKE) record PYTHON=_build/env/$(RECIPE)/bin/python VENV= RECIPE=$(RECIPE)

trace:  ## make what a RECIPE=section/name reads at its execution, in the environment of its requirements file
	@"$(PYTHON)" -m venv _build/env/$(or $(RECIPE),$(error name a recipe: make trace RECIPE=section/name)).trace
	@_build/env/$(RECIPE).trace/bin/python -m pip install -q -r gallery/$(RECIPE).requirements.txt
	@cd gallery/$(dir $(RECIPE)) && $(CURDIR)/_build/env/$(RECIPE).trace/bin/python $(notdir $(RECIPE)).py

sanitize: $(SITE_READY)  ## on a GPU host, run the checks of recipes under compute-sanitizer
	@"$(PY)" -m triton_gallery sanitize $(RECIPE)

libraries: $(SITE_READY)  ## on a GPU host, measure ops beside other libraries' and record it; RECIPE=section/name for one
	@"$(PY)" -m triton_gallery.libraries.measure $(RECIPE)

versions: $(TEST_READY)  ## try lessons, ops, kernels and features with each Triton of docs/_versions/pairs.txt
	@"$(PY)" -m triton_gallery versions $(addprefix --triton ,$(TRITON)) $(addprefix --with ,$(WITH)) $(if $(FORCE),--force) $(RECIPE)

newest: $(TEST_READY)  ## try with the newest of these Tritons what has not passed; start nothing after two minutes
	@"$(PY)" -m triton_gallery versions --triton newest --seconds 120 $(RECIPE)

models: $(SITE_READY)  ## on a GPU host, measure models as they are, with Liger and with the ops, and record it
	@"$(PY)" -m triton_gallery.libraries.models $(CASES) $(if $(SECONDS),--seconds $(SECONDS))

measure-versions: $(SITE_READY)  ## on a GPU host, measure ops under another Triton: TRITON=folder
	@"$(PY)" -m triton_gallery.versions.measure $(addprefix --triton ,$(or $(TRITON),$(error name a folder: make measure-versions TRITON=folder))) \
		$(if $(NO_FUSION),--no-fusion) $(if $(RECIPE),--recipes $(RECIPE)); \
		measured=$$?; [ $$measured -lt 2 ] && "$(PY)" -m triton_gallery.versions.measure --merge _build/versions && exit $$measured

check-records: $(SITE_READY)  ## list recipes whose record is missing or stale
	@"$(PY)" -m triton_gallery check-records $(RECIPE)

compile: $(SITE_READY)  ## compile kernels for GPUs that need not be here, where they changed; RECIPE=section/name for one
	@"$(PY)" -m triton_gallery compile $(if $(FORCE),--force) $(RECIPE)

listings: $(SITE_READY)  ## compile again what make compile kept, executing no recipe, so that pages show the compilers' code
	@"$(PY)" -m triton_gallery listings $(RECIPE)

check-compiled: $(SITE_READY)  ## compile them the same way, keep nothing, and fail if one fitted before and no longer does
	@"$(PY)" -m triton_gallery compile --check $(RECIPE)

compare: $(SITE_READY)  ## compare recorded figures with those at BASE=revision
	@"$(PY)" -m triton_gallery compare $(or $(BASE),$(error name a git revision: make compare BASE=revision)) $(RECIPE)

serve: $(TEST_READY)  ## build, serve on http://127.0.0.1:8000 and build again on each change
	@"$(PY)" -m sphinx_autobuild -c . --watch gallery --watch src --watch conf.py --ignore 'docs/recipes/*' --ignore 'docs/ops/*' \
		--ignore '*.pyc' docs _build/serve

test: $(TEST_READY)  ## test quickly; THOROUGH=1 for all, RECIPE=section/name for one recipe thoroughly
	@OMP_NUM_THREADS=1 "$(PY)" -m pytest --numprocesses auto --dist loadgroup \
		$(if $(THOROUGH),--thorough "$(patsubst 1,all,$(THOROUGH))") $(if $(RECIPE),--recipe $(RECIPE))

test-gpu: $(TEST_READY)  ## on a GPU host, test every op on the GPU; as many processes as it has memory for
	@"$(PY)" -c "import torch; torch.cuda.is_available() or exit('torch sees no GPU here')"
	@"$(PY)" -m pytest tests/ops tests/contract tests/machinery/test_device.py --numprocesses auto --thorough all

peers: $(TEST_READY)  ## run other projects' parametrizations against the ops: all on a GPU, else the small ones; SHARE=0.1 for a share
	@OMP_NUM_THREADS=1 PEERS_SHARE=$(SHARE) "$(PY)" -m pytest tests/peers --numprocesses auto --dist worksteal

lint: $(TEST_READY)  ## check style, spelling and types
	@"$(PY)" -m ruff check
	@"$(PY)" -m ruff format --check
	@"$(PY)" -m codespell_lib
	@"$(PY)" -m sphinxlint --enable all --disable line-too-long docs/guide docs/*.md gallery README.md
	@"$(PY)" -m mypy

clean:  ## remove what was built; the environment stays
	rm -rf _build docs/recipes docs/ops

# Names of before: each says the new one.
$(if $(AGAIN),$(error AGAIN=1 is now FORCE=1))
$(if $(STALE),$(error STALE=1 is now ONLY_STALE=1))
$(if $(EACH_KIND),$(error EACH_KIND=1 is now PER_GPU_MODEL=1))
NOW_targets := compile
NOW_check-targets := check-compiled
targets check-targets:
	@echo "make $@ is now make $(NOW_$@)" >&2; exit 1

$(VENV)/bin/python:
	"$(PYTHON)" -m venv $(VENV)

$(VENV)/.site: requirements.txt src/pyproject.toml | $(VENV)/bin/python
	"$(PY)" -m pip install --disable-pip-version-check --quiet --requirement requirements.txt
	"$(PY)" -m pip install --disable-pip-version-check --quiet --no-build-isolation --no-deps --editable src
	@touch $@

$(VENV)/.test: tests/requirements.txt $(VENV)/.site
	"$(PY)" -m pip install --disable-pip-version-check --quiet --requirement tests/requirements.txt
	@touch $@
