"""Reading what a request asks for: fields from a JSON body or from query parameters, checked strictly.

Whatever is not exactly right is a Problem that names the field, before anything was done.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import ClientDisconnect, Request

from gc_sidecar.server.desired import ANONYMOUS
from gc_sidecar.server.operations import Change
from gc_sidecar.server.problems import Problem
from gc_sidecar.server.security import is_from_browser
from gc_sidecar_agent.command import (
    DEFAULT_DEADLINE_S,
    DEFAULT_INTERVAL_S,
    MAXIMUM_SECONDS,
    MINIMUM_INTERVAL_S,
    OPERATION_ID,
)

MAXIMUM_DEADLINE_S = 3600.0
BODY_S = 10.0
CURL_MEDIA_TYPE = "application/x-www-form-urlencoded"
FORMATS = ("json", "table")
# How an answer looks, which is no field of the change.
FORMAT_FIELD = "format"
ABSENT = object()


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("must be printable characters")
    return value


def _seconds(minimum: float, maximum: float) -> Any:
    return Field(ge=minimum, le=maximum, allow_inf_nan=False)


Owner = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_printable)]
OperationId = Annotated[str, Field(pattern=f"^{OPERATION_ID.pattern}$")]
Interval = Annotated[float, _seconds(MINIMUM_INTERVAL_S, MAXIMUM_SECONDS)]
Lease = Annotated[float, _seconds(1.0, MAXIMUM_SECONDS)]
Deadline = Annotated[float, _seconds(0.1, MAXIMUM_DEADLINE_S)]
Growth = Annotated[int, Field(ge=0, le=1 << 50)]
PauseBudget = Annotated[float, _seconds(2.0, 60_000.0)]


class ChangeFields(BaseModel):
    """The fields of every route that changes something."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    owner: Owner = Field(ANONYMOUS, description="whose policy it is")
    deadline_s: Deadline = Field(DEFAULT_DEADLINE_S, description="how long the answer may take")
    force: bool = Field(False, description="also against another owner's policy")
    allow_partial: bool = Field(
        False, description="accept what can be had, where not every process does it"
    )
    operation_id: OperationId | None = Field(
        None, description="your own id: sent again, it is not done again"
    )

    def to_change(self, kind: str) -> Change:
        """The Change that these fields ask for."""
        fields = self.model_dump(exclude={"operation_id", "mode"})
        return Change(kind, self.operation_id or f"op-{uuid.uuid4().hex[:16]}", **fields)


class FreezeFields(ChangeFields):
    """POST /gc/freeze"""

    interval_s: Interval = Field(DEFAULT_INTERVAL_S, description="freeze again this often")
    lease_s: Lease | None = Field(
        None,
        description="how long it lasts without renewal: 3600, or as before where the policy is on already",
    )
    max_rss_growth_bytes: Growth | None = Field(
        None, description="a process that grew by more restores itself"
    )
    collect_first: bool = Field(True, description="run a full collection before")


class PolicyFields(FreezeFields):
    """PUT /gc/policy"""

    mode: Literal["off", "freeze", "budget"] = Field(description="the policy")
    pause_budget_ms: PauseBudget | None = Field(None, description="for budget: the longest pause")

    @model_validator(mode="after")
    def _check_budget(self) -> PolicyFields:
        if (self.mode == "budget") != (self.pause_budget_ms is not None):
            raise ValueError("pause_budget_ms belongs to mode budget, which needs it")
        return self


class MaintainFields(ChangeFields):
    """POST /gc/maintain"""

    when: Literal["now", "idle"] = Field("now", description="idle waits until no request runs")
    trim: bool = Field(False, description="give memory that is free back to the system")


class RestoreFields(ChangeFields):
    """POST /gc/restore"""


class LeaseFields(ChangeFields):
    """POST /gc/lease"""

    lease_s: Lease | None = Field(
        None,
        description="how long it lasts from now: as long as it was entered or last renewed for",
    )


async def read_change(request: Request, fields: type[ChangeFields], kind: str) -> Change:
    """The Change that `request` asks for. Raises Problem."""
    query = _query(request)
    query.pop(FORMAT_FIELD, None)
    body = await _body(request)
    if body is ABSENT:
        parsed = _validated(fields, query, from_query=True)
    elif query:
        name = next(iter(query))
        raise Problem("fields_twice", f"there is a body, and {name!r} is a query parameter")
    else:
        parsed = _validated(fields, body, from_query=False)
    if isinstance(parsed, PolicyFields):
        kind = {"off": "restore"}.get(parsed.mode, parsed.mode)
    return parsed.to_change(kind)


def read_format(request: Request, others: bool = False) -> str:
    """How the answer shall look. Raises Problem for a value that is none, and, unless `others` are read
    elsewhere, for every other parameter."""
    query = _query(request)
    chosen = query.pop(FORMAT_FIELD, "json")
    if query and not others:
        name = next(iter(query))
        raise Problem(
            "unknown_field", f"{name!r} is not a parameter of this route; it takes: format"
        )
    if chosen not in FORMATS:
        raise Problem("invalid_field", f"format must be one of {', '.join(FORMATS)}")
    return chosen


def _query(request: Request) -> dict[str, str]:
    fields: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in fields:
            raise Problem("invalid_field", f"{name} is given twice")
        fields[name] = value
    return fields


async def _body(request: Request) -> Any:
    """The JSON in the body, which may be null; ABSENT where there is no body."""
    try:
        data = (await asyncio.wait_for(request.body(), BODY_S)).strip()
    except asyncio.TimeoutError:
        raise Problem("body_timeout", f"the body did not arrive within {BODY_S:.0f} s") from None
    except ClientDisconnect:
        raise Problem("bad_json", "the client left before its body had arrived") from None
    if not data:
        return ABSENT
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = media_type == "application/json" or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )
    # `curl -d '{...}'` declares a form. So does a form of a hostile page, in a browser.
    is_from_curl = (
        media_type in (CURL_MEDIA_TYPE, "")
        and data.startswith(b"{")
        and not is_from_browser(request.headers)
    )
    if not is_json and not is_from_curl:
        raise Problem(
            "unsupported_media_type", f"the body is declared as {media_type or 'nothing'}"
        )
    try:
        # NaN and Infinity are no JSON, but they are read, so that the field that holds one can be named.
        return json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise Problem("bad_json", f"the body is not JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("an object names a field twice")
    return values


def _validated(fields: type[ChangeFields], values: Any, from_query: bool) -> ChangeFields:
    if not isinstance(values, dict):
        raise Problem("invalid_field", "the body must be a JSON object")
    try:
        if from_query:
            return fields.model_validate_strings(values)
        return fields.model_validate(values)
    except ValidationError as error:
        raise _field_problem(fields, error) from None


def _field_problem(fields: type[ChangeFields], error: ValidationError) -> Problem:
    errors = [
        {
            "field": ".".join(str(part) for part in each["loc"])[:100],
            "detail": each["msg"].removeprefix("Value error, "),
        }
        for each in error.errors(include_url=False, include_input=False, include_context=False)
    ]
    unknown = [e for e in error.errors() if e["type"] == "extra_forbidden"]
    first = errors[0]
    if unknown:
        name = str(unknown[0]["loc"][0])[:100]
        known = ", ".join(sorted(fields.model_fields))
        detail = f"{name!r} is not a field of this route; it takes: {known}"
        return Problem("unknown_field", detail, extra={"errors": errors})
    detail = f"{first['field']}: {first['detail']}" if first["field"] else first["detail"]
    return Problem("invalid_field", detail, extra={"errors": errors})
