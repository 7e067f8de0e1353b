"""Who gets in: every route that the app has, by credential, by listener; and what all answers have in common.

The routes are taken from the app, so that a new one is in the matrix before anybody thinks of it.
"""

from __future__ import annotations

import hmac
import json
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest

from gc_sidecar.server import security
from gc_sidecar.server.app import make_control_app, make_open_app, make_services
from gc_sidecar.server.routes import ACTIONS, READS
from gc_sidecar.server.security import MAXIMUM_BODY_BYTES, MAXIMUM_HEAD_BYTES, SECURITY_HEADERS
from gc_sidecar.server.settings import load_settings
from tests.sidecar_process import SidecarProcess
from tests.unit.server.conftest import Sidecar, StartSidecar
from tests.unit.server.test_requests import assert_problem
from tests.vllm.real_vllm import free_port

pytestmark = pytest.mark.anyio

TOKEN = "correct-horse-battery-staple"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
OPEN_PATHS = ("/healthz", "/readyz", "/metrics")
# The same for everybody, and needed before a token can be asked for.
PAGE_FILE = "/page/{name}"


def routes_of(app: Any) -> set[tuple[str, str]]:
    """Every method and path that the app, or a router in it, answers."""
    found: set[tuple[str, str]] = set()
    for route in app.routes:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            found |= routes_of(inner)
        else:
            found |= {(method, route.path) for method in route.methods}
    return found


def app_of(make: Any) -> Any:
    """The FastAPI app inside its middleware."""
    app = make(make_services(load_settings({})))
    while not hasattr(app, "routes"):
        app = app._app
    return app


CONTROL = {route for route in routes_of(app_of(make_control_app)) if route[0] != "HEAD"}
OPEN = {route for route in routes_of(app_of(make_open_app)) if route[0] != "HEAD"}
CHANGING = sorted((method, path) for method, path in CONTROL if method != "GET")


def filled(path: str) -> str:
    """A path with something for its ids, and an end for what has none."""
    names = {"{operation_id}": "some-op", "{window_id}": "some-window", "{name}": "page.js"}
    for name, value in names.items():
        path = path.replace(name, value)
    return f"{path}?for_s=0" if path == "/gc/events" else path


def test_the_routes_are_those_that_the_index_and_the_design_know() -> None:
    assert {path for _, path in OPEN} == set(OPEN_PATHS)
    assert OPEN < CONTROL
    assert {(action.method, action.path) for action in ACTIONS} < CONTROL
    told = {path.replace("{id}", "{operation_id}") for path in READS} | {"/openapi.json"}
    assert {path for method, path in CONTROL if method == "GET"} == told


# --- the matrix ---

CREDENTIALS: dict[str, tuple[dict[str, str], str]] = {
    "none": ({}, ""),
    "right": ({"Authorization": f"Bearer {TOKEN}"}, ""),
    "right, written small": ({"Authorization": f"bearer {TOKEN}"}, ""),
    "wrong": ({"Authorization": "Bearer wrong"}, ""),
    "almost right": ({"Authorization": f"Bearer {TOKEN[:-1]}"}, ""),
    "too much": ({"Authorization": f"Bearer {TOKEN} {TOKEN}"}, ""),
    "wrong scheme": ({"Authorization": f"Basic {TOKEN}"}, ""),
    "no scheme": ({"Authorization": TOKEN}, ""),
    "empty": ({"Authorization": ""}, ""),
    "empty token": ({"Authorization": "Bearer "}, ""),
    "not ASCII": ({"Authorization": "Bearer \xe9\xff"}, ""),
    "in the query": ({}, f"?token={TOKEN}&access_token={TOKEN}"),
    "in another header": ({"X-Api-Key": TOKEN, "Cookie": f"token={TOKEN}"}, ""),
}
RIGHT = ("right", "right, written small")


@dataclass(frozen=True)
class Listener:
    """One way of listening, and who gets in there. `settings` with a token file where it asks for a token."""

    host: str
    has_token: bool
    is_open: bool = False
    settings: tuple[tuple[str, str], ...] = ()

    def lets_in(self, credential: str, path: str = "") -> bool:
        is_public = path == PAGE_FILE and not self.is_open
        return not self.has_token or self.is_open or is_public or credential in RIGHT


LISTENERS = {
    "control on loopback, without a token": Listener("localhost:9470", False),
    "control on loopback, with a token": Listener("localhost:9470", True),
    "control beyond loopback, with a token": Listener(
        "10.1.2.3:9470", True, settings=(("host", "0.0.0.0"),)
    ),
    "open, beside a control listener with a token": Listener("10.1.2.3:9471", True, is_open=True),
    "open, beside a control listener without": Listener("10.1.2.3:9471", False, is_open=True),
}


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    return path


@pytest.mark.parametrize("name", LISTENERS)
async def test_route_by_credential_by_listener(
    start_sidecar: StartSidecar, token_file: Path, name: str
) -> None:
    listener = LISTENERS[name]
    settings: dict[str, str] = dict(listener.settings)
    if listener.has_token:
        settings["token_file"] = str(token_file)
    sidecar = await start_sidecar(**settings)
    client = sidecar.open_client if listener.is_open else sidecar.client

    async def ask(credential: str, method: str, path: str) -> httpx.Response:
        headers, query = CREDENTIALS[credential]
        raw = [(each.encode(), value.encode("latin-1")) for each, value in headers.items()]
        raw.append((b"Host", listener.host.encode()))
        target = filled(path)
        target += query.replace("?", "&") if "?" in target else query
        return await client.request(method, target, headers=raw)

    for credential in [each for each in CREDENTIALS if not listener.lets_in(each)]:
        for method, path in sorted(CONTROL):
            answer = await ask(credential, method, path)
            if listener.lets_in(credential, path):
                assert answer.status_code == 200, (credential, method, path)
                continue
            assert_problem(answer, 401, "token_required")
            assert answer.headers["www-authenticate"].startswith("Bearer ")
            assert TOKEN not in answer.text
    assert await generation(sidecar) == 0, "a restore would have raised it"
    for credential in filter(listener.lets_in, CREDENTIALS):
        for method, path in sorted(CONTROL):
            answer = await ask(credential, method, path)
            if listener.is_open and path not in OPEN_PATHS:
                assert_problem(answer, 404, "not_found")
            else:
                assert answer.status_code not in (401, 403), (credential, method, path)
    assert await generation(sidecar) == (0 if listener.is_open else 1)


async def generation(sidecar: Sidecar) -> int:
    """The desired generation, asked for with every credential that there is."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return int((await sidecar.client.get("/gc", headers=headers)).json()["policy"]["generation"])


async def test_tokens_are_compared_in_constant_time(
    start_sidecar: StartSidecar, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = await start_sidecar(token_file=str(token_file))
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(security, "hmac", type("hmac", (), {"compare_digest": compare}))
    for headers, _ in CREDENTIALS.values():
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await sidecar.client.get("/healthz", headers=raw)
    assert compared == [(32, 32)] * len(CREDENTIALS), "of digests, whatever was sent"


# --- other sites and other names ---

FOREIGN_ORIGINS = [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": ""},
    {"Origin": "http://localhost:3000"},
    {"Origin": "https://localhost:9471"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]


@pytest.mark.parametrize("headers", FOREIGN_ORIGINS, ids=str)
@pytest.mark.parametrize("has_token", [False, True])
async def test_pages_of_other_sites_reach_no_route_that_changes_anything(
    start_sidecar: StartSidecar, token_file: Path, headers: dict[str, str], has_token: bool
) -> None:
    settings = {"token_file": str(token_file)} if has_token else {}
    sidecar = await start_sidecar(**settings)
    credentials = {"Authorization": f"Bearer {TOKEN}"}
    for method, path in CHANGING:
        answer = await sidecar.client.request(
            method, filled(path), headers={**credentials, **headers}
        )
        assert_problem(answer, 403, "cross_origin")
        preflight = {**headers, "Access-Control-Request-Method": method}
        answer = await sidecar.client.options(filled(path), headers=preflight)
        assert answer.status_code == 403
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_a_foreign_name_reaches_no_route_without_a_token(start_sidecar: StartSidecar) -> None:
    sidecar = await start_sidecar(allowed_host=("sidecar.bench.svc",))
    for method, path in sorted(CONTROL):
        for host, lets_in in {
            "evil.example": False,
            "localhost.evil.example:9470": False,
            "10.1.2.3:9470": False,
            "127.0.0.1": True,
            "[::1]:9470": True,
            "sidecar.bench.svc:9470": True,
        }.items():
            answer = await sidecar.client.request(method, filled(path), headers={"Host": host})
            if lets_in:
                assert answer.status_code != 403, (method, path, host)
            else:
                assert_problem(answer, 403, "host_not_allowed")


async def test_two_hosts_are_none(start_sidecar: StartSidecar) -> None:
    sidecar = await start_sidecar()
    headers = [(b"Host", b"localhost"), (b"Host", b"evil.example")]
    assert_problem(await sidecar.client.get("/gc", headers=headers), 403, "host_not_allowed")


# --- methods ---


async def test_a_method_that_a_path_does_not_take_is_a_405_that_says_which_it_takes(
    start_sidecar: StartSidecar,
) -> None:
    sidecar = await start_sidecar()
    for path in sorted({path for _, path in CONTROL}):
        taken = {method for method, each in CONTROL if each == path}
        for method in METHODS:
            if method in taken:
                continue
            answer = await sidecar.client.request(method, filled(path))
            problem = assert_problem(answer, 405, "method_not_allowed")
            allowed = {each.strip() for each in answer.headers["allow"].split(",")}
            assert allowed - {"HEAD"} == taken, (method, path)
            assert problem["remedy"].startswith("curl "), (method, path)
            if "GET" not in taken:
                assert f"-X {next(iter(taken))} " in problem["remedy"]
    assert await generation(sidecar) == 0


# --- the sockets ---


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """The ports of a control and an open listener of a sidecar that runs."""
    directory = tmp_path_factory.mktemp("listening")
    (directory / "run").mkdir()
    open_port = free_port()
    with SidecarProcess(
        run_dir=directory / "run",
        extra_args=[f"--open-port={open_port}"],
        log_path=directory / "sidecar.log",
    ) as sidecar:
        yield sidecar.port, open_port


def ask(port: int, method: str, path: str, **options: Any) -> tuple[HTTPResponse, bytes]:
    with closing(HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request(method, path, **options)
        answer = connection.getresponse()
        return answer, answer.read()


def send(port: int, request: bytes) -> tuple[HTTPResponse, bytes]:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(request)
        answer = HTTPResponse(connection)
        answer.begin()
        return answer, answer.read()


def assert_guarded(answer: HTTPResponse) -> None:
    for name, value in SECURITY_HEADERS:
        assert answer.headers.get_all(name.decode()) == [value.decode()]


async def test_every_answer_of_either_listener_has_the_security_headers(
    listening: tuple[int, int],
) -> None:
    for port in listening:
        own = {("GET", PAGE_FILE)} if port == listening[0] else set()
        for method, path in [*sorted(CONTROL - own), ("GET", "/nowhere"), ("DELETE", "/healthz")]:
            assert_guarded(ask(port, method, filled(path))[0])
        assert_guarded(ask(port, "HEAD", "/healthz")[0])


async def test_what_is_no_http_is_answered_with_a_problem_too(listening: tuple[int, int]) -> None:
    for port in listening:
        for request in (
            b"nonsense\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: many\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (2 * MAXIMUM_HEAD_BYTES),
            # Also where it comes whole, in one piece.
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: "
            + b"x" * MAXIMUM_HEAD_BYTES
            + b"\r\n\r\n",
        ):
            answer, body = send(port, request)
            problem = json.loads(body)
            assert (answer.status, problem["status"], problem["code"]) == (400, 400, "bad_http")
            assert answer.headers["content-type"] == "application/problem+json"
            assert body.endswith(b"}\n")
            assert_guarded(answer)


async def test_nonsense_after_an_answer_is_cut_off_without_another_one(
    listening: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    for port in listening:
        head = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(head + b"1\r\nx\r\n")
            answered = connection.recv(65536)
            assert answered.startswith(b"HTTP/1.1 404")
            connection.sendall(b"zz\r\n")
            while more := connection.recv(65536):
                answered += more
        assert answered.count(b"HTTP/1.1 ") == 1
    assert "Fatal error" not in caplog.text


async def test_a_body_beyond_the_limit_is_refused_by_either_listener(
    listening: tuple[int, int],
) -> None:
    for port in listening:
        head = f"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: {MAXIMUM_BODY_BYTES + 1}\r\n\r\n"
        answer, body = send(port, head.encode())
        assert (answer.status, json.loads(body)["code"]) == (413, "body_too_large")
        assert_guarded(answer)


async def test_the_open_listener_has_probes_and_metrics_and_changes_nothing(
    listening: tuple[int, int],
) -> None:
    _, port = listening
    for path in OPEN_PATHS:
        for method in METHODS:
            answer, _ = ask(port, method, path)
            assert answer.status == (405 if method != "GET" else 503 if path == "/readyz" else 200)
    for path in sorted({path for _, path in CONTROL} - set(OPEN_PATHS)):
        for method in METHODS:
            assert ask(port, method, filled(path))[0].status == 404, (method, path)
