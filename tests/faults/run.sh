#!/usr/bin/env bash
# Faults of processes, made for real: builds the C programs beside it and runs them on the library in
# DIRECTORY, on UDP ports of their own.
# usage: run.sh [--long] [--seed N] [--rounds N] DIRECTORY [PART...]
# parts: kill     kill -9 at random moments of one of two processes, whatever they do together
#        onerma   the same of 1RMA's initiator or target
#        ends     one of two processes that share memory is killed, exits, executes another program, is
#                 stopped or gives up, at a random moment; so many rounds
#        direct   one of them is stopped while the other executes requests on its memory, or while it does so
#        ways     which memory of a peer is mapped, and a file that its owner makes shorter
#        users    two processes that are not each other's equals: users, capabilities and others (needs root)
#        hostile  a process that writes anything into all memory that it shares with a victim
#        stop     SIGSTOP for less and for more than the peer's patience
#        nomem    allocations that fail, a limit of the address space
#        limits   as much of everything as the device says, and as the memory allows
#        fds      no descriptors left
#        capture  a capture on a full disk, at the file's limit, into a pipe that nobody reads
#        address  addresses and links that go and come back (needs root)
#        clock    clocks that jump
#        wire     sends that the kernel refuses
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
kills=24 rounds=100 hostiles=60 stop=1 jumps=40 seed=$(($(date +%s) % 100000))
while [[ ${1:-} == --* ]]; do
    case $1 in
    --long) kills=600 rounds=2000 hostiles=2000 stop=120 jumps=2000 ;;
    --seed) seed=$2; shift ;;
    --rounds) rounds=$2 hostiles=$2; shift ;;
    *) echo "unknown option $1" >&2; exit 2 ;;
    esac
    shift
done
lib=$(cd "${1:?usage: run.sh [--long] [--seed N] [--rounds N] DIRECTORY [PART...]}" && pwd)
shift
(($#)) || set -- stop address kill onerma ends direct ways users hostile nomem limits fds capture clock wire
tmp=$(mktemp -d)
mounted=
cleanup() {
    [[ -z $mounted ]] || umount "$tmp/small"
    rm -rf "$tmp"
}
trap cleanup EXIT

# A panic of the library is an error, and its backtrace would need memory itself.
export STARVERBS_ADDRS=127.0.0.1 STARVERBS_PORT=$((20000 + RANDOM % 10000)) RUST_BACKTRACE=0

build() { cc -Wall -Wextra -g -O1 -I "$here/../../include" -o "$tmp/$1" "$here/$1.c" -L "$lib" -libverbs \
    -lpthread "${@:2}"; }
shim() { cc -Wall -Wextra -O1 -shared -fPIC -o "$tmp/$1.so" "$here/$1.c"; }
run() { LD_LIBRARY_PATH=$lib "$tmp/$@"; }

# By the wire, too, which two processes of one host do not take by themselves.
kill_some() {
    build kill
    run kill "$kills" "$seed"
    STARVERBS_LINK=udp run kill "$((kills / 2))" "$seed"
}

onerma() {
    build onerma
    STARVERBS_ADDRS=127.0.0.1,127.0.0.2,127.0.0.3 run onerma "$((kills / 2))" "$seed"
}

# By each way to the other's memory; malloc's is one that both have mapped.
ends() {
    build ends
    run ends "$rounds" "$seed"
    local fewer=$(((rounds + 3) / 4))
    STARVERBS_LINK_TRUST=none run ends "$fewer" "$seed"
    STARVERBS_LINK_TRUST=trace run ends "$fewer" "$seed"
    STARVERBS_SHARE=malloc LD_PRELOAD=$lib/libstarverbs-share.so:$lib/libstarverbs.so \
        run ends "$fewer" "$seed"
}

direct() {
    build direct
    run direct
}

# Needs what keeps the program's own files, and what serves malloc from one.
ways() {
    build ways
    STARVERBS_SHARE=malloc LD_PRELOAD=$lib/libstarverbs-share.so:$lib/libstarverbs.so run ways
}

users() {
    if ((EUID != 0)); then
        echo 'users: skipped, needs root'
        return
    fi
    # one is started as programs are to which LD_LIBRARY_PATH means nothing
    build users -Wl,-rpath,"$lib"
    run users
}

hostile() {
    build hostile
    run hostile "$hostiles" "$seed"
}

stop() {
    build stop
    run stop "$stop"
    STARVERBS_LINK=udp run stop 1
}

nomem() {
    build nomem
    { run nomem && STARVERBS_LINK=udp run nomem ' for StaR'; } 2>"$tmp/said" ||
        { cat "$tmp/said" >&2; return 1; }
}

limits() {
    build limits
    STARVERBS_MEMORY=32M run limits
}

fds() {
    build fds
    run fds
}

# Once with a standard error that can be read, which says one line, and once with one that is broken.
capture() {
    build capture
    local file=$tmp/small/x.pcap how
    mkdir "$tmp/small"
    if mount -t tmpfs -o size=64k tmpfs "$tmp/small" 2>/dev/null; then
        mounted=yes
    else
        echo 'capture, full: skipped, needs root'
    fi
    mkfifo "$tmp/pipe"
    for how in ${mounted:+full} limit pipe; do
        [[ $how == pipe ]] && file=$tmp/pipe
        [[ $how == limit ]] && file=$tmp/limited.pcap
        STARVERBS_LINK=udp STARVERBS_PCAP=$file run capture "$how" 2>"$tmp/said"
        [[ $(grep -c 'STARVERBS_PCAP: .*; the capture ends here' "$tmp/said") == 1 &&
            $(wc -l <"$tmp/said") == 1 ]] || {
            echo "capture, $how: not one line:" >&2
            cat "$tmp/said" >&2
            return 1
        }
        [[ $how == pipe ]] || rm -f "$file"
        STARVERBS_LINK=udp STARVERBS_PCAP=$file run capture "$how" 2>/dev/full
    done
}

address() {
    if ((EUID != 0)) || ! command -v ip >/dev/null; then
        echo 'address: skipped, needs root and ip(8)'
        return
    fi
    build address
    run address
}

clock() {
    build clock
    shim jump
    head -c 16 /dev/zero >"$tmp/jump"
    JUMP=$tmp/jump LD_PRELOAD=$tmp/jump.so run clock "$jumps"
}

wire() {
    build wire
    shim refuse
    head -c 8 /dev/zero >"$tmp/refuse"
    STARVERBS_LINK=udp REFUSE=$tmp/refuse LD_PRELOAD=$tmp/refuse.so run wire
}

# A part that mostly waits runs beside the others, on a port of its own; what it said comes at the end.
waiting=()
for part in "$@"; do
    STARVERBS_PORT=$((STARVERBS_PORT + 1))
    case $part in
    kill) echo "--- kill"; kill_some ;;
    stop | address)
        "$part" >"$tmp/said.$part" 2>&1 &
        waiting+=("$part:$!")
        ;;
    onerma | ends | direct | ways | users | hostile | nomem | limits | fds | capture | clock | wire)
        echo "--- $part"
        "$part"
        ;;
    *) echo "unknown part $part" >&2; exit 2 ;;
    esac
done
status=0
for part in "${waiting[@]}"; do
    wait "${part#*:}" || status=1
    echo "--- ${part%:*}"
    cat "$tmp/said.${part%:*}"
done
exit "$status"
