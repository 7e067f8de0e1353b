"""What the dashboards ask, got back out of their JSON and made ready for a Prometheus that knows no Grafana.

The tests of the dashboards parse these expressions; those on a scraped engine run each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

STAND_INS = {
    "$__rate_interval": "1m",
    "$cluster": ".*",
    "$namespace": ".*",
    "$pod": ".*",
    "$instance": ".*",
}
"""What each variable stands for where an expression runs without Grafana."""

WITHOUT_DEVICE = "no GPU: torch has no initialised device, so there is no device memory to report"
WITHOUT_LIMIT = "the engine's cgroup has no memory limit, so there is nothing to divide by"
MAY_BE_EMPTY: Mapping[tuple[str, str, str], str] = {
    ("gc-sidecar-fleet", "Engines", "H"): WITHOUT_LIMIT,
    ("gc-sidecar-fleet", "Memory used, of the limit", "A"): WITHOUT_LIMIT,
    ("gc-sidecar-engine", "Memory used", "A"): WITHOUT_LIMIT,
    ("gc-sidecar-engine", "Container memory and its limit", "B"): WITHOUT_LIMIT,
    ("gc-sidecar-engine", "Device memory", "A"): WITHOUT_DEVICE,
}
"""(uid of the dashboard, title of the panel, refId) of what returns nothing on some machines, and why."""


class Expression(NamedTuple):
    panel: str
    ref_id: str
    expr: str


def panels_of(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every panel, those inside collapsed rows too, but not the rows themselves."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def substituted(expr: str) -> str:
    """`expr` as Prometheus would get it from Grafana with every variable at `All`."""
    for variable, value in STAND_INS.items():
        expr = expr.replace(variable, value)
    return expr


def expressions(dashboard: Mapping[str, Any]) -> list[Expression]:
    """Every query of every panel, ready for Prometheus."""
    return [
        Expression(panel["title"], target["refId"], substituted(target["expr"]))
        for panel in panels_of(dashboard)
        for target in panel.get("targets", [])
    ]


def annotation_expressions(dashboard: Mapping[str, Any]) -> list[Expression]:
    """Every annotation's query, ready for Prometheus; `panel` is the annotation's name."""
    return [
        Expression(annotation["name"], "Anno", substituted(annotation["expr"]))
        for annotation in dashboard["annotations"]["list"]
    ]
