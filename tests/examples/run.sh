#!/usr/bin/env bash
# Builds the programs of examples/ with the commands of its README's kind, and runs them on the card.
# usage: run.sh LIBRARY_DIRECTORY
set -euo pipefail
lib=$(cd "${1:?usage: run.sh LIBRARY_DIRECTORY}" && pwd)
examples=$(cd "$(dirname "$0")/../../examples" && pwd)
tmp=$(mktemp -d)
server=
trap '[[ -z $server ]] || kill "$server" 2>/dev/null || true; rm -rf "$tmp"' EXIT
export LD_LIBRARY_PATH=$lib

fail() {
    echo "examples: $*" >&2
    exit 1
}

build() {
    cc -Wall -Wextra -Wpedantic -std=c11 -D_GNU_SOURCE -O2 -I"$examples/../include" -o "$tmp/$1" \
        "$examples/$1.c" \
        -L"$lib" "${@:2}"
}

# Starts a server with these arguments; its client is tried until there is somebody at the port.
both() {
    local name=$1 port=$2
    shift 2
    timeout 120 "$tmp/$name" "$port" >"$tmp/server" 2>&1 &
    server=$!
    for ((tries = 0; tries < 100; tries++)); do
        if timeout 60 "$tmp/$name" 127.0.0.1 "$port" "$@" >"$tmp/client" 2>"$tmp/errors"; then
            wait "$server" || fail "$name: the server: $(cat "$tmp/server")"
            server=
            return
        fi
        grep -q refused "$tmp/errors" || fail "$name: the client: $(cat "$tmp/client" "$tmp/errors")"
        sleep 0.1
    done
    fail "$name: nobody at port $port"
}

build pingpong -lrdmacm -libverbs
build keyvalue -lrdmacm -libverbs
build stateless -libverbs
build keyvalue_rpc -lrdmacm -libverbs

both pingpong 17471
grep -Eq '^1000 round trips, [0-9.]+ us each$' "$tmp/client" || fail "pingpong: $(cat "$tmp/client")"
grep -qx 'answered 1000 messages' "$tmp/server" || fail "pingpong: $(cat "$tmp/server")"

both keyvalue 17472 colour city clock
for line in 'colour: green' 'city: Delft'; do
    grep -qx "$line" "$tmp/client" || fail "keyvalue: $(cat "$tmp/client")"
done
grep -Eqx 'clock: changed [0-9]+ times' "$tmp/client" || fail "keyvalue: $(cat "$tmp/client")"

both keyvalue_rpc 17473 7 200 999
for line in '7: 7 bytes by 1 RPC or [0-9]+ READs' '200: 200 bytes by 1 RPC or [0-9]+ READs' \
    '999 is not there'; do
    grep -Eqx "$line" "$tmp/client" || fail "keyvalue_rpc: $(cat "$tmp/client")"
done

timeout 120 "$tmp/stateless" 200 >"$tmp/client" || fail "stateless: $(cat "$tmp/client")"
grep -Eqx ' *stateless +0 +[1-9][0-9]*' "$tmp/client" || fail "stateless: $(cat "$tmp/client")"
echo "examples: pingpong, keyvalue, keyvalue_rpc and stateless work"
