"""Fixtures: a stand-in engine, and a sidecar whose app is asked without a socket in between."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gc_sidecar.server.app import Services, make_control_app, make_open_app, make_services
from gc_sidecar.server.settings import load_settings
from gc_sidecar.server.timing import Timing
from tests.unit.server.stand_in import StandInEngine

FAST = Timing(
    sight_poll_s=0.05,
    sight_fresh_s=0.01,
    stale_after_s=0.5,
    proof_poll_s=0.01,
    board_after_s=0.4,
    unseen_grace_s=0.2,
    rollback_reserve_s=2.0,
    rollback_least_s=0.3,
    background_limit_s=20.0,
    question_s=2.0,
    first_retry_s=0.05,
    last_retry_s=0.1,
    listening_grace_s=0.3,
    observe_retry_s=0.1,
    contact_poll_s=0.05,
    idle_poll_s=0.02,
)


@dataclass(frozen=True)
class Sidecar:
    """A running sidecar and clients for both of its apps."""

    services: Services
    client: httpx.AsyncClient
    open_client: httpx.AsyncClient

    async def status(self) -> dict[str, Any]:
        """GET /gc"""
        answer = await self.client.get("/gc")
        assert answer.status_code == 200
        return dict(answer.json())

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first status for which `condition` holds."""
        status = {}
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            status = await self.status()
            if condition(status):
                return status
            await asyncio.sleep(0.02)
        pytest.fail(f"never came true; the last status was {status}")

    async def until_recorded(self, count: int) -> None:
        """Wait until so many pauses have been read, or are known to be lost."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            answer = (await self.client.get("/gc/pauses?limit=1")).json()
            if answer["matching"] + answer["lost"] >= count:
                return
            await asyncio.sleep(0.02)
        pytest.fail(f"only {answer['matching']} pauses came, and {answer['lost']} were lost")

    async def until_seen(self, transport: str, processes: int) -> dict[str, Any]:
        """Wait until the engine is seen and reached."""
        return await self.until(
            lambda status: (
                status["transport"] == transport and status["coverage"]["expected"] == processes
            )
        )


StartSidecar = Callable[..., Awaitable[Sidecar]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.fixture
def start_engine(run_dir: Path) -> Iterator[Callable[..., StandInEngine]]:
    engines = []

    def start(**config: Any) -> StandInEngine:
        config.setdefault("run_dir", str(run_dir))
        if config["run_dir"] is not None:
            config.setdefault("token_file", str(run_dir / "endpoint.token"))
        engines.append(StandInEngine(**config))
        return engines[-1]

    yield start
    for engine in engines:
        engine.stop()


@pytest.fixture
async def start_sidecar(run_dir: Path) -> AsyncIterator[StartSidecar]:
    """Starts a sidecar. One that has the same run directory is stopped before, as a restart does."""
    async with contextlib.AsyncExitStack() as stack:
        running: dict[str, contextlib.AsyncExitStack] = {}

        async def start(*engines: StandInEngine, timing: Timing = FAST, **settings: Any) -> Sidecar:
            settings.setdefault("run_dir", str(run_dir))
            if settings["run_dir"] in running:
                await running.pop(settings["run_dir"]).aclose()
            settings.setdefault("engine_url", tuple(engine.url for engine in engines))
            services = make_services(load_settings(settings), timing)
            clients = [
                await stack.enter_async_context(
                    httpx.AsyncClient(
                        transport=httpx.ASGITransport(app=app),
                        base_url="http://localhost:9470",
                        timeout=None,
                    )
                )
                for app in (make_control_app(services), make_open_app(services))
            ]
            if settings["run_dir"] is None:
                await stack.enter_async_context(services.running())
            else:
                own = running[settings["run_dir"]] = contextlib.AsyncExitStack()
                await own.enter_async_context(services.running())
                stack.push_async_callback(own.aclose)
            return Sidecar(services, clients[0], clients[1])

        yield start
