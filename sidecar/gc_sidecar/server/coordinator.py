"""The one place from which anything is changed: it admits one operation at a time and keeps what came of it.

How a change is made is in `changes`, how a command reaches the processes in `carrier`, and what happens without
being asked in `watch`.
"""

from __future__ import annotations

import asyncio
import logging
import time

from gc_sidecar.server import changes
from gc_sidecar.server.carrier import Carrier
from gc_sidecar.server.changes import Means, Running
from gc_sidecar.server.engines import Engines
from gc_sidecar.server.knowledge import Knowledge
from gc_sidecar.server.operations import Change, Ledger, Operation
from gc_sidecar.server.problems import Problem
from gc_sidecar.server.run_dir import RunDir
from gc_sidecar.server.sight import Sight
from gc_sidecar.server.tally import Tally
from gc_sidecar.server.tasks import spawn
from gc_sidecar.server.timing import Timing
from gc_sidecar.server.watch import Watch
from gc_sidecar_agent.command import Command

logger = logging.getLogger("gc_sidecar.server")

# For how long an operation may go on when the sidecar is told to stop: answers take a moment, too.
STOP_PATIENCE_S = 0.7


class Coordinator:
    """See the module."""

    def __init__(
        self,
        run_dir: RunDir,
        sight: Sight,
        engines: Engines,
        timing: Timing,
        tally: Tally,
        max_maintain_pause_s: float | None,
    ) -> None:
        self.knowledge = Knowledge(run_dir, sight, engines, timing)
        self.ledger = Ledger()
        self.watch = Watch(
            self.knowledge, timing, lambda: self._running is not None, self._record_orphan
        )
        carrier = Carrier(self.knowledge, timing)
        self._means = Means(self.knowledge, self.watch, carrier, timing, max_maintain_pause_s)
        self._tally = tally
        self._running: Running | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False

    @property
    def running(self) -> Operation | None:
        """The operation that runs now."""
        return self.ledger.get(self._running.change.operation_id) if self._running else None

    def _record_orphan(self, maintain: Command) -> None:
        self.ledger.put(
            Operation(
                Change("maintain", maintain.operation_id, owner=maintain.owner),
                requested_at=time.time(),
                state="unknown",
                generation=maintain.generation,
                problem=Problem(
                    "outcome_unknown", "the sidecar restarted while this operation ran"
                ),
            )
        )

    async def submit(self, change: Change) -> Operation:
        """Run `change`, or join it where it was asked for before. Raises Problem where it is refused.

        It goes on when the caller leaves. The operation that is returned still runs where it is a
        maintenance that outlasts its deadline.
        """
        if self.ledger.get(change.operation_id) is None and (
            self._running is None or self._is_superseded_by(change)
        ):
            await self._have_run_dir()
            while self._is_superseded_by(change):
                await self._end_running(change)
        # From here on nothing is awaited until it is registered as running.
        known = self.ledger.get(change.operation_id)
        if known is None:
            self._admit(change)
            self.knowledge.has_spoken = True
            self._running = Running(change, self.ledger)
            self.ledger.put(Operation(change, requested_at=time.time()))
            self._task = asyncio.create_task(self._run(self._running))
        elif not known.change.asks_the_same(change):
            raise Problem(
                "operation_id_reused",
                f"operation {change.operation_id} was a {known.change.kind} with other fields",
            )
        running, task = self._running, self._task
        if running is not None and task is not None and running.change.asks_the_same(change):
            goes_on = spawn(running.goes_on.wait())
            try:
                await asyncio.wait({task, goes_on}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                goes_on.cancel()
        operation = self.ledger.get(change.operation_id)
        assert operation is not None
        return operation

    def stop(self) -> None:
        """Begin nothing more: the sidecar ends. What runs has a moment to end, for whoever waits for it."""
        self._is_stopping = True
        why = (
            "the sidecar was told to stop while it ran: what was sent is done all the same, and nothing is rolled"
            " back; the next sidecar, or the lease, ends what it began"
        )
        asyncio.get_running_loop().call_later(STOP_PATIENCE_S, self._cut_short, why)

    def _is_superseded_by(self, change: Change) -> bool:
        """Whether what runs has to give way: somebody wants normal GC now, whatever hangs."""
        running = self._running
        return (
            (change.kind == "restore" and change.force)
            and running is not None
            and running.change.kind != "restore"
        )

    async def _end_running(self, change: Change) -> None:
        """Wait no longer for what runs; what it sent may still be done, before what `change` sends."""
        running, task = self._running, self._task
        await asyncio.sleep(0)  # cancelled before it began, it would never say that it has ended
        if task is not None and running is self._running:
            self._cut_short(
                f"{change.operation_id} has ended it: a forced restore waits for nothing"
            )
            await asyncio.wait({task})

    def _cut_short(self, why: str) -> None:
        running, task = self._running, self._task
        if running is None or task is None or task.done():
            return
        operation = self.ledger.get(running.change.operation_id)
        if operation is not None and operation.problem is None:  # else somebody has done it
            running.record(problem=Problem("outcome_unknown", why))
            task.cancel()

    async def _have_run_dir(self) -> None:
        """Refuse where another sidecar controls this engine; where one did until now, know what it wanted."""
        run_dir = self.knowledge.run_dir
        if not await run_dir.claim():
            assert run_dir.claim_fault is not None
            raise Problem("other_sidecar", run_dir.claim_fault.detail)
        await self.watch.take_over_if_need_be()

    def _admit(self, change: Change) -> None:
        """Refuse what may not run now."""
        if self._is_stopping:
            raise Problem("sidecar_stopping", "the sidecar was told to stop; nothing was changed")
        if self._running is not None:
            running_id = self._running.change.operation_id
            is_restored = self._running.change.kind == "restore"
            do_not_wait = "" if is_restored else "; POST /gc/restore?force=true does not wait"
            raise Problem(
                "operation_running",
                f"operation {running_id} has not ended",
                remedy=f"wait for it: GET /gc/operations/{running_id}{do_not_wait}",
                extra={"operation_id": running_id},
                headers={"Retry-After": "1", "Location": f"/gc/operations/{running_id}"},
            )
        self.watch.end_lease_in_time()
        desired = self.knowledge.desired
        if change.kind == "lease" and not desired.is_on:
            ended = f" ({desired.reason})" if desired.reason else ""
            raise Problem("no_policy", f"there is no lease to renew: the policy is off{ended}")
        if desired.is_on and desired.owner != change.owner and not change.force:
            raise Problem(
                "owned_by_other",
                f"the {desired.mode} policy belongs to {desired.owner!r}, not to {change.owner!r}",
                extra={"owner": desired.owner},
            )

    async def _run(self, running: Running) -> None:
        try:
            await changes.run(self._means, running)
        except Problem as problem:
            running.record(state="failed", problem=problem)
        except Exception as error:
            logger.exception(
                "operation %s failed",
                running.change.operation_id,
                extra={"fields": {"event": "internal_error", "id": running.change.operation_id}},
            )
            detail = f"{type(error).__name__}: {error}"
            running.record(state="unknown", problem=Problem("internal_error", detail))
        finally:
            duration_s = time.monotonic() - running.started
            operation = running.record(
                duration_s=duration_s,
                transport=self.knowledge.engines.transport,
                lease_expires_at=self.knowledge.desired.lease_expires_at(),
                lease_owner=self.knowledge.desired.owner,
            )
            if operation.is_running:  # cancelled
                operation = running.record(state="unknown")
            self._running = self._task = None
            self._tally.count_operation(running.change.kind, operation.state, duration_s)
            _log(operation)


def _log(operation: Operation) -> None:
    """One line for each operation; a warning where it was not done."""
    change = operation.change
    fields = {
        "event": "operation",
        "id": operation.id,
        "kind": change.kind,
        "state": operation.state,
        "generation": operation.generation,
        "owner": change.owner,
        "force": change.force,
        "duration_s": round(operation.duration_s or 0.0, 6),
        "coverage": f"{sum(line.ok for line in operation.lines)}/{len(operation.lines)}",
        "transport": operation.transport,
        "rolled_back": operation.rolled_back,
        "code": operation.problem.code if operation.problem else None,
        "detail": operation.problem.detail if operation.problem else None,
    }
    level = logging.INFO if operation.state in ("applied", "partial") else logging.WARNING
    logger.log(level, "operation", extra={"fields": fields})
