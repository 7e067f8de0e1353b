"""Running the two listeners in one process, within their limits, and leaving within two seconds of a SIGTERM.

The lease restores an engine whose sidecar has gone; nothing has to be said on the way out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from gc_sidecar.server.app import Services, make_control_app, make_open_app
from gc_sidecar.server.logs import rfc3339
from gc_sidecar.server.problems import PROBLEM_MEDIA_TYPE, Problem, to_json
from gc_sidecar.server.security import MAXIMUM_HEAD_BYTES, SECURITY_HEADERS

logger = logging.getLogger("gc_sidecar.server")

BACKLOG = 128
# Of each listener. Whoever says nothing for so long is cut off, also with half a request's head.
MAXIMUM_CONNECTIONS = 200
SILENCE_S = 10.0
# How long what is sent may lie in the socket without being taken.
UNTAKEN_MS = 20_000
# Requests in flight get this long; whatever holds up the rest is cut off before two seconds have passed.
GRACE_S = 1
LAST_MOMENT_S = 1.4


class ListenError(Exception):
    """An address that cannot be bound; `str()` of it says which and why."""


class _BoundedProtocol(H11Protocol):
    """A connection that must ask for something: silent ones would use up all descriptors, and with them
    those of the other listener."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to count its silence, or refuse it where there are too many."""
        super().connection_made(transport)
        self._last_cycle: object = None
        self._timer: asyncio.TimerHandle | None = None
        if len(self.connections) > MAXIMUM_CONNECTIONS:
            transport.abort()
            return
        self._timer = self.loop.call_later(SILENCE_S, self._end_silence)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of it: the timer would keep all that came and went until it is due."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def send_400_response(self, msg: str) -> None:
        """To what is no HTTP, or has too long a head: a problem like any other, where nothing was answered yet."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        problem = Problem("bad_http", msg)
        headers = [
            (b"content-type", PROBLEM_MEDIA_TYPE.encode()),
            (b"connection", b"close"),
            *SECURITY_HEADERS,
        ]
        for event in (
            h11.Response(status_code=problem.kind.status, headers=headers),
            h11.Data(data=to_json(problem.document())),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _end_silence(self) -> None:
        if self.transport.is_closing():
            return
        cycle = self.cycle
        is_silent = cycle is self._last_cycle and (cycle is None or cycle.response_complete)
        if is_silent:
            self.transport.abort()
            return
        self._last_cycle = cycle
        self._timer = self.loop.call_later(SILENCE_S, self._end_silence)


class _Server(uvicorn.Server):
    """One listener. Signals are handled once, for both."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signal handlers alone."""
        yield


def serve(services: Services) -> None:
    """Serve until SIGTERM or SIGINT. Raises ListenError."""
    settings = services.settings
    sockets = [_bind(*settings.control_address)]
    apps = [make_control_app(services)]
    if settings.open_address is not None:
        sockets.append(_bind(*settings.open_address))
        apps.append(make_open_app(services))
    asyncio.run(_serve(services, list(zip(apps, sockets, strict=True))))


async def _serve(services: Services, listeners: list[tuple[ASGIApp, socket.socket]]) -> None:
    servers = [_Server(_config(app)) for app, _ in listeners]
    loop = asyncio.get_running_loop()

    def stop(_signal: int, _frame: FrameType | None) -> None:
        # A thread of its own: it has to work with a loop that is stuck, and with one that waits for threads.
        timer = threading.Timer(LAST_MOMENT_S, os._exit, (0,))
        timer.daemon = True
        timer.start()
        for server in servers:
            server.should_exit = True
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(services.stop)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, stop)
    async with services.running():
        addresses = [_url(sock) for _, sock in listeners]
        logger.info(
            "listening",
            extra={
                "fields": {
                    "event": "listening",
                    "control": addresses[0],
                    "open": addresses[1] if len(addresses) > 1 else None,
                    "engines": list(services.settings.engine_url),
                    "run_dir": services.settings.run_dir,
                }
            },
        )
        await asyncio.gather(
            *(
                server.serve(sockets=[sock])
                for server, (_, sock) in zip(servers, listeners, strict=True)
            )
        )
        _log_stopped(services)
        if any(server.should_exit for server in servers):
            # An operation that waits for the engine would be waited for, and a thread that reads a hung
            # file system too. Neither has anything left to say to anybody.
            os._exit(0)


def _log_stopped(services: Services) -> None:
    """The last line: what stays when we are gone."""
    desired = services.coordinator.knowledge.desired
    expires_at = desired.lease_expires_at()
    message, until = "stopped", None
    if desired.is_on and expires_at is not None:
        until = rfc3339(expires_at)
        message = f"stopped; the {desired.mode} policy of {desired.owner} stays until {until}"
    fields = {"event": "stopped", "policy": desired.mode, "lease_expires_at": until}
    logger.info(message, extra={"fields": fields})


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_BoundedProtocol,
        h11_max_incomplete_event_size=MAXIMUM_HEAD_BYTES,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # The caller's address and scheme are what the socket says, whatever its headers claim.
        proxy_headers=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=GRACE_S,
    )


def _bind(host: str, port: int) -> socket.socket:
    name = host.strip("[]")
    try:
        family, *_, address = socket.getaddrinfo(
            name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        raise ListenError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    sock.set_inheritable(False)
    # Connections inherit it. asyncio sets it on sockets that name their protocol, which this one does not, and
    # without it an answer in two pieces waits 40 ms for the caller's acknowledgement.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Whoever takes no more of an answer is not there any more, or stands still; a stream of events has no end.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNTAKEN_MS)
    return sock


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
