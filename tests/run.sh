#!/usr/bin/env bash
# The whole suite: unit tests, the symbol list, others' programs. Says what was skipped
# and why; fails if anything fails.
set -uo pipefail
cd "$(dirname "$0")/.."

# What each part printed, and in summary/ the verdicts, a line a part.
said=$(mktemp -d)
mkdir "$said/summary"
touch "$said/summary/"{passed,skipped,FAILED}
trap 'rm -rf "$said"' EXIT

# Runs one part of the suite under its name.
part() {
    local name=$1 begun=$SECONDS verdict=passed
    shift
    printf '\n=== %s\n' "$name"
    "$@" 2>&1 | tee "$said/${name//\//-}" || verdict=FAILED
    printf '%5d s  %s\n' $((SECONDS - begun)) "$name" >>"$said/summary/$verdict"
}

skip() { printf '%s: %s\n' "$1" "$2" >>"$said/summary/skipped"; }

# What takes one CPU, or waits for a guest, runs beside all others.
one_cpu() {
    part "rings under loom" make --no-print-directory loom
    if [[ ${INTEROP:-} == require ]]; then
        part "the kernel's rdma_rxe as peer (quick set)" tools/scripts/interop.sh --quick
    else
        skip "the kernel's rdma_rxe as peer" \
            "boots a guest; runs on its own: \`make interop\`, or here with INTEROP=require"
    fi
    local name="the board's kernel module in a guest (a few)" reason
    if [[ ${BOARD_GUEST:-} == @(try|require) ]]; then
        part "$name" tools/scripts/board-guest.sh --quick \
            --filter '^ibv_rc_pingpong.* two functions$|^ib_write_bw.* the host serves$'
        reason=$(sed -n 's/^board-guest: skipped: //p' "$said/$name")
        if [[ -n $reason ]]; then
            sed -i "/$name\$/d" "$said/summary/passed"
            skip "$name" "$reason"
        fi
    else
        skip "$name" \
            "boots a guest; runs on its own: \`make board-guest\`, or here with BOARD_GUEST=try, or =require"
    fi
}
# In a process group of its own, so that all of it ends where this does.
set -m
one_cpu >"$said/.one_cpu" 2>&1 &
beside=$!
set +m
trap 'kill -- "-$beside" 2>/dev/null; rm -rf "$said"' EXIT
trap 'exit 1' INT TERM

read -ra units <<<"${UNITS:---workspace}"
if command -v cargo-nextest >/dev/null; then
    # Many of them wait for a peer's patience, or for the kernel.
    export NEXTEST_TEST_THREADS=${NEXTEST_TEST_THREADS:-$((2 * $(nproc)))}
    part "unit tests" cargo nextest run "${units[@]}" --no-fail-fast --status-level fail
    # Of the workspace, not of the package alone, whose dependencies would be built anew with fewer features.
    part "unit tests of verbs over the wire" env STARVERBS_LINK=udp \
        cargo nextest run "${units[@]}" -E 'package(starverbs-verbs)' --no-fail-fast --status-level fail
    # Without those of what the card in software alone has, or counts.
    part "unit tests of verbs on a board" env STARVERBS_TEST_BOARD=1 \
        cargo nextest run "${units[@]}" --no-fail-fast --status-level fail \
        -E "package(starverbs-verbs) and ($(grep -v '^#' tests/board.filter))"
    part "documentation tests" cargo test "${units[@]}" --doc --quiet
else
    part "unit and documentation tests" cargo test "${units[@]}" --no-fail-fast
    part "unit tests of verbs over the wire" env STARVERBS_LINK=udp \
        cargo test --package starverbs-verbs --no-fail-fast
fi

part "symbols of libibverbs.so.1" tests/abi/compare.sh dist/lib/libibverbs.so.1
part "symbols of libstarverbs.so" tests/abi/compare.sh dist/lib/libstarverbs.so tests/preload/libc.symbols
part "any linker" tests/abi/linkers.sh "${CARGO_TARGET_DIR:-target}/release"
part "others' libraries on libibverbs.so.1" tests/abi/loading.sh dist/lib
part "install and uninstall" tests/install/run.sh dist quick
part "keys over TLS" tests/keys/run.sh dist/bin/starverbs
part "patches for perftest" tests/perftest/run.sh ${PERFTEST:+"$PERFTEST" dist/lib}
part "large allocations as shared memory" tests/share/run.sh dist/lib
if [[ -e /usr/include/rdma/rdma_cma.h ]]; then
    part "layout of C's structs" tests/abi/layout.sh "provider/abi/src/layout_$(uname -m).rs" cc
else
    skip "layout of C's structs" "librdmacm-dev is not installed"
fi
if [[ -e /usr/include/infiniband/verbs.h ]]; then
    part "promises of the C edge" tests/abi/edges.sh dist/lib
    part "direct verbs" tests/abi/stardv.sh dist/lib
    part "examples" tests/examples/run.sh dist/lib
    part "multicast between processes" tests/abi/multicast.sh dist/lib
    part "threads, signals, one CPU, a crowd, growth and leaks" \
        tests/soak/run.sh dist/lib soak one_cpu polling crowd pairs growth leaks
    part "faults of processes" tests/faults/run.sh dist/lib
    part "the device in /sys and /dev" tests/preload/run.sh dist/lib
else
    parts="promises of the C edge, direct verbs, examples, multicast between processes, threads,"
    parts+=" one CPU, a crowd, growth and leaks, faults of processes, the device in /sys and /dev"
    skip "$parts" "libibverbs-dev is not installed"
fi

if command -v ib_send_lat >/dev/null && command -v ibv_rc_pingpong >/dev/null; then
    part "others' programs on the card (quick set)" \
        cargo run --quiet --package starverbs-conformance -- --quick
    # Of one host, these go through shared memory otherwise.
    perftests='perftest: ib_[a-z]+_(lat|bw)( -e| --use-srq| -q 16 -N| -A .*)?'
    part "others' programs over the wire (a few)" \
        cargo run --quiet --package starverbs-conformance -- --quick --net lo --link udp \
        --filter "^(ping-pong: ibv_(rc|srq)_.*-c|$perftests|connection manager: (ucmatose|ib_send.*))\$"
    # On two functions of an emulated board; then on a board and on a card in software.
    boards='(ping-pong|multicast|device|board): .*'
    boards+='|connection manager: (ucmatose|udaddy|rdma_client|cmtime -c 20|ib_send_lat -R)'
    boards+="|perftest: ib_[a-z]+_(lat|bw)( -e| -b| --use-srq| -s 64 .*| -c (U[CD]|XRC)| -l .*| -A .*)?"
    part "others' programs on the board (a few)" \
        cargo run --quiet --package starverbs-conformance -- --quick --net lo --device board \
        --filter "^($boards)\$"
    boards='ping-pong: ibv_(rc|ud)_pingpong -g 0 -c|perftest: ib_(read|atomic)_bw'
    boards+='|connection manager: (ucmatose|udaddy|rdma_client|mckey|ib_send_lat -R)'
    for ends in board,soft soft,board; do
        part "others' programs, server and client on $ends (a few)" \
            cargo run --quiet --package starverbs-conformance -- --quick --net lo --device "$ends" \
            --filter "^($boards)\$"
    done
else
    skip "others' programs" "ibverbs-utils or perftest is not installed"
fi

if [[ -e /usr/lib/python3/dist-packages/pyverbs && -e /usr/share/doc/rdma-core/tests ]]; then
    part "rdma-core's own tests" tests/pyverbs/run.py dist/lib
else
    skip "rdma-core's own tests" "python3-pyverbs or rdma-core is not installed, or without its documentation"
fi

skip "kernels of one's own" "compiles a compiler; runs on its own: \`make kernels\`"
skip "memory by address under miri" "runs on its own: \`make miri\`"
if ! cargo +nightly --version >/dev/null 2>&1 || ! command -v cargo-fuzz >/dev/null; then
    skip "fuzzing" "needs a nightly toolchain and cargo-fuzz; see \`make fuzz\`"
else
    skip "fuzzing" "runs on its own: \`make fuzz\`"
fi

wait "$beside"
trap 'rm -rf "$said"' EXIT
cat "$said/.one_cpu"

printf '\n=== summary\n'
cd "$said/summary" || exit 1
for verdict in passed skipped FAILED; do
    sed "s/^/$(printf '%-9s' "$verdict")/" "$verdict"
done
printf '%d parts passed, %d skipped, %d failed\n' "$(wc -l <passed)" "$(wc -l <skipped)" "$(wc -l <FAILED)"
# A long log is often read from its end only.
while read -r _ _ name; do
    printf '\n=== the end of what failed: %s\n' "$name"
    tail -n 12 "$said/${name//\//-}"
done <FAILED
[[ ! -s FAILED ]]
