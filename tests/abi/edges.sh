#!/bin/sh
# Builds the programs beside it against the installed verbs.h and libibverbs.so.1 and runs them on the library under test.
# usage: edges.sh LIBRARY_DIRECTORY
set -eu
lib=$(cd "${1:?usage: edges.sh LIBRARY_DIRECTORY}" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
for program in edges memory import old sizes newer kernel operations tags; do
	cc -Wall -Wextra -O1 -o "$tmp/$program" "$here/$program.c" -libverbs -lpthread -ldl
	LD_LIBRARY_PATH=$lib "$tmp/$program"
done
