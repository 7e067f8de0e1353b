"""The command dict that travels over collective_rpc and the board, and the reply that comes back.

Both are plain JSON-safe dicts, for they cross vLLM's message pack, HTTP and a file. Everything that
either side reads of them is checked here, so a malformed one is an error with a code, never an exception.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

PROTOCOL_VERSION = 1

# The one method that collective_rpc calls. It sits on vLLM's WorkerWrapperBase, not on the worker class:
# vLLM refuses a worker extension that has any attribute of the worker class, whatever its name.
METHOD = "gc_sidecar_command"

# Kinds that an operation may have, and those the processes of an engine use among themselves.
POLICY_KINDS = ("freeze", "budget", "restore")
OPERATION_KINDS = (*POLICY_KINDS, "maintain")
INTERNAL_KINDS = ("ready", "settle", "observe", "lease")

OPERATION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")

DEFAULT_INTERVAL_S = 60.0
MINIMUM_INTERVAL_S = 1.0
DEFAULT_LEASE_S = 3600.0
DEFAULT_BUDGET_MS = 5.0
MINIMUM_BUDGET_MS, MAXIMUM_BUDGET_MS = 2.0, 60_000.0
DEFAULT_DEADLINE_S = 30.0
MINIMUM_DEADLINE_S, MAXIMUM_DEADLINE_S = 0.1, 3600.0
MAXIMUM_SECONDS = 365 * 86400.0
MAXIMUM_GENERATION = (1 << 52) - 1


class CommandError(ValueError):
    """A request that cannot be understood; `str()` of it says which field and why."""


@dataclass(frozen=True)
class Command:
    """What a process is asked to do.

    `kind` is one of OPERATION_KINDS or INTERNAL_KINDS. `generation` is the desired generation that the
    command belongs to. `lease_s` is what is left of the lease at the moment of sending, in seconds.
    """

    kind: str
    operation_id: str
    generation: int
    owner: str = "anonymous"
    interval_s: float = DEFAULT_INTERVAL_S
    lease_s: float = DEFAULT_LEASE_S
    pause_budget_ms: float | None = None
    max_rss_growth_bytes: int | None = None
    collect_first: bool = True
    trim: bool = False
    deadline_s: float = DEFAULT_DEADLINE_S

    def to_dict(self) -> dict[str, Any]:
        """The JSON-safe dict that is sent."""
        return {"version": PROTOCOL_VERSION, **asdict(self)}


@dataclass(frozen=True)
class Outcome:
    """What one process did about one command; part of its reply and, for operations, of its page.

    `pause_s` is the length of the collection that was asked for, None where none ran.
    `resident_delta_bytes` is anonymous memory after minus before.
    """

    operation_id: str
    kind: str
    generation: int
    ok: bool
    code: str | None = None
    detail: str | None = None
    pause_s: float | None = None
    collected_objects: int | None = None
    resident_delta_bytes: int | None = None
    device_delta_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The JSON-safe dict that is sent and stored."""
        return asdict(self)


def parse_command(request: Any) -> Command:
    """The Command in `request`; raises CommandError that names the first field that is wrong."""
    if not isinstance(request, dict):
        raise CommandError("a command is a JSON object")
    version = request.get("version")
    if version != PROTOCOL_VERSION:
        raise CommandError(
            f"protocol version {shown(version)} is not {PROTOCOL_VERSION}:"
            " install the agent and the sidecar from the same release"
        )
    fields = {key: value for key, value in request.items() if key != "version"}
    for name in fields:
        if name not in _CHECKS:
            raise CommandError(f"unknown field {shown(name)}")
    for name in ("kind", "operation_id", "generation"):
        if name not in fields:
            raise CommandError(f"{name} is missing")
    for name, value in fields.items():
        problem = _CHECKS[name](value)
        if problem:
            raise CommandError(f"{name} {problem}")
    return Command(**fields)


def echoed_id(request: Any) -> str:
    """The operation id that a reply to `request` bears, whatever that is; empty where it has none."""
    operation_id = request.get("operation_id") if isinstance(request, dict) else None
    valid = isinstance(operation_id, str) and OPERATION_ID.fullmatch(operation_id)
    return str(operation_id) if valid else ""


def parse_outcome(value: Any) -> Outcome | None:
    """The Outcome in `value`, or None where it is not one (pages and replies are not trusted)."""
    if not isinstance(value, dict):
        return None
    try:
        outcome = Outcome(**{k: v for k, v in value.items() if k in Outcome.__dataclass_fields__})
    except TypeError:
        return None
    for name, check in _OUTCOME_CHECKS.items():
        if check(getattr(outcome, name)):
            return None
    return outcome


def shown(value: Any) -> str:
    """`value` for a message, short; its own repr may be as long as a request, and fails for a huge number."""
    try:
        text = repr(value)
    except Exception:
        text = f"of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_kind(value: Any) -> str | None:
    kinds = (*OPERATION_KINDS, *INTERNAL_KINDS)
    return None if value in kinds else f"must be one of {', '.join(kinds)}"


def _is_operation_id(value: Any) -> str | None:
    if isinstance(value, str) and OPERATION_ID.fullmatch(value):
        return None
    return "must be 1 to 64 letters, digits, dots, colons, dashes or underscores"


def _is_name(value: Any) -> str | None:
    if isinstance(value, str) and 0 < len(value) <= 128 and value.isprintable():
        return None
    return "must be 1 to 128 printable characters"


def _is_count(maximum: int, optional: bool = False) -> Any:
    def check(value: Any) -> str | None:
        if optional and value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= maximum:
            return None
        return f"must be a whole number from 0 to {maximum}"

    return check


def _is_number(minimum: float, maximum: float, optional: bool = False) -> Any:
    def check(value: Any) -> str | None:
        if optional and value is None:
            return None
        # Not a number and infinity lie in no range, and a comparison takes numbers that no float can hold.
        if (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and minimum <= value <= maximum
        ):
            return None
        return f"must be a number from {minimum:g} to {maximum:g}"

    return check


def _is_flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def _is_text(optional: bool = False) -> Any:
    def check(value: Any) -> str | None:
        if isinstance(value, str) or (optional and value is None):
            return None
        return "must be a text"

    return check


def _is_difference(value: Any) -> str | None:
    if value is None or (isinstance(value, int) and abs(value) <= 1 << 62):
        return None
    return "must be a whole number"


_CHECKS: dict[str, Any] = {
    "kind": _is_kind,
    "operation_id": _is_operation_id,
    "generation": _is_count(MAXIMUM_GENERATION),
    "owner": _is_name,
    "interval_s": _is_number(MINIMUM_INTERVAL_S, MAXIMUM_SECONDS),
    "lease_s": _is_number(0, MAXIMUM_SECONDS),
    "pause_budget_ms": _is_number(MINIMUM_BUDGET_MS, MAXIMUM_BUDGET_MS, optional=True),
    "max_rss_growth_bytes": _is_count(1 << 50, optional=True),
    "collect_first": _is_flag,
    "trim": _is_flag,
    "deadline_s": _is_number(0, MAXIMUM_SECONDS),
}

_OUTCOME_CHECKS: dict[str, Any] = {
    "operation_id": _is_text(),
    "kind": _is_text(),
    "generation": _is_count(MAXIMUM_GENERATION),
    "ok": _is_flag,
    "code": _is_text(optional=True),
    "detail": _is_text(optional=True),
    "pause_s": _is_number(0, MAXIMUM_SECONDS, optional=True),
    "collected_objects": _is_count(1 << 62, optional=True),
    "resident_delta_bytes": _is_difference,
    "device_delta_bytes": _is_difference,
}
