"""A run directory with anything in it: neither sidecar nor engine ends, or leaves it by a link.

The sidecar is the real app and the engine four real agents, in tiny processes. What lies outside stays untouched
to the last time stamp.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import stat
import struct
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gc_sidecar.server.claim import CLAIM_NAME
from gc_sidecar_agent.board import BOARD_NAME, BOARD_VERSION
from gc_sidecar_agent.endpoint import TOKEN_NAME
from gc_sidecar_agent.page import MAGIC, PAGE_BYTES, VERSION, create_page, list_pages, page_name
from gc_sidecar_agent.rules import HELD_OFF
from tests.faults.controlled_time import SIDECAR_MODULES, SIDECAR_MODULES_THAT_DATE
from tests.faults.tiny_engine import PLACES, Found, Nursery, TinyEngine, nursery
from tests.faults.tiny_process import DRIFT_GRACE_S
from tests.faults.tiny_sidecar import FAST, Sidecar, kill, start_sidecar
from tests.leaving_out import leave_out
from tests.unit.agent.mounting import mount_for_this_process
from tests.unit.agent.own_process import in_own_process

PAGE_NAME = "worker-dp7-r9-1700000000-0123abcd.page"
PAGE_OF_OURS = (
    "worker-dp0-r1-1700000000-0123abcd.page"  # whose agent tidies up after those before it
)
# Under these names something is opened, read, locked or replaced.
NAMES = (PAGE_NAME, PAGE_OF_OURS, BOARD_NAME, TOKEN_NAME, CLAIM_NAME)
LONG_AGO_NS = 1_000_000_000 * 10**9
THRESHOLDS = (700, 10, 10)
# Long enough for a process to make its page anew.
PATIENT = replace(FAST, unseen_grace_s=5.0)
WITHIN_S = 20.0

# --- what lies outside, and must not be touched ---


CANARY = b"0123456789abcdef" * (PAGE_BYTES // 16)


class Outside:
    """A file and a directory beside the run directory, both very old: whoever follows a link to them is found out,
    also one who merely reads."""

    def __init__(self, where: Path) -> None:
        self.file, self.directory = where / "canary", where / "outside"
        self.directory.mkdir()
        self.file.write_bytes(CANARY)
        self.file.chmod(0o640)
        for path in (self.file, self.directory):
            os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
        self._before = self._stamps()

    def _stamps(self) -> list[tuple[int, ...]]:
        seen = [os.stat(path) for path in (self.file, self.directory)]
        return [
            (s.st_ino, s.st_mode, s.st_uid, s.st_size, s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns)
            for s in seen
        ]

    def assert_untouched(self) -> None:
        """To be called once: it looks itself."""
        assert self._stamps() == self._before
        assert self.file.read_bytes() == CANARY
        assert os.listdir(self.directory) == []


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    return Outside(tmp_path)


# --- what lies in the run directory ---

Make = Callable[[Path, Outside], None]


def link_to_a_file(path: Path, outside: Outside) -> None:
    path.symlink_to(outside.file)


def link_to_a_directory(path: Path, outside: Outside) -> None:
    path.symlink_to(outside.directory)


def link_to_nothing(path: Path, outside: Outside) -> None:
    path.symlink_to(outside.directory / "new")  # whoever creates through it makes a file outside


def link_to_itself(path: Path, _: Outside) -> None:
    path.symlink_to(path.name)


def link_to_a_device(path: Path, _: Outside) -> None:
    path.symlink_to("/dev/zero")


def pipe(path: Path, _: Outside) -> None:
    os.mkfifo(path)


def unix_socket(path: Path, _: Outside) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        directory = os.open(path.parent, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{directory}/{path.name}")  # a path of at most 107 bytes
        os.close(directory)


def device(path: Path, _: Outside) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        leave_out("only root makes devices")


def directory(path: Path, _: Outside) -> None:
    path.mkdir()
    (path / "inside").write_text("x")


def random_bytes(path: Path, _: Outside) -> None:
    path.write_bytes(os.urandom(PAGE_BYTES))


def of_another_user(path: Path, _: Outside) -> None:
    path.write_bytes(b"theirs")
    path.chmod(0o600)
    with contextlib.suppress(PermissionError):
        os.chown(path, 12345, 12345)


KINDS: tuple[Make, ...] = (
    *(link_to_a_file, link_to_a_directory, link_to_nothing, link_to_itself, link_to_a_device, pipe),
    *(unix_socket, device, directory, random_bytes, of_another_user),
)

# What the status says of each at first; of the secret nothing, for whatever can be replaced is.
SAID = {PAGE_NAME: "page_", CLAIM_NAME: "run_dir_not_claimed", BOARD_NAME: "board_unreadable"}
FILES = (random_bytes, of_another_user)  # of which a lock may be had
# Directories are not replaced: one at a time, or there is no way left to control anything.
CASES: list[tuple[Make, tuple[str, ...]]] = [
    (make, NAMES) for make in KINDS if make is not directory
]
CASES += [(directory, (name,)) for name in NAMES]


# --- the engine and the sidecar there ---


@pytest.fixture(scope="module")
def made() -> Iterator[Nursery]:
    with nursery() as one, one.time.in_force(SIDECAR_MODULES, SIDECAR_MODULES_THAT_DATE):
        yield one


@pytest.fixture
def run_dir(made: Nursery) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="run-", dir=made.directory))
    yield path
    shutil.rmtree(path, ignore_errors=True)


Do = Callable[[TinyEngine, Sidecar], Awaitable[None]]


def beside(
    made: Nursery, run_dir: Path, work: Do, has_rpc: bool = True, user: int | None = None
) -> None:
    """An engine and a sidecar in `run_dir`, while `work` is done; both are well at its end."""

    async def run() -> None:
        engine = TinyEngine(made, run_dir, Found(THRESHOLDS), has_rpc, user, GROUP)
        try:
            for place in PLACES:
                await engine.start(place)
            async with a_sidecar(engine) as sidecar:
                await work(engine, sidecar)
                assert (await sidecar.client.get("/healthz")).status_code == 200
            assert len(await engine.truth()) == len(PLACES)
        finally:
            for place in [*engine.processes]:
                engine.kill(place)

    asyncio.run(run())


@contextlib.asynccontextmanager
async def a_sidecar(engine: TinyEngine) -> AsyncIterator[Sidecar]:
    sidecar = await start_sidecar(engine, PATIENT)
    try:
        yield sidecar
    finally:
        await kill(sidecar)


async def until(what: str, condition: Callable[[], Awaitable[Any]]) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + WITHIN_S
    while not (value := await condition()):
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)
    return value


async def codes(sidecar: Sidecar) -> set[str]:
    return {reason["code"] for reason in (await sidecar.status())["reasons"]}


async def until_said(sidecar: Sidecar, code: str) -> None:
    async def said() -> bool:
        return any(each.startswith(code) for each in await codes(sidecar))

    await until(f"{code} is not said, but {await codes(sidecar)}", said)


async def until_seen(sidecar: Sidecar) -> None:
    """Until every process of the engine is seen, and the engine is reached as far as it can be."""

    async def seen() -> bool:
        status = await sidecar.status()
        states = {row["state"] for row in status["processes"]}
        return len(status["processes"]) == len(PLACES) and states == {"applied"}

    await until("the engine is seen", seen)


async def control_works(engine: TinyEngine, sidecar: Sidecar) -> None:
    """A policy, a maintenance and the way back, in every process."""
    for kind, third in (("freeze", HELD_OFF), ("maintain", HELD_OFF), ("restore", THRESHOLDS[2])):
        answer = await sidecar.client.post(f"/gc/{kind}")
        assert answer.status_code == 200, answer.text
        truth = await engine.truth()
        assert {real["thresholds"][2] for real in truth.values()} == {third}
        assert not [real for real in truth.values() if real["is_pending"]]


# --- one thing under one name ---


@pytest.mark.parametrize(("make", "names"), CASES)
def test_whatever_lies_under_a_name_is_told_and_not_followed_and_control_works(
    made: Nursery, run_dir: Path, outside: Outside, make: Make, names: tuple[str, ...]
) -> None:
    for name in names:
        make(run_dir / name, outside)
    said = {SAID[name] for name in names if name in SAID}
    if make in FILES:
        said.discard(SAID[CLAIM_NAME])

    async def work(engine: TinyEngine, sidecar: Sidecar) -> None:
        for code in said:
            await until_said(sidecar, code)
        await until_seen(sidecar)
        await control_works(engine, sidecar)

    beside(made, run_dir, work)
    outside.assert_untouched()


# --- things that others did to it ---


def newer_page(run_dir: Path) -> str:
    """One that an agent of a later release made."""
    body = bytearray(PAGE_BYTES)
    struct.pack_into("<2q", body, 0, MAGIC, VERSION + 1)
    (run_dir / PAGE_NAME).write_bytes(body)
    return "page_version"


def newer_board(run_dir: Path) -> str:
    """The same of the board."""
    (run_dir / BOARD_NAME).write_text(f'{{"version": {BOARD_VERSION + 1}}}')
    return "board_unreadable"


def many_files(run_dir: Path) -> str:
    """10,000 of them, some of which have a page's name."""
    for number in range(10_000):
        is_page = number % 50 == 0
        name = f"worker-dp1-r{number}-1700000000-0123abcd.page" if is_page else f"core.{number}"
        os.close(os.open(run_dir / name, os.O_CREAT | os.O_WRONLY, 0o644))
    return "page_truncated"


def left_by_an_earlier_pod(run_dir: Path) -> str | None:
    """Pages of a larger engine that has ended, and which had come further."""
    for rank in range(8):
        name = page_name("worker", 0, rank, 1_600_000_000)
        writer = create_page(str(run_dir), name)
        writer.write_description(an_ended_process(rank))
        writer.close()
    return None


def an_ended_process(rank: int) -> dict[str, Any]:
    identity = {
        "roles": ["worker"], "dp_rank": 0, "rank": rank, "pid": 17, "host": "earlier", "token": f"0000000{rank}",
        "started_at": 1.6e9, "python": "3.11.7", "collector": "generational", "engine": "x", "agent": "0.1.0",
        "page_error": None, "agent_error": None,
    }  # fmt: skip
    state = {"ready": True, "mode": "freeze", "generation": EARLIER_GENERATION, "owner": "earlier"}
    topology = {"dp_ranks": [0], "workers": 8, "api_servers": 1}
    return {"identity": identity, "topology": topology, "state": state}


EARLIER_GENERATION = 99


@pytest.mark.parametrize(
    "make", [newer_page, newer_board, many_files, left_by_an_earlier_pod], ids=lambda f: f.__name__
)
def test_what_others_left_there_is_told_and_control_works(
    made: Nursery, run_dir: Path, make: Callable[[Path], str | None]
) -> None:
    is_said = make(run_dir)

    async def work(engine: TinyEngine, sidecar: Sidecar) -> None:
        if is_said is not None:
            await until_said(sidecar, is_said)
        await until_seen(sidecar)
        await control_works(engine, sidecar)
        generation = (await sidecar.status())["policy"]["generation"]
        assert generation == 2 or (is_said is None and generation == EARLIER_GENERATION + 2)

    beside(made, run_dir, work)


@pytest.mark.parametrize("has_rpc", [True, False], ids=["rpc", "board"])
def test_pages_that_are_truncated_under_their_writers_come_back_and_control_works(
    made: Nursery, run_dir: Path, has_rpc: bool
) -> None:
    async def work(engine: TinyEngine, sidecar: Sidecar) -> None:
        await until_seen(sidecar)
        assert (await sidecar.client.post("/gc/freeze")).status_code == 200
        for size in (0, 4095, PAGE_BYTES // 2, PAGE_BYTES - 1):
            names = list_pages(str(run_dir))
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.truncate(run_dir / name, size)
            if (
                has_rpc
            ):  # a command over RPC looks first: its collection would store into what is gone
                answer = await sidecar.client.post("/gc/maintain")
                assert answer.status_code == 200, answer.text

            async def renewed(names: list[str] = names) -> bool:
                return len(set(list_pages(str(run_dir))) - set(names)) == len(PLACES)

            await until("every process makes a new page", renewed)
            await asyncio.gather(*(each.ask("collect") for each in engine.processes.values()))
            made.time.pass_s(
                2 * DRIFT_GRACE_S
            )  # somebody else's collections are drift, which is mended
            await until_seen(sidecar)
        assert (await sidecar.client.post("/gc/restore")).status_code == 200
        await control_works(engine, sidecar)

    beside(made, run_dir, work, has_rpc)


def test_a_run_directory_that_is_missing_and_comes_and_goes_again(
    made: Nursery, run_dir: Path
) -> None:
    run_dir.rmdir()

    async def work(engine: TinyEngine, sidecar: Sidecar) -> None:
        await until_said(sidecar, "run_dir_missing")
        for _ in range(2):
            run_dir.mkdir()
            await until_seen(sidecar)
            assert len(list_pages(str(run_dir))) == len(PLACES)
            await control_works(engine, sidecar)
            shutil.rmtree(run_dir)
            await until_said(sidecar, "run_dir_missing")

    beside(made, run_dir, work, has_rpc=False)


# --- file systems ---


def remount(path: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(path)], check=True)


def fill(path: Path) -> None:
    """Write until there is no space left."""
    with (path / "ballast").open("ab", buffering=0) as out, contextlib.suppress(OSError):
        while True:
            out.write(b"x" * 512)


@pytest.mark.usefixtures("tmpfs_may_be_mounted")
@pytest.mark.parametrize("fault", ["full", "read-only"])
@in_own_process
def test_a_file_system_that_takes_nothing_and_then_does(tmp_path: Path, fault: str) -> None:
    mount_for_this_process(tmp_path, "-o", "size=1m")

    def break_it() -> None:
        fill(tmp_path) if fault == "full" else remount(tmp_path, "ro")

    def mend_it() -> None:
        (tmp_path / "ballast").unlink() if fault == "full" else remount(tmp_path, "rw")

    async def work(engine: TinyEngine, sidecar: Sidecar) -> None:
        await until_said(sidecar, f"run_dir_{fault.replace('-', '_')}")
        assert list_pages(str(tmp_path)) == []
        assert (await sidecar.client.post("/gc/freeze")).status_code == 503  # nobody can be told
        mend_it()
        await until_seen(sidecar)
        await control_works(engine, sidecar)
        if fault == "read-only":
            return  # it cannot become so where pages are written
        assert (await sidecar.client.post("/gc/freeze")).status_code == 200
        break_it()
        await until_said(sidecar, f"run_dir_{fault.replace('-', '_')}")
        answer = await sidecar.client.post("/gc/restore?deadline_s=1")
        assert (answer.status_code, answer.json()["code"]) == (503, "board_not_written")
        # What could not be told did not happen, and what had its place is still written.
        assert {real["mode"] for real in (await engine.truth()).values()} == {"freeze"}
        await asyncio.gather(*(each.ask("collect") for each in engine.processes.values()))
        mend_it()
        await control_works(engine, sidecar)

    break_it()
    with nursery() as made:
        beside(made, tmp_path, work, has_rpc=False)


@pytest.mark.parametrize("may_write", [True, False], ids=["of its group", "closed to it"])
def test_an_engine_of_another_user(made: Nursery, run_dir: Path, may_write: bool) -> None:
    """Pods give their containers different users and one group; where that was forgotten, RPC is left."""
    if os.geteuid() != 0:
        leave_out("only root becomes another user")
    made.directory.chmod(0o711)
    os.chown(run_dir, 0, GROUP)
    run_dir.chmod(0o2770 if may_write else 0o755)

    async def work(engine: TinyEngine, sidecar: Sidecar) -> None:
        if may_write:
            await until_seen(sidecar)
            owners = {os.stat(run_dir / name).st_uid for name in list_pages(str(run_dir))}
            assert owners == {USER}
        else:
            await until_said(sidecar, "page_error")
        await control_works(engine, sidecar)

    beside(made, run_dir, work, has_rpc=not may_write, user=USER)


USER, GROUP = 12345, 54321
