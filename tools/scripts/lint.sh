#!/usr/bin/env bash
# Format, warnings, who uses whom, licences. What is not installed is skipped and named.
set -euo pipefail
cd "$(dirname "$0")/../.."

cargo fmt --all --check
cargo clippy --workspace --all-targets -- -D warnings
tools/scripts/rooms.sh
tools/scripts/deny.sh
