"""`gc-sidecar status`: the policy, who holds it, and one line for every process of the engine.

A thin layer over `GET /gc`, which reads pages and never costs the engine a step.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from gc_sidecar_agent.cli import EXIT_INCOMPLETE, EXIT_OK, EXIT_USAGE
from gc_sidecar_agent.client import Answer, Client
from gc_sidecar_agent.commands.options import add_client_arguments, add_option, describe, duration
from gc_sidecar_agent.commands.output import (
    change,
    count,
    name_of,
    perform,
    role,
    rows_of,
    seconds,
    size,
    table,
    thresholds,
    word,
)

MINIMUM_WATCH_S = 0.2
CLEAR_SCREEN = "\x1b[H\x1b[2J"
# What a process may be while everything is in order.
SETTLED_STATE = "applied"

DESCRIPTION = """\
Show the policy in force, its owner and lease, how the sidecar reaches the engine, and every
process: its state, GC thresholds, full collections so far with the longest pause, and memory.
It reads what the processes publish about themselves and never costs the engine a step.

states: applied, pending (not yet), drifted (another policy than desired), stale (no heartbeat),
gone, uncovered (no agent in it), refused (with the reason).
"""

EXAMPLES = """\
  gc-sidecar status
  gc-sidecar status --watch 2s
  gc-sidecar status --json | jq -e '.coverage.acknowledged == .coverage.expected'
"""

COLUMNS = (
    "ROLE",
    "STATE",
    "MODE",
    "DP",
    "RANK",
    "PID",
    "POLICY GEN",
    "THRESHOLDS",
    "FULL GCS",
    "LONGEST",
    "MEMORY",
    "GROWTH",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `status`."""
    describe(parser, DESCRIPTION, EXAMPLES)
    add_option(
        parser,
        "--watch",
        duration,
        metavar="DURATION",
        nargs="?",
        const=2.0,
        environment=False,
        help="show it again every 2s, or as often as you say, until Ctrl-C",
    )
    add_client_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Ask, print, return the exit code; with --watch again and again."""
    if args.watch is None:
        return perform("status", args, _call, show, judge)
    while True:
        if not args.json:
            print(CLEAR_SCREEN, end="")
        code = perform("status", args, _call, show, judge)
        if code == EXIT_USAGE:
            return code
        time.sleep(max(args.watch, MINIMUM_WATCH_S))


def judge(answer: Answer) -> int:
    """Incomplete where a process of the engine has not acknowledged the desired generation."""
    coverage = _object(answer.body.get("coverage"))
    acknowledged, expected = coverage.get("acknowledged"), coverage.get("expected")
    # An engine that shows no process at all is covered by nobody.
    complete = bool(expected) and acknowledged == expected
    settled = all(
        process.get("state", SETTLED_STATE) == SETTLED_STATE for process in rows_of(answer.body)
    )
    return EXIT_OK if complete and settled else EXIT_INCOMPLETE


def show(document: dict[str, Any]) -> str:
    """The status for people."""
    parts = [_headline(document)]
    processes = rows_of(document)
    if processes:
        parts.append(table(COLUMNS, [_row(process) for process in processes], left=3))
    notes = [
        f"{name_of(process)}: {word(process['reason'])}"
        for process in processes
        if process.get("reason")
    ]
    notes += [
        f"{name_of(process)}: collecting for {seconds(process['collecting_for_s'])}"
        for process in processes
        if process.get("collecting_for_s") and process.get("state") != "gone"
    ]
    notes += [
        f"{name_of(process)}: restored, but its collection has not come yet"
        for process in processes
        if process.get("collect_pending")
    ]
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def _headline(document: dict[str, Any]) -> str:
    policy = _object(document.get("policy"))
    coverage = _object(document.get("coverage"))
    mode = policy.get("mode")
    described = [word(mode)]
    if policy.get("generation") is not None:
        described.append(f"policy generation {word(policy['generation'])}")
    if mode not in (None, "off"):
        described.append(f"owner {word(policy.get('owner'))}")
        described += [
            f"{label} {word(value)}"
            for label, value in (
                # Under budget it means nothing.
                (
                    "young survivors frozen every",
                    _known(policy.get("interval_s") if mode == "freeze" else None, "{:g} s".format),
                ),
                ("pause budget", _known(policy.get("pause_budget_ms"), "{:g} ms".format)),
                ("growth at most", _known(policy.get("max_rss_growth_bytes"), size)),
                ("since", policy.get("entered_at")),
            )
            if value is not None
        ]
    lines = [("policy", ", ".join(described))]
    safe = _object(document.get("safe_to_measure"))
    if safe:
        lines.insert(0, ("measure?", f"{word(safe.get('word'))} {word(safe.get('why'))}"))
    if policy.get("lease_expires_at"):
        lines.append(("lease", f"ends at {word(policy['lease_expires_at'])}"))
    over = [each.get("pauses_over_budget") or 0 for each in rows_of(document)]
    if mode == "budget":
        lines.append(("over it", f"{sum(over)} automatic collections since the processes started"))
    if policy.get("reason"):
        lines.append(("ended", word(policy["reason"])))
    lines.append(
        (
            "coverage",
            f"{word(coverage.get('acknowledged'))} of {word(coverage.get('expected'))} processes",
        )
    )
    lines.append(("transport", word(document.get("transport"))))
    operation = document.get("operation")
    if isinstance(operation, dict):
        running = f"{word(operation.get('kind'))} {word(operation.get('state'))}"
        lines.append(("operation", f"{running} ({word(operation.get('id'))})"))
    for reason in document.get("reasons") or []:
        lines.extend(_reason(_object(reason)))
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label.ljust(width)}  {text}".rstrip() for label, text in lines)


def _reason(reason: dict[str, Any]) -> list[tuple[str, str]]:
    code = f" ({word(reason['code'])})" if reason.get("code") else ""
    lines = [("note", f"{word(reason.get('detail'))}{code}")]
    if reason.get("remedy"):
        lines.append(("", f"what to do: {word(reason['remedy'])}"))
    return lines


def _row(process: dict[str, Any]) -> list[str]:
    memory = _object(process.get("memory"))
    full = _object(_object(process.get("pauses")).get("gen2"))
    return [
        role(process),
        word(process.get("state")),
        word(process.get("mode")),
        word(process.get("dp_rank")),
        word(process.get("rank")),
        word(process.get("pid")),
        word(process.get("observed_generation")),
        thresholds(_object(process.get("gc")).get("threshold")),
        count(full.get("count")),
        seconds(full.get("max_s")) if full.get("count") else word(None),
        size(memory.get("anonymous_bytes")),
        change(memory.get("growth_bytes")),
    ]


def _call(client: Client) -> Answer:
    return client.get_status()


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _known(value: Any, show_value: Any) -> Any:
    return None if value is None else show_value(value)
