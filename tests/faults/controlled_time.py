"""Time that can be let pass at will, in this process and in those that are forked for a test.

Leases and ticks run on it. Heartbeats, pauses and the sidecar's own deadlines stay on the real clock: a jump of
the time in which nobody did anything would look like a process that stands still.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

AGENT_MODULES = tuple(
    f"gc_sidecar_agent.{name}" for name in ("agent", "board", "collection", "follower", "policy")
)
SIDECAR_MODULES = ("gc_sidecar.server.desired", "gc_sidecar_agent.board")
# It measures deadlines of requests by one clock, which are real, and dates what stands on the board by the other.
SIDECAR_MODULES_THAT_DATE = ("gc_sidecar.server.changes",)


class ControlledTime:
    """How far time is ahead of the real one: one word in a file that several processes map."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(mmap.PAGESIZE)
            self._ahead_s = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("d")

    def pass_s(self, seconds: float) -> None:
        """Let so many seconds pass, everywhere at once."""
        self._ahead_s[0] += seconds

    def monotonic(self) -> float:
        """Stands in for time.monotonic."""
        return time.monotonic() + self._ahead_s[0]

    def time(self) -> float:
        """Stands in for time.time."""
        return time.time() + self._ahead_s[0]

    @contextlib.contextmanager
    def in_force(self, modules: tuple[str, ...], that_date: tuple[str, ...] = ()) -> Iterator[None]:
        """While this lasts, `modules` know no other time, and those `that_date` no other date."""
        dates = {**vars(time), "time": self.time}
        stand_ins = [
            *(
                (name, SimpleNamespace(**{**dates, "monotonic": self.monotonic}))
                for name in modules
            ),
            *((name, SimpleNamespace(**dates)) for name in that_date),
        ]
        for name, stand_in in stand_ins:
            importlib.import_module(name).time = stand_in  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for name, _ in stand_ins:
                importlib.import_module(name).time = time  # type: ignore[attr-defined]
