#!/bin/sh
# Run the agent's unit tests on the newest CPythons that Debian has, in a chroot of its own: `make test-agent-debian`.
# For a machine with root, mmdebstrap and Debian's package sources; where pyenv has them, `make test-agent` runs them too.
set -eu

SUITE=${SUITE:-forky}
VERSIONS=${VERSIONS:-"3.14 3.15"}
REPOSITORY=$(cd "$(dirname "$0")/.." && pwd)
# Kept between runs, outside of the work tree.
ROOT=${ROOT:-${TMPDIR:-/tmp}/gc-sidecar-$SUITE}

fail() {
    echo "agent_tests_in_debian: $1" >&2
    exit 1
}

[ "$(id -u)" = 0 ] || fail "needs root, for a chroot"
command -v mmdebstrap >/dev/null || fail "needs mmdebstrap: apt-get install mmdebstrap"

if [ ! -e "$ROOT/.complete" ]; then
    mirror=$(awk '/^URIs:/ { print $2; exit }' /etc/apt/sources.list.d/debian.sources)
    packages=ca-certificates,mount,strace
    for version in $VERSIONS; do
        packages=$packages,python$version-venv
    done
    echo "==> Debian $SUITE into $ROOT"
    rm -rf "$ROOT"
    mmdebstrap --quiet --variant=minbase --include="$packages" \
        --aptopt='Acquire::Check-Valid-Until "false"' --aptopt='Acquire::Check-Date "false"' \
        "$SUITE" "$ROOT" "deb $mirror $SUITE main"
    touch "$ROOT/.complete"
fi

"$REPOSITORY/.venv/bin/python" -m pip download -qq --dest "$ROOT/wheels" 'pytest<9.2' pytest-xdist
for directory in proc dev; do
    mountpoint -q "$ROOT/$directory" || mount --rbind --make-rslave "/$directory" "$ROOT/$directory"
done
trap 'umount -l "$ROOT/proc" "$ROOT/dev"' EXIT

# A copy: what tests write must not land in the work tree.
rm -rf "$ROOT/src"
mkdir "$ROOT/src"
cp -r "$REPOSITORY/sidecar" "$REPOSITORY/tests" "$REPOSITORY/pyproject.toml" "$ROOT/src"

status=0
for version in $VERSIONS; do
    echo "==> CPython $version"
    chroot "$ROOT" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin PYTHONPATH=/src/sidecar sh -ec "
        cd /src
        python$version -m venv --clear /env
        /env/bin/pip install -qq --no-index --find-links /wheels pytest pytest-xdist
        /env/bin/python -m pytest tests/unit/agent --quiet --confcutdir=tests/unit/agent \
            --numprocesses=4 -p no:cacheprovider" || status=1
done
exit $status
