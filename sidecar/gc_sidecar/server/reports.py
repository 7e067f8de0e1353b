"""What a process says about itself, from its page or from a reply, as a checked and frozen object.

Neither is trusted: a page is a file that others can write, and a reply came through the engine. What
makes no sense is an error with a reason here, or a None, and goes no further.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

from gc_sidecar_agent.agent import ROLES
from gc_sidecar_agent.command import (
    MAXIMUM_GENERATION,
    PROTOCOL_VERSION,
    Outcome,
    parse_outcome,
)
from gc_sidecar_agent.gate import POLICIES
from gc_sidecar_agent.page import NUMBER_NAMES

MAXIMUM_RANK = 1 << 16
# An API server that stands still holds up its own clients, but no step of the engine.
LOCKSTEP_ROLES = frozenset({"engine_core", "worker"})
MAXIMUM_PROCESSES = 4096
LAST_TIME = 253_402_300_799.0  # the end of the year 9999, the last that a date can tell


class Key(NamedTuple):
    """A place in the engine that a process fills."""

    role: str
    dp_rank: int
    rank: int

    def __str__(self) -> str:
        return f"{self.role} dp{self.dp_rank} rank {self.rank}"


class ReportError(ValueError):
    """A report that makes no sense; `str()` of it says which part."""


@dataclass(frozen=True)
class Identity:
    """Which process it is; `token` is unique to each, for pids repeat."""

    roles: tuple[str, ...]
    dp_rank: int
    rank: int
    token: str
    pid: int | None = None
    host: str | None = None
    started_at: float = 0.0
    python: str | None = None
    collector: str | None = None
    engine: str | None = None
    agent: str | None = None
    page_error: str | None = None
    agent_error: str | None = None

    @property
    def is_in_lockstep(self) -> bool:
        """Whether the steps of a lockstep group wait for it."""
        return not LOCKSTEP_ROLES.isdisjoint(self.roles)

    @functools.cached_property
    def keys(self) -> tuple[Key, ...]:
        """The places that this process fills, the one it is shown under first."""
        return tuple(Key(role, self.dp_rank, self.rank) for role in self.roles)


@dataclass(frozen=True)
class Topology:
    """Which processes its engine has, as far as this process knows."""

    dp_ranks: tuple[int, ...] = ()
    workers: int = 0
    api_servers: int = 0

    def keys(self, api_dp_rank: int) -> set[Key]:
        """The places that these processes fill, the API servers under `api_dp_rank`."""
        return {
            *(Key("engine_core", dp_rank, 0) for dp_rank in self.dp_ranks),
            *(
                Key("worker", dp_rank, rank)
                for dp_rank in self.dp_ranks
                for rank in range(self.workers)
            ),
            *(Key("api_server", api_dp_rank, rank) for rank in range(self.api_servers)),
        }


@dataclass(frozen=True)
class Reason:
    """Why something did not happen or ended. `generation` is that of a policy that was refused."""

    code: str
    detail: str
    generation: int | None = None

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}" if self.detail else self.code


@dataclass(frozen=True)
class State:
    """Its GC policy."""

    ready: bool = False
    mode: str = "off"
    generation: int = 0
    owner: str | None = None
    entered_at: float | None = None
    interval_s: float | None = None
    pause_budget_ms: float | None = None
    max_rss_growth_bytes: int | None = None
    reason: Reason | None = None
    refused: Reason | None = None
    collect_pending: bool = False
    exits: Mapping[str, int] = field(default_factory=dict)
    drift: Reason | None = None
    drifts: Mapping[str, int] = field(default_factory=dict)
    operation: Outcome | None = None


@dataclass(frozen=True)
class Report:
    """Everything that a process says about itself."""

    identity: Identity
    topology: Topology
    state: State
    numbers: Mapping[str, int | None]
    collecting_since: int = 0

    @property
    def api_dp_rank(self) -> int:
        """Under which dp_rank it knows the API servers of its engine.

        Each launch behind an external load balancer has an API server 0 of its own. They tell themselves
        apart by their dp_rank; whoever is no API server knows no such rank, and none of them then.
        """
        return self.identity.dp_rank if "api_server" in self.identity.roles else 0

    def number(self, name: str) -> int:
        """A counter of it; 0 where it does not know it, or tells what none can be."""
        return max(0, self.numbers.get(name) or 0)

    @property
    def thresholds(self) -> tuple[int | None, int | None, int | None]:
        """What gc.get_threshold() reads there."""
        return (
            self.numbers.get("threshold0"),
            self.numbers.get("threshold1"),
            self.numbers.get("threshold2"),
        )


@dataclass(frozen=True)
class Reply:
    """One process's answer to one command. `report` is None where it could not say who it is."""

    outcome: Outcome
    report: Report | None


@dataclass(frozen=True)
class CheckedReplies:
    """The replies to one command; `malformed` says what was wrong with others, `desynced` which ranks
    answered another command than the one that was sent."""

    replies: tuple[Reply, ...] = ()
    malformed: tuple[str, ...] = ()
    desynced: tuple[str, ...] = ()


def parse_report(description: Any, numbers: Any, collecting_since: Any) -> Report:
    """The Report in the three parts of a page or a reply. Raises ReportError."""
    parts = _mapping(description, "description")
    return Report(
        identity=_identity(_mapping(parts.get("identity"), "identity")),
        topology=_topology(parts.get("topology")),
        state=_state(_mapping(parts.get("state"), "state")),
        numbers=_numbers(numbers),
        collecting_since=collecting_since if _is_whole(collecting_since) else 0,
    )


def check_replies(results: list[Any], operation_id: str) -> CheckedReplies:
    """Hold every result of a call against the command that was sent."""
    by_token: dict[str, Reply] = {}
    anonymous: list[Reply] = []
    malformed: list[str] = []
    desynced: list[str] = []
    for position, result in enumerate(results):
        if not isinstance(result, dict) or result.get("version") != PROTOCOL_VERSION:
            malformed.append(f"result {position} is {_short(result)}, not a reply of our agent")
            continue
        report = _report_of(result)
        if result.get("operation_id") != operation_id:
            who = str(report.identity.keys[0]) if report else f"result {position}"
            desynced.append(who)
            continue
        outcome = parse_outcome(result.get("outcome"))
        if outcome is None or outcome.operation_id != operation_id:
            malformed.append(f"result {position} tells no outcome")
        elif report is None:
            anonymous.append(Reply(outcome, None))
        else:
            token = report.identity.token
            by_token[token] = _same_process(by_token.get(token), Reply(outcome, report))
    return CheckedReplies((*by_token.values(), *anonymous), tuple(malformed), tuple(desynced))


def _same_process(known: Reply | None, reply: Reply) -> Reply:
    """One of two answers of one process (it has two roles): a failure, else the one that did the work."""
    if known is None:
        return reply
    if not known.outcome.ok or (reply.outcome.ok and reply.outcome.pause_s is None):
        return known
    return reply


def _report_of(result: Mapping[str, Any]) -> Report | None:
    report = result.get("report")
    if not isinstance(report, dict):
        return None
    try:
        return parse_report(
            report.get("description"), report.get("numbers"), report.get("collecting_since_ns")
        )
    except ReportError:
        return None


def _identity(value: Mapping[str, Any]) -> Identity:
    roles = value.get("roles")
    if not isinstance(roles, list) or not roles or any(role not in ROLES for role in roles):
        raise ReportError("it names no role that is known")
    token = value.get("token")
    if not isinstance(token, str) or not 0 < len(token) <= 64:
        raise ReportError("it has no token")
    return Identity(
        roles=tuple(sorted(set(roles), key=ROLES.index)),
        dp_rank=_rank(value.get("dp_rank"), "dp_rank"),
        rank=_rank(value.get("rank"), "rank"),
        token=token,
        pid=_whole_or_none(value.get("pid")),
        started_at=_time_or_none(value.get("started_at")) or 0.0,
        **{
            name: _text_or_none(value.get(name))
            for name in (
                "host", "python", "collector", "engine", "agent", "page_error", "agent_error",
            )
        },
    )  # fmt: skip


def _topology(value: Any) -> Topology:
    if not isinstance(value, dict):
        return Topology()
    ranks = value.get("dp_ranks")
    dp_ranks = tuple(rank for rank in (ranks if isinstance(ranks, list) else []) if _is_rank(rank))[
        :MAXIMUM_PROCESSES
    ]
    workers = _whole_or_none(value.get("workers")) or 0
    api_servers = _whole_or_none(value.get("api_servers")) or 0
    if not (0 <= workers <= MAXIMUM_PROCESSES and 0 <= api_servers <= MAXIMUM_PROCESSES):
        raise ReportError("its topology names too many processes")
    if workers * max(1, len(dp_ranks)) > MAXIMUM_PROCESSES:
        raise ReportError("its topology names too many processes")
    return Topology(dp_ranks, workers, api_servers)


def _state(value: Mapping[str, Any]) -> State:
    mode, generation = value.get("mode"), value.get("generation")
    if mode not in POLICIES:
        raise ReportError("its mode is not known")
    if not _is_whole(generation) or not 0 <= generation <= MAXIMUM_GENERATION:
        raise ReportError("its generation is no such number")
    return State(
        ready=value.get("ready") is True,
        mode=str(mode),
        generation=generation,
        owner=_text_or_none(value.get("owner")),
        entered_at=_time_or_none(value.get("entered_at")),
        interval_s=_number_or_none(value.get("interval_s")),
        pause_budget_ms=_number_or_none(value.get("pause_budget_ms")),
        max_rss_growth_bytes=_whole_or_none(value.get("max_rss_growth_bytes")),
        reason=_reason(value.get("reason")),
        refused=_reason(value.get("refused")),
        collect_pending=value.get("collect_pending") is True,
        exits=_counts(value.get("exits")),
        drift=_reason(value.get("drift")),
        drifts=_counts(value.get("drifts")),
        operation=parse_outcome(value.get("operation")),
    )


def _counts(value: Any) -> dict[str, int]:
    return {
        name: count
        for name, count in (value.items() if isinstance(value, dict) else ())
        if isinstance(name, str) and 0 < len(name) <= 64 and _is_whole(count) and count >= 0
    }


def _reason(value: Any) -> Reason | None:
    if not isinstance(value, dict) or not isinstance(value.get("code"), str):
        return None
    return Reason(
        code=value["code"][:64],
        detail=_text_or_none(value.get("detail")) or "",
        generation=_whole_or_none(value.get("generation")),
    )


def _numbers(value: Any) -> Mapping[str, int | None]:
    if not isinstance(value, Mapping):
        return dict.fromkeys(NUMBER_NAMES)
    return {name: _whole_or_none(value.get(name)) for name in NUMBER_NAMES}


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ReportError(f"its {name} is missing")
    return value


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63


def _whole_or_none(value: Any) -> int | None:
    return value if _is_whole(value) else None


def _is_rank(value: Any) -> TypeGuard[int]:
    return _is_whole(value) and 0 <= value <= MAXIMUM_RANK


def _rank(value: Any, name: str) -> int:
    if not _is_rank(value):
        raise ReportError(f"its {name} is no rank")
    return int(value)


def _number_or_none(value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300:
        return float(value) if math.isfinite(value) else None
    return None


def _time_or_none(value: Any) -> float | None:
    number = _number_or_none(value)
    return number if number is not None and 0 <= number <= LAST_TIME else None


def _text_or_none(value: Any) -> str | None:
    return value[:1000] if isinstance(value, str) else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
