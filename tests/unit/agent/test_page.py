"""The page: readable whatever happens to its writer, and no danger to it whatever happens to its file."""

from __future__ import annotations

import errno
import fcntl
import functools
import gc
import json
import os
import random
import resource
import shutil
import signal
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gc_sidecar_agent.meter import PauseMeter
from gc_sidecar_agent.page import (
    FULL_RING_OFFSET,
    HEADER_COLLECTING_SINCE_NS,
    HEADER_NUMBER_COUNT,
    NONE,
    NUMBER_INDEX,
    NUMBER_NAMES,
    NUMBERS_BYTES,
    NUMBERS_OFFSET,
    PAGE_BYTES,
    PAGE_NAME,
    RECORD_WORDS,
    RING_BYTES,
    RING_RECORDS,
    SLOT_BYTES,
    SLOT_OFFSETS,
    TRIGGERS,
    YOUNG_RING_OFFSET,
    PageContent,
    PageError,
    PageWriter,
    Pause,
    create_page,
    decode_records,
    encode_slot,
    list_pages,
    page_name,
    read_page,
    remove_dead_pages,
)
from gc_sidecar_agent.publisher import Publisher
from tests.unit.agent.mounting import mount_for_this_process
from tests.unit.agent.own_process import Child, hear, in_own_process, say
from tests.unit.agent.waiting import wait_until

DESCRIPTION = {"identity": {"roles": ["worker"], "pid": 1}, "topology": None, "state": {"n": 1}}


def new_page(run_dir: Path | str, role: str = "worker", rank: int = 0) -> PageWriter:
    page = create_page(str(run_dir), page_name(role, 0, rank, 1_700_000_000))
    page.write_description(DESCRIPTION)
    return page


def numbers(**values: int) -> memoryview:
    words = memoryview(bytearray(NUMBERS_BYTES)).cast("q")
    for name, value in values.items():
        words[NUMBER_INDEX[name]] = value
    return words


def ring_of(*records: tuple[int, int, int, int]) -> memoryview:
    """A ring with these records: sequence, start, length with generation and trigger, objects."""
    ring = memoryview(bytearray(RING_BYTES)).cast("q")
    for sequence, start, length, objects in records:
        slot = sequence % RING_RECORDS * RECORD_WORDS
        check = sequence ^ start ^ length ^ objects
        for word, value in enumerate((sequence, start, length, objects, check)):
            ring[slot + word] = value
    return ring


def hold_a_page(run_dir: str) -> None:
    """A writer that publishes `n` in its description for every line that it is told."""
    page = new_page(run_dir)
    say(page.name)
    while True:
        page.write_description({"n": hear()})
        page.write_numbers(numbers(heartbeat=1))
        say({"intact": page.is_intact(), "listed": page.is_listed()})


# --- what is written is read ---


def test_a_page_is_read_as_it_was_written(tmp_path: Path) -> None:
    page = new_page(tmp_path)
    values = {name: index * 1_000_003 for index, name in enumerate(NUMBER_NAMES)}
    values.update(heartbeat=-5, clock_offset_ns=(1 << 63) - 1, growth_bytes=NONE)
    values.update(full_ring_next=8, young_ring_next=3)
    page.write_numbers(numbers(**values))
    page.header[HEADER_COLLECTING_SINCE_NS] = 12_345
    full_record = (7, 1_000, 5_000 << 8 | 2 << 4 | TRIGGERS.index("restore"), 42)
    page.write_ring(FULL_RING_OFFSET, ring_of(full_record))
    page.write_ring(YOUNG_RING_OFFSET, ring_of((1, 5, 9 << 8, 0), (2, 6, 9 << 8 | 1 << 4, 1)))

    content = read_page(str(tmp_path), page.name, after=(6, 0))
    assert content.name == page.name
    assert content.description == DESCRIPTION
    assert content.numbers == {**values, "growth_bytes": None}
    assert content.collecting_since_ns == 12_345
    (full,) = content.full_pauses
    assert (full.sequence, full.start_ns, full.duration_ns) == (7, 1_000, 5_000)
    assert (full.gc_generation, full.trigger, full.collected_objects) == (2, "restore", 42)
    assert [(p.sequence, p.gc_generation) for p in content.young_pauses] == [(1, 0), (2, 1)]


def test_the_newest_description_is_read(tmp_path: Path) -> None:
    page = new_page(tmp_path)
    for number in range(7):
        page.write_description({"n": number})
        assert read_page(str(tmp_path), page.name).description == {"n": number}


def test_the_whole_file_is_allocated_and_everybody_may_read_it(tmp_path: Path) -> None:
    page = new_page(tmp_path)
    status = os.stat(page.path)
    assert status.st_size == PAGE_BYTES
    assert status.st_blocks * 512 >= PAGE_BYTES
    assert stat.S_IMODE(status.st_mode) == 0o644
    assert os.listdir(tmp_path) == [page.name]


def test_a_page_is_filled_before_anybody_can_see_it(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def fill(page: PageWriter) -> None:
        seen.append(list_pages(str(tmp_path)))
        page.write_description(DESCRIPTION)

    page = create_page(str(tmp_path), page_name("worker", 0, 0, 1), fill)
    assert seen == [[]]
    assert read_page(str(tmp_path), page.name).description == DESCRIPTION


def test_a_page_that_cannot_be_filled_is_not_there(tmp_path: Path) -> None:
    def fill(page: PageWriter) -> None:
        page.write_description({"text": list(range(10_000))})

    with pytest.raises(PageError, match="does not fit"):
        create_page(str(tmp_path), page_name("worker", 0, 0, 1), fill)
    assert os.listdir(tmp_path) == []


def test_names_differ_even_within_one_second_and_are_recognised() -> None:
    names = {page_name("engine_core", 3, 12, 1_700_000_000) for _ in range(1000)}
    assert len(names) == 1000
    assert all(PAGE_NAME.fullmatch(name) for name in names)


# --- whether its writer lives ---


def test_a_living_writer_is_told_from_a_killed_one_and_a_stopped_one_lives(tmp_path: Path) -> None:
    with Child(hold_a_page, run_dir=tmp_path) as child:
        name = child.hear()
        child.ask(1)

        def is_alive() -> bool:
            return read_page(str(tmp_path), name).alive

        assert is_alive()
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert is_alive()
        os.kill(child.pid, signal.SIGKILL)
        child.process.wait()
        assert not is_alive()
        # What it wrote last can still be read.
        assert read_page(str(tmp_path), name).description == {"n": 1}


def test_reading_a_page_does_not_take_its_lock_away(tmp_path: Path) -> None:
    with Child(hold_a_page, run_dir=tmp_path) as child:
        name = child.hear()
        for _ in range(100):
            assert read_page(str(tmp_path), name).alive
        child.ask(2)
        assert read_page(str(tmp_path), name).alive


def fork_with_a_page(run_dir: str) -> None:
    page = new_page(run_dir)
    pid = os.fork()
    if pid == 0:
        os.close(page.fd)
        os._exit(0)
    os.waitpid(pid, 0)
    say(page.name)
    hear()


def test_a_forked_child_that_lets_go_does_not_take_the_lock_away(tmp_path: Path) -> None:
    with Child(fork_with_a_page, run_dir=tmp_path) as child:
        assert read_page(str(tmp_path), child.hear()).alive


def open_the_own_page_again(run_dir: str) -> None:
    page = new_page(run_dir)
    say(page.name)
    hear()
    os.close(os.open(page.path, os.O_RDONLY))
    say("closed")
    hear()


def test_a_writer_that_opens_its_page_a_second_time_loses_its_lock(tmp_path: Path) -> None:
    # Not what anybody wants, but what POSIX says: why nothing in the agent may ever do so.
    with Child(open_the_own_page_again, run_dir=tmp_path) as child:
        name = child.hear()
        assert read_page(str(tmp_path), name).alive
        assert child.ask("go on") == "closed"
        assert not read_page(str(tmp_path), name).alive


# --- what may happen to its file ---


@pytest.mark.parametrize("size", [0, 1, 4095, NUMBERS_OFFSET, FULL_RING_OFFSET, PAGE_BYTES - 1])
def test_a_truncated_page_is_an_error_to_readers_and_known_to_its_living_writer(
    tmp_path: Path, size: int
) -> None:
    with Child(hold_a_page, run_dir=tmp_path) as child:
        name = child.hear()
        os.truncate(tmp_path / name, size)
        with pytest.raises(PageError, match=f"truncated: {size} of {PAGE_BYTES} bytes"):
            read_page(str(tmp_path), name)
        answer = child.ask(2)
        assert answer == {"intact": False, "listed": True}
        with pytest.raises(PageError):
            read_page(str(tmp_path), name)


def cut_and_grow(page: Path) -> None:
    os.truncate(page, 0)
    os.truncate(page, PAGE_BYTES)


def fill_with_noise(page: Path) -> None:
    with page.open("r+b") as file:
        file.write(os.urandom(PAGE_BYTES))


def lose_the_newest_description(page: Path) -> None:
    with page.open("r+b") as file:
        for offset in SLOT_OFFSETS:
            file.seek(offset + 20)
            file.write(b"\x00" * 8)


def change_the_header(page: Path) -> None:
    with page.open("r+b") as file:
        file.seek(HEADER_NUMBER_COUNT * 8)
        file.write(b"\x00" * 8)


@pytest.mark.parametrize(
    "damage",
    [cut_and_grow, fill_with_noise, lose_the_newest_description, change_the_header],
)
def test_a_page_that_somebody_wrote_into_is_known_to_its_writer(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    page = new_page(tmp_path)
    page.write_description({"n": 2})
    page.write_numbers(numbers(heartbeat=3))
    page.header[HEADER_COLLECTING_SINCE_NS] = 9
    assert page.is_intact()
    damage(Path(page.path))
    assert not page.is_intact()
    with pytest.raises(PageError):
        read_page(str(tmp_path), page.name)


def test_a_removed_page_is_missed_by_its_writer(tmp_path: Path) -> None:
    page = new_page(tmp_path)
    assert page.is_listed()
    os.unlink(page.path)
    with pytest.raises(FileNotFoundError):
        read_page(str(tmp_path), page.name)
    assert not page.is_listed()
    page.write_numbers(numbers())
    Path(page.path).write_bytes(b"another's")
    assert not page.is_listed()


def test_a_page_that_was_given_up_is_gone_and_never_written_into_again(tmp_path: Path) -> None:
    page = new_page(tmp_path)
    page.discard()
    assert os.listdir(tmp_path) == []
    # The number of its descriptor is the next file's now.
    with (tmp_path / "others").open("w+b") as others:
        with pytest.raises(OSError, match="descriptor"):
            page.write_numbers(numbers())
        page.discard()
        others.write(b"still open")
    assert (tmp_path / "others").read_bytes() == b"still open"


def test_a_file_of_others_under_the_same_name_is_not_removed(tmp_path: Path) -> None:
    page = new_page(tmp_path)
    os.unlink(page.path)
    Path(page.path).write_bytes(b"another's")
    page.discard()
    assert Path(page.path).read_bytes() == b"another's"


@in_own_process
def test_pages_that_were_given_up_leave_no_descriptor_and_no_map(tmp_path: Path) -> None:
    new_page(tmp_path).discard()

    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count(".page")

    before = held()
    for _ in range(100):
        new_page(tmp_path).discard()
    assert held() == before


# --- what may lie there instead of a page ---

NAME = "worker-dp0-r0-1700000000-0123abcd.page"


def random_bytes(path: Path) -> None:
    path.write_bytes(os.urandom(PAGE_BYTES))


def zeros(path: Path) -> None:
    path.write_bytes(bytes(PAGE_BYTES))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def sparse_and_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.mkdir()


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path may be 107 bytes long
        try:
            listener.bind(path.name)
        finally:
            os.chdir(here)


def link_to_a_page(path: Path) -> None:
    elsewhere = path.parent / "elsewhere"
    elsewhere.mkdir()
    path.symlink_to(new_page(elsewhere).path)


def link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


STRANGERS = [
    *(random_bytes, zeros, empty, sparse_and_huge, pipe, directory, unix_socket),
    *(link_to_a_page, link_to_a_device, link_to_itself),
]


@pytest.mark.parametrize("make", STRANGERS)
def test_what_is_no_page_is_an_error_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / NAME)
    began = time.monotonic()
    with pytest.raises((PageError, OSError)):
        read_page(str(tmp_path), NAME, after=(0, 0))
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("make", STRANGERS)
def test_what_is_no_page_keeps_nobody_from_tidying_up(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / NAME)
    dead = new_page(tmp_path)
    os.close(dead.fd)
    remove_dead_pages(str(tmp_path), "worker", 0, 0)
    assert dead.name not in os.listdir(tmp_path)


def test_a_page_of_another_format_is_told_with_both_versions(tmp_path: Path) -> None:
    page = new_page(tmp_path)
    os.pwrite(page.fd, struct.pack("<q", 2), 8)
    with pytest.raises(PageError, match="a page of format 2; this sidecar reads format 1"):
        read_page(str(tmp_path), page.name)


def test_a_name_longer_than_any_file_has_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="name too long"):
        read_page(str(tmp_path), "x" * 5000)
    with pytest.raises(OSError, match="name too long"):
        create_page(str(tmp_path), "x" * 5000)
    assert os.listdir(tmp_path) == []


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, as run directories are, where the machine has one."""
    there = Path("/dev/shm")
    if not os.access(there, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=there, prefix="gc-sidecar-test-") as directory:
        yield Path(directory)


def test_pages_are_found_among_10000_foreign_files(memory_path: Path) -> None:
    tmp_path = memory_path
    names = ["x" * 255, ".page", "page", NAME + ".tmp", "." + NAME, NAME.upper(), "board.json"]
    names += [f"worker-dp0-r0-{number}-0123abc.page" for number in range(10_000 - len(names))]
    for name in names:
        os.close(os.open(tmp_path / name, os.O_CREAT | os.O_WRONLY))
    (tmp_path / os.fsdecode(b"\xff\xfe.page")).touch()
    ours = [new_page(tmp_path, rank=rank).name for rank in range(3)]
    began = time.monotonic()
    assert list_pages(str(tmp_path)) == sorted(ours)
    assert time.monotonic() - began < 3


def test_a_flood_of_names_like_pages_is_cut_off(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / f"worker-dp0-r0-{number}-0123abcd.page").touch()
    assert len(list_pages(str(tmp_path), limit=20)) == 20
    assert len(list_pages(str(tmp_path))) == 50


def test_a_missing_run_directory_is_an_oserror_for_readers(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list_pages(str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError):
        read_page(str(tmp_path / "missing"), NAME)


# --- agents of other versions ---


def say_how_many_numbers(page: PageWriter, count: int) -> None:
    os.pwrite(page.fd, struct.pack("<q", count), HEADER_NUMBER_COUNT * 8)


def test_numbers_that_an_older_agent_does_not_have_are_not_known(tmp_path: Path) -> None:
    page = new_page(tmp_path)
    page.write_numbers(numbers(**dict.fromkeys(NUMBER_NAMES, 7)))
    say_how_many_numbers(page, len(NUMBER_NAMES) - 2)
    read = read_page(str(tmp_path), page.name).numbers
    assert tuple(read) == NUMBER_NAMES
    assert list(read.values()) == [7] * (len(NUMBER_NAMES) - 2) + [None, None]


def test_numbers_of_an_agent_from_before_the_rings_are_no_reason_to_read_these(
    tmp_path: Path,
) -> None:
    page = new_page(tmp_path)
    page.write_ring(FULL_RING_OFFSET, ring_of((1, 5, 9 << 8, 0)))
    page.write_numbers(numbers(full_ring_next=2, young_ring_next=2))
    say_how_many_numbers(page, NUMBER_INDEX["full_ring_next"])
    content = read_page(str(tmp_path), page.name, after=(0, 0))
    assert content.full_pauses == ()


def test_of_a_newer_agent_the_numbers_that_are_known_are_read(tmp_path: Path) -> None:
    page = new_page(tmp_path)
    known = numbers(**{name: index for index, name in enumerate(NUMBER_NAMES)})
    page.write_numbers(known.tobytes() + struct.pack("<3q", -1, -2, -3))
    say_how_many_numbers(page, len(NUMBER_NAMES) + 3)
    read = read_page(str(tmp_path), page.name).numbers
    assert read == {name: index for index, name in enumerate(NUMBER_NAMES)}


@pytest.mark.parametrize(
    "count", [0, -1, (SLOT_OFFSETS[0] - NUMBERS_OFFSET) // 8 + 1, 1 << 62, -(1 << 63)]
)
def test_more_numbers_than_there_is_room_for_or_none_are_damage(tmp_path: Path, count: int) -> None:
    page = new_page(tmp_path)
    page.write_numbers(numbers())
    say_how_many_numbers(page, count)
    with pytest.raises(PageError, match=f"damaged: its header says that it has {count} numbers"):
        read_page(str(tmp_path), page.name)


# --- only the records that came since ---


class Readings:
    """What the reader asked its files for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes_at: list[tuple[int, int]] = []
        pread = os.pread

        def noting(fd: int, size: int, offset: int) -> bytes:
            self.sizes_at.append((size, offset))
            return pread(fd, size, offset)

        monkeypatch.setattr(os, "pread", noting)

    def of_rings(self) -> list[tuple[int, int]]:
        """Records and the first one's slot, for each reading since the last time."""
        told = [
            (size // 8 / RECORD_WORDS, (offset - FULL_RING_OFFSET) // 8 / RECORD_WORDS)
            for size, offset in self.sizes_at
            if offset >= FULL_RING_OFFSET
        ]
        self.sizes_at.clear()
        return [(int(records), int(slot)) for records, slot in told]


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Readings:
    return Readings(monkeypatch)


def full_ring_up_to(page: PageWriter, newest: int, *, told: int | None = None) -> None:
    """A page whose ring of full collections has come to `newest`, or which says that it has come to `told`."""
    oldest = max(1, newest - RING_RECORDS + 1)
    ring = ring_of(*((n, n, n << 8 | 2 << 4, n) for n in range(oldest, newest + 1)))
    page.write_ring(FULL_RING_OFFSET, ring)
    page.write_numbers(numbers(full_ring_next=(newest if told is None else told) + 1))


@pytest.mark.parametrize(
    ("newest", "last", "expected", "reads"),
    [
        (7, 0, range(1, 8), [(7, 1)]),
        (7, 4, range(5, 8), [(3, 5)]),
        (7, 6, range(7, 8), [(1, 7)]),
        (7, 7, (), []),
        (RING_RECORDS - 1, 0, range(1, RING_RECORDS), [(RING_RECORDS - 1, 1)]),
        # Round the end of the ring.
        (RING_RECORDS, 1020, range(1021, 1025), [(3, 1021), (1, 0)]),
        (RING_RECORDS + 5, 1020, range(1021, 1030), [(3, 1021), (6, 0)]),
        (RING_RECORDS + 5, 1023, range(1024, 1030), [(6, 0)]),
        # Exactly as many as there is room for, and one more.
        (2000, 976, range(977, 2001), [(47, 977), (977, 0)]),
        (2000, 975, range(977, 2001), [(47, 977), (977, 0)]),
        (10_000, 0, range(8977, 10_001), [(239, 785), (785, 0)]),
        (10 * RING_RECORDS - 1, 0, range(9216, 10_240), [(RING_RECORDS, 0)]),
    ],
)
def test_exactly_the_records_that_came_since_are_read(
    tmp_path: Path,
    readings: Readings,
    newest: int,
    last: int,
    expected: range,
    reads: list[tuple[int, int]],
) -> None:
    page = new_page(tmp_path)
    full_ring_up_to(page, newest)
    content = read_page(str(tmp_path), page.name, after=(last, 0))
    assert [pause.sequence for pause in content.full_pauses] == list(expected)
    assert content.full_pauses == tuple(Pause(n, n, n, 2, "auto", n) for n in expected)
    assert content.young_pauses == ()
    assert readings.of_rings() == reads


def test_the_two_rings_are_followed_apart(tmp_path: Path) -> None:
    page = new_page(tmp_path)
    page.write_ring(FULL_RING_OFFSET, ring_of((1, 5, 9 << 8 | 2 << 4, 0)))
    page.write_ring(YOUNG_RING_OFFSET, ring_of(*((n, 6, 9 << 8, 0) for n in range(1, 10))))
    page.write_numbers(numbers(full_ring_next=3, young_ring_next=11))
    content = read_page(str(tmp_path), page.name, after=(0, 7))
    assert [pause.sequence for pause in content.full_pauses] == [1]
    assert [pause.sequence for pause in content.young_pauses] == [8, 9]


def test_without_being_asked_for_records_no_ring_is_read(
    tmp_path: Path, readings: Readings
) -> None:
    page = new_page(tmp_path)
    full_ring_up_to(page, 5)
    content = read_page(str(tmp_path), page.name)
    assert (content.full_pauses, content.young_pauses) == ((), ())
    assert readings.of_rings() == []


@pytest.mark.parametrize("following", [NONE, -(1 << 63) + 1, -1, 0, 1, 4, 5])
def test_a_page_that_has_come_no_further_or_back_has_nothing_new(
    tmp_path: Path, readings: Readings, following: int
) -> None:
    page = new_page(tmp_path)
    page.write_ring(FULL_RING_OFFSET, ring_of(*((n, n, n << 8, n) for n in range(1, 6))))
    page.write_numbers(numbers(full_ring_next=following))
    content = read_page(str(tmp_path), page.name, after=(4, 0))
    assert content.full_pauses == ()
    assert readings.of_rings() == []


@pytest.mark.parametrize("told", [1 << 62, (1 << 63) - 2])
def test_a_page_that_boasts_costs_no_more_than_one_ring(
    tmp_path: Path, readings: Readings, told: int
) -> None:
    page = new_page(tmp_path)
    full_ring_up_to(page, 3000, told=told)
    content = read_page(str(tmp_path), page.name, after=(2999, 0))
    assert content.full_pauses == ()
    assert sum(records for records, _ in readings.of_rings()) == RING_RECORDS


def test_a_page_that_is_truncated_before_its_ring_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = new_page(tmp_path)
    full_ring_up_to(page, 1000)
    pread = os.pread

    def truncating(fd: int, size: int, offset: int) -> bytes:
        if offset >= FULL_RING_OFFSET:
            os.truncate(page.path, FULL_RING_OFFSET + 100)
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", truncating)
    with pytest.raises(PageError, match="truncated while it was read"):
        read_page(str(tmp_path), page.name, after=(0, 0))


# --- damage in the middle ---


def test_a_torn_description_leaves_the_one_before(tmp_path: Path) -> None:
    page = new_page(tmp_path)
    for number in range(10):
        page.write_description({"n": number, "text": "x" * random.randrange(2000)})
        page.write_description({"n": "newest", "text": "y" * 2000})
        slot = SLOT_OFFSETS[1 - page._slot]
        length = len(page._newest)
        # Killed in the middle of the write: the rest is what stood there before, here something else.
        written = random.randrange(length)
        os.pwrite(page.fd, b"\x01" * (length - written), slot + written)
        assert read_page(str(tmp_path), page.name).description["n"] == number


def test_a_description_that_is_still_json_but_not_as_it_was_written_is_passed_over(
    tmp_path: Path,
) -> None:
    page = new_page(tmp_path)
    page.write_description({"mode": "off"})
    page.write_description({"mode": "freeze"})
    slot = SLOT_OFFSETS[1 - page._slot]
    os.pwrite(page.fd, b"x", slot + page._newest.index(b"freeze"))
    assert read_page(str(tmp_path), page.name).description == {"mode": "off"}


def test_no_valid_description_is_an_error_that_says_so(tmp_path: Path) -> None:
    page = create_page(str(tmp_path), page_name("worker", 0, 0, 1))
    with pytest.raises(PageError, match="no valid description"):
        read_page(str(tmp_path), page.name)
    for value in ([1], 1, "x", None):  # valid JSON with the right CRC, but not a description
        os.pwrite(page.fd, encode_slot(5, value), SLOT_OFFSETS[0])  # type: ignore[arg-type]
        with pytest.raises(PageError, match="no valid description"):
            read_page(str(tmp_path), page.name)
    for body in (b"", b"{", b"\xff\xfe{}", b"[" * 4000, b'{"n":' + b"9" * 4070 + b"}"):
        # No JSON at all, with the right CRC.
        slot = struct.pack("<QII", 7, len(body), zlib.crc32(body, 7)) + body
        os.pwrite(page.fd, slot, SLOT_OFFSETS[1])
        with suppress(PageError):
            assert read_page(str(tmp_path), page.name).description.keys() == {"n"}


@pytest.mark.parametrize("word", range(RECORD_WORDS))
def test_a_record_that_changed_half_way_is_left_out_and_counted(tmp_path: Path, word: int) -> None:
    page = new_page(tmp_path)
    good = [(number, 10 * number, number << 8 | 2 << 4, 3) for number in range(1, 6)]
    ring = ring_of(*good)
    ring[3 * RECORD_WORDS + word] ^= 1 << 20
    page.write_ring(FULL_RING_OFFSET, ring)
    page.write_numbers(numbers(full_ring_next=6))
    content = read_page(str(tmp_path), page.name, after=(0, 0))
    assert [pause.sequence for pause in content.full_pauses] == [1, 2, 4, 5]


@pytest.mark.parametrize(
    "forged",
    [
        (3, 1, 5 << 8 | 3 << 4, 0),  # no such GC generation
        (3, 1, 5 << 8 | 2 << 4 | 5, 0),  # no such trigger
        (3, 1, -1, 0),
        (3 - RING_RECORDS, 1, 5 << 8, 0),
        (3 + RING_RECORDS, 1, 5 << 8, 0),
    ],
)
def test_a_record_that_cannot_be_is_left_out_although_its_check_fits(
    tmp_path: Path, forged: tuple[int, int, int, int]
) -> None:
    page = new_page(tmp_path)
    page.write_ring(YOUNG_RING_OFFSET, ring_of((2, 1, 5 << 8, 0), forged, (4, 1, 5 << 8, 0)))
    page.write_numbers(numbers(young_ring_next=5))
    content = read_page(str(tmp_path), page.name, after=(0, 1))
    assert [pause.sequence for pause in content.young_pauses] == [2, 4]


def test_a_record_in_another_ones_place_is_left_out() -> None:
    ring = ring_of((3, 1, 5 << 8, 0))
    records = 2 * ring[3 * RECORD_WORDS : 4 * RECORD_WORDS].tobytes()
    assert [pause.sequence for pause in decode_records(records, first=3)] == [3]
    assert [pause.sequence for pause in decode_records(records, first=2)] == [3]
    assert decode_records(records, first=1) == ()


def test_noise_is_no_ring(tmp_path: Path) -> None:
    page = new_page(tmp_path)
    page.write_numbers(numbers(full_ring_next=5000))
    for _ in range(20):
        page.write_ring(FULL_RING_OFFSET, memoryview(os.urandom(RING_BYTES)))
        content = read_page(str(tmp_path), page.name, after=(4500, 0))
        assert content.full_pauses == ()


def test_no_damage_whatever_raises_anything_but_a_page_error(tmp_path: Path) -> None:
    chance = random.Random(20)
    page = new_page(tmp_path)
    page.write_description({"n": "x" * 500})
    page.write_numbers(numbers(heartbeat=5, full_ring_next=2))
    page.write_ring(FULL_RING_OFFSET, ring_of((1, 5, 9 << 8 | 2 << 4, 0)))
    whole = Path(page.path).read_bytes()
    heads = [0, 8, 24, NUMBERS_OFFSET, *SLOT_OFFSETS, *(offset + 8 for offset in SLOT_OFFSETS)]
    heads += [NUMBERS_OFFSET + 8 * NUMBER_INDEX[f"{ring}_ring_next"] for ring in ("full", "young")]
    edges = [
        b"\x00" * 8,
        b"\xff" * 8,
        b"\xff" * 7 + b"\x7f",
        b"\x00" * 7 + b"\x80",
        b"\x01" + b"\x00" * 7,
    ]
    read, refused = 0, 0
    run_dir = str(tmp_path)
    for number in range(20_000):
        changes: list[tuple[int, int]] = []
        for _ in range(chance.randrange(1, 4)):
            where = chance.choice(heads) if chance.random() < 0.5 else chance.randrange(PAGE_BYTES)
            what = chance.choice(edges) if chance.random() < 0.5 else chance.randbytes(8)
            size = chance.randrange(1, 9)
            changes.append((where, os.pwrite(page.fd, what[:size], where)))
        if number % 50 == 0:
            os.ftruncate(page.fd, chance.randrange(PAGE_BYTES))
        try:
            content = read_page(run_dir, page.name, after=(0, 0) if number % 4 == 0 else None)
            assert isinstance(content, PageContent)
            read += 1
        except PageError:
            refused += 1
        for where, size in changes:
            os.pwrite(page.fd, whole[where : where + size], where)
        if number % 50 == 0:
            os.pwrite(page.fd, whole, 0)
        os.ftruncate(page.fd, PAGE_BYTES)
    assert read > 2_000
    assert refused > 2_000


# --- descriptions that are too long ---


def test_a_description_that_is_too_long_keeps_its_shape_and_loses_its_longest_texts(
    tmp_path: Path,
) -> None:
    page = new_page(tmp_path)
    detail = "something went wrong, and this is what: " + "x" * 5000
    description = {
        "identity": {"roles": ["engine_core", "worker"], "pid": 4_194_304, "page_error": detail},
        "topology": {"dp_ranks": list(range(256)), "workers": 8},
        "state": {"mode": "freeze", "reason": {"code": "rss_growth", "detail": detail}},
    }
    page.write_description(description)
    read = read_page(str(tmp_path), page.name).description
    short = read["identity"].pop("page_error")
    assert short.startswith("something went wrong, and this is what: xxx")
    assert short.endswith("...")
    assert read["state"]["reason"].pop("detail") == short
    del description["identity"]["page_error"]  # type: ignore[attr-defined]
    del description["state"]["reason"]["detail"]  # type: ignore[index]
    assert read == description


@pytest.mark.parametrize("letter", ["x", "ä", "🙂", '"', "\\", "\x01", "\udcff"])
def test_every_text_may_be_too_long_at_once(tmp_path: Path, letter: str) -> None:
    page = new_page(tmp_path)
    longest = letter * 4096
    operation_id = "o" * 64
    texts = {f"text{number}": longest for number in range(8)}
    description = {**texts, "operation_id": operation_id, "dp_ranks": tuple(range(200))}
    page.write_description(description)
    read = read_page(str(tmp_path), page.name).description
    assert read["operation_id"] == operation_id
    assert read["dp_ranks"] == list(range(200))
    assert set(read) == set(description)


def test_one_that_does_not_fit_at_all_leaves_the_one_before(tmp_path: Path) -> None:
    page = new_page(tmp_path)
    with pytest.raises(PageError, match="does not fit"):
        page.write_description({"dp_ranks": list(range(100_000))})
    assert read_page(str(tmp_path), page.name).description == DESCRIPTION
    assert page.is_intact()
    page.write_description({"n": 2})
    assert read_page(str(tmp_path), page.name).description == {"n": 2}


def test_one_that_just_fits_is_not_touched() -> None:
    longest = "x" * (SLOT_BYTES - 16 - len(json.dumps({"t": ""}, separators=(",", ":"))))
    assert longest.encode() in encode_slot(1, {"t": longest})
    assert b"..." in encode_slot(1, {"t": longest + "x"})


# --- no room ---


def refused(run_dir: Path, reason: int) -> None:
    before = os.listdir(run_dir) if run_dir.exists() else None
    descriptors = os.listdir("/proc/self/fd")
    why = None
    try:
        new_page(run_dir)
    except OSError as error:
        why = error.errno
    assert why == reason
    assert (os.listdir(run_dir) if run_dir.exists() else None) == before
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


@in_own_process
def test_where_files_may_not_be_so_long_there_is_no_page_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE_BYTES - 1, resource.RLIM_INFINITY))
    refused(tmp_path, errno.EFBIG)


@pytest.mark.usefixtures("tmpfs_may_be_mounted")
@in_own_process
def test_on_a_full_tmpfs_there_is_no_page_and_nothing_is_left(tmp_path: Path) -> None:
    mount_for_this_process(tmp_path, "-o", "size=64k")
    refused(tmp_path, errno.ENOSPC)


@pytest.mark.usefixtures("tmpfs_may_be_mounted")
@in_own_process
def test_a_page_on_a_tmpfs_that_fills_up_later_is_written_as_before(tmp_path: Path) -> None:
    mount_for_this_process(tmp_path, "-o", "size=256k")
    page = new_page(tmp_path)
    filler = os.open(tmp_path / "filler", os.O_CREAT | os.O_WRONLY)
    with suppress(OSError):
        while True:
            os.write(filler, bytes(4096))
    assert shutil.disk_usage(tmp_path).free == 0
    page.header[HEADER_COLLECTING_SINCE_NS] = 1  # on a sparse file this would be SIGBUS
    page.write_numbers(numbers(heartbeat=2))
    for offset in (FULL_RING_OFFSET, YOUNG_RING_OFFSET):
        page.write_ring(offset, ring_of((1, 5, 9 << 8, 0)))
    page.write_numbers(numbers(full_ring_next=2, young_ring_next=2))
    page.write_description({"n": 1})
    page.write_description({"n": 2})
    content = read_page(str(tmp_path), page.name, after=(0, 0))
    assert content.description == {"n": 2}
    assert len(content.full_pauses) == len(content.young_pauses) == 1


@pytest.mark.usefixtures("directory_may_be_unwritable")
@in_own_process
def test_in_a_directory_that_cannot_be_written_there_is_no_page(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        mount_for_this_process(tmp_path, "-o", "ro")
        refused(tmp_path, errno.EROFS)
    else:
        tmp_path.chmod(0o500)
        refused(tmp_path, errno.EACCES)
    remove_dead_pages(str(tmp_path), "worker", 0, 0)


def test_without_a_directory_there_is_no_page(tmp_path: Path) -> None:
    refused(tmp_path / "missing", errno.ENOENT)
    remove_dead_pages(str(tmp_path / "missing"), "worker", 0, 0)


def test_a_name_that_is_taken_is_not_written_into(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / f".{NAME}.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        create_page(str(tmp_path), NAME)
    assert victim.read_bytes() == b"mine"


# --- pages of earlier processes ---


def test_dead_pages_of_the_same_role_and_rank_are_removed_and_no_others(tmp_path: Path) -> None:
    def dead(role: str, dp_rank: int, rank: int) -> str:
        page = create_page(str(tmp_path), page_name(role, dp_rank, rank, 1))
        os.close(page.fd)
        return page.name

    with Child(hold_a_page, run_dir=tmp_path) as child:
        living = child.hear()
        gone = [dead("worker", 0, 0), dead("worker", 0, 0)]
        others = [dead("worker", 0, 1), dead("worker", 1, 0), dead("engine_core", 0, 0)]
        (tmp_path / "worker-dp0-r0-notes.txt").touch()
        remove_dead_pages(str(tmp_path), "worker", 0, 0)
        left = set(os.listdir(tmp_path))
        assert left == {living, *others, "worker-dp0-r0-notes.txt"}
        assert not left & set(gone)
        assert read_page(str(tmp_path), living).alive


# --- written and read at the same time ---


def write_numbers_and_records(run_dir: str) -> None:
    page = new_page(run_dir)
    say(page.name)
    patterns = [numbers(**dict.fromkeys(NUMBER_NAMES, value)) for value in (0x0101010101010101, -2)]
    for number, words in enumerate(patterns, 1):
        words[NUMBER_INDEX["full_ring_next"]] = number * RING_RECORDS
    rings = [
        ring_of(*((n, 7 * n, n << 8 | 2 << 4, n) for n in range(1, RING_RECORDS))),
        ring_of(*((RING_RECORDS + n, n, 5 << 8, 0) for n in range(1, RING_RECORDS))),
    ]
    while True:
        for words, ring in zip(patterns, rings, strict=True):
            page.write_numbers(words)
            page.write_ring(FULL_RING_OFFSET, ring)
            page.write_description({"n": words[0], "text": "x" * (words[0] & 1023)})


def test_no_number_is_ever_torn_and_no_record_is_ever_mixed(tmp_path: Path) -> None:
    with Child(write_numbers_and_records, run_dir=tmp_path) as child:
        name = child.hear()
        wait_until(lambda: read_page(str(tmp_path), name).numbers["heartbeat"])
        end = time.monotonic() + 1.0
        seen: set[int | None] = set()
        kinds: set[bool] = set()
        # Until both have been seen of each, and for a while in any case.
        while time.monotonic() < end or len(seen) < 2 or len(kinds) < 2:
            assert time.monotonic() < end + 30
            for _ in range(100):
                read = read_page(str(tmp_path), name).numbers
                seen.update(value for key, value in read.items() if key != "full_ring_next")
            for pause in read_page(str(tmp_path), name, after=(0, 0)).full_pauses:
                first = pause.sequence < RING_RECORDS
                kinds.add(first)
                expected: Any = (
                    (7 * pause.sequence, pause.sequence, pause.sequence)
                    if first
                    else (pause.sequence - RING_RECORDS, 5, 0)
                )
                assert (pause.start_ns, pause.duration_ns, pause.collected_objects) == expected
        assert seen == {0x0101010101010101, -2}
        assert kinds == {True, False}


def new_publisher(run_dir: Path | str, meter: PauseMeter) -> Publisher:
    """A publisher whose page is there, with a description that never changes."""
    publisher = Publisher(str(run_dir), meter, lambda: None, lambda: DESCRIPTION, lambda: 1)
    publisher.open("worker", 0, 0, 1)
    assert publisher.name is not None
    return publisher


def collection(meter: PauseMeter, gc_generation: int) -> None:
    info = {"generation": gc_generation, "collected": 0, "uncollectable": 0}
    meter.callback("start", info)
    meter.callback("stop", info)


class CollectingPublisher(Publisher):
    """A publisher whose description tells how many full collections were asked for and are done."""

    def __init__(self, run_dir: Path) -> None:
        meter = PauseMeter()
        words, count = meter.words, NUMBER_INDEX["gen2_count"]
        super().__init__(
            str(run_dir), meter, lambda: None, lambda: {"done": words[count]}, lambda: words[count]
        )
        self.collect = functools.partial(collection, meter, 2)
        self.open("worker", 0, 0, 1)

    def assert_counts_what_it_tells_of(self) -> int:
        content = read_page(str(self.run_dir), str(self.name), (0, 0))
        done, count = content.description["done"], content.numbers["gen2_count"]
        assert done <= (count or 0) <= len(content.full_pauses)
        return int(done)


def test_a_page_that_tells_of_an_operation_counts_its_collection_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = CollectingPublisher(tmp_path)
    write = os.pwrite

    def read_after_each(fd: int, data: bytes, offset: int) -> int:
        written = write(fd, data, offset)
        publisher.assert_counts_what_it_tells_of()
        publisher.collect()  # as another thread would: it is told of the next time
        return written

    monkeypatch.setattr(os, "pwrite", read_after_each)
    for _ in range(3):
        publisher.collect()
        publisher.publish()
    monkeypatch.undo()
    before = publisher.assert_counts_what_it_tells_of()
    publisher.collect()
    publisher.publish()
    assert publisher.assert_counts_what_it_tells_of() > before


def test_numbers_and_description_say_whether_they_were_published_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = CollectingPublisher(tmp_path)
    publisher.publish()
    write_description = PageWriter.write_description
    seen = []

    def are_together() -> bool:
        content = read_page(str(tmp_path), str(publisher.name))
        return content.numbers["changes"] == content.description["changes"]

    def looked_at(page: PageWriter, described: dict[str, Any]) -> None:
        seen.append(are_together())
        write_description(page, described)
        seen.append(are_together())

    monkeypatch.setattr(PageWriter, "write_description", looked_at)
    publisher.collect()
    publisher.publish()
    assert seen == [False, True]


def test_a_reader_that_is_slow_finds_the_collection_of_every_operation_that_it_reads_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = CollectingPublisher(tmp_path)
    read = os.pread
    is_reading = True

    def publish_before_each(fd: int, size: int, offset: int) -> bytes:
        nonlocal is_reading
        if is_reading:
            is_reading = False  # the publisher reads its page, too
            publisher.collect()
            publisher.publish()
            is_reading = True
        return read(fd, size, offset)

    monkeypatch.setattr(os, "pread", publish_before_each)
    for _ in range(3):
        publisher.assert_counts_what_it_tells_of()


def test_a_record_that_comes_while_the_page_is_written_is_told_of_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = PauseMeter()
    publisher = new_publisher(tmp_path, meter)
    write_ring = PageWriter.write_ring

    def collecting_meanwhile(page: PageWriter, offset: int, ring: memoryview) -> None:
        write_ring(page, offset, ring)
        collection(meter, 2)
        collection(meter, 0)

    def told(after: tuple[int, int]) -> tuple[list[int], list[int]]:
        content = read_page(str(tmp_path), publisher.name or "", after)
        full, young = content.full_pauses, content.young_pauses
        return [p.sequence for p in full], [p.sequence for p in young]

    collection(meter, 2)
    collection(meter, 0)
    with monkeypatch.context() as patch:
        patch.setattr(PageWriter, "write_ring", collecting_meanwhile)
        publisher.publish()
    assert told(after=(0, 0)) == ([1], [1])
    publisher.publish()
    assert told(after=(1, 1)) == ([2, 3], [2, 3])


def test_a_collection_that_runs_at_a_publication_is_told(tmp_path: Path) -> None:
    meter = PauseMeter()
    publisher = new_publisher(tmp_path, meter)

    def told() -> int | None:
        publisher.publish()
        return read_page(str(tmp_path), publisher.name or "").numbers["running_since_ns"]

    assert told() == 0
    before_ns = time.monotonic_ns()
    meter.callback("start", {"generation": 1, "collected": 0, "uncollectable": 0})
    assert before_ns <= (told() or 0) <= time.monotonic_ns()
    meter.callback("stop", {"generation": 1, "collected": 0, "uncollectable": 0})
    assert told() == 0


def test_counts_and_records_are_of_the_same_collections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = PauseMeter()
    publisher = new_publisher(tmp_path, meter)
    collection(meter, 2)
    # Another thread is in the middle of a callback: it has counted, and has not recorded yet.
    meter.words[NUMBER_INDEX["gen2_count"]] += 1
    waited: list[float] = []

    def go_on(wait_s: float) -> None:
        waited.append(wait_s)
        meter.words[NUMBER_INDEX["full_ring_next"]] += 1

    monkeypatch.setattr("gc_sidecar_agent.publisher.time.sleep", go_on)
    publisher.publish()
    numbers = read_page(str(tmp_path), publisher.name or "").numbers
    assert (numbers["gen2_count"], numbers["full_ring_next"]) == (2, 3)
    assert len(waited) == 1


@pytest.mark.parametrize("meanwhile", [0, 63, 64, 100, 2 * RING_RECORDS])
def test_records_that_are_overwritten_while_they_are_brought_over_are_lost_and_never_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: int
) -> None:
    meter = PauseMeter()
    publisher = new_publisher(tmp_path, meter)
    for _ in range(RING_RECORDS):
        collection(meter, 2)
    told: list[int] = []

    class Collecting(list[int]):
        def __getitem__(self, slot: Any) -> Any:
            start = super().__getitem__(slot)
            if not told:
                told.append(start)
                for _ in range(meanwhile):
                    collection(meter, 2)
            return start

    meter.full_ring.starts = Collecting(meter.full_ring.starts)
    publisher.publish()
    content = read_page(str(tmp_path), publisher.name or "", after=(0, 0))
    # Room for 64 more; one beyond that may be half written when it is looked at.
    lost = min(max(0, meanwhile - 63), RING_RECORDS)
    assert told
    assert [p.sequence for p in content.full_pauses] == list(range(1 + lost, RING_RECORDS + 1))
    assert all(p.gc_generation == 2 and p.start_ns > 0 for p in content.full_pauses)
    publisher.publish()
    later = read_page(str(tmp_path), publisher.name or "", after=(RING_RECORDS, 0))
    assert len(later.full_pauses) == min(meanwhile, RING_RECORDS)


def collect_and_publish_for_ever(run_dir: str) -> None:
    meter = PauseMeter()
    publisher = new_publisher(run_dir, meter)
    sys.setswitchinterval(1e-5)  # so that the two threads meet at every place
    meter.attach()
    gc.freeze()

    def publish() -> None:
        while True:
            publisher.publish()

    threading.Thread(target=publish, daemon=True).start()
    say(publisher.name)
    while True:
        for _ in range(random.randrange(5)):
            gc.collect(0)
        gc.collect(2)
        time.sleep(0)


def next_sequence(page: Path, ring: str) -> int:
    """What a page tells of the next record once all that stands on it now has been told of."""

    def numbers() -> dict[str, int | None]:
        return read_page(str(page.parent), page.name).numbers

    # Rings are published before numbers: this publication's may be there already, and half of the next one's.
    heartbeat = (numbers()["heartbeat"] or 0) + 2
    wait_until(lambda: (numbers()["heartbeat"] or 0) >= heartbeat, what="another publication")
    return numbers()[f"{ring}_ring_next"] or 0


def test_no_record_that_the_numbers_tell_of_is_missing_while_others_come(tmp_path: Path) -> None:
    with Child(collect_and_publish_for_ever, run_dir=tmp_path) as child:
        name = child.hear()
        last = [0, 0]
        records = 0
        readings_with_news = 0
        end = time.monotonic() + 60
        while readings_with_news < 1_000:
            assert time.monotonic() < end
            content = read_page(str(tmp_path), name, after=(last[0], last[1]))
            for index, (ring, pauses) in enumerate(
                [("full", content.full_pauses), ("young", content.young_pauses)]
            ):
                following = content.numbers[f"{ring}_ring_next"] or 0
                there = {pause.sequence for pause in pauses}
                missing = [n for n in range(last[index] + 1, following) if n not in there]
                if missing:
                    # Overwritten meanwhile, here or in the process, for one of us did not run for a while. How
                    # many came, the next publications tell; one more may have been half written.
                    newer = next_sequence(tmp_path / name, ring)
                    assert missing[-1] <= newer - RING_RECORDS
                records += len(there)
                readings_with_news += bool(there)
                last[index] = following - 1
        assert records > 2_000


def test_locks_are_what_this_test_thinks_they_are() -> None:
    # The reader packs a struct flock by hand; its size is the platform's.
    assert struct.calcsize("hhqqi4x") == 32
    assert sys.platform == "linux"
    assert fcntl.F_UNLCK == 2
