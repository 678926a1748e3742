#!/usr/bin/env bash
# Runs what takes too long for a push, each part a target of the Makefile, and writes what came of it to PAGE.
# A part that fails does not keep the others from running; a part that the Makefile does not have, or whose
# tools are missing, is skipped, and the page says so. What the page says of parts that are not named stays: a
# night may be too short for all of them.
# usage: nightly.sh PAGE PART...
set -uo pipefail
page=${1:?usage: nightly.sh PAGE PART...}
shift
cd "$(dirname "$0")/../.." || exit 1
logs=${CARGO_TARGET_DIR:-target}/nightly
mkdir -p "$logs"
failed=0
commit=$(git rev-parse --short HEAD 2>/dev/null || echo none)
# The parts in the page's order, and what stands behind each of them.
parts=()
declare -A row
while IFS='|' read -r _ name rest; do
    name=${name#*make } name=${name%%\`*}
    parts+=("$name")
    row[$name]=$rest
done < <(grep -s '^| `make ' "$page")

# Why a part cannot run here, if it cannot.
missing() {
    if ! grep -q "^$1:" Makefile; then
        echo 'no such target'
    elif [[ $1 == fuzz ]] && ! { command -v cargo-fuzz && cargo +nightly --version; } >/dev/null 2>&1; then
        echo 'needs a nightly toolchain and cargo-fuzz'
    fi
}

# Of PART: result, seconds.
write() {
    [[ -v row[$1] ]] || parts+=("$1")
    row[$1]=" $2 | $3 | $commit | $(date -u +%F) |"
    printf '%s\n' '# The last nightly runs' '' \
        'Written by `make nightly` (tools/scripts/nightly.sh); do not edit.' \
        "The last part ran on $(uname -sr), $(nproc) CPUs." '' \
        '| part | result | seconds | commit | date |' '|---|---|--:|---|---|' >"$page"
    local part
    for part in "${parts[@]}"; do printf '| `make %s` |%s\n' "$part" "${row[$part]}"; done >>"$page"
}

for part in "$@"; do
    reason=$(missing "$part")
    if [[ -n $reason ]]; then
        printf '=== %s: skipped: %s\n' "$part" "$reason"
        write "$part" "skipped: $reason" ''
        continue
    fi
    printf '=== %s (output in %s)\n' "$part" "$logs/$part.log"
    SECONDS=0
    # `make soak` and others read SECONDS as a setting, which is not this script's clock.
    if env -u SECONDS make --no-print-directory "$part" >"$logs/$part.log" 2>&1; then
        result=passed
    else
        result='**failed**' failed=1
        tail -n 20 "$logs/$part.log"
    fi
    printf '=== %s: %s, %d s\n' "$part" "${result//\*/}" "$SECONDS"
    write "$part" "$result" "$SECONDS"
done
exit "$failed"
