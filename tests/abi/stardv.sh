#!/bin/sh
# The direct verbs, as C and as C++, on a card with room for all contexts and on one with room for few.
# usage: stardv.sh LIBRARY_DIRECTORY
set -eu
lib=$(cd "${1:?usage: stardv.sh LIBRARY_DIRECTORY}" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
include=$here/../../include
cc -Wall -Wextra -Wpedantic -std=c11 -D_GNU_SOURCE -O1 -I"$include" -o "$tmp/stardv" "$here/stardv.c" -L"$lib" -libverbs
LD_LIBRARY_PATH=$lib "$tmp/stardv"
LD_LIBRARY_PATH=$lib STARVERBS_QPC_CACHE=2 "$tmp/stardv"

command -v c++ >/dev/null || { echo "stardv.h in C++: skipped: there is no c++"; exit 0; }

# In C++ the header must compile, and its calls link, on both libraries of the card.
cat >"$tmp/cpp.cpp" <<'CPP'
#include <infiniband/stardv.h>
int main()
{
	stardv_counters counters = {};
	return stardv_is_supported(nullptr) || stardv_query_counters(nullptr, &counters, sizeof(counters)) == 0 ||
	       stardv_list_counters(nullptr, nullptr, 0, 0) >= 0;
}
CPP
for library in ibverbs starverbs; do
	[ -e "$lib/lib$library.so" ] || continue
	c++ -Wall -Wextra -I"$include" -o "$tmp/cpp" "$tmp/cpp.cpp" -L"$lib" -l$library
	LD_LIBRARY_PATH=$lib "$tmp/cpp"
done
