"""The board: what the sidecar wants, read whole or not at all, whatever lies under its name."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import resource
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from gc_sidecar_agent.board import (
    BOARD_NAME,
    BOARD_VERSION,
    MAXIMUM_BOARD_BYTES,
    Board,
    BoardError,
    Lease,
    board_stamp,
    parse_board,
    read_board,
    write_board,
)
from gc_sidecar_agent.command import Command
from tests.unit.agent.own_process import Child, in_own_process, say

FREEZE = Command("freeze", "op-1", 7, owner="bench-1", lease_s=60)
MAINTAIN = Command("maintain", "op-2", 7, trim=True)
LEASE = Lease(sequence=3, remaining_s=59.5, expires_at=1_900_000_000.25)


@pytest.mark.parametrize("policy", [None, FREEZE, Command("restore", "r", 8)])
@pytest.mark.parametrize("maintain", [None, MAINTAIN])
@pytest.mark.parametrize("lease", [None, LEASE])
def test_a_board_is_read_as_it_was_written(
    tmp_path: Path, policy: Command | None, maintain: Command | None, lease: Lease | None
) -> None:
    board = Board(policy, maintain, lease, 1_900_000_000.5 if maintain else None)
    write_board(str(tmp_path), board)
    assert read_board(str(tmp_path)) == board


def test_everybody_may_read_it_and_only_the_owner_write(tmp_path: Path) -> None:
    write_board(str(tmp_path), Board(FREEZE))
    assert stat.S_IMODE((tmp_path / BOARD_NAME).stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == [BOARD_NAME]


def test_there_is_none_until_one_was_written(tmp_path: Path) -> None:
    assert board_stamp(str(tmp_path)) is None
    with pytest.raises(FileNotFoundError):
        read_board(str(tmp_path))
    assert board_stamp(str(tmp_path / "missing")) is None


def test_its_stamp_changes_with_every_replacement_and_only_then(tmp_path: Path) -> None:
    stamps = []
    for generation in range(50):
        write_board(str(tmp_path), Board(Command("freeze", "op", generation)))
        stamps.append(board_stamp(str(tmp_path)))
        assert board_stamp(str(tmp_path)) == stamps[-1]
    assert all(a != b for a, b in itertools.pairwise(stamps))


def replace_again_and_again(run_dir: str) -> None:
    for number in range(1_000_000):
        if number == 10:
            say("replacing")
        # The second is 30 times as long as the first.
        write_board(run_dir, Board(Command("freeze", "a", 1)))
        write_board(run_dir, Board(Command("freeze", "b", 2, owner="x" * 128), MAINTAIN, LEASE))


def test_a_reader_sees_an_old_board_or_a_new_one_and_never_half(tmp_path: Path) -> None:
    seen = {"a": 0, "b": 0}
    with Child(replace_again_and_again, run_dir=tmp_path) as child:
        assert child.hear() == "replacing"
        end = time.monotonic() + 20
        while min(seen.values()) < 300 and time.monotonic() < end:
            board = read_board(str(tmp_path))
            assert board.policy is not None
            assert (board.lease == LEASE) == (board.policy.operation_id == "b")
            seen[board.policy.operation_id] += 1
    assert min(seen.values()) >= 300


# --- what may lie there instead ---


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write_board(str(elsewhere), Board(FREEZE))
    (tmp_path / BOARD_NAME).symlink_to(elsewhere / BOARD_NAME)
    with pytest.raises(OSError, match="symbolic links"):
        read_board(str(tmp_path))


def test_a_pipe_does_not_hold_a_reader_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / BOARD_NAME)
    with pytest.raises(BoardError, match="not a regular file"):
        read_board(str(tmp_path))


def test_a_directory_is_no_board(tmp_path: Path) -> None:
    (tmp_path / BOARD_NAME).mkdir()
    with pytest.raises(BoardError, match="not a regular file"):
        read_board(str(tmp_path))


def test_one_that_is_too_long_is_refused_without_reading_it_all(tmp_path: Path) -> None:
    with open(tmp_path / BOARD_NAME, "wb") as board:
        board.truncate(1 << 40)
    with pytest.raises(BoardError, match=f"longer than {MAXIMUM_BOARD_BYTES}"):
        read_board(str(tmp_path))


BOARD: dict[str, Any] = {
    "version": BOARD_VERSION,
    "policy": FREEZE.to_dict(),
    "maintain": MAINTAIN.to_dict(),
    "lease": vars(LEASE),
}
LEASE_WITH = lambda **fields: {**BOARD, "lease": {**vars(LEASE), **fields}}  # noqa: E731


@pytest.mark.parametrize(
    "value",
    [
        *(None, 1, "x", [], {}, True, [BOARD]),
        {**BOARD, "version": 2},
        {**BOARD, "version": "x" * 60_000},
        {**BOARD, "policy": 1},
        {**BOARD, "policy": {**FREEZE.to_dict(), "kind": "melt"}},
        {**BOARD, "policy": {**FREEZE.to_dict(), "lease_s": math.nan}},
        {**BOARD, "policy": MAINTAIN.to_dict()},
        {**BOARD, "policy": Command("observe", "o", 9).to_dict()},
        {**BOARD, "maintain": FREEZE.to_dict()},
        {**BOARD, "maintain": Command("lease", "o", 9).to_dict()},
        {**BOARD, "lease": 1},
        {**BOARD, "lease": []},
        {**BOARD, "lease": {}},
        *(LEASE_WITH(sequence=v) for v in (None, "1", 1.5, True, -1, math.nan, 10**400)),
        *(LEASE_WITH(remaining_s=v) for v in (None, "1", True, -1, math.nan, math.inf, 10**400)),
        *(LEASE_WITH(expires_at=v) for v in (None, "1", True, -1, math.nan, math.inf, 10**400)),
    ],
    ids=lambda value: "",
)
def test_a_board_with_something_wrong_is_refused_with_a_short_reason(value: Any) -> None:
    with pytest.raises(BoardError) as refused:
        parse_board(json.dumps(value).encode())
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00", b"{", b"\xff\xfe{}", b"[" * 60_000, b'{"version":' + b"9" * 60_000 + b"}"],
    ids=lambda value: "",
)
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(BoardError):
        parse_board(data)


def test_no_damage_whatever_raises_anything_else() -> None:
    chance = random.Random(20)
    good = json.dumps(BOARD).encode()
    pieces = [b"NaN", b"null", b"1e999", b"-1", b'"', b"{", b"]", b"\xff", b"true", b"9" * 400, b""]
    taken = 0
    for _ in range(20_000):
        data = bytearray(good)
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(data))
            data[at : at + chance.randrange(12)] = chance.choice(pieces)
        try:
            board = parse_board(bytes(data))
        except BoardError:
            continue
        taken += 1
        assert board.lease is None or math.isfinite(board.lease.expires_at)
    assert 0 < taken < 15_000


# --- writing that fails ---


@in_own_process
def test_a_full_disk_leaves_the_old_board_and_nothing_else(tmp_path: Path) -> None:
    write_board(str(tmp_path), Board(FREEZE))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    try:
        write_board(str(tmp_path), Board(FREEZE, MAINTAIN, LEASE))
    except OSError:
        pass
    else:
        raise AssertionError("the board was written beyond the limit")
    assert os.listdir(tmp_path) == [BOARD_NAME]
    assert read_board(str(tmp_path)) == Board(FREEZE)


def test_a_missing_directory_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_board(str(tmp_path / "missing"), Board())


@pytest.mark.parametrize("there", ["link", "pipe", "file"])
def test_whatever_lies_under_the_name_is_replaced_and_not_written_into(
    tmp_path: Path, there: str
) -> None:
    path, target = tmp_path / BOARD_NAME, tmp_path / "target"
    target.write_text("mine")
    if there == "link":
        path.symlink_to(target)
    elif there == "pipe":
        os.mkfifo(path)
    else:
        os.link(target, path)
    write_board(str(tmp_path), Board(FREEZE))
    assert read_board(str(tmp_path)) == Board(FREEZE)
    assert target.read_text() == "mine"
