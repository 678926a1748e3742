#!/usr/bin/env bash
# Which crates of this project each library crate uses: docs/architecture.md, as a rule. `make lint` checks.
# usage: rooms.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

declare -A may=(
    [queues]='' [settings]=''
    [core]='queues'
    [cm]='core' [rings]='core queues' [star]='core' [sim]='core star'
    [backend]='cm core settings star'
    [verbs]='backend cm core rings settings star'
)

uses() {
    cargo tree --locked --package "starverbs-$1" --edges normal --depth 1 --prefix none --format '{p}' |
        sed -n 's/^starverbs-\([a-z]*\) .*/\1/p' | tail -n +2 | sort -u | paste -sd' '
}

for crate in "${!may[@]}"; do
    found=$(uses "$crate")
    [[ $found == "${may[$crate]}" ]] || {
        echo "rooms.sh: provider/$crate uses '$found', and may use '${may[$crate]}' (docs/architecture.md)" >&2
        exit 1
    }
done
echo "rooms: ${#may[@]} crates use what they may"
