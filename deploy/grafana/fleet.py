"""The dashboard of many engines: which of them is not safe to measure right now, and which are the worst.

A table first, with one row per engine and the gravest verdict on top; then the worst engines over time.
"""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as models

from deploy.grafana.figures import (
    COVERAGE,
    DRIFTED,
    LEASE,
    LONGEST_FULL_PAUSE,
    MEASURE_NOW,
    MEMORY_USED,
    STALLED,
)
from deploy.grafana.panels import (
    ABOUT_POLICIES,
    ENGINE_LEGEND,
    ENGINE_UID,
    FLEET_UID,
    GREEN,
    MEASURED,
    NO_SIDECAR,
    ORANGE,
    POLICIES,
    POLICY_COLOURS,
    RED,
    UP_DOWN,
    VERDICTS,
    YELLOW,
    Column,
    Figure,
    LabelColumn,
    Lines,
    Panel,
    Query,
    Row,
    build,
    dashboard_link,
    joined_table,
    texts,
    time_series,
    timeline,
)
from deploy.grafana.queries import (
    ENGINE,
    GROWTH,
    MEMORY_SHARE,
    POLICY,
    VERDICT,
    VERDICT_EXPLAINED,
    increase,
    is_,
    longest_pause_of_engine,
    of_engine,
    rate,
    select,
)

ENGINE_URL = (
    f"/d/{ENGINE_UID}?${{datasource:queryparam}}&${{cluster:queryparam}}&${{namespace:queryparam}}"
    "&${pod:queryparam}&var-instance=${__data.fields.instance}&${__url_time_range}"
)
TO_ENGINE = ({"title": "This engine in detail", "url": ENGINE_URL, "targetBlank": False},)
POLICY_NAMES = texts({mode: (mode, colour) for mode, colour in POLICY_COLOURS.items()})
WORST = 5


def worst(expr: str) -> Query:
    return Query(f"topk({WORST}, {expr})", ENGINE_LEGEND)


def processes_in(state: str) -> str:
    return of_engine(select("gc_sidecar_processes", f'state="{state}"'))


def bad_state_column(state: str, meaning: str) -> Column:
    return Column(
        Figure(
            title=state.capitalize(),
            expr=processes_in(state),
            unit="short",
            empty="-",
            description=meaning,
            steps=((None, GREEN), (1, RED)),
            decimals=0,
        ),
        coloured=True,
        width=95,
    )


COLUMNS = (
    Column(MEASURE_NOW, coloured=True, width=190),
    Column(
        Figure(
            title="Engine",
            expr=of_engine(select("gc_sidecar_engine_up")),
            unit="none",
            empty="no data",
            description="Whether the vLLM engine beside the sidecar is up.",
            mappings=(UP_DOWN,),
        ),
        coloured=True,
        width=80,
    ),
    Column(
        Figure(
            title="Policy is set",
            expr=f"max by ({ENGINE}, mode) ({select('gc_sidecar_policy')} == 1)",
            unit="none",
            empty="-",
            description="1 at the policy that is wanted; the column Policy names it.",
        ),
    ),
    Column(COVERAGE, coloured=True, width=90),
    Column(LONGEST_FULL_PAUSE, coloured=True, width=120),
    Column(STALLED, coloured=True, width=100),
    Column(
        Figure(
            title="Memory growth",
            expr=GROWTH,
            unit="bytes",
            empty="-",
            description=(
                "Anonymous memory that all processes have gained since the policy was entered. Under "
                "freeze, cyclic garbage waits for maintain, so it grows."
            ),
            decimals=1,
        ),
        width=110,
    ),
    Column(
        Figure(
            title="Memory free",
            expr=f"1 - {MEMORY_SHARE}",
            unit="percentunit",
            empty="no limit",
            description="What is left of the container's memory limit; at none left the kernel kills the engine.",
            steps=((None, RED), (0.05, ORANGE), (0.1, YELLOW), (0.2, GREEN)),
            decimals=0,
        ),
        coloured=True,
        width=95,
    ),
    Column(LEASE, coloured=True, width=100),
    bad_state_column("drifted", f"How many processes drifted: each {DRIFTED}."),
    bad_state_column(
        "stale", "Processes that have shown no sign of life for 5 s: stopped, or very busy."
    ),
    bad_state_column("uncovered", "Processes that should be there but have no agent."),
    Column(
        Figure(
            title="RPC desyncs",
            expr=of_engine(select("gc_sidecar_rpc_desync_total")),
            unit="short",
            empty="-",
            description="How often replies of vLLM's RPC came out of step since the sidecar started; 0 is right.",
            steps=((None, GREEN), (1, ORANGE)),
            decimals=0,
        ),
        coloured=True,
        width=95,
    ),
    Column(
        Figure(
            title="Windows",
            expr=of_engine(select("gc_sidecar_window_open")),
            unit="short",
            empty="-",
            description="Measured windows that are open: somebody measures there now.",
            decimals=0,
        ),
        width=85,
    ),
)

TABLE = joined_table(
    "Engines",
    "One row per engine; those on top are not safe to measure right now, and the first column "
    "says why. A click on the pod or instance opens the engine's own dashboard.",
    labels=(
        LabelColumn("cluster", "Cluster"),
        LabelColumn("namespace", "Namespace"),
        LabelColumn("pod", "Pod", links=TO_ENGINE),
        LabelColumn("instance", "Instance", links=TO_ENGINE),
        LabelColumn("mode", "Policy", mappings=(POLICY_NAMES,), coloured=True, width=80),
    ),
    columns=COLUMNS,
    empty=NO_SIDECAR,
    first=("Measure now?", "Pod", "Instance", "Policy"),
    sort_by="Measure now?",
    hidden=("Policy is set",),
)

ROWS = (
    Row(
        1,
        "Which engine is not safe to measure right now",
        (
            Panel(id=2, width=24, height=11, builder=TABLE),
            Panel(
                id=3,
                width=24,
                height=8,
                builder=timeline(
                    "Verdict over time",
                    "The first column of the table over time, one row per engine. "
                    + VERDICT_EXPLAINED,
                    (Query(VERDICT, ENGINE_LEGEND),),
                    empty=NO_SIDECAR,
                    mappings=(VERDICTS,),
                ),
            ),
        ),
    ),
    Row(
        10,
        f"The worst {WORST} engines over time",
        (
            Panel(
                id=11,
                width=12,
                height=8,
                builder=time_series(
                    "Stalled by GC",
                    "Share of time in which at least one process of a lockstep group (one "
                    "data-parallel rank: its engine core and workers) was stopped by GC, so that "
                    "the whole group waited.",
                    (worst(STALLED.expr),),
                    unit=STALLED.unit,
                    empty=NO_SIDECAR,
                    look=Lines(steps=((None, GREEN), (0.01, ORANGE))),
                ),
            ),
            Panel(
                id=12,
                width=12,
                height=8,
                builder=time_series(
                    "Longest full pause",
                    "A full collection walks every object of a process and stops it meanwhile. "
                    "Shown is the upper edge of the histogram bucket of the longest one: it "
                    "lasted at most so long; 1 min means that or more. Those that were asked for "
                    "(maintain, restore) count too.",
                    (worst(longest_pause_of_engine("$__rate_interval")),),
                    unit="s",
                    empty="No full collection in this time range",
                    look=Lines(points=True, steps=((None, GREEN), (1, ORANGE))),
                ),
            ),
            Panel(
                id=13,
                width=12,
                height=8,
                builder=time_series(
                    "A collection runs right now",
                    "For how long the full collection that runs at that moment has been seen. It "
                    "stands at 0 nearly always: only collections that last through a scrape show "
                    "here, while they last.",
                    (worst(of_engine(select("gc_sidecar_in_progress_seconds"))),),
                    unit="s",
                    empty=NO_SIDECAR,
                ),
            ),
            Panel(
                id=14,
                width=12,
                height=8,
                builder=time_series(
                    "Full collections that nobody asked for",
                    "How many full collections CPython itself started, in all processes, per "
                    "minute. Under freeze there should be none.",
                    (
                        worst(
                            f"60 * sum by ({ENGINE}) ("
                            + rate("gc_sidecar_pause_seconds_count", is_("trigger", "auto"))
                            + ")"
                        ),
                    ),
                    unit="short",
                    empty=NO_SIDECAR,
                    look=Lines(decimals=1),
                ),
            ),
            Panel(
                id=15,
                width=12,
                height=8,
                builder=time_series(
                    "Memory growth since the policy was entered",
                    "Anonymous memory that all processes of the engine have gained. Growth that "
                    "maintain does not bring down is not cyclic garbage, and GC cannot help "
                    "against it.",
                    (worst(GROWTH),),
                    unit="bytes",
                    empty=NO_SIDECAR,
                    look=Lines(min=None),
                ),
            ),
            Panel(
                id=16,
                width=12,
                height=8,
                builder=time_series(
                    "Memory used, of the limit",
                    MEMORY_USED.description,
                    (worst(MEMORY_USED.expr),),
                    unit=MEMORY_USED.unit,
                    empty="No engine has a memory limit",
                    look=Lines(max=1, steps=((None, GREEN), (0.95, RED))),
                ),
            ),
            Panel(
                id=17,
                width=12,
                height=8,
                builder=time_series(
                    "Lowest coverage",
                    COVERAGE.description,
                    (Query(f"bottomk({WORST}, {COVERAGE.expr})", ENGINE_LEGEND),),
                    unit=COVERAGE.unit,
                    empty=NO_SIDECAR,
                    look=Lines(max=1, steps=COVERAGE.steps),
                ),
            ),
            Panel(
                id=18,
                width=12,
                height=8,
                builder=time_series(
                    "Processes that do not follow the policy",
                    "Every process that is not applied: pending (has not taken the policy over "
                    "yet, which is usual for a moment after a change), stale (no sign of life for "
                    "5 s), gone (has ended), uncovered (has no agent), refused (its Python cannot "
                    f"do it), or drifted ({DRIFTED}).",
                    (
                        worst(
                            f"sum by ({ENGINE}) ("
                            + select("gc_sidecar_processes", 'state!="applied"')
                            + ")"
                        ),
                    ),
                    unit="short",
                    empty=NO_SIDECAR,
                    look=Lines(decimals=0, steps=((None, GREEN), (1, RED))),
                ),
            ),
        ),
    ),
    Row(
        20,
        "Every engine over time",
        (
            Panel(
                id=21,
                width=24,
                height=8,
                builder=timeline(
                    "Policy",
                    f"The policy that is wanted, one row per engine. {ABOUT_POLICIES}",
                    (Query(POLICY, ENGINE_LEGEND),),
                    empty=NO_SIDECAR,
                    mappings=(POLICIES,),
                ),
            ),
            Panel(
                id=22,
                width=12,
                height=8,
                builder=timeline(
                    "Measured windows",
                    "When somebody measured: the engine had at least one open window.",
                    (Query(of_engine(select("gc_sidecar_window_open")), ENGINE_LEGEND),),
                    empty=NO_SIDECAR,
                    mappings=MEASURED,
                ),
            ),
            Panel(
                id=23,
                width=12,
                height=8,
                builder=time_series(
                    "Failed operations",
                    "Operations (freeze, maintain, restore, ...) that did not reach every "
                    "process, or whose end is not known. The count is estimated from scrapes.",
                    (
                        Query(
                            f"sum by ({ENGINE}) ("
                            + increase("gc_sidecar_operations_total", 'result!="applied"')
                            + ")",
                            ENGINE_LEGEND,
                        ),
                    ),
                    unit="short",
                    empty=NO_SIDECAR,
                    look=Lines(bars=True, decimals=0),
                ),
            ),
        ),
    ),
)


def dashboard() -> models.Dashboard:
    return build(
        FLEET_UID,
        "gc-sidecar / Fleet",
        "Python GC in many vLLM engines: which one is not safe to measure right now.",
        ROWS,
        one_engine=False,
        links=(
            dashboard_link("One engine", "Pauses, memory and policy of one engine", ENGINE_UID),
        ),
    )
