#!/bin/sh
# The symbols that a library exports, with their versions: T for functions, D for data.
# NM names another nm, for another platform's library.
# usage: symbols.sh LIBRARY
set -eu
${NM:-nm} -D --with-symbol-versions --defined-only "${1:?usage: symbols.sh LIBRARY}" |
    awk '$2 != "A" { print ($2 == "T" || $2 == "W" || $2 == "i" ? "T" : "D"), $3 }' | LC_ALL=C sort -k2
