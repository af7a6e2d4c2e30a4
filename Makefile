# Everything runs in .venv, which is made on first use. Python >= 3.11 and make are all that must be there.
# A CUDA machine: make VENV_EXTRAS=test,cuda13 CONSTRAINTS= test

PYTHON ?= python3
CONSTRAINTS ?= -c constraints-cpu.txt
VENV_EXTRAS ?= test,transfer
PYTEST_FLAGS ?= -n 2 --dist loadgroup

BIN := .venv/bin
# Torch's threads wait for each other. On two busy cores glm-tiny decodes 28 tokens/s with one thread and 1.5 with two;
# it and the models of the tests are too small to gain from more.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all test-gpu test-gpu-real test-gpu2 sanitize-gpu lint format bench system-libraries clean

demo: .venv/installed
	$(BIN)/specdec demo

test: .venv/installed system-libraries
	$(BIN)/python -m pytest -m "not full" $(PYTEST_FLAGS)

test-all: .venv/installed system-libraries
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

# What only a Hopper GPU can show; everything else of `test` runs there too.
test-gpu: .venv/installed
	$(BIN)/python -m pytest -m "not full" tests/kernels tests/dcp/test_merge_clock.py tests/dcp/test_peer_memory.py \
		tests/dcp/test_peer_communicator.py tests/models/glm/test_rank_pass.py \
		tests/models/glm/test_fp8_parameters.py tests/specdec/test_round_graph.py tests/specdec/test_engine_on_gpu.py \
		tests/transfer/test_packed_sending.py

# A checkpoint with real dimensions, 25 GB in the temporary folder, whole and as eight slices.
test-gpu-real: .venv/installed
	$(BIN)/python -m pytest tests/specdec/test_real_checkpoint.py

# Two GPUs of one host: what their ranks exchange, engines over both on the checkpoint of test-gpu-real, and KV sent from
# one to the other.
test-gpu2: .venv/installed
	$(BIN)/python -m pytest tests/kernels/test_peer_exchange.py tests/kernels/test_peer_add_norm.py \
		tests/kernels/test_peer_merge.py tests/kernels/test_copy_pieces.py tests/dcp/test_peer_memory.py \
		tests/dcp/test_peer_communicator.py tests/transfer/test_gpu_memory.py tests/transfer/test_transports.py \
		tests/transfer/test_sending_from_gpu.py tests/specdec/test_two_gpus.py tests/specdec/test_handoff_on_gpus.py

# Small GPU tests of each kernel under NVIDIA's compute-sanitizer, which a CUDA toolkit brings: some minutes a kernel.
sanitize-gpu: .venv/installed
	$(BIN)/python benchmarks/sanitize_kernels.py

lint: .venv/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy -p specdec
	$(BIN)/lint-imports

format: .venv/installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: .venv/installed
	set -e; for script in $$(grep -l __main__ benchmarks/*.py | grep -v sanitize); do echo "== $$script"; $(BIN)/python "$$script"; done

system-libraries: .venv/installed
	@.ci/system-libraries $(BIN)/python

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

.venv/installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv || { echo "no venv: on Debian and Ubuntu, apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install $(CONSTRAINTS) -e '.[$(VENV_EXTRAS)]'
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install $(CONSTRAINTS) -e '.[$(VENV_EXTRAS),dev]'
	touch $@
