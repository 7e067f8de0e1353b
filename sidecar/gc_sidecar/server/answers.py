"""The shapes of all answers: `views` makes them, and the OpenAPI document describes them from here.

A shape may get further members; those that it has stay. Whatever is not known is null.
"""

from __future__ import annotations

# pydantic reads no other TypedDict before Python 3.12.
from typing import Literal

from typing_extensions import NotRequired, TypedDict


class Coverage(TypedDict):
    """Processes that have applied the desired generation, of those that the engine has."""

    acknowledged: int
    expected: int


class Policy(TypedDict):
    """The desired policy."""

    mode: str
    generation: int
    owner: str | None
    entered_at: str | None
    lease_expires_at: str | None
    interval_s: float | None
    pause_budget_ms: float | None
    max_rss_growth_bytes: int | None
    reason: str | None


class Reason(TypedDict):
    """Something that stands in the way, and what to do about it."""

    code: str
    detail: str
    remedy: str | None
    blocking: bool


class Collector(TypedDict):
    """How a process's GC is set."""

    enabled: bool | None
    threshold: list[int | None] | None
    collector: str | None
    python: str | None


class PauseTotals(TypedDict):
    """All pauses of one GC generation."""

    count: int | None
    total_s: float | None
    max_s: float | None


class PausesByGeneration(TypedDict):
    """Those of all three."""

    gen0: PauseTotals
    gen1: PauseTotals
    gen2: PauseTotals


class Freezes(TypedDict):
    """How often a process's heap was frozen."""

    count: int | None
    since_maintain: int | None


class Memory(TypedDict):
    """A process's memory, and that of its device."""

    anonymous_bytes: int | None
    file_bytes: int | None
    shared_bytes: int | None
    growth_bytes: int | None
    device_allocated_bytes: int | None
    device_reserved_bytes: int | None


class ProcessRow(TypedDict):
    """One process of the engine, or one place without any."""

    role: str
    roles: list[str]
    dp_rank: int
    rank: int
    pid: int | None
    host: str | None
    state: str
    reason: str | None
    mode: str | None
    observed_generation: int | None
    ready: bool | None
    collect_pending: bool | None
    drifts: dict[str, int] | None
    gc: Collector
    pauses: PausesByGeneration
    pauses_over_budget: int | None
    freezes: Freezes
    collecting_for_s: float | None
    memory: Memory


class ProcessOutcome(TypedDict):
    """What one process did."""

    role: str
    roles: list[str]
    dp_rank: int
    rank: int
    pid: int | None
    ok: bool
    code: str | None
    detail: str | None
    pause_s: float | None
    collected_objects: int | None
    resident_delta_bytes: int | None
    device_delta_bytes: int | None


class OperationHead(TypedDict):
    """What is told of every operation."""

    id: str
    kind: str
    state: str
    generation: int | None
    owner: str
    transport: str | None
    requested_at: str | None
    duration_s: float | None
    rolled_back: bool | str | None
    code: str | None
    detail: str | None


class Operation(OperationHead):
    """One operation and what it did in each process."""

    processes: list[ProcessOutcome]


class OperationLine(OperationHead):
    """An operation among others: how many processes did it, of those that were asked."""

    done: int
    asked: int


class Operations(TypedDict):
    """GET /gc/operations"""

    operations: list[OperationLine]


class SafeToMeasure(TypedDict):
    """Whether it is, right now: `yes`, `no` or `unknown`; in a word or two for people; and why."""

    answer: Literal["yes", "no", "unknown"]
    word: str
    why: str


class Status(TypedDict):
    """GET /gc"""

    safe_to_measure: SafeToMeasure
    policy: Policy
    coverage: Coverage
    transport: str
    operation: Operation | None
    reasons: list[Reason]
    processes: list[ProcessRow]


class OperationAnswer(TypedDict):
    """GET /gc/operations/{operation_id}"""

    operation: Operation


class Lease(TypedDict):
    """When the policy ends, and how to have it last longer."""

    expires_at: str | None
    renew: str


class ChangeAnswer(TypedDict):
    """The answer to a change."""

    operation: Operation
    lease: NotRequired[Lease]


class Process(TypedDict):
    """Which process."""

    role: str
    roles: list[str]
    dp_rank: int
    rank: int
    pid: int | None


class Pause(Process):
    """One collection."""

    started_at: str | None
    duration_s: float
    gc_generation: int | None
    trigger: str
    collected_objects: int


class Pauses(TypedDict):
    """GET /gc/pauses"""

    pauses: list[Pause]
    lost: int
    matching: int
    complete_since: str | None


class WindowLimits(TypedDict):
    """What a clean window stays within; null is no limit."""

    max_pause_ms: float
    max_stall_ms: float | None
    max_stall_share: float | None
    max_growth_bytes: int | None


class WindowLine(TypedDict):
    """A window among others; `clean` is null before it is closed."""

    id: str
    name: str | None
    state: str
    opened_at: str | None
    closed_at: str | None
    duration_s: float
    limits: WindowLimits
    clean: bool | None


class VerdictReason(TypedDict):
    """What speaks against a window."""

    code: str
    detail: str


class Stall(TypedDict):
    """How long a lockstep group stood still."""

    dp_rank: int
    stall_s: float
    share: float


class WindowPolicy(TypedDict):
    """The policy's mode at either end."""

    at_opening: str
    at_closing: str


class WindowOperation(TypedDict):
    """An operation that fell into a window."""

    id: str
    kind: str
    state: str
    owner: str
    requested_at: str | None


class Latency(TypedDict):
    """What vLLM's own latency says."""

    says: str
    stalled_s: float | None
    gc_s: float | None
    explained: float | None
    typical_s: float | None
    tokens: int | None


class WindowPauseTotals(TypedDict):
    """The pauses of one GC generation in a window."""

    count: int
    total_s: float
    max_s: float | None
    lost_records: int
    lost_s: float


class WindowPausesByGeneration(TypedDict):
    """Those of all three."""

    gen0: WindowPauseTotals
    gen1: WindowPauseTotals
    gen2: WindowPauseTotals


class WindowProcess(Process):
    """One process in a window."""

    host: str | None
    read_to_the_end: bool
    pauses: WindowPausesByGeneration
    growth_bytes: int | None
    device_growth_bytes: int | None


class Verdict(TypedDict):
    """The verdict on a window."""

    clean: bool
    reasons: list[VerdictReason]
    longest_pause: Pause | None
    stalls: list[Stall]
    policy: WindowPolicy
    operations: list[WindowOperation]
    latency: Latency
    lost_records: int
    processes: list[WindowProcess]
    pauses: list[Pause]
    pauses_not_listed: int
    not_seen: str


class Window(WindowLine):
    """A window with its verdict; of one that is open, as if it were closed now."""

    verdict: Verdict


class WindowAnswer(TypedDict):
    """One window."""

    window: Window


class Windows(TypedDict):
    """GET /gc/windows"""

    windows: list[WindowLine]


class Health(TypedDict):
    """GET /healthz"""

    status: str


class Readiness(TypedDict):
    """GET /readyz"""

    ready: bool
    reasons: list[Reason]


class Version(TypedDict):
    """GET /version"""

    version: str
    python: str
    agent: str
    agents: list[str]
    engines: list[str]


class Index(TypedDict):
    """GET /"""

    name: str
    version: str
    routes: list[str]
    openapi: str
