"""The thin client against a stand-in sidecar: what it sends, and what it makes of the answers.

`StandInSidecar` is a real HTTP server that answers what a test lays out for it, nothing more.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gc_sidecar_agent.client import (
    Answer,
    Client,
    ClientError,
    StillRunning,
    Unreachable,
    client_from_environment,
    read_token,
)

OPERATION = {"id": "op-1", "kind": "maintain", "state": "applied", "generation": 7}
RUNNING = {**OPERATION, "state": "running"}
PROBLEM = {
    "type": "about:blank",
    "title": "Conflict",
    "status": 409,
    "code": "owned_by_another",
    "detail": "the policy belongs to bench-1",
    "remedy": "wait for its lease to end, or use force",
}


@dataclass
class Request:
    """What the stand-in was asked."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Reply:
    """What it is to answer next."""

    status: int = 200
    body: Any = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


class StandInSidecar:
    """An HTTP server that gives the replies laid out for it, the last one again and again."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.requests: list[Request] = []
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                request = Request(self.command, self.path, dict(self.headers), body)
                stand_in.requests.append(request)
                reply = stand_in.replies[0]
                if len(stand_in.replies) > 1:
                    stand_in.replies.pop(0)
                text = reply.body if isinstance(reply.body, str) else json.dumps(reply.body)
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST = do_PUT = answer

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> StandInSidecar:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture(autouse=True)
def _no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GC_SIDECAR_URL", "GC_SIDECAR_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def sidecar() -> Iterator[StandInSidecar]:
    with StandInSidecar(Reply(body={"operation": OPERATION})) as stand_in:
        yield stand_in


@pytest.mark.parametrize("verb", ["freeze", "maintain", "restore"])
def test_a_change_is_a_post_with_the_fields_that_were_given(
    sidecar: StandInSidecar, verb: str
) -> None:
    answer = getattr(Client(sidecar.url), verb)(owner="bench-1", deadline_s=5, force=None)
    (request,) = sidecar.requests
    assert (request.method, request.path) == ("POST", f"/gc/{verb}")
    assert request.body == {"owner": "bench-1", "deadline_s": 5}
    assert request.headers["Content-Type"] == "application/json"
    assert answer.operation == OPERATION


def test_a_change_without_fields_sends_an_empty_object(sidecar: StandInSidecar) -> None:
    Client(sidecar.url).freeze()
    assert sidecar.requests[0].body == {}


def test_a_lease_is_renewed_at_its_route(sidecar: StandInSidecar) -> None:
    Client(sidecar.url).renew_lease(owner="bench-1", lease_s=60)
    assert sidecar.requests[0].path == "/gc/lease"
    assert sidecar.requests[0].body == {"owner": "bench-1", "lease_s": 60}


def test_the_status_is_read_and_its_text_kept_untouched(sidecar: StandInSidecar) -> None:
    sidecar.replies = [Reply(body='{"policy":  {"mode":"off"}, "new": 1}\n')]
    answer = Client(sidecar.url).get_status()
    assert answer.body["policy"] == {"mode": "off"}
    assert answer.text == '{"policy":  {"mode":"off"}, "new": 1}\n'
    assert sidecar.requests[0].path == "/gc"
    assert sidecar.requests[0].body is None


def test_an_operation_is_asked_for_by_its_id_whatever_that_holds(sidecar: StandInSidecar) -> None:
    Client(sidecar.url).get_operation("a/b c")
    assert sidecar.requests[0].path == "/gc/operations/a%2Fb%20c"


def test_a_url_may_have_a_path_and_a_slash_at_its_end(sidecar: StandInSidecar) -> None:
    Client(f"{sidecar.url}/behind/ingress/").get_status()
    assert sidecar.requests[0].path == "/behind/ingress/gc"


@pytest.mark.parametrize("url", ["localhost:9470", "ftp://localhost", "http://", "http://h:x", ""])
def test_a_url_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Client(url)


def test_no_proxy_is_used(sidecar: StandInSidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    assert Client(sidecar.url).get_status().status == 200


def test_the_token_of_the_file_is_sent_as_bearer(sidecar: StandInSidecar, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    client_from_environment(sidecar.url, str(token)).get_status()
    assert sidecar.requests[0].headers["Authorization"] == "Bearer s3cret"


def test_without_a_token_none_is_sent(sidecar: StandInSidecar) -> None:
    Client(sidecar.url).get_status()
    assert "Authorization" not in sidecar.requests[0].headers


@pytest.mark.parametrize("content", [b"", b" \n", b"two words", b"line\nline", b"\xff\xfe"])
def test_a_file_that_holds_no_token_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="one token"):
        read_token(str(path))


def test_the_environment_says_where_the_sidecar_is_and_an_argument_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert client_from_environment().url == "http://localhost:9470"
    monkeypatch.setenv("GC_SIDECAR_URL", "http://there:1/")
    assert client_from_environment().url == "http://there:1"
    assert client_from_environment("http://here:2").url == "http://here:2"


def test_a_problem_becomes_an_error_with_its_code_and_remedy(sidecar: StandInSidecar) -> None:
    sidecar.replies = [Reply(409, PROBLEM, {"Content-Type": "application/problem+json"})]
    with pytest.raises(ClientError) as raised:
        Client(sidecar.url).freeze()
    error = raised.value
    assert (error.status, error.code) == (409, "owned_by_another")
    assert error.detail == "the policy belongs to bench-1"
    assert error.remedy == "wait for its lease to end, or use force"
    assert json.loads(error.body) == PROBLEM


@pytest.mark.parametrize(
    "reply",
    [
        Reply(404, {"detail": "Not Found"}),
        Reply(404, ""),
        Reply(200, "<html>hello</html>"),
        Reply(200, "[1, 2]"),
        Reply(302, "", {"Location": "http://elsewhere/"}),
        Reply(500, "[" * 100_000),
    ],
    ids=["vllm", "empty", "html", "array", "redirect", "deep"],
)
def test_what_does_not_answer_like_a_sidecar_is_called_that(
    sidecar: StandInSidecar, reply: Reply
) -> None:
    sidecar.replies = [reply]
    with pytest.raises(ClientError) as raised:
        Client(sidecar.url).get_status()
    assert raised.value.code == "not_a_sidecar"
    assert "control listener" in (raised.value.remedy or "")


def test_a_refused_connection_says_what_to_do() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(Unreachable) as raised:
            Client(url).get_status()
    assert raised.value.code == "unreachable"
    assert url in raised.value.detail
    assert "connection refused" in raised.value.detail
    assert "gc-sidecar serve" in (raised.value.remedy or "")


def test_an_answer_that_never_comes_is_not_called_a_failure() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        client = Client(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(Unreachable) as raised:
            client.request("POST", "/gc/freeze", {}, timeout_s=0.1)
    assert raised.value.code == "no_answer"
    assert "not known" in (raised.value.remedy or "")


def test_an_answer_that_comes_byte_by_byte_ends_at_the_deadline_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n{")
                while True:  # until nobody takes it
                    connection.sendall(b" ")
                    time.sleep(0.05)

        thread = threading.Thread(target=drip)
        thread.start()
        begun = time.monotonic()
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(Unreachable) as raised:
            client.request("GET", "/gc", timeout_s=0.3)
        took_s = time.monotonic() - begun
        thread.join()
    assert raised.value.code == "no_answer"
    assert 0.3 <= took_s < 5


def test_an_answer_that_breaks_off_is_not_called_a_failure() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def hang_up() -> None:
            connection, _ = listener.accept()
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(Unreachable) as raised:
            Client(f"http://127.0.0.1:{listener.getsockname()[1]}").get_status()
        thread.join()
    assert raised.value.code == "no_answer"


def test_a_running_operation_is_polled_until_it_has_ended(sidecar: StandInSidecar) -> None:
    location = {"Location": f"{sidecar.url}/gc/operations/op-1", "Retry-After": "0"}
    running = Reply(202, {"operation": RUNNING}, location)
    sidecar.replies = [running, running, Reply(200, {"operation": OPERATION})]
    client = Client(sidecar.url)
    heard: list[str] = []
    answer = client.wait_operation(
        client.maintain(), 10.0, lambda operation, waited: heard.append(operation["state"])
    )
    assert answer.operation == OPERATION
    assert not answer.running
    assert [request.path for request in sidecar.requests] == [
        "/gc/maintain",
        "/gc/operations/op-1",
        "/gc/operations/op-1",
    ]
    assert heard == ["running", "running"]


def test_a_running_operation_without_an_id_is_found_at_its_location(
    sidecar: StandInSidecar,
) -> None:
    accepted = Answer(202, "{}", {}, "http://known.only/to/itself/gc/operations/op-9", 0.0)
    Client(sidecar.url).wait_operation(accepted, 10.0)
    assert sidecar.requests[0].path == "/to/itself/gc/operations/op-9"


def test_an_operation_that_has_ended_is_not_asked_for_again(sidecar: StandInSidecar) -> None:
    ended = Answer(200, "", {"operation": OPERATION})
    assert Client(sidecar.url).wait_operation(ended, 10.0) is ended
    assert sidecar.requests == []


def test_waiting_ends_at_its_deadline_and_says_how_to_ask_again(sidecar: StandInSidecar) -> None:
    sidecar.replies = [Reply(202, {"operation": RUNNING}, {"Retry-After": "60"})]
    client = Client(sidecar.url)
    with pytest.raises(StillRunning) as raised:
        client.wait_operation(client.maintain(), 0.2)
    assert raised.value.problem == RUNNING
    assert "/gc/operations/op-1" in (raised.value.remedy or "")


@pytest.mark.parametrize("header", ["soon", "nan", "-1", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_a_retry_after_that_is_no_number_is_ignored(sidecar: StandInSidecar, header: str) -> None:
    sidecar.replies = [Reply(202, {"operation": RUNNING}, {"Retry-After": header})]
    assert Client(sidecar.url).maintain().retry_after_s is None
