#!/usr/bin/env bash
# Format, warnings, who uses whom, licences. What is not installed is skipped and named.
set -euo pipefail
cd "$(dirname "$0")/../.."

cargo fmt --all --check
cargo clippy --workspace --all-targets -- -D warnings
tools/scripts/rooms.sh
if LC_ALL=C.UTF-8 git grep -nE '^.{111}' -- \
    '*.rs' '*.c' '*.h' '*.sh' '*.py' '*.lua' Makefile .ci/run ':!provider/abi'; then
    echo 'lint.sh: lines end at column 110' >&2
    exit 1
fi
tools/scripts/deny.sh
