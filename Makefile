# `make demo` and `make test` do everything on a fresh machine: each makes .venv and installs what is missing.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test torture lint docs results dist bench clean

demo: $(READY)
	$(BIN)/steptuned reproduce figure-1 figure-2 figure-3 digits --scale demo --out demo
	$(BIN)/steptuned report demo

# One process per core, and one thread per process: threads that compete for a core are several times slower.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

# About half an hour: kills at random moments, random sequences of calls.
torture: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/torture.py --to docs/reliability.md

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/mkdocs build --strict

# The page of results, the table in the README and the verdicts of the package, from the raw logs. The tests compare.
results: $(READY)
	$(BIN)/steptuned results evidence --to docs/results.md --readme README.md --verdicts src/steptuned/lab/report/published.json

dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/packaging/smoke.py dist

bench: $(READY)
	$(BIN)/python benchmarks/step.py --write docs/caveats.md --write-short README.md
	$(BIN)/python benchmarks/lab.py
	$(BIN)/python benchmarks/shares.py
	$(BIN)/python benchmarks/distributed.py
	! command -v chromium > /dev/null || $(BIN)/python benchmarks/report.py
	test -z "$$STEPTUNED_DATA" || $(BIN)/python benchmarks/images.py

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[lab,dask,lightning,huggingface,docs,tensorboard,dev]'
	touch $@

clean:
	rm -rf .venv dist site demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
