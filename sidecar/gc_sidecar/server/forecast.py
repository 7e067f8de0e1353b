"""How long the next maintenance is expected to hold up each process: by the last collection that surely walked its
whole heap, and by how much it has grown since.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gc_sidecar.server.pauses import PauseLog
from gc_sidecar.server.reports import Key
from gc_sidecar.server.sight import PageReading


@dataclass(frozen=True)
class Measured:
    """A whole collection: when it began on our clock, how long it took, and the anonymous memory after it."""

    start_s: float
    duration_s: float
    anonymous_bytes: int | None


@dataclass(frozen=True)
class Expected:
    """The process that is expected to stand still longest, and for how long."""

    key: Key
    pause_s: float


class Forecast:
    """What was measured, by the token of the process; told of each new reading of the pages."""

    def __init__(self, log: PauseLog) -> None:
        self._log = log
        self._measured: dict[str, Measured] = {}

    def notice(self, pages: Iterable[PageReading]) -> None:
        """Remember the last whole collection of each living process, and its memory when it is first seen."""
        before, self._measured = self._measured, {}
        for page in pages:
            token = page.report.identity.token
            pause = self._log.last_whole(token)
            if pause is None or not page.alive:
                continue
            known = before.get(token)
            if known is None or known.start_s != pause.start_s:
                anonymous = page.report.numbers.get("anonymous_bytes")
                known = Measured(pause.start_s, pause.duration_s, anonymous)
            self._measured[token] = known

    def longest(self, pages: Iterable[PageReading]) -> Expected | None:
        """Whom a maintenance is expected to hold up longest; None where nothing was measured yet."""
        expected = [
            Expected(page.report.identity.keys[0], _scaled(self._measured[token], page))
            for page in pages
            if page.alive and (token := page.report.identity.token) in self._measured
        ]
        return max(expected, key=lambda each: each.pause_s, default=None)


def _scaled(measured: Measured, page: PageReading) -> float:
    """Its length, in proportion to what the process has grown by since. A smaller one is not trusted to be faster:
    memory that was given back need not have held objects."""
    now, then = page.report.numbers.get("anonymous_bytes"), measured.anonymous_bytes
    return measured.duration_s * (max(1.0, now / then) if now and then else 1.0)
