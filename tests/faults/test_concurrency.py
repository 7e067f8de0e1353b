"""Two hundred callers at once: one operation at a time, the others told so at once, and nothing lost between them.

What the engine was told is asked of the engine: a stand-in that records its calls and can be made to wait.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gc_sidecar_agent.board import read_board
from tests.sidecar_process import SidecarProcess, wait_for
from tests.unit.server.stand_in import StandInEngine

pytestmark = [pytest.mark.anyio, pytest.mark.xdist_group("concurrency")]

CALLERS = 200
WORKER = "worker-0-0"
# Nothing may end before we let it, however slow the machine is.
OWNER = {"owner": "all of us", "deadline_s": 600}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def engine(run_dir: Path) -> Iterator[StandInEngine]:
    token_file = str(run_dir / "endpoint.token")
    engine = StandInEngine(run_dir=str(run_dir), token_file=token_file, workers=1)
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def running(engine: StandInEngine, run_dir: Path) -> Iterator[SidecarProcess]:
    log_path = run_dir.parent / "concurrency.log"
    with SidecarProcess(engine_urls=[engine.url], run_dir=run_dir, log_path=log_path) as sidecar:
        wait_for("it is reached", lambda: sidecar.status()["transport"] == "plugin")
        sidecar.wait_for_coverage(3)
        yield sidecar


@pytest.fixture
def sidecar(running: SidecarProcess, engine: StandInEngine) -> Iterator[SidecarProcess]:
    """The sidecar, with no policy on before and after."""
    yield running
    engine.set_process(WORKER, deaf=False)
    assert running.post("/gc/restore", {"force": True})[0] == 200


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass(frozen=True)
class Answer:
    """What one caller was told."""

    status: int
    location: str | None
    text: str

    @property
    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.text))


async def ask(
    sidecar: SidecarProcess, method: str, path: str, fields: Mapping[str, Any] | None = None
) -> Answer:
    """One request on a connection of its own. (A client with a pool of 200 spends its time on the pool.)"""
    reader, writer = await asyncio.open_connection("127.0.0.1", sidecar.port)
    body = b"" if fields is None else json.dumps(fields).encode()
    writer.write(
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    head, _, text = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    first, *lines = head.split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return Answer(int(first.split()[1]), headers.get("location"), text)


def commands(engine: StandInEngine, known: int = 0) -> list[str]:
    """The ids of the operations that it was told to carry out over RPC, in their order."""
    return [call["operation_id"] for call in engine.changes()[known:] if "operation_id" in call]


ROUTES = {
    ("POST", "/gc/freeze"): {},
    ("PUT", "/gc/policy"): {"mode": "freeze"},
    ("POST", "/gc/maintain"): {},
    ("POST", "/gc/restore"): {},
    # Another length than it has: a page that shows it cannot be one from before.
    ("POST", "/gc/lease"): {"lease_s": 7200},
}


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_one_is_let_in_and_the_others_are_told_which_before_it_has_ended(
    sidecar: SidecarProcess, engine: StandInEngine, run_dir: Path, method: str, path: str
) -> None:
    if path in ("/gc/lease", "/gc/restore"):  # there must be something to renew, or to end
        assert sidecar.post("/gc/freeze", OWNER)[0] == 200
    before = len(engine.changes())
    # It cannot end before we say so: one process neither hears nor sees.
    engine.set_process(WORKER, deaf=True)
    fields = {**ROUTES[method, path], **OWNER}
    waiting = {
        asyncio.create_task(ask(sidecar, method, path, request_of(fields, path, number)))
        for number in range(CALLERS)
    }
    answers: list[Answer] = []
    while len(waiting) > 1:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        answers += [task.result() for task in done]
    running = (await ask(sidecar, "GET", "/gc")).json["operation"]
    accepted = running["id"]
    assert running["state"] == "running"
    told = Counter(
        (answer.status, answer.json.get("operation_id"), answer.location) for answer in answers
    )
    assert told == {(409, accepted, f"/gc/operations/{accepted}"): CALLERS - 1}
    assert set(commands(engine, before)) <= {accepted}
    engine.set_process(WORKER, deaf=False)
    last = await waiting.pop()
    assert last.status == 200, last.text
    operation = last.json["operation"]
    assert operation["id"] == accepted
    assert set(commands(engine, before)) <= {accepted}
    assert_is_in_force(sidecar, engine, run_dir, operation)
    if path in ("/gc/freeze", "/gc/policy"):
        number = int(accepted.rpartition("-")[2])
        assert sidecar.status()["policy"]["interval_s"] == 60 + number


def request_of(fields: dict[str, Any], path: str, number: int) -> dict[str, Any]:
    """One caller's own request."""
    own = {"interval_s": 60 + number} if path in ("/gc/freeze", "/gc/policy") else {}
    operation_id = f"{path[4:]}-{id(fields)}-{number}"
    return {**fields, **own, "operation_id": operation_id}


def assert_is_in_force(
    sidecar: SidecarProcess, engine: StandInEngine, run_dir: Path, last: dict[str, Any]
) -> None:
    """What the last operation wanted is what the sidecar wants, the board says, and every process does."""
    status = sidecar.wait_for_coverage(3)
    policy, board = status["policy"], read_board(str(run_dir))
    assert policy["generation"] == last["generation"]
    if last["kind"] in ("freeze", "restore"):
        assert policy["mode"] == ("freeze" if last["kind"] == "freeze" else "off")
    assert status["operation"] is None
    assert {row["observed_generation"] for row in status["processes"]} == {policy["generation"]}
    assert {row["mode"] for row in status["processes"]} == {policy["mode"]}
    assert board.policy is not None
    assert board.policy.generation == policy["generation"]
    assert board.policy.kind == ("restore" if policy["mode"] == "off" else "freeze")
    assert board.policy.interval_s == (policy["interval_s"] or board.policy.interval_s)
    assert board.maintain is None


async def test_of_those_that_ask_until_they_are_let_in_none_is_lost_and_none_comes_twice(
    sidecar: SidecarProcess, engine: StandInEngine, run_dir: Path
) -> None:
    callers = 20
    before = len(engine.changes())

    async def insist(number: int) -> dict[str, Any]:
        fields = {**OWNER, "interval_s": 60 + number, "operation_id": f"insisting-{number}"}
        while True:
            answer = await ask(sidecar, "POST", "/gc/freeze", fields)
            if answer.status == 200:
                return dict(answer.json["operation"])
            assert answer.status == 409, answer.text
            await asyncio.sleep(0.02)

    operations = await asyncio.gather(*map(insist, range(callers)))
    in_order = sorted(operations, key=lambda operation: operation["generation"])
    generations = [operation["generation"] for operation in in_order]
    assert generations == list(range(generations[0], generations[0] + callers))
    ids = [operation["id"] for operation in in_order]
    assert commands(engine, before) == ids
    for name in ("api_server-0-0", "engine_core-0-0", WORKER):
        assert [each for each in engine.process(name)["ran"] if each in ids] == ids
    assert_is_in_force(sidecar, engine, run_dir, in_order[-1])
    number = int(ids[-1].rpartition("-")[2])
    assert sidecar.status()["policy"]["interval_s"] == 60 + number


async def test_what_is_in_force_after_a_crowd_of_every_kind_is_what_the_last_one_wanted(
    sidecar: SidecarProcess, engine: StandInEngine, run_dir: Path
) -> None:
    before = len(engine.changes())
    kinds = list(ROUTES.items())

    async def once(number: int) -> Answer:
        (method, path), fields = kinds[number % len(kinds)]
        return await ask(sidecar, method, path, request_of({**fields, **OWNER}, path, number))

    answers = await asyncio.gather(*map(once, range(CALLERS)))
    assert {answer.status for answer in answers} <= {200, 409}
    done = [answer.json["operation"] for answer in answers if answer.status == 200]
    assert done
    for answer in answers:
        if answer.status == 409:
            assert answer.json["code"] in ("operation_running", "no_policy")
    told = commands(engine, before)
    assert len(told) == len(set(told)), "nothing is done twice"
    assert set(told) <= {operation["id"] for operation in done}
    policies = [each for each in done if each["kind"] in ("freeze", "restore")]
    if policies:
        last = max(policies, key=lambda operation: int(operation["generation"]))
        assert_is_in_force(sidecar, engine, run_dir, last)


async def test_one_operation_that_all_of_them_ask_for_is_done_once_and_all_are_told(
    sidecar: SidecarProcess, engine: StandInEngine
) -> None:
    before = len(engine.changes())
    fields = {**OWNER, "operation_id": "the-same"}
    answers = await asyncio.gather(
        *(ask(sidecar, "POST", "/gc/freeze", fields) for _ in range(CALLERS))
    )
    assert {answer.status for answer in answers} == {200}
    assert len({answer.text for answer in answers}) == 1
    assert commands(engine, before) == ["the-same"]
    assert engine.process(WORKER)["ran"].count("the-same") == 1


async def test_windows_are_opened_and_closed_once_and_no_more_than_there_may_be(
    sidecar: SidecarProcess,
) -> None:

    async def crowd(path: str) -> list[Answer]:
        paths = [path.format(number) for number in range(CALLERS)]
        return await asyncio.gather(*(ask(sidecar, "POST", path) for path in paths))

    same = await crowd("/gc/windows?window_id=the-same")
    assert Counter(answer.status for answer in same) == {201: 1, 200: CALLERS - 1}
    other = await crowd("/gc/windows?window_id=other-{}")
    assert Counter(answer.status for answer in other) == {201: 15, 409: CALLERS - 15}
    closed = await crowd("/gc/windows/the-same/close")
    assert {answer.status for answer in closed} == {200}
    assert len({answer.text for answer in closed}) == 1
    for answer in other:
        if answer.status == 201:
            window_id = answer.json["window"]["id"]
            assert sidecar.post(f"/gc/windows/{window_id}/close")[0] == 200
