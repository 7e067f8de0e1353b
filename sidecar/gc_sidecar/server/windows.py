"""Windows: measured stretches of time. This opens and closes them and gathers what `verdicts` judges.

Nothing is sent to a process; vLLM's metrics are read once at either end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict

from gc_sidecar.server.knowledge import Knowledge
from gc_sidecar.server.latency import Latencies
from gc_sidecar.server.operations import Ledger
from gc_sidecar.server.problems import Problem
from gc_sidecar.server.sight import by_token
from gc_sidecar.server.timing import Timing
from gc_sidecar.server.verdicts import Evidence, Limits, Verdict, Window, judge
from gc_sidecar.server.watch import Watch

logger = logging.getLogger("gc_sidecar.server")

OPEN_AT_ONCE = 16
REMEMBERED = 256


class Windows:
    """All windows of this sidecar; they end with it."""

    def __init__(self, knowledge: Knowledge, watch: Watch, ledger: Ledger, timing: Timing) -> None:
        self._knowledge = knowledge
        self._watch = watch
        self._log = knowledge.sight.log
        self._ledger = ledger
        self._timing = timing
        self._windows: OrderedDict[str, Window] = OrderedDict()
        self._closing: dict[str, asyncio.Task[None]] = {}
        self._opening = asyncio.Lock()

    @property
    def open_count(self) -> int:
        """How many are open."""
        return sum(window.verdict is None for window in self._windows.values())

    def all(self) -> list[Window]:
        """Every window that is remembered, newest first."""
        return list(reversed(self._windows.values()))

    def get(self, window_id: str) -> Window:
        """The window with this id. Raises Problem."""
        window = self._windows.get(window_id)
        if window is None:
            raise Problem("window_not_found", f"there is no window {window_id[:64]!r}")
        window.asked_s = time.monotonic()
        return window

    async def keep(self) -> None:
        """Close what was abandoned, for ever: its owner may have been killed, and only so many may be open."""
        while True:
            await asyncio.sleep(self._timing.window_keep_s)
            now_s = time.monotonic()
            for window in self.all():
                if window.closed_s is None and now_s - window.asked_s > window.patience_s:
                    logger.warning(
                        "a window was abandoned",
                        extra={"fields": {"event": "window_abandoned", "id": window.id}},
                    )
                    try:
                        await self.close(window.id)
                    except Exception:
                        logger.exception(
                            "closing a window failed",
                            extra={"fields": {"event": "window_close_failed", "id": window.id}},
                        )

    async def open(
        self,
        window_id: str,
        name: str | None,
        limits: Limits,
        abandon_after_s: float | None = None,
    ) -> tuple[Window, bool]:
        """Open a window; the same id again gives the same one. The second value says whether it is new.

        With `abandon_after_s` it is closed by itself when nobody has asked for it for so long. Raises Problem.
        """
        # Before the lock: a slow engine must not make everybody who opens a window wait for the others.
        latencies = {} if window_id in self._windows else await self._latencies()
        async with self._opening:
            known = self._windows.get(window_id)
            if known is not None:
                if known.closed_s is not None:
                    raise Problem("window_id_reused", f"window {window_id} is {known.state}")
                if (known.name, known.limits) != (name, limits):
                    raise Problem(
                        "window_id_reused",
                        f"window {window_id} was opened with another name or other limits",
                    )
                return known, False
            if self.open_count >= OPEN_AT_ONCE:
                raise Problem(
                    "too_many_windows",
                    f"{OPEN_AT_ONCE} windows are open: "
                    + ", ".join(each.id for each in self.all() if each.verdict is None),
                )
            window = await self._opened(window_id, name, limits, latencies)
            window.abandon_after_s = abandon_after_s
            self._windows[window_id] = window
            self._forget_oldest()
            return window, True

    async def _opened(
        self, window_id: str, name: str | None, limits: Limits, latencies: Latencies
    ) -> Window:
        roster = await self._watch.look(0.0)
        window = Window(
            id=window_id,
            name=name,
            limits=limits,
            desired=self._knowledge.desired,
            pages={
                token: page
                for token, page in by_token(self._knowledge.sight.snapshot.pages).items()
                if page.alive
            },
            holders={row.key: row.token for row in roster.rows if row.token and row.is_live},
            latencies=latencies,
            known_operations=self._ledger.ended_ids(),
        )
        self._log.listeners.append(window.add)
        return window

    def _forget_oldest(self) -> None:
        while len(self._windows) > REMEMBERED:
            oldest = next(each.id for each in self._windows.values() if each.verdict is not None)
            del self._windows[oldest]

    async def close(self, window_id: str) -> Window:
        """Close a window and judge it; once closed it stays as it is. Raises Problem."""
        window = self.get(window_id)
        if window.verdict is None:
            task = self._closing.get(window_id)
            if task is None:
                task = self._closing[window_id] = asyncio.create_task(self._close(window))
            # It is closed also where the caller leaves, or a second one asks meanwhile.
            await asyncio.shield(task)
        return window

    async def _close(self, window: Window) -> None:
        # It ends when it was first asked for, also where judging it failed and is tried again.
        window.closed_s = window.closed_s or time.monotonic()
        try:
            latencies, unread = await asyncio.gather(self._latencies(), self._read_to_the_end())
            window.settle(judge(window, await self._evidence(latencies, unread)))
            self._log.listeners.remove(window.add)
        finally:
            del self._closing[window.id]

    async def judge_now(self, window: Window) -> Verdict:
        """The verdict as it would be if the window were closed now."""
        if window.verdict is None:
            evidence = await self._evidence()
        return window.verdict or judge(window, evidence)

    async def _evidence(
        self, latencies: Latencies | None = None, unread: frozenset[str] = frozenset()
    ) -> Evidence:
        roster = await self._watch.look(0.0)
        return Evidence(
            roster,
            by_token(self._knowledge.sight.snapshot.pages),
            self._knowledge.desired,
            self._ledger.all(),
            latencies,
            unread,
        )

    async def _latencies(self) -> Latencies:
        return await self._knowledge.engines.latencies()

    async def _read_to_the_end(self) -> frozenset[str]:
        """Read pages until each has been published anew from now on, and no full collection runs that has begun;
        tokens of those that were not in time."""
        asked_s = time.monotonic()
        deadline = asked_s + self._timing.window_close_s
        await self._watch.look(0.0)
        # A publication may have begun before now: the one after it has not.
        awaited = {
            token: page.report.number("heartbeat") + 2
            for token, page in by_token(self._knowledge.sight.snapshot.pages).items()
            if page.alive
        }
        while True:
            pages = by_token(self._knowledge.sight.snapshot.pages)
            is_collecting = False
            for token, page in pages.items():
                if page.collecting_start_s is not None and page.collecting_start_s < asked_s:
                    is_collecting = True
                    # Its record comes with a publication after its end.
                    awaited[token] = page.report.number("heartbeat") + 2
            unread = frozenset(
                token
                for token, heartbeat in awaited.items()
                if token in pages
                and pages[token].alive
                and pages[token].report.number("heartbeat") < heartbeat
            )
            if not (unread or is_collecting) or time.monotonic() >= deadline:
                return unread
            await asyncio.sleep(self._timing.proof_poll_s)
            await self._watch.look(0.0)
