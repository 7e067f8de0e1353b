"""One sidecar for a run directory: who has claimed it, until when, and what a second one is told."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from gc_sidecar.server.claim import CLAIM_NAME, Claim, ClaimedError, claimant
from gc_sidecar.server.run_dir import RunDir
from gc_sidecar_agent.board import Board, read_board, write_board
from gc_sidecar_agent.command import Command
from tests.striking import strike
from tests.unit.agent.diagnosis import memory_volume
from tests.unit.agent.own_process import Child, hear, say

pytestmark = pytest.mark.anyio


def claim_for_ever(run_dir: str, uid: int = 0) -> None:
    if uid:
        os.setuid(uid)
    Claim(run_dir, "127.0.0.1:9470").take()
    say("taken")
    hear()


def take_from_another_process(run_dir: str) -> None:
    claim = Claim(run_dir, "127.0.0.1:1")
    while True:
        try:
            claim.take()
        except ClaimedError as error:
            say(str(error))
        else:
            say("taken")
        hear()


def test_a_second_one_is_refused_and_told_whose_it_is_until_that_has_ended(tmp_path: Path) -> None:
    assert claimant(str(tmp_path)) is None
    with Child(claim_for_ever, run_dir=tmp_path) as first:
        assert first.hear() == "taken"
        with Child(take_from_another_process, run_dir=tmp_path) as second:
            told = second.hear()
            assert f"pid {first.pid} " in told
            assert "at 127.0.0.1:9470 since 20" in told
            assert claimant(str(tmp_path)) == told
            strike(first.pid, signal.SIGSTOP)
            assert second.ask("stopped is not gone") == told
            os.kill(first.pid, signal.SIGKILL)
            first.process.wait()
            assert second.ask("gone") == "taken"
            assert f"pid {second.pid} " in (claimant(str(tmp_path)) or "")


def test_it_is_taken_again_where_somebody_has_removed_its_file(tmp_path: Path) -> None:
    with Child(claim_for_ever, run_dir=tmp_path) as first:
        assert first.hear() == "taken"
        (tmp_path / CLAIM_NAME).unlink()
        ours = Claim(str(tmp_path), "ours")
        ours.take()
        (tmp_path / CLAIM_NAME).unlink()
        ours.take()
        assert json.loads((tmp_path / CLAIM_NAME).read_text())["address"] == "ours"


def test_whatever_stands_in_its_file_is_no_more_than_words(tmp_path: Path) -> None:
    with Child(claim_for_ever, run_dir=tmp_path) as first:
        assert first.hear() == "taken"
        for noise in (b"", b"{}", b"[1]", b"\xff" * 5000, b'{"host": "\\u0000"}', b"null"):
            (tmp_path / CLAIM_NAME).write_bytes(noise)
            assert claimant(str(tmp_path)) == "another sidecar"


@pytest.mark.parametrize("kind", ["directory", "fifo", "link"])
def test_what_is_no_file_is_an_error_and_is_not_followed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / CLAIM_NAME
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"."):
        Claim(str(tmp_path), "ours").take()
    assert not (tmp_path / "elsewhere").exists()
    assert claimant(str(tmp_path)) is None


async def test_without_the_claim_nothing_is_written_and_with_it_the_others_board_is_taken_over(
    tmp_path: Path,
) -> None:
    theirs = Board(policy=Command("freeze", "theirs", 7))
    with Child(claim_for_ever, run_dir=tmp_path) as first:
        assert first.hear() == "taken"
        write_board(str(tmp_path), theirs)
        keeper = RunDir(str(tmp_path), "ours")
        assert not await keeper.claim()
        assert not await keeper.write_board(lambda _: Board())
        await keeper.keep()
        assert not keeper.is_to_be_taken_over
        assert sorted(os.listdir(tmp_path)) == ["board.json", CLAIM_NAME]
        assert read_board(str(tmp_path)) == theirs
        (fault,) = keeper.obstacles
        assert (fault.code, fault.blocking) == ("other_sidecar", True)
        assert keeper.why_not_written == fault
        assert f"pid {first.pid} " in fault.detail
    await keeper.keep()
    assert keeper.is_to_be_taken_over, "it was another one's until now"
    assert await keeper.take_over() == theirs
    await keeper.keep()
    assert not keeper.is_to_be_taken_over
    assert keeper.obstacles == []


async def test_where_there_is_no_lock_to_be_had_it_works_and_says_so(tmp_path: Path) -> None:
    (tmp_path / CLAIM_NAME).mkdir()
    keeper = RunDir(str(tmp_path), "ours")
    assert await keeper.write_board(lambda _: Board(policy=Command("freeze", "a", 1)))
    (fault,) = keeper.obstacles
    assert (fault.code, fault.blocking) == ("run_dir_not_claimed", False)


def test_somebody_elses_file_that_cannot_be_written_is_made_anew() -> None:
    assert os.geteuid() == 0, "this test gives a file to another user"
    with memory_volume() as run_dir:
        os.chmod(run_dir, 0o777)
        path = run_dir / CLAIM_NAME
        path.write_text("left by another user")
        path.chmod(0o644)
        with Child(claim_for_ever, run_dir=run_dir, uid=65534) as ours:
            assert ours.hear() == "taken"
            assert f"pid {ours.pid} " in (claimant(str(run_dir)) or "")
            assert path.stat().st_uid == 65534


def test_two_in_one_process_are_two(tmp_path: Path) -> None:
    first, second = Claim(str(tmp_path), "first"), Claim(str(tmp_path), "second")
    assert first.take()
    assert not first.take(), "it has it already"
    with pytest.raises(ClaimedError, match="at first since"):
        second.take()
    first.release()
    assert second.take()


def test_who_only_looks_keeps_nobody_from_it(tmp_path: Path) -> None:
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            claimant(str(tmp_path))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(20):
            claim = Claim(str(tmp_path), "ours")
            assert claim.take()
            claim.release()
    finally:
        stop.set()
        looking.join()
