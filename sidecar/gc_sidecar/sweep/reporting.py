"""What came of a sweep as a table for people, as JSON for machines, and as CSV with every single measurement."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gc_sidecar.sweep.analysis import CAUSED, CLIENT, NOT_GC, OUTLIER, Ladder, PolicyResult
from gc_sidecar.sweep.files import replacing
from gc_sidecar_agent.commands.output import UNKNOWN, change, count, seconds, table

REPORT_FORMAT = "gc-sidecar.sweep-report/v1"
COLUMNS = (
    "POLICY", "MEASURED", "OUTLIERS", "BY GC", "LONGEST", "P50", "P99", "P99.9", "FULL GCS", "GC PAUSE", "MEMORY",
)  # fmt: skip
CSV_FIELDS = (
    "policy", "block", "index", "prompt_tokens", "output_tokens", "concurrency", "kind", "started_s",
    "duration_s", "outlier_cause",
)  # fmt: skip


def show(results: Sequence[PolicyResult]) -> str:
    """The table, and what it means."""
    return f"{overview(results)}\n\n{explanation(results)}"


def overview(results: Sequence[PolicyResult]) -> str:
    """The table: a row for each policy."""
    return table(COLUMNS, [_row(result) for result in results])


def _row(result: PolicyResult) -> list[str]:
    begin = [result.policy, count(len(result.measurements))]
    if not result.measurements:
        return begin + [UNKNOWN] * (len(COLUMNS) - len(begin))
    return [
        *begin,
        count(len(result.outliers)),
        count(result.gc_outliers),
        seconds(result.longest_s),
        *(seconds(value) for value in result.quantiles_s.values()),
        count(result.full_collections),
        seconds(result.longest_pause_s or None),
        change(result.growth_bytes),
    ]


def explanation(results: Sequence[PolicyResult]) -> str:
    """What there is to say of each policy, and what the columns mean."""
    parts = [
        "\n".join([f"{result.policy}: {_causes(result)}", *_notes(result)]) for result in results
    ]
    parts.append(
        f"A measurement is one token's time. An outlier took more than {OUTLIER:g} times the median of its point's"
        " first\nor other tokens; GC caused it where pauses cover at least"
        f" {100 * CAUSED:g} % of what it took beyond that.\nFULL GCS and GC PAUSE (the longest) are automatic"
        " ones while something was measured;\nMEMORY is the growth of all processes together."
    )
    return "\n\n".join(parts)


def _causes(result: PolicyResult) -> str:
    if not result.measurements:
        return "nothing measured"
    if not result.outliers:
        return "no outlier"
    parts = [f"{number} by {cause}" for cause, number in result.causes.most_common()]
    what = "outlier" if len(result.outliers) == 1 else "outliers"
    return f"{count(len(result.outliers))} {what}: {', '.join(parts)}"


def _notes(result: PolicyResult) -> list[str]:
    notes = []
    ladder = result.ladder
    if ladder is not None and ladder.is_one:
        notes.append(f"  {ladder_text(ladder)}")
    notes += [f"  LEFT OUT, NOT VALID: {disturbed}" for disturbed in result.disturbed]
    notes += [f"  IN DOUBT: {doubt}" for doubt in result.doubts]
    if result.lost_pauses:
        notes.append(
            f"  pauses that are not known one by one: {count(result.lost_pauses)}, so more outliers than these"
            " may be theirs"
        )
    if result.together:
        notes.append(
            f"  tokens that came together with another: {count(result.together)}; such a measurement is of several"
        )
    return notes


def ladder_text(ladder: Ladder) -> str:
    """The ladder in a sentence."""
    indices = ", ".join(f"{index:,}" for index in ladder.indices)
    return (
        f"full collections of {ladder.process} came at measurements {indices}:"
        f" typically each gap is {ladder.ratio:.2f} times the one before"
    )


def document(results: Sequence[PolicyResult], about: dict[str, Any]) -> dict[str, Any]:
    """The same for machines. Times in seconds, dates in seconds since the epoch."""
    return {
        "format": REPORT_FORMAT,
        "about": about,
        "rules": {
            "outlier_medians": OUTLIER,
            "caused_share": CAUSED,
            "not_gc": NOT_GC,
            "client": CLIENT,
        },
        "policies": [_policy_document(result) for result in results],
    }


def _policy_document(result: PolicyResult) -> dict[str, Any]:
    ladder = result.ladder
    return {
        "policy": result.policy,
        "measurements": len(result.measurements),
        "longest_s": result.longest_s,
        **{f"{name}_s": value for name, value in result.quantiles_s.items()},
        "outliers": [
            {
                "index": outlier.measurement.index,
                "point": vars(outlier.measurement.point),
                "kind": outlier.measurement.kind,
                "started_s": outlier.measurement.started_s,
                "duration_s": outlier.measurement.duration_s,
                "median_s": outlier.median_s,
                "cause": outlier.cause,
            }
            for outlier in result.outliers
        ],
        "outliers_by_cause": dict(result.causes),
        "gc_outliers": result.gc_outliers,
        "pauses_of_any_kind": result.pause_count,
        "full_collections": result.full_collections,
        "longest_automatic_pause_s": result.longest_pause_s,
        "pauses_without_record": result.lost_pauses,
        "left_out": list(result.disturbed),
        "doubts": list(result.doubts),
        "tokens_together": result.together,
        "memory_growth_bytes": result.growth_bytes,
        "ladder": vars(ladder) if ladder is not None and ladder.is_one else None,
    }


def write_csv(results: Iterable[PolicyResult], path: Path) -> None:
    """Every measurement in a line of its own."""
    with replacing(path) as out:
        writer = csv.writer(out)
        writer.writerow(CSV_FIELDS)
        for result in results:
            causes = {outlier.measurement.index: outlier.cause for outlier in result.outliers}
            for each in result.measurements:
                point = each.point
                writer.writerow(
                    (
                        each.policy, each.block + 1, each.index, point.prompt_tokens, point.output_tokens,
                        point.concurrency, each.kind, f"{each.started_s:.6f}", f"{each.duration_s:.6f}",
                        causes.get(each.index, ""),
                    )
                )  # fmt: skip
