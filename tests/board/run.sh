#!/usr/bin/env bash
# Others' programs, as they are, on two functions of an emulated board: pingpongs and perftest, client and
# server. What is not installed is skipped, and named.
# usage: run.sh LIBRARY_DIRECTORY STARVERBS
set -euo pipefail
usage='usage: run.sh LIBRARY_DIRECTORY STARVERBS'
lib=$(cd "${1:?$usage}" && pwd) starverbs=$(realpath "${2:?$usage}")
tmp=$(mktemp -d)
board=
trap '[[ -z $board ]] || kill "$board" 2>/dev/null || true; rm -rf "$tmp"' EXIT

export STARVERBS_PORT=$((20000 + RANDOM % 10000)) STARVERBS_ADDRS=127.0.0.1
socket=$tmp/board
: >"$tmp/lines"
"$starverbs" board --socket "$socket" --sockets 2 >"$tmp/lines" &
board=$!
for _ in {1..100}; do
    [[ $(wc -l <"$tmp/lines") -lt 2 ]] || break
    sleep 0.1
done
grep -qx "board at $socket.1" "$tmp/lines" || { echo "no board" >&2; exit 1; }

# A program on a function of the board.
on() {
    local function=$1
    shift
    env LD_PRELOAD="$lib/libstarverbs.so" LD_LIBRARY_PATH="$lib/preload" STARVERBS_DEVICE="board:$function" \
        timeout 120 "$@"
}

# Client and server of a program; both must succeed.
pair() {
    local port=$((30000 + RANDOM % 10000)) server
    command -v "$1" >/dev/null || { echo "skipped: $1 (not installed)"; return; }
    on "$socket" "$@" -d star0 -p "$port" >"$tmp/server" 2>&1 &
    server=$!
    # Not before the server listens.
    for _ in {1..600}; do
        ! grep -qE "$(printf ':%04X (0{8}|0{32}):0000 0A' "$port")" /proc/net/tcp /proc/net/tcp6 || break
        sleep 0.1
    done
    if ! on "$socket.1" "$@" -d star0 -p "$port" 127.0.0.1 >"$tmp/client" 2>&1 || ! wait "$server"; then
        echo "failed: $*" >&2
        tail -n 20 "$tmp/client" "$tmp/server" >&2
        exit 1
    fi
    echo "passed: $*"
}

for program in rc uc ud srq; do pair "ibv_${program}_pingpong" -g 0 -n 200; done
pair ibv_rc_pingpong -g 0 -n 200 -e
for program in send write read atomic; do pair "ib_${program}_lat" -x 0 -n 200; done
for program in send write read atomic; do pair "ib_${program}_bw" -x 0 -n 200; done
pair ib_write_bw -x 0 -n 200 -s 65536 -q 4
pair ib_send_bw -x 0 -n 200 -r 64 --use-srq
pair ib_send_lat -x 0 -n 200 -c UD
pair ib_send_lat -x 0 -n 200 -c UC
pair ib_send_lat -x 0 -n 200 -e

kill "$board"
wait "$board"
board=
[[ ! -e $socket && ! -e $socket.1 ]] || { echo "sockets are left" >&2; exit 1; }
echo "the board ended as asked"
