# What to do with this repository. `make help` lists it.

TARGET := $(or $(CARGO_TARGET_DIR),target)
# What is installed and packed, and where: as arguments of make, or from the environment.
DIST ?= dist
PREFIX ?= /usr/local
DESTDIR ?=
export DIST PREFIX DESTDIR
# Another DIST than `make build`'s was built by who names it.
WHOLE = $(if $(filter dist,$(DIST)),build)
FUZZ_SECONDS ?= 60
SECONDS ?= 300
SEED ?= 0
RUNS ?= 100000
ROUNDS ?= 5000
JOBS ?= 1
FUZZ_TARGETS = $(or $(FUZZ_TARGET),$(basename $(notdir $(wildcard tests/fuzz/fuzz_targets/*.rs))))

# What `make lint` and `make doc` look at.
PACKAGES ?= --workspace
# What `make test` builds and runs the tests of.
export UNITS ?= --workspace --exclude starverbs-wasm

# Parts of `make nightly`; those that this Makefile does not have are left out.
NIGHTLY ?= lint doc apps interop board-guest conformance conformance-board kernels loom miri seeds soak \
	stress faults fuzz figures figures-again install-test aarch64

.PHONY: help build library wasm modules unit-tests demo demo-board test apps nightly bench bench-loss \
	bench-qpc bench-star bench-strom bench-1rma bench-neighbours bench-local compare instructions misses \
	conformance conformance-board pyverbs figures figures-again registry interop board-guest stress soak \
	seeds faults kills install uninstall deb wheel install-test aarch64 lint doc kernels loom miri \
	fuzz-build fuzz fuzz-corpus clean

define HELP
make demo              install what is missing, build, show perftest and a pingpong on the card
make demo-board        the same in a guest of QEMU whose PCI device is a board, against the card in software
make test              install what is missing, build, run the whole suite
make build             dist/lib/libibverbs.so.1, librdmacm.so.1, libstarverbs.so, dist/bin/starverbs and
                       starverbs-bench
make wasm              dist/lib/libstarverbs-wasm.so, which runs kernels of one's own (StRoM); takes minutes
make modules           dist/modules: the card's own kernels as modules, to compare
make conformance       every case of others' programs, rdma-core's tests; writes docs/conformance.md,
                       docs/pyverbs.md
make conformance-board the same on an emulated board; writes docs/conformance-board.md,
                       docs/pyverbs-board.md
make pyverbs           rdma-core's own tests; writes docs/pyverbs.md; with ROOT=FOLDER newer ones, too:
                       docs/pyverbs-newer.md
make apps              real programs on the card: MPI, UCX, libfabric and others; writes docs/applications.md;
                       ROOT=FOLDER
make nightly           apps, interop, conformance, miri, soak, stress, faults, fuzz, figures and more; writes
                       docs/nightly.md
make interop           against the kernel's rdma_rxe in a guest of QEMU; writes docs/interop.md
make board-guest       the kernel module, and programs on it, in guests of QEMU whose PCI devices are boards;
                       writes docs/board-guest.md; with ROOT=FOLDER the newest kernel, too:
                       docs/board-guest-newest.md
make bench             latency, message rate and bandwidth beside bare sockets, UCX and libfabric; writes
                       docs/bench.*
make bench-loss        of that, goodput against loss alone: selective repeat, go-back-N, rdma_rxe, TCP; writes
                       docs/bench-loss.*
make bench-qpc         of that, up to 100,000 queue pairs, room for few contexts by policy, the simulator;
                       writes docs/bench-qpc.*
make bench-star        of that, the StaR paper's workloads, 1 to 10,000 connections, StaR against RC; writes
                       docs/bench-star.*
make bench-strom       of that, GET, traversal, consistent read and streams by RPC, by READs and WRITEs,
                       and by TCP; writes docs/bench-strom.*
make bench-1rma        of that, 1RMA beside RC: latency, rate, small READs beside a large one; writes
                       docs/bench-1rma.*
make bench-neighbours  of that, a queue pair beside others whose peer is gone; writes docs/bench-neighbours.*
make bench-local       of that, two processes of one host over shared memory, beside UCX and libfabric; writes
                       docs/bench-local.*
make compare           perftest and bench programs on the library here and on that of the commit BASE, in
                       pairs; writes docs/compare.md
make figures           the papers' figures, simulated; writes docs/figures
make figures-again     whether they come out byte by byte as docs/figures has them
make registry          what a packet costs in StaR's security registry by its rules, for docs/sim.md
make instructions      what a message costs in instructions and system calls; writes docs/datapath.md
make misses            what a message takes from memory, with 1 to 100,000 queue pairs; writes docs/misses.md
make stress            threads, signals, growth, leaks and races, SECONDS of each soak (300); see
                       docs/stress.md
make soak              simulated cards on a hostile network, RUNS seeds from SEED on, JOBS threads; see
                       docs/faults.md
make seeds             the simulator's tests with seeds that none had before, or from SEED on
make faults            processes killed, stopped, without memory, descriptors, addresses; see
                       docs/faults-of-processes.md
make kills             of that, ROUNDS (5000) ends of one of two processes that share memory, from SEED on
make install           what was built, below PREFIX (/usr/local) and DESTDIR; make uninstall removes it
make deb               a Debian package in dist; make wheel a Python wheel
make install-test      all three tried in a bare root folder
make aarch64           cross-built, with both packages, and tried in root folders of that machine, emulated
make lint              rustfmt, clippy, cargo-deny
make doc               documentation of the crates
make kernels           kernels of one's own: their library's tests, modules of C and of Rust
make loom              the rings between card and program, and between processes, in every interleaving
make miri              queues, rings, headers and batches under miri (nightly toolchain with miri)
make fuzz              the fuzz targets, FUZZ_SECONDS each (nightly toolchain and cargo-fuzz)
make clean             remove dist and the build folder
endef

help:
	$(info $(HELP))@:

build: library
	cargo build --release --locked --package starverbs-bench
	install -D -m 755 $(TARGET)/release/starverbs-bench dist/bin/starverbs-bench

# What the tests need of it.
library:
	cargo build --release --locked --package starverbs-cdylib --package starverbs-preload \
		--package starverbs-share --package starverbs
	tools/scripts/libraries.sh $(TARGET)/release dist/lib
	install -D -m 755 $(TARGET)/release/starverbs dist/bin/starverbs
	install -D -m 644 include/infiniband/stardv.h dist/include/infiniband/stardv.h
	install -D -m 644 include/starverbs/kernel.h dist/include/starverbs/kernel.h

# What runs kernels that are WebAssembly modules, beside the library, which looks for it there.
wasm:
	cargo build --profile wasm --locked --package starverbs-wasm
	install -D -m 755 $(TARGET)/wasm/libstarverbs_wasm.so dist/lib/libstarverbs-wasm.so

# The card's own kernels as such modules, to compare.
modules:
	cargo build --release --locked --target wasm32-unknown-unknown --package starverbs-sdk --examples
	install -d dist/modules
	install -m 644 $(TARGET)/wasm32-unknown-unknown/release/examples/get.wasm \
		$(TARGET)/wasm32-unknown-unknown/release/examples/traverse.wasm \
		$(TARGET)/wasm32-unknown-unknown/release/examples/consistent.wasm \
		$(TARGET)/wasm32-unknown-unknown/release/examples/hll.wasm \
		$(TARGET)/wasm32-unknown-unknown/release/examples/shuffle.wasm dist/modules

# Beside the library, whose links use one CPU. The compiler of modules has tests of its own: `make kernels`.
unit-tests:
	if command -v cargo-nextest >/dev/null; then cargo nextest run $(UNITS) --no-run; \
	    else cargo test $(UNITS) --no-run; fi

demo:
	@tools/scripts/packages.sh demo
	@$(MAKE) --no-print-directory build
	@tools/scripts/demo.sh

test:
	@tools/scripts/packages.sh test
	@$(MAKE) --no-print-directory -j2 library unit-tests
	@tests/run.sh

conformance:
	@tools/scripts/packages.sh test
	@$(MAKE) --no-print-directory build
	cargo run --quiet --package starverbs-conformance -- --full --table docs/conformance.md
	@$(MAKE) --no-print-directory pyverbs

# The same on an emulated board, over loopback, and without perftest's -a: all sizes take minutes there.
conformance-board:
	@tools/scripts/packages.sh test
	@$(MAKE) --no-print-directory build
	cargo run --quiet --package starverbs-conformance -- --full --net lo --device board \
		--filter '^([^-]|-[^a]|-a [0-9]|-a -n)*$$' --table docs/conformance-board.md
	tests/pyverbs/run.py --board --table docs/pyverbs-board.md dist/lib

pyverbs:
	@tools/scripts/packages.sh test
	@$(MAKE) --no-print-directory build
	tests/pyverbs/run.py --table docs/pyverbs.md dist/lib
	$(if $(ROOT),tests/pyverbs/newer.sh $(ROOT) dist/lib docs/pyverbs-newer.md)

# perftest in a guest whose PCI device is a board, against the host's card in software.
demo-board:
	@tools/scripts/packages.sh demo
	@$(MAKE) --no-print-directory library
	@BOARD_GUEST=require tools/scripts/board-guest.sh $(if $(ROOT),--root $(ROOT)) demo

# The programs of this host, then those of a newer Debian in the folder ROOT.
apps:
	@tools/scripts/packages.sh apps
	@$(MAKE) --no-print-directory build
	@tests/apps/all.sh --table docs/applications.md $(if $(ROOT),--root $(ROOT)) dist

nightly:
	@tools/scripts/nightly.sh docs/nightly.md $(NIGHTLY)

stress:
	@tools/scripts/packages.sh stress
	@$(MAKE) --no-print-directory build
	tests/soak/run.sh --seconds $(SECONDS) --processes 256 dist/lib \
		soak one_cpu polling crowd pairs growth leaks memcheck tsan

# With TRACE=1, each frame, post, completion and event is printed.
soak:
	cargo run --release --quiet --package starverbs-soak -- --seed $(SEED) --runs $(RUNS) --jobs $(JOBS) \
		$(if $(TRACE),--trace)

seeds:
	SIM_BASE=$(if $(filter-out 0,$(SEED)),$(SEED),$(shell date +%s)) \
		cargo test --package starverbs-sim --test sim --no-fail-fast
	SIM_RUNS=400 cargo test --package starverbs-soak --test star --no-fail-fast

faults:
	@tools/scripts/packages.sh stress
	@$(MAKE) --no-print-directory build
	tests/faults/run.sh --long dist/lib

# Without SEED, another one each time; it is printed.
kills:
	@tools/scripts/packages.sh stress
	@$(MAKE) --no-print-directory library
	tests/faults/run.sh --rounds $(ROUNDS) $(if $(filter-out 0,$(SEED)),--seed $(SEED)) dist/lib ends

# With VECTORS=1, one captured frame of each kind is kept as a test vector.
interop: build
	@tools/scripts/interop.sh --table docs/interop.md $(if $(VECTORS),--vectors tests/interop/vectors)

# What guests are made of comes from packages. With ROOT, a root folder of a newer Debian that is made if it
# is not there, QEMU is that folder's, and its kernel is tried, too. QUICK=1: few cases.
board-guest:
	@tools/scripts/packages.sh demo
	@$(MAKE) --no-print-directory library
	@tools/scripts/board-guest.sh $(if $(ROOT),--root $(ROOT)) $(if $(QUICK),--quick,--table docs/board-guest.md)
	$(if $(ROOT),@tools/scripts/board-guest.sh --root $(ROOT) --newest \
		$(if $(QUICK),--quick,--table docs/board-guest-newest.md))

bench:
	@tools/scripts/packages.sh bench
	@$(MAKE) --no-print-directory build
	cargo run --release --quiet --package starverbs-bench -- --out docs/bench
	@$(MAKE) --no-print-directory bench-loss
	@$(MAKE) --no-print-directory bench-qpc
	@$(MAKE) --no-print-directory bench-star
	@$(MAKE) --no-print-directory bench-strom
	@$(MAKE) --no-print-directory bench-1rma
	@$(MAKE) --no-print-directory bench-neighbours
	@$(MAKE) --no-print-directory bench-local

bench-local:
	@tools/scripts/packages.sh bench
	@$(MAKE) --no-print-directory build
	cargo run --release --quiet --package starverbs-bench -- --local --out docs/bench-local

# Against an earlier commit: whether something got slower.
compare:
	@tools/scripts/packages.sh bench
	@$(MAKE) --no-print-directory build
	tools/scripts/compare.sh docs/compare.md \
		$(or $(BASE),$(error BASE: which commit is the library compared with?))

bench-neighbours:
	@tools/scripts/packages.sh bench
	@$(MAKE) --no-print-directory build
	cargo run --release --quiet --package starverbs-bench -- --neighbours --out docs/bench-neighbours

bench-star:
	@tools/scripts/packages.sh bench
	@$(MAKE) --no-print-directory build
	cargo run --release --quiet --package starverbs-bench -- --star --out docs/bench-star

bench-1rma:
	@tools/scripts/packages.sh bench
	@$(MAKE) --no-print-directory build
	cargo run --release --quiet --package starverbs-bench -- --onerma --out docs/bench-1rma

bench-strom:
	@tools/scripts/packages.sh bench
	@$(MAKE) --no-print-directory build wasm modules
	cargo run --release --quiet --package starverbs-bench -- --strom --out docs/bench-strom

bench-qpc:
	@tools/scripts/packages.sh bench
	@$(MAKE) --no-print-directory build
	cargo run --release --quiet --package starverbs-bench -- --qpc --out docs/bench-qpc

bench-loss:
	@tools/scripts/packages.sh bench
	@$(MAKE) --no-print-directory build
	rm -f $(TARGET)/bench-loss.guest
	-@tools/scripts/interop.sh --loss $(abspath $(TARGET))/bench-loss.guest --repeat 3
	cargo run --release --quiet --package starverbs-bench -- --loss --out docs/bench-loss \
		--guest $(TARGET)/bench-loss.guest

figures:
	cargo run --release --quiet --package starverbs -- sim all --out docs/figures

figures-again:
	rm -rf $(TARGET)/figures
	cargo run --release --quiet --package starverbs -- sim all --out $(TARGET)/figures
	diff -r $(TARGET)/figures docs/figures

# The table of docs/sim.md.
registry:
	@tools/scripts/packages.sh instructions
	@tools/scripts/registry.sh

instructions:
	@tools/scripts/packages.sh instructions
	@$(MAKE) --no-print-directory build
	@tools/scripts/instructions.sh

misses:
	@tools/scripts/packages.sh instructions
	@$(MAKE) --no-print-directory build
	@tools/scripts/misses.sh

lint:
	@tools/scripts/lint.sh $(PACKAGES)

# Of what `make build` made, which root need not be able to do.
install uninstall:
	@tools/scripts/install.sh $@

deb: $(WHOLE)
	@tools/scripts/deb.sh

wheel: $(WHOLE)
	@tools/scripts/wheel.py

install-test:
	@tools/scripts/packages.sh install
	@$(MAKE) --no-print-directory deb wheel
	tests/install/run.sh $(DIST) install deb wheel ci

# Of each package, and of the libraries, what a machine without an aarch64 CPU can try.
aarch64:
	@tools/scripts/packages.sh aarch64
	@$(MAKE) --no-print-directory build
	DIST=dist/aarch64 tools/scripts/cross.sh build
	DIST=dist/aarch64 tools/scripts/cross.sh tests
	DIST=dist/aarch64 tools/scripts/deb.sh
	DIST=dist/aarch64 tools/scripts/wheel.py
	tests/aarch64/run.sh dist/aarch64 dist
	ARCH=arm64 tests/install/run.sh dist/aarch64 deb wheel

# The library and the command are both named starverbs and share a folder of pages: written at once, one takes
# the other's away. The library is written last, and its pages stay. Both of the workspace, so that what they
# depend on is looked at once.
doc:
	RUSTDOCFLAGS='-D warnings' cargo doc --workspace --bin starverbs --no-deps --document-private-items
	RUSTDOCFLAGS='-D warnings' cargo doc $(PACKAGES) --no-deps --document-private-items

kernels:
	@tools/scripts/packages.sh test
	@$(MAKE) --no-print-directory library
	cargo test --package starverbs-wasm
	tests/kernels/run.sh dist/lib

# It takes seconds, its building more: optimised it would take less, but not both.
loom:
	RUSTFLAGS='--cfg loom' LOOM_MAX_PREEMPTIONS=3 CARGO_PROFILE_DEV_OPT_LEVEL=0 CARGO_PROFILE_DEV_DEBUG=0 \
		cargo test --package starverbs-rings --test loom --target-dir $(TARGET)/loom

miri:
	tests/miri/run.sh

fuzz-build:
	@command -v cargo-fuzz >/dev/null || \
		{ echo 'cargo-fuzz is missing: cargo install cargo-fuzz --locked' >&2; exit 1; }
	cargo +nightly fuzz build --fuzz-dir tests/fuzz

fuzz: fuzz-build
	for target in $(FUZZ_TARGETS); do mkdir -p $(TARGET)/fuzz/$$target; \
		cargo +nightly fuzz run --fuzz-dir tests/fuzz $$target \
			$(TARGET)/fuzz/$$target tests/fuzz/corpus/$$target -- \
			-max_total_time=$(FUZZ_SECONDS) -max_len=1500 -len_control=0 || exit 1; done

# The inputs that are needed to reach what `make fuzz` has reached so far.
fuzz-corpus: fuzz-build
	for target in $(FUZZ_TARGETS); do mkdir -p $(TARGET)/fuzz/$$target $(TARGET)/fuzz/$$target.min; \
		cargo +nightly fuzz run --fuzz-dir tests/fuzz $$target \
			$(TARGET)/fuzz/$$target.min tests/fuzz/corpus/$$target \
			$(TARGET)/fuzz/$$target -- -merge=1 || exit 1; \
		rm -rf tests/fuzz/corpus/$$target && mv $(TARGET)/fuzz/$$target.min tests/fuzz/corpus/$$target; done

clean:
	cargo clean
	rm -rf dist
