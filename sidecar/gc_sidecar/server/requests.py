"""Reading what a request asks for: fields from a JSON body or from query parameters, checked strictly.

Whatever is not exactly right is a Problem that names the field, before anything was done.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from starlette.requests import ClientDisconnect, Request

from gc_sidecar.server.desired import ANONYMOUS
from gc_sidecar.server.operations import Change
from gc_sidecar.server.pauses import SeenPause
from gc_sidecar.server.problems import Problem
from gc_sidecar.server.reports import MAXIMUM_RANK, Identity
from gc_sidecar.server.security import is_from_browser
from gc_sidecar.server.verdicts import DEFAULT_MAX_PAUSE_MS, DEFAULT_MAX_STALL_SHARE, Limits
from gc_sidecar_agent.agent import ROLES
from gc_sidecar_agent.command import (
    DEFAULT_BUDGET_MS,
    DEFAULT_DEADLINE_S,
    DEFAULT_INTERVAL_S,
    MAXIMUM_BUDGET_MS,
    MAXIMUM_DEADLINE_S,
    MAXIMUM_SECONDS,
    MINIMUM_BUDGET_MS,
    MINIMUM_DEADLINE_S,
    MINIMUM_INTERVAL_S,
    OPERATION_ID,
)
from gc_sidecar_agent.page import TRIGGERS

BODY_S = 10.0
CURL_MEDIA_TYPE = "application/x-www-form-urlencoded"
FORMATS = ("json", "table")
# How an answer looks, which is no field of the change.
FORMAT_FIELD = "format"
ABSENT = object()
# The zone of a time whose `+` was not written as %2B in a query, where it means a blank.
SPOILT_ZONE = re.compile(r"([T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?) (\d\d:\d\d)$")


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("must be printable characters")
    return value


def _operation_id(value: str) -> str:
    if not OPERATION_ID.fullmatch(value):
        raise ValueError(
            "must be 1 to 64 letters, digits or . _ : -, of which the first is no sign"
        )
    return value


def _between(minimum: float, maximum: float) -> Any:
    return Field(ge=minimum, le=maximum, allow_inf_nan=False)


# What of `str.isprintable` a regular expression can say: of Latin-1 it is exactly that.
PRINTABLE = r"^[^\x00-\x1f\x7f-\xa0\xad]+$"
Owner = Annotated[
    str,
    Field(min_length=1, max_length=128, json_schema_extra={"pattern": PRINTABLE}),
    AfterValidator(_printable),
]
OperationId = Annotated[
    str,
    AfterValidator(_operation_id),
    Field(json_schema_extra={"pattern": f"^{OPERATION_ID.pattern}$"}),
]
Interval = Annotated[float, _between(MINIMUM_INTERVAL_S, MAXIMUM_SECONDS)]
Lease = Annotated[float, _between(1.0, MAXIMUM_SECONDS)]
Deadline = Annotated[float, _between(MINIMUM_DEADLINE_S, MAXIMUM_DEADLINE_S)]
Growth = Annotated[int, Field(ge=0, le=1 << 50)]
PauseBudget = Annotated[float, _between(MINIMUM_BUDGET_MS, MAXIMUM_BUDGET_MS)]
Milliseconds = Annotated[float, _between(0.0, 1000 * MAXIMUM_SECONDS)]
Share = Annotated[float, _between(0.0, 1.0)]
Patience = Annotated[float, _between(10.0, MAXIMUM_SECONDS)]
Rank = Annotated[int, Field(ge=0, le=MAXIMUM_RANK)]
Fields = TypeVar("Fields", bound=BaseModel)


class BodyFields(BaseModel):
    """Fields of which none is guessed: an unknown one and a wrong type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ChangeFields(BodyFields):
    """The fields of every route that changes something."""

    owner: Owner = Field(ANONYMOUS, description="whose policy it is")
    deadline_s: Deadline = Field(DEFAULT_DEADLINE_S, description="how long the answer may take")
    force: bool = Field(False, description="also against another owner's policy")
    allow_partial: bool = Field(
        False, description="accept what can be had, where not every process does it"
    )
    operation_id: OperationId | None = Field(
        None, description="your own id: sent again, it is not done again"
    )

    def to_change(self, kind: str, default_deadline_s: float) -> Change:
        """The Change that these fields ask for."""
        fields = self.model_dump(exclude={"operation_id", "mode"})
        if fields["deadline_s"] is None:
            fields["deadline_s"] = default_deadline_s
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


def _pause_is_of_budget(schema: dict[str, Any]) -> None:
    """What `PolicyFields` checks beyond single fields, said in JSON Schema."""
    schema["if"] = {"properties": {"mode": {"const": "budget"}}}
    schema["else"] = {"properties": {"pause_budget_ms": {"type": "null"}}}


class PolicyFields(FreezeFields):
    """PUT /gc/policy"""

    model_config = ConfigDict(json_schema_extra=_pause_is_of_budget)

    mode: Literal["off", "freeze", "budget"] = Field(description="the policy")
    pause_budget_ms: PauseBudget | None = Field(
        None, description=f"for budget: the longest pause ({DEFAULT_BUDGET_MS:g})"
    )

    def to_change(self, kind: str, default_deadline_s: float) -> Change:
        """The Change that these fields ask for; a budget that was not given is the usual one."""
        change = super().to_change(kind, default_deadline_s)
        if kind != "budget" or change.pause_budget_ms is not None:
            return change
        return replace(change, pause_budget_ms=DEFAULT_BUDGET_MS)

    @model_validator(mode="after")
    def _check_budget(self) -> PolicyFields:
        if self.mode != "budget" and self.pause_budget_ms is not None:
            raise ValueError("pause_budget_ms belongs to mode budget")
        return self


class MaintainFields(ChangeFields):
    """POST /gc/maintain"""

    deadline_s: Deadline | None = Field(  # type: ignore[assignment]
        None,
        description="how long the answer may take: 30, or twice the pause that is expected if that is longer",
    )
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


class WindowFields(BodyFields):
    """POST /gc/windows"""

    name: Owner | None = Field(None, description="what is measured, for people")
    window_id: OperationId | None = Field(
        None, description="your own id: sent again, it is not opened again"
    )
    max_pause_ms: Milliseconds = Field(
        DEFAULT_MAX_PAUSE_MS, description="the longest pause of one process in a clean window"
    )
    max_stall_ms: Milliseconds | None = Field(
        None, description="the longest that one lockstep group may be held up in all"
    )
    max_stall_share: Share = Field(
        DEFAULT_MAX_STALL_SHARE,
        description="the same, in proportion to the window; a single pause within max_pause_ms is never over it",
    )
    max_growth_bytes: Growth | None = Field(
        None, description="the most that one process may grow by"
    )
    abandon_after_s: Patience | None = Field(
        None, description="it is closed by itself when nobody has asked for it for so long"
    )

    @property
    def limits(self) -> Limits:
        """What a clean window stays within."""
        # Of pauses without a record more may be lost than the window is long.
        share = self.max_stall_share if self.max_stall_share < 1 else None
        return Limits(self.max_pause_ms, self.max_stall_ms, share, self.max_growth_bytes)


class ClosingFields(BodyFields):
    """POST /gc/windows/{id}/close"""


class WatchFields(BaseModel):
    """GET /gc/events"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    for_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = Field(
        3600.0, description="how long the stream goes on; 0: what is kept, and no more"
    )


class PauseFilter(BaseModel):
    """GET /gc/pauses"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    since: datetime | None = Field(
        None, description="only pauses that ended after this moment (RFC 3339)"
    )
    min_duration_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.0, description="only pauses at least this long"
    )
    role: Literal[ROLES] | None = Field(None, description="only processes with this role")  # type: ignore[valid-type]
    dp_rank: Rank | None = Field(None, description="only processes of this data-parallel rank")
    rank: Rank | None = Field(None, description="only processes of this rank")
    gc_generation: Annotated[int, Field(ge=0, le=2)] | None = Field(
        None, description="2: full collections"
    )
    trigger: Literal[TRIGGERS] | None = Field(None, description="what caused it")  # type: ignore[valid-type]
    limit: Annotated[int, Field(ge=1, le=10_000)] = Field(
        1000, description="how many of the newest"
    )

    @field_validator("since", mode="before")
    @classmethod
    def _read_time(cls, value: Any) -> datetime | None:
        if value is None:
            return None
        text = SPOILT_ZONE.sub(r"\1+\2", str(value)).replace("Z", "+00:00")
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            time = None
        if time is None or time.tzinfo is None:
            raise ValueError("must be a time with its zone: 2026-12-01T09:00:00Z")
        return time

    def wants_process(self, who: Identity) -> bool:
        """Whether it asks for pauses of this process."""
        return (
            (self.role is None or self.role in who.roles)
            and self.dp_rank in (None, who.dp_rank)
            and self.rank in (None, who.rank)
        )

    def wants(self, pause: SeenPause, since_s: float) -> bool:
        """Whether it asks for this pause; `since_s` is `since` on the clock of the pauses."""
        return (
            pause.end_s > since_s
            and pause.duration_s >= self.min_duration_s
            and self.gc_generation in (None, pause.gc_generation)
            and self.trigger in (None, pause.trigger)
            and self.wants_process(pause.who)
        )


async def read_change(
    request: Request,
    fields: type[ChangeFields],
    kind: str,
    default_deadline_s: float = DEFAULT_DEADLINE_S,
) -> Change:
    """The Change that `request` asks for. Raises Problem."""
    parsed = await read_fields(request, fields)
    if isinstance(parsed, PolicyFields):
        kind = {"off": "restore"}.get(parsed.mode, parsed.mode)
    return parsed.to_change(kind, default_deadline_s)


async def read_fields(request: Request, fields: type[Fields]) -> Fields:
    """The fields of a request, from its body or from its query. Raises Problem."""
    query = _fields_of_query(request)
    body = await _body(request)
    if body is ABSENT:
        return _validated(fields, query, from_query=True)
    if query:
        name = next(iter(query))
        raise Problem("fields_twice", f"there is a body, and {name!r} is a query parameter")
    return _validated(fields, body, from_query=False)


def read_filter(request: Request, fields: type[Fields]) -> Fields:
    """The parameters of a route that only reads. Raises Problem."""
    return _validated(fields, _fields_of_query(request), from_query=True)


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


def _fields_of_query(request: Request) -> dict[str, str]:
    query = _query(request)
    query.pop(FORMAT_FIELD, None)
    return query


async def _body(request: Request) -> Any:
    """The JSON in the body, which may be null; ABSENT where there is no body."""
    try:
        data = await asyncio.wait_for(request.body(), BODY_S)
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
        and data.lstrip().startswith(b"{")
        and not is_from_browser(request.headers)
    )
    if not is_json and not is_from_curl:
        raise Problem(
            "unsupported_media_type", f"the body is declared as {media_type or 'nothing'}"
        )
    try:
        # NaN and Infinity are no JSON, but they are read, so that the field that holds one can be named.
        return json.loads(data, object_pairs_hook=_unique, parse_float=_number)
    except (ValueError, RecursionError) as error:
        raise Problem("bad_json", f"the body is not JSON: {error}") from None


def _number(text: str) -> float:
    """JSON has one kind of number: 1e9 is as whole as 1000000000."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("an object names a field twice")
    return values


def _validated(fields: type[Fields], values: Any, from_query: bool) -> Fields:
    if not isinstance(values, dict):
        raise Problem("invalid_field", "the body must be a JSON object")
    try:
        if from_query:
            return fields.model_validate_strings(values)
        return fields.model_validate(values)
    except ValidationError as error:
        raise _field_problem(fields, error) from None


def _field_problem(fields: type[BaseModel], error: ValidationError) -> Problem:
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
