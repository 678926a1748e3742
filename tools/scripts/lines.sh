#!/usr/bin/env bash
# Lines of Rust in provider/ at commits, of each crate and in all: without tests, examples, comments, blank
# lines and provider/abi, which is generated. Tests are files in tests/, files named tests.rs, test.rs or
# *_tests.rs, and blocks behind #[cfg(test)] or #[cfg(all(test, ...))].
# usage: lines.sh COMMIT...
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for commit in "$@"; do
    rm -rf "${folder:?}/provider"
    git archive "$commit" provider | tar -x -C "$folder"
    echo "$commit"
    (cd "$folder/provider" && find . -name '*.rs' -not -path './abi/*' -not -path '*/tests/*' \
        -not -path '*/examples/*' -not -path '*/benches/*' -not -name tests.rs -not -name test.rs \
        -not -name '*_tests.rs' -print0 | xargs -0 awk '
        FNR == 1 { comment = behind = inside = 0; split(FILENAME, path, "/") }
        { line = $0; gsub(/^[ \t]+|[ \t]+$/, "", line); match($0, /^ */); indent = RLENGTH }
        comment { if (line ~ /\*\//) comment = 0; next }
        line == "" || line ~ /^\/\// { next }
        line ~ /^\/\*/ && line !~ /\*\// { comment = 1; next }
        line ~ /^\/\*.*\*\/$/ { next }
        inside { if (indent == outer && line ~ /^\}/) inside = 0; next }
        line ~ /^#\[cfg\((all\()?test[,)]/ { behind = 1; next }
        behind && line ~ /^#\[/ { next }
        behind { behind = 0; if (line ~ /\{$/) { inside = 1; outer = indent }; next }
        { lines[path[2]]++; sum++ }
        END {
            for (room in lines) print lines[room], room | "sort -rn"
            close("sort -rn")
            print sum, "in all"
        }')
done
