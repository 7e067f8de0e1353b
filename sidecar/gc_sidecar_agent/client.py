"""The thin client of the sidecar's REST API: one method per route, JSON in and JSON out.

It runs in images where nothing of ours is installed (a benchmark's, or vLLM's own), so it needs
nothing but the standard library; and it goes through no proxy, for the sidecar is next door.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urlsplit

from gc_sidecar_agent.command import DEFAULT_DEADLINE_S

DEFAULT_URL = "http://localhost:9470"
READ_TIMEOUT_S = 15.0
# The sidecar answers at its own deadline; we hang up this much later, and only if it did not.
GRACE_S = 15.0
POLL_S = 1.0
# Clocks that differ by less are taken for the same.
CLOCK_S = 2.0
MAXIMUM_POLL_S = 10.0
MAXIMUM_TOKEN_BYTES = 8192
# The states of an operation that goes on, and of one that did what was asked (or, where that was
# allowed, a part of it). Every other state is a failure.
RUNNING_STATES = ("running",)
DONE_STATES = ("applied", "partial")

Fields = dict[str, Any]
Progress = Callable[[dict[str, Any], float], None]


class ClientError(Exception):
    """The sidecar said no, or what answered is no sidecar. `body` is its answer as text."""

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        status: int | None = None,
        remedy: str | None = None,
        problem: dict[str, Any] | None = None,
        body: str = "",
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.status = status
        self.remedy = remedy
        self.problem = problem or {}
        self.body = body


class Unreachable(ClientError):
    """Nobody answered: whether a change was made is not known where `code` is `no_answer`."""


class StillRunning(ClientError):
    """We stopped waiting for an operation that goes on; `problem` is its last known state."""


@dataclass(frozen=True)
class Answer:
    """One answer of the sidecar: `text` is the body untouched, `body` the same as an object."""

    status: int
    text: str
    body: dict[str, Any] = field(default_factory=dict)
    location: str | None = None
    retry_after_s: float | None = None
    # How far the sidecar's clock is ahead of ours, to within a second; 0 where it does not say.
    clock_ahead_s: float = 0.0
    # The sidecar's own time, in whole seconds since 1970; None where it does not say.
    date_s: float | None = None

    @property
    def operation(self) -> dict[str, Any]:
        """The operation in the body; empty where there is none."""
        operation = self.body.get("operation")
        return operation if isinstance(operation, dict) else {}

    @property
    def running(self) -> bool:
        """Whether the operation goes on after this answer."""
        return self.status == 202 or self.operation.get("state") in RUNNING_STATES


def read_token(path: str) -> str:
    """The bearer token in the file at `path`. Raises OSError, or ValueError where it holds none."""
    with open(path, "rb") as file:
        token = file.read(MAXIMUM_TOKEN_BYTES).strip()
    if not token or not all(0x21 <= byte <= 0x7E for byte in token):
        raise ValueError("it must hold one token of printable ASCII characters without blanks")
    return token.decode("ascii")


class Client:
    """A sidecar at `url`, asked under the name `host` if its address is not its name. Every method raises
    ClientError where the answer is not a success."""

    def __init__(
        self, url: str = DEFAULT_URL, token: str | None = None, host: str | None = None
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in _CONNECTIONS or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// address of a sidecar")
        self.url = url.rstrip("/")
        self._connection = _CONNECTIONS[parts.scheme]
        self._host = parts.hostname
        self._port = parts.port  # raises ValueError where it is not a port
        self._prefix = parts.path.rstrip("/")
        self._headers = {"Accept": "application/json, application/problem+json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        if host:
            self._headers["Host"] = host

    def get_status(self) -> Answer:
        """`GET /gc`: desired and observed state, one row per process."""
        return self.request("GET", "/gc")

    def get_operation(self, operation_id: str) -> Answer:
        """`GET /gc/operations/{id}`: what an operation did in each process."""
        return self.request("GET", operation_path(operation_id))

    def freeze(self, **fields: Any) -> Answer:
        """`POST /gc/freeze`; a field that is None is not sent, so the sidecar's default holds."""
        return self._change("/gc/freeze", fields)

    def budget(self, pause_budget_ms: float, **fields: Any) -> Answer:
        """`PUT /gc/policy` with mode `budget`."""
        fields |= {"mode": "budget", "pause_budget_ms": pause_budget_ms}
        return self._change("/gc/policy", fields, "PUT")

    def maintain(self, **fields: Any) -> Answer:
        """`POST /gc/maintain`; the answer may be `running` (202): see `wait_operation`."""
        # Said, so that both ends wait for as long.
        deadline_s = fields.pop("deadline_s", None) or DEFAULT_DEADLINE_S
        return self._change("/gc/maintain", {**fields, "deadline_s": deadline_s})

    def restore(self, **fields: Any) -> Answer:
        """`POST /gc/restore`: back to normal."""
        return self._change("/gc/restore", fields)

    def renew_lease(self, **fields: Any) -> Answer:
        """`POST /gc/lease`: the policy lasts `lease_s` from now; `owner` must match."""
        return self._change("/gc/lease", fields)

    def open_window(self, **fields: Any) -> Answer:
        """`POST /gc/windows`: open a measured window."""
        return self._change("/gc/windows", fields)

    def get_window(self, window_id: str) -> Answer:
        """`GET /gc/windows/{id}`: a window and its verdict, so far where it is open."""
        return self.request("GET", _window_path(window_id))

    def close_window(self, window_id: str) -> Answer:
        """`POST /gc/windows/{id}/close`: judge it; it stays as it is from then on."""
        return self.request(
            "POST", f"{_window_path(window_id)}/close", {}, READ_TIMEOUT_S + GRACE_S
        )

    def wait_operation(
        self, answer: Answer, timeout_s: float, progress: Progress | None = None
    ) -> Answer:
        """Ask for the operation of `answer` until it has ended; StillRunning after `timeout_s`,
        ClientError where it ended in failure.

        `progress` is called with the operation and the seconds waited, as often as it still runs.
        """
        started = time.monotonic()
        path = self._path_of(answer) if answer.running else ""
        while answer.running:
            waited = time.monotonic() - started
            if progress is not None:
                progress(answer.operation, waited)
            if waited >= timeout_s:
                raise StillRunning(
                    "still_running",
                    f"the operation still runs after {waited:.0f} s",
                    remedy=f"ask again with: curl {self.url}{path}",
                    problem=answer.operation,
                    body=answer.text,
                )
            pause = answer.retry_after_s if answer.retry_after_s is not None else POLL_S
            time.sleep(min(max(pause, 0.05), MAXIMUM_POLL_S, timeout_s - waited))
            answer = self.request("GET", path)
        operation = answer.operation
        if operation.get("state", "applied") not in DONE_STATES:
            raise ClientError(
                str(operation.get("code") or operation["state"]),
                str(operation.get("detail") or f"the operation has ended: {operation['state']}"),
                problem=answer.body,
                body=answer.text,
            )
        return answer

    def request(
        self,
        method: str,
        path: str,
        fields: Fields | None = None,
        timeout_s: float = READ_TIMEOUT_S,
    ) -> Answer:
        """One request; raises ClientError for every answer that is not a 2xx with a JSON object."""
        headers = dict(self._headers)
        data = None
        if fields is not None:
            data = json.dumps(fields).encode()
            headers["Content-Type"] = "application/json"
        connection = self._connection(self._host, self._port, timeout=timeout_s)
        try:
            with _hung_up_after(timeout_s, connection):
                connection.request(method, self._prefix + path, body=data, headers=headers)
                response = connection.getresponse()
                text = response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error, timeout_s) from error
        finally:
            connection.close()
        body = _json_object(text)
        if not 200 <= response.status < 300:
            raise self._refusal(response, text, body)
        if body is None:
            raise self._stranger(response.status, text)
        date_s = _date_s(response.getheader("Date"))
        return Answer(
            response.status,
            text,
            body,
            response.getheader("Location"),
            _seconds(response.getheader("Retry-After")),
            _clock_ahead_s(date_s),
            date_s,
        )

    def _change(self, path: str, fields: Fields, method: str = "POST") -> Answer:
        sent = {name: value for name, value in fields.items() if value is not None}
        deadline_s = sent.get("deadline_s", DEFAULT_DEADLINE_S)
        return self.request(method, path, sent, timeout_s=deadline_s + GRACE_S)

    def _path_of(self, answer: Answer) -> str:
        """Where to ask for the operation: by its id, for a Location may name an address only the
        sidecar knows itself by (behind a port-forward)."""
        operation_id = answer.operation.get("id")
        if isinstance(operation_id, str):
            return operation_path(operation_id)
        path = urlsplit(answer.location or "").path
        if not path:
            raise self._stranger(answer.status, answer.text)
        return path

    def _unreachable(self, error: Exception, timeout_s: float) -> Unreachable:
        if isinstance(error, socket.timeout):
            return Unreachable(
                "no_answer",
                f"no answer from {self.url} within {timeout_s:.0f} s",
                remedy="whether anything was changed is not known: ask with `gc-sidecar status`",
            )
        if isinstance(error, _BROKEN_OFF):
            return Unreachable(
                "no_answer",
                f"{self.url} broke off before it had answered ({_reason(error)})",
                remedy="whether anything was changed is not known: ask with `gc-sidecar status`",
            )
        return Unreachable(
            "unreachable",
            f"no sidecar answers at {self.url} ({_reason(error)})",
            remedy="start one with `gc-sidecar serve --run-dir DIR --engine-url URL`,"
            " or say where it is with --url or GC_SIDECAR_URL",
        )

    def _refusal(
        self, response: http.client.HTTPResponse, text: str, body: dict[str, Any] | None
    ) -> ClientError:
        if body is None or not isinstance(body.get("code"), str):
            return self._stranger(response.status, text)
        detail = body.get("detail") or body.get("title") or response.reason
        remedy = body.get("remedy")
        return ClientError(
            body["code"],
            str(detail),
            status=response.status,
            remedy=str(remedy) if remedy else None,
            problem=body,
            body=text,
        )

    def _stranger(self, status: int, text: str) -> ClientError:
        return ClientError(
            "not_a_sidecar",
            f"what answers at {self.url} does not answer like a gc-sidecar (HTTP {status})",
            status=status,
            remedy="--url must be the sidecar's control listener (port 9470 by default),"
            " not the engine and not the listener for probes and metrics",
            body=text,
        )


def client_from_environment(url: str | None = None, token_file: str | None = None) -> Client:
    """The client that the flags `--url` and `--token-file`, or their variables, describe.

    Raises ValueError and OSError where they are wrong.
    """
    url = url or os.environ.get("GC_SIDECAR_URL") or DEFAULT_URL
    token_file = token_file or os.environ.get("GC_SIDECAR_TOKEN_FILE")
    return Client(url, read_token(token_file) if token_file else None)


def operation_path(operation_id: str) -> str:
    """The route of an operation."""
    return f"/gc/operations/{quote(operation_id, safe='')}"


def _window_path(window_id: str) -> str:
    return f"/gc/windows/{quote(window_id, safe='')}"


_CONNECTIONS: dict[str, Callable[..., http.client.HTTPConnection]] = {
    "http": http.client.HTTPConnection,
    "https": http.client.HTTPSConnection,
}


@contextlib.contextmanager
def _hung_up_after(timeout_s: float, connection: http.client.HTTPConnection) -> Iterator[None]:
    """Connect, and hang up after so long: the timeout of a socket begins anew with every byte that comes."""
    begun = time.monotonic()
    connection.connect()
    sock = connection.sock  # the connection itself lets go of it early
    is_over = threading.Event()

    def hang_up() -> None:
        is_over.set()
        with contextlib.suppress(OSError):
            # Not the method of a TLS socket, which would unwrap it while it is being read.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, timeout_s - (time.monotonic() - begun)), hang_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if not is_over.is_set():
            raise
    finally:
        timer.cancel()
        timer.join()
    if is_over.is_set():
        raise TimeoutError(f"not all of it came within {timeout_s:g} s")


_BROKEN_OFF = (ConnectionResetError, BrokenPipeError, http.client.HTTPException)


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _seconds(header: str | None) -> float | None:
    """The seconds of a Retry-After header; None for a date or nonsense."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _date_s(header: str | None) -> float | None:
    """What a Date header says, in seconds since 1970; None for nonsense."""
    try:
        return parsedate_to_datetime(header or "").timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def _clock_ahead_s(date_s: float | None) -> float:
    """By a date in whole seconds: less than that is no difference."""
    ahead_s = 0.0 if date_s is None else date_s - time.time()
    return ahead_s if abs(ahead_s) > CLOCK_S else 0.0


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text[:1].lower() + text[1:]
