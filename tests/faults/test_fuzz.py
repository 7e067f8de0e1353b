"""200,000 damaged pages and boards: each is read, or refused with the one error that says why.

Half of them are the same each time, half are new; what was printed says how to have those again. An input may take
neither more than a few seconds of CPU time nor much memory: its process ends where it does.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from gc_sidecar.server.reports import ReportError, parse_report
from gc_sidecar_agent.board import (
    BOARD_NAME,
    BOARD_VERSION,
    MAXIMUM_BOARD_BYTES,
    Board,
    BoardError,
    Lease,
    parse_board,
    read_board,
)
from gc_sidecar_agent.command import Command
from gc_sidecar_agent.page import (
    FULL_RING_OFFSET,
    HEADER_NUMBER_COUNT,
    NONE,
    NUMBER_INDEX,
    NUMBER_NAMES,
    NUMBERS_OFFSET,
    PAGE_BYTES,
    RECORD,
    RING_BYTES,
    RING_RECORDS,
    SLOT_BYTES,
    SLOT_OFFSETS,
    YOUNG_RING_OFFSET,
    PageContent,
    PageError,
    create_page,
    page_name,
    read_page,
)
from tests.unit.agent.own_process import in_own_process

# Of each part: 200,000 in all. Small parts, for a machine may be busy with others.
PAGES, BOARDS = 20_000, 20_000
PAGE_PARTS = [(kind, part) for kind in ("the same", "new") for part in range(3)]
BOARD_PARTS = [(kind, part) for kind in ("the same", "new") for part in range(2)]
FIXED_SEED = 20
CPU_S_OF_ONE = 5.0
MEMORY_BYTES = 256 << 20

# The sequence that the next record will have, and how far a reader has come that reads often.
NEXT_SEQUENCE = 3 * RING_RECORDS // 2
LATELY = (NEXT_SEQUENCE - 12, NEXT_SEQUENCE - 12)

EXTREMES = (0, 1, -1, 2, NONE, NONE + 1, (1 << 63) - 1, 1 << 62, 1 << 32, -(1 << 32), 4096, 1024)
TEXTS = ("", "x", "ä" * 300, "\x00", "\u202e", "\ud800", "off", "freeze", "worker", "-1", "NaN")
DESCRIPTION: dict[str, Any] = {
    "identity": {
        "roles": ["engine_core", "worker"], "dp_rank": 0, "rank": 0, "pid": 4242, "host": "node",
        "token": "0123abcd", "started_at": 1_700_000_000.5, "python": "3.11.7", "collector": "generational",
        "engine": "vllm 0.32.0", "agent": "0.1.0", "page_error": None, "agent_error": None,
    },
    "topology": {"dp_ranks": [0, 1], "workers": 4, "api_servers": 2},
    "state": {
        "ready": True, "mode": "freeze", "generation": 7, "owner": "bench-1", "entered_at": 1_700_000_009.25,
        "interval_s": 60.0, "pause_budget_ms": None, "max_rss_growth_bytes": 1 << 33,
        "reason": {"code": "lease_expired", "detail": "the lease ended"}, "collect_pending": False,
        "refused": {"generation": 6, "code": "policy_unsupported", "detail": "no"},
        "exits": {"restored": 3}, "drift": None, "drifts": {"gc_disabled": 1},
        "operation": {
            "operation_id": "op-1", "kind": "freeze", "generation": 7, "ok": True, "code": None,
            "detail": None, "pause_s": 0.25, "collected_objects": 7, "resident_delta_bytes": -4096,
            "device_delta_bytes": None,
        },
    },
}  # fmt: skip
BOARD: dict[str, Any] = {
    "version": BOARD_VERSION,
    "policy": Command("freeze", "op-1", 7, owner="bench-1", lease_s=60.5).to_dict(),
    "maintain": Command("maintain", "op-2", 7, trim=True).to_dict(),
    "lease": vars(Lease(sequence=3, remaining_s=59.5, expires_at=1_900_000_000.25)),
    "maintain_until": 1_900_000_000.5,
}

Patch = tuple[int, bytes]


@pytest.mark.parametrize(("inputs", "part"), PAGE_PARTS)
@in_own_process
def test_a_page_of_any_content_is_read_or_refused(inputs: str, part: int) -> None:
    chance = chance_of(inputs, part)
    limit_this_process()
    read = refused = longest = 0
    with a_page_in_memory(chance) as page:
        for _ in range(PAGES):
            page.damage(chance)
            try:
                content = page.read(chance)
                assert isinstance(content, PageContent)
                read += 1
                if read % 3 == 0:  # what the sidecar does with it next
                    with contextlib.suppress(ReportError):
                        parse_report(
                            content.description, content.numbers, content.collecting_since_ns
                        )
            except PageError as error:
                longest, refused = max(longest, len(str(error))), refused + 1
            page.mend()
    # Had everything been refused at once, nothing behind that would have been tried.
    assert min(read, refused) > PAGES // 10, (read, refused)
    assert longest < 300


@pytest.mark.parametrize(("inputs", "part"), BOARD_PARTS)
@in_own_process
def test_a_board_of_any_content_is_read_or_refused(inputs: str, part: int) -> None:
    chance = chance_of(inputs, part)
    limit_this_process()
    read = refused = longest = 0
    with a_directory_in_memory() as directory:
        for number in range(BOARDS):
            data = damaged_board(chance)
            arm()
            try:
                if number % 10:
                    board = parse_board(data)
                else:
                    (directory / BOARD_NAME).write_bytes(data)
                    board = read_board(str(directory))
                assert isinstance(board, Board)
                read += 1
            except BoardError as error:
                longest, refused = max(longest, len(str(error))), refused + 1
    assert min(read, refused) > BOARDS // 20, (read, refused)
    assert longest < 300


# --- limits ---


def chance_of(inputs: str, part: int) -> random.Random:
    """What chooses the inputs."""
    seed = FIXED_SEED + part if inputs == "the same" else random.randrange(1 << 32)
    print(f"seed {seed}; FIXED_SEED = {seed - part} makes these inputs again")
    return random.Random(seed)


def limit_this_process() -> None:
    """More memory is a MemoryError, and an input that hangs one of `hung`."""
    status = Path("/proc/self/statm").read_text().split()
    used = int(status[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGVTALRM, hung)


def hung(_number: int, _frame: FrameType | None) -> None:
    raise TimeoutError(f"an input took more than {CPU_S_OF_ONE} s")


def arm() -> None:
    """The next input has its own time, of the CPU: a machine that is busy with others is no reason to fail."""
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S_OF_ONE)


@contextlib.contextmanager
def a_directory_in_memory() -> Iterator[Path]:
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    directory = tempfile.mkdtemp(prefix="gc-sidecar-test-", dir=where)
    try:
        yield Path(directory)
    finally:
        shutil.rmtree(directory)


# --- pages ---


class DamagedPage:
    """One page that is damaged and mended again and again: to write it anew would take longer than to read it."""

    def __init__(self, directory: Path, chance: random.Random) -> None:
        writer = create_page(str(directory), page_name("worker", 0, 0, 1_700_000_000))
        writer.write_description({**DESCRIPTION, "topology": None})
        writer.write_description(DESCRIPTION)
        words = [chance.randrange(1 << 40) for _ in NUMBER_NAMES]
        for name in ("full_ring_next", "young_ring_next"):
            words[NUMBER_INDEX[name]] = NEXT_SEQUENCE
        writer.write_numbers(struct.pack(f"<{len(words)}q", *words))
        ring = bytearray(RING_BYTES)
        for sequence in range(NEXT_SEQUENCE - RING_RECORDS, NEXT_SEQUENCE):
            place = sequence % RING_RECORDS * RECORD.size
            ring[place : place + RECORD.size] = record(sequence)
        for offset in (FULL_RING_OFFSET, YOUNG_RING_OFFSET):
            writer.write_ring(offset, memoryview(ring))
        self.directory, self.name, self.fd = str(directory), writer.name, writer.fd
        self.whole = os.pread(self.fd, PAGE_BYTES, 0)
        self._damage: list[tuple[int, int]] = []
        self._size = PAGE_BYTES

    def damage(self, chance: random.Random) -> None:
        """One to three damages, now and then of the whole file or of its length."""
        for _ in range(chance.choice((1, 1, 2, 3))):
            how = chance.choice(PAGE_DAMAGES)
            for where, data in how(chance, self.whole):
                self._damage.append((where, os.pwrite(self.fd, data, where)))
        if chance.random() < 0.02:
            self._size = chance.choice((chance.randrange(PAGE_BYTES), PAGE_BYTES + 4096, 1 << 40))
            os.ftruncate(self.fd, self._size)

    def read(self, chance: random.Random) -> PageContent:
        """One reading, with rings or without."""
        after = chance.choice((None, None, LATELY, LATELY, (1 << 62, LATELY[1])))
        if chance.random() < 0.02:
            after = chance.choice(
                ((0, 0), (-5, 5), (NEXT_SEQUENCE, 1 << 70))
            )  # a whole ring takes long
        arm()
        return read_page(self.directory, self.name, after)

    def mend(self) -> None:
        """The page as it was."""
        if self._size != PAGE_BYTES:
            os.ftruncate(self.fd, PAGE_BYTES)
            os.pwrite(self.fd, self.whole, 0)
        for where, size in self._damage:
            os.pwrite(self.fd, self.whole[where : where + size], where)
        self._damage.clear()
        if os.fstat(self.fd).st_size != PAGE_BYTES:
            os.ftruncate(self.fd, PAGE_BYTES)
        self._size = PAGE_BYTES


@contextlib.contextmanager
def a_page_in_memory(chance: random.Random) -> Iterator[DamagedPage]:
    with a_directory_in_memory() as directory:
        yield DamagedPage(directory, chance)


def record(sequence: int, start: int = 5, length: int = 9 << 8 | 2 << 4, objects: int = 0) -> bytes:
    """A record whose check fits; numbers are cut to words."""
    words = [wrapped(word) for word in (sequence, start, length, objects)]
    check = words[0] ^ words[1] ^ words[2] ^ words[3]
    return RECORD.pack(*words, check)


def wrapped(word: int) -> int:
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


# Where the newest records lie in a ring.
NEWEST = (NEXT_SEQUENCE - 10) % RING_RECORDS * RECORD.size


def somewhere(chance: random.Random) -> int:
    """A place in the file, mostly in one that means something."""
    if chance.random() < 0.3:
        return chance.randrange(PAGE_BYTES - 8)
    begins, size = chance.choice(
        (
            *((0, 32), (NUMBERS_OFFSET, 8 * len(NUMBER_NAMES)), (SLOT_OFFSETS[0], 1200)),
            *(
                (SLOT_OFFSETS[1], 1200),
                (FULL_RING_OFFSET + NEWEST, 400),
                (YOUNG_RING_OFFSET + NEWEST, 400),
            ),
        )
    )
    return begins + chance.randrange(size)


def flip_bits(chance: random.Random, whole: bytes) -> list[Patch]:
    where = somewhere(chance)
    return [(where, bytes([whole[where] ^ 1 << chance.randrange(8)]))]


def write_noise(chance: random.Random, _: bytes) -> list[Patch]:
    where = somewhere(chance)
    size = chance.choice((1, 4, 8, 64))
    return [(where, chance.randbytes(min(size, PAGE_BYTES - where)))]


def write_extremes(chance: random.Random, _: bytes) -> list[Patch]:
    where = somewhere(chance) // 8 * 8
    return [(where, struct.pack("<q", chance.choice(EXTREMES)))]


def change_how_many_numbers(chance: random.Random, _: bytes) -> list[Patch]:
    count = chance.choice((*EXTREMES, len(NUMBER_NAMES) - 3, len(NUMBER_NAMES) + 3, 512, 513))
    return [(8 * HEADER_NUMBER_COUNT, struct.pack("<q", count))]


def splice(chance: random.Random, whole: bytes) -> list[Patch]:
    size = chance.choice((8, 40, 4096))
    begins, where = chance.randrange(PAGE_BYTES - size), chance.randrange(PAGE_BYTES - size)
    return [(where, whole[begins : begins + size])]


def change_json(chance: random.Random, _: bytes) -> list[Patch]:
    value = changed(chance, DESCRIPTION)
    body = json.dumps(value).encode(errors="replace")
    if len(body) > SLOT_BYTES - 16:
        body = b"[" * (SLOT_BYTES - 16)  # as deep as it can be
    return [(chance.choice(SLOT_OFFSETS), slot(chance, body))]


def damage_json(chance: random.Random, _: bytes) -> list[Patch]:
    data = damaged_text(chance, json.dumps(DESCRIPTION).encode())
    return [(chance.choice(SLOT_OFFSETS), slot(chance, data[: SLOT_BYTES - 16]))]


def slot(chance: random.Random, body: bytes) -> bytes:
    """A slot that is newer than any, and whose CRC fits."""
    sequence = chance.choice((9, 1 << 63, (1 << 64) - 1))
    crc = zlib.crc32(body, sequence & 0xFFFFFFFF)
    return struct.pack("<QII", sequence, len(body), crc) + body


def forge_records(chance: random.Random, _: bytes) -> list[Patch]:
    place = (NEXT_SEQUENCE - chance.choice((1, 2, 5, 12, 13, 700))) % RING_RECORDS
    ring = chance.choice((FULL_RING_OFFSET, YOUNG_RING_OFFSET))
    words = [chance.choice((*EXTREMES, place, place + RING_RECORDS)) for _ in range(4)]
    return [(ring + place * RECORD.size, record(*words))]


def boast(chance: random.Random, _: bytes) -> list[Patch]:
    number = NUMBER_INDEX[chance.choice(("full_ring_next", "young_ring_next", "gen2_count"))]
    return [(NUMBERS_OFFSET + 8 * number, struct.pack("<q", chance.choice(EXTREMES)))]


def fill_with_noise(chance: random.Random, whole: bytes) -> list[Patch]:
    if chance.random() > 0.02:
        return flip_bits(chance, whole)
    kept = chance.choice(
        (0, 16, 32, NUMBERS_OFFSET)
    )  # with the magic number, it is looked at further
    return [
        (kept, chance.randbytes(FULL_RING_OFFSET - kept)),
        (FULL_RING_OFFSET, b"\xff" * RING_BYTES),
    ]


PageDamage = Callable[[random.Random, bytes], list[Patch]]
PAGE_DAMAGES: tuple[PageDamage, ...] = (
    *(flip_bits, write_noise, write_extremes, change_how_many_numbers, splice, change_json),
    *(damage_json, forge_records, boast, fill_with_noise),
)

# --- JSON ---


def damaged_board(chance: random.Random) -> bytes:
    kind = chance.random()
    if kind < 0.02:
        return chance.randbytes(chance.choice((0, 1, 100, 5000)))
    if kind < 0.04:
        return b'{"version":1,"lease":' + b"[" * chance.choice((100, 5000, MAXIMUM_BOARD_BYTES))
    if kind < 0.5:
        return json.dumps(changed(chance, BOARD)).encode(errors="replace")
    return damaged_text(chance, json.dumps(BOARD).encode())


def damaged_text(chance: random.Random, good: bytes) -> bytes:
    """Bytes replaced, cut, doubled, and pieces of JSON put in between."""
    data = bytearray(good)
    for _ in range(chance.choice((1, 1, 2, 3))):
        at = chance.randrange(len(data) + 1)
        how = chance.random()
        if how < 0.5:
            data[at : at + chance.randrange(12)] = chance.choice(PIECES)
        elif how < 0.7:
            data[at : at + 1] = chance.randbytes(1)
        elif how < 0.8:
            del data[at:]
        else:
            begins = chance.randrange(len(good))
            data[at:at] = good[begins : begins + chance.choice((1, 20, 5000))]
    return bytes(data)


PIECES = (
    *(
        b"NaN",
        b"-Infinity",
        b"null",
        b"1e999",
        b"-1",
        b'"',
        b"{",
        b"]",
        b"\xff",
        b"true",
        b"",
        b"{}",
    ),
    *(b"9" * 400, b"9" * 5000, b'"\\ud800"', b"-0", b"[[[[", b"1.5", b'"version":2,', b"\x00"),
)


def changed(chance: random.Random, value: Any) -> Any:
    """`value` with one part of it, however deep, exchanged, taken away or put somewhere else."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        name = chance.choice(list(value))
        how = chance.random()
        if how < 0.1:
            return {key: item for key, item in value.items() if key != name}
        if how < 0.15:
            return {**value, chance.choice(TEXTS): value[name]}
        return {**value, name: changed(chance, value[name])}
    if isinstance(value, list) and value and chance.random() < 0.5:
        at = chance.randrange(len(value))
        return [*value[:at], changed(chance, value[at]), *value[at:]]
    return anything(chance)


def anything(chance: random.Random) -> Any:
    """Some JSON value."""
    return chance.choice(
        (
            *(None, True, False, [], {}, [[]], {"": {}}, 0.5, -0.0, 1e308, float("nan")),
            *(float("inf"), 10**400, list(range(300)), {"code": 1}, {"code": "x" * 100}),
            *(chance.choice(EXTREMES), chance.choice(TEXTS), chance.random() * 1e20),
        )
    )
