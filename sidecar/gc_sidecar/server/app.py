"""Putting the server together: the services behind the routes, and the two ASGI apps that show them.

The control app has every route behind the guard, the open app only what kubelet and Prometheus need.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from gc_sidecar import __version__
from gc_sidecar.server import engine_http, openapi
from gc_sidecar.server.claim import ClaimedError
from gc_sidecar.server.coordinator import Coordinator
from gc_sidecar.server.engines import Engines
from gc_sidecar.server.live import Live
from gc_sidecar.server.problems import Problem
from gc_sidecar.server.routes import (
    control_router,
    open_router,
    show_http_error,
    show_mistake,
    show_problem,
)
from gc_sidecar.server.run_dir import RunDir
from gc_sidecar.server.safety import LastMinute
from gc_sidecar.server.secret import endpoint_secret
from gc_sidecar.server.security import Guard, Limits, TokenFile
from gc_sidecar.server.settings import Settings
from gc_sidecar.server.sight import Sight
from gc_sidecar.server.tally import Tally
from gc_sidecar.server.timing import Timing
from gc_sidecar.server.windows import Windows


@dataclass(frozen=True)
class Services:
    """Everything behind the routes."""

    settings: Settings
    coordinator: Coordinator
    windows: Windows
    live: Live
    last_minute: LastMinute
    tally: Tally
    http: httpx.AsyncClient
    timing: Timing

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take over what a sidecar before us left, then watch and keep contact until the end.

        Raises ClaimedError where another sidecar has the run directory, and keeps it.
        """
        run_dir = self.coordinator.knowledge.run_dir
        patience = time.monotonic() + self.timing.claim_patience_s
        while not await run_dir.claim():
            # It may be about to leave: one that is told to stop takes a moment.
            if time.monotonic() >= patience:
                await self.http.aclose()
                assert run_dir.claim_fault is not None
                raise ClaimedError(run_dir.claim_fault.detail)
            await asyncio.sleep(self.timing.sight_fresh_s)
        await self.coordinator.watch.take_over()
        tasks = [
            asyncio.create_task(self.coordinator.watch.keep_watch()),
            asyncio.create_task(self.coordinator.watch.keep_contact()),
            asyncio.create_task(self.windows.keep()),
            asyncio.create_task(self.live.keep()),
        ]
        try:
            yield
        finally:
            self.live.stop()
            pending = set(tasks)
            while pending:
                # More than once: before Python 3.12 asyncio.wait_for may swallow a cancellation.
                for task in pending:
                    task.cancel()
                _, pending = await asyncio.wait(pending, timeout=0.05)
            await self.http.aclose()
            run_dir.release()

    def stop(self) -> None:
        """Begin nothing more: the sidecar ends."""
        self.coordinator.stop()
        self.live.stop()


def make_services(settings: Settings, timing: Timing | None = None) -> Services:
    """The services that `settings` describe. Nothing runs yet."""
    timing = timing or Timing()
    tally = Tally()
    http = engine_http.make_client()
    secret = endpoint_secret(settings.run_dir, settings.engine_token_file)
    engines = Engines(
        settings.engine_url, http, secret, timing, tally, has_run_dir=settings.run_dir is not None
    )
    host, port = settings.control_address
    run_dir = RunDir(settings.run_dir, f"{host}:{port}")
    coordinator = Coordinator(
        run_dir, Sight(settings.run_dir), engines, timing, tally, settings.max_maintain_pause_s
    )
    windows = Windows(coordinator.knowledge, coordinator.watch, coordinator.ledger, timing)
    last_minute = LastMinute(coordinator.knowledge.sight.log)
    live = Live(coordinator, windows, last_minute, timing, may_act=not settings.read_only_page)
    return Services(settings, coordinator, windows, live, last_minute, tally, http, timing)


def make_control_app(services: Services) -> ASGIApp:
    """Every route, behind the guard."""
    settings = services.settings
    token_file = TokenFile(settings.token_file) if settings.token_file else None
    router = control_router(
        services.coordinator,
        services.windows,
        services.live,
        services.last_minute,
        services.tally,
    )
    app = _make_app(router, "/openapi.json")
    return Guard(app, token_file, settings.allowed_host)


def make_open_app(services: Services) -> ASGIApp:
    """Probes and metrics only, within limits."""
    router = open_router(services.coordinator, services.windows, services.tally)
    return Limits(_make_app(router, None))


def _make_app(router: APIRouter, openapi_url: str | None) -> FastAPI:
    app = FastAPI(
        title="gc-sidecar",
        summary="Python GC control for vLLM",
        version=__version__,
        openapi_url=openapi_url,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.include_router(router)
    # Made when somebody asks for it; FastAPI looks the method up on the app.
    app.openapi = functools.partial(openapi.document, app)  # type: ignore[method-assign]
    app.add_exception_handler(Problem, show_problem)
    app.add_exception_handler(HTTPException, show_http_error)
    app.add_exception_handler(Exception, show_mistake)
    return app
