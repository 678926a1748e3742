#!/usr/bin/env bash
# Programs on libstarverbs-share.so: what they rely on of memory and fork (memory.c), real ones beside the
# same without it, and Valkey's or Redis's BGSAVE. What is not installed is skipped, and named.
# usage: run.sh LIBRARY_DIRECTORY [--measure]
set -uo pipefail
usage='usage: run.sh LIBRARY_DIRECTORY [--measure]'
lib=$(cd "${1:?$usage}" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
share=$lib/libstarverbs-share.so
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
failures=0 checks=0

fail() { failures=$((failures + 1)); printf 'FAILED: %s\n' "$*" >&2; }

have() {
    command -v "$1" >/dev/null && return
    echo "skipped: $1 is not installed"
    return 1
}

shared() { LD_PRELOAD=$share timeout 120 "$@"; }

# The same output, with the library and without: same PROGRAM ARGUMENTS...
same() {
    checks=$((checks + 1))
    timeout 120 "$@" >"$tmp/plain" 2>&1
    local status=$?
    shared "$@" >"$tmp/shared" 2>&1
    local other=$?
    [[ $status == "$other" ]] || fail "$1 ends with $other, not $status: $(tail -n 3 "$tmp/shared")"
    cmp -s "$tmp/plain" "$tmp/shared" || fail "$1: $(diff "$tmp/plain" "$tmp/shared" | head -n 5)"
}

check() {
    checks=$((checks + 1))
    "$@" || fail "$* ended with $?"
}

compile() { cc -Wall -Wextra -O1 -fno-builtin -o "$tmp/${1%.c}" "$here/$1" -lpthread -ldl || fail "cc $1"; }

if [[ ${2:-} == --measure ]]; then
    compile measure.c
    uptime
    for preload in "" "$share"; do
        LD_PRELOAD=$preload "$tmp/measure"
    done
    exit
fi

compile memory.c
check timeout 300 "$tmp/memory" plain
check shared timeout 300 "$tmp/memory" shared

# The symbols are all that it adds to a process.
check diff "$here/symbols" <("$here/../abi/symbols.sh" "$share")

seq 300000 | shuf --random-source=<(yes) >"$tmp/numbers"
same sort -S 100M -o "$tmp/sorted" "$tmp/numbers"
same sort -S 300M --parallel=4 "$tmp/numbers"
{
    echo '#include <stdio.h>'
    for i in $(seq 500); do
        echo "int f$i(int x) { for (int i = 0; i < x; i++) x ^= i * $i; return x; }"
    done
} >"$tmp/many.c"
same cc -O2 -S -o - "$tmp/many.c"
have xz && same sh -c "xz -1 -T2 -c '$tmp/numbers' | xz -dc | cksum"
have perl && same perl -e '
    my $x = "a" x 30_000_000; my $pid = fork;
    if (!$pid) { substr($x, 5, 1) = "b"; exit(substr($x, 5, 1) eq "b" ? 0 : 1) }
    waitpid $pid, 0; print "$? ", substr($x, 5, 1), "\n"'

if have python3; then
    # The system's: a version manager's is a script.
    python=$([[ -x /usr/bin/python3 ]] && echo /usr/bin/python3 || command -v python3)
    same "$python" "$here/programs.py"
fi

# `starverbs run` puts it before the card's library, and says nothing else.
if [[ -x $lib/../bin/starverbs ]]; then
    checks=$((checks + 1))
    said=$("$lib/../bin/starverbs" run --set share=malloc -- sh -c 'echo "$LD_PRELOAD"')
    [[ $said == "$share:$lib/libstarverbs.so"* ]] || fail "starverbs run preloads '$said'"
    if have ibv_devinfo; then
        check timeout 60 "$lib/../bin/starverbs" run --set share=malloc -- ibv_devinfo >/dev/null
    fi
else
    echo "skipped: there is no command starverbs beside $lib"
fi

check "${python:-python3}" "$here/snapshot.py" "$share"
check "${python:-python3}" "$here/snapshot.py" "$share" libc.so.6

echo "$checks checks, $failures failed"
((failures == 0))
