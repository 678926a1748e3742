#!/usr/bin/env bash
# Format, warnings, who uses whom, licences. What is not installed is skipped and named.
set -euo pipefail
cd "$(dirname "$0")/../.."

cargo fmt --all --check
cargo clippy --workspace --all-targets -- -D warnings
tools/scripts/rooms.sh
if command -v cargo-deny >/dev/null; then
    cargo deny --all-features check licenses bans sources
else
    echo "skipped: licences and sources of dependencies (cargo-deny is not installed: cargo install cargo-deny --locked)"
fi
