"""Who gets in: route by credential by listener, foreign hosts and origins, and the token's life."""

from __future__ import annotations

import ast
import hmac
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.requests import Request as StarletteRequest

import gc_sidecar_agent
from gc_sidecar.server.secret import ensure_endpoint_token, read_endpoint_token
from gc_sidecar.server.security import host_name
from gc_sidecar_agent import endpoint
from gc_sidecar_agent.command import METHOD
from tests.unit.server.conftest import StartSidecar
from tests.unit.server.stand_in import StandInEngine
from tests.unit.server.test_requests import assert_problem

pytestmark = pytest.mark.anyio

TOKEN = "correct-horse-battery-staple"
CONTROL_ROUTES = [
    ("POST", "/gc/freeze"), ("PUT", "/gc/policy"), ("POST", "/gc/maintain"),
    ("POST", "/gc/restore"), ("POST", "/gc/lease"), ("GET", "/gc"), ("GET", "/gc/operations/x"),
    ("GET", "/version"), ("GET", "/"), ("GET", "/openapi.json"), ("GET", "/nowhere"),
]  # fmt: skip
OPEN_ROUTES = [("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/metrics")]


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return path


async def test_with_a_token_every_route_of_the_control_listener_asks_for_it(
    start_sidecar: StartSidecar, token_file: Path
) -> None:
    sidecar = await start_sidecar(token_file=str(token_file))
    credentials = [
        {}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Basic {TOKEN}"}, {"Authorization": TOKEN},
        {"Authorization": "Bearer"}, {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": "Bearer \xff\xfe"},
    ]  # fmt: skip
    for method, path in [*CONTROL_ROUTES, *OPEN_ROUTES]:
        for headers in credentials:
            raw = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
            answer = await sidecar.client.request(method, path, headers=raw)
            assert_problem(answer, 401, "token_required")
            assert answer.headers["www-authenticate"].startswith("Bearer")
        headers = {"Authorization": f"bearer {TOKEN}"}
        answer = await sidecar.client.request(method, path, headers=headers)
        assert answer.status_code != 401


async def test_the_open_listener_has_probes_and_metrics_only(
    start_sidecar: StartSidecar, token_file: Path
) -> None:
    sidecar = await start_sidecar(token_file=str(token_file))
    for method, path in OPEN_ROUTES:
        headers = {"Host": "10.0.0.7:9471"}
        answer = await sidecar.open_client.request(method, path, headers=headers)
        assert answer.status_code in (200, 503)
    for method, path in CONTROL_ROUTES:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        answer = await sidecar.open_client.request(method, path, headers=headers)
        assert_problem(answer, 404, "not_found")


async def test_without_a_token_the_loopback_listener_asks_for_none(
    start_sidecar: StartSidecar,
) -> None:
    sidecar = await start_sidecar()
    for method, path in [*CONTROL_ROUTES, *OPEN_ROUTES]:
        assert (await sidecar.client.request(method, path)).status_code != 401


async def test_the_token_is_read_again_when_its_file_changes(
    start_sidecar: StartSidecar, token_file: Path, tmp_path: Path
) -> None:
    sidecar = await start_sidecar(token_file=str(token_file))

    async def status_with(token: str) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        return (await sidecar.client.get("/gc", headers=headers)).status_code

    assert await status_with(TOKEN) == 200
    new = tmp_path / "new"
    new.write_text("another-token-altogether")
    os.replace(new, token_file)  # as Kubernetes does
    assert await status_with(TOKEN) == 401
    assert await status_with("another-token-altogether") == 200
    token_file.unlink()
    answer = await sidecar.client.get("/gc", headers={"Authorization": f"Bearer {TOKEN}"})
    assert_problem(answer, 503, "token_unavailable")
    for useless in (b"", b"\n", b"two words", b"\xff"):
        token_file.write_bytes(useless)
        assert await status_with("") == 503
    token_file.write_text(TOKEN)
    assert await status_with(TOKEN) == 200


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1", "LOCALHOST:9470", "127.0.0.1:9470", "127.0.0.2", "[::1]:5"]
)
async def test_loopback_hosts_are_let_in(start_sidecar: StartSidecar, host: str) -> None:
    sidecar = await start_sidecar()
    answer = await sidecar.client.get("/gc", headers={"Host": host})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "0.0.0.0",
        "[::]", "", "localhost@evil.example", "evil.example#localhost", "[::1", "localhost:x",
        "localhost/x", "2130706433",
    ],
)  # fmt: skip
async def test_other_hosts_are_not(start_sidecar: StartSidecar, host: str) -> None:
    sidecar = await start_sidecar()
    for path in ("/gc", "/healthz"):
        answer = await sidecar.client.get(path, headers={"Host": host})
        assert_problem(answer, 403, "host_not_allowed")


async def test_with_the_token_any_host_will_do(
    start_sidecar: StartSidecar, token_file: Path
) -> None:
    sidecar = await start_sidecar(token_file=str(token_file))
    for host in ("sidecar.bench.svc:9470", "10.0.0.1", "evil.example"):
        headers = {"Host": host, "Authorization": f"Bearer {TOKEN}"}
        assert (await sidecar.client.get("/gc", headers=headers)).status_code == 200
        for wrong in ({}, {"Authorization": "Bearer wrong"}):
            answer = await sidecar.client.get("/gc", headers={"Host": host, **wrong})
            assert_problem(answer, 401, "token_required")
    headers = {"Authorization": f"Bearer {TOKEN}", "Origin": "http://evil.example"}
    answer = await sidecar.client.post("/gc/freeze", headers=headers)
    assert_problem(answer, 403, "cross_origin")


async def test_a_host_may_be_allowed_by_flag(start_sidecar: StartSidecar) -> None:
    sidecar = await start_sidecar(allowed_host=("Sidecar.bench.svc", "10.0.0.1"))
    for host in ("sidecar.bench.svc:9470", "10.0.0.1:80"):
        assert (await sidecar.client.get("/gc", headers={"Host": host})).status_code == 200
    answer = await sidecar.client.get("/gc", headers={"Host": "x.sidecar.bench.svc"})
    assert answer.status_code == 403


def test_a_host_header_is_read_as_a_host_or_not_at_all() -> None:
    assert host_name("LocalHost:80") == "localhost"
    assert host_name("[::1]:80") == "::1"
    for host in ("", "a@b", "a/b", "a?b", "a#b", "a:b", "[::1"):
        assert host_name(host) in (None, "")


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000"},
        {"Origin": "https://localhost:9471"},
        {"Origin": "ftp://localhost:9470"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "http://localhost:9470", "Sec-Fetch-Site": "cross-site"},
    ],
)
async def test_other_sites_pages_are_refused(
    start_sidecar: StartSidecar, headers: dict[str, str]
) -> None:
    sidecar = await start_sidecar()
    for method, path in CONTROL_ROUTES:
        answer = await sidecar.client.request(method, path, headers=headers)
        assert_problem(answer, 403, "cross_origin")
    preflight = await sidecar.client.options("/gc/freeze", headers=headers)
    assert preflight.status_code == 403
    assert "access-control-allow-origin" not in preflight.headers


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_our_own_page_may_ask_behind_a_front_that_speaks_tls_too(
    start_sidecar: StartSidecar, scheme: str
) -> None:
    sidecar = await start_sidecar()
    headers = {"Origin": f"{scheme}://localhost:9470", "Sec-Fetch-Site": "same-origin"}
    assert (await sidecar.client.get("/gc", headers=headers)).status_code == 200


async def test_every_answer_carries_security_headers_and_head_works(
    start_sidecar: StartSidecar,
) -> None:
    sidecar = await start_sidecar()
    for path in ("/gc", "/nowhere"):
        headers = (await sidecar.client.get(path)).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert "default-src 'none'" in headers["content-security-policy"]
    assert (await sidecar.client.head("/healthz")).status_code == 200


async def test_neither_token_is_ever_shown(
    start_engine: Callable[..., StandInEngine],
    start_sidecar: StartSidecar,
    token_file: Path,
    run_dir: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    sidecar = await start_sidecar(start_engine(), token_file=str(token_file))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    texts = []
    for method, path in [*CONTROL_ROUTES, *OPEN_ROUTES]:
        texts.append((await sidecar.client.request(method, path, headers=headers)).text)
    secret = (run_dir / "endpoint.token").read_text()
    shown = "\n".join([*texts, caplog.text])
    assert TOKEN not in shown
    assert secret not in shown


# --- the secret of the endpoint plugin ---


def test_the_secret_is_made_once_and_only_the_group_may_read_it(run_dir: Path) -> None:
    ensure_endpoint_token(str(run_dir))
    path = run_dir / "endpoint.token"
    secret = path.read_text()
    assert len(bytes.fromhex(secret)) == 32
    assert path.stat().st_mode & 0o777 == 0o640
    ensure_endpoint_token(str(run_dir))
    assert path.read_text() == secret
    assert [entry.name for entry in run_dir.iterdir()] == ["endpoint.token"]


def test_a_secret_that_is_no_such_file_is_replaced_and_no_link_is_followed(
    run_dir: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("ab" * 32)
    path = run_dir / "endpoint.token"
    path.symlink_to(victim)
    assert read_endpoint_token(str(run_dir), None) is None
    ensure_endpoint_token(str(run_dir))
    assert not path.is_symlink()
    assert victim.read_text() == "ab" * 32
    for unsound in (b"", b"short", b"\xff" * 64):
        path.write_bytes(unsound)
        ensure_endpoint_token(str(run_dir))
        assert len(path.read_text()) == 64


def test_a_file_given_by_flag_is_used_instead(run_dir: Path, tmp_path: Path) -> None:
    ensure_endpoint_token(str(run_dir))
    given = tmp_path / "given"
    given.write_text(" given-token\n")
    link = tmp_path / "link"
    link.symlink_to(given)  # a mounted Secret is one
    assert read_endpoint_token(str(run_dir), str(link)) == "given-token"
    assert read_endpoint_token(None, str(tmp_path / "missing")) is None
    assert read_endpoint_token(None, None) is None


class Recorder:
    """vLLM's app and its engine client, as far as the plugin uses them."""

    def __init__(self) -> None:
        self.routes: list[tuple[str, list[str]]] = []
        self.called: list[str] = []

    def add_route(self, path: str, _route: object, methods: list[str], **_: object) -> None:
        self.routes.append((path, methods))

    async def collective_rpc(self, method: str, **_: object) -> list[object]:
        self.called.append(method)
        return []


def post(headers: dict[str, str], body: bytes) -> StarletteRequest:
    """A request as vLLM's server hands it to a route."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": endpoint.PATH,
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    }

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    return StarletteRequest(scope, receive)


async def test_the_endpoint_plugin_has_one_route_to_one_method_for_who_has_its_own_secret(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GC_SIDECAR_RUN_DIR", str(run_dir))
    monkeypatch.delenv(endpoint.TOKEN_FILE_VARIABLE, raising=False)
    ensure_endpoint_token(str(run_dir))
    secret = (run_dir / endpoint.TOKEN_NAME).read_text()
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(endpoint, "hmac", SimpleNamespace(compare_digest=compare))
    engine = Recorder()
    plugin = endpoint.GcEndpointPlugin()
    plugin.attach_router(engine)
    await plugin.init_state(engine, None, None)
    assert engine.routes == [(endpoint.PATH, ["GET", "POST"])]
    body = json.dumps({"method": "execute_model", "kind": "observe", "args": ["x"]}).encode()
    for token, status in ((TOKEN, 401), (secret, 200)):
        request = post({"Authorization": f"Bearer {token}"}, body)
        assert (await plugin._respond(request)).status_code == status
    assert engine.called == [METHOD], "whatever the body names"
    assert len(compared) == 2, "in constant time"
    (run_dir / endpoint.TOKEN_NAME).unlink()
    ensure_endpoint_token(str(run_dir))
    request = post({"Authorization": f"Bearer {secret}"}, body)
    assert (await plugin._respond(request)).status_code == 401, "it was written anew"


# --- what is exchanged ---


def test_neither_the_agent_nor_the_sidecar_can_unpickle_or_evaluate_what_they_are_sent() -> None:
    banned = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib", "yaml"}
    source = Path(gc_sidecar_agent.__file__).parents[1]
    files = [
        *(source / "gc_sidecar_agent").rglob("*.py"),
        *(source / "gc_sidecar" / "server").rglob("*.py"),
        *(source / "gc_sidecar" / "commands").rglob("*.py"),
    ]
    assert len(files) > 50
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {name.partition(".")[0] for name in names} & banned, file
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile"), file
