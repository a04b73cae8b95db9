# One file for people and CI. `make demo` and `make test` need only Python >= 3.11 (transformers and trl ask for it); both work in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
CONSTRAINTS = .ci/constraints.txt
# Compiled modules are kept, also where the machine says otherwise: a test that starts a process waits 10 s less for it.
RUN = env -u PYTHONPATH -u PYTHONDONTWRITEBYTECODE
# More settings for `make demo`, for example DEMO_ARGS="--max_steps 10".
DEMO_ARGS ?=

.PHONY: help demo test lint unit gpu-test bench-smoke bench-table test-wheel test-matrix docs release clean install-demo install-dev

help: ## What there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "make %-11s %s\n", $$1, $$2}'

install-demo:
	@$(PYTHON) scripts/install.py --venv $(VENV) --extras demo --constraints $(CONSTRAINTS)

install-dev:
	@$(PYTHON) scripts/install.py --venv $(VENV) --extras dev --constraints $(CONSTRAINTS)

demo: install-demo ## Install, fine-tune a tiny Qwen3.5 on real conversations, print what happened (minutes, no GPU)
	@$(if $(findstring --output_dir,$(DEMO_ARGS)),:,rm -rf runs/tiny_sft) # its own folder, no other
	$(RUN) $(BIN)/accelerate launch recipes/qwen27b_sft.py --config recipes/tiny_sft.yaml $(DEMO_ARGS)

test: install-dev lint unit ## Everything CI runs: style, types, room contracts, every CPU test

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

unit: # two processes of one thread each: the CI machine has two cores
	$(RUN) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

gpu-test: ## The tests marked gpu, on a machine with an NVIDIA GPU and the kernels installed
	$(PYTHON) -m pytest -m gpu -p no:cacheprovider

bench-smoke: install-dev ## The ladder's code path on a CPU with toy models (under 2 minutes; the numbers mean nothing)
	rm -rf runs/bench_smoke
	$(RUN) OMP_NUM_THREADS=1 $(BIN)/python benchmarks/ladder.py --out runs/bench_smoke --repetitions 1 --steps 5 \
		--workloads tiny --rungs seed speedkit
	$(RUN) OMP_NUM_THREADS=1 $(BIN)/python benchmarks/ladder.py --out runs/bench_smoke --repetitions 1 --steps 5 \
		--workloads tiny-ga2 --rungs speedkit
	$(RUN) OMP_NUM_THREADS=1 $(BIN)/python benchmarks/ladder.py --out runs/bench_smoke --repetitions 1 --steps 5 \
		--workloads tiny-dense --rungs trl "speedkit minus packing"
	$(BIN)/hf-speedkit report runs/bench_smoke
	$(BIN)/hf-speedkit report runs/bench_smoke --out runs/bench_smoke/ladder.svg

RESULTS = benchmarks/results/ladder
bench-table: ## Rewrite the tables of README and docs/speed.md and the picture from the committed results
	$(BIN)/hf-speedkit report $(RESULTS) --out README.md
	$(BIN)/hf-speedkit report $(RESULTS) --out docs/speed.md
	$(BIN)/hf-speedkit report $(RESULTS) --out docs/ladder.svg

test-wheel: install-dev ## Build the wheel and use it in an empty environment without the repository (minutes)
	$(RUN) $(BIN)/python scripts/release.py --wheel

# One: make test-matrix MATRIX="newest". Tests: make test-matrix MATRIX="lowest -- tests/trainer -q".
MATRIX ?=
test-matrix: ## Every Python, the lowest and the newest stack that pyproject.toml allows (long; not in CI)
	$(PYTHON) scripts/test_matrix.py $(MATRIX)

docs: ## The documentation as pages in site/, every link and reference checked
	@$(PYTHON) scripts/install.py --venv $(VENV) --extras docs --constraints $(CONSTRAINTS)
	$(RUN) $(BIN)/mkdocs build --strict

release: install-dev ## Check that a release is ready and build it into dist/; uploads nothing
	$(RUN) $(BIN)/python scripts/release.py

clean: ## Remove what the targets above made
	rm -rf $(VENV) runs dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
