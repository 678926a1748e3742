#!/bin/sh
# Installs starverbs for a job of CI, or in an image, and shows the device that programs will see. PACKAGE
# is a Debian package or a Python wheel, a file or a URL. A wheel goes into the environment that is active,
# or into /opt/starverbs, whose command is linked into /usr/local/bin.
# usage: setup.sh PACKAGE
set -eu
package=${1:?usage: setup.sh PACKAGE}
as_root=
[ "$(id -u)" = 0 ] || as_root=sudo

case $package in
http://* | https://*)
    folder=$(mktemp -d)
    curl --fail --location --silent --show-error --output "$folder/${package##*/}" "$package"
    package=$folder/${package##*/}
    ;;
esac

case $package in
*.deb)
    # What it needs, libc6 and libgcc-s1, every Debian and Ubuntu has.
    $as_root dpkg -i "$package"
    command=starverbs
    ;;
*.whl)
    if [ -n "${VIRTUAL_ENV:-}" ]; then
        python=$VIRTUAL_ENV/bin/python
        "$python" -m pip install --no-index --force-reinstall "$package"
        command=$VIRTUAL_ENV/bin/starverbs
    else
        $as_root python3 -m venv /opt/starverbs
        $as_root /opt/starverbs/bin/pip install --no-index --force-reinstall "$package"
        $as_root ln -sf /opt/starverbs/bin/starverbs /usr/local/bin/starverbs
        command=/usr/local/bin/starverbs
    fi
    ;;
*)
    echo "setup.sh: $package is neither a .deb nor a .whl" >&2
    exit 2
    ;;
esac

"$command" info
"$command" run -- ls /sys/class/infiniband
