#!/usr/bin/env bash
# Format, warnings, who uses whom, licences. What is not installed is skipped and named.
# usage: lint.sh [what cargo is to look at]
set -euo pipefail
cd "$(dirname "$0")/../.."

cargo fmt --all --check
cargo clippy "${@:---workspace}" --all-targets -- -D warnings
tools/scripts/rooms.sh
if LC_ALL=C.UTF-8 git grep -nE '^.{111}' -- \
    '*.rs' '*.c' '*.h' '*.sh' '*.py' '*.lua' Makefile .ci/run ':!provider/abi'; then
    echo 'lint.sh: lines end at column 110' >&2
    exit 1
fi
# What several crates call alike is the same thing there.
alike='Params|WireError|Srq|SpinLock|QpInit|Qp|Pd|HeldRecv|Conn|ChannelHandle|BoardLink|BoardCq|Board'
twice=$(git grep -hoE '^ *pub(\([^)]*\))? (struct|enum|trait|union) [A-Z][A-Za-z0-9]*' -- \
    'provider/*.rs' 'cdylib/*.rs' ':!*test*' ':!provider/sim' |
    awk '{ print $NF }' | sort | uniq -d | grep -vxE "$alike" || true)
if [[ -n $twice ]]; then
    echo "lint.sh: public types with several meanings:" $twice >&2
    exit 1
fi
tools/scripts/deny.sh
