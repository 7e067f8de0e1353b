"""The secret of our route on the engine's port: written by the sidecar into the run directory, where only
the pod's group can read it, or given as a file for an engine without a shared run directory.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable

from gc_sidecar.server.engine_http import EngineFault
from gc_sidecar_agent.endpoint import TOKEN_NAME

_TOKEN = re.compile(rb"[0-9a-f]{64}")
MAXIMUM_TOKEN_BYTES = 4096


def ensure_endpoint_token(run_dir: str) -> None:
    """Have a secret lie in `run_dir`: the one that is there already, if it is sound. Raises OSError."""
    path = os.path.join(run_dir, TOKEN_NAME)
    if _TOKEN.fullmatch(_read(path, follow_links=False) or b""):
        return
    temporary = os.path.join(run_dir, f".{TOKEN_NAME}.{os.urandom(4).hex()}.tmp")
    fd = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        try:
            os.write(fd, secrets.token_hex(32).encode())
            os.fchmod(fd, 0o640)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_endpoint_token(run_dir: str | None, token_file: str | None) -> str | None:
    """The secret to send, read anew each time so that it can be rotated; None where there is none."""
    if token_file is not None:
        data = _read(token_file, follow_links=True)  # a mounted Secret is a link
    elif run_dir is not None:
        data = _read(os.path.join(run_dir, TOKEN_NAME), follow_links=False)
    else:
        return None
    try:
        token = (data or b"").decode("ascii").strip()
    except UnicodeDecodeError:
        return None
    return token if token and token.isprintable() else None


def endpoint_secret(run_dir: str | None, token_file: str | None) -> Callable[[], str]:
    """Something that reads the secret to send. It raises EngineFault, which names the file, where it is not."""
    remedy = "share the run directory (--run-dir), or give --engine-token-file"
    if token_file is not None:
        where = f"--engine-token-file {token_file} cannot be read, or holds no secret"
        remedy = (
            "the file must hold the secret that the engine has, and be readable for the sidecar"
        )
    elif run_dir is not None:
        path = os.path.join(run_dir, TOKEN_NAME)
        where = f"{path} cannot be read, or holds no secret"
    else:
        where = "the sidecar has no file with its secret"

    def read() -> str:
        token = read_endpoint_token(run_dir, token_file)
        if token is None:
            detail = f"the endpoint plugin is loaded, but {where}"
            raise EngineFault("endpoint_token_missing", detail, remedy, sent=False)
        return token

    return read


def _read(path: str, follow_links: bool) -> bytes | None:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        return os.read(fd, MAXIMUM_TOKEN_BYTES)
    except OSError:
        return None
    finally:
        os.close(fd)
