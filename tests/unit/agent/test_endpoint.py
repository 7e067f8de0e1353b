"""The route on the engine's port: who may use it, and what it answers. Without starlette."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gc_sidecar_agent.agent import RUN_DIR_VARIABLE
from gc_sidecar_agent.command import METHOD, Command
from gc_sidecar_agent.endpoint import (
    MAXIMUM_BODY_BYTES,
    PATH,
    TOKEN_FILE_VARIABLE,
    TOKEN_NAME,
    GcEndpointPlugin,
    read_token,
)

COMMAND = Command("freeze", "op-1", 1).to_dict()


class StandInEngine:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def collective_rpc(self, method: str, args: Any) -> list[Any]:
        self.calls.append((method, *args))
        return [{"operation_id": "op-1"}]


class StandInRequest:
    """What the route uses of starlette's request."""

    method = "POST"

    def __init__(self, body: bytes, token: str | None) -> None:
        self.headers = {} if token is None else {"authorization": token}
        self.read = 0
        self._body = body

    async def stream(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._body), 1000):
            self.read += 1
            yield self._body[start : start + 1000]


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    monkeypatch.delenv(TOKEN_FILE_VARIABLE, raising=False)
    (tmp_path / TOKEN_NAME).write_text("s3cret\n")
    return tmp_path


@pytest.fixture
def engine() -> StandInEngine:
    return StandInEngine()


def ask(
    engine: Any, body: Any = COMMAND, token: str | None = "Bearer s3cret"
) -> tuple[int, dict[str, Any]]:
    endpoint = GcEndpointPlugin()
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def respond() -> tuple[int, dict[str, Any]]:
        await endpoint.init_state(engine, None, None)
        return await endpoint._command(StandInRequest(data, token))

    status, content = asyncio.run(respond())
    json.dumps(content)
    return status, content


def test_a_command_with_the_right_token_reaches_the_engine(engine: StandInEngine) -> None:
    assert ask(engine) == (200, {"results": [{"operation_id": "op-1"}]})
    assert engine.calls == [(METHOD, COMMAND)]


WRONG_TOKENS: list[str | None] = [None, "", "s3cret", "Bearer", "Bearer ", "Bearer wrong"]
WRONG_TOKENS += [
    "Bearer s3cre",
    "Bearer s3cret2",
    "bearer s3cret",
    "Basic s3cret",
    "Bearer s3cret ",
]
WRONG_TOKENS += ["Bearer \xe9", "x" * 100_000]


@pytest.mark.parametrize("token", WRONG_TOKENS, ids=lambda value: repr(value)[:20])
def test_any_other_token_is_refused_and_nothing_sent(
    engine: StandInEngine, token: str | None
) -> None:
    status, content = ask(engine, token=token)
    assert (status, content["code"]) == (401, "endpoint_token_wrong")
    assert "s3cret" not in json.dumps(content)
    assert engine.calls == []


def test_a_body_is_not_read_before_the_token_was_checked(engine: StandInEngine) -> None:
    endpoint = GcEndpointPlugin()
    request = StandInRequest(b"x" * 50_000, "Bearer wrong")
    status, _ = asyncio.run(endpoint._command(request))
    assert (status, request.read) == (401, 0)


def test_a_rotated_token_counts_at_once(engine: StandInEngine, run_dir: Path) -> None:
    assert ask(engine)[0] == 200
    (run_dir / "new").write_text("an0ther")
    os.replace(run_dir / "new", run_dir / TOKEN_NAME)
    assert ask(engine)[0] == 401
    assert ask(engine, token="Bearer an0ther")[0] == 200


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe"])
def test_without_a_secret_nobody_gets_in(
    engine: StandInEngine, run_dir: Path, content: bytes
) -> None:
    (run_dir / TOKEN_NAME).write_bytes(content)
    for token in ("Bearer ", "Bearer", "", None, "Bearer None"):
        status, answer = ask(engine, token=token)
        assert (status, answer["code"]) == (503, "endpoint_token_missing")
    assert engine.calls == []


@pytest.mark.parametrize("there", ["nothing", "link", "pipe", "directory", "no run directory"])
def test_a_secret_that_cannot_be_read_is_none(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    path = run_dir / TOKEN_NAME
    path.rename(run_dir / "elsewhere")
    if there == "link":
        path.symlink_to(run_dir / "elsewhere")
    elif there == "pipe":
        os.mkfifo(path)
    elif there == "directory":
        path.mkdir()
    elif there == "no run directory":
        monkeypatch.delenv(RUN_DIR_VARIABLE)
    assert read_token() is None


def test_an_operators_own_file_may_be_a_mounted_link(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir / "..data").mkdir()
    (run_dir / "..data" / "token").write_text("mounted\n")
    (run_dir / "token").symlink_to("..data/token")
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(run_dir / "token"))
    assert read_token() == "mounted"
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(run_dir / "missing"))
    assert read_token() is None


def test_a_body_that_is_too_large_is_refused_before_all_of_it_was_read(
    engine: StandInEngine,
) -> None:
    endpoint = GcEndpointPlugin()
    request = StandInRequest(b"x" * 10_000_000, "Bearer s3cret")
    status, content = asyncio.run(endpoint._command(request))
    assert (status, content["code"]) == (413, "body_too_large")
    assert request.read <= MAXIMUM_BODY_BYTES // 1000 + 1


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"freeze", b"[" * 60_000])
def test_what_is_no_json_is_refused(engine: StandInEngine, body: bytes) -> None:
    status, content = ask(engine, body)
    assert (status, content["code"]) == (400, "bad_json")
    assert engine.calls == []


def test_a_server_without_an_engine_says_so() -> None:
    status, content = ask(None)
    assert (status, content["code"]) == (503, "no_engine")


def test_an_engine_that_fails_is_an_answer_with_a_code() -> None:
    async def collective_rpc(method: str, args: Any) -> Any:
        raise RuntimeError("EngineCore is dead")

    status, content = ask(SimpleNamespace(collective_rpc=collective_rpc))
    assert (status, content["code"]) == (500, "rpc_failed")
    assert "EngineCore is dead" in content["detail"]


def test_it_is_what_vllm_expects_of_an_endpoint_plugin() -> None:
    routes: list[Any] = []
    app = SimpleNamespace(add_route=lambda path, *_, **options: routes.append((path, options)))
    endpoint = GcEndpointPlugin()
    endpoint.attach_router(app)
    assert (endpoint.name, endpoint.required_tasks) == ("gc_sidecar", None)
    ((path, options),) = routes
    assert path == PATH
    assert options["methods"] == ["GET", "POST"]
