#!/usr/bin/env bash
# Builds the programs of examples/ with the commands of its README's kind, and runs them on the card.
# usage: run.sh LIBRARY_DIRECTORY
set -euo pipefail
lib=$(cd "${1:?usage: run.sh LIBRARY_DIRECTORY}" && pwd)
examples=$(cd "$(dirname "$0")/../../examples" && pwd)
tmp=$(mktemp -d)
server=
replicas=()
trap 'kill $server "${replicas[@]}" 2>/dev/null || true; rm -rf "$tmp"' EXIT
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
build keyvalue_rpc -lrdmacm -libverbs -lpthread
build cache -libverbs
build sort -libverbs -lpthread

both pingpong 17471
grep -Eq '^1000 round trips, [0-9.]+ us each$' "$tmp/client" || fail "pingpong: $(cat "$tmp/client")"
grep -qx 'answered 1000 messages' "$tmp/server" || fail "pingpong: $(cat "$tmp/server")"

both keyvalue 17472 colour city clock
for line in 'colour: green' 'city: Delft'; do
    grep -qx "$line" "$tmp/client" || fail "keyvalue: $(cat "$tmp/client")"
done
grep -Eqx 'clock: changed [0-9]+ times' "$tmp/client" || fail "keyvalue: $(cat "$tmp/client")"

both keyvalue_rpc 17473 7 200 999
for line in '7: 7 bytes by 1 RPC, [0-9]+ READs or TCP' '200: 200 bytes by 1 RPC, [0-9]+ READs or TCP' \
    '999 is not there'; do
    grep -Eqx "$line" "$tmp/client" || fail "keyvalue_rpc: $(cat "$tmp/client")"
done

timeout 120 "$tmp/stateless" 200 >"$tmp/client" || fail "stateless: $(cat "$tmp/client")"
grep -Eqx ' *stateless +0 +[1-9][0-9]*' "$tmp/client" || fail "stateless: $(cat "$tmp/client")"

numbers() { od -An -v -tu8 -w8 "$1"; }
head -c 1600000 /dev/urandom >"$tmp/numbers"
# The receivers' cards shuffle; the senders'.
for how in 1 4 '-s 1' '-s 4'; do
    timeout 120 "$tmp/sort" $how "$tmp/numbers" "$tmp/sorted" >"$tmp/client" ||
        fail "sort: $(cat "$tmp/client")"
    grep -qx "sorted 200000 numbers with ${how#-s } processes" "$tmp/client" ||
        fail "sort: $(cat "$tmp/client")"
    cmp <(numbers "$tmp/numbers" | LC_ALL=C sort -n) <(numbers "$tmp/sorted") || fail "sort: not sorted"
done
# A client that reads all the time, while a replica changes its key, and then ends.
# Takes the place of the shell that runs it.
cache() { exec timeout 120 "$tmp/cache" "$@"; }
await() {
    for ((tries = 0; tries < 200; tries++)); do
        "$@" && return
        sleep 0.05
    done
    fail "cache: not within 10 s: $*"
}
lines() { [[ -e $1 && $(wc -l <"$1") == "$2" ]]; }
for at in 1 2; do
    "$tmp/cache" serve "$tmp/replicas" &
    replicas+=($!)
    await lines "$tmp/replicas" "$at"
done
(cache put "$tmp/replicas" colour green) >"$tmp/client"
(cache get "$tmp/replicas" colour city) >>"$tmp/client"
for line in 'written to 2 of 2 replicas' 'colour: green' 'city is not there'; do
    grep -qx "$line" "$tmp/client" || fail "cache: $(cat "$tmp/client")"
done
cache watch "$tmp/replicas" colour 60 >"$tmp/client" &
server=$!
said() { grep -q "$1" "$tmp/client"; }
# Its counters are seen from outside, as all are.
counted() { "$lib/../bin/starverbs" stat --json | grep -Eq '"onerma_completed": ?[1-9]'; }
await counted
kill -HUP "${replicas[0]}"
await said 'replica 0: the next key'
kill "${replicas[0]}"
await said 'replica 0: fails'
kill "$server"
wait "$server" || [[ $? == 124 ]] || fail "cache: $(cat "$tmp/client")"
server=
grep -q 'new keys: 1, replicas that failed: 1$' "$tmp/client" || fail "cache: $(cat "$tmp/client")"
echo "examples: pingpong, keyvalue, keyvalue_rpc, stateless, sort and cache work"
