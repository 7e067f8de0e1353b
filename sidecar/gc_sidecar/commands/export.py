"""`gc-sidecar export`: pauses, operations and windows as a trace, to lay over a profiler's of the same time.

The format is the trace-event format that Perfetto and chrome://tracing open and that PyTorch's profiler writes.
Which clock it is in, and how two traces come together: docs/export.md.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

from gc_sidecar import __version__
from gc_sidecar_agent.cli import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from gc_sidecar_agent.client import Client, ClientError
from gc_sidecar_agent.commands.options import (
    ASKING_CODES,
    UsageError,
    add_client_arguments,
    add_option,
    describe,
    make_client,
    warn,
)
from gc_sidecar_agent.commands.output import print_error, role, rows_of, word
from gc_sidecar_agent.commands.pauses import (
    MOST,
    add_filter_arguments,
    ask_pauses,
    filters,
    microseconds_of,
    pauses_of,
)
from gc_sidecar_agent.commands.window import verdict_word

DESCRIPTION = """\
Write what the sidecar remembers as a trace that Perfetto and chrome://tracing open: for each process a
track of its GC pauses, and tracks of operations and of measured windows with their verdicts. Times are
those of the wall clock, as in a trace of PyTorch's profiler, over which it can be laid.
"""

EXAMPLES = """\
  gc-sidecar export --out gc.json.gz --since 10m                         # everything
  gc-sidecar export --out gc.json.gz --since 1h --min-duration 1ms       # without the many short ones
  gc-sidecar export --full --since 2026-12-01T09:00:00Z > gc.json
  gc-sidecar export --out gc.json --base-time rank0.pt.trace.json.gz     # counts from where that one does
"""

FORMATS = ("perfetto",)
# Names of what is no thread of a process: Linux gives no pid or tid that is as high (its limit is 1 << 22).
OWN_IDS = 1 << 23
MICRO = 1000
GENERATIONS = (2, 1, 0)
# What names the place of a process in the engine, for as long as it lives and after it.
PLACE = ("role", "dp_rank", "rank")
# In the header of a trace of PyTorch's profiler: what its times count from, in nanoseconds since 1970.
BASE_TIME = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d+)')
CHUNK = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `export`."""
    describe(parser, DESCRIPTION, EXAMPLES, ASKING_CODES)
    add_option(
        parser, "--format", metavar="FORMAT", environment=False,
        help=f"what to write: {', '.join(FORMATS)} (the default)",
    )  # fmt: skip
    add_filter_arguments(parser)
    add_option(
        parser, "--out", Path, metavar="FILE", environment=False,
        help="where to write it (default: standard output); a name that ends in .gz is compressed",
    )  # fmt: skip
    add_option(
        parser, "--base-time", _base_time, metavar="TIME", environment=False,
        help="what times count from: nanoseconds since 1970 (default 0), or a trace of PyTorch's profiler"
        " that says so itself",
    )  # fmt: skip
    add_client_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Ask for everything, write it, return the exit code."""
    if args.format not in (None, *FORMATS):
        warn(f"export: --format is {' or '.join(FORMATS)}, not {args.format!r}")
        return EXIT_USAGE
    try:
        memories = remember(make_client(args), filters(args))
    except UsageError as error:
        warn(f"export: {error}")
        return EXIT_USAGE
    except ClientError as error:
        return print_error("export", error, args.json)
    trace = make_trace(memories, args.base_time or 0)
    try:
        with _output(args.out) as file:
            trace.write(file)
    except BrokenPipeError:
        raise
    except OSError as error:
        warn(f"export: {args.out or 'standard output'}: {error.strerror}")
        return EXIT_FAILED
    for note in memories.notes:
        warn(f"export: {note}")
    if args.out is not None:
        since = memories.complete_since
        warn(
            f"export: {args.out} has {len(memories.pauses):,} pauses, {len(memories.operations):,}"
            f" operations, {len(memories.windows):,} windows"
            + (f"; complete from {word(since)} on" if since else "")
        )
    return EXIT_OK


# --- what the sidecar remembers ---


@dataclass
class Memories:
    """What was asked of the sidecar: pauses oldest first, operations, windows with their verdicts."""

    pauses: list[dict[str, Any]] = field(default_factory=list)
    operations: list[dict[str, Any]] = field(default_factory=list)
    windows: list[dict[str, Any]] = field(default_factory=list)
    complete_since: str | None = None
    lost: int = 0
    notes: list[str] = field(default_factory=list)


def remember(client: Client, wanted: dict[str, Any]) -> Memories:
    """Everything that `wanted` does not leave out. Raises ClientError."""
    memories = Memories()
    _remember_pauses(client, wanted, memories)
    since_us = microseconds_of(wanted.get("since"))
    memories.windows = [
        window for window in _windows(client) if not _ended_before(window, "opened_at", since_us)
    ]
    memories.operations = [
        operation
        for operation in _objects(client, "operations")
        if not _ended_before(operation, "requested_at", since_us)
    ]
    return memories


def _remember_pauses(client: Client, wanted: dict[str, Any], memories: Memories) -> None:
    document = ask_pauses(client, {**wanted, "limit": MOST})
    parts = [_Part(wanted, document)]
    if parts[0].left_out:
        # It tells only so many at once, but so many of each generation in each place.
        parts = list(_by_place(client, _by_generation(client, parts[0])))
    memories.pauses = sorted((pause for part in parts for pause in part.pauses), key=_begun_us)
    memories.lost = document.get("lost") or 0
    memories.complete_since = max(
        (part.complete_since for part in parts if part.complete_since is not None),
        key=lambda text: microseconds_of(text) or 0,
        default=None,
    )
    left_out = sum(part.left_out for part in parts)
    if left_out:
        memories.notes.append(
            f"{left_out:,} older pauses are left out, for the sidecar tells {MOST:,} at once; complete"
            f" from {word(memories.complete_since)} on (--min-duration and --full ask for fewer)"
        )
    if memories.lost:
        memories.notes.append(f"of {memories.lost:,} pauses no record came")


class _Part:
    """What was told to one question for pauses. Of a `role`, those of a process that has it first: who has two
    would be told twice."""

    def __init__(self, wanted: dict[str, Any], document: dict[str, Any]) -> None:
        told = pauses_of(document)
        matching = document.get("matching")
        self.wanted = wanted
        self.matching = matching if isinstance(matching, int) else len(told)
        self.left_out = max(0, self.matching - len(told))
        self.pauses = [pause for pause in told if wanted.get("role") in (None, pause.get("role"))]
        # What began before the oldest that is told may be left out.
        self.complete_since = (
            told[0].get("started_at") if self.left_out and told else document.get("complete_since")
        )


def _by_generation(client: Client, part: _Part) -> list[_Part]:
    if part.wanted.get("gc_generation") is not None:
        return [part]
    return [
        _ask(client, {**part.wanted, "gc_generation": generation}) for generation in GENERATIONS
    ]


def _by_place(client: Client, parts: Iterable[_Part]) -> Iterator[_Part]:
    rows: list[dict[str, Any]] | None = None
    for part in parts:
        if not part.left_out:
            yield part
            continue
        rows = rows_of(client.get_status().body) if rows is None else rows
        places = {_place(each) for each in (*rows, *part.pauses)}
        of_places = [
            _ask(client, {**part.wanted, **dict(zip(PLACE, place, strict=True))})
            for place in sorted(places, key=str)
        ]
        # Those of a process that is gone, and whose place nobody has taken, may be found nowhere: then the newest.
        is_all = sum(len(each.pauses) + each.left_out for each in of_places) >= part.matching
        yield from of_places if is_all else [part]


def _ask(client: Client, wanted: dict[str, Any]) -> _Part:
    return _Part(wanted, ask_pauses(client, {**wanted, "limit": MOST}))


def _place(process: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(process.get(name) for name in PLACE)


def _windows(client: Client) -> Iterator[dict[str, Any]]:
    for line in _objects(client, "windows"):
        try:
            yield client.get_window(str(line.get("id"))).body["window"]
        except ClientError as error:
            if error.status != 404:
                raise
            # It was forgotten meanwhile.
            yield line


def _objects(client: Client, kind: str) -> list[dict[str, Any]]:
    """The list of this kind, oldest first; what is no object is left out."""
    listed = client.request("GET", f"/gc/{kind}").body.get(kind)
    return [each for each in reversed(listed or ()) if isinstance(each, dict)]


def _verdict(window: dict[str, Any]) -> dict[str, Any]:
    verdict = window.get("verdict")
    return verdict if isinstance(verdict, dict) else {}


def _ended_before(document: dict[str, Any], name: str, since_us: int | None) -> bool:
    begun_us = microseconds_of(document.get(name))
    if since_us is None or begun_us is None:
        return False
    # One that goes on has not ended.
    length_s = document.get("duration_s")
    return length_s is not None and begun_us + 1e6 * length_s < since_us


# --- the trace ---


@dataclass(frozen=True)
class Slice:
    """A stretch of time on a track, in nanoseconds since 1970."""

    name: str
    category: str
    begun_ns: int
    length_ns: int
    args: dict[str, Any]


@dataclass
class Track:
    """Slices of one kind in one process. Those that overlap come into lanes, for none may on one thread."""

    pid: int
    tid: int
    name: str
    slices: list[Slice] = field(default_factory=list)

    def lanes(self) -> list[list[Slice]]:
        """As few as there can be."""
        lanes: list[list[Slice]] = []
        for each in sorted(self.slices, key=lambda each: (each.begun_ns, each.length_ns)):
            for lane in lanes:
                if lane[-1].begun_ns + lane[-1].length_ns <= each.begun_ns:
                    lane.append(each)
                    break
            else:
                lanes.append([each])
        return lanes


@dataclass
class Trace:
    """Tracks by process, and what is told of the whole."""

    processes: dict[int, str]
    tracks: list[Track]
    base_ns: int
    about: dict[str, Any]

    def events(self) -> Iterator[dict[str, Any]]:
        """Names first, then slices; times in nanoseconds."""
        for order, (pid, name) in enumerate(self.processes.items()):
            yield _metadata("process_name", pid, 0, name=name)
            yield _metadata("process_sort_index", pid, 0, sort_index=order)
        for track in self.tracks:
            for number, lane in enumerate(track.lanes()):
                tid = track.tid + number
                yield _metadata("thread_name", track.pid, tid, name=track.name)
                yield _metadata("thread_sort_index", track.pid, tid, sort_index=tid)
                for each in lane:
                    yield {
                        "ph": "X",
                        "name": each.name,
                        "cat": each.category,
                        "pid": track.pid,
                        "tid": tid,
                        "ts": each.begun_ns - self.base_ns,
                        "dur": each.length_ns,
                        "args": each.args,
                    }

    def write(self, file: IO[str]) -> None:
        """As JSON, one event a line."""
        file.write('{"displayTimeUnit": "ms", ')
        file.write(f'"baseTimeNanoseconds": {self.base_ns}, ')
        file.write(f'"otherData": {json.dumps(self.about)},\n"traceEvents": [\n')
        for number, event in enumerate(self.events()):
            file.write((",\n" if number else "") + _event_text(event))
        file.write("\n]}\n")


def make_trace(memories: Memories, base_ns: int = 0) -> Trace:
    """The trace of what is remembered, whose times count from `base_ns`."""
    processes: dict[int, str] = {}
    tracks: dict[Any, Track] = {}
    pids = _pids(memories.pauses)
    for pause in memories.pauses:
        pid = pids[_process_key(pause)]
        processes[pid] = _process_name(pause)
        track = tracks.setdefault(pid, Track(pid, OWN_IDS, "GC pauses"))
        name = f"GC gen{word(pause.get('gc_generation'))} {word(pause.get('trigger'))}"
        track.slices.append(_slice(name, "gc", pause, "started_at", pause))
    own = OWN_IDS - 1
    operations = Track(own, OWN_IDS, "operations")
    for operation in memories.operations:
        name = f"{word(operation.get('kind'))} {word(operation.get('state'))}"
        operations.slices.append(
            _slice(name, "operation", operation, "requested_at", _of_operation(operation))
        )
    # Far enough apart for the lanes of both.
    windows = Track(own, OWN_IDS + 1000, "windows")
    for window in memories.windows:
        name = f"{word(window.get('name') or window.get('id'))}: {verdict_word(window)}"
        windows.slices.append(_slice(name, "window", window, "opened_at", _of_window(window)))
    about = {
        "gc_sidecar": __version__,
        "complete_since": memories.complete_since,
        "lost": memories.lost,
    }
    kept = [track for track in (*tracks.values(), operations, windows) if track.slices]
    ordered = dict(sorted(processes.items(), key=lambda item: item[1]))
    return Trace({own: "gc-sidecar", **ordered}, kept, base_ns, about)


def _slice(
    name: str, category: str, document: dict[str, Any], begun: str, args: dict[str, Any]
) -> Slice:
    begun_ns = _microseconds(document, begun) * MICRO
    length_s = document.get("duration_s")
    # Of what goes on no length is told yet: it reaches until now.
    length_ns = time.time_ns() - begun_ns if length_s is None else round(length_s * 1e9)
    return Slice(name, category, begun_ns, max(0, length_ns), args)


def _of_operation(operation: dict[str, Any]) -> dict[str, Any]:
    names = ("id", "state", "owner", "generation", "transport", "done", "asked", "code", "detail")
    return _some(operation, names)


def _of_window(window: dict[str, Any]) -> dict[str, Any]:
    verdict = _verdict(window)
    reasons = verdict.get("reasons") or ()
    return {
        **_some(window, ("id", "name", "state", "limits")),
        "clean": verdict.get("clean", window.get("clean")),
        "reasons": [f"{word(each.get('code'))}: {word(each.get('detail'))}" for each in reasons],
        "stalls": verdict.get("stalls") or [],
    }


def _some(document: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: document.get(name) for name in names}


def _process_key(process: dict[str, Any]) -> tuple[Any, ...]:
    return process.get("dp_rank"), process.get("rank"), process.get("pid"), process.get("role")


def _process_name(process: dict[str, Any]) -> str:
    return f"{role(process)} dp{word(process.get('dp_rank'))} rank{word(process.get('rank'))}"


def _pids(pauses: list[dict[str, Any]]) -> dict[tuple[Any, ...], int]:
    """A pid for each process: its own, so that it is one process with that of a profiler's trace; one of ours
    where two processes on different machines have the same, or where it is not known."""
    pids: dict[tuple[Any, ...], int] = {}
    for key in dict.fromkeys(map(_process_key, pauses)):
        pid = key[2]
        is_free = isinstance(pid, int) and 0 < pid < OWN_IDS - 1 and pid not in pids.values()
        pids[key] = pid if is_free else OWN_IDS + len(pids)
    return pids


def _begun_us(pause: dict[str, Any]) -> int:
    return _microseconds(pause, "started_at")


def _microseconds(document: dict[str, Any], name: str) -> int:
    return microseconds_of(document.get(name)) or 0


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _event_text(event: dict[str, Any]) -> str:
    """An event as JSON. Its times are in microseconds with three decimals, which no float of today's date has."""
    times = {name: event[name] for name in ("ts", "dur") if name in event}
    text = json.dumps({name: value for name, value in event.items() if name not in times})
    exact = "".join(f', "{name}": {Decimal(ns) / MICRO:.3f}' for name, ns in times.items())
    return f"{text[:-1]}{exact}}}"


# --- files ---


@contextlib.contextmanager
def _output(path: Path | None) -> Iterator[IO[str]]:
    if path is None:
        yield sys.stdout
        sys.stdout.flush()
        return
    open_file: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "wt", encoding="utf-8") as file:
        yield file


def _base_time(text: str) -> int:
    """What times count from: a number, or what the profiler's trace in that file says."""
    if text.isascii() and text.isdigit():
        return int(text)
    open_file: Callable[..., Any] = gzip.open if text.endswith(".gz") else open
    try:
        with open_file(text, "rb") as file:
            found = _search(file)
    except (OSError, EOFError, zlib.error) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read: {error}") from None
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} does not say what its times count from (baseTimeNanoseconds)"
        )
    return found


def _search(file: IO[bytes]) -> int | None:
    """The first base time in a file, which may have gigabytes: it stands before or behind all events."""
    rest = b""
    while chunk := file.read(CHUNK):
        text = rest + chunk
        match = BASE_TIME.search(text)
        # One that reaches the end may go on in the next.
        if match and match.end() < len(text):
            return int(match[1])
        rest = text[-100:]
    match = BASE_TIME.search(rest)
    return int(match[1]) if match else None
