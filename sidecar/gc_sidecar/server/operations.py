"""Operations: what was asked, how it stands, and what each process did about it.

Records are frozen and replaced as a whole; the ledger keeps the last ones, for retries and for people.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from gc_sidecar.server.desired import ANONYMOUS
from gc_sidecar.server.problems import Problem
from gc_sidecar.server.reports import Key
from gc_sidecar_agent.command import (
    DEFAULT_DEADLINE_S,
    DEFAULT_INTERVAL_S,
    Outcome,
)

RUNNING = "running"
REMEMBERED = 256


@dataclass(frozen=True)
class Change:
    """A request to change something, checked. `kind` is a policy kind, `maintain` or `lease`; `lease_s` is None
    where the policy's own length is meant."""

    kind: str
    operation_id: str
    owner: str = ANONYMOUS
    deadline_s: float = DEFAULT_DEADLINE_S
    force: bool = False
    allow_partial: bool = False
    interval_s: float = DEFAULT_INTERVAL_S
    lease_s: float | None = None
    pause_budget_ms: float | None = None
    max_rss_growth_bytes: int | None = None
    collect_first: bool = True
    when: str = "now"
    trim: bool = False

    def asks_the_same(self, other: Change) -> bool:
        """Whether a retry asks for what was asked before; it may have more or less patience."""
        return self == replace(other, deadline_s=self.deadline_s)


@dataclass(frozen=True)
class Line:
    """What one process did. `final` is whether waiting longer could not change it; `own_code` whether
    `code` is the process's own word and not our guess."""

    key: Key
    roles: tuple[str, ...]
    pid: int | None
    ok: bool
    code: str | None = None
    detail: str | None = None
    outcome: Outcome | None = None
    final: bool = True
    own_code: bool = False
    live: bool = True


@dataclass(frozen=True)
class Operation:
    """One change and how it stands.

    `rolled_back` is None where there was nothing to roll back, else True, False or "unknown".
    """

    change: Change
    requested_at: float
    state: str = RUNNING
    generation: int | None = None
    transport: str | None = None
    duration_s: float | None = None
    lines: tuple[Line, ...] = ()
    rolled_back: bool | str | None = None
    problem: Problem | None = None
    lease_expires_at: float | None = None
    lease_owner: str | None = None

    @property
    def id(self) -> str:
        """The id that every process echoes."""
        return self.change.operation_id

    @property
    def is_running(self) -> bool:
        """Whether it goes on."""
        return self.state == RUNNING


class Ledger:
    """The last operations by id. A running one is never forgotten."""

    def __init__(self) -> None:
        self._operations: OrderedDict[str, Operation] = OrderedDict()

    def get(self, operation_id: str) -> Operation | None:
        """The operation with this id, None where it is not known (any more)."""
        return self._operations.get(operation_id)

    def all(self) -> list[Operation]:
        """Every operation that is remembered, oldest first."""
        return list(self._operations.values())

    def ended_ids(self) -> frozenset[str]:
        """The ids of those that have ended."""
        return frozenset(each.id for each in self.all() if not each.is_running)

    def put(self, operation: Operation) -> Operation:
        """Record an operation, or its newest state."""
        self._operations[operation.id] = operation
        while len(self._operations) > REMEMBERED:
            oldest = next(
                (i for i, each in self._operations.items() if not each.is_running), operation.id
            )
            del self._operations[oldest]
        return operation

    def update(self, operation_id: str, **changes: Any) -> Operation:
        """Replace fields of an operation that is recorded."""
        return self.put(replace(self._operations[operation_id], **changes))


def new_id(purpose: str) -> str:
    """An operation id of our own."""
    return f"{purpose}-{uuid.uuid4().hex[:12]}"
