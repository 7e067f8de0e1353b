"""A live view of an embedded engine's steps, and of the pauses that hold them up, for `gc-sidecar demo`.

Steps come from the engine's own `/steps`, pauses from the sidecar's `GET /gc`. On a terminal the last line is
redrawn; elsewhere there is a plain line now and then. Where lines are short, whole figures are left out.
"""

from __future__ import annotations

import http.client
import json
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TextIO
from urllib.parse import urlsplit

from gc_sidecar_agent.client import Client

POLL_S = 0.2
PLAIN_LINE_S = 2.0
BARS = " ▁▂▃▄▅▆▇█"
PLAIN_BARS = " .:-=+*#@"
BARS_SHOWN = 30
# Figures make room for so many bars: they show the pauses of the last seconds.
BARS_AT_LEAST = 12
INDENT = "    "
NARROWEST = 40
# A bar is as high as a step is long, from one millisecond to one second, by its order of magnitude.
SHORTEST_MS, HIGHEST_MS = 1.0, 1000.0


@dataclass(frozen=True)
class Step:
    """One step of an engine core."""

    number: int
    duration_s: float
    retained_objects: int


@dataclass(frozen=True)
class Rung:
    """One full collection in a worker: how long it took, the step that it held up, and the heap's size."""

    pause_s: float
    step: Step


@dataclass(frozen=True)
class Seen:
    """What was seen while somebody watched."""

    seconds: float
    steps: int
    median_step_s: float
    longest: Step
    rungs: tuple[Rung, ...]


@dataclass(frozen=True)
class Figure:
    """A part of a line. Those of a low rank are left out first where a line is too long."""

    rank: int
    text: str


def terminal_width() -> int:
    """How long a line may be: as COLUMNS says, else the terminal, else 80; never less than is readable."""
    return max(NARROWEST, shutil.get_terminal_size().columns) - 1


def fit(figures: Sequence[Figure], width: int) -> str:
    """The figures that fit into `width`, in their order, each of them whole."""
    kept = list(figures)
    while len(kept) > 1 and sum(len(figure.text) for figure in kept) > width:
        kept.remove(min(kept, key=lambda figure: figure.rank))
    return "".join(figure.text for figure in kept)


class LiveView:
    """Watches the first engine core and its worker of rank 0: what holds up one holds up all."""

    def __init__(self, client: Client, engine_url: str, out: TextIO | None = None) -> None:
        self._client = client
        self._address = urlsplit(engine_url)
        self._out = out or sys.stdout
        self._number = 0
        self._collections: tuple[int, float] | None = None
        self._bars: deque[float] = deque(maxlen=BARS_SHOWN)

    def newest(self) -> Step:
        """The newest step. Raises RuntimeError where none was made since the last look."""
        steps = self._read_steps()
        if not steps:
            raise RuntimeError("the engine makes no steps")
        return steps[-1]

    def watch(self, enough: Callable[[list[Step], list[Rung]], bool], deadline_s: float) -> Seen:
        """Show steps and pauses until there is `enough` of them, or until the deadline."""
        started = shown = time.monotonic()
        self.newest()
        self._collections = self._read_collections()
        self._bars.clear()
        steps: list[Step] = []
        rungs: list[Rung] = []
        since_rung = 0
        while time.monotonic() - started < deadline_s and not enough(steps, rungs):
            time.sleep(POLL_S)
            news = self._read_steps()
            pause_s = self._next_pause()
            if pause_s is not None:
                # Its step may not have been over when we looked.
                news += self._read_steps()
            if not news:
                continue
            steps += news
            self._bars.append(_longest(news).duration_s * 1000)
            # What is told of a collection is up to a poll late: its step lies somewhere before. A step that
            # is shorter than the pause is none that it held up: the collection came before we watched.
            if pause_s is not None and _longest(steps[since_rung:]).duration_s >= pause_s:
                rungs.append(Rung(pause_s, _longest(steps[since_rung:])))
                since_rung = len(steps)
                self._print(rung_line(rungs, terminal_width()))
            now = time.monotonic()
            line = self._line(now - started, steps, len(news))
            if self._out.isatty():
                self._out.write(f"\r\x1b[K{line}")
                self._out.flush()
            elif now - shown >= PLAIN_LINE_S:
                shown = now
                self._print(line)
        if self._out.isatty():
            self._print("")
        durations = sorted(step.duration_s for step in steps) or [0.0]
        return Seen(
            time.monotonic() - started,
            len(steps),
            durations[len(durations) // 2],
            _longest(steps),
            tuple(rungs),
        )

    # --- what is read ---

    def _read_steps(self) -> list[Step]:
        connection = http.client.HTTPConnection(
            self._address.hostname or "", self._address.port, timeout=60
        )
        with closing(connection):
            connection.request("GET", f"/steps?since={self._number}")
            engines = json.loads(connection.getresponse().read())["engines"]
        steps = [Step(number, ns / 1e9, retained) for number, _, ns, retained in engines[0]]
        if steps:
            self._number = steps[-1].number
        return steps

    def _read_collections(self) -> tuple[int, float]:
        """How many full collections the worker has had, and how long they took together."""
        for row in self._client.get_status().body.get("processes") or []:
            if (row.get("role"), row.get("dp_rank"), row.get("rank")) == ("worker", 0, 0):
                full: dict[str, Any] = row["pauses"]["gen2"]
                return full["count"], full["total_s"]
        raise RuntimeError("the sidecar does not see the worker of rank 0")

    def _next_pause(self) -> float | None:
        """How long the full collection took that came since the last look, where there was one."""
        before = self._collections or (0, 0.0)
        now = self._read_collections()
        if now[0] <= before[0]:
            return None
        self._collections = now
        return (now[1] - before[1]) / (now[0] - before[0])

    # --- what is shown ---

    def _line(self, seconds: float, steps: list[Step], news: int) -> str:
        bars = PLAIN_BARS
        if (self._out.encoding or "").lower().startswith("utf"):
            bars = BARS
        drawn = "".join(_bar(duration_ms, bars) for duration_ms in self._bars)
        # A terminal puts ^C behind it.
        return live_line(seconds, steps, drawn, terminal_width() - len("^C"))

    def _print(self, line: str) -> None:
        clear = "\r\x1b[K" if self._out.isatty() else ""
        self._out.write(f"{clear}{line}\n")
        self._out.flush()


def _longest(steps: list[Step]) -> Step:
    return max(steps, key=lambda step: step.duration_s, default=Step(0, 0.0, 0))


def live_line(seconds: float, steps: list[Step], bars: str, width: int) -> str:
    """The line that is redrawn: figures, then the newest of the bars, as many as there is room for."""
    last, longest = steps[-1], _longest(steps)
    figures = (
        Figure(3, f"{seconds:4.0f} s  "),
        Figure(1, f"{len(steps):6,} steps  "),
        Figure(4, f"now {last.duration_s * 1000:4.0f} ms  "),
        Figure(2, f"longest {longest.duration_s * 1000:4.0f} ms  "),
        Figure(5, f"{last.retained_objects:9,} objects  "),
    )
    begin = INDENT + fit(figures, width - len(INDENT) - BARS_AT_LEAST)
    return begin + bars[-max(1, width - len(begin)) :]


def rung_line(rungs: list[Rung], width: int) -> str:
    """The line of the newest full collection."""
    rung = rungs[-1]
    objects = rung.step.retained_objects
    ratio = ""
    if len(rungs) > 1:
        ratio = f"x{objects / rungs[-2].step.retained_objects:.2f}"
    figures = (
        Figure(5, f"full collection {len(rungs)}:"),
        Figure(3, f" {objects:9,} objects"),
        Figure(2, f" {ratio:>5}"),
        Figure(4, f"  paused {rung.pause_s * 1000:4.0f} ms"),
        Figure(1, f"  step {rung.step.duration_s * 1000:4.0f} ms"),
    )
    return INDENT + fit(figures, width - len(INDENT))


def _bar(duration_ms: float, bars: str) -> str:
    height = 0
    bound = SHORTEST_MS
    factor = (HIGHEST_MS / SHORTEST_MS) ** (1 / (len(bars) - 2))
    while duration_ms > bound and height < len(bars) - 1:
        bound *= factor
        height += 1
    return bars[height]
