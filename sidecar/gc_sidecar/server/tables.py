"""`?format=table`: the status and operations as text for eyes.

Made from the same dicts that the JSON answers are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNKNOWN = "-"
STATUS_COLUMNS = (
    "role",
    "dp",
    "rank",
    "pid",
    "state",
    "mode",
    "generation",
    "gen2",
    "longest",
    "memory",
)
OPERATION_COLUMNS = ("role", "dp", "rank", "pid", "ok", "pause", "collected", "memory", "detail")


def status_table(status: dict[str, Any]) -> str:
    """GET /gc for eyes."""
    policy, coverage = status["policy"], status["coverage"]
    lines = [
        f"policy     {policy['mode']} (generation {policy['generation']}"
        + (f", owner {policy['owner']}" if policy["owner"] else "")
        + ")",
        f"coverage   {coverage['acknowledged']} of {coverage['expected']}",
        f"transport  {status['transport']}",
    ]
    if policy["lease_expires_at"]:
        lines.insert(1, f"lease      until {policy['lease_expires_at']}")
    lines += [f"note       {reason['detail']} ({reason['code']})" for reason in status["reasons"]]
    rows = [
        (
            "+".join(row["roles"]),
            row["dp_rank"],
            row["rank"],
            row["pid"],
            row["state"],
            row["mode"],
            row["observed_generation"],
            row["pauses"]["gen2"]["count"],
            seconds(row["pauses"]["gen2"]["max_s"]),
            size(row["memory"]["anonymous_bytes"]),
        )
        for row in status["processes"]
    ]
    notes = [
        f"{row['role']} dp{row['dp_rank']} rank {row['rank']}: {row['reason']}"
        for row in status["processes"]
        if row["reason"]
    ]
    return printable("\n".join([*lines, "", align(STATUS_COLUMNS, rows), *notes]) + "\n")


def operation_table(operation: dict[str, Any]) -> str:
    """An operation for eyes."""
    took = seconds(operation["duration_s"])
    head = f"{operation['kind']} {operation['state']} ({operation['id']}) {took}"
    rows = [
        (
            "+".join(line["roles"]),
            line["dp_rank"],
            line["rank"],
            line["pid"],
            "ok" if line["ok"] else line["code"],
            seconds(line["pause_s"]),
            line["collected_objects"],
            size(line["resident_delta_bytes"]),
            line["detail"] or "",
        )
        for line in operation["processes"]
    ]
    return printable("\n".join([head, "", align(OPERATION_COLUMNS, rows)]) + "\n")


def printable(text: str) -> str:
    """What a page says goes to a terminal: no control characters but our own line ends."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def align(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns side by side, as wide as they need."""
    cells = [list(columns), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(columns))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def seconds(value: float | None) -> str:
    """A length of time in the unit that fits."""
    if value is None:
        return UNKNOWN
    if value < 0.001:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.2f} s"


def size(value: int | None) -> str:
    """Bytes in MiB."""
    return UNKNOWN if value is None else f"{value / (1 << 20):.1f} MiB"


def _cell(value: Any) -> str:
    return (UNKNOWN if value is None else str(value)).replace("\n", " ")[:120]
