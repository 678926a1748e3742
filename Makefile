# What to do with this repository. `make help` lists it.

TARGET := $(or $(CARGO_TARGET_DIR),target)
FUZZ_SECONDS ?= 60
SECONDS ?= 300

.PHONY: help build demo test bench instructions conformance pyverbs interop stress faults lint doc fuzz-build fuzz clean

help:
	@echo 'make demo         install what is missing, build, show perftest and a pingpong on the card'
	@echo 'make test         install what is missing, build, run the whole suite'
	@echo 'make build        dist/lib/libibverbs.so.1, dist/lib/libstarverbs.so, dist/bin/starverbs'
	@echo 'make conformance  every case of others'"'"' programs, rdma-core'"'"'s tests; writes docs/conformance.md, docs/pyverbs.md'
	@echo 'make pyverbs      rdma-core'"'"'s own tests; writes docs/pyverbs.md'
	@echo 'make interop      against the kernel'"'"'s rdma_rxe in a guest of QEMU; writes docs/interop.md'
	@echo 'make bench        latency, message rate and bandwidth beside bare sockets, UCX and libfabric; writes docs/bench.*'
	@echo 'make instructions what a message costs in instructions and system calls; writes docs/datapath.md'
	@echo 'make stress       threads, signals, growth, leaks and races, SECONDS of each soak (300); see docs/stress.md'
	@echo 'make faults       processes killed, stopped, without memory, descriptors, addresses; see docs/faults-of-processes.md'
	@echo 'make lint         rustfmt, clippy, cargo-deny'
	@echo 'make doc          documentation of the crates'
	@echo 'make fuzz         the fuzz targets, FUZZ_SECONDS each (nightly toolchain and cargo-fuzz)'
	@echo 'make clean        remove dist and the build folder'

build:
	cargo build --release --locked --package starverbs-cdylib --package starverbs-preload --package starverbs
	install -D -m 755 $(TARGET)/release/libstarverbs.so dist/lib/libibverbs.so.1
	ln -sf libibverbs.so.1 dist/lib/libibverbs.so
	install -D -m 755 $(TARGET)/release/libstarverbs_preload.so dist/lib/libstarverbs.so
	install -D -m 755 $(TARGET)/release/starverbs dist/bin/starverbs

demo:
	@tools/scripts/packages.sh demo
	@$(MAKE) --no-print-directory build
	@tools/scripts/demo.sh

test:
	@tools/scripts/packages.sh test
	@$(MAKE) --no-print-directory build
	@tests/run.sh

conformance:
	@tools/scripts/packages.sh test
	@$(MAKE) --no-print-directory build
	cargo run --release --quiet --package starverbs-conformance -- --full --table docs/conformance.md
	@$(MAKE) --no-print-directory pyverbs

pyverbs:
	@tools/scripts/packages.sh test
	@$(MAKE) --no-print-directory build
	tests/pyverbs/run.py --table docs/pyverbs.md dist/lib

stress:
	@tools/scripts/packages.sh stress
	@$(MAKE) --no-print-directory build
	tests/soak/run.sh --seconds $(SECONDS) dist/lib soak growth leaks memcheck tsan

faults:
	@tools/scripts/packages.sh stress
	@$(MAKE) --no-print-directory build
	tests/faults/run.sh --long dist/lib

# With VECTORS=1, one captured frame of each kind is kept as a test vector.
interop: build
	@tools/scripts/interop.sh --table docs/interop.md $(if $(VECTORS),--vectors tests/interop/vectors)

bench:
	@tools/scripts/packages.sh bench
	@$(MAKE) --no-print-directory build
	cargo run --release --quiet --package starverbs-bench -- --out docs/bench

instructions:
	@tools/scripts/packages.sh instructions
	@$(MAKE) --no-print-directory build
	@tools/scripts/instructions.sh

lint:
	@tools/scripts/lint.sh

doc:
	RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --document-private-items

fuzz-build:
	@command -v cargo-fuzz >/dev/null || { echo 'cargo-fuzz is missing: cargo install cargo-fuzz --locked' >&2; exit 1; }
	cargo +nightly fuzz build --fuzz-dir tests/fuzz

fuzz: fuzz-build
	for target in $(or $(FUZZ_TARGET),$$(cargo +nightly fuzz list --fuzz-dir tests/fuzz)); do \
		cargo +nightly fuzz run --fuzz-dir tests/fuzz $$target -- -max_total_time=$(FUZZ_SECONDS) || exit 1; done

clean:
	cargo clean
	rm -rf dist
