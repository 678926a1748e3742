#!/usr/bin/env bash
# Counts what a message costs on the data path: instructions under callgrind, system calls under strace.
# Writes the tables of docs/datapath.md. Fails if the data path allocates, hashes, searches a tree, or makes a
# system call that neither sends nor receives, nor moves bytes to or from a peer's memory; on a board, if it
# makes any but those of a poll that has found nothing for a while.
# usage: instructions.sh, after `make build`; with --top, shows the functions that take most, too
set -euo pipefail
cd "$(dirname "$0")/../.."
doc=docs/datapath.md
work=$(mktemp -d)
server= board=
trap 'rm -rf "$work"; for process in $server $board; do kill "$process" 2>/dev/null || true; done' EXIT

# Instructions in code that hashes or searches trees that one run may have in all; and calls of the allocator,
# of which two processes need some to find each other while they poll already.
most_lookups=1000
most_alone=0
most_together=64
failed=0
fail() { echo "FAILED: $*" >&2; failed=1; }

# Instructions of the functions whose name matches $2 and all that they call, in callgrind's file $1.
inclusive() {
    callgrind_annotate --inclusive=yes --threshold=100 --auto=no "$1" |
        awk -v name="$2" 'match($0, /^ *[0-9,]+/) && $0 ~ name {
            ir = substr($0, 1, RLENGTH); gsub(/[ ,]/, "", ir)
            if (ir + 0 > most) most = ir + 0 } END { print most + 0 }'
}

# Says of callgrind's file $1 how often the allocator was called, and how many instructions hashed
# or searched trees. Code that was inlined stands below the name of its source file (fi, fe),
# whatever function it became a part of.
lookups() {
    awk -v allocator='^(malloc|calloc|realloc|free|posix_memalign|aligned_alloc|mmap|munmap|brk)(@.*)?$' \
        -v search='(core|std)/src/hash/|hashbrown|collections/(hash|btree)' '
        /^(fl|fi|fe)=/ { id = $1; sub(/^f[lie]=/, "", id); if (NF > 1) file[id] = $2; at = file[id] }
        /^c?fn=/       { id = $1; sub(/^c?fn=/, "", id)
                         if (NF > 1) { name[id] = $0; sub(/^[^ ]* /, "", name[id]) }
                         if (/^cfn/) callee = name[id] }
        /^calls=/      { split($1, n, "="); skip = 1
                         if (callee ~ allocator) calls += n[2]
                         next }
        /^[-+*0-9]/    { if (!skip && at ~ search) ir += $2; skip = 0 }
        END            { print calls + 0, ir + 0 }' "$1"
}

# Holds callgrind's file $1 of the run that $2 names to the limits; $3 calls of the allocator are fine.
check() {
    read -r allocations searches < <(lookups "$1")
    ((allocations <= $3)) || fail "$2: $allocations calls of the allocator"
    ((searches <= most_lookups)) || fail "$2: $searches instructions that hash or search trees"
}

# What takes most in callgrind's file $1, with and without what it calls. callgrind_annotate has a
# line for each file that was inlined into a function: without callees they add up, with callees
# the largest is the function's.
top() {
    local inclusive
    for inclusive in yes no; do
        echo
        echo "$2, instructions of functions" \
            "$([[ $inclusive == yes ]] && echo with || echo without) what they call:"
        callgrind_annotate --inclusive=$inclusive --threshold=100 --auto=no "$1" |
            awk -v inclusive=$inclusive '
            /^ *[0-9,]+ \(.*%\) / && !/libc-start|libc_start|below main|short_backtrace|datapath::m/ &&
            !/:main |ld-linux|:0x0|TOTALS/ {
                ir = $1; gsub(/,/, "", ir)
                name = $0; sub(/^[^:]*:/, "", name); sub(/ \[[^]]*\]$/, "", name)
                if (inclusive == "no") sum[name] += ir; else if (ir + 0 > sum[name] + 0) sum[name] = ir + 0 }
            END { for (name in sum) printf "%12d  %s\n", sum[name], name }' | sort -rn | awk 'NR <= 25'
    done
}

# System calls by name per message, from two summaries of strace with $3 messages more in
# the second; those of at least $4.
calls_per_message() {
    awk -v more="$3" -v least="$4" \
        'FNR == 1 { run++ } $1 ~ /^[0-9.]+$/ && $NF != "total" { n[run, $NF] = $4; seen[$NF] }
        END { for (s in seen) { per = (n[2, s] - n[1, s]) / more
                                if (per >= least) printf "%s %.2f\n", s, per } }' \
        "$1" "$2" | sort
}

### Two cards in one thread: the same instructions every time.

example() {
    local target=${CARGO_TARGET_DIR:-target}
    cargo build --release --locked --quiet --package starverbs-verbs --example datapath
    echo "$target/release/examples/datapath"
}

# One row: $1 kind, $2 messages, $3 what is counted, $4 of it in a message, $5 what carries them, udp or
# local.
row() {
    local out=$work/$1.$5 count=$2 per try
    for try in 1 2 3 4 5; do
        valgrind -q --tool=callgrind --toggle-collect='*datapath::measured*' --callgrind-out-file="$out.cg" \
            "$datapath" "$1" "$count" "$5" >"$out.counters"
        # On a busy machine a retransmission timer may run out meanwhile: one packet in a
        # hundred sent again is bearable.
        awk '/^tx_packets/ { packets = $2 + $3 }
             /^(retransmitted|handed_on)/ && ($2 + $3) * 100 > packets { bad = 1 }
             END { exit bad }' "$out.counters" && break
        ((try < 5)) || fail "$1 was disturbed each time: $(tr '\n' ' ' <"$out.counters")"
    done
    check "$out.cg" "$1" $most_alone
    [[ -z $show_top ]] || top "$out.cg" "$1" >&2
    local asks answers
    if [[ $1 == pingpong || $1 == dialect ]]; then
        asks=$(($(inclusive "$out.cg" datapath::pingpong_turn) / 2)) answers=$asks
    else
        asks=$(inclusive "$out.cg" datapath::requester_turn)
        answers=$(inclusive "$out.cg" datapath::responder_turn)
    fi
    per=$((count * $4))
    awk -v what="$3" -v asks="$asks" -v answers="$answers" -v per="$per" '
        $1 ~ /_syscalls$/ { a[$1] = $2 / per; b[$1] = $3 / per }
        END { printf "| %s | %.0f | %.0f | %.3f + %.3f | %.3f + %.3f |\n", what, asks / per, answers / per,
              a["tx_syscalls"], a["rx_syscalls"], b["tx_syscalls"], b["rx_syscalls"] }' "$out.counters"
    # pwritev and preadv are WRITE and READ to a peer of this host; a poll that has found nothing for a while
    # yields, and asks each 10 ms what CPU time others took (clock_gettime). epoll_wait is the look at sockets
    # that seldom have something, and counted as a receive. So many more messages in the second run that the
    # calls by which the port finds its neighbours, now and then, do not show. The example itself looks for
    # its counters among its descriptors.
    local others more=$((count > 1000 ? count : 1000))
    for n in 500 $((500 + more)); do strace -f -c -o "$out.$n" "$datapath" "$1" "$n" "$5" >/dev/null; done
    others=$(calls_per_message "$out.500" "$out.$((500 + more))" "$more" 0.05 |
        grep -vE -e '^((send|recv)m?m?(msg|to|from)|epoll_wait|readlink|pwritev|preadv) ' \
            -e '^(sched_yield|clock_gettime) ' || true)
    [[ -z $others ]] || fail "$1: other system calls for each message: $others"
}

### perftest: the C ABI, two processes, the cards' threads.

# Runs $@ as server and then its client behind $wrap_server and $wrap_client; the port is $port.
pair() {
    $wrap_server "$@" -p "$port" >"$work/server.out" 2>&1 &
    server=$!
    for _ in $(seq 200); do
        grep -qsiE "$(printf ':%04X [0-9A-F]+:0000 0A ' "$port")" /proc/net/tcp /proc/net/tcp6 && break
        sleep 0.05
    done
    timeout 120 $wrap_client "$@" -p "$port" 127.0.0.1 >"$work/client.out" 2>&1 ||
        { fail "$* ended badly: $(tail -3 "$work/client.out")"; kill "$server" 2>/dev/null || true; }
    wait "$server" || true
    server=
}

# Starts a board with two functions, whose socket is $work/board.
start_board() {
    dist/bin/starverbs board --socket "$work/board" --sockets 2 >"$work/board.out" 2>&1 &
    board=$!
    for _ in $(seq 200); do
        [[ ! -S $work/board.1 ]] || return 0
        sleep 0.05
    done
    fail "no board: $(tail -3 "$work/board.out")"
}

# One row: $2 messages of kind $1 and as many more between two functions of the board, by a program that
# only posts and polls; $3 is what is counted. A poll that has found nothing 256 times lets others have the
# CPU, as the board may wait for it, and looks now and then whether the board is there.
board_row() {
    local calls more=$2
    for n in 500 $((500 + more)); do
        strace -f -c -o "$work/board.$n" "$datapath" "$1" "$n" "board:$work/board" >/dev/null
    done
    calls=$(calls_per_message "$work/board.500" "$work/board.$((500 + more))" "$more" 0.005)
    no_calls "$1 on a board" "$calls"
    echo "| $3 | $(spell "$calls") |"
}

# Fails if the calls $2 per message of what $1 names have any but those of a poll that finds nothing. Of the
# commands by which a program begins, and waits for, a few more or less show in the difference of two runs.
no_calls() {
    local others
    others=$(awk '$2 >= 0.02' <<<"$2" | grep -vE '^(sched_yield|poll) ' || true)
    [[ -z $others ]] || fail "$1: system calls for each message: $others"
}

spell() { awk 'NF { printf "%s%s %s", sep, $1, $2; sep = ", " } END { if (!sep) printf "none" }' <<<"$1"; }

# One row: $1 the name of the row, the rest a perftest program with its arguments,
# but for the number of messages.
perftest_row() {
    local name=$1 side cg calls allocated=()
    shift
    for side in client server; do
        cg=$work/$side.cg
        local grind="valgrind -q --tool=callgrind --callgrind-out-file=$cg --toggle-collect=*post::post_send
            --toggle-collect=*post::post_recv --toggle-collect=*poll::poll_cq"
        wrap_client='' wrap_server=''
        declare "wrap_$side=$grind"
        pair "$@" -n 2000
        check "$cg" "$* ($side)" $most_together
        allocated+=("$allocations")
        [[ -z $show_top ]] || top "$cg" "$* ($side)" >&2
    done
    wrap_server=''
    for n in 100 10100; do
        wrap_client="strace -f -c -o $work/strace.$n"
        pair "$@" -n "$n"
    done
    calls=$(calls_per_message "$work/strace.100" "$work/strace.10100" 10000 0.005)
    [[ -z $board ]] || no_calls "$*, on a board" "$calls"
    echo "| $name | ${allocated[0]} | ${allocated[1]} | $(spell "$calls") |"
}

show_top=
[[ ${1:-} != --top ]] || show_top=yes
datapath=$(example)
{
    echo "| per | instructions, requester | responder" \
        "| system calls that send + receive, requester | responder |"
    echo "|---|---:|---:|---:|---:|"
    row pingpong 2000 "8 B SEND, ping-pong" 2 udp
    row dialect 2000 "8 B SEND, ping-pong, on queue pairs that may call kernels" 2 udp
    row stream 4000 "8 B SEND, 32 under way" 1 udp
    row spread 8192 "8 B WRITE, 256 queue pairs in turn, 64 under way" 1 udp
    row write 100 "4 KiB packet of 1 MiB WRITEs" 256 udp
    row read 100 "4 KiB packet of 1 MiB READs" 256 udp
    row pingpong 2000 "8 B SEND, ping-pong, same host" 2 local
    row stream 4000 "8 B SEND, 32 under way, same host" 1 local
    row spread 8192 "8 B WRITE, 256 queue pairs in turn, 64 under way, same host" 1 local
    row write 100 "4 KiB of 1 MiB WRITEs, same host" 256 local
    row read 100 "4 KiB of 1 MiB READs, same host" 256 local
    row idle 10000 "a poll that finds nothing, one peer on the same host" 1 local
    row crowd 10000 "a poll that finds nothing, 100 peers on the same host" 1 local
} >"$work/table"

if command -v ib_send_lat >/dev/null && [[ -e dist/lib/libibverbs.so.1 ]]; then
    port=$((20000 + $$ % 10000))
    # A wire of their own: processes that come and go on it cost those that are there a few calls.
    export LD_LIBRARY_PATH=$PWD/dist/lib STARVERBS_ADDRS=127.0.0.1 STARVERBS_PORT=$port
    {
        echo
        echo "| perftest | calls of the allocator in 2000 messages, client | server" \
            "| system calls per message of the client |"
        echo "|---|---:|---:|---|"
        perftest_row "\`ib_send_lat -s 8\`" ib_send_lat -s 8
        perftest_row "\`ib_send_bw -s 8\`" ib_send_bw -s 8
        perftest_row "\`ib_write_bw -s 65536\`" ib_write_bw -s 65536
        start_board
        export STARVERBS_DEVICE=board:$work/board
        perftest_row "\`ib_send_lat -s 8\`, on a board" ib_send_lat -s 8
        perftest_row "\`ib_send_bw -s 8\`, on a board" ib_send_bw -s 8
        echo
        echo "| on a board, a program that only posts and polls | system calls per message |"
        echo "|---|---|"
        board_row pingpong 20000 "8 B SEND, ping-pong"
        board_row stream 20000 "8 B SEND, 32 under way"
        board_row spread 20480 "8 B WRITE, 256 queue pairs in turn, 64 under way"
    } >>"$work/table"
else
    fail "perftest or dist/lib is missing: nothing was counted through the C ABI"
fi

# StRoM 5.1: what a connection may do beside, costs its messages nothing.
awk -F'|' '/ping-pong [|]/ && !plain { plain = $3 } /may call kernels/ { dialect = $3 }
    END { exit !(plain > 0 && dialect > 0 && dialect <= 1.01 * plain && dialect >= 0.99 * plain)
    }' "$work/table" ||
    fail "messages of queue pairs that may call kernels do not take as many instructions as others"

cat "$work/table"
awk -v table="$work/table" '/^<!-- table: written by `make instructions`/ {
        print; print ""; while ((getline line < table) > 0) print line
        print ""; inside = 1 }
    /^<!-- end -->/ { inside = 0 }
    !inside && !/^<!-- table: written by `make instructions`/' "$doc" >"$work/doc"
((failed)) || cp "$work/doc" "$doc"
exit $failed
