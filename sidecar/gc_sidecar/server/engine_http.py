"""HTTP into the engine, bounded in every direction: no redirect, no proxy, no endless answer.

Each request has its own connection: one that an engine's restart left half-closed would make it
impossible to say whether the engine got the request.
"""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from gc_sidecar.server.obstacle import Obstacle

MAXIMUM_ANSWER_BYTES = 8 << 20
CONNECT_S = 5.0


class EngineFault(Exception):
    """A request that got no usable answer. `sent` is False only if the engine surely did not get it."""

    def __init__(
        self, code: str, detail: str, remedy: str | None = None, sent: bool = True
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.remedy = remedy
        self.sent = sent

    def as_obstacle(self) -> Obstacle:
        """The same, for the status."""
        return Obstacle(self.code, self.detail, self.remedy)


@dataclass(frozen=True)
class Answer:
    """Status and body of an answer."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body as JSON; None where it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


@functools.lru_cache
def _certificates() -> ssl.SSLContext:
    """Whom to trust; to read that takes longer than all else here."""
    return httpx.create_ssl_context(trust_env=False)


def make_client() -> httpx.AsyncClient:
    """The one client for all engines."""
    return httpx.AsyncClient(
        verify=_certificates(),
        follow_redirects=False,
        trust_env=False,
        timeout=httpx.Timeout(None, connect=CONNECT_S),
        limits=httpx.Limits(max_keepalive_connections=0),
        headers={"Accept-Encoding": "identity", "User-Agent": "gc-sidecar"},
    )


async def ask(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    timeout_s: float,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """One request within `timeout_s`. Raises EngineFault."""
    try:
        return await asyncio.wait_for(_exchange(client, method, url, body, headers), timeout_s)
    except (asyncio.TimeoutError, TimeoutError):  # two classes before Python 3.11
        raise EngineFault(
            "engine_timeout", f"{method} {url}: no answer within {timeout_s:.1f} s"
        ) from None
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
        raise EngineFault(
            "engine_unreachable",
            f"{method} {url}: {_describe(error)}",
            "the engine may still be starting; else check --engine-url",
            sent=False,
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineFault("engine_hung_up", f"{method} {url}: {_describe(error)}") from None


async def _exchange(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    body: Any,
    headers: Mapping[str, str] | None,
) -> Answer:
    content: dict[str, Any] = {} if body is None else {"json": body}
    async with client.stream(method, url, headers=headers, **content) as response:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise EngineFault("engine_answer_encoded", f"{method} {url}: the answer is compressed")
        data = bytearray()
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > MAXIMUM_ANSWER_BYTES:
                raise EngineFault(
                    "engine_answer_too_large",
                    f"{method} {url}: the answer is longer than {MAXIMUM_ANSWER_BYTES} bytes",
                )
        return Answer(response.status_code, bytes(data))


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__
