#!/usr/bin/env bash
# Licences and sources of dependencies, by cargo-deny. What it found good is remembered by its sum (deny.sum),
# so that it need not be installed where nothing has changed.
# usage: deny.sh [known]: the latter only says whether these dependencies and deny.toml were checked before
set -euo pipefail
cd "$(dirname "$0")/../.."

# Of Cargo.lock what others have written: our own crates come and go without anything new to check.
sums=$({ awk -v RS= '/\nsource = /' Cargo.lock; cat deny.toml; } | sha256sum)
known() { [[ -e deny.sum && $(<deny.sum) == "$sums" ]]; }

if [[ ${1:-} == known ]]; then
    known
elif command -v cargo-deny >/dev/null; then
    cargo deny --all-features check licenses bans sources
    known || printf '%s\n' "$sums" >deny.sum
elif known; then
    echo "licences and sources of dependencies: unchanged since they were checked (deny.sum)"
else
    echo "skipped: licences and sources of dependencies" \
        "(cargo-deny is not installed: cargo install cargo-deny --locked)"
fi
