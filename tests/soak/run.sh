#!/usr/bin/env bash
# Builds the C programs of tests/soak and tests/abi and runs them on the library in
# DIRECTORY, on a UDP port of their own.
# usage: run.sh [--seconds N] [--seed N] [--processes N] DIRECTORY PART...
# parts: soak      threads on shared and separate objects under a storm of signals, N seconds
#        one_cpu   a thread that polls under a spin lock beside one that wants it; ping-pongs: all on one CPU
#        pairs     processes, each connected with each: all bytes of what they send and write are checked
#        growth    10,000 objects of each kind, made and destroyed again and again: nothing is left
#        leaks     LeakSanitizer at the end of the soak and of tests/abi's programs
#        memcheck  the same, and ibv_rc_pingpong, under valgrind: bad accesses and leaks
#        tsan      the soak, program and library built for ThreadSanitizer (nightly toolchain with rust-src)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
seconds=5 seed=$(date +%s) processes=64
while [[ ${1:-} == --* ]]; do
    case $1 in
    --seconds) seconds=$2 ;;
    --seed) seed=$2 ;;
    --processes) processes=$2 ;;
    *) echo "unknown option $1" >&2; exit 2 ;;
    esac
    shift 2
done
lib=$(cd "${1:?usage: run.sh [--seconds N] [--seed N] [--processes N] DIRECTORY PART...}" && pwd)
shift
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

soak=("$here"/{soak,ground,traffic,churn}.c)
growth=("$here"/{growth,ground}.c)
# What other processes of the machine do on the default port is none of a test's business.
export STARVERBS_ADDRS=127.0.0.1 STARVERBS_PORT=$((20000 + RANDOM % 10000))

# build NAME SOURCES AND OPTIONS
build() { cc -Wall -Wextra -g -O1 -o "$tmp/$1" "${@:2}" -libverbs -lpthread; }

# run PROGRAM ARGUMENTS, with the library under test
run() { LD_LIBRARY_PATH=$lib "$@"; }

soak() {
    build soak "${soak[@]}"
    run "$tmp/soak" "$seconds" "$seed"
    STARVERBS_LINK=udp run "$tmp/soak" "$(((seconds + 1) / 2))" "$seed"
}

# The card's thread may help the processes, which must do without.
one_cpu() {
    build one_cpu -rdynamic "$here"/{one_cpu,ground}.c
    run "$tmp/one_cpu" processes
    STARVERBS_PROGRESS_THREAD=off run "$tmp/one_cpu" processes
    run "$tmp/one_cpu" threads
    run "$tmp/one_cpu" lock
    run "$tmp/one_cpu" beside
}

polling() {
    build polling "$here/polling.c"
    STARVERBS_LINK=local run "$tmp/polling"
    # over the wire the thread serves who spins on memory
    STARVERBS_LINK=udp run "$tmp/polling" send,read
}

# The library says where two could not share memory.
crowd() {
    build crowd "$here/crowd.c"
    local how
    for how in "" all; do
        STARVERBS_LINK=local STARVERBS_LOG=warn run "$tmp/crowd" "$processes" $how 2>"$tmp/said" &&
            [[ ! -s $tmp/said ]] || {
            cat "$tmp/said" >&2
            return 1
        }
    done
}

# Two processes that have each other's memory, two that have not, and so many that each awaits its doorbell.
pairs() {
    build pairs "$here"/{pairs,ground}.c
    local how
    for how in "2 user" "2 none" "12 user"; do
        STARVERBS_LINK=local STARVERBS_LOG=warn STARVERBS_LINK_TRUST=${how#* } \
            run "$tmp/pairs" "${how% *}" $(((seconds + 1) / 2)) "$seed" 2>"$tmp/said" &&
            [[ ! -s $tmp/said ]] || {
            cat "$tmp/said" >&2
            return 1
        }
    done
}

# Without malloc's caches per thread, its count of bytes in use is exact.
growth() {
    build growth "${growth[@]}"
    GLIBC_TUNABLES=glibc.malloc.tcache_count=0 run "$tmp/growth"
}

# each COMMAND: for the programs that check themselves, built with the options in `extra`.
extra=()
each() {
    build soak "${extra[@]}" "${soak[@]}"
    build edges "${extra[@]}" "$root/tests/abi/edges.c"
    build memory "${extra[@]}" "$root/tests/abi/memory.c"
    "$@" "$tmp/edges"
    "$@" "$tmp/memory"
    "$@" "$tmp/soak" "$((seconds < 5 ? seconds : 5))" "$seed"
}

leaks() {
    extra=(-fsanitize=leak)
    each run
}

# Valgrind runs one thread at a time, fairly, or a spinning one starves the others. What it has to say is an
# error; of forked children, which end with all that their parent had, it says nothing.
checked() {
    local log=$tmp/valgrind.$BASHPID
    run valgrind --quiet --fair-sched=yes --child-silent-after-fork=yes --leak-check=full --log-file="$log" \
        --show-leak-kinds=definite,possible --suppressions="$here/valgrind.supp" "$@"
    [[ ! -s $log ]] || { cat "$log"; return 1; }
}

memcheck() {
    extra=()
    each checked
    checked ibv_rc_pingpong -g 0 -c -n 200 -p "$STARVERBS_PORT" >"$tmp/server" 2>&1 &
    local server=$!
    for _ in $(seq 100); do
        ss -Hltn "sport = :$STARVERBS_PORT" | grep -q . && break
        sleep 0.1
    done
    checked ibv_rc_pingpong -g 0 -c -n 200 -p "$STARVERBS_PORT" 127.0.0.1 | tail -n 2
    wait "$server" || { cat "$tmp/server"; return 1; }
}

# The standard library too is built for the sanitizer, whose runtime is the one that comes with the compiler.
tsan() {
    local target=x86_64-unknown-linux-gnu out=${CARGO_TARGET_DIR:-$root/target}/tsan runtime
    if [[ ! -e $(rustc +nightly --print sysroot 2>/dev/null)/lib/rustlib/src ]]; then
        echo "skipped: rustup toolchain install nightly --component rust-src"
        return
    fi
    RUSTFLAGS=-Zsanitizer=thread cargo +nightly build --quiet -Zbuild-std --target $target \
        --package starverbs-cdylib \
        --manifest-path "$root/Cargo.toml" --target-dir "$out"
    # The sanitizer's calls are the program's.
    "$root/tools/scripts/link.sh" "$out/$target/debug/libstarverbs.a" "$tmp/tsan/libibverbs.so.1" \
        -Wl,-z,undefs
    runtime=$(find "$(rustc +nightly --print sysroot)" -name 'librustc-nightly_rt.tsan.a')
    for file in soak ground traffic churn; do
        cc -g -O1 -fsanitize=thread -c -o "$tmp/$file.o" "$here/$file.c"
    done
    cc -o "$tmp/soak-tsan" "$tmp"/{soak,ground,traffic,churn}.o -rdynamic -Wl,--whole-archive "$runtime" \
        -Wl,--no-whole-archive -libverbs -lpthread -ldl -lm
    LD_LIBRARY_PATH=$tmp/tsan "$tmp/soak-tsan" "$seconds" "$seed"
}

for part in "$@"; do
    case $part in
    soak | one_cpu | polling | crowd | pairs | growth | leaks | memcheck | tsan) echo "--- $part"; "$part" ;;
    *) echo "unknown part $part" >&2; exit 2 ;;
    esac
done
