"""How a policy keeps its promise in this process: the rule of `freeze` and the rule of `budget`.

A rule sets the thresholds while its policy is in force, and what the GC callback does by itself. When a policy
begins and ends is in `policy`.
"""

from __future__ import annotations

import gc
from collections import deque

from gc_sidecar_agent.collection import Collect
from gc_sidecar_agent.command import Command
from gc_sidecar_agent.meter import NEVER_NS, PauseMeter
from gc_sidecar_agent.page import NUMBER_INDEX

Thresholds = tuple[int, int, int]

# The third threshold that no count reaches. Above 2**31 - 1 set_threshold raises OverflowError.
HELD_OFF = 1 << 30

# What CPython up to 3.12 starts with. From 3.13 on it is 2,000, and gen1 collections alone take 2 to 6 ms.
BUDGET_THRESHOLD0 = 700
BUDGET_THRESHOLD1 = 10
# So many gen1 collections tell how long one takes.
GEN1_SAMPLES = 64

_YOUNG_RING_NEXT = NUMBER_INDEX["young_ring_next"]


class RuleError(Exception):
    """The interpreter does not obey what the rule sets."""


class Rule:
    """What all rules have: `hold` first, and `let_go` before the policy puts the thresholds back. By itself the
    rule of no policy, which keeps nothing."""

    # Where full collections are held off, who freezes is the policy, now and then, and whoever runs a full
    # collection nevertheless has probably unfrozen the heap for it.
    holds_full_off = True

    def hold(self, found: Thresholds) -> None:
        """Set what keeps the promise, where thresholds were `found`. Raises RuleError."""

    def is_held(self) -> bool:
        """Whether the thresholds are those that it set."""
        return False

    def suspend(self) -> None:
        """For a maintenance, before the heap is unfrozen: no full collection comes by itself, and the callback
        freezes nothing."""

    def resume(self) -> None:
        """After it, when the heap is frozen again."""

    def let_go(self) -> None:
        """Have the callback do nothing by itself any more."""

    def adapt(self) -> None:
        """Follow what collections have taken lately. Raises RuleError."""

    def recount(self, collect: Collect, trigger: str, deadline: float) -> None:
        """See to it that the next full collection does not wait for what was frozen. Raises CollectionError."""

    @property
    def wants_recount(self) -> bool:
        """Whether `recount` is due."""
        return False


class FreezeRule(Rule):
    """No automatic full collection: the third threshold is out of reach. The first two are anybody's."""

    def hold(self, found: Thresholds) -> None:
        threshold0, threshold1, _ = gc.get_threshold()
        gc.set_threshold(threshold0, threshold1, HELD_OFF)
        if not self.is_held():
            raise RuleError("the third threshold was not accepted")

    def is_held(self) -> bool:
        return gc.get_threshold()[2] == HELD_OFF


class BudgetRule(Rule):
    """No automatic collection longer than the budget, whatever the heap's size, and none held off.

    A full collection walks what has not been frozen. Where it takes more than half of the budget, the callback
    freezes as it ends: nothing of that is ever walked again. The third threshold is 0, so the next one comes with
    the first gen1 collection after which what is to be walked has grown by a quarter; and the second threshold
    keeps a gen1 collection to a quarter of the budget. Together that is less than nine tenths of it.
    """

    holds_full_off = False

    def __init__(self, meter: PauseMeter, budget_ns: int) -> None:
        self._meter = meter
        self._budget_ns = budget_ns
        self._thresholds: Thresholds = (0, 0, 0)
        self._most_threshold1 = BUDGET_THRESHOLD1
        self._gen1_ns: deque[int] = deque(maxlen=GEN1_SAMPLES)
        self._sampled = 0
        self._is_recount_due = False

    def hold(self, found: Thresholds) -> None:
        self._most_threshold1 = max(1, min(found[1], BUDGET_THRESHOLD1))
        self._set(min(found[0], BUDGET_THRESHOLD0), self._most_threshold1)
        self._arm()

    def is_held(self) -> bool:
        return gc.get_threshold() == self._thresholds

    def suspend(self) -> None:
        self._meter.freeze_after_ns = NEVER_NS
        gc.set_threshold(*self._thresholds[:2], HELD_OFF)

    def resume(self) -> None:
        gc.set_threshold(*self._thresholds)
        self._arm()

    def let_go(self) -> None:
        self._meter.freeze_after_ns = self._meter.budget_ns = NEVER_NS

    def adapt(self) -> None:
        following = self._meter.words[_YOUNG_RING_NEXT]
        self._gen1_ns.extend(self._meter.young_ring.durations_ns(1, self._sampled, following))
        self._sampled = following
        if len(self._gen1_ns) < 2:
            return
        # The longest but one: a single one may have met a busy machine.
        gen1_ns = sorted(self._gen1_ns)[-2]
        most_ns = self._budget_ns // 4
        threshold0, threshold1, _ = self._thresholds
        wanted = threshold1
        if gen1_ns > most_ns:
            wanted = max(1, threshold1 * most_ns // gen1_ns)
        elif gen1_ns < most_ns // 2 and len(self._gen1_ns) == GEN1_SAMPLES:
            wanted = min(2 * threshold1, self._most_threshold1)
        if wanted != threshold1:
            self._set(threshold0, wanted)

    def recount(self, collect: Collect, trigger: str, deadline: float) -> None:
        # CPython goes by how many objects survived the last full collection, and after one of a big heap would
        # let the next one come late and long: so there is one of nothing.
        self._is_recount_due = True
        if gc.isenabled():  # else none comes by itself
            self._meter.frozen_after_ns = 0
            collect(trigger, deadline)
            self._is_recount_due = False

    @property
    def wants_recount(self) -> bool:
        # Also where the callback froze after a collection that nobody kept short.
        is_long = self._meter.frozen_after_ns > self._budget_ns
        return gc.isenabled() and (self._is_recount_due or is_long)

    def _arm(self) -> None:
        self._meter.budget_ns = self._budget_ns
        self._meter.freeze_after_ns = self._budget_ns // 2

    def _set(self, threshold0: int, threshold1: int) -> None:
        self._thresholds = (threshold0, threshold1, 0)
        self._gen1_ns.clear()
        self._sampled = self._meter.words[_YOUNG_RING_NEXT]
        gc.set_threshold(*self._thresholds)
        if not self.is_held():
            raise RuleError("the thresholds were not accepted")


def rule_of(command: Command, meter: PauseMeter) -> Rule:
    """The rule of the policy that `command` enters."""
    budget_ms = command.pause_budget_ms
    if command.kind == "budget" and budget_ms is not None:
        return BudgetRule(meter, round(budget_ms * 1e6))
    return FreezeRule()
