"""What the sidecar itself writes into the run directory: the board, and the secret of the engine's route.

What cannot be written stays as an obstacle until it can be. The pages there are read by `sight`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gc_sidecar.server.obstacle import Obstacle
from gc_sidecar.server.problems import KINDS
from gc_sidecar.server.secret import ensure_endpoint_token
from gc_sidecar_agent.board import Board, BoardError, read_board, write_board
from gc_sidecar_agent.endpoint import TOKEN_NAME


class RunDir:
    """The run directory at `path`; with None there is none, and nothing can be written."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.board = Board()
        self.board_fault: Obstacle | None = None
        self._token_fault: Obstacle | None = None
        self._writing = asyncio.Lock()

    @property
    def obstacles(self) -> list[Obstacle]:
        """What cannot be written, and why."""
        faults = (self.board_fault, self._token_fault)
        return [fault for fault in faults if fault is not None]

    async def take_over(self) -> Board | None:
        """The board that a sidecar before us left; None where there is none, or none that can be read."""
        if self.path is None:
            return None
        await asyncio.to_thread(self._ensure_token, self.path)
        try:
            self.board = await asyncio.to_thread(read_board, self.path)
        except FileNotFoundError:
            return None
        except (BoardError, OSError) as error:
            self.board_fault = Obstacle(
                "board_unreadable", f"the board was not taken over: {error}", "POST /gc/restore"
            )
            return None
        return self.board

    async def write_board(self, change: Callable[[Board], Board]) -> bool:
        """Replace the board by what `change` makes of it; False where that cannot be.

        One after the other, each from what the one before left: the end of a lease must not undo a change.
        """
        if self.path is None:
            return False
        async with self._writing:
            board = change(self.board)
            if board == self.board:
                return True
            try:
                await asyncio.to_thread(write_board, self.path, board)
            except OSError as error:
                self.board_fault = Obstacle(
                    "board_not_written",
                    f"the board in {self.path} cannot be written: {error.strerror or error}",
                    KINDS["board_not_written"].remedy,
                )
                return False
            self.board = board
            self.board_fault = None
            return True

    async def retry_token(self) -> None:
        """Write the secret where it is not there (any more)."""
        if self.path is not None:
            await asyncio.to_thread(self._ensure_token, self.path)

    def _ensure_token(self, path: str) -> None:
        try:
            ensure_endpoint_token(path)
            self._token_fault = None
        except OSError as error:
            self._token_fault = Obstacle(
                "run_dir_not_writable",
                f"the sidecar cannot write {TOKEN_NAME} into {path}: {error.strerror}",
                "make the run directory writable for the sidecar's user or group",
            )
