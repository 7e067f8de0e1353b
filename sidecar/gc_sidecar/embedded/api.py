"""An API server of the embedded engine: the HTTP routes of a vLLM server, as far as gc-sidecar needs them.

What it answers where something is wrong is vLLM's answer, too; a route that vLLM does not have says so.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from gc_sidecar.embedded import ENGINE_NAME, async_llm
from gc_sidecar.embedded.async_llm import AsyncLLM, CoreClient, EngineDeadError
from gc_sidecar.embedded.figures import Figures
from gc_sidecar.embedded.plugins import load_plugins
from gc_sidecar.embedded.settings import EngineConfig

logger = logging.getLogger("gc_sidecar.embedded")

MODEL_NAME = "embedded"
DEFAULT_MAX_TOKENS = 16
MAXIMUM_TOKENS = 1 << 20


def run_api_server(
    config: EngineConfig, index: int, listener: socket.socket, cores: Sequence[socket.socket]
) -> None:
    """The whole life of an API server process."""
    settings = config.settings
    load_plugins(settings.plugin)
    if not settings.without_agent:
        from gc_sidecar_agent.plugin import hook_async_llm

        hook_async_llm(async_llm)
    try:
        asyncio.run(_serve(config, index, listener, cores))
    except EngineDeadError as error:
        print(f"API server {index}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


async def _serve(
    config: EngineConfig, index: int, listener: socket.socket, cores: Sequence[socket.socket]
) -> None:
    client = CoreClient(index)
    await client.connect(cores)
    engine = AsyncLLM(config, client, client_index=index)
    app = await make_app(engine)
    if config.settings.start_frozen != "none":
        gc.collect()
        gc.freeze()
    logger.info("API server %d of %s is ready", index, ENGINE_NAME)
    server = uvicorn.Server(
        uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
    )
    await server.serve(sockets=[listener])


async def make_app(engine: AsyncLLM) -> Starlette:
    """The routes, the agent's own included."""
    settings = engine.vllm_config.settings
    app = Starlette()
    app.state.engine_client = engine
    app.state.figures = Figures()
    for path, method, endpoint in (
        ("/health", "GET", _health),
        ("/version", "GET", _version),
        ("/metrics", "GET", _metrics),
        ("/steps", "GET", _steps),
        ("/v1/models", "GET", _models),
        ("/v1/completions", "POST", _completions),
    ):
        app.routes.append(Route(path, endpoint, methods=[method]))
    if settings.dev_mode:
        app.routes.append(Route("/collective_rpc", _collective_rpc, methods=["POST"]))
        app.routes.append(Route("/server_info", _server_info, methods=["GET"]))
    if settings.endpoint and not settings.without_agent:
        # In the two phases in which vLLM wires up an endpoint plugin.
        from gc_sidecar_agent.endpoint import GcEndpointPlugin

        plugin = GcEndpointPlugin()
        plugin.attach_router(app)
        await plugin.init_state(engine, app.state, settings)
    app.add_exception_handler(EngineDeadError, _engine_dead)
    return app


def _engine(request: Request) -> AsyncLLM:
    engine: AsyncLLM = request.app.state.engine_client
    return engine


async def _health(request: Request) -> Response:
    try:
        await _engine(request).check_health()
    except EngineDeadError:
        return Response(status_code=503)
    return Response(status_code=200)


async def _version(_request: Request) -> Response:
    return JSONResponse({"version": ENGINE_NAME})


async def _server_info(request: Request) -> Response:
    config = asdict(_engine(request).vllm_config)
    as_json = request.query_params.get("config_format") == "json"
    return JSONResponse({"engine": ENGINE_NAME, "vllm_config": config if as_json else str(config)})


async def _models(_request: Request) -> Response:
    model = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": ENGINE_NAME}
    return JSONResponse({"object": "list", "data": [model]})


async def _metrics(request: Request) -> Response:
    figures: Figures = request.app.state.figures
    cores = _engine(request).engine_core.core_engines
    text = figures.exposition(cores, MODEL_NAME)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _steps(request: Request) -> Response:
    """Not a route of vLLM's: the steps after number `since`, for each engine core."""
    try:
        since = int(request.query_params.get("since", "0"))
    except ValueError:
        return _error(400, "since is not a whole number")
    engines = await _engine(request).engine_core.call_utility_all_async("recent_steps", since)
    fields = ["number", "started_ns", "duration_ns", "retained_objects"]
    return JSONResponse({"fields": fields, "engines": engines})


async def _collective_rpc(request: Request) -> Response:
    try:
        body = await request.json()
    except ValueError as error:
        return _error(400, f"JSON decode error: {error}")
    if not isinstance(body, dict):
        return _error(400, "Request body must be a JSON object")
    method = body.get("method")
    if method is None:
        return _error(400, "Missing 'method' in request body")
    results = await _engine(request).collective_rpc(
        method=method,
        timeout=body.get("timeout"),
        args=tuple(body.get("args", [])),
        kwargs=body.get("kwargs", {}),
    )
    if results is None:
        return Response(status_code=200)
    # What JSON has no words for arrives as its text, flags and numbers included.
    shown = [r if r is None or isinstance(r, (dict, list)) else str(r) for r in results]
    return JSONResponse({"results": shown})


async def _completions(request: Request) -> Response:
    try:
        body = await request.json()
    except ValueError as error:
        return _error(400, f"JSON decode error: {error}")
    if not isinstance(body, dict) or not isinstance(body.get("prompt"), (str, list)):
        return _error(400, "a completion needs a prompt, which is a text or a list of tokens")
    if body.get("model", MODEL_NAME) != MODEL_NAME:
        return _error(404, f"the model {body['model']!r} does not exist; there is {MODEL_NAME!r}")
    max_tokens = body.get("max_tokens", DEFAULT_MAX_TOKENS)
    if (
        not isinstance(max_tokens, int)
        or isinstance(max_tokens, bool)
        or not 1 <= max_tokens <= MAXIMUM_TOKENS
    ):
        return _error(400, f"max_tokens must be a whole number from 1 to {MAXIMUM_TOKENS}")
    completion = _Completion(request, body, max_tokens)
    if _engine(request).engine_core.is_dead:
        raise EngineDeadError
    if body.get("stream"):
        return StreamingResponse(completion.events(), media_type="text/event-stream")
    return JSONResponse(await completion.answer())


class _Completion:
    """One request for a completion."""

    def __init__(self, request: Request, body: dict[str, Any], max_tokens: int) -> None:
        self._engine = _engine(request)
        self._figures: Figures = request.app.state.figures
        self._max_tokens = max_tokens
        prompt = body["prompt"]
        self._prompt_tokens = len(prompt.split() if isinstance(prompt, str) else prompt)
        options = body.get("stream_options")
        self._with_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        self._head = {
            "id": f"cmpl-{time.monotonic_ns():x}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": MODEL_NAME,
        }
        self._produced = 0

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events, one for each token."""
        try:
            async for text, finish_reason in self._tokens():
                yield self._event({**self._head, "choices": [_choice(text, finish_reason)]})
        except EngineDeadError as error:
            yield self._event(_error_body(500, str(error)))
            return
        if self._with_usage:
            yield self._event({**self._head, "choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    async def answer(self) -> dict[str, Any]:
        """The whole completion at once."""
        tokens = [token async for token in self._tokens()]
        choice = _choice("".join(text for text, _ in tokens), tokens[-1][1])
        return {**self._head, "choices": [choice], "usage": self._usage()}

    async def _tokens(self) -> AsyncIterator[tuple[str, str | None]]:
        arrived = time.monotonic()
        async for token in self._engine.generate(self._max_tokens):
            self._produced += 1
            yield token.text, token.finish_reason
        self._figures.request_s.observe(time.monotonic() - arrived)

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._produced,
            "total_tokens": self._prompt_tokens + self._produced,
        }

    @staticmethod
    def _event(content: dict[str, Any]) -> str:
        return f"data: {json.dumps(content)}\n\n"


def _choice(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _error_body(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "embedded_engine", "param": None, "code": status}}


def _error(status: int, message: str) -> Response:
    return JSONResponse(_error_body(status, message), status_code=status)


async def _engine_dead(_request: Request, error: Exception) -> Response:
    return _error(500, str(error))
