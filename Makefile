# Everything a person or CI does with this repository. As root, because sandboxes need it.
.DEFAULT_GOAL := help
.PHONY: help setup guest build demo serve bench soak libraries test faults tries fuzz format-check lint fmt clean

# The static binary that becomes the first process of every sandbox. The server carries it inside.
GUEST := $(CURDIR)/target/guest/sandglass-guest
export SANDGLASS_GUEST := $(GUEST)

# A build elsewhere would not be found by what follows.
unexport CARGO_TARGET_DIR

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Install what is missing on this Debian machine
	@scripts/setup.sh

guest: ## Build the agent that runs inside sandboxes
	@scripts/build-guest.sh $(GUEST)

build: guest ## Build the server, with the agent inside
	cargo build --locked --release -p sandglass

demo: setup build ## Run one disposable computer from start to end, and show that nothing is left
	@.venv/bin/python scripts/demo.py target/release/sandglass

serve: setup build ## Start the server here, and print what to paste into another terminal
	@if [ -e /var/lib/sandglass/serve/store.db ]; then \
	  echo "export E2B_API_KEY=$$(target/release/sandglass key create --name make-serve)"; fi; \
	exec target/release/sandglass serve

bench: setup build ## Measure what is promised, each against a reference of the same run
	@for bench in cold-create exec transfer "idle --count 20" "idle --count 60" egress edge live restore pool soak; do \
	  echo; target/release/sandglass bench $$bench || exit 1; done

soak: setup build ## Create, use and end 2,000 sandboxes, pause 200, and see what is left of them
	@target/release/sandglass bench soak --cycles 2000 --pauses 200

format-check:
	cargo fmt --all --check

lint: format-check guest ## Check format and lints
	cargo clippy --locked --workspace --all-targets -- -D warnings

# Lints, server and tests in one build, so that nothing is compiled twice: clippy's driver is rustc with more lints. It
# takes its arguments, here `-D warnings`, in this form.
LINTED := RUSTC_WORKSPACE_WRAPPER=clippy-driver CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__

# All that the tests need which does not need the guest. The examples are asked for because cargo then chooses the
# features of dependencies that tests want too.
libraries:
	$(LINTED) cargo build --locked --workspace --lib --examples

test: setup format-check ## Run every test: unit, engine, and end to end with the E2B SDKs
	@# Side by side, because the guest is linked by a single thread for a minute.
	@$(MAKE) --no-print-directory -j 2 guest libraries
	$(LINTED) cargo build --locked --workspace --all-targets
	@$(LINTED) scripts/test.sh

faults: setup build ## Kill the server at every step, each on its own (an hour; `make test` has them together)
	SANDGLASS_FAULTS=each .venv/bin/python -m pytest tests/e2e/test_faults.py

tries: setup ## Try the agent a hundred thousand times with each race, and with a million files (`make test` has fewer)
	SANDGLASS_RACES=100000 cargo test --locked -p sandglass-guest --bin sandglass-guest race
	SANDGLASS_FILES=1000000 cargo test --locked -p sandglass-guest --test guest many::

fuzz: ## Let fuzzers look for bytes that break a parser, ten minutes each (needs a nightly Rust)
	@scripts/fuzz.sh

fmt: ## Format the code
	cargo fmt --all

clean: ## Remove what was built (not the templates in /var/cache/sandglass)
	cargo clean
	rm -rf .venv .venv-* tests/js/node_modules .pytest_cache
