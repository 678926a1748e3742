#!/usr/bin/env bash
# Keys over TLS, as docs/onerma.md has it: those with a certificate get the file, nobody else, and nothing
# but the whole file is taken.
# usage: run.sh STARVERBS
set -euo pipefail
starverbs=$(realpath "${1:?usage: run.sh STARVERBS}")
for command in openssl python3; do
    command -v "$command" >/dev/null || { echo "keys: skipped: $command is not installed"; exit 0; }
done
tmp=$(mktemp -d)
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; rm -rf "$tmp"' EXIT
cd "$tmp"
fail() { echo "keys: $*" >&2; exit 1; }

# A new authority, and certificates of it.
authority() {
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj "/CN=$1" \
        -keyout "$1.key" -out "$1.pem" 2>/dev/null
}
certificate() { # NAME AUTHORITY SAN [END]
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$1" -keyout "$1.key" \
        -out "$1.csr" 2>/dev/null
    if (($# == 4)); then
        rm -rf ca && mkdir ca && touch ca/index && openssl rand -hex 8 >ca/serial
        printf '[ca]\ndefault_ca = a\n[a]\ndatabase = ca/index\nserial = ca/serial\nnew_certs_dir = ca
default_md = sha256\npolicy = p\n[p]\ncommonName = supplied\n' >ca/config
        openssl ca -batch -config ca/config -cert "$2.pem" -keyfile "$2.key" -in "$1.csr" -out "$1.pem" \
            -enddate "$4" -extfile <(echo "subjectAltName=$3") -notext 2>/dev/null
        return
    fi
    openssl x509 -req -in "$1.csr" -CA "$2.pem" -CAkey "$2.key" -days 2 -out "$1.pem" \
        -extfile <(echo "subjectAltName=$3") 2>/dev/null
}
authority ours
authority others
certificate server ours IP:127.0.0.1
certificate client ours DNS:client
certificate stranger others DNS:client
certificate elsewhere ours DNS:elsewhere

identity() { echo --cert "$1.pem" --key "$1.key" --ca "${2:-ours}.pem"; }
# Starts a server with these arguments, of any free port; sets `port`.
serve() {
    local said
    mkfifo "said$#$1"
    "$starverbs" keys serve --listen 127.0.0.1:0 "${@:2}" >"said$#$1" 2>>errors &
    pids+=($!)
    exec {said}<"said$#$1"
    read -r -t 60 -u "$said" line || fail "the server does not start: $(cat errors)"
    port=${line##*:}
}
fetch() { timeout 60 "$starverbs" keys fetch 127.0.0.1:"$port" "$@"; }

printf 'region 1: %s\n' "$(openssl rand -hex 16)" >keys
serve first keys $(identity server)
right=$port
fetch -o got $(identity client)
cmp keys got || fail "another file came"
[[ $(stat -c %a got) == 600 ]] || fail "others may read what came: $(stat -c %a got)"
# Keys change; the next client has the new ones.
printf 'region 1: %s\n' "$(openssl rand -hex 16)" >keys
fetch -o got $(identity client)
cmp keys got || fail "the old file came"
head -c 1M /dev/urandom >keys
fetch -o got $(identity client)
cmp keys got || fail "another long file came"

# Nobody who is not of this authority, nor one who only says so; no server of another, or of another name.
refused() {
    rm -f no
    if fetch -o no "$@" 2>why; then fail "served: $*"; fi
    [[ ! -e no ]] || fail "refused, and left a file: $*"
    [[ -s why ]] || fail "no reason: $*"
}
refused $(identity stranger)
# (this one by its own end)
refused --cert client.pem --key stranger.key --ca ours.pem
refused $(identity client others)
serve second keys $(identity elsewhere)
refused $(identity client)
# A client that says nothing keeps nobody out; one without a certificate gets nothing.
exec {silent}<>"/dev/tcp/127.0.0.1/$right"
port=$right
fetch -o got $(identity client)
openssl s_client -connect "127.0.0.1:$right" -CAfile ours.pem -quiet </dev/null >stolen 2>/dev/null || true
[[ ! -s stolen ]] || fail "served without a certificate"
# Who ends in the middle, with a reset while it is written to, ends nobody else.
python3 - "$right" <<'PYTHON'
import socket, struct, sys
for _ in range(20):
    rude = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    rude.sendall(b"GET / HTTP/1.0\r\n\r\n")
    rude.shutdown(socket.SHUT_WR)
    rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    rude.close()
PYTHON
fetch -o got $(identity client)
# Nor do those of another address who say nothing, however many they are.
mkfifo silence
python3 - "$right" >silence <<'PYTHON' &
import signal, socket, sys
silent = [socket.create_connection(("127.0.0.1", int(sys.argv[1])), source_address=("127.0.0.2", 0))
          for _ in range(100)]
print("connected", flush=True)
signal.pause()
PYTHON
pids+=($!)
read -r -t 60 <silence || fail "no silent clients"
fetch -o got $(identity client) || fail "kept out by others"
# A certificate that has ended opens nothing, though its session began before.
certificate brief ours DNS:brief "$(date -u -d '+4 seconds' +%Y%m%d%H%M%SZ)"
port=$right
printf 'first\n' >keys
"$starverbs" keys fetch 127.0.0.1:"$right" -o watched --watch 1 $(identity brief) 2>watching &
pids+=($!)
for ((tries = 0; tries < 600; tries++)); do [[ ! -s watching ]] || break; sleep 0.1; done
grep -qi 'expired' watching || fail "an ended certificate is taken: $(cat watching)"
[[ $(cat watched) == first ]] || fail "the old file is gone"
# A server that ends in the middle: half a file is none. And nobody there.
mkfifo typed
openssl s_server -accept 127.0.0.1:0 -naccept 1 -cert server.pem -key server.key -CAfile ours.pem -Verify 1 \
    -tls1_3 <typed >opened 2>&1 &
half=$!
pids+=("$half")
exec {typed}>typed
await() {
    for ((tries = 0; tries < 600; tries++)); do
        ! grep -q "$1" opened || return 0
        sleep 0.1
    done
    fail "openssl s_server does not say '$1': $(cat opened)"
}
await '^ACCEPT.*:'
port=$(sed -n 's/^ACCEPT.*:\([0-9]*\)$/\1/p' opened)
(refused $(identity client)) &
refusal=$!
echo half >&"$typed"
await 'depth=0 CN *= *client'
kill -9 "$half"
wait "$half" 2>/dev/null || true
wait "$refusal" || fail "half a file was taken"
port=1
refused $(identity client)
# Too much for a client: it is told nothing.
port=$right
head -c 1048577 /dev/zero >keys
refused $(identity client)
"$starverbs" keys serve absent $(identity server) 2>why && fail "serves no file"
grep -q absent why || fail "does not name the file: $(cat why)"
echo "keys: those with a certificate got the file, others nothing"
