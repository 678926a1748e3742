#!/usr/bin/env bash
# Shows unmodified RDMA programs on the card: a server and a client, two processes
# of this machine, over 127.0.0.1.
set -euo pipefail
cd "$(dirname "$0")/../.."
starverbs=dist/bin/starverbs
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true' EXIT

# Runs a command as server and, against it, as client; shows the client's output.
pair() {
    echo
    echo "\$ starverbs run -- $*                  # the server"
    echo "\$ starverbs run -- $* 127.0.0.1        # the client"
    "$starverbs" run -- "$@" >/dev/null 2>&1 &
    server=$!
    # The programs meet on TCP port 18515 (hexadecimal 4853); the client tries once, so
    # wait until the server listens.
    for _ in $(seq 100); do
        grep -qsE ':4853 [0-9A-F]+:0000 0A ' /proc/net/tcp /proc/net/tcp6 && break
        sleep 0.05
    done
    timeout 60 "$starverbs" run -- "$@" 127.0.0.1
    wait "$server"
    server=
}

say() { printf '\n== %s\n' "$*"; }

say "The device that programs see"
"$starverbs" run -- ibv_devices

say "Latency: one message at a time, there and back; half of the round trip, in microseconds"
pair ib_send_lat -s 8
cat <<'TEXT'

   t_min, t_typical (the median) and t_max are one-way times over all iterations; the 99% column says what
   only one message in a hundred exceeds. Both processes poll, so on a machine with fewer than two free cores
   they disturb each other and the tail grows.
TEXT

say "Bandwidth: RDMA WRITE, 128 messages of 64 KiB under way at any time"
pair ib_write_bw
cat <<'TEXT'

   BW average is payload in MiB per second as the writer saw it acknowledged; MsgRate is millions of messages
   per second. The server's CPU moves the bytes here, on a card with hardware it would not.
TEXT

say "Ping-pong: libibverbs' own example, an RC queue pair with checked sends and receives"
pair ibv_rc_pingpong -g 0 -c
cat <<'TEXT'

   The two address lines are what the programs told each other over TCP: queue pair number, first packet
   sequence number, GID. The rest went over the card: 1000 messages of 4 KiB each way. With -c the program
   looks at what the last one brought and would have said "invalid data".

Your own program: dist/bin/starverbs run -- PROGRAM ARGS
TEXT
