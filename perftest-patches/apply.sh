#!/bin/sh
# Applies the series to a tree of perftest. Its hunks have no context, so each file is first compared with
# the one that they were made for.
# usage: apply.sh PERFTEST
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cd "${1:?usage: apply.sh PERFTEST}"
for patch in "$here"/*.patch; do
	awk '/^diff --git/ { file = substr($4, 3) } /^index/ { split($2, blob, "\\.\\."); print blob[1], file }' \
		"$patch" |
	while read -r blob file; do
		case $blob in
		*[!0]*) found=$(git hash-object --no-filters "$file") ;;
		*) found=$blob; [ ! -e "$file" ] || found=there ;;
		esac
		[ "$found" = "$blob" ] || {
			echo "$file is not the one that ${patch##*/} is for: see $here/README.md" >&2
			exit 1
		}
	done
	git apply --unidiff-zero "$patch"
	echo "applied ${patch##*/}"
done
