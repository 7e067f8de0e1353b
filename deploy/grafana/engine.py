"""The dashboard of one engine: its pauses, its policy, its memory, process by process.

The first row answers "may I measure now?"; each further row answers why.
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
    BLUE,
    ENGINE_UID,
    FLEET_UID,
    GREEN,
    MEASURED,
    NO_SIDECAR,
    ORANGE,
    POLICIES,
    PROCESS_LEGEND,
    PURPLE,
    RED,
    STATE_COLOURS,
    UP_DOWN,
    Column,
    Figure,
    LabelColumn,
    Lines,
    Panel,
    Query,
    Row,
    annotation,
    bucket_heatmap,
    build,
    dashboard_link,
    joined_table,
    single_value,
    time_series,
    timeline,
)
from deploy.grafana.queries import (
    POLICY,
    PROCESS,
    increase,
    longest_pause,
    of_engine,
    rate,
    select,
)

NO_FULL_COLLECTION = "No full collection in this time range"
NO_OPERATION = "No operation in this time range"

ABOUT_FULL = (
    "A full collection (CPython calls it generation 2) walks every object of the process and "
    "stops it meanwhile; those of generation 0 and 1 look at young objects only and are short."
)
ABOUT_ESTIMATE = "Counts are estimated from scrapes, so they need not be whole."


def by_process(function: str, inner: str) -> str:
    return f"{function} by ({PROCESS}) ({inner})"


def of_process(expr: str) -> Query:
    return Query(expr, PROCESS_LEGEND)


def engine_gauge(metric: str) -> str:
    return of_engine(select(metric))


WANTED_POLICY = Figure(
    title="Policy",
    description=f"The policy that is wanted. {ABOUT_POLICIES}",
    expr=POLICY,
    unit="none",
    empty="unknown",
    mappings=(POLICIES,),
)

NOW = Row(
    1,
    "Now",
    (
        Panel(id=2, width=6, height=4, builder=single_value(MEASURE_NOW)),
        Panel(id=3, width=3, height=4, builder=single_value(WANTED_POLICY)),
        Panel(id=4, width=3, height=4, builder=single_value(COVERAGE)),
        Panel(id=5, width=3, height=4, builder=single_value(LONGEST_FULL_PAUSE)),
        Panel(id=6, width=3, height=4, builder=single_value(STALLED)),
        Panel(id=7, width=3, height=4, builder=single_value(LEASE)),
        Panel(id=8, width=3, height=4, builder=single_value(MEMORY_USED)),
    ),
)

PAUSES = Row(
    10,
    "Pauses",
    (
        Panel(
            id=11,
            width=12,
            height=9,
            builder=bucket_heatmap(
                "Full collections, by length",
                f"{ABOUT_FULL} Each column is a stretch of time, each cell the full collections "
                "of that length in all processes: the higher, the longer they stopped. "
                f"{ABOUT_ESTIMATE}",
                f"sum by (le) ({increase('gc_sidecar_pause_seconds_bucket')})",
                empty=NO_FULL_COLLECTION,
            ),
        ),
        Panel(
            id=12,
            width=12,
            height=9,
            builder=time_series(
                "Longest full collection per process",
                "A histogram does not keep exact lengths: shown is the upper edge of the bucket "
                "of the longest full collection, so it lasted at most so long, and longer than "
                "the next smaller bucket; 1 min means that or more. Those that were asked for "
                "(maintain, restore) count too. A dot stands for up to a minute, longer when "
                "zoomed out. Just after a restart it can show one of the process before. GET "
                "/gc/pauses of the sidecar has the exact lengths.",
                (of_process(longest_pause(PROCESS, "$__rate_interval")),),
                unit="s",
                empty=NO_FULL_COLLECTION,
                look=Lines(points=True, steps=((None, GREEN), (1, ORANGE))),
            ),
        ),
        Panel(
            id=13,
            width=12,
            height=8,
            builder=time_series(
                "A collection runs right now",
                "For how long the full collection that runs at that moment has been seen, per "
                "process. Only collections that last through a scrape show here, but they show "
                "while they last, so a pause of 40 s is seen before it ends. A peak stays for up "
                "to a minute.",
                (
                    of_process(
                        by_process(
                            "max",
                            "max_over_time("
                            + select("gc_sidecar_in_progress_seconds")
                            + "[$__rate_interval])",
                        )
                    ),
                ),
                unit="s",
                empty=NO_SIDECAR,
            ),
        ),
        Panel(
            id=14,
            width=12,
            height=8,
            builder=time_series(
                "Stalls of the lockstep groups",
                "A data-parallel rank's engine core and workers go step by step together: while "
                "GC stops one of them, all wait. Shown is the share of time in which at least "
                "one was stopped, by collections of any generation; pauses at the same time "
                "count once.",
                (
                    Query(
                        f"max by (dp_rank) ({rate('gc_sidecar_stall_seconds_total')})",
                        "dp {{dp_rank}}",
                    ),
                ),
                unit="percentunit",
                empty=NO_SIDECAR,
                look=Lines(steps=((None, GREEN), (0.01, ORANGE))),
            ),
        ),
        Panel(
            id=15,
            width=12,
            height=8,
            builder=time_series(
                "Collections per generation",
                f"How many collections per second run in all processes together. {ABOUT_FULL}",
                (
                    Query(
                        f"sum by (generation) ({rate('gc_sidecar_collections_total')})",
                        "generation {{generation}}",
                    ),
                ),
                unit="ops",
                empty=NO_SIDECAR,
                look=Lines(decimals=2, colours={"generation 2": RED}),
            ),
        ),
        Panel(
            id=16,
            width=12,
            height=8,
            builder=time_series(
                "Time in collections per generation",
                "Share of time in collections, added up over all processes; 100 % means that one "
                f"process on average does nothing else, so it can be more. {ABOUT_FULL}",
                (
                    Query(
                        f"sum by (generation) ({rate('gc_sidecar_collection_seconds_total')})",
                        "generation {{generation}}",
                    ),
                ),
                unit="percentunit",
                empty=NO_SIDECAR,
                look=Lines(stacked=True, colours={"generation 2": RED}),
            ),
        ),
        Panel(
            id=17,
            width=12,
            height=8,
            builder=time_series(
                "Full collections by cause",
                "auto: CPython started it itself, at any moment, which is what a policy is for. "
                "requested: somebody asked for it (maintain, restore, entering a policy, "
                f"gc.collect() in code). {ABOUT_ESTIMATE}",
                (
                    Query(
                        f"sum by (trigger) ({increase('gc_sidecar_pause_seconds_count')})",
                        "{{trigger}}",
                    ),
                ),
                unit="short",
                empty=NO_SIDECAR,
                look=Lines(
                    bars=True, stacked=True, decimals=1, colours={"auto": RED, "requested": BLUE}
                ),
            ),
        ),
        Panel(
            id=18,
            width=12,
            height=8,
            builder=time_series(
                "Objects that collections found",
                "Garbage objects that collections freed, per second, in all processes. "
                "uncollectable: objects that GC found but could not free, which normally are "
                "none.",
                (
                    Query(
                        f"sum by (generation) ({rate('gc_sidecar_collected_objects_total')})",
                        "generation {{generation}}",
                    ),
                    Query(
                        f"sum ({rate('gc_sidecar_uncollectable_objects_total')})", "uncollectable"
                    ),
                ),
                unit="short",
                empty=NO_SIDECAR,
                look=Lines(colours={"uncollectable": RED}),
            ),
        ),
    ),
)

POLICY_ROW = Row(
    30,
    "Policy and processes",
    (
        Panel(
            id=31,
            width=24,
            height=6,
            builder=timeline(
                "Policy, windows and engine",
                "Which policy was wanted when, when somebody measured, and whether the engine was up. "
                + ABOUT_POLICIES,
                (
                    Query(POLICY, "Policy"),
                    Query(engine_gauge("gc_sidecar_window_open"), "Measured window"),
                    Query(engine_gauge("gc_sidecar_engine_up"), "Engine"),
                ),
                empty=NO_SIDECAR,
                row_mappings={
                    "Policy": (POLICIES,),
                    "Measured window": MEASURED,
                    "Engine": (UP_DOWN,),
                },
            ),
        ),
        Panel(
            id=32,
            width=12,
            height=8,
            builder=time_series(
                "Processes by state",
                f"applied: follows the policy. pending: has not taken it over yet. drifted: {DRIFTED}. "
                "stale: no sign of life for 5 s. gone: has ended. uncovered: should be there, but "
                "has no agent. refused: its Python cannot do it.",
                (Query(f"sum by (state) ({select('gc_sidecar_processes')})", "{{state}}"),),
                unit="short",
                empty=NO_SIDECAR,
                look=Lines(stacked=True, decimals=0, colours=STATE_COLOURS),
            ),
        ),
        Panel(
            id=33,
            width=12,
            height=8,
            builder=time_series(
                "Coverage over time",
                COVERAGE.description,
                (Query(COVERAGE.expr, "coverage"),),
                unit=COVERAGE.unit,
                empty=NO_SIDECAR,
                look=Lines(max=1, steps=COVERAGE.steps),
            ),
        ),
        Panel(
            id=34,
            width=12,
            height=8,
            builder=time_series(
                "Generations, desired and observed",
                "Every change of the policy gets the next number; each process shows the newest "
                "number that it has taken over. A process that stays below the dashed line does "
                "not follow. (Not to be mixed up with the generations of GC.)",
                (
                    of_process(by_process("max", select("gc_sidecar_observed_generation"))),
                    Query(engine_gauge("gc_sidecar_desired_generation"), "desired"),
                ),
                unit="none",
                empty=NO_SIDECAR,
                look=Lines(decimals=0, dashed=("desired",)),
            ),
        ),
        Panel(
            id=35,
            width=12,
            height=8,
            builder=time_series(
                "Freezes",
                "How often GC was told, per minute, to leave alone the objects that exist "
                "(gc.freeze), per process: once an interval under freeze, after long collections "
                "under budget. Beside it, how many automatic collections took longer than the "
                "pause budget, per minute: none should.",
                (
                    of_process("60 * " + by_process("sum", rate("gc_sidecar_freezes_total"))),
                    Query(
                        f"60 * sum({rate('gc_sidecar_pauses_over_budget_total')})",
                        "over the budget",
                    ),
                ),
                unit="short",
                empty=NO_SIDECAR,
                look=Lines(decimals=1),
            ),
        ),
        Panel(
            id=36,
            width=12,
            height=8,
            builder=time_series(
                "Operations",
                "Operations that ended, by kind and result. applied: every process did it. "
                "partial: only some, which had been allowed. rolled_back: taken back, for one did "
                "not. failed: not done. unknown: not every process has shown in time whether it "
                f"did it. {ABOUT_ESTIMATE}",
                (
                    Query(
                        f"sum by (operation, result) ({increase('gc_sidecar_operations_total')}) > 0",
                        "{{operation}} {{result}}",
                    ),
                ),
                unit="short",
                empty=NO_OPERATION,
                look=Lines(bars=True, stacked=True, decimals=0),
            ),
        ),
        Panel(
            id=37,
            width=12,
            height=8,
            builder=time_series(
                "Length of operations",
                "How long an operation took on average, from the request to the proof that every "
                "process did it.",
                (
                    Query(
                        f"sum by (operation) ({increase('gc_sidecar_operation_seconds_sum')})"
                        " / (sum by (operation) "
                        f"({increase('gc_sidecar_operation_seconds_count')}) > 0)",
                        "{{operation}}",
                    ),
                ),
                unit="s",
                empty=NO_OPERATION,
                look=Lines(points=True),
            ),
        ),
        Panel(
            id=38,
            width=24,
            height=7,
            builder=time_series(
                "Ends of policies by reason",
                "Why a policy ended in a process. restored: somebody asked for it. "
                "lease_expired: nobody renewed it. rss_growth: memory grew more than was "
                "allowed. freeze_failed: a freeze went wrong, and GC was put back. "
                f"{ABOUT_ESTIMATE}",
                (
                    Query(
                        f"sum by (reason) ({increase('gc_sidecar_policy_exits_total')}) > 0",
                        "{{reason}}",
                    ),
                ),
                unit="short",
                empty="No policy ended in this time range",
                look=Lines(bars=True, stacked=True, decimals=0, colours={"restored": GREEN}),
            ),
        ),
    ),
)

MEMORY = Row(
    50,
    "Memory",
    (
        Panel(
            id=51,
            width=12,
            height=9,
            builder=time_series(
                "Memory per process and kind",
                "Resident memory. anonymous: the process's own data, where garbage waits. file: "
                "programs and mapped files. shared: memory between processes.",
                (
                    Query(
                        f"sum by ({PROCESS}, kind) ({select('gc_sidecar_resident_memory_bytes')})",
                        f"{PROCESS_LEGEND} {{{{kind}}}}",
                    ),
                ),
                unit="bytes",
                empty=NO_SIDECAR,
            ),
        ),
        Panel(
            id=52,
            width=12,
            height=9,
            builder=time_series(
                "Container memory and its limit",
                "used: the container's working set (usage without inactive file cache). At the "
                "limit the kernel kills the engine. Without a limit there is no dashed line.",
                (
                    Query(engine_gauge("gc_sidecar_memory_current_bytes"), "used"),
                    Query(engine_gauge("gc_sidecar_memory_limit_bytes"), "limit"),
                ),
                unit="bytes",
                empty="The engine's container reports no memory",
                look=Lines(dashed=("limit",)),
            ),
        ),
        Panel(
            id=53,
            width=12,
            height=8,
            builder=time_series(
                "Growth since the policy was entered",
                "Anonymous memory that a process has gained since then; 0 without a policy. "
                "Under freeze, garbage in cycles waits for maintain, so it grows. Growth that "
                "maintain does not bring down is not GC's.",
                (of_process(by_process("sum", select("gc_sidecar_resident_growth_bytes"))),),
                unit="bytes",
                empty=NO_SIDECAR,
                look=Lines(min=None),
            ),
        ),
        Panel(
            id=54,
            width=12,
            height=8,
            builder=time_series(
                "Growth rate",
                "How fast a process's anonymous memory grows (below 0: shrinks), over 15 "
                "minutes. 1 GiB an hour is about 300 KiB/s.",
                (
                    of_process(
                        by_process(
                            "sum",
                            "deriv("
                            + select("gc_sidecar_resident_memory_bytes", 'kind="anonymous"')
                            + "[15m])",
                        )
                    ),
                ),
                unit="binBps",
                empty=NO_SIDECAR,
                look=Lines(min=None),
            ),
        ),
        Panel(
            id=55,
            width=24,
            height=8,
            builder=time_series(
                "Device memory",
                "GPU memory of torch, per worker. allocated: held by tensors, some of which wait "
                "for GC. reserved: what torch keeps from the device, used or not.",
                (
                    Query(
                        f"sum by ({PROCESS}, kind) ({select('gc_sidecar_device_memory_bytes')})",
                        f"{PROCESS_LEGEND} {{{{kind}}}}",
                    ),
                ),
                unit="bytes",
                empty="No process uses a GPU through torch",
            ),
        ),
    ),
)


def per_maintenance(metric: str) -> str:
    """What one maintenance run of a process comes to, on average."""
    runs = by_process("sum", select("gc_sidecar_maintain_seconds_count"))
    return f"{by_process('sum', select(metric))} / ({runs} > 0)"


MAINTENANCE = Row(
    70,
    "Maintenance: what it costs, what it yields",
    (
        Panel(
            id=71,
            width=12,
            height=8,
            builder=time_series(
                "Time in maintenance",
                "How long maintain (unfreeze, collect, freeze again) stopped each process. It is "
                f"meant for moments in which nobody measures. {ABOUT_ESTIMATE}",
                (of_process(by_process("sum", increase("gc_sidecar_maintain_seconds_sum"))),),
                unit="s",
                empty=NO_SIDECAR,
                look=Lines(bars=True),
            ),
        ),
        Panel(
            id=72,
            width=12,
            height=8,
            builder=time_series(
                "Objects reclaimed by maintenance",
                "Garbage that had waited and that maintain freed, per process. If it is always "
                f"0, GC is not what holds your memory. {ABOUT_ESTIMATE}",
                (of_process(by_process("sum", increase("gc_sidecar_reclaimed_objects_total"))),),
                unit="short",
                empty=NO_SIDECAR,
                look=Lines(bars=True),
            ),
        ),
        Panel(
            id=73,
            width=24,
            height=8,
            builder=joined_table(
                "Maintenance per process",
                "What one maintenance run cost and yielded on average, since the process started.",
                labels=(
                    LabelColumn("role", "Role"),
                    LabelColumn("dp_rank", "DP rank"),
                    LabelColumn("rank", "Rank"),
                ),
                columns=(
                    Column(
                        Figure(
                            title="Runs",
                            expr=by_process("sum", select("gc_sidecar_maintain_seconds_count")),
                            unit="short",
                            empty="0",
                            description="Maintenance runs since the process started.",
                            decimals=0,
                        ),
                    ),
                    Column(
                        Figure(
                            title="Pause per run",
                            expr=per_maintenance("gc_sidecar_maintain_seconds_sum"),
                            unit="s",
                            empty="-",
                            description="How long one run stopped the process, on average.",
                        ),
                    ),
                    Column(
                        Figure(
                            title="Objects per run",
                            expr=per_maintenance("gc_sidecar_reclaimed_objects_total"),
                            unit="short",
                            empty="-",
                            description="Garbage objects that one run freed, on average.",
                        ),
                    ),
                ),
                empty=NO_SIDECAR,
            ),
        ),
    ),
)

TRUST = Row(
    90,
    "How far to trust these numbers, and versions",
    (
        Panel(
            id=91,
            width=8,
            height=7,
            builder=time_series(
                "Lost pause records",
                "Single records of pauses that were overwritten or damaged before the sidecar "
                "read them. Counts, sums and histograms are exact all the same; only the list of "
                f"single pauses has a gap. {ABOUT_ESTIMATE}",
                (of_process(by_process("sum", increase("gc_sidecar_lost_records_total"))),),
                unit="short",
                empty=NO_SIDECAR,
                look=Lines(bars=True, decimals=0),
            ),
        ),
        Panel(
            id=92,
            width=8,
            height=7,
            builder=time_series(
                "Unreadable pages",
                "Each process shows its state in a small file (its page). One that cannot be "
                "read hides that process from everything here.",
                (Query(engine_gauge("gc_sidecar_unreadable_pages"), "unreadable pages"),),
                unit="short",
                empty=NO_SIDECAR,
                look=Lines(decimals=0, steps=((None, GREEN), (1, RED))),
            ),
        ),
        Panel(
            id=93,
            width=8,
            height=7,
            builder=time_series(
                "RPC desyncs",
                "How often replies of vLLM's RPC came out of step since the sidecar started. "
                "After one, the sidecar controls through the run directory instead.",
                (Query(engine_gauge("gc_sidecar_rpc_desync_total"), "desyncs"),),
                unit="short",
                empty=NO_SIDECAR,
                look=Lines(decimals=0, steps=((None, GREEN), (1, ORANGE))),
            ),
        ),
        Panel(
            id=94,
            width=18,
            height=8,
            builder=joined_table(
                "Versions in each process",
                "Which Python and which engine each process runs. collector: generational is the "
                "usual kind; with free-threaded, and with incremental in Python 3.14.0 to "
                "3.14.4, freeze and budget are refused.",
                labels=(
                    LabelColumn("role", "Role"),
                    LabelColumn("dp_rank", "DP rank"),
                    LabelColumn("rank", "Rank"),
                    LabelColumn("engine", "Engine"),
                    LabelColumn("python", "Python"),
                    LabelColumn("collector", "Collector"),
                ),
                columns=(
                    Column(
                        Figure(
                            title="Agents",
                            expr=f"max by ({PROCESS}, python, engine, collector) "
                            f"({select('gc_sidecar_agent_info')})",
                            unit="none",
                            empty="-",
                            description="1 where an agent reports.",
                        ),
                    ),
                ),
                empty="No process has an agent",
                hidden=("Agents",),
            ),
        ),
        Panel(
            id=95,
            width=6,
            height=8,
            builder=joined_table(
                "Sidecar",
                "The version of the sidecar.",
                labels=(
                    LabelColumn("instance", "Instance"),
                    LabelColumn("version", "Version"),
                ),
                columns=(
                    Column(
                        Figure(
                            title="Sidecars",
                            expr=f"max by (instance, version) ({select('gc_sidecar_build_info')})",
                            unit="none",
                            empty="-",
                            description="1 where a sidecar reports.",
                        ),
                    ),
                ),
                empty=NO_SIDECAR,
                hidden=("Sidecars",),
            ),
        ),
    ),
)

ROWS = (NOW, PAUSES, POLICY_ROW, MEMORY, MAINTENANCE, TRUST)

ANNOTATIONS = (
    annotation(
        "Operations",
        f"sum by (operation, result) ({increase('gc_sidecar_operations_total')}) > 0",
        colour=ORANGE,
        title="{{operation}} {{result}}",
        text="An operation ended shortly before this mark.",
        labels=("operation", "result"),
    ),
    annotation(
        "Measured windows",
        f"{engine_gauge('gc_sidecar_window_open')} > 0",
        colour=PURPLE,
        title="Measured window",
        text="Somebody measures here. When zoomed out, short windows can be missing.",
        labels=(),
    ),
)


def dashboard() -> models.Dashboard:
    return build(
        ENGINE_UID,
        "gc-sidecar / Engine",
        "Python GC in one vLLM engine: pauses, policy and memory of every process.",
        ROWS,
        one_engine=True,
        links=(
            dashboard_link(
                "All engines", "Which engine is not safe to measure right now", FLEET_UID
            ),
        ),
        annotations=ANNOTATIONS,
    )
