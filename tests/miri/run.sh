#!/usr/bin/env bash
# The crates that hold memory by address, under miri: queues, rings, the wire's headers, the batches of
# frames, what is written to a program's memory.
# usage: run.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

ready() { cargo +nightly miri --version; }
ready >/dev/null 2>&1 || rustup component add --toolchain nightly miri rust-src >/dev/null 2>&1 || true
ready

# Once, and not by each of those below that find none.
cargo +nightly miri setup
# A case costs a thousand times what it does otherwise. Miri has no working folder,
# where proptest keeps what failed.
export PROPTEST_CASES=8 PROPTEST_DISABLE_FAILURE_PERSISTENCE=1
# The programs' addresses come as integers, in SGEs, so that miri cannot know which memory they are of.
export MIRIFLAGS="-Zmiri-permissive-provenance -Zmiri-env-forward=PROPTEST_CASES
    -Zmiri-env-forward=PROPTEST_DISABLE_FAILURE_PERSISTENCE ${MIRIFLAGS:-}"
# In one process: each one reads the whole library anew. The packages side by side: miri has one thread.
tests=()
miri() {
    cargo +nightly miri test --quiet --locked --package "$@" &
    tests+=($!)
}

miri starverbs-backend --lib -- batch:: copy:: program:: zeroed:: inbox::
miri starverbs-core --lib -- wire:: --skip star::
miri starverbs-queues --tests
miri starverbs-rings --lib

status=0
for test in "${tests[@]}"; do wait "$test" || status=1; done
exit "$status"
