# One image, two uses: the sidecar (`gc-sidecar serve`), and the source of the directory that an engine loads the
# agent from (`gc-sidecar install-agent DIR`, in an init container). `make image` builds it.

# Any image with CPython 3.10 or later and its pip, in both stages the same. For a build that can be repeated to the
# byte, name it by digest. The interpreter is the sidecar's own: the engine brings another.
ARG PYTHON_IMAGE=docker.io/library/python:3.13-slim-trixie

FROM ${PYTHON_IMAGE} AS build

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY sidecar/ sidecar/
# Wheels first, everything else from them alone: what could not be built or had as a wheel fails here, and the last
# stage needs neither index nor compiler. A mirror of yours: --secret id=pip,src=pip.conf, which stays out of the image.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m pip wheel --wheel-dir /wheels . \
 && python3 -m venv --without-pip /app \
 && python3 -m pip --python /app/bin/python3 install --no-index --no-deps --compile /wheels/*.whl \
 && /app/bin/gc-sidecar --version


FROM ${PYTHON_IMAGE}

# Nothing is installed from here on, by nobody.
RUN for module in pip ensurepip; do \
      found="$(python3 -c "import os, $module; print(os.path.dirname($module.__file__))")" \
      && rm -rf "$found" "$found"-*.dist-info || exit 1; \
    done \
 && rm -f /usr/bin/pip* /usr/local/bin/pip*
COPY --from=build /app /app

# The root file system may be read-only, so no bytecode is written; it is in the image.
ENV PATH=/app/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1

# Any user will do, also one that nobody has heard of: the image holds nothing that only this one may read or write.
USER 65532:65532
WORKDIR /
STOPSIGNAL SIGTERM
EXPOSE 9470 9471

# For docker, podman and compose; Kubernetes has probes of its own. It asks where GC_SIDECAR_HOST and GC_SIDECAR_PORT
# say, or their defaults. Any answer is a sign of life: one without a token is refused where a token is asked for.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5s CMD ["python3", "-c", "import http.client, os; \
host = os.environ.get('GC_SIDECAR_HOST', '127.0.0.1').replace('0.0.0.0', '127.0.0.1'); \
sidecar = http.client.HTTPConnection(host, int(os.environ.get('GC_SIDECAR_PORT', '9470')), timeout=4); \
sidecar.request('GET', '/healthz'); \
raise SystemExit(sidecar.getresponse().status >= 500)"]

ENTRYPOINT ["gc-sidecar"]
CMD ["serve"]

# Last, so that a new commit changes no layer.
ARG VERSION=0.0.0+unknown
ARG REVISION=unknown
ARG CREATED=1970-01-01T00:00:00Z
LABEL org.opencontainers.image.title="gc-sidecar" \
      org.opencontainers.image.description="Python GC control for vLLM, from a sidecar" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="https://github.com/gc-sidecar/gc-sidecar" \
      org.opencontainers.image.documentation="https://github.com/gc-sidecar/gc-sidecar/blob/main/docs/kubernetes.md" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
