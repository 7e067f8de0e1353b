"""`gc-sidecar top`: policy, processes, memory and pauses of an engine, live on the terminal.

`Model` is what was seen so far, `frame` makes lines of it for a screen of any size, `Screen` draws them and
reads keys while a thread of its own asks the sidecar: who quits does not wait for an answer.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import select
import shutil
import signal
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from gc_sidecar_agent.cli import EXIT_OK, EXIT_UNREACHABLE, EXIT_USAGE
from gc_sidecar_agent.client import ClientError
from gc_sidecar_agent.commands.options import (
    UsageError,
    add_client_arguments,
    add_option,
    add_switch,
    describe,
    duration,
    make_client,
    warn,
)
from gc_sidecar_agent.commands.output import (
    UNKNOWN,
    change,
    count,
    print_error,
    print_json,
    role,
    rows_of,
    seconds,
    size,
    word,
)
from gc_sidecar_agent.commands.pauses import PauseFeed, end_of, time_of, time_text
from gc_sidecar_agent.commands.status import judge

DESCRIPTION = """\
Watch an engine's GC: the policy in force, until when, and whether every process has it; for each
process its state, memory, full collections, and whether it collects right now; the latest pauses.
It reads what the processes publish about themselves and never costs the engine a step.

Keys: q quits, the arrow keys and page up and down scroll through many processes, Home shows those
first again where something happens. A connection that breaks is shown, and heals by itself.
Without a terminal it prints plain frames.
"""

EXAMPLES = """\
  gc-sidecar top
  gc-sidecar top --interval 5s --url http://localhost:19470
  gc-sidecar top --once                       # one frame, for scripts and tickets; exits like status
  gc-sidecar top --once --json | jq .coverage
"""

MINIMUM_INTERVAL_S = 1.0
HISTORY_S = 300.0
# Full collections are all shown; of young ones, of which there are hundreds a second, those that hold up a step.
SHOWN_FROM_S = 0.005
# Whoever has paused so recently is not calm.
BUSY_S = 10.0
# An answer that takes longer than this after its turn is missed: what is shown may not be so any more.
SILENT_S = 5.0
# How often we look for a key and at the size of the terminal.
GLANCE_S = 0.2
KEPT_PAUSES = 5_000
LATEST = 3
PLAIN_LATEST = 10
SETTLED = "applied"
# A bar is as high as a pause is long, from one millisecond to ten seconds, by its order of magnitude.
SHORTEST_S, LONGEST_S = 0.001, 10.0
# Memory that changes by less than this share of itself is a flat line.
LEAST_SPAN = 0.02
BARS, PLAIN_BARS = "▁▂▃▄▅▆▇█", ".:-=+*#@"
LONGEST_SPARKLINE = 100
COLUMN_SPARKLINE = (10, 40)
# By what a key sends, how far it scrolls: in lines, or in pages.
SCROLLING = {
    b"\x1b[A": (-1, 0), b"\x1bOA": (-1, 0), b"k": (-1, 0),
    b"\x1b[B": (1, 0), b"\x1bOB": (1, 0), b"j": (1, 0),
    b"\x1b[5~": (0, -1), b"\x1b[6~": (0, 1), b" ": (0, 1),
}  # fmt: skip
ANSWER_STYLES = {"yes": "bold green", "no": "bold red"}
UNREAL_SIZE = (500, None)
QUITTING = (b"q", b"Q")
RETURNING = (b"\x1b[H", b"\x1bOH", b"\x1b[1~", b"g")

Key = tuple[Any, ...]
Cell = tuple[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `top`."""
    describe(parser, DESCRIPTION, EXAMPLES)
    add_option(
        parser, "--interval", duration, metavar="DURATION", environment=False,
        help="how often to ask the sidecar (default and least 1s)",
    )  # fmt: skip
    add_switch(parser, "--once", "print one frame, and exit like `status`", environment=False)
    add_client_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Watch until somebody quits, or print one frame; return the exit code."""
    if args.json and not args.once:
        warn("top: --json belongs to --once; `gc-sidecar pauses --follow --json` goes on")
        return EXIT_USAGE
    try:
        make_client(args)
    except UsageError as error:
        warn(f"top: {error}")
        return EXIT_USAGE
    if args.json:
        return _answer(args)
    interval_s = max(args.interval or 0.0, MINIMUM_INTERVAL_S)
    model = Model(make_client(args).url, interval_s=interval_s)
    watching = Watching(args, model)
    console = _console()
    if args.once:
        watching.look()
        if model.error is not None:
            return print_error("top", model.error, False)
        _print(console, model)
        return model.exit_code
    if not console.is_terminal:
        return _print_frames(console, model, watching, interval_s)
    screen = Screen(console, model, watching, interval_s)
    with _on_signals(screen.suspend):
        return screen.run()


def _answer(args: argparse.Namespace) -> int:
    try:
        answer = make_client(args).get_status()
    except ClientError as error:
        return print_error("top", error, True)
    print_json(answer.text)
    return judge(answer)


def _console() -> Console:
    # A terminal that cannot move its cursor gets plain frames.
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")
    return _Console(file=sys.stdout, force_terminal=is_terminal, highlight=False, markup=False)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Not an exit of its own: every verb ends alike where nobody reads on."""
        raise BrokenPipeError


def _print_frames(console: Console, model: Model, watching: Watching, interval_s: float) -> int:
    while True:
        watching.look()
        _print(console, model)
        console.print()
        sys.stdout.flush()
        time.sleep(interval_s)


def _print(console: Console, model: Model) -> None:
    width = shutil.get_terminal_size().columns
    for text in frame(model, model.now_s(), width, None, bars=_bars(console)):
        console.print(text, no_wrap=True, crop=False, overflow="ignore", soft_wrap=True)


def _bars(console: Console) -> str:
    return BARS if console.encoding.lower().startswith("utf") else PLAIN_BARS


# --- what was seen ---


@dataclass(frozen=True)
class Seen:
    """One pause: in which process, when it began and ended, and what the sidecar told of it."""

    key: Key
    begun_s: float
    end_s: float
    length_s: float
    told: dict[str, Any]

    @property
    def is_full(self) -> bool:
        """Whether it was a full collection."""
        return self.told.get("gc_generation") == 2


@dataclass
class Model:
    """All that is shown. One thread may add to it while another reads: both hold the lock."""

    url: str
    status: dict[str, Any] = field(default_factory=dict)
    error: ClientError | None = None
    # When the last answer came, by the sidecar's clock; at first, when it was begun to ask.
    heard_s: float = field(default_factory=time.time)
    # How often it is asked.
    interval_s: float = MINIMUM_INTERVAL_S
    exit_code: int = EXIT_UNREACHABLE
    pauses: deque[Seen] = field(default_factory=lambda: deque(maxlen=KEPT_PAUSES))
    memory: deque[tuple[float, dict[Key, int]]] = field(default_factory=deque)
    last_full: dict[Key, Seen] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    # How far the sidecar's clock, which its times are of, is ahead of this machine's.
    clock_ahead_s: float = 0.0
    # Counts what was added: who draws sees that there is something new.
    version: int = 0

    def now_s(self) -> float:
        """Now, by the sidecar's clock."""
        return time.time() + self.clock_ahead_s

    def is_current(self, now: float) -> bool:
        """Whether what was seen is of now, as far as is known."""
        return self.error is None and now - self.heard_s <= self.interval_s + SILENT_S

    def answered(
        self, status: dict[str, Any], pauses: Sequence[dict[str, Any]], now: float
    ) -> None:
        """Take in an answer."""
        self.version += 1
        self.status, self.error, self.heard_s = status, None, now
        rows = rows_of(status)
        anonymous = {
            _key(row): row["memory"]["anonymous_bytes"]
            for row in rows
            if isinstance(row.get("memory"), dict)
            and isinstance(row["memory"].get("anonymous_bytes"), int)
        }
        self.memory.append((now, anonymous))
        while self.memory[0][0] < now - HISTORY_S:
            self.memory.popleft()
        news = [seen for seen in map(_seen, pauses) if seen is not None]
        for seen in sorted(news, key=lambda seen: seen.begun_s):
            if seen.is_full:
                self.last_full[seen.key] = seen
            self.pauses.append(seen)
        there = {_key(row) for row in rows}
        self.last_full = {key: seen for key, seen in self.last_full.items() if key in there}

    def forget(self) -> None:
        """Let go of what was seen, for something in it cannot be shown."""
        self.status = {}
        for kept in (self.pauses, self.memory, self.last_full):
            kept.clear()

    def failed(self, error: ClientError) -> None:
        """Take in that there was no answer; what was seen before stays to be shown."""
        self.version += 1
        self.error = error


def _key(process: dict[str, Any]) -> Key:
    return process.get("dp_rank"), process.get("rank"), process.get("pid")


def _seen(pause: dict[str, Any]) -> Seen | None:
    begun_s, end_s, length_s = (
        time_of(pause.get("started_at")),
        end_of(pause),
        pause.get("duration_s"),
    )
    if begun_s is None or end_s is None or not isinstance(length_s, (int, float)):
        return None
    return Seen(_key(pause), begun_s, end_s, length_s, pause)


class Watching:
    """Asks the sidecar, and adds to the model what it says."""

    def __init__(self, args: argparse.Namespace, model: Model) -> None:
        self._args = args
        self._model = model
        # The last full collection of a process may be of long ago.
        self._full = PauseFeed({"gc_generation": 2})
        self._long: PauseFeed | None = None

    def look(self) -> None:
        """Ask once."""
        try:
            self._ask()
        except UsageError as error:
            self._failed(ClientError("token_unavailable", str(error)))
        except ClientError as error:
            self._failed(error)
        except Exception as error:  # whatever it was told: this thread goes on, and says so
            with self._model.lock:
                self._model.forget()
            what = f"the sidecar's answer cannot be read ({type(error).__name__}: {error})"
            self._failed(ClientError("unreadable_answer", what))

    def _ask(self) -> None:
        # A new client each time: the file with the token may have changed.
        client = make_client(self._args)
        answer = client.get_status()
        # By the sidecar's clock, which its times are of.
        now_s = time.time() + answer.clock_ahead_s
        if self._long is None:
            since = time_text(now_s - HISTORY_S)
            self._long = PauseFeed({"min_duration_s": SHOWN_FROM_S, "since": since})
        young = (
            pause for pause in self._long.ask(client).pauses if pause.get("gc_generation") != 2
        )
        pauses = [*self._full.ask(client).pauses, *young]
        exit_code = judge(answer)
        with self._model.lock:
            self._model.clock_ahead_s = answer.clock_ahead_s
            self._model.answered(answer.body, pauses, now_s)
            self._model.exit_code = exit_code
            try:
                # Who draws it must not be the first to find that it cannot be shown.
                frame(self._model, now_s, *UNREAL_SIZE)
            except Exception:
                self._model.forget()
                raise

    def _failed(self, error: ClientError) -> None:
        with self._model.lock:
            self._model.failed(error)


# --- one frame ---


@dataclass(frozen=True)
class Row:
    """One process as it is shown."""

    process: dict[str, Any]
    last_full: Seen | None
    last_pause_s: float | None
    pauses: tuple[float | None, ...]
    memory: tuple[float | None, ...]
    now: float

    @property
    def busyness(self) -> int:
        """0 where all is in order and nothing happens; the more, the more it wants to be looked at."""
        if self.process.get("state") != SETTLED:
            return 3
        if self.process.get("collecting_for_s") or self.process.get("collect_pending"):
            return 2
        return 1 if (self.last_pause_s or -math.inf) > self.now - BUSY_S else 0


@dataclass(frozen=True)
class Column:
    """One column: its title and what stands in it. Those of a high rank are left out first."""

    title: str
    cell: Callable[[Row], Cell]
    rank: int = 0
    is_left: bool = False


def frame(
    model: Model,
    now: float,
    width: int,
    height: int | None,
    offset: int | None = None,
    bars: str = BARS,
) -> list[Text]:
    """The lines of one frame, none longer than `width` and no more than `height` (None: as many and as long as
    they are).

    `offset` is which process comes first; None: those where something happens.
    """
    head = [*_title(model, now, width, height is not None), *_policy(model, now)]
    rows = _rows(model, now)
    sparklines = _sparklines(model, now, width, bars)
    pauses = sorted(model.pauses, key=lambda seen: seen.begun_s, reverse=True)
    if height is None:
        room, latest = len(rows), PLAIN_LATEST
    else:
        # A blank line before and the titles of: processes; the sparklines; the latest pauses.
        free = height - len(head) - 2 - (1 + len(sparklines)) - 2
        room = max(1, min(len(rows), free - LATEST))
        latest = max(0, free - room)
    lines = [Text(), *_table(rows, width, room, offset, bars), Text(), *sparklines]
    if latest:
        title = Text.assemble(
            ("LATEST PAUSES", "bold"), f"  full, and young from {seconds(SHOWN_FROM_S)}"
        )
        lines += [Text(), title, *_latest(pauses[:latest], now)]
    if not model.is_current(now):
        for text in lines:
            text.stylize("dim")  # it is of before
    lines = [*head, *lines]
    if height is None:
        return lines  # to be read later or by a program: nothing is cut
    for text in lines:
        text.truncate(width, overflow="ellipsis")
    return lines[:height]


def _title(model: Model, now: float, width: int, has_keys: bool) -> Iterator[Text]:
    right = f"{_clock(now, now)} UTC" + ("  q quits" if has_keys else "")
    left = f"gc-sidecar top  {word(model.url)}"
    left = left[: max(0, width - len(right) - 2)]
    yield Text.assemble((left, "bold"), right.rjust(width - len(left)))
    if not model.is_current(now):
        why = word(model.error.detail) if model.error else "the sidecar has not answered yet"
        yield Text(
            f"NO ANSWER for {max(0.0, now - model.heard_s):.0f} s, trying again: {why}", "bold red"
        )


def _policy(model: Model, now: float) -> Iterator[Text]:
    status = model.status
    if not status:
        yield Text("policy    not known yet", "dim")
        return
    policy, coverage = _object(status.get("policy")), _object(status.get("coverage"))
    mode = policy.get("mode")
    parts = []
    if mode not in (None, "off"):
        if policy.get("pause_budget_ms") is not None:
            parts.append(f" of {seconds(policy['pause_budget_ms'] / 1000)}")
        since_s, until_s = (
            time_of(policy.get("entered_at")),
            time_of(policy.get("lease_expires_at")),
        )
        if since_s is not None:
            parts.append(f", since {_clock(since_s, now)}")
        if until_s is not None:
            left = f"{_length(until_s - now)} left" if until_s > now else "over"
            parts.append(f", until {_clock(until_s, now)} ({left})")
        # Last, for it may be long.
        parts.append(f", by {word(policy.get('owner'))}")
    elif policy.get("reason"):
        parts.append(f", ended: {word(policy['reason'])}")
    safe = _object(status.get("safe_to_measure"))
    if safe:
        style = ANSWER_STYLES.get(str(safe.get("answer")), "bold yellow")
        yield Text.assemble(
            "measure?  ", (word(safe.get("word")), style), f" {word(safe.get('why'))}"
        )
    yield Text.assemble(
        "policy    ", (word(mode), "bold green" if parts else "bold"), "".join(parts)
    )
    acknowledged, expected = coverage.get("acknowledged"), coverage.get("expected")
    is_covered = bool(expected) and acknowledged == expected
    yield Text.assemble(
        "coverage  ",
        (f"{word(acknowledged)} of {word(expected)}", "" if is_covered else "bold red"),
        f" processes, transport {word(status.get('transport'))}",
    )
    operation = status.get("operation")
    if isinstance(operation, dict):
        running = f"{word(operation.get('kind'))} {word(operation.get('state'))}"
        yield Text(f"operation {running} ({word(operation.get('id'))})", "bold yellow")
    reasons = status.get("reasons")
    for reason in reasons[:2] if isinstance(reasons, list) else ():
        told = _object(reason)
        yield Text(
            f"note      {word(told.get('detail'))} ({word(told.get('code'))})",
            "red" if told.get("blocking") else "yellow",
        )


def _rows(model: Model, now: float) -> list[Row]:
    steps = COLUMN_SPARKLINE[1]
    by_process: dict[Key, list[Seen]] = {}
    for seen in model.pauses:
        by_process.setdefault(seen.key, []).append(seen)
    samples: dict[Key, list[tuple[float, int]]] = {}
    for when_s, anonymous in model.memory:
        for key, held in anonymous.items():
            samples.setdefault(key, []).append((when_s, held))
    rows = []
    for process in rows_of(model.status):
        key = _key(process)
        pauses = by_process.get(key, [])
        rows.append(
            Row(
                process,
                model.last_full.get(key),
                max((seen.end_s for seen in pauses), default=None),
                _steps([(seen.begun_s, seen.length_s) for seen in pauses], now, steps),
                _steps(samples.get(key, []), now, steps),
                now,
            )
        )
    return rows


def _table(rows: list[Row], width: int, room: int, offset: int | None, bars: str) -> Iterator[Text]:
    if not rows:
        yield Text("PROCESSES", "bold")
        yield Text("no process of an engine is seen", "dim")
        return
    shown, note = _choose(rows, room, offset)
    columns, gap, sparkline = _fit(_columns(rows), rows, width)
    cells = {id(row): [column.cell(row) for column in columns] for row in rows}
    # Of all rows, so that nothing moves when others come to be shown.
    widths = [
        max(len(column.title), *(len(cells[id(row)][at][0]) for row in rows))
        for at, column in enumerate(columns)
    ]
    titles = [
        column.title.ljust(wide) if column.is_left else column.title.rjust(wide)
        for column, wide in zip(columns, widths, strict=True)
    ]
    if sparkline:
        ago = _length(HISTORY_S)
        titles += [f"PAUSES {ago}".ljust(sparkline), f"MEMORY {ago}"]
    yield Text(gap.join(titles), "bold")
    for row in shown:
        parts: list[Any] = []
        for column, wide, (text, style) in zip(columns, widths, cells[id(row)], strict=True):
            parts += [(text.ljust(wide) if column.is_left else text.rjust(wide), style), gap]
        if sparkline:
            parts += [_pause_bars(row.pauses[-sparkline:], bars), gap]
            parts += [_memory_bars(row.memory[-sparkline:], bars), gap]
        line = Text.assemble(*parts[:-1])
        line.rstrip()
        yield line
    if note:
        yield Text(note, "dim")


def _choose(rows: list[Row], room: int, offset: int | None) -> tuple[list[Row], str]:
    """Which rows are shown, and a line about the others."""
    if len(rows) <= room:
        return rows, ""
    shown_count = max(0, room - 1)
    if offset is not None:
        offset = max(0, min(offset, len(rows) - shown_count))
        until = offset + shown_count
        note = f"{offset + 1} to {until} of {len(rows)}; Home shows the busy ones first again"
        return rows[offset:until], note
    busiest = sorted(rows, key=lambda row: row.busyness, reverse=True)[:shown_count]
    chosen = set(map(id, busiest))
    shown = [row for row in rows if id(row) in chosen]
    others = [row for row in rows if id(row) not in chosen]
    busy = sum(1 for row in others if row.busyness)
    what = f"{busy} of them busy" if busy else "all calm"
    totals = [_object(row.process.get("memory")) for row in others]
    longest = max((_longest(row.process) or 0.0 for row in others), default=0.0)
    return shown, (
        f"{len(others)} more, {what}; arrows scroll: longest {seconds(longest)},"
        f" {size(_sum(totals, 'anonymous_bytes'))}, {change(_sum(totals, 'growth_bytes'))}"
    )


def _columns(rows: list[Row]) -> list[Column]:
    columns = [
        Column("ROLE", lambda row: (role(row.process), ""), is_left=True),
        Column("DP", lambda row: (word(row.process.get("dp_rank")), "")),
        Column("RANK", lambda row: (word(row.process.get("rank")), "")),
        Column("PID", lambda row: (word(row.process.get("pid")), ""), rank=2),
        Column("STATE", _state, is_left=True),
        Column("MODE", lambda row: (word(row.process.get("mode")), ""), rank=3, is_left=True),
        Column("NOW", _collecting),
        Column("FULL", lambda row: (count(_full(row.process).get("count")), "")),
        Column("LAST", lambda row: (seconds(row.last_full and row.last_full.length_s), "")),
        Column("AGO", _ago, rank=4),
        Column("LONGEST", lambda row: (seconds(_longest(row.process)), "")),
        Column("MEMORY", lambda row: (size(_memory(row, "anonymous_bytes")), "")),
        Column("GROWTH", lambda row: (change(_memory(row, "growth_bytes")), "")),
        Column("DEVICE", lambda row: (size(_memory(row, "device_reserved_bytes")), ""), rank=5),
    ]
    # One that nothing is known for would only take room.
    return [
        column
        for column in columns
        if column.rank == 0 or any(column.cell(row)[0] != UNKNOWN for row in rows)
    ]


def _fit(columns: list[Column], rows: list[Row], width: int) -> tuple[list[Column], str, int]:
    """The columns that fit, what stands between them, and how long a sparkline of each row may be."""

    def needed(kept: list[Column], gap: int) -> int:
        widest = (max(len(c.title), *(len(c.cell(row)[0]) for row in rows)) for c in kept)
        return sum(widest) + gap * (len(kept) - 1)

    kept = list(columns)
    while needed(kept, 2) > width and any(column.rank for column in kept):
        kept.remove(max(kept, key=lambda column: column.rank))
    gap = 2 if needed(kept, 2) <= width else 1
    least, most = COLUMN_SPARKLINE
    sparkline = min(most, (width - needed(kept, gap)) // 2 - gap)
    return kept, " " * gap, sparkline if sparkline >= least else 0


def _state(row: Row) -> Cell:
    state = word(row.process.get("state"))
    if (state, row.process.get("mode")) == (SETTLED, "off"):
        return "normal GC", ""  # what was applied is that nothing is
    styles = {SETTLED: "green", "pending": "yellow"}
    return state, styles.get(state, "bold red")


def _collecting(row: Row) -> Cell:
    # Of a process that is gone it is the last that was seen.
    running_s = row.process.get("collecting_for_s")
    if running_s and row.process.get("state") != "gone":
        return f"GC {seconds(running_s)}", "bold red"
    return (UNKNOWN, "dim")


def _ago(row: Row) -> Cell:
    return (UNKNOWN if row.last_full is None else _length(row.now - row.last_full.end_s), "")


def _full(process: dict[str, Any]) -> dict[str, Any]:
    return _object(_object(process.get("pauses")).get("gen2"))


def _longest(process: dict[str, Any]) -> float | None:
    full = _full(process)
    longest_s = full.get("max_s")
    return longest_s if full.get("count") and isinstance(longest_s, (int, float)) else None


def _memory(row: Row, name: str) -> Any:
    return _object(row.process.get("memory")).get(name)


def _sum(documents: Sequence[dict[str, Any]], name: str) -> int | None:
    known = [each[name] for each in documents if isinstance(each.get(name), int)]
    return sum(known) if known else None


def _latest(pauses: Sequence[Seen], now: float) -> Iterator[Text]:
    if not pauses:
        yield Text("none", "dim")
    for seen in pauses:
        told = seen.told
        place = f"{role(told)} {word(told.get('dp_rank'))} {word(told.get('rank'))}"
        yield Text.assemble(
            f"{_clock(seen.begun_s, now, 3)}  {place:<15}  gen{word(told.get('gc_generation'))}"
            f"  {word(told.get('trigger')):<8}  ",
            (f"{seconds(seen.length_s):>7}", "bold"),
            f"  {count(told.get('collected_objects'))} collected",
        )


# --- sparklines ---


def _sparklines(model: Model, now: float, width: int, bars: str) -> list[Text]:
    label = len("pauses    ")
    ago = f"in the last {_length(HISTORY_S)}"
    pauses = [
        (seen.begun_s, seen.length_s) for seen in model.pauses if seen.begun_s > now - HISTORY_S
    ]
    longest_s = max((length_s for _, length_s in pauses), default=None)
    paused = f"  longest {seconds(longest_s)} {ago}" if pauses else f"  none {ago}"
    sums = [(when_s, sum(held.values())) for when_s, held in model.memory if held]
    held = f"  {size(sums[-1][1])}, {change(sums[-1][1] - sums[0][1])} meanwhile" if sums else ""
    room = width - label - max(len(paused), len(held))
    steps = max(1, min(LONGEST_SPARKLINE, room))
    return [
        Text.assemble("pauses    ", _pause_bars(_steps(pauses, now, steps), bars), paused),
        Text.assemble("memory    ", _memory_bars(_steps(sums, now, steps), bars), held),
    ]


def _steps(
    values: Sequence[tuple[float, float]], now: float, steps: int
) -> tuple[float | None, ...]:
    """The greatest value in each of so many equal steps of the last minutes; None where there is none."""
    step_s = HISTORY_S / steps
    # By steps of the clock, so that what is drawn moves as a whole.
    first = math.floor(now / step_s) - steps + 1
    found: list[float | None] = [None] * steps
    for when_s, value in values:
        at = math.floor(when_s / step_s) - first
        if 0 <= at < steps:
            before = found[at]
            found[at] = value if before is None else max(before, value)
    return tuple(found)


def _pause_bars(values: Sequence[float | None], bars: str) -> str:
    span = math.log(LONGEST_S / SHORTEST_S)

    def bar(length_s: float | None) -> str:
        if length_s is None:
            return " "
        return _bar(math.log(max(length_s, SHORTEST_S) / SHORTEST_S) / span, bars)

    return "".join(map(bar, values))


def _memory_bars(values: Sequence[float | None], bars: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return " " * len(values)
    lowest, highest = min(known), max(known)
    span = max(highest - lowest, LEAST_SPAN * highest, 1.0)
    return "".join(" " if v is None else _bar((v - lowest) / span, bars) for v in values)


def _bar(share: float, bars: str) -> str:
    return bars[max(0, min(len(bars) - 1, int(share * len(bars))))]


def _clock(when_s: float, now: float, digits: int = 0) -> str:
    """A time of the day, and the day where it is not today; UTC."""
    text = time_text(when_s)[: -1 - 6 + digits].rstrip(".").replace("T", " ")
    day, _, clock = text.partition(" ")
    return clock if day == time_text(now)[:10] else text


def _length(length_s: float) -> str:
    """Roughly how long: 42 s, 5 min, 3 h, 2 d."""
    length_s = max(0.0, length_s)
    for limit_s, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if length_s < limit_s:
            return f"{length_s / unit_s:.0f} {unit}"
    return f"{length_s / 86400:.0f} d"


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# --- the terminal ---


class Screen:
    """Draws frames on a terminal until somebody quits."""

    def __init__(
        self, console: Console, model: Model, watching: Watching, interval_s: float
    ) -> None:
        self._console = console
        self._model = model
        self._watching = watching
        self._interval_s = interval_s
        self._offset: int | None = None
        self._stopping = threading.Event()
        self._is_suspended = False

    def suspend(self) -> None:
        """Give the terminal back soon, and stop until somebody wants us to go on."""
        self._is_suspended = True

    def run(self) -> int:
        """Until `q`; Ctrl-C raises KeyboardInterrupt."""
        # A daemon: it may be waiting for an answer when somebody quits.
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            while not self._draw():
                self._is_suspended = False
                # As the system would: where nobody could have us go on, it does not stop us.
                handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTSTP)
                signal.signal(signal.SIGTSTP, handler)
            return EXIT_OK
        finally:
            self._stopping.set()

    def _draw(self) -> bool:
        """Have the terminal until somebody quits (True) or suspends us."""
        with _keys() as read_keys, self._live() as live:
            drawn: tuple[Any, ...] | None = None
            while not self._is_suspended:
                # Once a second too: the clock goes on, and somebody may have fallen silent.
                second = int(time.monotonic())
                state = (self._model.version, self._console.size, self._offset, second)
                if state != drawn:
                    live.update(self._frame(), refresh=True)
                    drawn = state
                for key in read_keys(GLANCE_S):
                    if key in QUITTING:
                        return True
                    self._scroll(key)
        return False

    def _watch(self) -> None:
        while not self._stopping.is_set():
            self._watching.look()
            self._stopping.wait(self._interval_s)

    def _live(self) -> Live:
        return Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def _frame(self) -> Group:
        width, height = self._console.size
        with self._model.lock:
            lines = frame(
                self._model, self._model.now_s(), width, height, self._offset, _bars(self._console)
            )
        return Group(*lines)

    def _scroll(self, key: bytes) -> None:
        if key in RETURNING:
            self._offset = None
        elif key in SCROLLING:
            rows, pages = SCROLLING[key]
            page = max(1, self._console.size.height // 2)
            last = max(0, len(rows_of(self._model.status)) - 1)
            offset = (self._offset or 0) + rows + pages * page
            self._offset = max(0, min(last, offset))


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], list[bytes]]]:
    """A function that waits for keys so long and returns those that came, each as the terminal sends it."""
    if not sys.stdin.isatty():

        def wait(wait_s: float) -> list[bytes]:
            time.sleep(wait_s)
            return []

        yield wait
        return
    fd = sys.stdin.fileno()

    def read(wait_s: float) -> list[bytes]:
        if not select.select([fd], [], [], wait_s)[0]:
            return []
        sent = os.read(fd, 256)
        if not sent:
            time.sleep(wait_s)  # nobody sends anything any more
        return _split_keys(sent)

    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield read
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _split_keys(sent: bytes) -> list[bytes]:
    """The keys in what a terminal sent at once."""
    known = sorted((*SCROLLING, *QUITTING, *RETURNING), key=len, reverse=True)
    keys = []
    while sent:
        key = next((each for each in known if sent.startswith(each)), sent[:1])
        keys.append(key)
        sent = sent[len(key) :]
    return keys


@contextlib.contextmanager
def _on_signals(suspend: Callable[[], None]) -> Iterator[None]:
    """Whatever ends or stops us leaves the terminal as it was."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    handlers: dict[int, Any] = dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT), end)
    handlers[signal.SIGTSTP] = lambda _number, _frame: suspend()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
