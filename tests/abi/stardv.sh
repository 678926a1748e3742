#!/bin/sh
# The direct verbs, as C and as C++, on a card with room for all contexts and on a QPC-limited one; StaR's
# with settings, under a key, on a wire that loses, and while connections run.
# usage: stardv.sh LIBRARY_DIRECTORY
set -eu
lib=$(cd "${1:?usage: stardv.sh LIBRARY_DIRECTORY}" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
include=$here/../../include
cc -Wall -Wextra -Wpedantic -std=c11 -D_GNU_SOURCE -O1 -I"$include" -o "$tmp/stardv" "$here/stardv.c" \
    -L"$lib" -libverbs
LD_LIBRARY_PATH=$lib "$tmp/stardv"
LD_LIBRARY_PATH=$lib STARVERBS_QPC_CACHE=2 "$tmp/stardv"

cc -Wall -Wextra -Wpedantic -std=c11 -D_GNU_SOURCE -O1 -I"$include" -o "$tmp/star" "$here/star.c" -L"$lib" \
    -libverbs
# Over the same host no connection needs StaR.
export STARVERBS_LINK=udp
LD_LIBRARY_PATH=$lib "$tmp/star"
# The argument is the setting's enum stardv_star.
LD_LIBRARY_PATH=$lib STARVERBS_STAR=auto "$tmp/star" 2
(umask 077 && head -c 32 /dev/urandom >"$tmp/key")
LD_LIBRARY_PATH=$lib STARVERBS_STAR=stateless STARVERBS_STAR_KEY=$tmp/key STARVERBS_FAULT=loss=5%,seed=3 \
    "$tmp/star" 3
# A connection that changes while two processes talk.
cc -Wall -Wextra -Wpedantic -std=c11 -D_GNU_SOURCE -O1 -I"$include" -o "$tmp/star_switch" \
    "$here/star_switch.c" -L"$lib" -libverbs
LD_LIBRARY_PATH=$lib STARVERBS_STAR=auto STARVERBS_STAR_THRESHOLD=8 "$tmp/star_switch" 8
LD_LIBRARY_PATH=$lib STARVERBS_STAR=auto STARVERBS_STAR_THRESHOLD=8 STARVERBS_STAR_KEY=$tmp/key \
    STARVERBS_FAULT=loss=0.5%,seed=5 "$tmp/star_switch" 8
# A key that others may read is none.
chmod 644 "$tmp/key"
unset STARVERBS_LINK
if LD_LIBRARY_PATH=$lib STARVERBS_STAR_KEY=$tmp/key "$tmp/star" >"$tmp/out" 2>&1; then
	echo "star: took a key that others may read" >&2
	exit 1
fi

# 1RMA, between two processes at addresses that no other run has.
cc -Wall -Wextra -Wpedantic -std=c11 -D_GNU_SOURCE -O1 -I"$include" -o "$tmp/onerma" "$here/onerma.c" \
    -L"$lib" -libverbs -lpthread
net=127.$((64 + $$ / 256 % 128)).$(($$ % 256))
addrs=$net.1,$net.2,$net.3
# Between two addresses, and between two processes of one.
for server in 1 0; do LD_LIBRARY_PATH=$lib STARVERBS_ADDRS=$addrs "$tmp/onerma" "$server"; done

command -v c++ >/dev/null || { echo "stardv.h in C++: skipped: there is no c++"; exit 0; }

# In C++ the header must compile, and its calls link, on both libraries of the card.
cat >"$tmp/cpp.cpp" <<'CPP'
#include <infiniband/stardv.h>
int main()
{
	stardv_counters counters = {};
	stardv_qp_init_attr star = {};
	stardv_qp_attr attr = {};
	ibv_qp_init_attr_ex init = {};
	star.star = STARDV_STAR_STATELESS;
	init.create_flags = STARDV_QP_CREATE_AUTO;
	if (stardv_create_qp(nullptr, &init, &star, sizeof(star)) ||
	    !stardv_query_qp(nullptr, &attr, sizeof(attr)) ||
	    !stardv_modify_qp(nullptr, &attr, sizeof(attr)))
		return 1;
	stardv_onerma_wc wc = {};
	if (stardv_onerma_poll(nullptr, 1, &wc, 0) >= 0 || !stardv_onerma_close(nullptr))
		return 1;
	return stardv_is_supported(nullptr) || stardv_query_counters(nullptr, &counters, sizeof(counters)) == 0 ||
	       stardv_list_counters(nullptr, nullptr, 0, 0) >= 0;
}
CPP
for library in ibverbs starverbs; do
	[ -e "$lib/lib$library.so" ] || continue
	c++ -Wall -Wextra -I"$include" -o "$tmp/cpp" "$tmp/cpp.cpp" -L"$lib" -l$library
	LD_LIBRARY_PATH=$lib "$tmp/cpp"
done
