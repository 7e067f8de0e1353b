"""The GC policy of this process: entering, the tick, maintenance, and going back to what was there before.

Every change goes through one lock and ends in a state that is complete: a policy with its freezes, or CPython's
own GC as it was found. What it knows is published on the page by the agent.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from gc_sidecar_agent.collection import Collect, Collection, CollectionError
from gc_sidecar_agent.collector import UNSUPPORTED_REASONS, is_heap_frozen
from gc_sidecar_agent.command import POLICY_KINDS, Command, Outcome
from gc_sidecar_agent.memory import read_device_memory, read_memory, trim
from gc_sidecar_agent.meter import PauseMeter
from gc_sidecar_agent.page import NUMBER_INDEX
from gc_sidecar_agent.rules import Rule, RuleError, rule_of

OFF = "off"
# How long what somebody else did to GC may last before it is put right.
DRIFT_GRACE_S = 2.0
# How often the collection of nothing is tried that a frozen heap needs under `budget`.
RECOUNT_S = 5.0
REMEMBERED_OUTCOMES = 64

_FREEZES = NUMBER_INDEX["freezes"]
_FREEZES_SINCE_MAINTAIN = NUMBER_INDEX["freezes_since_maintain"]
_MAINTAINS = NUMBER_INDEX["maintains"]
_MAINTAIN_TOTAL_NS = NUMBER_INDEX["maintain_total_ns"]
_RECLAIMED_OBJECTS = NUMBER_INDEX["reclaimed_objects"]
_FULL_COUNT = NUMBER_INDEX["gen2_count"]
_FULL_STARTS = NUMBER_INDEX["full_starts"]


class PolicyError(Exception):
    """A command that this process did not carry out; `code` is stable, `detail` is for people."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


@dataclass(frozen=True)
class Found:
    """What GC was like when a policy was entered, to be put back exactly."""

    enabled: bool
    thresholds: tuple[int, int, int]
    frozen: bool


@dataclass(frozen=True)
class Reason:
    """Why a policy ended by itself, or what somebody else did to this process's GC while it was in force."""

    code: str
    detail: str


class Policy:
    """The policy of this process. `run` carries out commands, `poll` keeps leases, guards and ticks."""

    def __init__(self, meter: PauseMeter, collector: str) -> None:
        self.mode = OFF
        self.generation = 0
        # The command that the policy in force was entered with.
        self.settings: Command | None = None
        self.entered_at: float | None = None
        self.reason: Reason | None = None
        self.refused: dict[str, Any] | None = None
        self.collect_pending = False
        self.exits: dict[str, int] = {}
        self.drift: Reason | None = None
        self.drifts: dict[str, int] = {}  # how often, by the code of the reason
        self.last_outcome: Outcome | None = None
        self.changes = 0  # rises with every change that `description` shows
        self.lease_deadline: float | None = None  # on time.monotonic()
        self.entry_anonymous_bytes: int | None = None
        self.entry_measured_at = 0.0  # on time.monotonic()
        self._meter = meter
        self._collector = collector
        self._lock = threading.Lock()
        # By id, kind and generation: ids may be a script's own and come again after another policy.
        self._outcomes: OrderedDict[tuple[str, str, int], Outcome] = OrderedDict()
        self._found: Found | None = None
        self._rule = Rule()  # of the policy in force
        self._next_recount = 0.0
        self._frozen_by_engine = False
        self._refreeze_pending = False
        self._pending_since_full = 0
        self._next_tick = 0.0
        # Whether it is the engine's own thread that puts GC back.
        self._may_enable = True
        self._found_at_entry: Found | None = None
        self._drifted_at = 0.0
        self._full_at_freeze = 0  # full collections that were not ours, when we last froze

    # --- what others ask ---

    def note_ready(self) -> None:
        """Read once, when the engine is ready, whether it froze its heap: the count walks the whole list."""
        self._frozen_by_engine = is_heap_frozen()

    def outcome_of(self, command: Command) -> Outcome | None:
        """What this process did about an operation, None where it has not (or long ago)."""
        return self._outcomes.get(_identity(command))

    def lease_remaining_s(self) -> float | None:
        """Seconds until the policy ends by itself, None where there is none."""
        deadline = self.lease_deadline
        if deadline is None or self.mode == OFF:
            return None
        return max(0.0, deadline - time.monotonic())

    def renew_lease(self, remaining_s: float, generation: int) -> bool:
        """Let the policy of `generation` last `remaining_s` from now; False where it is not in force."""
        if self.mode == OFF or generation != self.generation:
            return False
        self.lease_deadline = time.monotonic() + remaining_s
        return True

    def run(self, command: Command, collect: Collect, on_engine_thread: bool = True) -> Outcome:
        """Carry out one operation, once: a repeated operation id gets the outcome of the first time.

        Without `on_engine_thread` somebody may have disabled GC for this moment (a graph capture), so it stays so.
        """
        deadline = time.monotonic() + command.deadline_s
        with self._serialised(deadline) as acquired:
            if not acquired:
                return _failure(
                    command, "policy_busy", "another operation of this process still runs"
                )
            known = self.outcome_of(command)
            if known is not None:
                return known
            self._may_enable = on_engine_thread
            before = read_memory().anonymous_bytes
            device_before = read_device_memory()[0]
            try:
                result, detail = self._carry_out(command, collect, deadline)
            except (PolicyError, CollectionError) as error:
                outcome = _failure(command, error.code, error.detail)
            except Exception as error:
                outcome = _failure(command, "agent_error", f"{type(error).__name__}: {error}")
            else:
                outcome = Outcome(
                    operation_id=command.operation_id,
                    kind=command.kind,
                    generation=self.generation,
                    ok=True,
                    detail=detail,
                    pause_s=result.pause_s if result else None,
                    collected_objects=result.collected_objects if result else None,
                    resident_delta_bytes=_difference(read_memory().anonymous_bytes, before),
                    device_delta_bytes=_difference(read_device_memory()[0], device_before),
                )
            self._outcomes[_identity(command)] = outcome
            if len(self._outcomes) > REMEMBERED_OUTCOMES:
                self._outcomes.popitem(last=False)
            self.last_outcome = outcome
            self.changes += 1
            return outcome

    def settle(self, collect: Collect, deadline: float) -> None:
        """Run the collection that a restore from another thread left pending, if there is one."""
        if not self.collect_pending:
            return
        with self._serialised(deadline) as acquired:
            if acquired and self.collect_pending and self.mode == OFF:
                collect("restore", deadline)
                self._finish_pending()

    def poll(
        self, anonymous_bytes: int | None, collect: Collect, measured_at: float = math.inf
    ) -> None:
        """Keep the lease, the growth limit and the tick. Called on the agent's thread, every poll.

        `measured_at` is when the memory was read (time.monotonic()): what was so before the policy was entered is
        no growth.
        """
        self._notice_pending_collection()
        if self.mode == OFF or not self._lock.acquire(blocking=False):
            return  # where an operation runs, the next poll comes in a moment
        try:
            if self.mode == OFF:
                return
            self._may_enable = False
            now = time.monotonic()
            is_since_entry = measured_at >= self.entry_measured_at
            end = self._reason_to_end(anonymous_bytes if is_since_entry else None, now)
            if end is None:
                end = self._keep(now, collect)
            if end is not None:
                self._leave(end, collect, now + 2.0)
        finally:
            self._lock.release()

    def leave_behind(self) -> None:
        """In a forked child: the parent's policy is not its own. No collection, only what is instant."""
        freeze_again = self._refreeze_pending
        if self.mode != OFF and self._found is not None:
            self._put_back()
            freeze_again = self._found.frozen
        if freeze_again:
            gc.freeze()

    def description(self) -> dict[str, Any]:
        """The policy's part of the page, JSON-safe."""
        settings = self.settings
        return {
            "mode": self.mode,
            "generation": self.generation,
            "owner": settings.owner if settings else None,
            "entered_at": self.entered_at,
            "interval_s": settings.interval_s if settings else None,
            "pause_budget_ms": settings.pause_budget_ms if settings else None,
            "max_rss_growth_bytes": settings.max_rss_growth_bytes if settings else None,
            "reason": vars(self.reason) if self.reason else None,
            "refused": self.refused,
            "collect_pending": self.collect_pending,
            "exits": dict(self.exits),
            "drift": vars(self.drift) if self.drift else None,
            "drifts": dict(self.drifts),
            "operation": self.last_outcome.to_dict() if self.last_outcome else None,
        }

    # --- the commands; the lock is held ---

    def _carry_out(
        self, command: Command, collect: Collect, deadline: float
    ) -> tuple[Collection | None, str | None]:
        if command.kind == "maintain":
            return self._maintain(command, collect, deadline), None
        if command.kind not in POLICY_KINDS:
            raise PolicyError("bad_command", f"{command.kind} is not an operation")
        if command.generation < self.generation:
            raise PolicyError(
                "stale_generation",
                f"generation {command.generation} is older than {self.generation}, which is in force",
            )
        if command.kind == "restore":
            return self._restore(command, collect, deadline)
        return self._enter(command, collect, deadline)

    def _enter(
        self, command: Command, collect: Collect, deadline: float
    ) -> tuple[Collection | None, str | None]:
        unsupported = UNSUPPORTED_REASONS.get(self._collector)
        if unsupported is not None:
            self._refuse(command, "collector_unsupported", unsupported)
        if command.kind == "budget" and command.pause_budget_ms is None:
            raise PolicyError("bad_command", "a budget needs its pause_budget_ms")
        if self._is_in_force(command):
            self._renew(command)
            try:
                self._mend()
            except Exception as error:
                self._fail(error, collect, deadline)
            self._note_applied(command)
            return None, "already in force; settings and lease renewed"
        collection, detail = None, None
        if command.collect_first:
            try:
                collection = collect("entry", deadline)
            except CollectionError as error:
                if error.code != "collect_pending":
                    raise
                detail = f"entered without collecting first: {error.detail}"
        if self.mode == OFF:
            thresholds = gc.get_threshold()
            self._found = Found(gc.isenabled(), thresholds, self._is_frozen_by_engine())
            self._found_at_entry = self._found
        elif self.mode != command.kind and self._found is not None:
            gc.set_threshold(*self._found.thresholds)
        self.collect_pending = self._refreeze_pending = False
        # On before anything is held off: a fork, or a signal that raises here, finds a policy that ends.
        self.mode = command.kind
        self._renew(command)
        self._rule.let_go()
        self._rule = rule_of(command, self._meter)
        try:
            # A full collection that comes in between walks nothing.
            self._freeze()
            self._hold()
        except Exception as error:
            self._fail(error, collect, deadline)
        self._recount(collect, "entry", deadline)
        self.entered_at = time.time()
        self.entry_anonymous_bytes = read_memory().anonymous_bytes
        self.entry_measured_at = time.monotonic()
        self.reason, self.drift = None, self._find_drift()
        self._note_applied(command)
        return collection, detail

    def _restore(
        self, command: Command, collect: Collect, deadline: float
    ) -> tuple[Collection | None, str | None]:
        collection: Collection | None = None
        detail: str | None = "nothing to restore"
        # `reason` stays where there is nothing to leave: the restore that rolls a failed freeze back
        # must not hide why it failed.
        if self.mode != OFF:
            collection = self._leave(None, collect, deadline)
            detail = None
        elif self.collect_pending:
            collection = self._collect_pending(collect, deadline)
            detail = "ran the collection that was pending"
        self._note_applied(command)
        if self.collect_pending:
            detail = "thresholds and heap are as found; the collection is still pending"
        return collection, detail

    def _maintain(self, command: Command, collect: Collect, deadline: float) -> Collection:
        if self.mode == OFF and not self.collect_pending:
            self._frozen_by_engine = is_heap_frozen()
        # A restore left the heap unfrozen until it is collected: what fails now must not freeze it again.
        freeze_again = self.mode != OFF or (not self.collect_pending and self._frozen_by_engine)
        self._rule.suspend()
        gc.unfreeze()
        since_maintain = self._meter.words[_FREEZES_SINCE_MAINTAIN]
        try:
            collection = collect("maintain", deadline)
            since_maintain = -1  # the freeze that follows is a part of it
        finally:
            if freeze_again:
                try:
                    self._freeze()
                    self._meter.words[_FREEZES_SINCE_MAINTAIN] = since_maintain + 1
                    self._rule.resume()
                except Exception as error:
                    self._fail(error, collect, deadline)
                self._recount(collect, "maintain", deadline)
        self._meter.words[_MAINTAINS] += 1
        self._meter.words[_MAINTAIN_TOTAL_NS] += int(collection.pause_s * 1e9)
        self._meter.words[_RECLAIMED_OBJECTS] += collection.collected_objects
        if self.collect_pending:
            self._finish_pending()
        if command.trim:
            trim()
        return collection

    def _refuse(self, command: Command, code: str, detail: str) -> None:
        self.refused = {"generation": command.generation, "code": code, "detail": detail}
        raise PolicyError(code, detail)

    def _renew(self, command: Command) -> None:
        self.settings = command
        self.lease_deadline = time.monotonic() + command.lease_s
        self._next_tick = time.monotonic() + command.interval_s

    def _note_applied(self, command: Command) -> None:
        self.generation = command.generation
        self.refused = None

    # --- the pieces ---

    def _is_in_force(self, command: Command) -> bool:
        """Whether `command` asks for the policy that is there already, and that still holds."""
        budget_ms = self.settings.pause_budget_ms if self.settings else None
        is_the_same = (self.mode, budget_ms) == (command.kind, command.pause_budget_ms)
        return is_the_same and self._rule.is_held()

    def _hold(self) -> None:
        if self._found is not None:
            self._rule.hold(self._found.thresholds)

    def _recount(self, collect: Collect, trigger: str, deadline: float) -> None:
        self._next_recount = time.monotonic() + RECOUNT_S
        with suppress(CollectionError):  # the next poll that may tries again
            self._rule.recount(collect, trigger, deadline)

    def _freeze(self) -> None:
        gc.freeze()
        self._meter.words[_FREEZES] += 1
        self._meter.words[_FREEZES_SINCE_MAINTAIN] += 1
        self._full_at_freeze = self._foreign_full_collections()
        if self.drift is not None and self.drift.code == "foreign_collection":
            # At once, and not at the next poll: whoever asked for this freeze looks now.
            self.drift = None
            self.changes += 1

    def _reason_to_end(self, anonymous_bytes: int | None, now: float) -> Reason | None:
        if self.lease_deadline is not None and now >= self.lease_deadline:
            return Reason("lease_expired", "the lease ended without a renewal")
        limit = self.settings.max_rss_growth_bytes if self.settings else None
        growth = _difference(anonymous_bytes, self.entry_anonymous_bytes)
        if limit is not None and growth is not None and growth > limit:
            return Reason(
                "rss_growth",
                f"anonymous memory grew by {growth} bytes since the policy was entered, more than"
                f" the limit of {limit}",
            )
        return None

    def _keep(self, now: float, collect: Collect) -> Reason | None:
        """Do what the policy in force needs from time to time; why it has to end, if it has."""
        if self._rule.holds_full_off and now >= self._next_tick:
            return self._tick(now)
        end = self._mind_drift(now)
        if end is not None or self.drift is not None:
            return end
        try:
            self._rule.adapt()
        except RuleError as error:
            return _freeze_failed(error)
        if self._rule.wants_recount and now >= self._next_recount:
            self._recount(collect, "entry", now + 1.0)
        return None

    def _tick(self, now: float) -> Reason | None:
        settings = self.settings
        self._next_tick = now + (settings.interval_s if settings else 60.0)
        try:
            self._freeze()
        except Exception as error:
            return _freeze_failed(error)
        return None

    def _mind_drift(self, now: float) -> Reason | None:
        """Notice what somebody else did to GC, and put it right where it is ours and has lasted: a benchmark or a
        graph capture that changes GC for a moment puts it back itself. Why the policy has to end, if it has."""
        before, self.drift = self.drift, self._find_drift()
        self.changes += self.drift != before
        if self.drift is None:
            if self._rule.holds_full_off:  # else those in force are ours, and tell nothing
                self._notice_thresholds_given_back()
            return None
        if before is None or self.drift.code != before.code:
            self._drifted_at = now
            self.drifts[self.drift.code] = self.drifts.get(self.drift.code, 0) + 1
            return None
        if now - self._drifted_at < DRIFT_GRACE_S or self.drift.code == "gc_disabled":
            return None
        self._drifted_at = now
        try:
            self._mend()
        except Exception as error:
            return _freeze_failed(error)
        return None

    def _mend(self) -> None:
        """Put right what somebody else did to GC, as far as it is ours."""
        drift = self._find_drift()
        if drift is None or drift.code == "gc_disabled":
            return
        if not self._rule.holds_full_off:
            self._hold()
            return
        if self._found is not None and drift.code == "thresholds_changed":
            # The newest wish for the time after the policy. (Under `budget` all three are ours: what somebody puts
            # back there may be what we had set.)
            self._found = replace(self._found, thresholds=gc.get_threshold())
            self._hold()
        self._freeze()

    def _notice_thresholds_given_back(self) -> None:
        """Who put back what they had saved under the policy wants after it what was there before."""
        entry = self._found_at_entry
        if entry is None or self._found is None:
            return
        was_away = self._found.thresholds[:2] != entry.thresholds[:2]
        if was_away and gc.get_threshold()[:2] == entry.thresholds[:2]:
            self._found = entry

    def _find_drift(self) -> Reason | None:
        if not self._rule.is_held():
            detail = f"somebody set the thresholds to {gc.get_threshold()}"
            return Reason("thresholds_changed", detail)
        if self._found is not None and self._found.enabled and not gc.isenabled():
            return Reason("gc_disabled", "somebody disabled GC; it is theirs to enable it again")
        if self._rule.holds_full_off and self._foreign_full_collections() > self._full_at_freeze:
            detail = "somebody ran a full collection, and may have unfrozen the heap for it"
            return Reason("foreign_collection", detail)
        return None

    def _foreign_full_collections(self) -> int:
        return self._meter.words[_FULL_COUNT] - self._meter.requested_collections

    def _fail(self, error: Exception, collect: Collect, deadline: float) -> None:
        """A freeze failed: never leave full collections off while nobody freezes."""
        reason = _freeze_failed(error)
        if self.mode != OFF:
            self._leave(reason, collect, deadline)
        raise PolicyError(reason.code, reason.detail) from error

    def _leave(self, reason: Reason | None, collect: Collect, deadline: float) -> Collection | None:
        """Back to what was found: thresholds and flag first, then the heap, then the collection."""
        self._put_back()
        self._rule = Rule()
        self.mode = OFF
        self.settings = None
        self.entered_at = None
        self.lease_deadline = None
        self.entry_anonymous_bytes = None
        self.reason = reason
        self.drift = None
        exit_reason = reason.code if reason else "restored"
        self.exits[exit_reason] = self.exits.get(exit_reason, 0) + 1
        self._refreeze_pending = self._found.frozen if self._found else False
        self.collect_pending = True
        # One that runs now began before the heap was unfrozen, so its end is not what is waited for.
        self._pending_since_full = self._meter.words[_FULL_STARTS]
        self.changes += 1
        return self._collect_pending(collect, deadline)

    def _collect_pending(self, collect: Collect, deadline: float) -> Collection | None:
        try:
            collection = collect("restore", deadline)
        except CollectionError:
            return None  # collect_pending says so; whoever comes next runs it
        self._finish_pending()
        return collection

    def _put_back(self) -> None:
        self._rule.let_go()
        if self._found is None:
            return
        if gc.get_threshold() != self._found.thresholds:
            gc.set_threshold(*self._found.thresholds)
        if self._found.enabled and not gc.isenabled() and self._may_enable:
            gc.enable()
        elif not self._found.enabled and gc.isenabled():
            gc.disable()
        gc.unfreeze()

    def _finish_pending(self) -> None:
        if self._refreeze_pending:
            try:
                gc.freeze()
            except Exception as error:
                self.reason = _freeze_failed(error)
        self.collect_pending = self._refreeze_pending = False
        self.changes += 1

    def _notice_pending_collection(self) -> None:
        """CPython's own next full collection does what a restore left pending."""
        if not self.collect_pending or self._meter.words[_FULL_COUNT] <= self._pending_since_full:
            return
        if self._lock.acquire(blocking=False):
            try:
                if self.collect_pending and self.mode == OFF:
                    self._finish_pending()
            finally:
                self._lock.release()

    def _is_frozen_by_engine(self) -> bool:
        # Asked again only where it was not frozen yet: then the list that the count walks is short, but for
        # the one time after the engine froze it.
        if not self._frozen_by_engine and not self._refreeze_pending:
            self._frozen_by_engine = is_heap_frozen()
        return self._frozen_by_engine or self._refreeze_pending

    @contextmanager
    def _serialised(self, deadline: float) -> Iterator[bool]:
        # Short waits in a loop rather than one long one: a collection that the agent's thread asks of the
        # main thread while it holds the lock needs the main thread to run bytecode.
        while not (acquired := self._lock.acquire(timeout=0.01)):
            if time.monotonic() >= deadline:
                break
        try:
            yield acquired
        finally:
            if acquired:
                self._lock.release()


def _freeze_failed(error: Exception) -> Reason:
    return Reason("freeze_failed", f"{type(error).__name__}: {error}")


def _identity(command: Command) -> tuple[str, str, int]:
    return command.operation_id, command.kind, command.generation


def _failure(command: Command, code: str, detail: str) -> Outcome:
    return Outcome(
        operation_id=command.operation_id,
        kind=command.kind,
        generation=command.generation,
        ok=False,
        code=code,
        detail=detail,
    )


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before
