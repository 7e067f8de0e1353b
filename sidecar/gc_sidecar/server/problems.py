"""Every error that the server answers with: RFC 9457 problem+json with a stable `code`.

The table says status and title of each code, and what to do about it; clients may rely on all codes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

PROBLEM_MEDIA_TYPE = "application/problem+json"


@dataclass(frozen=True)
class Kind:
    """What all problems of one code have in common."""

    status: int
    title: str
    remedy: str | None = None


KINDS: Mapping[str, Kind] = {
    # The request itself.
    "bad_http": Kind(
        400, "The request is not HTTP", "a request's line and headers have at most 16 KiB"
    ),
    "bad_json": Kind(400, "The body is not JSON"),
    "invalid_field": Kind(422, "A field is not acceptable"),
    "unknown_field": Kind(422, "A field is not known"),
    "fields_twice": Kind(
        422,
        "Fields in the body and in the query",
        "send all fields as query parameters or all of them as a JSON body",
    ),
    "body_too_large": Kind(413, "The body is too large"),
    "body_timeout": Kind(408, "The body did not arrive in time"),
    "unsupported_media_type": Kind(
        415,
        "The body is not declared as JSON",
        "send fields as query parameters, or as JSON with -H 'Content-Type: application/json'",
    ),
    "not_found": Kind(404, "No such route", "GET / of the control listener lists the routes"),
    "operation_not_found": Kind(
        404, "No such operation", "GET /gc shows the running one; the last 256 are kept"
    ),
    "window_not_found": Kind(
        404,
        "No such window",
        "GET /gc/windows lists them; they end with the sidecar, so open another one if it restarted",
    ),
    "method_not_allowed": Kind(405, "The route takes another method"),
    # Who may ask.
    "token_required": Kind(
        401,
        "A token is required",
        'send -H "Authorization: Bearer $(cat FILE)" with the file given to --token-file',
    ),
    "token_unavailable": Kind(503, "The sidecar cannot read its token file"),
    "host_not_allowed": Kind(
        403,
        "The Host header is not allowed",
        "use localhost, or start the sidecar with --allowed-host NAME",
    ),
    "cross_origin": Kind(403, "Cross-origin requests are refused"),
    # Conflicts.
    "operation_running": Kind(
        409, "Another operation is running", "wait for it: GET /gc/operations/{id}"
    ),
    "operation_id_reused": Kind(
        409, "The operation id belongs to another request", "choose a new operation_id"
    ),
    "window_id_reused": Kind(
        409, "The window id belongs to another request", "choose a new window_id"
    ),
    "too_many_windows": Kind(
        409, "Too many windows are open", "close one: POST /gc/windows/{id}/close"
    ),
    "owned_by_other": Kind(
        409,
        "The policy belongs to another owner",
        "ask its owner, name it as `owner`, or add force=true to override it",
    ),
    "other_sidecar": Kind(
        409,
        "Another sidecar controls this engine",
        "ask that one, or stop it; one sidecar for each run directory",
    ),
    "pause_too_long": Kind(
        409,
        "The maintenance would hold up the engine for too long",
        "restart the engine where it can be, or add force=true at a moment when it may stand still",
    ),
    "no_policy": Kind(409, "No policy is in force", "POST /gc/freeze enters one"),
    "too_many_viewers": Kind(
        503, "Too many watch the events", "close a page that nobody looks at, or ask GET /gc"
    ),
    "sidecar_stopping": Kind(
        503, "The sidecar is about to end", "ask again when the next one has started"
    ),
    # The engine.
    "engine_not_seen": Kind(
        503, "No process of the engine can be reached", "GET /readyz says what is missing"
    ),
    "incomplete_coverage": Kind(
        502,
        "Not every process of the engine did it",
        "see `operation.processes`; allow_partial=true accepts what can be had",
    ),
    "outcome_unknown": Kind(
        504,
        "Not every process showed it in time",
        "GET /gc shows how each process stands; POST /gc/restore is safe at any time",
    ),
    "rpc_desync": Kind(502, "Replies of the engine are out of step", "restart the engine"),
    "engine_unreachable": Kind(503, "The engine cannot be reached"),
    "not_idle": Kind(
        503,
        "The engine did not become idle",
        "choose a longer deadline_s, or when=now",
    ),
    "idle_unknown": Kind(
        503, "Whether the engine is idle is not known", "use when=now, or give --engine-url"
    ),
    "board_not_written": Kind(
        503,
        "The run directory cannot be written",
        "it must be writable for the sidecar: setgid, with the pod's fsGroup, and not full",
    ),
    "not_ready": Kind(503, "Not ready"),
    "internal_error": Kind(
        500, "The sidecar made a mistake", "please report it with the line in its log"
    ),
}
# A code that a process itself refused with keeps its name; all of them are answered like this one.
PROCESS_REFUSAL = Kind(502, "The engine did not do it")


@dataclass(eq=False)
class Problem(Exception):
    """An error for whoever asked. `extra` are further members of the problem object."""

    code: str
    detail: str
    remedy: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        """Its row in the table."""
        return KINDS.get(self.code, PROCESS_REFUSAL)

    def document(self) -> dict[str, Any]:
        """The problem object of RFC 9457."""
        kind = self.kind
        remedy = self.remedy or kind.remedy
        return {
            "type": f"urn:gc-sidecar:problem:{self.code}",
            "title": kind.title,
            "status": kind.status,
            "code": self.code,
            "detail": self.detail,
            **({"remedy": remedy} if remedy else {}),
            **self.extra,
        }


def problem_response(problem: Problem) -> Response:
    """The answer that `problem` makes."""
    return Response(
        to_json(problem.document()),
        problem.kind.status,
        media_type=PROBLEM_MEDIA_TYPE,
        headers=dict(problem.headers),
    )


def to_json(document: Any) -> bytes:
    """JSON for people with curl: indented, and ending in a newline."""
    return (json.dumps(document, indent=2, allow_nan=False) + "\n").encode()
