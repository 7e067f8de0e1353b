"""The route on the engine's own port, for vLLM's `vllm.endpoint_plugins`: our one method, without dev mode.

It asks for the secret that the sidecar leaves in the run directory, for the port serves everybody.
"""

from __future__ import annotations

import hmac
import json
import os
from typing import Any

from gc_sidecar_agent import __version__
from gc_sidecar_agent.agent import RUN_DIR_VARIABLE
from gc_sidecar_agent.command import METHOD

PATH = "/gc_sidecar/command"
TOKEN_NAME = "endpoint.token"
TOKEN_FILE_VARIABLE = "GC_SIDECAR_ENDPOINT_TOKEN_FILE"
MAXIMUM_BODY_BYTES = 65536


class GcEndpointPlugin:
    """vLLM's EndpointPlugin protocol."""

    name = "gc_sidecar"
    required_tasks = None

    def __init__(self) -> None:
        self._engine_client: Any = None

    def attach_router(self, app: Any) -> None:
        """Add our route to vLLM's app."""
        app.add_route(PATH, self._respond, methods=["GET", "POST"], include_in_schema=False)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Remember the client; None on a server without an engine."""
        self._engine_client = engine_client

    async def _respond(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        if request.method == "GET":
            return JSONResponse({"agent": __version__, "method": METHOD})
        status, content = await self._command(request)
        return JSONResponse(content, status_code=status)

    async def _command(self, request: Any) -> tuple[int, dict[str, Any]]:
        expected = read_token()
        if expected is None:
            return _problem(
                503,
                "endpoint_token_missing",
                f"the engine finds no secret: share the run directory ({RUN_DIR_VARIABLE}) with the"
                f" sidecar, or set {TOKEN_FILE_VARIABLE}",
            )
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {expected}".encode()):
            return _problem(401, "endpoint_token_wrong", "the bearer token is not the engine's")
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAXIMUM_BODY_BYTES:
                return _problem(413, "body_too_large", f"at most {MAXIMUM_BODY_BYTES} bytes")
        try:
            command = json.loads(body)
        except (ValueError, RecursionError):
            return _problem(400, "bad_json", "the body is not JSON")
        if self._engine_client is None:
            return _problem(503, "no_engine", "this server has no engine")
        try:
            results = await self._engine_client.collective_rpc(METHOD, args=(command,))
        except Exception as error:
            return _problem(500, "rpc_failed", f"{type(error).__name__}: {error}")
        return 200, {"results": results}


def read_token() -> str | None:
    """The secret, read anew each time so that it can be rotated; None where there is none."""
    path = os.environ.get(TOKEN_FILE_VARIABLE)
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    if not path and run_dir:
        path = os.path.join(run_dir, TOKEN_NAME)
    if not path:
        return None
    try:
        # A file of the run directory is followed nowhere; an operator's own may be a mounted link.
        no_follow = 0 if os.environ.get(TOKEN_FILE_VARIABLE) else os.O_NOFOLLOW
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | no_follow)
        try:
            token = os.read(fd, 4096).decode("ascii").strip()
        finally:
            os.close(fd)
    except (OSError, UnicodeDecodeError):
        return None
    return token or None


def _problem(status: int, code: str, detail: str) -> tuple[int, dict[str, Any]]:
    return status, {"code": code, "detail": detail, "status": status}
