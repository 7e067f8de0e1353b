"""Who may ask: the guard before every route of the control listener, and the limits of both listeners.

In this order: Host header (DNS rebinding), cross-origin browsers, bearer token, size of the body. With a token
any Host will do: a page that rebinds its name to our address cannot have the token. The caller's address is
never looked at: behind a service mesh every caller looks local.

The files of the page are the same for everybody and tell nothing: they need no token, and a link on another
site may lead to them.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gc_sidecar.server import page
from gc_sidecar.server.problems import Problem, problem_response
from gc_sidecar.server.settings import is_loopback

# Of a request's line and headers.
MAXIMUM_HEAD_BYTES = 16 << 10
MAXIMUM_BODY_BYTES = 64 << 10
MAXIMUM_TOKEN_BYTES = 4096
BROWSER_HEADERS = ("origin", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest")
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
)


class TokenFile:
    """The bearer token in a file, read again whenever the file changes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._stamp: tuple[int, int, int] | None = None
        self._digest: bytes | None = None

    def load(self) -> None:
        """Read the file if it changed. Raises OSError, ValueError: no usable token in it."""
        status = os.stat(self.path)  # follows links: a mounted Secret is one
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        if stamp == self._stamp:
            return
        self._stamp, self._digest = None, None
        with open(self.path, "rb") as file:
            token = file.read(MAXIMUM_TOKEN_BYTES).strip()
        if not token or not all(0x21 <= byte <= 0x7E for byte in token):
            raise ValueError("it must hold one token of printable ASCII characters without blanks")
        self._stamp, self._digest = stamp, hashlib.sha256(token).digest()

    def accepts(self, header: str | None) -> bool:
        """Whether an Authorization header carries the token. Raises like `load`."""
        self.load()
        assert self._digest is not None
        scheme, _, given = (header or "").partition(" ")
        digest = hashlib.sha256(given.strip().encode("latin-1", "replace")).digest()
        # Of digests, so that not even the token's length shows in the time it takes.
        return hmac.compare_digest(digest, self._digest) and scheme.lower() == "bearer"


def _check_head(headers: Headers, scope: Scope) -> Problem | None:
    """The server bounds a head that is not complete; one that comes in one piece it takes."""
    size = len(scope["path"]) + len(scope["query_string"])
    size += sum(len(name) + len(value) for name, value in headers.raw)
    if size <= MAXIMUM_HEAD_BYTES:
        return None
    return Problem("bad_http", f"the request's line and headers have {size} bytes")


class Limits:
    """ASGI middleware of both listeners: a body has its bound, and every answer the security headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            return
        respond = _with_security_headers(send)
        headers = Headers(scope=scope)
        problem = _check_head(headers, scope) or _check_length(headers)
        if problem is not None:
            await problem_response(problem)(scope, receive, respond)
            return
        if scope["method"] == "HEAD":  # the server leaves out the body
            scope = {**scope, "method": "GET"}
        await self._app(scope, _bounded(receive), respond)


class Guard:
    """ASGI middleware of the control listener: see the module."""

    def __init__(
        self, app: ASGIApp, token_file: TokenFile | None, allowed_hosts: Sequence[str]
    ) -> None:
        self._app = Limits(app)
        self._token_file = token_file
        self._allowed_hosts = frozenset(host.strip("[]").lower() for host in allowed_hosts)
        self._checks: tuple[Callable[[Headers, Scope], Problem | None], ...] = (
            _check_head,
            self._check_host,
            _check_origin,
            self._check_token,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        for check in self._checks:
            problem = check(headers, scope)
            if problem is not None:
                respond = _with_security_headers(send)
                await problem_response(problem)(scope, receive, respond)
                return
        # A stream outlives its request, and shall not outlive its token.
        scope.setdefault("state", {})["may_stay"] = lambda: (
            self._check_token(headers, scope) is None
        )
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers, _scope: Scope) -> Problem | None:
        if self._token_file is not None:
            return None
        hosts = headers.getlist("host")
        name = host_name(hosts[0]) if len(hosts) == 1 else None
        if name is not None and (is_loopback(name) or name in self._allowed_hosts):
            return None
        return Problem(
            "host_not_allowed", "the Host header is neither a loopback address nor allowed"
        )

    def _check_token(self, headers: Headers, scope: Scope) -> Problem | None:
        # A browser has no token before the page has asked for it, and the page tells nothing.
        if self._token_file is None or page.is_asked_for(scope, headers):
            return None
        try:
            if self._token_file.accepts(headers.get("authorization")):
                return None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            return Problem("token_unavailable", f"{self._token_file.path}: {reason}")
        return Problem(
            "token_required",
            "the Authorization header carries no token, or another one",
            headers={"WWW-Authenticate": 'Bearer realm="gc-sidecar"'},
        )


def is_from_browser(headers: Headers) -> bool:
    """Whether a browser sent it: only browsers send these headers, and they always do on a POST."""
    return any(name in headers for name in BROWSER_HEADERS)


def host_name(host: str) -> str | None:
    """The name in a Host header, without its port; None where it is none."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return None
    if parts.username is not None or parts.path or parts.query or parts.fragment:
        return None
    return parts.hostname


def _check_origin(headers: Headers, scope: Scope) -> Problem | None:
    if page.is_asked_for(scope, headers) and _is_navigation(headers):
        return None
    origin, host = headers.get("origin"), headers.get("host", "")
    # We speak HTTP alone, but who stands in front of us may speak TLS to the browser.
    own = [f"{scheme}://{host}".lower() for scheme in ("http", "https")]
    site = headers.get("sec-fetch-site", "same-origin")
    if (origin is None or origin.lower() in own) and site in ("same-origin", "none"):
        return None
    return Problem("cross_origin", "another site's page sent this request")


def _is_navigation(headers: Headers) -> bool:
    """Whether somebody follows a link, into a tab of its own: the page that has the link sees nothing of it."""
    return (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == (
        "navigate",
        "document",
    )


def _check_length(headers: Headers) -> Problem | None:
    length = headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:20]) <= MAXIMUM_BODY_BYTES:
        return None
    return _too_large()


def _too_large() -> Problem:
    return Problem(
        "body_too_large",
        f"a body has at most {MAXIMUM_BODY_BYTES} bytes",
        headers={"Connection": "close"},
    )


def _bounded(receive: Receive) -> Receive:
    seen = 0

    async def bounded() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MAXIMUM_BODY_BYTES:
            raise _too_large()  # out of the route that reads it, which answers with it
        return message

    return bounded


def _with_security_headers(send: Send) -> Send:
    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message.get("headers", [])}
            message["headers"] = [
                *message.get("headers", []),
                *(header for header in SECURITY_HEADERS if header[0] not in present),
            ]
        await send(message)

    return sender
