#!/bin/sh
# Make a local stand-in for the Dockerfile's base image, where no registry can be reached: Debian's own Python from this
# machine's package sources. It is no python:slim, but has what the Dockerfile asks of one: a CPython and its pip.
# For the tests in tests/image. Needs root, mmdebstrap, and podman or buildah.
#   scripts/stand_in_base_image.sh localhost/gc-sidecar-stand-in-base
set -eu

name=${1:?the name of the image}
fail() {
    echo "stand_in_base_image: $1" >&2
    exit 1
}
[ "$(id -u)" = 0 ] || fail "needs root"
command -v mmdebstrap >/dev/null || fail "needs mmdebstrap: apt-get install mmdebstrap"
command -v podman >/dev/null || fail "needs podman: apt-get install podman"

mirror=$(awk '/^URIs:/ { print $2; exit }' /etc/apt/sources.list.d/debian.sources)
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mmdebstrap --quiet --variant=minbase --include=python3,python3-pip,python3-venv,ca-certificates \
    "$suite" "$work/root.tar" "deb $mirror $suite main"
podman import --quiet "$work/root.tar" "$name"
