#!/usr/bin/env bash
# Counts what a message takes from memory as queue pairs grow in number: instructions, cache lines and pages
# that are not in caches of a usual size, under callgrind. Writes PAGE.
# usage: misses.sh [PAGE [QPS...]], after `make build`
set -euo pipefail
cd "$(dirname "$0")/../.."
page=${1:-docs/misses.md}
shift || true
qps=("$@")
((${#qps[@]})) || qps=(1 1000 10000 100000)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'kill $(jobs -p) 2>/dev/null; exit 1' INT TERM

many=$work/many
cc -O2 -o "$many" tools/bench/programs/many.c -L dist/lib -libverbs
export LD_LIBRARY_PATH=$PWD/dist/lib STARVERBS_ADDRS=127.0.0.1 STARVERBS_PROGRESS_THREAD=off
# A data cache and one behind it: size, ways, bytes of a line. Of pages: the translations that a CPU keeps,
# 64 and 1,536.
lines='--D1=32768,8,64 --LL=4194304,16,64'
pages='--D1=262144,4,4096 --LL=6291456,12,4096'
# Each run warms up with a quarter of its messages, so that there are 50,000 more in the second.
few=20000 many_more=60000 more=50000

# Whether link $1 is counted with $2 queue pairs: too many do not agree on shared memory in time.
counts() { [[ $1 == udp ]] || (($2 < 50000)); }

# Of callgrind's file $1: instructions, and data accesses that miss the first cache, and the last one.
events() {
    awk '/^events:/ { for (n = 2; n <= NF; n++) name[n - 1] = $n }
         /^(summary|totals):/ { for (n = 2; n <= NF; n++) sum[name[n - 1]] = $n }
         END { print sum["Ir"], sum["D1mr"] + sum["D1mw"], sum["DLmr"] + sum["DLmw"] }' "$1"
}

# Of link $1 with $2 queue pairs and caches as $3 names them: what a message takes.
count() {
    local out=$work/$1.$2.$3 n
    for n in $few $many_more; do
        STARVERBS_LINK=$1 valgrind -q --tool=callgrind --cache-sim=yes ${!3} --callgrind-out-file="$out.$n" \
            "$many" -l -q "$2" -w 256 -n "$n" -t 3600 >/dev/null
    done
    paste -d ' ' <(events "$out.$few") <(events "$out.$many_more") |
        awk -v more="$more" '{ print ($4 - $1) / more, ($5 - $2) / more, ($6 - $3) / more }' >"$out"
}

for link in udp local; do
    for n in "${qps[@]}"; do
        counts "$link" "$n" || continue
        echo "$link, $n queue pairs" >&2
        # One of them on each CPU.
        count "$link" "$n" lines &
        beside=$!
        count "$link" "$n" pages
        wait "$beside"
    done
done

{
    cat <<'EOF'
# What a message takes from memory

Written by `make misses` (tools/scripts/misses.sh); do not edit.

8 B WRITEs on RC queue pairs in turn, in a shuffled order, 256 under way in all, in one thread that is both
ends (`tools/bench/programs/many.c -l -w 256`); what the program and the library do for one of them, without
the kernel. Counted, not timed, by callgrind's model of caches: lines of 64 bytes that
are not in a cache of 32 KiB, and not in one of 4 MiB behind it; pages of 4 KiB whose translation is not
among the last 64, and not among the last 1,536, which is what a CPU keeps. On one host more
than 50,000 are left out: so many connections do not agree on shared memory in time under callgrind.

| link, queue pairs | instructions | lines, 32 KiB | lines, 4 MiB | pages, 64 | pages, 1,536 |
|---|---:|---:|---:|---:|---:|
EOF
    for link in udp local; do
        for n in "${qps[@]}"; do
            counts "$link" "$n" || continue
            paste -d ' ' "$work/$link.$n.lines" "$work/$link.$n.pages" |
                awk -v row="${link/udp/wire}, $n" '
                { printf "| %s | %.0f | %.1f | %.1f | %.1f | %.1f |\n", row, $1, $2, $3, $5, $6 }'
        done
    done | sed 's/^| local/| same host/'
    cat <<'EOF'

Whatever the layout, a message over one of so many queue pairs takes two lines for its WQE and SGE, one for
the queue's indices, and one of a context at each end: five lines, on at least four pages, as the program's
queues and the card's contexts are memory of their own. What is above that is this library's:
the handle and the object behind it, a second line of the indices, and the other lines of the two contexts
(the requester's and the responder's parts of one lie side by side, since any queue pair may be either).
[Decision 25](decisions/0025-lines-of-a-queue-pair.md) has the lines one by one, and what was tried with
huge pages.
EOF
} >"$work/page"
cp "$work/page" "$page"
cat "$page"
