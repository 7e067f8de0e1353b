"""What came of carrying one command to all processes, and how it is told where it is not complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gc_sidecar.server.engine_http import EngineFault
from gc_sidecar.server.engines import CallResult
from gc_sidecar.server.obstacle import Obstacle
from gc_sidecar.server.operations import Line
from gc_sidecar.server.problems import KINDS, Problem

# Faults of an RPC after which the engine may still do what it was asked.
UNSURE_FAULTS = ("engine_timeout", "engine_hung_up", "rpc_desync")
NAMED = 5
MAXIMUM_DETAIL = 1000


@dataclass(frozen=True)
class Attempt:
    """What is known after a command was carried to the processes.

    `result` is that of the RPC, None where there was none or it had not returned in time;
    `reached_somebody` is whether any process may have got the command.
    """

    lines: tuple[Line, ...]
    result: CallResult | None
    rpc_pending: bool
    reached_somebody: bool

    @property
    def is_complete(self) -> bool:
        """Whether every process that is expected did it."""
        return bool(self.lines) and all(line.ok for line in self.lines)

    @property
    def done(self) -> int:
        """How many did it."""
        return sum(line.ok for line in self.lines)

    @property
    def missing(self) -> list[Line]:
        """Those that did not, or that have not shown it."""
        return [line for line in self.lines if not line.ok]

    @property
    def faults(self) -> tuple[EngineFault, ...]:
        """What went wrong with the RPC."""
        return self.result.faults if self.result is not None else ()

    @property
    def timed_out(self) -> bool:
        """Whether the deadline passed before every process had shown it, or had shown that it will not."""
        if self.is_complete:
            return False
        rpc_timed_out = any(fault.code == "engine_timeout" for fault in self.faults)
        return self.rpc_pending or rpc_timed_out or any(not line.final for line in self.missing)

    @property
    def failed_state(self) -> str:
        """`unknown` where something may still happen, else `failed`."""
        unsure = any(fault.code in UNSURE_FAULTS for fault in self.faults)
        return "unknown" if self.timed_out or (unsure and not self.is_complete) else "failed"


def problem_of(
    attempt: Attempt, nobody: Obstacle, has_run_dir: bool, extra: Mapping[str, object]
) -> Problem:
    """The error that says best why it is not complete. `nobody` is why no process is seen.

    Its detail names the processes; each one's own words are in its line of the operation.
    """
    missing = attempt.missing
    own = next((line for line in missing if line.own_code), None)
    faults = attempt.faults
    fault = next((f for f in faults if f.code == "rpc_desync"), next(iter(faults), None))
    replies = attempt.result.replies if attempt.result is not None else ()
    nameless = next((r.outcome for r in replies if r.report is None and not r.outcome.ok), None)
    in_time = " before the deadline" if attempt.timed_out else ""
    of = f"{attempt.done} of {len(attempt.lines)} processes" if attempt.lines else "no process"
    parts = [f"{of} did it{in_time}"]
    if own is not None:
        parts.append(f"{own.key}: {own.detail or own.code}")
        missing = [line for line in missing if line is not own]
    if missing:
        parts.append(f"{'nor did' if own else 'not'} {_names(missing)}")
    if fault is not None:
        parts.append(fault.detail)
    if nameless is not None and own is None:
        parts.append(nameless.detail or str(nameless.code))
    remedy = None
    # With a board and somebody to read it, a failed RPC is not why it was not done.
    decisive = fault if not has_run_dir or not attempt.lines else None
    if own is not None and own.code is not None and own.code not in KINDS:
        code = own.code
    elif attempt.timed_out and (decisive is None or decisive.code != "rpc_desync"):
        code = "outcome_unknown"
    elif decisive is not None:
        code, remedy = decisive.code, decisive.remedy
    elif attempt.lines:
        code = "incomplete_coverage"
    else:
        code = "engine_not_seen"
        parts = [f"nobody is there to do it: {'; '.join(parts[1:]) or nobody.detail}"]
    return Problem(code, "; ".join(parts)[:MAXIMUM_DETAIL], remedy, extra)


def _names(lines: list[Line]) -> str:
    named = ", ".join(f"{line.key} ({line.code})" for line in lines[:NAMED])
    return named if len(lines) <= NAMED else f"{named} and {len(lines) - NAMED} more"
