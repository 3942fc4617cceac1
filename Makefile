# The front door. `make demo` runs the main job on the text in demo/data; `make test` passes the
# tests. Each sets up what it needs first.

# What no other build has.
FEATURES = preprocess/fuzzing,preprocess/parquet

.PHONY: help setup demo test test-instructions lint check-all bench bench-tokenize bench-ckpt clean

help:
	@echo "make demo        build all, tokenize the text in demo/data, train a small GPT, kill it, resume it, generate"
	@echo "make test        all tests"
	@echo "make test-instructions  the numeric tests as other processors compute them"
	@echo "make lint        formatting and clippy, warnings refused"
	@echo "make check-all   what CI runs, the demo, and tests on a real Slurm, Ceph, XFS and NFS (installed and removed; root)"
	@echo "make bench       the benchmarks of every crate: a table each"
	@echo "make bench-tokenize ARGS=...  our tokenizers beside those of others; see scripts/bench_tokenize.py --help"
	@echo "make bench-ckpt ARGS=...      our checkpoints beside those of others; see scripts/bench_ckpt.py --help"
	@echo "make setup       what the two need (CUDA=1: the libraries of a CUDA build as well)"
	@echo "make clean       remove what was built and the demo's output; keeps libtorch"

setup:
	@scripts/setup.sh
ifdef CUDA
	@scripts/setup.sh --cuda
endif

demo: setup
	@scripts/demo.sh

test: setup
	@scripts/setup.sh --tests
	@scripts/test.sh

test-instructions: setup
	@scripts/setup.sh --tests
	@scripts/test_instructions.sh

lint: setup
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	cargo clippy --workspace --all-targets --locked --features $(FEATURES) -- -D warnings
	RUSTDOCFLAGS='-A warnings -D rustdoc::broken_intra_doc_links' \
	  cargo doc --workspace --no-deps --document-private-items --locked -q
	@scripts/build_cache.py save

# Ends with make, also where make is killed.
check-all: setup
	@setpriv --pdeathsig TERM .ci/full

bench: setup
	cargo bench --workspace --locked

bench-tokenize:
	cargo build --release --locked -p preprocess -p tools
	scripts/bench_tokenize.py $(ARGS)

bench-ckpt:
	cargo build --release --locked -p tools
	scripts/bench_ckpt.py $(ARGS)

clean:
	cargo clean
	rm -rf demo-run
