"""What each process did about a command, told by its page where it has one, else by its reply.

Pages are the proof: a reply is believed only where no page could show the same.
"""

from __future__ import annotations

from dataclasses import replace

from gc_sidecar.server.desired import MODE_OF_KIND
from gc_sidecar.server.operations import Line
from gc_sidecar.server.reports import Reply, Report
from gc_sidecar.server.roster import Row
from gc_sidecar_agent.command import Command, Outcome

# How far a page's remaining lease may be from the one that was asked for: polls, and the way there.
LEASE_TOLERANCE_S = 2.0


def judge_lines(
    command: Command,
    rows: tuple[Row, ...],
    replies: tuple[Reply, ...],
    rpc_pending: bool,
    age_s: float = 0.0,
) -> list[Line]:
    """What each process did about `command`, which was sent `age_s` ago: by its page where it has one, else
    by its reply."""
    by_token = {reply.report.identity.token: reply for reply in replies if reply.report is not None}
    anonymous = [reply.outcome for reply in replies if reply.report is None]
    return [
        _judge_line(command, row, by_token.get(row.token or ""), anonymous, rpc_pending, age_s)
        for row in rows
    ]


def _judge_line(
    command: Command,
    row: Row,
    reply: Reply | None,
    anonymous: list[Outcome],
    rpc_pending: bool,
    age_s: float,
) -> Line:
    report = row.report
    line = Line(row.key, row.roles, report.identity.pid if report else None, ok=False)
    if report is None or row.state == "gone":
        reason = row.reason
        failure = next((outcome for outcome in anonymous if not outcome.ok), None)
        if failure is not None and row.key.role == "worker" and row.state != "gone":
            # The engine core answers for a worker that could not say who it is. Of one that ended we know why.
            return replace(
                line, code=failure.code, detail=failure.detail, own_code=True, live=False
            )
        return replace(
            line,
            code=reason.code if reason else "no_agent",
            detail=reason.detail if reason else None,
            final=not rpc_pending,
            live=False,
        )
    if reply is not None and not reply.outcome.ok:
        return _failed(line, reply.outcome)
    if row.page is None:
        if reply is None:
            detail = "it has no page, and no reply came from it"
            return replace(line, code="no_reply", detail=detail, final=not rpc_pending)
        return replace(line, ok=True, outcome=reply.outcome, detail=reply.outcome.detail)
    return _judge_page(command, row, report, line, reply, age_s)


def _judge_page(
    command: Command, row: Row, report: Report, line: Line, reply: Reply | None, age_s: float
) -> Line:
    state = report.state
    outcome = state.operation
    if outcome is None or outcome.operation_id != command.operation_id:
        outcome = None
    if outcome is not None and not outcome.ok:
        return _failed(line, outcome)
    told = outcome or (reply.outcome if reply else None)
    done = replace(line, ok=True, outcome=told, detail=told.detail if told else None)
    if command.kind == "maintain":
        if outcome is not None:
            return done
    elif command.kind == "lease":
        remaining_ms = report.numbers.get("lease_remaining_ms")
        if state.mode == "off" or state.generation != command.generation:
            why = str(state.reason) if state.reason else "it is not under the policy any more"
            return replace(line, code="not_in_policy", detail=why, own_code=True)
        # It runs since the process saw it, at some time of the command's age.
        latest_s, earliest_s = command.lease_s, command.lease_s - age_s
        if remaining_ms is not None and _is_near(remaining_ms / 1000, earliest_s, latest_s):
            return done
    else:
        if state.refused is not None and state.refused.generation == command.generation:
            refused = state.refused
            return replace(line, code=refused.code, detail=refused.detail, own_code=True)
        if state.generation == command.generation:
            if state.mode == MODE_OF_KIND[command.kind]:
                return done
            reason = state.reason
            return replace(
                line,
                code=reason.code if reason else "other_mode",
                detail=reason.detail if reason else f"it is in mode {state.mode}",
                own_code=reason is not None,
            )
    why_not = row.reason
    return replace(
        line,
        code=why_not.code if why_not and row.state in ("stale", "pending") else "no_answer",
        detail=(
            why_not.detail
            if why_not and row.state in ("stale", "pending")
            else "its page does not show it"
        ),
        final=False,
    )


def _is_near(remaining_s: float, least_s: float, most_s: float) -> bool:
    return least_s - LEASE_TOLERANCE_S <= remaining_s <= most_s + 0.5


def _failed(line: Line, outcome: Outcome) -> Line:
    return replace(
        line,
        code=str(outcome.code or "failed"),
        detail=outcome.detail,
        outcome=outcome,
        own_code=True,
    )
