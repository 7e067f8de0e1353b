"""What the design promises, as a model: what is wanted, what stands on the board, and who applies what.

It knows nothing of how the sidecar and the agents do it. Whatever they show is held against it, and where the
design leaves a choice (the number of a new generation) it takes what they chose, if they might.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from gc_sidecar_agent.board import Board
from gc_sidecar_agent.rules import HELD_OFF
from tests.faults.tiny_engine import PLACES, Found, Place
from tests.faults.tiny_process import DRIFT_GRACE_S

DEFAULT_LEASE_S = 3600.0
# How much later than asked for a lease may have begun: the way to a process, on a loaded machine.
LATE_S = 10.0
# The third threshold that somebody else sets.
MEDDLED = 9
POLICIES = ("freeze", "budget")
# So long that no collection of a tiny process has its thresholds adapted.
BUDGET_MS = 1000.0


class Disagreement(AssertionError):
    """The sidecar or an agent shows something else than the design says."""


@dataclass(frozen=True)
class Ask:
    """A request to change something. `kind` is freeze, budget, restore, maintain or lease."""

    kind: str
    owner: str = "anonymous"
    force: bool = False
    allow_partial: bool = False
    lease_s: float | None = None
    interval_s: float = 60.0
    max_rss_growth_bytes: int | None = None
    collect_first: bool = True

    def __str__(self) -> str:
        return f"{self.kind} {self.fields()}"

    def fields(self) -> dict[str, Any]:
        """Its body."""
        fields: dict[str, Any] = {"owner": self.owner, "force": self.force}
        fields["allow_partial"] = self.allow_partial
        if self.kind in POLICIES:
            fields["interval_s"] = self.interval_s
            fields["collect_first"] = self.collect_first
            fields["max_rss_growth_bytes"] = self.max_rss_growth_bytes
        if self.kind in (*POLICIES, "lease") and self.lease_s is not None:
            fields["lease_s"] = self.lease_s
        if self.kind == "budget":
            fields |= {"mode": "budget", "pause_budget_ms": BUDGET_MS}
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True)
class Answer:
    """What came back: the status, the code of an error, and what GET /gc shows afterwards."""

    status: int
    code: str | None
    shown: Wanted

    def __str__(self) -> str:
        return f"{self.status} {self.code or ''}".strip()


@dataclass(frozen=True)
class Wanted:
    """A policy. `lease_s` is None where only the sidecar knows it."""

    mode: str = "off"
    generation: int = 0
    owner: str | None = None
    interval_s: float = 60.0
    max_rss_growth_bytes: int | None = None
    lease_ends: float = 0.0
    lease_s: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether it is a policy other than CPython's own."""
        return self.mode != "off"

    def asks_the_same(self, other: Wanted) -> bool:
        """Leases and generations aside."""
        return (self.mode, self.owner, self.interval_s, self.max_rss_growth_bytes) == (
            other.mode,
            other.owner,
            other.interval_s,
            other.max_rss_growth_bytes,
        )


@dataclass
class Process:
    """What one process has; of one that is dead, what its page was left with."""

    is_alive: bool = True
    policy: Wanted = field(default_factory=Wanted)
    # When somebody else changed its third threshold under a policy, which is put right where it lasts; then it is
    # what they want after the policy.
    meddled_at: float | None = None
    wants_meddled: bool = False

    @property
    def is_meddled_with(self) -> bool:
        """Whether its thresholds are somebody else's."""
        return self.meddled_at is not None

    def ends(self) -> list[float]:
        """Times at which something ends by itself."""
        drift_ends = [] if self.meddled_at is None else [self.meddled_at + DRIFT_GRACE_S]
        return [self.policy.lease_ends, *drift_ends]


@dataclass
class Model:
    """One engine, its board and its sidecar. Times are dates of the controlled clock, in seconds."""

    found: Found
    wanted: Wanted = field(default_factory=Wanted)
    board: Wanted | None = None
    processes: dict[Place, Process] = field(default_factory=lambda: {p: Process() for p in PLACES})
    sidecar_runs: bool = False
    cycles: set[Place] = field(default_factory=set)

    # --- what follows by itself ---

    def settle(self, now: float) -> None:
        """Leases end, and processes follow the board."""
        if self.sidecar_runs and self.wanted.is_on and self.wanted.lease_ends <= now:
            if self.board is not None and self.board.generation == self.wanted.generation:
                self.board = None
            self.wanted = Wanted(generation=self.wanted.generation)
        for place in self.alive:
            process = self.processes[place]
            if process.policy.is_on and process.policy.lease_ends <= now:
                self._leave(place)
            if process.meddled_at is not None and process.meddled_at + DRIFT_GRACE_S <= now:
                process.meddled_at, process.wants_meddled = None, True
            board = self.board
            if board is None or board.generation <= process.policy.generation:
                continue
            if not board.is_on or board.lease_ends > now:
                self._have(place, board)

    def _have(self, place: Place, policy: Wanted) -> None:
        process = self.processes[place]
        if process.policy.is_on and not policy.is_on:
            self.cycles.discard(place)  # a restore collects
        process.policy = policy
        process.meddled_at = None

    def _leave(self, place: Place) -> None:
        self._have(place, Wanted(generation=self.processes[place].policy.generation))

    @property
    def alive(self) -> list[Place]:
        """The places whose process lives."""
        return [place for place, process in self.processes.items() if process.is_alive]

    @property
    def is_whole(self) -> bool:
        """Whether every process lives."""
        return len(self.alive) == len(self.processes)

    @property
    def highest(self) -> int:
        """The highest generation that anything shows which is left."""
        shown = [process.policy.generation for process in self.processes.values()]
        shown += [self.board.generation] if self.board else []
        shown += [self.wanted.generation] if self.sidecar_runs else []
        return max(shown)

    def states(self, place: Place) -> set[str]:
        """The states of which the status has to show one for the process."""
        process = self.processes[place]
        if not process.is_alive:
            return {"gone"}
        has, wanted = process.policy, self.wanted
        if has.generation != wanted.generation:
            if not has.is_on and not wanted.is_on:
                return {"applied"}
            return {"pending", "drifted"} if has.generation < wanted.generation else {"drifted"}
        if has.mode != wanted.mode or process.is_meddled_with:
            return {"drifted"}
        return {"applied"}

    @property
    def is_covered(self) -> bool:
        """Whether every process has what is wanted."""
        return all(self.states(place) == {"applied"} for place in self.processes)

    # --- what is done ---

    def take(self, ask: Ask, answer: Answer, began: float, now: float) -> None:
        """Hold the answer of a change against the design, and know what has changed."""
        wanted = self.wanted
        if ask.kind == "lease" and not wanted.is_on:
            _expect(answer, (409,), "no_policy")
        elif wanted.is_on and wanted.owner != ask.owner and not ask.force:
            _expect(answer, (409,), "owned_by_other")
        else:
            {
                "freeze": self._take_policy,
                "budget": self._take_policy,
                "restore": self._take_restore,
                "maintain": self._take_maintain,
                "lease": self._take_lease,
            }[ask.kind](ask, answer, began, now)

    def _take_policy(self, ask: Ask, answer: Answer, began: float, now: float) -> None:
        before = self.wanted
        new = Wanted(
            ask.kind, 0, ask.owner, ask.interval_s, ask.max_rss_growth_bytes, lease_s=ask.lease_s
        )
        is_the_same = before.is_on and before.asks_the_same(new)
        if ask.lease_s is None:
            new = replace(new, lease_s=before.lease_s if is_the_same else DEFAULT_LEASE_S)
        if is_the_same and self.is_covered:
            _expect(answer, (200,))
            _same("the generation of a renewal", answer.shown.generation, before.generation)
            self._renew(new.lease_s, answer.shown, began, now)
            return
        if not self.alive:
            # Without RPC it is known before anything is sent. Either way nobody has anything new.
            _expect(answer, (502, 503))
            self._roll_back(before, answer.shown.generation)
            return
        self.is_new(answer.shown.generation)
        if self.is_whole or ask.allow_partial:
            _expect(answer, (200,))
            lease_ends = self._lease_ends(new.lease_s, answer.shown, began, now)
            self.want(replace(new, generation=answer.shown.generation, lease_ends=lease_ends))
        else:
            _expect(answer, (502,), "incomplete_coverage")
            self._roll_back(before, answer.shown.generation)
        if ask.collect_first:
            self.cycles -= {place for place in self.alive if not before.is_on}

    def _take_restore(self, ask: Ask, answer: Answer, began: float, now: float) -> None:
        before = self.wanted
        if not self.alive:
            _expect(answer, (502, 503))
            stands = self.board == Wanted(generation=before.generation) and not before.is_on
            if stands and answer.shown.generation == before.generation:
                return
        else:
            _expect(answer, (200,) if self.is_whole or ask.allow_partial else (502,))
        self.is_new(answer.shown.generation)
        self.want(Wanted(generation=answer.shown.generation))

    def _take_maintain(self, ask: Ask, answer: Answer, began: float, now: float) -> None:
        if not self.alive:
            _expect(answer, (502, 503))
        elif self.is_whole or ask.allow_partial:
            _expect(answer, (200,))
        else:
            _expect(answer, (502,), "incomplete_coverage")
        self.cycles -= {*self.alive}

    def _take_lease(self, ask: Ask, answer: Answer, began: float, now: float) -> None:
        wanted = self.wanted
        has_it = [p for p in self.alive if self._has(p)]
        if self.is_whole and len(has_it) == len(self.processes):
            _expect(answer, (200,))
        elif not self.alive:
            _expect(answer, (502, 503))
            return
        else:
            # One that is behind may follow the board in time, for a renewal tells it of the policy too.
            late = any(self.processes[p].policy.generation < wanted.generation for p in self.alive)
            may_be_enough = ask.allow_partial or late
            _expect(answer, (200, 502, 504) if may_be_enough else (502,))
        if not has_it and answer.status != 200:
            # Whether somebody followed in time decides whether the renewal stands; either is told.
            ends = answer.shown.lease_ends
            self.wanted = replace(wanted, lease_ends=ends)
            if self.board is not None and self.board.generation == wanted.generation:
                self.board = self.wanted
            return
        self._renew(ask.lease_s if ask.lease_s else wanted.lease_s, answer.shown, began, now)

    def _has(self, place: Place) -> bool:
        policy = self.processes[place].policy
        return policy.is_on and policy.generation == self.wanted.generation

    def _renew(self, lease_s: float | None, shown: Wanted, began: float, now: float) -> None:
        ends = self._lease_ends(lease_s, shown, began, now)
        self.board = self.wanted = replace(self.wanted, lease_ends=ends, lease_s=lease_s)
        for place in self.alive:
            if self._has(place):
                self.processes[place].policy = self.wanted

    def _lease_ends(self, lease_s: float | None, shown: Wanted, began: float, now: float) -> float:
        """When the lease ends as the sidecar shows it, which has to fit what was asked for."""
        ends = shown.lease_ends
        if lease_s is None:
            if ends < self.wanted.lease_ends - 1.0:
                raise Disagreement("a renewal has shortened the lease")
        elif not began + lease_s - 1.0 <= ends <= now + lease_s + 1.0:
            raise Disagreement(f"the lease of {lease_s} s ends in {ends - now:.1f} s")
        return ends

    def _roll_back(self, before: Wanted, generation: int) -> None:
        if generation == before.generation:
            return  # nothing was sent
        self.is_new(generation)
        self.want(
            replace(before, generation=generation)
            if before.is_on
            else Wanted(generation=generation)
        )

    def want(self, wanted: Wanted) -> None:
        """It is on the board, and every process that lives follows."""
        self.wanted = self.board = wanted
        for place in self.alive:
            self._have(place, wanted)

    def is_new(self, generation: int) -> None:
        """A new generation is above all that anybody shows."""
        if generation <= self.highest:
            raise Disagreement(f"generation {generation} is not above {self.highest}")

    def sidecar_starts(self, now: float) -> None:
        """A sidecar takes over what stands on the board, and what processes show beyond it."""
        self.sidecar_runs = True
        left = self.board
        if left is None:
            self.wanted = Wanted()
        elif left.is_on and left.lease_ends <= now:
            self.wanted = Wanted(generation=left.generation)
        else:
            self.wanted = replace(left, lease_s=None)
        shown = [self.processes[place].policy for place in self.alive]
        if shown:
            newest = max(shown, key=lambda policy: (policy.generation, policy.is_on))
            if newest.generation > self.wanted.generation:
                # And puts it there, for whoever starts.
                self.board = self.wanted = replace(newest, lease_s=None)

    def sidecar_dies(self) -> None:
        """Killed; everything stays as it is."""
        self.sidecar_runs = False

    def dies(self, place: Place) -> None:
        """A process is killed; its page stays."""
        self.processes[place].is_alive = False
        self.cycles.discard(place)

    def starts(self, place: Place) -> None:
        """A new process in its place, which knows nothing yet."""
        self.processes[place] = Process()

    def leaves(self, place: Place) -> None:
        """A process ends its policy by itself."""
        self._leave(place)

    def observe(self, truth: dict[Place, dict[str, Any]], board: Board, now: float) -> None:
        """Know what is there instead of what should be: the sidecar was killed in the middle of something."""
        for place, real in truth.items():
            lease_ends = now + real["lease_s"] if real["lease_s"] is not None else 0.0
            policy = Wanted(real["mode"], real["generation"], real["owner"], lease_ends=lease_ends)
            self.processes[place].policy = policy
            if not policy.is_on or real["thresholds"][2] != MEDDLED:
                self.processes[place].meddled_at = None
            if not real["cycles"]:
                self.cycles.discard(place)
        self.board = None
        if board.policy is not None:
            left = board.policy
            self.board = Wanted(
                "off" if left.kind == "restore" else left.kind,
                left.generation,
                None if left.kind == "restore" else left.owner,
                left.interval_s if left.kind != "restore" else 60.0,
                left.max_rss_growth_bytes,
            )
            if board.lease is not None and self.board.is_on:
                self.board = replace(self.board, lease_ends=board.lease.expires_at)
        for process in self.processes.values():
            if self.board is not None and process.policy.generation == self.board.generation:
                process.policy = self.board if process.policy.is_on else process.policy

    # --- what is compared ---

    def differs_from_status(self, status: dict[str, Any]) -> str | None:
        """What the status says otherwise, if anything."""
        shown = wanted_in(status)
        if (shown.mode, shown.generation, shown.owner) != (
            self.wanted.mode,
            self.wanted.generation,
            self.wanted.owner,
        ):
            return f"the status shows {shown}, not {self.wanted}"
        if shown.is_on and abs(shown.lease_ends - self.wanted.lease_ends) > LATE_S:
            return f"the lease ends {shown.lease_ends - self.wanted.lease_ends:.1f} s too late"
        rows = {Place(row["role"], row["rank"]): row for row in status["processes"]}
        if rows.keys() != self.processes.keys():
            return f"the status has rows for {[str(place) for place in rows]}"
        for place, row in rows.items():
            if row["state"] not in self.states(place):
                said = f"{row['state']} ({row['reason']})"
                return f"{place} is {said}, not {' or '.join(self.states(place))}"
            has = self.processes[place].policy
            if (row["mode"], row["observed_generation"]) != (has.mode, has.generation):
                return f"{place} shows {row['mode']} {row['observed_generation']}, not {has}"
        applied = sum(row["state"] == "applied" for row in rows.values())
        coverage = {"acknowledged": applied, "expected": len(self.processes)}
        if status["coverage"] != coverage:
            return f"the coverage is {status['coverage']}, not {coverage}"
        return None

    def thresholds_of(self, place: Place) -> list[int]:
        """What a process that nobody meddles with has for thresholds."""
        process = self.processes[place]
        first, second, third = self.found.thresholds
        if process.wants_meddled:
            third = MEDDLED
        return {
            "off": [first, second, third],
            "freeze": [first, second, HELD_OFF],
            "budget": [min(first, 700), min(second, 10), 0],
        }[process.policy.mode]

    def differs_from_board(self, board: Board) -> str | None:
        """What stands on the board otherwise, if anything."""
        left = board.policy
        shown = left and ("off" if left.kind == "restore" else left.kind, left.generation)
        wanted = self.board and (self.board.mode, self.board.generation)
        return None if shown == wanted else f"the board has {shown}, not {wanted}"

    def differs_from_truth(self, truth: dict[Place, dict[str, Any]], now: float) -> str | None:
        """What a process really is otherwise, if anything."""
        for place, real in truth.items():
            process = self.processes[place]
            has = process.policy
            expected: dict[str, Any] = {
                "mode": has.mode,
                "generation": has.generation,
                "owner": has.owner,
                "is_enabled": True,
                "is_frozen": has.is_on or self.found.frozen,
                "is_pending": False,
                "is_drifted": process.is_meddled_with,
                "agent_error": None,
            }
            thresholds = self.thresholds_of(place)
            if process.is_meddled_with:
                thresholds[2] = MEDDLED
            expected["thresholds"] = thresholds
            for name, value in expected.items():
                if real[name] != value:
                    return f"{place} has {name} {real[name]}, not {value}"
            if has.is_on and abs(now + real["lease_s"] - has.lease_ends) > LATE_S:
                return f"{place} has a lease of {real['lease_s']} s, not {has.lease_ends - now:.1f}"
            if real["cycles"] and place not in self.cycles:
                return f"{place} still has its garbage"
        return None


def wanted_in(status: dict[str, Any]) -> Wanted:
    """The policy that the status shows as wanted."""
    policy = status["policy"]
    expires_at = policy["lease_expires_at"]
    return Wanted(
        policy["mode"],
        policy["generation"],
        policy["owner"],
        lease_ends=0.0 if expires_at is None else _seconds(expires_at),
    )


def _seconds(date: str) -> float:
    return datetime.fromisoformat(re.sub("Z$", "+00:00", date)).timestamp()


def _expect(answer: Answer, statuses: tuple[int, ...], code: str | None = None) -> None:
    if answer.status not in statuses or (code is not None and answer.code != code):
        wanted = " or ".join(str(status) for status in statuses)
        raise Disagreement(f"answered {answer}, not {wanted} {code or ''}")


def _same(what: str, is_so: object, should_be: object) -> None:
    if is_so != should_be:
        raise Disagreement(f"{what} is {is_so}, not {should_be}")
