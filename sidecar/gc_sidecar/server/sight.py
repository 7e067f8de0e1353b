"""Seeing the engine's processes by their pages in the run directory, without touching the engine.

It remembers what only repeated looking can tell: for how long a heartbeat has stood still, and for how
long a collection has lasted. All on our own monotonic clock.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from gc_sidecar.server.obstacle import Obstacle
from gc_sidecar.server.pauses import NANO, Arrival, PauseLog, RingNews
from gc_sidecar.server.reports import Key, Report, ReportError, parse_report
from gc_sidecar_agent.page import RING_RECORDS, PageError, clock_offset_ns, list_pages, read_page

MAXIMUM_PAGES = 4096
# All processes of one machine share the monotonic clock, so a jump of the wall clock moves no pause; one whose
# clocks lie further apart than this runs elsewhere, or in a time namespace of its own.
SAME_CLOCK_NS = 1_000_000_000
# How many records of each process are taken over from the time before we first looked.
FIRST_FULL, FIRST_YOUNG = 256, 64
# New records in one reading from which on it has to be read more often.
FILLING_RECORDS = RING_RECORDS // 10


@dataclass(frozen=True)
class PageReading:
    """One page as it was just read, and for how long what it shows has been so."""

    name: str
    report: Report
    alive: bool
    unchanged_s: float
    # For how long a full collection has run, or has been seen to where its clock is not ours; and when it began by
    # its own word, on our clock.
    collecting_s: float | None
    collecting_start_s: float | None
    # Whether numbers and description were published together; in the middle of a publication they may not fit.
    is_whole: bool
    # When a young collection began that runs for longer than from one publication to the next, on our clock.
    young_start_s: float | None = None


@dataclass(frozen=True)
class UnreadablePage:
    """A file with a page's name that is none; `key` is the place that the name claims."""

    name: str
    key: Key | None
    code: str
    detail: str


@dataclass(frozen=True)
class Snapshot:
    """One reading of the whole run directory. `directory` says what is wrong with it."""

    taken_at: float = 0.0
    pages: tuple[PageReading, ...] = ()
    arrivals: tuple[Arrival, ...] = ()
    unreadable: tuple[UnreadablePage, ...] = ()
    directory: Obstacle | None = None


@dataclass(frozen=True)
class _Memory:
    """What is remembered of one page between readings."""

    heartbeat: int | None
    heartbeat_since: float
    collecting_since: int
    collecting_seen: float
    full_since: int = 0
    running_since: int = 0
    running_heartbeat: int | None = None
    # How far its records have been read, and whether its monotonic clock is known to be ours.
    told: tuple[int, int] = (0, 0)
    has_our_clock: bool = False
    # What was read last, for what has not changed since.
    description: dict[str, Any] | None = None
    report: Report | None = None


class Sight:
    """The run directory of one engine; None sees nothing, and says so by an empty snapshot."""

    def __init__(self, run_dir: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.run_dir = run_dir
        self.snapshot = Snapshot()
        self.log = PauseLog(clock)
        self._clock = clock
        self._memories: dict[str, _Memory] = {}
        self._first_look_at: float | None = None
        self._reading: asyncio.Task[Snapshot] | None = None

    async def look(self, maximum_age_s: float = 0.0) -> Snapshot:
        """The newest snapshot, read anew where it is older than `maximum_age_s`.

        Several callers share one reading; it happens in a thread, for a file system may hang.
        """
        if self.run_dir is None:
            return self.snapshot
        if maximum_age_s > 0 and self._clock() - self.snapshot.taken_at <= maximum_age_s:
            return self.snapshot
        if self._reading is not None and maximum_age_s <= 0:
            # It began before we asked, and may have missed what has happened meanwhile.
            await asyncio.wait({self._reading})
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(asyncio.to_thread(self.read))
            # Once for each reading, whoever waits for it or has left: its records come only once.
            self._reading.add_done_callback(self._absorb)
        await asyncio.shield(self._reading)
        return self.snapshot

    @property
    def is_filling(self) -> bool:
        """Whether some process collects so often that its ring would be full before long."""
        rings = (ring for each in self.snapshot.arrivals for ring in each.rings)
        return any(len(ring.records) > FILLING_RECORDS for ring in rings)

    def _absorb(self, reading: asyncio.Task[Snapshot]) -> None:
        if not reading.cancelled() and reading.exception() is None:
            # Together: whoever holds counters against records finds both as of the same reading.
            self.snapshot = reading.result()
            self.log.absorb(self.snapshot.arrivals)

    def read(self) -> Snapshot:
        """Read every page once."""
        assert self.run_dir is not None
        now = self._clock()
        try:
            names = list_pages(self.run_dir, MAXIMUM_PAGES)
        except OSError as error:
            return Snapshot(now, directory=_directory_obstacle(self.run_dir, error))
        pages: list[PageReading] = []
        arrivals: dict[str, Arrival] = {}
        unreadable: list[UnreadablePage] = []
        memories: dict[str, _Memory] = {}
        for name in names:
            try:
                reading, arrival, memories[name] = self._read_one(name, now)
                pages.append(reading)
                arrivals[name] = arrival
            except FileNotFoundError:
                continue  # removed since the directory was listed
            except (PageError, ReportError, OSError) as error:
                if name in self._memories:
                    memories[name] = self._memories[name]  # it may be readable in a moment
                code, detail = _page_fault(error)
                unreadable.append(UnreadablePage(name, _key_of(name), code, detail))
        self._memories = memories
        self._first_look_at = self._first_look_at or time.time()
        return Snapshot(
            now,
            tuple(pages),
            # Of a process with two pages, one that was given up tells nothing new.
            tuple(arrivals[page.name] for page in by_token(pages).values()),
            tuple(unreadable),
            _space_obstacle(self.run_dir),
        )

    def _read_one(self, name: str, now: float) -> tuple[PageReading, Arrival, _Memory]:
        assert self.run_dir is not None
        known = self._memories.get(name)
        after, is_new = (known.told, False) if known else self._where_to_begin(name)
        content = read_page(self.run_dir, name, after)
        if known and known.report and content.description is known.description:
            # Most of the time only numbers have changed, and those a page has been checked for.
            report = replace(
                known.report,
                numbers=content.numbers,
                collecting_since=content.collecting_since_ns,
            )
        else:
            report = parse_report(content.description, content.numbers, content.collecting_since_ns)
        heartbeat = report.numbers.get("heartbeat")
        if known is None:
            known = _Memory(heartbeat, now, report.collecting_since, now)
        offset_ns, our_offset_ns = report.numbers.get("clock_offset_ns"), clock_offset_ns()
        differs_ns = 0 if offset_ns is None else offset_ns - our_offset_ns
        has_our_clock = known.has_our_clock or abs(differs_ns) < SAME_CLOCK_NS
        arrival = Arrival(
            report.identity,
            0 if has_our_clock else differs_ns,
            (
                RingNews(_full_following(report), content.full_pauses),
                RingNews(_young_following(report), content.young_pauses),
            ),
            is_from_the_beginning=is_new,
        )
        is_collecting = report.collecting_since and content.alive
        full_since = report.collecting_since or known.full_since
        running_since = report.number("running_since_ns") if content.alive else 0
        # A full one has a word of its own, and what has its record has ended.
        if running_since in (full_since, *(each.start_ns for each in content.young_pauses[-1:])):
            running_since = 0
        memory = _Memory(
            heartbeat=heartbeat,
            heartbeat_since=known.heartbeat_since if heartbeat == known.heartbeat else now,
            collecting_since=report.collecting_since,
            collecting_seen=(
                known.collecting_seen if report.collecting_since == known.collecting_since else now
            ),
            full_since=full_since,
            running_since=running_since,
            running_heartbeat=(
                known.running_heartbeat if running_since == known.running_since else heartbeat
            ),
            told=(arrival.rings[0].following - 1, arrival.rings[1].following - 1),
            has_our_clock=has_our_clock,
            description=content.description,
            report=report,
        )
        start_s = (report.collecting_since + arrival.shift_ns) * NANO
        reading = PageReading(
            name=name,
            report=report,
            alive=content.alive,
            unchanged_s=now - memory.heartbeat_since,
            # A process that died in a collection collects no more.
            collecting_s=(
                max(now - memory.collecting_seen, now - start_s if has_our_clock else 0.0)
                if is_collecting
                else None
            ),
            collecting_start_s=start_s if is_collecting else None,
            # One that ended right after a publication stands on the page until the next.
            young_start_s=(
                (running_since + arrival.shift_ns) * NANO
                if running_since and not is_collecting and heartbeat != memory.running_heartbeat
                else None
            ),
            is_whole=content.description.get("changes") == content.numbers["changes"],
        )
        return reading, arrival, memory

    def _where_to_begin(self, name: str) -> tuple[tuple[int, int], bool]:
        """After which records to begin with a page that is new to us, and whether that is its beginning: of a
        process that began while we looked all are wanted, of an older one a few tell enough of the past."""
        assert self.run_dir is not None
        content = read_page(self.run_dir, name)
        identity = content.description.get("identity")
        started_at = identity.get("started_at") if isinstance(identity, dict) else None
        if (
            self._first_look_at is not None
            and isinstance(started_at, (int, float))
            and started_at > self._first_look_at
        ):
            return (0, 0), True
        full, young = (content.numbers[f"{ring}_ring_next"] or 1 for ring in ("full", "young"))
        return (max(0, full - 1 - FIRST_FULL), max(0, young - 1 - FIRST_YOUNG)), False


def by_token(pages: Iterable[PageReading]) -> dict[str, PageReading]:
    """The page of each process; where one was given up and made anew, the one in use."""
    in_order = sorted(pages, key=lambda page: (page.alive, page.report.number("heartbeat")))
    return {page.report.identity.token: page for page in in_order}


def _full_following(report: Report) -> int:
    """The sequence that the next record of a full collection will have. Every record has been counted too: a page
    whose numbers say otherwise is damaged, and is not believed further than that."""
    return max(1, min(report.number("full_ring_next"), report.number("gen2_count") + 1))


def _young_following(report: Report) -> int:
    count = report.number("gen0_count") + report.number("gen1_count")
    return max(1, min(report.number("young_ring_next"), count + 1))


def _key_of(name: str) -> Key | None:
    """The place that a page's name claims: `role-dpN-rN-...`."""
    role, dp_rank, rank = name.split("-")[:3]
    try:
        return Key(role, int(dp_rank[2:]), int(rank[1:]))
    except ValueError:
        return None


# How the text of a PageError begins, and the code that it gets.
_PAGE_FAULTS = (
    ("truncated", "page_truncated"),
    ("a page of format", "page_version"),
    ("not a regular file", "page_not_a_file"),
)


def _page_fault(error: Exception) -> tuple[str, str]:
    if isinstance(error, OSError):
        code = "page_not_a_file" if error.errno == errno.ELOOP else "page_unreadable"
        return code, f"the page cannot be opened: {error.strerror}"
    text = str(error)
    for beginning, code in _PAGE_FAULTS:
        if text.startswith(beginning):
            return code, text
    return "page_damaged", text


_DIRECTORY_FAULTS = {
    errno.ENOENT: (
        "run_dir_missing",
        "does not exist",
        "mount the run directory into both containers, or create it: install -d -m 2770 DIR",
    ),
    errno.ENOTDIR: ("run_dir_not_a_directory", "is not a directory", "name a directory"),
    errno.EACCES: (
        "run_dir_unreadable",
        "cannot be read by the sidecar's user",
        "give both containers the pod's fsGroup, and the directory mode 2770",
    ),
}


def _directory_obstacle(run_dir: str, error: OSError) -> Obstacle:
    code, what, remedy = _DIRECTORY_FAULTS.get(
        error.errno or 0, ("run_dir_unreadable", f"cannot be read: {error.strerror}", None)
    )
    return Obstacle(code, f"the run directory {run_dir} {what}", remedy)


def _space_obstacle(run_dir: str) -> Obstacle | None:
    """Whether a process that starts now would find room for its page."""
    try:
        status = os.statvfs(run_dir)
    except OSError:
        return None
    if status.f_flag & os.ST_RDONLY:
        return Obstacle(
            "run_dir_read_only",
            f"the run directory {run_dir} is mounted read-only here",
            "mount it writable into both containers",
        )
    if status.f_bavail == 0 or (status.f_files and status.f_favail == 0):
        return Obstacle(
            "run_dir_full",
            f"the run directory {run_dir} is full: a process that starts gets no page",
            "raise the volume's sizeLimit, or remove what does not belong there",
        )
    return None
