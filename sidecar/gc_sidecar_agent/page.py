"""The page: one small file per process in the run directory, by which others see it without touching it.

The format, its one writer (the agent) and its reader (the sidecar) stand side by side here. How it survives
full disks, truncation and killed writers is told in docs/architecture.md.

    offset  what                       written
    0       header: magic, version,    at creation; the word `collecting since` by the GC callback alone
            collecting since, how many
            numbers there are
    4096    numbers: aligned words     every poll, from the meter's private words
    8192    slots A and B: JSON with   on change, alternately; the newest with a right CRC counts
            sequence, length and CRC
    16384   ring of full collections   when there are new ones, from the meter's private ring
    57344   ring of young collections  the same
"""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import mmap
import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAGIC = 0x31304547_41504347  # "GCPAGE01", little-endian
VERSION = 1
NONE = -(1 << 63)  # a number that is not known

HEADER_BYTES = 4096
NUMBERS_OFFSET = 4096
SLOT_OFFSETS = (8192, 12288)
SLOT_BYTES = 4096
RING_RECORDS = 1024
RECORD_WORDS = 5  # sequence, start, length with generation and trigger, objects, XOR of these
RECORD = struct.Struct(f"<{RECORD_WORDS}q")
RING_BYTES = RING_RECORDS * RECORD.size
FULL_RING_OFFSET = 16384
YOUNG_RING_OFFSET = FULL_RING_OFFSET + RING_BYTES
PAGE_BYTES = YOUNG_RING_OFFSET + RING_BYTES

SUFFIX = ".page"
PAGE_NAME = re.compile(r"[a-z_]+-dp\d+-r\d+-\d+-[0-9a-f]{8}\.page")

# Upper bounds of the pause histogram in nanoseconds, 0.5 ms to 60 s; a last bucket holds the rest.
BUCKETS_NS = tuple(
    int(seconds * 1e9)
    for seconds in (
        0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
        0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    )
)  # fmt: skip
BUCKET_COUNT = len(BUCKETS_NS) + 1

# What caused a collection. "auto" is CPython's own; "explicit" somebody else's gc.collect().
TRIGGERS = ("auto", "maintain", "restore", "entry", "explicit")

# The header's words that follow magic number and version.
HEADER_COLLECTING_SINCE_NS = 2
HEADER_NUMBER_COUNT = 3

_GENERATION_FIELDS = ("count", "total_ns", "max_ns", "collected_objects", "uncollectable_objects")
# Append only: agent and sidecar may be of different versions, and a number is known by its place alone. A page
# says how many it has; those that only one of the two knows are passed over.
NUMBER_NAMES: tuple[str, ...] = (
    "heartbeat",
    "clock_offset_ns",  # wall clock minus monotonic clock, so that a record's start can be told as a date
    "lease_remaining_ms",
    "gc_enabled",
    "threshold0",
    "threshold1",
    "threshold2",
    *(f"gen{generation}_{name}" for generation in range(3) for name in _GENERATION_FIELDS),
    *(f"auto_bucket{i}" for i in range(BUCKET_COUNT)),
    "auto_total_ns",
    *(f"requested_bucket{i}" for i in range(BUCKET_COUNT)),
    "requested_total_ns",
    "full_ring_next",  # the sequence that the next record will have; sequences start at 1
    "young_ring_next",
    "full_starts",  # full collections started: one that is pending has come when this has grown
    "freezes",
    "freezes_since_maintain",
    "maintains",
    "maintain_total_ns",
    "reclaimed_objects",
    "anonymous_bytes",
    "file_bytes",
    "shared_bytes",
    "growth_bytes",
    "device_allocated_bytes",
    "device_reserved_bytes",
    "memory_limit_bytes",  # of the process's cgroup
    "memory_current_bytes",
    "running_since_ns",  # when the collection of any generation began that ran at this publication; 0: none did
    "over_budget",  # automatic collections that took longer than the pause budget in force
    "changes",  # of the description that belongs to these numbers; while the page has another, they do not fit
)
NUMBER_INDEX = {name: index for index, name in enumerate(NUMBER_NAMES)}
NUMBERS = struct.Struct(f"<{len(NUMBER_NAMES)}q")
NUMBERS_BYTES = NUMBERS.size
_MOST_NUMBERS = (SLOT_OFFSETS[0] - NUMBERS_OFFSET) // 8

_HEADER = struct.Struct("<4q")  # magic, version, collecting since, number of numbers
_FRESH_HEADER = _HEADER.pack(MAGIC, VERSION, 0, len(NUMBER_NAMES))
_COLLECTING_SINCE = slice(HEADER_COLLECTING_SINCE_NS * 8, HEADER_COLLECTING_SINCE_NS * 8 + 8)


class PageError(Exception):
    """A file in the run directory that cannot be read as a page; `str()` of it says why."""


@dataclass(frozen=True)
class Pause:
    """One collection as its process recorded it. Times in nanoseconds of that process's monotonic clock."""

    sequence: int
    start_ns: int
    duration_ns: int
    gc_generation: int
    trigger: str
    collected_objects: int


@dataclass(frozen=True)
class PageContent:
    """One reading of a page.

    `description` is the JSON of the newest valid slot: `identity`, `topology`, `state` and `changes` of the
    process. It is the same object as long as the slot has not changed, so nobody may change it.
    `numbers` holds every name of NUMBER_NAMES; None where the process does not know it. The pauses are those
    that read_page was asked for, in order; a sequence that is missing was overwritten, torn or forged.
    """

    name: str
    description: dict[str, Any]
    numbers: dict[str, int | None]
    collecting_since_ns: int
    alive: bool
    full_pauses: tuple[Pause, ...] = ()
    young_pauses: tuple[Pause, ...] = ()


# --- writing, in the engine's process ---


class PageWriter:
    """The agent's own page. Everything but the word `collecting since` is written with pwrite: a file that
    somebody truncates under a map kills the process that stores into it, a pwrite merely extends it again."""

    def __init__(self, path: str, fd: int, header: mmap.mmap) -> None:
        self.path = path
        self.fd = fd
        # Never closed: a GC callback may store into it until the process is gone.
        self._header_map = header
        self.header = memoryview(header).cast("q")
        self._slot = 0
        self._sequence = 0
        self._newest = b""

    @property
    def name(self) -> str:
        """The file's name in the run directory."""
        return os.path.basename(self.path)

    def is_intact(self) -> bool:
        """Whether the file still has its size, its header and the newest description: a truncated one must not
        be stored into any more, and one that somebody wrote into would stay unreadable."""
        if os.lseek(self.fd, 0, os.SEEK_END) < PAGE_BYTES:
            return False
        header = bytearray(os.pread(self.fd, _HEADER.size, 0))
        header[_COLLECTING_SINCE] = bytes(8)  # the one word that changes
        newest = os.pread(self.fd, len(self._newest), SLOT_OFFSETS[1 - self._slot])
        return header == _FRESH_HEADER and newest == self._newest

    def is_listed(self) -> bool:
        """Whether the file still stands under its name, so that readers find it."""
        try:
            return os.stat(self.path, follow_symlinks=False).st_ino == os.fstat(self.fd).st_ino
        except OSError:
            return False

    def write_numbers(self, words: bytes | memoryview) -> None:
        """Publish the numbers (NUMBERS_BYTES of words in the order of NUMBER_NAMES).

        Where they tell of records (`full_ring_next`, `young_ring_next`), the rings must be on the page already:
        readers take it that every record below these numbers is there, or has been overwritten.
        """
        os.pwrite(self.fd, words, NUMBERS_OFFSET)

    def write_ring(self, offset: int, ring: memoryview) -> None:
        """Publish a whole ring; a reader that meets half of a record tells it by its XOR."""
        os.pwrite(self.fd, ring, offset)

    def write_description(self, description: dict[str, Any]) -> None:
        """Publish the JSON part into the slot that does not hold the newest one."""
        newest = encode_slot(self._sequence + 1, description)
        os.pwrite(self.fd, newest, SLOT_OFFSETS[self._slot])
        self._newest = newest
        self._sequence += 1
        self._slot = 1 - self._slot

    def discard(self) -> None:
        """Take the page out of the run directory and give up its lock. The map stays while it is in use."""
        try:
            if self.is_listed():
                os.unlink(self.path)
        except OSError:
            pass
        self.close()

    def close(self) -> None:
        """Write no more. Where this is the writer's own process, its lock is gone with it."""
        fd, self.fd = self.fd, -1  # never again: its number may soon be another file's
        if fd >= 0:
            os.close(fd)


def page_name(role: str, dp_rank: int, rank: int, started_ns: int) -> str:
    """A name that no other process and no earlier container start has had."""
    return f"{role}-dp{dp_rank}-r{rank}-{started_ns}-{os.urandom(4).hex()}{SUFFIX}"


def create_page(
    run_dir: str, name: str, fill: Callable[[PageWriter], None] | None = None
) -> PageWriter:
    """A new page under `name`, filled by `fill` and locked before anyone can see it: a reader must not meet
    counters that begin at 0 again. Raises OSError, PageError.

    Space is allocated first: a store into a sparse file on a full tmpfs kills the process (SIGBUS).
    """
    path = os.path.join(run_dir, name)
    temporary = os.path.join(run_dir, f".{name}.tmp")
    fd = os.open(
        temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        os.posix_fallocate(fd, 0, PAGE_BYTES)
        os.fchmod(fd, 0o644)
        header = mmap.mmap(fd, HEADER_BYTES)
        writer = PageWriter(path, fd, header)
        os.pwrite(fd, _FRESH_HEADER, 0)
        # A record lock is released by the kernel however the process ends, and it is seen across PID
        # namespaces. It is lost when any descriptor of the file is closed: never open the page again here.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if fill is not None:
            fill(writer)
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        os.close(fd)
        raise
    return writer


def encode_slot(sequence: int, description: dict[str, Any]) -> bytes:
    """The bytes of a slot; a description that is too long loses its longest texts, never its shape."""
    body = json.dumps(description, separators=(",", ":")).encode()
    for longest in (240, 120):
        if len(body) <= SLOT_BYTES - 16:
            break
        body = json.dumps(_shortened(description, longest), separators=(",", ":")).encode()
    if len(body) > SLOT_BYTES - 16:
        raise PageError(f"a description of {len(body)} bytes does not fit its slot")
    return struct.pack("<QII", sequence, len(body), _slot_crc(sequence, body)) + body


def _slot_crc(sequence: int, body: bytes) -> int:
    return zlib.crc32(body, sequence & 0xFFFFFFFF)


def _shortened(value: Any, longest: int) -> Any:
    if isinstance(value, dict):
        return {key: _shortened(item, longest) for key, item in value.items()}
    if isinstance(value, str) and len(json.dumps(value)) > longest:
        # In plain letters: JSON writes any other as six or twelve.
        return "".join(c if " " <= c <= "~" else "?" for c in value[: longest - 3]) + "..."
    return value


# --- reading, in the sidecar ---


def list_pages(run_dir: str, limit: int = 4096) -> list[str]:
    """Names in `run_dir` that look like pages, sorted, at most `limit`. Raises OSError."""
    names = []
    with os.scandir(run_dir) as entries:
        for entry in entries:
            if PAGE_NAME.fullmatch(entry.name):
                names.append(entry.name)
                if len(names) >= limit:
                    break
    return sorted(names)


def read_page(run_dir: str, name: str, after: tuple[int, int] | None = None) -> PageContent:
    """One reading of a page. Raises PageError, OSError.

    With `after`, the sequences of the last full and the last young record that the caller has, it also reads the
    records that came since, and no others; (0, 0) reads everything that is there. Without it no ring is read.

    The file is opened without following links and without blocking on a FIFO, and read with pread:
    a reader that maps a file dies when somebody truncates it.
    """
    fd = os.open(
        os.path.join(run_dir, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    )
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise PageError("not a regular file")
        if status.st_size < PAGE_BYTES:
            raise PageError(f"truncated: {status.st_size} of {PAGE_BYTES} bytes")
        # The writer publishes rings, numbers, description. In the opposite order the numbers are never older than
        # an operation that the description tells of, and the rings never older than the numbers.
        slots = _pread_all(fd, FULL_RING_OFFSET - SLOT_OFFSETS[0], SLOT_OFFSETS[0])
        head = _pread_all(fd, SLOT_OFFSETS[0], 0)
        magic, version, collecting_since_ns, count = _HEADER.unpack_from(head)
        if magic != MAGIC:
            raise PageError("not a page: the magic number is wrong")
        if version != VERSION:
            raise PageError(f"a page of format {version}; this sidecar reads format {VERSION}")
        numbers = _numbers(head, count)
        full: tuple[Pause, ...] = ()
        young: tuple[Pause, ...] = ()
        if after is not None:
            full = _read_ring(fd, FULL_RING_OFFSET, after[0], numbers["full_ring_next"])
            young = _read_ring(fd, YOUNG_RING_OFFSET, after[1], numbers["young_ring_next"])
        alive = _is_locked(fd)
    finally:
        os.close(fd)
    return PageContent(
        name=name,
        description=_newest_description(slots),
        numbers=numbers,
        collecting_since_ns=collecting_since_ns,
        alive=alive,
        full_pauses=full,
        young_pauses=young,
    )


def _pread_all(fd: int, size: int, offset: int) -> bytes:
    data = os.pread(fd, size, offset)
    if len(data) < size:
        raise PageError("truncated while it was read")
    return data


def _numbers(head: bytes, count: int) -> dict[str, int | None]:
    """The numbers of a page whose writer knew the first `count` names, and perhaps more than we do."""
    if not 0 < count <= _MOST_NUMBERS:
        raise PageError(f"damaged: its header says that it has {count} numbers")
    values = struct.unpack_from(f"<{min(count, len(NUMBER_NAMES))}q", head, NUMBERS_OFFSET)
    numbers: dict[str, int | None] = dict(zip(NUMBER_NAMES, values, strict=False))
    for name in NUMBER_NAMES[count:]:
        numbers[name] = None
    if NONE in values:
        for name, value in zip(NUMBER_NAMES, values, strict=False):
            if value == NONE:
                numbers[name] = None
    return numbers


def _newest_description(slots: bytes) -> dict[str, Any]:
    best_sequence, best = 0, None
    for offset in (slot - SLOT_OFFSETS[0] for slot in SLOT_OFFSETS):
        sequence, length, crc = struct.unpack_from("<QII", slots, offset)
        if sequence <= best_sequence or length > SLOT_BYTES - 16:
            continue
        body = slots[offset + 16 : offset + 16 + length]
        if _slot_crc(sequence, body) != crc:
            continue
        value = _decoded(body)
        if value is not None:
            best_sequence, best = sequence, value
    if best is None:
        raise PageError(
            "no valid description: the page was damaged or its writer never finished it"
        )
    return best


@functools.lru_cache(maxsize=512)
def _decoded(body: bytes) -> dict[str, Any] | None:
    """The object in a slot. It changes seldom and is read often: the same bytes give the same object."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _read_ring(fd: int, offset: int, last: int, following: int | None) -> tuple[Pause, ...]:
    """The records of the ring at `offset` after sequence `last`, and before `following`, of which the page's
    number tells. However far apart these are, no more than one ring is read."""
    if following is None or following <= last + 1:
        return ()
    first = max(last + 1, following - RING_RECORDS)
    count = following - first
    slot = first % RING_RECORDS
    before_end = min(count, RING_RECORDS - slot)
    records = _pread_all(fd, before_end * RECORD.size, offset + slot * RECORD.size)
    if count > before_end:
        records += _pread_all(fd, (count - before_end) * RECORD.size, offset)
    return decode_records(records, first)


def decode_records(records: bytes, first: int) -> tuple[Pause, ...]:
    """The pauses in neighbouring records with the sequences `first`, `first` + 1, ... without those that are
    torn, forged, or of another sequence."""
    pauses = []
    for expected, (sequence, start, length, objects, check) in enumerate(
        RECORD.iter_unpack(records), first
    ):
        trigger = length & 0xF
        generation = (length >> 4) & 0xF
        if (
            sequence == expected
            and sequence ^ start ^ length ^ objects == check
            and length >= 0
            and generation <= 2
            and trigger < len(TRIGGERS)
        ):
            pauses.append(
                Pause(sequence, start, length >> 8, generation, TRIGGERS[trigger], objects)
            )
    return tuple(pauses)


_FLOCK = struct.Struct("hhqqi4x")


def _is_locked(fd: int) -> bool:
    """Whether another process holds the page's record lock, that is: whether its writer lives."""
    query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        answer = fcntl.fcntl(fd, fcntl.F_GETLK, query)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS):
            return True  # a file system without locks: the heartbeat has to tell
        raise
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def remove_dead_pages(run_dir: str, role: str, dp_rank: int, rank: int) -> None:
    """Unlink the pages that earlier processes of this role and rank left behind. Never raises."""
    prefix = f"{role}-dp{dp_rank}-r{rank}-"
    try:
        for name in list_pages(run_dir):
            if not name.startswith(prefix):
                continue
            try:
                fd = os.open(
                    os.path.join(run_dir, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
                )
                try:
                    dead = stat.S_ISREG(os.fstat(fd).st_mode) and not _is_locked(fd)
                finally:
                    os.close(fd)
                if dead:
                    os.unlink(os.path.join(run_dir, name))
            except OSError:
                continue
    except OSError:
        pass


def clock_offset_ns() -> int:
    """Wall clock minus monotonic clock of this process, in nanoseconds."""
    return time.time_ns() - time.monotonic_ns()
