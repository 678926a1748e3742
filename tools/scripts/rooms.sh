#!/usr/bin/env bash
# Which crates of this project each library crate uses: docs/architecture.md, as a rule. `make lint` checks.
# usage: rooms.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

declare -A may=(
    [queues]='' [settings]='' [vfio]=''
    [core]='queues'
    [cm]='core' [rings]='core queues' [star]='core' [onerma]='core' [kernels]='core'
    [sim]='core kernels onerma star'
    [sdk]='core kernels' [wasm]='core kernels'
    [backend]='cm core onerma rings settings star'
    [board]='backend cm core kernels queues settings star vfio' [rules]='backend core queues vfio'
    [verbs]='backend cm core kernels queues rings settings star vfio'
)

uses() {
    cargo tree --locked --package "starverbs-$1" --edges normal --depth 1 --prefix none --format '{p}' |
        sed -n 's/^starverbs-\([a-z]*\) .*/\1/p' | tail -n +2 | sort -u | paste -sd' '
}

for crate in "${!may[@]}"; do
    found=$(uses "$crate")
    [[ $found == "${may[$crate]}" ]] || {
        echo "rooms.sh: provider/$crate uses '$found'," \
            "and may use '${may[$crate]}' (docs/architecture.md)" >&2
        exit 1
    }
done
echo "rooms: ${#may[@]} crates use what they may"

# The core's modules from the lowest up: each names lower ones alone. The last line is one module on purpose:
# a card, what works in it, and what it works in are generic over each other.
lower=(types counters error rng wire rtt congestion qpc limits room qp mr command tags relay shared_qp strom)
card=(env engine coalesce transport nic)

in_list() {
    local one=$1 other
    shift
    for other in "$@"; do [[ $other != "$one" ]] || return 0; done
    return 1
}

core=provider/core/src
for at in "${!lower[@]}"; do
    module=${lower[$at]}
    names=$(find "$core/$module.rs" "$core/$module" -name '*.rs' ! -name '*tests.rs' 2>/dev/null |
        xargs sed '/^#\[cfg(test)\]/,$d' | grep -oE 'crate::([a-z_]+)' | sed 's/crate:://' | sort -u || true)
    for name in $names; do
        [[ $name == "$module" ]] || in_list "$name" "${lower[@]:0:at}" || {
            echo "rooms.sh: $core/$module names crate::$name, which is no lower module" >&2
            exit 1
        }
    done
done
for file in "$core"/*.rs; do
    module=$(basename "$file" .rs)
    [[ $module == lib || $module == *_tests ]] || in_list "$module" "${lower[@]}" "${card[@]}" || {
        echo "rooms.sh: $file has no place in the order of modules" >&2
        exit 1
    }
done
echo "rooms: the core's ${#lower[@]} lower modules name lower ones alone"
