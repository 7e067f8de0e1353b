"""What the sidecar wants of its engine, and how that is told to the board and read back from it.

One frozen object; every change makes a new one with a higher generation.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from gc_sidecar.server.reports import Reason, Report
from gc_sidecar_agent.board import Board, Lease
from gc_sidecar_agent.command import DEFAULT_INTERVAL_S, DEFAULT_LEASE_S, Command

# Whose a policy is when nobody says.
ANONYMOUS = Command.owner
MODE_OF_KIND = {"freeze": "freeze", "budget": "budget", "restore": "off"}
KIND_OF_MODE = {mode: kind for kind, mode in MODE_OF_KIND.items()}


@dataclass(frozen=True)
class Desired:
    """The policy that every process should have.

    `lease_ends` is on our monotonic clock, so that a jump of the wall clock moves no lease. `lease_s` is for how
    long the policy was entered or last renewed, which is what a renewal that says nothing renews it for.
    `reason` says why a policy ended without being asked to.
    """

    mode: str = "off"
    generation: int = 0
    owner: str | None = None
    interval_s: float = DEFAULT_INTERVAL_S
    pause_budget_ms: float | None = None
    max_rss_growth_bytes: int | None = None
    entered_at: float | None = None
    # The same on our monotonic clock; not known of one that was taken over.
    entered_s: float | None = None
    lease_ends: float | None = None
    lease_s: float = DEFAULT_LEASE_S
    lease_sequence: int = 0
    reason: Reason | None = None

    @property
    def is_on(self) -> bool:
        """Whether a policy other than CPython's own is wanted."""
        return self.mode != "off"

    def lease_remaining_s(self) -> float | None:
        """Seconds until the lease ends; None where there is none."""
        return None if self.lease_ends is None else max(0.0, self.lease_ends - time.monotonic())

    def lease_expires_at(self) -> float | None:
        """The same as a date, by the wall clock as it is now."""
        remaining = self.lease_remaining_s()
        return None if remaining is None else time.time() + remaining

    def is_same_policy(self, other: Desired) -> bool:
        """Whether both ask the same of a process, leases and generations aside."""
        return self._settings() == other._settings()

    def _settings(self) -> tuple[object, ...]:
        return (
            self.mode,
            self.owner,
            self.interval_s,
            self.pause_budget_ms,
            self.max_rss_growth_bytes,
        )

    def command(self, operation_id: str, deadline_s: float, collect_first: bool = True) -> Command:
        """The command that makes a process adopt this policy."""
        remaining = self.lease_remaining_s()
        return Command(
            kind=KIND_OF_MODE[self.mode],
            operation_id=operation_id,
            generation=self.generation,
            owner=self.owner or ANONYMOUS,
            interval_s=self.interval_s,
            lease_s=DEFAULT_LEASE_S if remaining is None else remaining,
            pause_budget_ms=self.pause_budget_ms,
            max_rss_growth_bytes=self.max_rss_growth_bytes,
            collect_first=collect_first,
            deadline_s=deadline_s,
        )

    def lease(self) -> Lease | None:
        """The lease as the board tells it."""
        remaining, expires_at = self.lease_remaining_s(), self.lease_expires_at()
        if remaining is None or expires_at is None:
            return None
        return Lease(self.lease_sequence, remaining, expires_at)

    def with_lease(self, lease_s: float | None) -> Desired:
        """This policy with a lease that begins now; with None it is as long as the one before."""
        length_s = self.lease_s if lease_s is None else lease_s
        return replace(
            self,
            lease_ends=time.monotonic() + length_s,
            lease_s=length_s,
            lease_sequence=next_sequence(self.lease_sequence),
        )

    def ended(self, reason: Reason) -> Desired:
        """What is wanted once this policy has ended in every process by itself: off, and nothing new."""
        return Desired(
            generation=self.generation, lease_sequence=self.lease_sequence, reason=reason
        )


def next_sequence(known: int) -> int:
    """A lease sequence above `known` and above those of a sidecar before us, whose last one may be lost."""
    return max(known + 1, time.time_ns() // 1_000_000)


def desired_from_board(board: Board) -> Desired:
    """What the board says is wanted, the lease cut to what is left of it by the wall clock."""
    policy, lease = board.policy, board.lease
    if policy is None:
        return Desired()
    if policy.kind == "restore":
        return Desired(generation=policy.generation)
    remaining = policy.lease_s
    # A board is written moments after its lease began: what was left then is its length, but for those.
    length_s = math.ceil(policy.lease_s if lease is None else lease.remaining_s)
    if lease is not None:
        remaining = max(0.0, min(lease.remaining_s, lease.expires_at - time.time()))
    desired = Desired(
        mode=MODE_OF_KIND.get(policy.kind, "off"),
        generation=policy.generation,
        owner=policy.owner,
        interval_s=policy.interval_s,
        pause_budget_ms=policy.pause_budget_ms,
        max_rss_growth_bytes=policy.max_rss_growth_bytes,
        lease_ends=time.monotonic() + remaining,
        lease_s=float(max(1, length_s)),
        lease_sequence=lease.sequence if lease else 0,
    )
    return desired if remaining > 0 else desired.ended(LEASE_EXPIRED)


def desired_from_reports(reports: list[Report]) -> Desired:
    """What processes were told by a sidecar before us (or by their environment), where no board says it."""
    newest = max(reports, key=lambda report: (report.state.generation, report.state.mode != "off"))
    state = newest.state
    remaining_ms = newest.numbers.get("lease_remaining_ms")
    if state.mode == "off" or remaining_ms is None:  # it is just leaving its policy
        return Desired(generation=state.generation)
    remaining_s = max(0, remaining_ms) / 1000
    return Desired(
        mode=state.mode,
        generation=state.generation,
        owner=state.owner or ANONYMOUS,
        interval_s=state.interval_s or DEFAULT_INTERVAL_S,
        pause_budget_ms=state.pause_budget_ms,
        max_rss_growth_bytes=state.max_rss_growth_bytes,
        entered_at=state.entered_at,
        lease_ends=time.monotonic() + remaining_s,
        lease_s=max(DEFAULT_LEASE_S, remaining_s),  # nobody tells it; a renewal must not shorten it
    )


LEASE_EXPIRED = Reason("lease_expired", "the lease ended without a renewal")
