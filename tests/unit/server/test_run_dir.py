"""Writing into the run directory: board writes happen one after the other, each from what the last one left."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gc_sidecar.server import run_dir as module
from gc_sidecar.server.run_dir import RunDir
from gc_sidecar_agent.board import Board, read_board, write_board
from gc_sidecar_agent.command import Command

pytestmark = pytest.mark.anyio


async def test_a_write_that_takes_long_is_not_overtaken_nor_undone(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = iter((0.3, 0.0))

    def write_slowly(path: str, board: Board) -> None:
        time.sleep(next(lengths))
        write_board(path, board)

    monkeypatch.setattr(module, "write_board", write_slowly)
    keeper = RunDir(str(run_dir))
    policy, maintain = Command("freeze", "a", 1), Command("maintain", "b", 1)
    wrote = await asyncio.gather(
        keeper.write_board(lambda board: replace(board, policy=policy)),
        keeper.write_board(lambda board: replace(board, maintain=maintain)),
    )
    assert wrote == [True, True]
    assert read_board(str(run_dir)) == Board(policy, maintain) == keeper.board


async def test_a_board_that_could_not_be_written_is_not_taken_for_written(run_dir: Path) -> None:
    keeper = RunDir(str(run_dir / "missing"))
    wanted = Board(policy=Command("freeze", "a", 1))
    assert await keeper.write_board(lambda _: wanted) is False
    assert [fault.code for fault in keeper.obstacles] == ["board_not_written"]
    (run_dir / "missing").mkdir()
    assert await keeper.write_board(lambda _: wanted) is True
    assert keeper.obstacles == []
    assert read_board(str(run_dir / "missing")) == wanted
