#!/bin/sh
# Build the image with whatever builder this machine has: `make image`.
#   IMAGE=registry.example.com/gc-sidecar:0.1.0    its name (default: localhost/gc-sidecar, with the version as tag)
#   BUILDER=podman                                 docker, podman or buildah; default: the first that works
#   PYTHON_IMAGE=...                               the base image, for both stages
#   PIP_CONF=$HOME/.config/pip/pip.conf            for wheels from a mirror of yours; stays out of the image
#   BUILD_FLAGS="--platform linux/amd64,linux/arm64"   whatever else the builder shall be told
set -eu
cd "$(dirname "$0")/.."

works() {
    case $1 in
        docker) docker info >/dev/null 2>&1 ;; # the client alone builds nothing
        *) command -v "$1" >/dev/null ;;
    esac
}

if [ -z "${BUILDER:-}" ]; then
    for BUILDER in docker podman buildah none; do
        if [ "$BUILDER" = none ]; then
            echo "make image: there is no docker (or its daemon does not answer), no podman and no buildah here." >&2
            echo "Install one of them (on Debian: apt-get install buildah), or build from ./Dockerfile elsewhere." >&2
            exit 1
        fi
        if works "$BUILDER"; then break; fi
    done
fi

version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
seconds=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
image=${IMAGE:-localhost/gc-sidecar:$version}

set -- --tag "$image" \
    --build-arg "VERSION=$version" --build-arg "REVISION=$revision" \
    --build-arg "CREATED=$(date -u -d "@$seconds" +%Y-%m-%dT%H:%M:%SZ 2>/dev/null || date -u -r "$seconds" +%Y-%m-%dT%H:%M:%SZ)"
if [ -n "${PYTHON_IMAGE:-}" ]; then set -- "$@" --build-arg "PYTHON_IMAGE=$PYTHON_IMAGE"; fi
if [ -n "${PIP_CONF:-}" ]; then set -- "$@" --secret "id=pip,src=$PIP_CONF"; fi

echo "==> building $image with $BUILDER"
case $BUILDER in
    # Only this format has health checks.
    podman | buildah) set -- --format docker "$@" ;;
esac
# shellcheck disable=SC2086 # flags are words
"$BUILDER" build ${BUILD_FLAGS:-} "$@" .
