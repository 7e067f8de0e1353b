"""What the client verbs print: aligned tables for people, and errors that say what to do.

Whatever a sidecar of another version leaves out is shown as a dash, never as a zero.
"""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gc_sidecar_agent.cli import (
    EXIT_FAILED,
    EXIT_INCOMPLETE,
    EXIT_OK,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
)
from gc_sidecar_agent.commands.options import UsageError, make_client, warn

if TYPE_CHECKING:
    # Imported below only where a sidecar is asked: doctor prints numbers too.
    from gc_sidecar_agent.client import Answer, Client, ClientError

UNKNOWN = "-"
# Answers that say the request itself was wrong.
INPUT_STATUSES = (400, 413, 415, 422)
NEVER = 1 << 30
# The sidecar's remedies speak of its fields; these speak of our flags.
REMEDIES = {
    "owned_by_other": "ask its owner, name the owner with --owner, or add --force",
    "incomplete_coverage": "--allow-partial accepts what can be had",
    "operation_id_reused": "choose another --operation-id",
    "not_idle": "wait longer with --wait, or do not wait with --when now",
    "idle_unknown": "use --when now, or give the sidecar --engine-url",
    "operation_running": "wait for it: `gc-sidecar status` shows it; `gc-sidecar restore --force` does not wait,"
    " unless that is a restore too",
    "pause_too_long": "restart the engine where it can be, or add --force at a moment when it may stand still",
    "window_not_found": "`gc-sidecar windows` lists them; they end with the sidecar, so open another one if it"
    " restarted",
    "window_id_reused": "choose another ID, or none: then one is made up",
    "too_many_windows": "close one: `gc-sidecar windows` lists them, `gc-sidecar window close ID` closes it",
    "outcome_unknown": "ask with `gc-sidecar status`; `gc-sidecar restore` is safe at any time",
    "token_required": "name the file with the token: --token-file or GC_SIDECAR_TOKEN_FILE",
}
# The same of the fields: how they are called here, and the unit of their values.
FLAGS = {
    "owner": ("--owner", ""),
    "operation_id": ("--operation-id", ""),
    "deadline_s": ("--deadline", " s"),
    "interval_s": ("--interval", " s"),
    "lease_s": ("--lease", " s"),
    "pause_budget_ms": ("--pause-budget", " ms"),
    "max_rss_growth_bytes": ("--max-rss-growth-bytes", " bytes"),
    "window_id": ("ID", ""),
    "name": ("--name", ""),
    "max_pause_ms": ("--max-pause", " ms"),
    "max_growth_bytes": ("--max-growth-bytes", " bytes"),
    "since": ("--since", ""),
    "min_duration_s": ("--min-duration", " s"),
    "role": ("--role", ""),
    "limit": ("--limit", ""),
}
ROLLED_BACK = {
    "True": "what had been changed was rolled back in every process",
    "False": "NOT everything was rolled back: see `gc-sidecar status`, then `gc-sidecar restore`",
    "unknown": "whether all was rolled back is not known: see `gc-sidecar status`",
}


def seconds(value: Any) -> str:
    """A length of time with three significant digits: 32 us, 4.10 ms, 335 ms, 1.42 s."""
    if not isinstance(value, (int, float)):
        return UNKNOWN
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        scaled = value * factor
        if scaled >= 0.9995 or unit == "us":
            return f"{_significant(scaled)} {unit}"
    return UNKNOWN


def size(value: Any) -> str:
    """Bytes in the unit that fits: 1.66 GiB, -812 KiB."""
    if not isinstance(value, (int, float)):
        return UNKNOWN
    scaled = float(value)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(scaled) < 1000 or unit == "TiB":
            return f"{scaled:.0f} B" if unit == "B" else f"{_significant(scaled)} {unit}"
        scaled /= 1024
    return UNKNOWN


def change(value: Any) -> str:
    """Bytes with a sign, for a difference."""
    text = size(value)
    return f"+{text}" if isinstance(value, (int, float)) and value > 0 else text


def count(value: Any) -> str:
    """A whole number with thousands separators."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else UNKNOWN


def word(value: Any) -> str:
    """Text of the sidecar or of a process, or a dash; nothing that a terminal would act on."""
    if value is None or value == "":
        return UNKNOWN
    return "".join(c if c.isprintable() else "?" for c in str(value))


def thresholds(value: Any) -> str:
    """GC thresholds; the one that stands for never is written as we set it."""
    if not isinstance(value, list):
        return UNKNOWN
    return ",".join("1<<30" if entry == NEVER else word(entry) for entry in value)


def role(process: dict[str, Any]) -> str:
    """The roles of a process, which may be several in one."""
    roles = process.get("roles")
    if isinstance(roles, list) and roles:
        return "+".join(word(name) for name in roles)
    return word(process.get("role"))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Aligned columns: the first `left` ones to the left, the others (figures) to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(widths[column]) if column < left else cell.rjust(widths[column])
            for column, cell in enumerate(line)
        ).rstrip()
        for line in lines
    )


def operation_table(operation: dict[str, Any], without: Sequence[str] = ()) -> str:
    """One line per process of an operation: what it did, and what came of it. Columns may be left out."""
    processes = rows_of(operation)
    lines = [
        [
            role(process),
            "ok" if process.get("ok") else word(process.get("code")),
            word(process.get("dp_rank")),
            word(process.get("rank")),
            word(process.get("pid")),
            seconds(process.get("pause_s")),
            count(process.get("collected_objects")),
            change(process.get("resident_delta_bytes")),
        ]
        for process in processes
    ]
    header = ("ROLE", "RESULT", "DP", "RANK", "PID", "PAUSE", "COLLECTED", "MEMORY")
    details = [
        f"{name_of(process)}: {word(process['detail'])}"
        for process in processes
        if process.get("detail")
    ]
    kept = [column for column, name in enumerate(header) if name not in without]
    shown = [[line[column] for column in kept] for line in (header, *lines)]
    return "\n".join([table(shown[0], shown[1:], left=2), *details]) if lines else ""


def rows_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The `processes` of a document; what is no object is left out."""
    processes = document.get("processes")
    if not isinstance(processes, list):
        return []
    return [process for process in processes if isinstance(process, dict)]


def name_of(process: dict[str, Any]) -> str:
    """A process as a line's beginning: worker dp 0 rank 1 (pid 5425)."""
    parts = [role(process)]
    for label, key in (("dp", "dp_rank"), ("rank", "rank")):
        if process.get(key) is not None:
            parts.append(f"{label} {word(process[key])}")
    if process.get("pid") is not None:
        parts.append(f"(pid {word(process['pid'])})")
    return " ".join(parts)


def print_json(text: str) -> None:
    """The sidecar's answer, untouched."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    sys.stdout.flush()


def print_error(verb: str, error: ClientError, as_json: bool) -> int:
    """Say on standard error what went wrong and what to do; returns the exit code."""
    from gc_sidecar_agent.client import StillRunning, Unreachable

    if as_json and error.body:
        print_json(error.body)
    status = f"HTTP {error.status}, " if error.status is not None else ""
    warn(f"{verb}: {word(_in_flags(error))} ({status}{word(error.code)})")
    rolled_back = ROLLED_BACK.get(str(error.problem.get("rolled_back")))
    if rolled_back:
        print(f"  {rolled_back}", file=sys.stderr)
    remedy = REMEDIES.get(error.code, error.remedy)
    if remedy:
        print(f"  what to do: {word(remedy)}", file=sys.stderr)
    if not as_json:
        lines = operation_table(error.problem.get("operation") or error.problem)
        if lines:
            print(f"\n{lines}", file=sys.stderr)
    for kind, code in ((Unreachable, EXIT_UNREACHABLE), (StillRunning, EXIT_INCOMPLETE)):
        if isinstance(error, kind):
            return code
    return EXIT_USAGE if error.status in INPUT_STATUSES else EXIT_FAILED


def _in_flags(error: ClientError) -> str:
    """What went wrong; where it is a field's value, by the name of our flag and with its unit."""
    field, _, reason = error.detail.partition(": ")
    if error.code != "invalid_field" or field not in FLAGS:
        return error.detail
    flag, unit = FLAGS[field]
    for said in ("Input should ", "String should "):
        reason = reason.replace(said, "must ")
    return f"{flag} {reason}{unit if reason[-1:].isdigit() else ''}"


def perform(
    verb: str,
    args: Namespace,
    call: Callable[[Client], Answer],
    show: Callable[[dict[str, Any]], str],
    judge: Callable[[Answer], int],
) -> int:
    """Ask the sidecar, print what came in the way that was asked for, return the exit code."""
    from gc_sidecar_agent.client import ClientError

    try:
        answer = call(make_client(args))
    except UsageError as error:
        warn(f"{verb}: {error}")
        return EXIT_USAGE
    except ClientError as error:
        return print_error(verb, error, args.json)
    if args.json:
        print_json(answer.text)
    else:
        print(show(answer.body))
    return judge(answer)


def judge_change(answer: Answer) -> int:
    """The exit code for a change that was answered with its operation."""
    if answer.running:
        return EXIT_OK  # nobody wanted to wait
    acknowledged = all(process.get("ok", True) for process in rows_of(answer.operation))
    complete = acknowledged and answer.operation.get("state") != "partial"
    return EXIT_OK if complete else EXIT_INCOMPLETE


def show_change(document: dict[str, Any]) -> str:
    """What an operation did, for people."""
    operation = document.get("operation")
    if not isinstance(operation, dict):
        return "done"
    lines = operation_table(operation)
    return f"{headline(operation)}\n\n{lines}" if lines else headline(operation)


def show_policy_change(document: dict[str, Any]) -> str:
    """The same for a policy that was entered: also when it ends, and how to end it."""
    lines = [show_change(document), ""]
    lease = document.get("lease")
    if isinstance(lease, dict):
        ends = word(lease.get("expires_at"))
        lines.append(f"the lease ends at {ends}: ask again as the same owner to renew it")
    operation = document.get("operation")
    owner = operation.get("owner") if isinstance(operation, dict) else None
    named = f" --owner {shlex.quote(word(owner))}" if owner not in (None, "anonymous") else ""
    lines.append(f"back to normal with: gc-sidecar restore{named}")
    return "\n".join(lines)


def headline(operation: dict[str, Any]) -> str:
    """What an operation did, in a line."""
    processes = rows_of(operation)
    done = sum(1 for process in processes if process.get("ok"))
    took = operation.get("duration_s")
    parts = [f"{word(operation.get('kind'))} {word(operation.get('state'))}"]
    if processes:
        parts.append(f"by {done} of {len(processes)} processes")
    if took is not None:
        parts.append(f"in {seconds(took)}")
    generation, operation_id = word(operation.get("generation")), word(operation.get("id"))
    return f"{' '.join(parts)} (policy generation {generation}, operation {operation_id})"


def _significant(value: float) -> str:
    """Three significant digits, without an exponent."""
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}"
