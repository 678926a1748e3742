#!/usr/bin/env bash
# perftest-patches: that the series only adds and quotes no line of perftest's; with a tree, that it applies
# to it; with the card's libraries, too, that what it builds runs with all roles, and without the card.
# usage: run.sh [PERFTEST [LIBRARY_DIRECTORY]]
# The tree stays as it is. Building takes autoconf, automake, libtool, make, libibumad-dev and libpci-dev.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
patches=$here/../../perftest-patches
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

# Of a patch, what is not an addition without context; 0 hunks are wrong, too.
only_adds() {
    awk '
        function wrong() { printf "%s:%d: %s\n", FILENAME, FNR, $0; bad = 1 }
        left { if (/^\+/) left--; else wrong(); next }
        /^@@/ {
            if (!/^@@ -[0-9]+,0 \+[0-9]+(,[0-9]+)? @@$/) { wrong(); next }
            split($3, range, ",")
            left = range[2] == "" ? 1 : range[2]
            hunks++
            next
        }
        hunks && !/^(diff --git |index |--- |\+\+\+ |new file mode )/ { wrong() }
        END { exit bad || left || !hunks }
    ' "$1"
}

for patch in "$patches"/*.patch; do
    only_adds "$patch" || { echo "${patch##*/} does more than to add, or quotes perftest" >&2; exit 1; }
done
# A check that accepts all would not be seen: context, a heading, a removed line.
adding=$'diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1,0 +2 @@\n+new\n'
printf '%s' "$adding" >"$tmp/adds"
only_adds "$tmp/adds"
for text in "${adding/+new/ old}" "${adding/@@$'\n'/@@ int main()$'\n'}" "${adding/-1,0/-1}-old"$'\n' \
    "${adding/+2/+2,2}" "diff --git a/f b/f"; do
    printf '%s' "$text" >"$tmp/wrong"
    ! only_adds "$tmp/wrong" >/dev/null || { printf 'taken for an addition:\n%s\n' "$text" >&2; exit 1; }
done
echo "the series only adds"

tree=${1:-}
[[ $tree ]] || { echo "skipped: to apply it (no tree of perftest given)"; exit 0; }
mkdir "$tmp/tree"
tar -C "$tree" --exclude=.git -cf - . | tar -C "$tmp/tree" -xf -
"$patches/apply.sh" "$tmp/tree"
if "$patches/apply.sh" "$tmp/tree" 2>/dev/null; then
    echo "applied twice" >&2
    exit 1
fi

lib=${2:-}
[[ $lib ]] || { echo "skipped: to build and run it (no libraries of the card given)"; exit 0; }
lib=$(cd "$lib" && pwd)
cd "$tmp/tree"
{ sh autogen.sh && ./configure && make -j"$(nproc)"; } >"$tmp/build" 2>&1 ||
    { tail -n 20 "$tmp/build"; exit 1; }

# Client and server of a test, with options of each; both must succeed.
pair() {
    local program=$1 server=$2 client=$3 port=$((20000 + RANDOM % 10000))
    # shellcheck disable=SC2086  # options are words
    timeout 60 env LD_LIBRARY_PATH="$lib" STARVERBS_LINK=udp STARVERBS_ADDRS=127.0.0.1 \
        STARVERBS_PORT="$port" \
        bash -c '"./$0" -F -p "$1" $2 >"$4/server" 2>&1 & server=$!
            for _ in {1..100}; do ss -Hltn "sport = :$1" | grep -q . && break; sleep 0.05; done
            "./$0" -F -p "$1" $3 127.0.0.1 >"$4/client" 2>&1 && wait "$server"' \
        "$program" "$port" "$server" "$client" "$tmp" ||
        {
            echo "$program, server $server, client $client:" >&2
            cat "$tmp/server" "$tmp/client" >&2
            return 1
        }
}

# Which side is then stateless: with few connections auto is plain RoCEv2, as are two ends of the same
# preference.
for roles in "stateless stateful server" "stateful stateless client" "auto stateful server" "auto auto -" \
    "off stateful -" "stateless stateless -"; do
    read -r server client stateless <<<"$roles"
    for program in ib_send_lat ib_write_bw ib_read_bw ib_atomic_lat; do
        pair "$program" "--star=$server --star_counters -n 1000" "--star=$client --star_counters -n 1000"
        for side in server client; do
            grep -q "tx_packets  *[1-9]" "$tmp/$side" ||
                { echo "no counters:" >&2; cat "$tmp/$side" >&2; exit 1; }
            found=$(grep -c "star_stateless_qps  *1" "$tmp/$side" || true)
            [[ $found == "$([[ $side == "$stateless" ]] && echo 1 || echo 0)" ]] ||
                {
                    echo "$program, server $server, client $client: not the role of the $side" >&2
                    cat "$tmp/$side" >&2
                    exit 1
                }
        done
    done
    echo "runs: server $server, client $client"
done
pair ib_send_bw "-R --star=stateless -n 1000" "-R --star=stateful -n 1000"
pair ib_send_lat "--use_old_post_send --star=stateless -n 1000" "--star=stateful -n 1000"
# What cannot be is refused, by the option's name.
for options in "--star=both" "-c UD --star=auto"; do
    # shellcheck disable=SC2086  # options are words
    if LD_LIBRARY_PATH=$lib timeout 20 ./ib_send_lat $options >"$tmp/refused" 2>&1; then
        echo "not refused: $options" >&2
        exit 1
    fi
    grep -q -e --star "$tmp/refused"
done
# The same programs start on a libibverbs without StaR, as long as none is asked for.
{ ./ib_send_lat --help || true; } >"$tmp/help" 2>&1
grep -q -e --star_counters "$tmp/help"
echo "runs with librdmacm, with the old calls; what cannot be is refused"
