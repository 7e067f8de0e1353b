"""Keeps this process's page current: makes it, publishes on it, gives it up when it was damaged, makes it anew.

The page's format is in `page`; what stands on it comes from the meter's words and from the agent's description.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from gc_sidecar_agent.meter import PauseMeter, private_header
from gc_sidecar_agent.page import (
    FULL_RING_OFFSET,
    NUMBER_INDEX,
    YOUNG_RING_OFFSET,
    PageError,
    PageWriter,
    create_page,
    page_name,
    remove_dead_pages,
)

_FULL_RING_NEXT = NUMBER_INDEX["full_ring_next"]
_YOUNG_RING_NEXT = NUMBER_INDEX["young_ring_next"]
_HEARTBEAT = NUMBER_INDEX["heartbeat"]


class Publisher:
    """The page of one process. `error` says why there is none; `lost` that there was one.

    `refresh` brings the meter's words up to date, `describe` gives the JSON part, `changes` a number that
    differs whenever that part does.
    """

    def __init__(
        self,
        run_dir: str | None,
        meter: PauseMeter,
        refresh: Callable[[], None],
        describe: Callable[[], dict[str, Any]],
        changes: Callable[[], int],
    ) -> None:
        self.run_dir = run_dir
        self.error: str | None = None
        self.lost = False
        self._meter = meter
        self._refresh = refresh
        self._describe = describe
        self._changes = changes
        self._page: PageWriter | None = None
        self._published_changes = -1
        self._published_rings = (0, 0)
        # The agent's thread and one that carries out a command both publish; no callback takes this.
        self._lock = threading.Lock()

    @property
    def name(self) -> str | None:
        """The page's file name, None where there is no page."""
        page = self._page
        return page.name if page is not None else None

    def open(self, role: str, dp_rank: int, rank: int, started_s: int) -> None:
        """Make the page, in place of those that dead processes of this rank left. Never raises OSError."""
        self.lost = False
        if not self.run_dir:
            return
        remove_dead_pages(self.run_dir, role, dp_rank, rank)
        with self._lock:
            self.error = None
            self._published_changes = -1
            self._published_rings = (0, 0)
            try:
                page = create_page(
                    self.run_dir, page_name(role, dp_rank, rank, started_s), self._write_on
                )
            except (OSError, PageError) as error:
                self.error = f"no page in {self.run_dir}: {error}"
                return
            self._page = page
            self._meter.collecting = page.header

    def publish(self) -> None:
        """Bring the page up to date, or give it up where it was damaged. Never raises OSError."""
        with self._lock:
            page = self._page
            if page is None:
                return
            try:
                if page.is_intact():
                    self._write_on(page)
                else:
                    self._give_up("the page was truncated or overwritten by another process")
            except (OSError, PageError) as error:
                self._give_up(f"the page cannot be written: {error}")

    def look_after(self) -> None:
        """Give the page up where somebody removed it: nobody would find what is published on it."""
        with self._lock:
            if self._page is not None and not self._page.is_listed():
                self._give_up("the page was removed from the run directory")

    def leave_behind(self) -> None:
        """In a forked child: the page is the parent's. Nothing is written or unlinked."""
        page, self._page = self._page, None
        self._meter.collecting = private_header()
        if page is not None:
            page.close()

    def _give_up(self, why: str) -> None:
        page = self._page
        # First of all: a callback that stores into a truncated map would kill the process.
        self._meter.collecting = private_header()
        self._page = None
        self.lost = True
        self.error = why
        if page is not None:
            page.discard()

    def _write_on(self, page: PageWriter) -> None:
        self._refresh()
        words = self._meter.words
        changes = self._changes()
        if changes != self._published_changes:
            page.write_description(self._describe())
            self._published_changes = changes
        rings = (words[_FULL_RING_NEXT], words[_YOUNG_RING_NEXT])
        if rings[0] != self._published_rings[0]:
            page.write_ring(FULL_RING_OFFSET, self._meter.full_ring)
        if rings[1] != self._published_rings[1]:
            page.write_ring(YOUNG_RING_OFFSET, self._meter.young_ring)
        self._published_rings = rings
        words[_HEARTBEAT] += 1
        page.write_numbers(words)
