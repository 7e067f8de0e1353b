"""Recent pauses as a table, for `?format=table` of `GET /gc/pauses`."""

from __future__ import annotations

from typing import Any

from gc_sidecar_agent.commands.output import count, role, seconds, table, word

COLUMNS = ("STARTED", "ROLE", "TRIGGER", "DP", "RANK", "PID", "GEN", "PAUSE", "COLLECTED")


def show_pauses(document: dict[str, Any]) -> str:
    """The pauses for people, newest first."""
    pauses = document.get("pauses") or []
    parts = [pause_table(pauses) if pauses else "no such pause has been recorded"]
    more = (document.get("matching") or 0) - len(pauses)
    if more > 0:
        parts.append(f"{more:,} more match; ?limit= asks for more of them")
    if document.get("complete_since"):
        parts.append(f"complete since {word(document['complete_since'])}")
    if document.get("lost"):
        parts.append(
            f"of {document['lost']:,} others no record came (counters and sums have them all)"
        )
    return "\n\n".join(parts)


def pause_table(pauses: list[dict[str, Any]]) -> str:
    """One line for each pause."""
    lines = [
        [
            word(pause.get("started_at")),
            role(pause),
            word(pause.get("trigger")),
            word(pause.get("dp_rank")),
            word(pause.get("rank")),
            word(pause.get("pid")),
            word(pause.get("gc_generation")),
            seconds(pause.get("duration_s")),
            count(pause.get("collected_objects")),
        ]
        for pause in pauses
    ]
    return table(COLUMNS, lines, left=3)
