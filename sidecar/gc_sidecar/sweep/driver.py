"""Sends the requests of one point and notes when tokens came, on this machine's monotonic clock.

It speaks to any server with OpenAI's streaming completions. Nothing is printed or written while a point runs.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import httpx

from gc_sidecar.sweep.events import EventReader
from gc_sidecar.sweep.plan import Point

# Any vocabulary has these; at random, so that no server finds a prompt in its cache.
FIRST_TOKEN_ID, LAST_TOKEN_ID = 10, 99
# An engine that sends no event for so long will not.
TIMEOUT_S = 120.0
LAST_EVENT = "[DONE]"
JSON = {"Content-Type": "application/json"}


class DriveError(Exception):
    """The server did not answer as one with streaming completions does; `str()` of it says how."""


@dataclass(frozen=True)
class Sample:
    """One request: when it was sent and when tokens came, in seconds of time.monotonic().

    A busy server sends several at once: `together` is how many came along with another. One that sends events
    without a token has more of `tokens_s` than its point has tokens.
    """

    started_s: float
    tokens_s: tuple[float, ...]
    together: int = 0


class Driver:
    """Requests to the engine at `url`."""

    def __init__(self, url: str, model: str | None, seed: int | None) -> None:
        self.url = url.rstrip("/")
        self._model = model
        self._seed = seed
        self._random = random.Random(seed)

    def begin(self, block: int) -> None:
        """With a seed, the prompts of a block are the same whether or not the sweep was stopped before it, and
        those of no other block."""
        if self._seed is not None:
            self._random.seed(f"{self._seed} {block}")

    async def find_model(self) -> str:
        """The model that the server has, unless one was named. Raises DriveError."""
        if self._model is None:
            try:
                async with httpx.AsyncClient(trust_env=False) as http:
                    answer = await http.get(f"{self.url}/v1/models", timeout=30.0)
                    answer.raise_for_status()
                    self._model = str(answer.json()["data"][0]["id"])
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                raise DriveError(
                    f"no model is known: {self.url}/v1/models: {type(error).__name__}: {error}"
                ) from None
        return self._model

    async def drive(self, point: Point, requests: int, warm_up: int) -> list[Sample]:
        """Send `requests` at `point`, so many at a time as it says. Raises DriveError.

        If `warm_up` is not 0, so many come before them, and at least one on each connection.
        """
        warm_up = max(warm_up, point.concurrency) if warm_up else 0
        # All of them first: to write a long one takes longer than a token, and would hold up our clock.
        bodies = [self.body(point) for _ in range(warm_up + requests)]
        limits = httpx.Limits(max_connections=point.concurrency)
        async with httpx.AsyncClient(limits=limits, timeout=TIMEOUT_S, trust_env=False) as http:
            await self._send_all(http, point, bodies[:warm_up])
            samples = await self._send_all(http, point, bodies[warm_up:])
        return sorted(samples, key=lambda sample: sample.started_s)

    async def _send_all(
        self, http: httpx.AsyncClient, point: Point, bodies: Sequence[bytes]
    ) -> list[Sample]:
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
        return samples

    def body(self, point: Point) -> bytes:
        """A request at `point`, with a prompt that no other has."""
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
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body).encode()

    async def _send(self, http: httpx.AsyncClient, point: Point, body: bytes) -> Sample:
        events: list[tuple[float, str]] = []
        reader = EventReader()
        started_s = heard_s = time.monotonic()
        try:
            async with http.stream(
                "POST", f"{self.url}/v1/completions", content=body, headers=JSON
            ) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    raise DriveError(
                        f"at {point} the engine answered {answer.status_code}: {text[:300]}"
                    )
                async for chunk in answer.aiter_bytes():
                    for text in reader.feed(chunk):
                        heard_s = time.monotonic()
                        events.append((heard_s, text))
                    # httpx waits for any byte, and comments that keep a connection alive may come for ever.
                    if time.monotonic() - heard_s > TIMEOUT_S:
                        raise DriveError(
                            f"at {point} the engine kept the stream open, but sent no event for {TIMEOUT_S:g} s"
                        )
                events += [(time.monotonic(), text) for text in reader.end()]
        except httpx.ReadTimeout:
            raise DriveError(f"at {point} the engine sent nothing for {TIMEOUT_S:g} s") from None
        except httpx.HTTPError as error:
            raise DriveError(f"at {point}: {type(error).__name__}: {error}") from None
        # Only now, for to read them takes longer than to note when they came.
        return sample_of(point, started_s, events)


def sample_of(point: Point, started_s: float, events: Iterable[tuple[float, str]]) -> Sample:
    """What the events of one stream say, each with when it came. Raises DriveError."""
    tokens_s: list[float] = []
    made = None
    for came_s, text in events:
        if text == LAST_EVENT:
            continue
        try:
            content = json.loads(text)
            choices, usage = content.get("choices"), content.get("usage")
            if content.get("error") or not isinstance(choices, list):
                raise ValueError
            if choices:
                tokens_s.append(came_s)
            if usage is not None:
                made = int(usage["completion_tokens"])
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            raise DriveError(f"at {point} the engine failed: {text[:300]!r}") from None
    if not tokens_s:
        raise DriveError(
            f"at {point} no token could be read from what the engine sent: it must stream server-sent events, each"
            " with the token as one of its choices"
        )
    if made is None:
        made = len(tokens_s)  # a server that does not tell
    if made != point.output_tokens:
        raise DriveError(
            f"at {point} the engine made {made} of {point.output_tokens} tokens: it must know ignore_eos, and its"
            " context must hold prompt and output"
        )
    return Sample(started_s, tuple(tokens_s), max(0, made - len(tokens_s)))
