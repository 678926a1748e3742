#!/usr/bin/env bash
# The library on aarch64: this project's tests in C and others' programs, all of that machine, in a root
# folder of Debian 12, under emulation where this host is another. Then its processes beside processes of
# this host on one wire. Emulation shows no weak memory ordering: docs/memory-ordering.md. Needs root;
# exits with 2 where it cannot run.
# usage: run.sh DIST DIST_OF_THIS_HOST
set -euo pipefail
usage='usage: run.sh DIST DIST_OF_THIS_HOST'
dist=$(cd "${1:?$usage}" && pwd)
own=$(cd "${2:?$usage}" && pwd)
repo=$(cd "$(dirname "$0")/../.." && pwd)
target=$(realpath -m "${CARGO_TARGET_DIR:-$repo/target}")
root=$target/root-aarch64
packages=gcc,g++,libc6-dev,binutils,libibverbs-dev,librdmacm-dev
packages+=,ibverbs-utils,perftest,rdmacm-utils,iproute2,procps
passed=() failed=()
# What qemu-user lacks: process_vm_readv and process_vm_writev (on-demand paging, imports and the
# check of addresses that are registered need them); in release 7.2, Debian 12's, it takes no
# interface's number from an ip_mreqn.
skip=
[[ $(uname -m) == aarch64 ]] || skip='memory import errors rdmacm_ids'

"$repo/tools/scripts/root.sh" "$root" bookworm "$packages" arm64

if [[ -z ${AARCH64_INSIDE:-} ]]; then
    # What is mounted, started and sent meanwhile is this run's own.
    AARCH64_INSIDE=1 exec unshare --mount --propagation private --net --pid --fork --kill-child "$0" "$@"
fi
ip link set lo up
mkdir -p "$root/repo" "$root/card"
mount -t proc proc /proc
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --bind "$repo" "$root/repo"
mount --bind "$dist" "$root/card"

# A command on aarch64.
there() {
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 chroot "$root" "$@"
}

part() {
    local name=$1 started=$SECONDS
    shift
    printf '=== %s\n' "$name"
    if "$@"; then passed+=("$name"); else failed+=("$name"); fi
    printf '    %d s\n' "$((SECONDS - started))"
}

card() { there timeout 60 /card/bin/starverbs run -- "$@"; }

# Waits until somebody listens at a port, of TCP or of the connection manager: there
# a unix socket bears its number.
listens() {
    local tries service
    service=$(printf '@starverbs/[^ ]*/cm/[0-9a-f]*%04x(/|$)' "$1")
    for ((tries = 0; tries < 600; tries++)); do
        ss -Htln "sport = :$1" | grep -q . && return
        grep -qE "$service" /proc/net/unix && return
        sleep 0.1
    done
    return 1
}

# A server and its client of one program: pair SERVER CLIENT PORT COMMAND..., where the two say
# whose machine runs them. Where the command has an @, the server's has -s there, and the client's
# -c with an option for the address.
pair() {
    local server=$1 client=$2 port=$3 pid status=0 address=(127.0.0.1)
    shift 3
    [[ $* != *@* ]] || address=(-a 127.0.0.1)
    "$server" "${@/@/-s}" >"$target/aarch64.server" 2>&1 &
    pid=$!
    listens "$port" || { wait "$pid"; cat "$target/aarch64.server"; return 1; }
    "$client" "${@/@/-c}" "${address[@]}" >"$target/aarch64.client" 2>&1 || status=$?
    wait "$pid" || status=$?
    ((status == 0)) || tail -n 20 "$target/aarch64.server" "$target/aarch64.client"
    return "$status"
}

here() { timeout 60 "$own/bin/starverbs" run -- "$@"; }

programs=(
    "17501 ibv_rc_pingpong -g 0 -c -p 17501 -n 200" "17501 ibv_uc_pingpong -g 0 -c -p 17501 -n 200"
    "17501 ibv_ud_pingpong -g 0 -c -p 17501 -n 200" "17501 ibv_srq_pingpong -g 0 -c -p 17501 -n 200"
    "17501 ib_write_bw -p 17501 -n 500" "17501 ib_read_lat -p 17501 -n 200" \
        "17501 ib_send_bw -p 17501 -n 500 -s 4096"
    "17501 ib_atomic_bw -p 17501 -n 500" "17501 rping @ -p 17501 -v -C 20"
)

[[ $(there uname -m) == aarch64 ]] || { echo "run.sh: $root runs no aarch64" >&2; exit 2; }
for test in "$dist"/tests/*; do
    [[ -x $test ]] || continue
    part "unit tests: $(basename "$test")" there "/card/tests/$(basename "$test")" --quiet
done
part "layout of C's structs" there /repo/tests/abi/layout.sh /repo/provider/abi/src/layout_aarch64.rs cc
part "symbols of libibverbs.so.1" there /repo/tests/abi/compare.sh /card/lib/libibverbs.so.1
part "symbols of libstarverbs.so" \
    there /repo/tests/abi/compare.sh /card/lib/libstarverbs.so /repo/tests/preload/libc.symbols
part "an installed command" there /repo/tests/install/inside.sh /card/bin/starverbs
part "promises of the C edge" there env SKIP="$skip" /repo/tests/abi/edges.sh /card/lib
part "direct verbs" there /repo/tests/abi/stardv.sh /card/lib
part "examples" there /repo/tests/examples/run.sh /card/lib
for program in "${programs[@]}"; do
    read -ra words <<<"$program"
    part "${words[*]:1}" pair card card "${words[@]}"
done
if [[ $(uname -m) != aarch64 ]] && command -v ibv_rc_pingpong ib_write_bw >/dev/null; then
    for program in "${programs[@]}"; do
        read -ra words <<<"$program"
        part "${words[*]:1}, with a server on $(uname -m)" pair here card "${words[@]}"
        part "${words[*]:1}, with a client on $(uname -m)" pair card here "${words[@]}"
    done
fi

printf 'aarch64: %d passed, %d failed\n' "${#passed[@]}" "${#failed[@]}"
((${#failed[@]} == 0)) || printf 'FAILED   %s\n' "${failed[@]}"
((${#failed[@]} == 0))
