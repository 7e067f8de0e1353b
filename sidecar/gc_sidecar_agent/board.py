"""The board: one small file in the run directory, written by the sidecar alone and read by every agent.

It holds what is wanted (a policy command, a maintain command, the lease), not what happened: an agent that
looks late still sees it. It is replaced by rename, so a reader sees an old board or a new one, never half.
"""

from __future__ import annotations

import json
import os
import stat
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gc_sidecar_agent.command import (
    MAXIMUM_GENERATION,
    POLICY_KINDS,
    Command,
    CommandError,
    parse_command,
    shown,
)

if TYPE_CHECKING:  # later than CPython 3.9, on which doctor looks at a board too
    from typing import TypeGuard

BOARD_NAME = "board.json"
BOARD_VERSION = 1
MAXIMUM_BOARD_BYTES = 65536
MAXIMUM_TIME = 1e12


class BoardError(Exception):
    """A board that cannot be read; `str()` of it says why."""


@dataclass(frozen=True)
class Lease:
    """How long the policy may last. A higher `sequence` is a renewal: the agent counts `remaining_s` from the
    moment it sees it, on its own monotonic clock. `expires_at` (seconds since the epoch) is for people and
    for a sidecar that restarts."""

    sequence: int
    remaining_s: float
    expires_at: float


@dataclass(frozen=True)
class Board:
    """What the sidecar wants of every process of its engine. After `maintain_until` (seconds since the epoch)
    nobody begins the maintenance any more: its sidecar may have ended."""

    policy: Command | None = None
    maintain: Command | None = None
    lease: Lease | None = None
    maintain_until: float | None = None

    @property
    def timely_maintain(self) -> Command | None:
        """The maintenance, while it may begin."""
        until = self.maintain_until
        return self.maintain if until is None or time.time() < until else None


def lease_remaining_s(lease: Lease) -> float:
    """What is left of the lease. The wall clock may only shorten it: a late reader of an old board must not
    begin it anew."""
    return min(lease.remaining_s, lease.expires_at - time.time())


def still_wanted(policy: Command, lease: Lease | None) -> Command | None:
    """`policy` with what is left of its lease; None where that has ended: an old board switches nothing on."""
    if policy.kind == "restore" or lease is None:
        return policy
    remaining_s = min(policy.lease_s, lease_remaining_s(lease))
    return replace(policy, lease_s=remaining_s) if remaining_s > 0 else None


def board_stamp(run_dir: str) -> tuple[int, int] | None:
    """Something that changes whenever the board is replaced; None where there is none."""
    try:
        status = os.stat(os.path.join(run_dir, BOARD_NAME), follow_symlinks=False)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def read_board(run_dir: str) -> Board:
    """The board of `run_dir`. Raises BoardError, OSError (FileNotFoundError: there is none yet)."""
    fd = os.open(
        os.path.join(run_dir, BOARD_NAME),
        os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
    )
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise BoardError("not a regular file")
        data = os.read(fd, MAXIMUM_BOARD_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > MAXIMUM_BOARD_BYTES:
        raise BoardError(f"longer than {MAXIMUM_BOARD_BYTES} bytes")
    return parse_board(data)


def parse_board(data: bytes) -> Board:
    """The Board in `data`; raises BoardError."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BoardError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BoardError("not a JSON object")
    if value.get("version") != BOARD_VERSION:
        raise BoardError(f"format {shown(value.get('version'))}; this agent reads {BOARD_VERSION}")
    try:
        return Board(
            policy=_command(value.get("policy"), POLICY_KINDS),
            maintain=_command(value.get("maintain"), ("maintain",)),
            lease=_lease(value.get("lease")),
            maintain_until=_time(value.get("maintain_until")),
        )
    except CommandError as error:
        raise BoardError(str(error)) from None


def write_board(run_dir: str, board: Board) -> None:
    """Replace the board of `run_dir`. Raises OSError. Its directory must belong to this engine alone."""
    value: dict[str, Any] = {
        "version": BOARD_VERSION,
        "policy": board.policy.to_dict() if board.policy else None,
        "maintain": board.maintain.to_dict() if board.maintain else None,
        "lease": vars(board.lease) if board.lease else None,
        "maintain_until": board.maintain_until,
    }
    temporary = os.path.join(run_dir, f".{BOARD_NAME}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    fd = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        try:
            body = json.dumps(value).encode()
            while body:
                body = body[os.write(fd, body) :]
            os.fchmod(fd, 0o644)
        finally:
            os.close(fd)
        os.rename(temporary, os.path.join(run_dir, BOARD_NAME))
    except BaseException:
        os.unlink(temporary)
        raise


def _command(value: Any, kinds: tuple[str, ...]) -> Command | None:
    if value is None:
        return None
    command = parse_command(value)
    if command.kind not in kinds:
        raise CommandError(f"{command.kind} does not stand here on a board")
    return command


def _is_number(value: Any, maximum: float) -> TypeGuard[float]:
    # A comparison takes numbers that no float can hold; not a number lies in no range.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 <= value <= maximum


def _time(value: Any) -> float | None:
    if value is None:
        return None
    if not _is_number(value, MAXIMUM_TIME):
        raise BoardError("maintain_until is no time")
    return float(value)


def _lease(value: Any) -> Lease | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise BoardError("lease is not an object")
    sequence, remaining_s, expires_at = (
        value.get(key) for key in ("sequence", "remaining_s", "expires_at")
    )
    if (
        not _is_number(sequence, MAXIMUM_GENERATION)
        or not isinstance(sequence, int)
        or not _is_number(remaining_s, 1e9)
        or not _is_number(expires_at, MAXIMUM_TIME)
    ):
        raise BoardError("lease has a field that is missing or out of range")
    return Lease(sequence, float(remaining_s), float(expires_at))
