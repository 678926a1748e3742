#!/usr/bin/env bash
# Format, warnings, who uses whom, licences. What is not installed is skipped and named.
set -euo pipefail
cd "$(dirname "$0")/../.."

cargo fmt --all --check
cargo clippy --workspace --all-targets -- -D warnings
tools/scripts/rooms.sh
comments() {
    git grep -nE '^\s*(//|/\*|\*)' -- '*.rs' '*.c' '*.h' ':!provider/abi'
    git grep -nE '^\s*# ' -- '*.sh'
}
if comments | grep -E '^[^:]*:[0-9]*:.{111}'; then
    echo 'lint.sh: comments end at column 110' >&2
    exit 1
fi
tools/scripts/deny.sh
