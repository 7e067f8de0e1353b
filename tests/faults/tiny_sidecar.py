"""The sidecar's own app over a tiny engine, asked without a socket in between, and killed without a farewell."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from dataclasses import replace
from typing import Any

import httpx
from starlette.types import ASGIApp

from gc_sidecar.server import engine_http
from gc_sidecar.server import run_dir as run_dir_module
from gc_sidecar.server.app import Services, make_control_app, make_services
from gc_sidecar.server.settings import load_settings
from gc_sidecar.server.timing import Timing
from tests.faults.design_model import Answer, wanted_in
from tests.faults.tiny_engine import TinyEngine

POLICY_PATH = "/gc/policy"
FAST = Timing(
    sight_poll_s=0.05,
    sight_fresh_s=0.002,
    stale_after_s=60.0,
    proof_poll_s=0.005,
    board_after_s=0.1,
    unseen_grace_s=0.02,
    rollback_least_s=0.2,
    question_s=2.0,
    first_retry_s=0.05,
    last_retry_s=0.1,
    observe_retry_s=0.1,
    contact_poll_s=0.05,
)


class Sidecar:
    """The app of one sidecar, running."""

    def __init__(self, services: Services, client: httpx.AsyncClient) -> None:
        self.services = services
        self.client = client
        self.stack = contextlib.AsyncExitStack()

    async def status(self) -> dict[str, Any]:
        """GET /gc"""
        answer = await self.client.get("/gc")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def change(self, path: str, fields: dict[str, Any]) -> Answer:
        """A change, and what is wanted afterwards."""
        method = "PUT" if path == POLICY_PATH else "POST"
        answer = await self.client.request(method, path, json=fields)
        body = answer.json()
        return Answer(answer.status_code, body.get("code"), wanted_in(await self.status()))


class _Latest:
    """Stands for a part of the sidecar that was started last: to make the app takes longer than most steps."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_latest[0], self._part), name)


_latest: list[Services] = []


@functools.cache
def _app() -> ASGIApp:
    parts: Any = {part: _Latest(part) for part in ("coordinator", "windows", "tally")}
    nowhere = make_services(load_settings({"run_dir": "/nowhere"}), FAST)
    return make_control_app(replace(nowhere, **parts))


async def start_sidecar(engine: TinyEngine, timing: Timing = FAST) -> Sidecar:
    """A sidecar beside `engine`."""
    urls = ("http://engine:8000",) if engine.has_rpc else ()
    configuration = {"run_dir": str(engine.run_dir), "engine_url": urls}
    make_client = engine_http.make_client
    engine_http.make_client = lambda: httpx.AsyncClient(transport=engine)
    try:
        services = make_services(load_settings(configuration), timing)
    finally:
        engine_http.make_client = make_client
    _latest[:] = [services]
    transport = httpx.ASGITransport(app=_app())
    client = httpx.AsyncClient(transport=transport, base_url="http://localhost:9470", timeout=None)
    sidecar = Sidecar(services, client)
    await sidecar.stack.enter_async_context(services.running())
    return sidecar


async def kill(sidecar: Sidecar) -> None:
    """End all that it does, at once: nothing is written any more. The kernel would let go of its claim."""

    def write_nothing(*_: object) -> None:
        raise OSError("the dead write nothing")

    module: Any = run_dir_module
    real, module.write_board = module.write_board, write_nothing
    try:
        # More than once: before Python 3.12 asyncio.wait_for may swallow a cancellation.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=0.05)
        await sidecar.stack.aclose()
        await sidecar.client.aclose()
    finally:
        module.write_board = real


class Mistakes(logging.Handler):
    """What the sidecar's log calls a mistake of ours."""

    EVENTS = ("internal_error", "look_failed", "contact_failed")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it, where it is one."""
        if getattr(record, "fields", {}).get("event") in self.EVENTS:
            self.found.append(logging.Formatter().format(record))
