"""Which requests run in an engine core: first come, first served, every running one gets a token a step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass
class Request:
    """One completion that is being made."""

    id: str
    client_index: int
    max_tokens: int
    produced: int = 0


@dataclass(frozen=True)
class Token:
    """One token of a request; `finish_reason` is set on its last."""

    request_id: str
    text: str
    finish_reason: str | None


class Scheduler:
    """Requests that run and requests that wait."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._waiting: deque[Request] = deque()
        self._running: dict[str, Request] = {}

    @property
    def counts(self) -> tuple[int, int]:
        """How many run and how many wait."""
        return len(self._running), len(self._waiting)

    def has_unfinished_requests(self) -> bool:
        """Whether there is something to do."""
        return bool(self._running or self._waiting)

    def add(self, request: Request) -> None:
        """Take a request in."""
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Forget a request whose client has left."""
        self._running.pop(request_id, None)
        self._waiting = deque(r for r in self._waiting if r.id != request_id)

    def schedule(self) -> None:
        """Let as many run as may."""
        while self._waiting and len(self._running) < self._max_running:
            request = self._waiting.popleft()
            self._running[request.id] = request

    def update(self) -> dict[int, list[Token]]:
        """The tokens of one step by client; finished requests are let go."""
        tokens: dict[int, list[Token]] = {}
        for request in list(self._running.values()):
            request.produced += 1
            finished = request.produced >= request.max_tokens
            token = Token(request.id, f" {request.produced}", "length" if finished else None)
            tokens.setdefault(request.client_index, []).append(token)
            if finished:
                del self._running[request.id]
        return tokens
