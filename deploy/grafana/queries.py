"""The PromQL of the dashboards: how series are selected, and the questions that both dashboards ask.

It needs no Grafana library, so that tests can use it anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

# Outside Kubernetes there is no cluster, namespace or pod: a regex matcher with ".*" matches an absent label too.
SELECTION = 'cluster=~"$cluster", namespace=~"$namespace", pod=~"$pod", instance=~"$instance"'
ENGINE = "cluster, namespace, pod, instance"
"""The labels that tell engines apart; one sidecar is one engine is one `instance`."""
PROCESS = "role, dp_rank, rank"
"""The labels that tell the processes of an engine apart."""

# What we call a long stretch of automatic full collections, and the two margins, in the verdict below.
NOTICEABLE_PAUSE_S = 0.1
LEASE_MARGIN_S = 300
MEMORY_MARGIN = 0.95


def is_(label: str, value: str) -> str:
    return f'{label}="{value}"'


def select(metric: str, *matchers: str) -> str:
    """The selector of a metric: the dashboard's variables, then `matchers`."""
    return f"{metric}{{{', '.join((SELECTION, *matchers))}}}"


def of_engine(expression: str) -> str:
    return f"max by ({ENGINE}) ({expression})"


def rate(metric: str, *matchers: str) -> str:
    return f"rate({select(metric, *matchers)}[$__rate_interval])"


def increase(metric: str, *matchers: str, window: str = "$__rate_interval") -> str:
    return f"increase({select(metric, *matchers)}[{window}])"


def longest_pause(labels: str, window: str) -> str:
    """The upper edge of the highest bucket that grew within `window`; no series where none grew.

    Not increase(): it extrapolates each bucket by its own past, so a first short pause after old long ones
    would be shown as long. Highest minus lowest value counts exactly.
    """
    buckets = select("gc_sidecar_pause_seconds_bucket") + f"[{window}]"
    grown = f"max_over_time({buckets}) - min_over_time({buckets})"
    return f"histogram_quantile(1, sum by ({labels}, le) ({grown})) > 0"


def longest_pause_of_engine(window: str) -> str:
    return of_engine(longest_pause(f"{ENGINE}, {PROCESS}", window))


STALLED_SHARE = of_engine(rate("gc_sidecar_stall_seconds_total"))
GROWTH = f"sum by ({ENGINE}) ({select('gc_sidecar_resident_growth_bytes')})"
MEMORY_SHARE = (
    of_engine(select("gc_sidecar_memory_current_bytes"))
    + " / "
    + of_engine(select("gc_sidecar_memory_limit_bytes"))
)
LEASE_REMAINING = (
    of_engine(select("gc_sidecar_lease_expires_timestamp_seconds") + " > 0") + " - time()"
)
# One number a policy, so that a timeline has one row an engine. A policy that this table does not know shows as 0.
POLICY_CODES = {"off": 1, "freeze": 2, "budget": 3}
POLICY = "sum by ({labels}) ({terms})".format(
    labels=ENGINE,
    terms=" or ".join(
        f"{code} * {select('gc_sidecar_policy', is_('mode', mode))}"
        for mode, code in POLICY_CODES.items()
    ),
)


# Neither what came before a policy was entered nor the start-up of a process that restarted says anything about
# a measurement that starts now: the alert on full collections leaves both out too.
HELD_POLICY_5M = (
    of_engine("min_over_time(" + select("gc_sidecar_policy", 'mode!="off"') + "[5m])")
    + " == 1 and "
    + of_engine("min_over_time(" + select("gc_sidecar_coverage_ratio") + "[5m])")
    + " == 1"
)


@dataclass(frozen=True)
class Check:
    """One reason not to measure on an engine now."""

    code: int
    """The higher, the more there is to do; of several reasons the highest is shown."""
    name: str
    verdict: str
    colour: str
    holds: str
    """PromQL with the labels of ENGINE: 1 where the reason holds, else 0 or no series."""


CHECKS = (
    Check(
        8,
        "sidecar",
        "no: sidecar gone",
        "purple",
        "({recent} unless {present}) >= bool 0".format(
            recent=of_engine(f"last_over_time({select('gc_sidecar_engine_up')}[15m])"),
            present=of_engine(select("gc_sidecar_engine_up")),
        ),
    ),
    Check(
        7,
        "engine",
        "no: engine down",
        "red",
        f"{of_engine(select('gc_sidecar_engine_up'))} == bool 0",
    ),
    Check(
        6,
        "policy",
        "no: no policy",
        "red",
        f"{of_engine(select('gc_sidecar_policy', is_('mode', 'off')))} == bool 1",
    ),
    Check(
        5,
        "coverage",
        "no: not every process",
        "red",
        f"{of_engine(select('gc_sidecar_coverage_ratio'))} < bool 1",
    ),
    Check(
        4,
        "collecting",
        "no: collecting now",
        "red",
        f"{of_engine(select('gc_sidecar_in_progress_seconds'))} > bool 0",
    ),
    Check(
        3,
        "paused",
        "no: GC paused it",
        "orange",
        of_engine(increase("gc_sidecar_pause_seconds_sum", is_("trigger", "auto"), window="5m"))
        + f" > bool {NOTICEABLE_PAUSE_S} and {HELD_POLICY_5M}",
    ),
    Check(
        2, "lease", "no: lease ends soon", "orange", f"{LEASE_REMAINING} < bool {LEASE_MARGIN_S}"
    ),
    Check(1, "memory", "no: memory full", "orange", f"{MEMORY_SHARE} > bool {MEMORY_MARGIN}"),
)
SAFE = ("yes", "green")

# Each check gets a label of its own, or `or` would take the second one for the first.
VERDICT = "max by ({labels}) (\n  {terms}\n)".format(
    labels=ENGINE,
    terms="\n  or ".join(
        f'label_replace({check.code} * ({check.holds}), "check", "{check.name}", "", "")'
        for check in CHECKS
    ),
)
VERDICT_EXPLAINED = (
    "Whether a measurement that starts now would be free of GC pauses of the server. The reasons "
    "against it, the gravest first: the sidecar has not been seen for up to 15 minutes; the "
    "engine is down; no policy is on; not every process has applied it; a full collection runs "
    "right now; CPython's own full collections took more than 100 ms of a process within 5 "
    "minutes (they count only where all processes had the policy for all of that time, so not "
    "what ran before it was entered); the lease ends within 5 minutes; the container uses more "
    "than 95 % of its memory limit."
)
