"""The figures that both dashboards show: a panel of one engine, a column of the fleet's table.

Each has one text, one expression and one set of thresholds, so that the dashboards cannot disagree.
"""

from __future__ import annotations

from deploy.grafana.panels import GREEN, ORANGE, RED, VERDICTS, YELLOW, Figure
from deploy.grafana.queries import (
    LEASE_REMAINING,
    MEMORY_SHARE,
    STALLED_SHARE,
    VERDICT,
    VERDICT_EXPLAINED,
    longest_pause_of_engine,
    of_engine,
    select,
)

# What the state means, in the middle of a sentence; api.md and the alert say the same.
DRIFTED = (
    "no longer has the policy that it had, for it restarted and has not got it again yet, left it "
    "by itself (end of the lease, memory growth, a freeze that went wrong), or had its GC "
    "or its policy changed by someone else"
)
MEASURE_NOW = Figure(
    title="Measure now?",
    description=VERDICT_EXPLAINED,
    expr=VERDICT,
    unit="none",
    empty="unknown",
    mappings=(VERDICTS,),
)
COVERAGE = Figure(
    title="Coverage",
    description=(
        "Processes that have applied the policy, of all processes of the engine. Below 100 % a "
        "pause can come from the others."
    ),
    expr=of_engine(select("gc_sidecar_coverage_ratio")),
    unit="percentunit",
    empty="unknown",
    steps=((None, RED), (1, GREEN)),
    decimals=0,
)
LONGEST_FULL_PAUSE = Figure(
    title="Longest full pause, 15 min",
    description=(
        "At most so long was any process stopped by one full collection within 15 minutes, one "
        "that was asked for included. It is the upper edge of a histogram bucket; 1 min means "
        "that or more."
    ),
    expr=longest_pause_of_engine("15m"),
    unit="s",
    empty="none",
    steps=((None, GREEN), (0.1, YELLOW), (1, ORANGE)),
)
STALLED = Figure(
    title="Stalled by GC",
    description=(
        "Share of time in which at least one process of a lockstep group was stopped by GC, so "
        "that the whole group waited. The worst group of the engine counts."
    ),
    expr=STALLED_SHARE,
    unit="percentunit",
    empty="no data",
    steps=((None, GREEN), (0.001, YELLOW), (0.01, ORANGE)),
    decimals=2,
)
LEASE = Figure(
    title="Lease ends in",
    description=(
        "How long the policy lasts if nobody renews it. Then each process goes back to CPython's "
        "own GC, and runs the full collection that it was spared."
    ),
    expr=LEASE_REMAINING,
    unit="s",
    empty="no lease",
    steps=((None, RED), (0, ORANGE), (300, GREEN)),
)
MEMORY_USED = Figure(
    title="Memory used",
    description=(
        "The container's working set (usage without inactive file cache) as a share of its memory "
        "limit. At 100 % the kernel kills the engine."
    ),
    expr=MEMORY_SHARE,
    unit="percentunit",
    empty="no limit",
    steps=((None, GREEN), (0.8, YELLOW), (0.9, ORANGE), (0.95, RED)),
    decimals=0,
)
