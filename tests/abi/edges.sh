#!/bin/sh
# Builds the C programs beside it against the installed verbs.h and libibverbs.so.1 and runs them on the
# library under test. Those that SKIP names are left out, and said.
# usage: edges.sh LIBRARY_DIRECTORY
set -eu
lib=$(cd "${1:?usage: edges.sh LIBRARY_DIRECTORY}" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

skipped() {
	case " ${SKIP:-} " in
	*" $1 "*) echo "$1: skipped" ;;
	*) return 1 ;;
	esac
}

for program in edges memory import xrc xrc_read old sizes newer kernel errors errno states queues fork \
    operations tags; do
	cc -Wall -Wextra -O1 -o "$tmp/$program" "$here/$program.c" -libverbs -lpthread -ldl
	skipped "$program" && continue
	LD_LIBRARY_PATH=$lib "$tmp/$program"
done

if [ -e /usr/include/rdma/rdma_cma.h ]; then
	for program in rdmacm_ids rdmacm rdmacm_exit rdmacm_loopback rdmacm_newer; do
		cc -Wall -Wextra -O1 -o "$tmp/$program" "$here/$program.c" -lrdmacm -libverbs -lpthread -ldl
		skipped "$program" && continue
		LD_LIBRARY_PATH=$lib "$tmp/$program"
	done
else
	echo "rdmacm: skipped: librdmacm-dev is not installed"
fi

skipped errors >/dev/null && exit 0
# The library is silent by itself, and says why it refuses when it is asked to.
said() { LD_LIBRARY_PATH=$lib STARVERBS_LOG=$1 "$tmp/errors" 2>&1 >/dev/null; }
test -z "$(said off)" || { echo "log: not silent" >&2; exit 1; }
said error | grep -q 'refused, errno 16: the object is in use by others' ||
    { echo "log: no reason" >&2; exit 1; }
