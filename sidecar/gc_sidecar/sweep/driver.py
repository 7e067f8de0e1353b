"""Sends the requests of one point and notes when each token came, on this machine's monotonic clock.

It speaks to any server with OpenAI's streaming completions. Nothing is printed or written while a point runs.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass

import httpx

from gc_sidecar.sweep.plan import Point

# Any vocabulary has these; at random, so that no server finds a prompt in its cache.
FIRST_TOKEN_ID, LAST_TOKEN_ID = 10, 99
TIMEOUT_S = 600.0
JSON = {"Content-Type": "application/json"}


class DriveError(Exception):
    """The server did not answer as one with streaming completions does; `str()` of it says how."""


@dataclass(frozen=True)
class Sample:
    """One request: when it was sent and when each of its tokens came, in seconds of time.monotonic()."""

    started_s: float
    tokens_s: tuple[float, ...]


class Driver:
    """Requests to the engine at `url`."""

    def __init__(self, url: str, model: str | None, seed: int | None) -> None:
        self._url = url.rstrip("/")
        self._model = model
        self._random = random.Random(seed)

    async def find_model(self) -> str:
        """The model that the server has, unless one was named. Raises DriveError."""
        if self._model is None:
            try:
                async with httpx.AsyncClient(trust_env=False) as http:
                    answer = await http.get(f"{self._url}/v1/models", timeout=30.0)
                    answer.raise_for_status()
                    self._model = str(answer.json()["data"][0]["id"])
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                raise DriveError(
                    f"no model is known: {self._url}/v1/models: {type(error).__name__}: {error}"
                ) from None
        return self._model

    async def drive(self, point: Point, requests: int) -> list[Sample]:
        """Send `requests` at `point`, so many at a time as it says. Raises DriveError."""
        # All of them first: to write a long one takes longer than a token, and would hold up our clock.
        bodies = [self._body(point) for _ in range(requests)]
        limits = httpx.Limits(max_connections=point.concurrency)
        async with httpx.AsyncClient(limits=limits, timeout=TIMEOUT_S, trust_env=False) as http:
            left = iter(bodies)
            samples: list[Sample] = []

            async def send_some() -> None:
                for body in left:
                    samples.append(await self._send(http, point, body))

            senders = [asyncio.create_task(send_some()) for _ in range(point.concurrency)]
            try:
                await asyncio.gather(*senders)
            finally:
                for sender in senders:
                    sender.cancel()
                await asyncio.wait(senders)
        return sorted(samples, key=lambda sample: sample.started_s)

    def _body(self, point: Point) -> bytes:
        prompt = [
            self._random.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(point.prompt_tokens)
        ]
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": point.output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
        }
        return json.dumps(body).encode()

    async def _send(self, http: httpx.AsyncClient, point: Point, body: bytes) -> Sample:
        tokens_s: list[float] = []
        started_s = time.monotonic()
        try:
            async with http.stream(
                "POST", f"{self._url}/v1/completions", content=body, headers=JSON
            ) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    raise DriveError(
                        f"at {point} the engine answered {answer.status_code}: {text[:300]}"
                    )
                async for line in answer.aiter_lines():
                    now_s = time.monotonic()
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    if '"error"' in line and _is_error(line[6:]):
                        raise DriveError(f"at {point} the engine failed: {line[6:300]!r}")
                    tokens_s.append(now_s)
        except httpx.HTTPError as error:
            raise DriveError(f"at {point}: {type(error).__name__}: {error}") from None
        if not tokens_s:
            raise DriveError(f"at {point} the engine sent no token")
        return Sample(started_s, tuple(tokens_s))


def _is_error(event: str) -> bool:
    try:
        content = json.loads(event)
    except (ValueError, RecursionError):
        return True
    return not isinstance(content, dict) or bool(content.get("error"))
