"""What the sidecar itself writes into the run directory: its claim, the board, the secret of the engine's route.

What cannot be written stays as an obstacle until it can be. The pages there are read by `sight`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gc_sidecar.server.claim import Claim, ClaimedError
from gc_sidecar.server.obstacle import Obstacle
from gc_sidecar.server.problems import KINDS
from gc_sidecar.server.secret import ensure_endpoint_token
from gc_sidecar.server.tasks import spawn
from gc_sidecar_agent.board import Board, BoardError, read_board, write_board
from gc_sidecar_agent.endpoint import TOKEN_NAME


class RunDir:
    """The run directory at `path`; with None there is none, and nothing can be written. `address` is where people
    reach this sidecar.

    `is_to_be_taken_over` from when it is claimed, which another sidecar may have had until then, to `take_over`.
    """

    def __init__(self, path: str | None, address: str = "") -> None:
        self.path = path
        self.board = Board()
        self.board_fault: Obstacle | None = None
        self.claim_fault: Obstacle | None = None
        self.is_to_be_taken_over = False
        self._claim = None if path is None else Claim(path, address)
        self._token_fault: Obstacle | None = None
        self._writing = asyncio.Lock()

    @property
    def obstacles(self) -> list[Obstacle]:
        """What cannot be written, and why."""
        faults = (self.claim_fault, self.board_fault, self._token_fault)
        return [fault for fault in faults if fault is not None]

    @property
    def is_anothers(self) -> bool:
        """Whether another sidecar has claimed it."""
        return self.claim_fault is not None and self.claim_fault.code == "other_sidecar"

    @property
    def why_not_written(self) -> Obstacle | None:
        """Why the board cannot be written; None where it could be when that was last tried."""
        return self.claim_fault if self.is_anothers else self.board_fault

    async def claim(self) -> bool:
        """Claim it for this sidecar; False where another one has it."""
        if self._claim is not None:
            await asyncio.to_thread(self._take, self._claim)
        return not self.is_anothers

    def _take(self, claim: Claim) -> None:
        try:
            self.is_to_be_taken_over |= claim.take()
        except ClaimedError as error:
            self.claim_fault = Obstacle(
                "other_sidecar",
                f"{self.path} belongs to {error}",
                KINDS["other_sidecar"].remedy,
                blocking=True,
            )
        except FileNotFoundError:
            self.claim_fault = None  # the directory is not there yet
        except OSError as error:
            # Nobody is kept out, and nobody is harmed where there is one sidecar.
            self.claim_fault = Obstacle(
                "run_dir_not_claimed",
                f"the sidecar cannot keep others out of {self.path}: {error.strerror}",
                "see that no other sidecar uses it",
            )
        else:
            self.claim_fault = None

    def release(self) -> None:
        """Leave it to another sidecar."""
        if self._claim is not None:
            self._claim.release()

    async def take_over(self) -> Board | None:
        """The board that a sidecar before us left; None where there is none, or none that can be read."""
        if self.path is None:
            return None
        await asyncio.to_thread(self._ensure_token, self.path)
        self.is_to_be_taken_over = False
        try:
            async with self._writing:
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
        if not await self.claim():
            return False
        # To its end, whatever becomes of the caller: what we remember is what was written.
        return await asyncio.shield(spawn(self._write_board(self.path, change)))

    async def _write_board(self, path: str, change: Callable[[Board], Board]) -> bool:
        async with self._writing:
            board = change(self.board)
            if board == self.board and not self.is_board_behind:
                return True
            try:
                await asyncio.to_thread(write_board, path, board)
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

    @property
    def is_board_behind(self) -> bool:
        """Whether what should stand on the board could not be written there."""
        return self.board_fault is not None and self.board_fault.code == "board_not_written"

    async def keep(self) -> None:
        """Claim it and write the secret, where either is not so (any more)."""
        if self.path is not None and await self.claim():
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
