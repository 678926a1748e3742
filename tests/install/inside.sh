#!/usr/bin/env bash
# Programs on an installed command, as a user starts them; other programs see the system's libraries. Names
# the command as the shell finds it. Programs that are not installed are skipped, and named.
# usage: inside.sh COMMAND
set -euo pipefail
starverbs=${1:?usage: inside.sh COMMAND}
server=
tmp=$(mktemp -d)
trap '[[ -z $server ]] || kill "$server" 2>/dev/null || true; rm -rf "$tmp"' EXIT
# A port of its own, whatever else runs on this host.
port=$((20000 + RANDOM % 10000))
export STARVERBS_PORT=$((30000 + RANDOM % 2000))

fail() { echo "inside.sh: $*" >&2; exit 1; }

have() { command -v "$1" >/dev/null || { echo "skipped: $1 is not installed"; return 1; }; }

# Expects a part of what a command prints: expect TEXT COMMAND...
expect() {
    local wanted=$1 got
    shift
    got=$("$@" 2>&1) || fail "$*: ended with $?: $got"
    [[ $got == *"$wanted"* ]] || fail "$*: no '$wanted' in: $got"
}

# A server and its client, two processes on the card: pingpong OPTIONS.
pingpong() {
    local options=$1 got
    # shellcheck disable=SC2086
    timeout 300 "$starverbs" run $options -- ibv_rc_pingpong -g 0 -c -n 200 -p "$port" >"$tmp/server" 2>&1 &
    server=$!
    for _ in $(seq 1000); do
        kill -0 "$server" 2>/dev/null || fail "ibv_rc_pingpong: the server ended: $(cat "$tmp/server")"
        grep -qsE "$(printf ':%04X [0-9A-F]+:0000 0A ' "$port")" /proc/net/tcp /proc/net/tcp6 && break
        sleep 0.05
    done
    # shellcheck disable=SC2086
    got=$(timeout 300 "$starverbs" run $options -- \
        ibv_rc_pingpong -g 0 -c -n 200 -p "$port" 127.0.0.1 2>&1) ||
        fail "ibv_rc_pingpong: $got $(cat "$tmp/server")"
    wait "$server" || fail "ibv_rc_pingpong: the server ended with $?: $(cat "$tmp/server")"
    server=
    [[ $got == *"200 iters"* ]] || fail "ibv_rc_pingpong: no '200 iters' in: $got"
}

expect "starverbs " "$starverbs" --version
expect "star0" "$starverbs" info
expect "star0" "$starverbs" run -- ls /sys/class/infiniband
[[ $(LC_ALL=C ldconfig -p 2>/dev/null) != *starverbs* ]] || fail "ld.so finds the card's libraries by itself"

if have ibv_devinfo; then
    expect "PORT_ACTIVE" "$starverbs" run -- ibv_devinfo
    expect "PORT_ACTIVE" "$starverbs" run --library -- ibv_devinfo
    expect "PORT_ACTIVE" "$starverbs" run --preload -- ibv_devinfo
    [[ $(ibv_devinfo 2>&1) != *star0* ]] || fail "ibv_devinfo sees the card without the command"
    pingpong ""
    pingpong "--library"
fi

# By the names that programs open; those of librdmacm too lead to the one card of the process.
if have python3; then
    for options in "" "--library"; do
        # shellcheck disable=SC2086
        expect "same" "$starverbs" run $options -- python3 -c '
import ctypes
names = "libibverbs.so.1", "libibverbs.so", "librdmacm.so.1", "librdmacm.so"
first, *others = [ctypes.CDLL(name) for name in names]
at = lambda library, name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value
assert all(at(other, "ibv_open_device") == at(first, "ibv_open_device") for other in others), "several cards"
assert at(others[1], "rdma_create_id") == at(first, "rdma_create_id"), "several cards"
print("same")'
    done
fi
echo "$starverbs: programs run on the card"
