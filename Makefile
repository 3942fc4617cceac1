# `make demo` runs the main job on the text in demo/data; `make test` runs the tests. Each sets up what
# it needs first.

# Features that no other build has.
FEATURES = preprocess/fuzzing,preprocess/parquet

.PHONY: help setup demo docs wheel dist test test-python test-instructions lint check-all bench bench-tokenize bench-ckpt bench-python clean

help:
	@echo "make demo        build all, tokenize the text in demo/data, train a small GPT, kill it, resume it, generate"
	@echo "make docs        the documentation as a site in target/docs/book"
	@echo "make wheel       the Python package in target/wheels, with the programs feedline and preprocess"
	@echo "make dist        programs and wheel for glibc 2.28 and newer, and the source package, in target/dist"
	@echo "make test        all tests"
	@echo "make test-python the tests of the Python package alone"
	@echo "make test-instructions  the numeric tests as other processors compute them"
	@echo "make lint        formatting and clippy; a warning is an error"
	@echo "make check-all   what CI runs, the demo, the oldest and today's releases of the frameworks, and tests on a real Slurm,"
	@echo "                 Ceph, XFS and NFS (installed and removed; root)"
	@echo "make bench       the benchmarks of every crate, a table each"
	@echo "make bench-tokenize ARGS=...  our tokenizers compared with others; see scripts/bench_tokenize.py --help"
	@echo "make bench-ckpt ARGS=...      our checkpoints compared with others; see scripts/bench_ckpt.py --help"
	@echo "make bench-python ARGS=...    the Python package compared with others; see scripts/bench_python.py --help"
	@echo "make setup       what demo and test need (CUDA=1: also the libraries of a CUDA build)"
	@echo "make clean       remove build output and the demo's files; keeps libtorch"

setup:
	@scripts/setup.sh
ifdef CUDA
	@scripts/setup.sh --cuda
endif

demo: setup
	@scripts/demo.sh

docs:
	@scripts/docs.sh

wheel: setup
	@scripts/wheel.sh

dist: setup
	@scripts/dist.sh

test:
	@scripts/setup.sh --announce
	@scripts/setup.sh
	@scripts/setup.sh --tests
	@scripts/test.sh

test-python: setup
	@scripts/test_python.sh

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

# Ends when make ends, also if make is killed.
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

bench-python: wheel
	cargo build --release --locked -p tools
	scripts/bench_python.py $(ARGS)

clean:
	cargo clean
	rm -rf demo-run
