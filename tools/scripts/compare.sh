#!/usr/bin/env bash
# Compares the library here with that of another commit: perftest, and programs of tools/bench, in pairs, one
# run on each after the other, as a machine whose speed changes between two minutes changes it for both of a
# pair. Writes PAGE.
# usage: compare.sh [--pairs N] [--link udp|local] [--case PATTERN] PAGE COMMIT, after `make build`
set -euo pipefail
cd "$(dirname "$0")/../.."
pairs=9 link=udp pattern=.
while [[ ${1:-} == --* ]]; do
    case $1 in
    --pairs) pairs=$2 ;;
    --link) link=$2 ;;
    --case) pattern=$2 ;;
    *) echo "unknown option $1" >&2; exit 2 ;;
    esac
    shift 2
done
page=${1:?usage: compare.sh [OPTIONS] PAGE COMMIT} commit=$(git rev-parse --short=8 "${2:?which commit?}")
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
base=$target/compare/$commit
tmp=$(mktemp -d)
server=
trap '[[ -z $server ]] || kill "$server" 2>/dev/null; rm -rf "$tmp"' EXIT

# name|what is read: the column of perftest's last line, or the name or column of a line of a program's; what
# that is divided by; unit|settings and command
star='star -s STARVERBS_STAR=stateless -c STARVERBS_STAR=stateful'
few=STARVERBS_QPC_CACHE=300,miss=500ns
cases=$(grep -E "$pattern" <<END
WRITE, 1 MiB|4 953.674 GB/s|ib_write_bw -s 1048576 -n 8000 --noPeak
SEND, 1 MiB|4 953.674 GB/s|ib_send_bw -s 1048576 -n 8000 --noPeak
READ, 1 MiB|4 953.674 GB/s|ib_read_bw -s 1048576 -n 8000 --noPeak
WRITE, 64 KiB|4 953.674 GB/s|ib_write_bw -s 65536 -n 40000 --noPeak
WRITE, 8 B|5 1 M/s|ib_write_bw -s 8 -n 2000000 --noPeak
SEND, 8 B|5 1 M/s|ib_send_bw -s 8 -n 2000000 --noPeak
SEND latency, 8 B|5 1 us|ib_send_lat -s 8 -n 200000
WRITE, 8 B, 1,000 QPs, CPU time|2 1 us|many -l -q 1000 -w 256 -t 2
WRITE, 8 B, 100,000 QPs, CPU time|2 1 us|many -l -q 100000 -w 256 -t 2
WRITE, 8 B, 1,000 QPs, room for 300, CPU time|2 1 us|$few many -l -q 1000 -w 256 -t 2
WRITE, 8 B, 1,000 QPs, room for 300, fcfs, CPU time|2 1 us|$few,policy=fcfs many -l -q 1000 -w 256 -t 2
RPC, RC, 100 connections|calls_per_second 1000 thousand/s|star -n 100 -t 2
RPC, StaR, 100 connections|calls_per_second 1000 thousand/s|$star -n 100 -t 2
RPC, StaR, 10,000 connections|calls_per_second 1000 thousand/s|$star -n 10000 -t 2
RPC, RC, 1,000 connections, room for 300|calls_per_second 1000 thousand/s|star -s $few -n 1000 -t 2
END
)

build() {
    [[ -e $base/dist/lib/libibverbs.so.1 ]] && return
    echo "building $commit in $base" >&2
    git worktree prune
    [[ -e $base ]] || git worktree add --force --detach --quiet "$base" "$commit"
    CARGO_TARGET_DIR=$base/target make -C "$base" build >"$tmp/build" 2>&1 || {
        tail -n 20 "$tmp/build" >&2
        exit 1
    }
}

# once LIBRARY WHAT BY COMMAND: one run, and what it measured.
once() {
    local lib=$1 what=$2 by=$3
    settings=("LD_LIBRARY_PATH=$lib" STARVERBS_ADDRS=127.0.0.1)
    # Older ones have the wire alone.
    ! grep -q STARVERBS_LINK "$lib/libibverbs.so.1" || settings+=("STARVERBS_LINK=$link")
    shift 3
    while [[ $1 == STARVERBS_* ]]; do settings+=("$1") && shift; done
    if [[ $1 == ib_* ]]; then perftest "$@"; else program "$@"; fi |
        awk -v what="$what" -v by="$by" '
            what + 0 && NR == 1 { value = $what }
            $1 == what          { value = $2 }
            END                 { if (value == "") exit 1; print value / by }'
}

# perftest's line of figures, of two processes with a CPU each.
perftest() {
    local port=$((20000 + RANDOM % 10000))
    env "${settings[@]}" timeout 60 taskset -c 0 "$@" -p $port >"$tmp/server" 2>&1 &
    server=$!
    for _ in $(seq 100); do
        [[ -z $(ss -Hltn "sport = :$port") ]] || break
        sleep 0.05
    done
    env "${settings[@]}" timeout 60 taskset -c 1 "$@" -p $port 127.0.0.1 >"$tmp/client" 2>&1 || {
        cat "$tmp/server" "$tmp/client" >&2
        exit 1
    }
    wait "$server"
    server=
    grep -A 1 '^ #bytes' "$tmp/client" | tail -n 1
}

# What a program of tools/bench prints, which is both sides itself.
program() {
    local name=$1
    shift
    [[ -e $tmp/$name.program ]] ||
        cc -O2 -o "$tmp/$name.program" "tools/bench/programs/$name.c" -L dist/lib -lrdmacm -libverbs
    # `many -l` is one thread.
    [[ $name != many ]] || settings+=(STARVERBS_PROGRESS_THREAD=off)
    env "${settings[@]}" timeout 60 "$tmp/$name.program" "$@" 2>"$tmp/client" || {
        cat "$tmp/client" >&2
        exit 1
    }
}

median() {
    sort -n | awk '{ v[NR] = $1 }
        END { print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'
}

build
# What built the base is still in the load.
for _ in $(seq 300); do
    load=$(cut -d ' ' -f 1 /proc/loadavg)
    ! awk "BEGIN { exit !($load < 0.5) }" || break
    sleep 1
done
for pair in $(seq "$pairs"); do
    while IFS='|' read -r name how command; do
        read -r what by unit <<<"$how"
        read -ra words <<<"$command"
        before=$(once "$base/dist/lib" "$what" "$by" "${words[@]}" </dev/null)
        after=$(once "$PWD/dist/lib" "$what" "$by" "${words[@]}" </dev/null)
        echo "$before $after" >>"$tmp/$name"
        echo "pair $pair of $pairs: $name: $before -> $after $unit" >&2
    done <<<"$cases"
done

{
    printf '%s\n' "# $commit and $(git rev-parse --short=8 HEAD)" '' \
        "Written by \`make compare BASE=$commit\` (tools/scripts/compare.sh); do not edit." '' \
        "$(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1), $(nproc) processors, $(uname -sr);" \
        "load $load at the start. Ends of perftest pinned, link \`$link\`, $pairs pairs of runs, one" \
        "after the other. A pair's ratio is the new figure by the old: more is better, but for times." '' \
        "| case | $commit | now | pairs' ratios, median | least, most | command |" \
        '|---|--:|--:|--:|--:|---|'
    while IFS='|' read -r name how command; do
        ratios=$(awk '{ printf "%.3f\n", $2 / $1 }' "$tmp/$name" | sort -n)
        printf '| %s | %.2f %s | %.2f %s | %.2f | %.2f, %.2f | `%s` |\n' "$name" \
            "$(cut -d ' ' -f 1 "$tmp/$name" | median)" "${how##* }" \
            "$(cut -d ' ' -f 2 "$tmp/$name" | median)" "${how##* }" \
            "$(median <<<"$ratios")" "$(head -n 1 <<<"$ratios")" "$(tail -n 1 <<<"$ratios")" "$command"
    done <<<"$cases"
} >"$page"
