"""What happens, to everybody who looks: `GET /gc/events` as server-sent events.

Once a second one update is made for all viewers. Where nobody looks nothing is made, but the history is kept.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gc_sidecar import __version__
from gc_sidecar.server import readiness
from gc_sidecar.server.coordinator import Coordinator
from gc_sidecar.server.history import MEMORY_EVERY_S, SPAN_S, History, to_line
from gc_sidecar.server.operations import Operation
from gc_sidecar.server.problems import Problem
from gc_sidecar.server.roster import Roster
from gc_sidecar.server.safety import LastMinute, judge
from gc_sidecar.server.timing import Timing
from gc_sidecar.server.verdicts import Window
from gc_sidecar.server.views import operation_line, status_view, window_line
from gc_sidecar.server.windows import Windows

logger = logging.getLogger("gc_sidecar.server")

MAXIMUM_VIEWERS = 20
# How far a viewer may lag behind: what it shows is taken for what is.
LAG_S = 5.0
# How many entries of the history go into one event, so that neither side is held up by it.
PAUSES_AT_ONCE, MEMORY_AT_ONCE = 1000, 100
EVENT_STREAM = "text/event-stream"
# Of one event, for the OpenAPI document.
EVENT_SCHEMA = {
    "type": "object",
    "properties": {
        "event": {
            "enum": ["history", "places", "pauses", "memory", "operations", "windows", "state"]
        },
        "data": {"type": "string", "contentMediaType": "application/json"},
        "id": {"type": "string"},
    },
    "required": ["event", "data"],
}
EVENT_ID = re.compile(r"([0-9a-f]{8})-([0-9]{1,15})")


class Live:
    """See the module."""

    def __init__(
        self,
        coordinator: Coordinator,
        windows: Windows,
        last_minute: LastMinute,
        timing: Timing,
        *,
        may_act: bool,
    ) -> None:
        self.history = History()
        self._coordinator = coordinator
        self._windows = windows
        self._last_minute = last_minute
        self._timing = timing
        self._may_act = may_act
        self._viewers: set[_Viewer] = set()
        self._is_stopping = False
        self._memory_at = 0.0
        # What all viewers have been told.
        self._told = 0
        self._told_places = 0
        self._told_operations: dict[str, Operation] = {}
        self._told_windows: dict[str, str] = {}
        coordinator.knowledge.sight.log.keepers.append(self.history.add_pause)

    async def keep(self) -> None:
        """Keep the history and the viewers up to date, for ever."""
        while True:
            try:
                await self._keep_once()
            except Exception:
                logger.exception(
                    "telling the viewers failed", extra={"fields": {"event": "live_failed"}}
                )
            await asyncio.sleep(self._timing.live_s)

    async def _keep_once(self) -> None:
        roster = await self._coordinator.watch.look() if self._viewers else None
        now, pages = time.monotonic(), self._coordinator.knowledge.sight.snapshot.pages
        if pages and now >= self._memory_at:
            self._memory_at = now + MEMORY_EVERY_S
            self.history.add_memory(pages)
        if roster is not None:
            self._tell(roster)

    def stop(self) -> None:
        """End every stream: the sidecar ends, and viewers shall look for the next one."""
        self._is_stopping = True
        for viewer in self._viewers:
            viewer.end()
        self._viewers.clear()

    # --- viewers ---

    async def watch(
        self, last_event_id: str, for_s: float, may_stay: Callable[[], bool]
    ) -> StreamingResponse:
        """The stream for one viewer more, who has seen everything up to an event, and who may stay for as long as
        `may_stay` says so. Raises Problem."""
        roster = await self._coordinator.watch.look()
        if self._is_stopping:
            raise Problem("sidecar_stopping", "the sidecar was told to stop")
        if len(self._viewers) >= MAXIMUM_VIEWERS:
            raise Problem("too_many_viewers", f"{MAXIMUM_VIEWERS} viewers look already")
        # Those who are there hear of everything first: the new one begins where they are.
        self._tell(roster)
        greeting = self._greeting(roster, self._seen(last_event_id))
        viewer = _Viewer(may_stay)
        self._viewers.add(viewer)
        return _Stream(viewer.stream(greeting, for_s), self._viewers, viewer)

    def _tell(self, roster: Roster) -> None:
        """One update, to all of them."""
        if not self._viewers:
            self._note_told()
            return
        update = "".join(self._update(roster)).encode()
        for viewer in list(self._viewers):
            if viewer.lag_s > LAG_S or not viewer.may_stay():
                self._viewers.discard(viewer)
                viewer.end()
            else:
                viewer.tell(update)

    def _seen(self, last_event_id: str) -> int | None:
        """The sequence up to which a viewer has seen everything; None: nothing of this sidecar."""
        found = EVENT_ID.fullmatch(last_event_id)
        if found is None or found[1] != self.history.instance:
            return None
        sequence = int(found[2])
        return sequence if sequence <= self.history.sequence else None

    # --- events ---

    def _greeting(self, roster: Roster, seen: int | None) -> Iterator[str]:
        """Everything that is kept, as far as it has not been seen. What it tells is taken at once."""
        history, after = self.history, seen or 0
        pauses, memory = history.pauses(after), history.memory(after)
        parts = [
            _event("history", {"instance": history.instance, "is_new": seen is None, "span_s": SPAN_S}),
            _event("places", self._places()),
            *(_event("pauses", part) for part in _parts(pauses, PAUSES_AT_ONCE)),
            *(_event("memory", part) for part in _parts(memory, MEMORY_AT_ONCE)),
            _event("operations", [*map(operation_line, self._coordinator.ledger.all())]),
            _event("windows", [*map(_window_line, reversed(self._windows.all()))]),
            self._state_event(self._state(roster)),
        ]  # fmt: skip
        return iter(parts)

    def _update(self, roster: Roster) -> Iterator[str]:
        """What is new since the last one. The id stands in its end: only one that came whole has been seen."""
        # First of all: where this cannot be told, nothing counts as told.
        state = self._state(roster)
        history, after = self.history, self._told
        if len(history.places) > self._told_places:
            yield _event("places", self._places())
        for name, news in (("pauses", history.pauses(after)), ("memory", history.memory(after))):
            if news:
                yield _event(name, _joined(news))
        operations, windows = self._note_told()
        if operations:
            yield _event("operations", [*map(operation_line, operations)])
        if windows:
            yield _event("windows", [*map(_window_line, windows)])
        yield self._state_event(state)

    def _note_told(self) -> tuple[list[Operation], list[Window]]:
        """What has changed since the last time, which counts as told from now on."""
        self._told, self._told_places = self.history.sequence, len(self.history.places)
        before, operations = self._told_operations, self._coordinator.ledger.all()
        self._told_operations = {each.id: each for each in operations}
        told, windows = self._told_windows, self._windows.all()
        self._told_windows = {each.id: each.state for each in windows}
        return (
            [each for each in operations if before.get(each.id) is not each],
            [each for each in reversed(windows) if told.get(each.id) != each.state],
        )

    def _places(self) -> list[list[str | int]]:
        return [list(key) for key in self.history.places]

    def _state(self, roster: Roster) -> str:
        obstacles = readiness.obstacles(self._coordinator, roster)
        safety = judge(self._coordinator, roster, obstacles, self._last_minute)
        expected = self._coordinator.knowledge.expected_pause()
        state = {
            **status_view(self._coordinator, roster, obstacles, safety),
            "ready": not any(each.blocking for each in obstacles),
            "time": round(time.time(), 3),
            "version": __version__,
            "may_act": self._may_act,
            "expected_pause_s": round(expected.pause_s, 6) if expected else None,
            "without_page": [
                f"{row.key.role}-{row.key.dp_rank}-{row.key.rank}"
                for row in roster.rows
                if row.page is None
            ],
        }
        return to_line(state)

    def _state_event(self, state: str) -> str:
        return _event("state", state, f"{self.history.instance}-{self._told}")


class _Viewer:
    """One who looks, and the updates that it has not taken yet."""

    def __init__(self, may_stay: Callable[[], bool]) -> None:
        self.may_stay = may_stay
        self._updates: deque[tuple[float, bytes]] = deque()
        self._has_news = asyncio.Event()
        self._has_ended = False

    @property
    def lag_s(self) -> float:
        """For how long the oldest of them has waited."""
        return time.monotonic() - self._updates[0][0] if self._updates else 0.0

    def tell(self, update: bytes) -> None:
        """One update more."""
        self._updates.append((time.monotonic(), update))
        self._has_news.set()

    def end(self) -> None:
        """Nothing comes any more."""
        self._updates.clear()
        self._has_ended = True
        self._has_news.set()

    async def stream(self, greeting: Iterator[str], for_s: float) -> AsyncIterator[bytes]:
        """What is sent, for so long at most."""
        ends_at = time.monotonic() + for_s
        for event in greeting:
            yield event.encode()
        while (remaining_s := ends_at - time.monotonic()) > 0 and not self._has_ended:
            if not self._updates:
                self._has_news.clear()
                try:
                    await asyncio.wait_for(self._has_news.wait(), remaining_s)
                except asyncio.TimeoutError:
                    return
            else:
                yield self._updates.popleft()[1]


class _Stream(StreamingResponse):
    """A viewer is one until its stream has ended, however that came."""

    def __init__(
        self, content: AsyncIterator[bytes], viewers: set[_Viewer], viewer: _Viewer
    ) -> None:
        super().__init__(content, media_type=EVENT_STREAM)
        self._viewers, self._viewer = viewers, viewer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._viewers.discard(self._viewer)


def _window_line(window: Window) -> dict[str, Any]:
    """A window among others, with what speaks against it."""
    reasons = window.verdict.reasons if window.verdict else ()
    return {**window_line(window), "reasons": [str(reason) for reason in reasons]}


def _parts(entries: Sequence[str], size: int) -> Iterator[str]:
    for start in range(0, len(entries), size):
        yield _joined(entries[start : start + size])


def _joined(entries: Sequence[str]) -> str:
    return f"[{','.join(entries)}]"


def _event(name: str, value: Any, event_id: str | None = None) -> str:
    data = value if isinstance(value, str) else to_line(value)
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}event: {name}\ndata: {data}\n\n"
