"""The routes of both listeners. Each reads its request, asks the coordinator, and shapes the answer.

What the answers hold is in `views`, how requests are read in `requests`.
"""

from __future__ import annotations

import platform
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Path
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from gc_sidecar import __version__
from gc_sidecar.server import answers, openapi, page, readiness, requests
from gc_sidecar.server.changes import maintain_deadline_s
from gc_sidecar.server.coordinator import Coordinator
from gc_sidecar.server.exposition import render
from gc_sidecar.server.live import EVENT_SCHEMA, EVENT_STREAM, Live
from gc_sidecar.server.operations import Operation, new_id
from gc_sidecar.server.problems import Problem, problem_response, to_json
from gc_sidecar.server.safety import LastMinute, judge
from gc_sidecar.server.tally import Tally
from gc_sidecar.server.verdicts import Window
from gc_sidecar.server.views import (
    change_view,
    obstacle_view,
    operation_line,
    operation_view,
    pauses_view,
    status_view,
    window_line,
    window_view,
)
from gc_sidecar.server.windows import Windows
from gc_sidecar_agent import __version__ as agent_version
from gc_sidecar_agent.commands.output import seconds, show_change, table, word
from gc_sidecar_agent.commands.pauses import show_pauses
from gc_sidecar_agent.commands.status import show as show_status
from gc_sidecar_agent.commands.window import show_window, show_windows

RETRY_AFTER_S = "1"


@dataclass(frozen=True)
class Action:
    """A route that changes something."""

    method: str
    path: str
    kind: str
    fields: type[requests.ChangeFields]
    summary: str
    # A field without which it is refused, with a value.
    example: str = ""
    # Codes of problems that it alone has.
    own_problems: tuple[str, ...] = ()


ACTIONS = (
    Action(
        "POST", "/gc/freeze", "freeze", requests.FreezeFields,
        "No automatic full collection from now on, in every process of the engine",
    ),
    Action(
        "PUT", "/gc/policy", "policy", requests.PolicyFields,
        "Any policy, declaratively", "mode=off",
    ),
    Action(
        "POST", "/gc/maintain", "maintain", requests.MaintainFields,
        "Collect once, and freeze again where the heap was frozen",
        own_problems=("not_idle", "idle_unknown", "pause_too_long"),
    ),
    Action(
        "POST", "/gc/restore", "restore", requests.RestoreFields,
        "Back to normal GC; safe at any time and any number of times",
    ),
    Action(
        "POST", "/gc/lease", "lease", requests.LeaseFields,
        "Renew the lease of the policy in force", own_problems=("no_policy",),
    ),
)  # fmt: skip
READS = (
    "/gc", "/gc/events", "/gc/operations", "/gc/operations/{id}", "/gc/pauses", "/gc/windows",
    "/gc/windows/{window_id}", "/healthz", "/readyz", "/metrics", "/version", "/page/{name}", "/",
)  # fmt: skip
OPENING, CLOSING = "/gc/windows", "/gc/windows/{window_id}/close"


def control_router(
    coordinator: Coordinator, windows: Windows, live: Live, last_minute: LastMinute, tally: Tally
) -> APIRouter:
    """Every route."""
    router = APIRouter(redirect_slashes=False)
    for action in ACTIONS:
        _add_action(router, coordinator, action)

    @router.get(
        "/gc",
        summary="Desired and observed state, and every process",
        openapi_extra=openapi.READS_FORMAT,
        responses={
            **openapi.answer_or_table(answers.Status),
            **openapi.problems(*openapi.OF_PARAMETERS),
        },
    )
    async def get_status(request: Request) -> Response:
        style = requests.read_format(request)
        roster = await coordinator.watch.look()
        safety = judge(coordinator, roster, readiness.obstacles(coordinator, roster), last_minute)
        reasons = coordinator.knowledge.obstacles(roster)
        status = status_view(coordinator, roster, reasons, safety)
        return _answer(status, show_status(dict(status)) if style == "table" else None)

    @router.get(
        "/gc/operations",
        summary="The last operations, newest first",
        openapi_extra=openapi.READS_FORMAT,
        responses={
            **openapi.answer_or_table(answers.Operations),
            **openapi.problems(*openapi.OF_PARAMETERS),
        },
    )
    async def get_operations(request: Request) -> Response:
        style = requests.read_format(request)
        view = {"operations": [operation_line(each) for each in reversed(coordinator.ledger.all())]}
        return _answer(view, show_operations(view) if style == "table" else None)

    @router.get(
        "/gc/operations/{operation_id}",
        summary="What an operation did in each process",
        openapi_extra=openapi.READS_FORMAT,
        responses={
            **openapi.answer_or_table(
                answers.OperationAnswer,
                description="It, as far as it has come; while it runs with Location and Retry-After",
            ),
            **openapi.problems("operation_not_found", *openapi.OF_IDS, *openapi.OF_PARAMETERS),
        },
    )
    async def get_operation(request: Request, operation_id: str) -> Response:
        style = requests.read_format(request)
        operation = coordinator.ledger.get(operation_id)
        if operation is None:
            raise Problem("operation_not_found", f"there is no operation {operation_id[:64]!r}")
        return _operation_answer(
            operation, {"operation": operation_view(operation)}, style, status=200
        )

    @router.get(
        "/version",
        summary="Versions of the sidecar, the agents and the engine",
        responses={**openapi.answer(answers.Version), **openapi.problems()},
    )
    async def get_version() -> Response:
        reports = (await coordinator.watch.look()).reports
        return _answer(
            {
                "version": __version__,
                "python": platform.python_version(),
                "agent": agent_version,
                "agents": sorted({r.identity.agent for r in reports if r.identity.agent}),
                "engines": sorted(
                    {r.identity.engine for r in reports if r.identity.engine}
                    | {f"vllm {version}" for version in coordinator.knowledge.engines.versions}
                ),
            }
        )

    @router.get(
        "/",
        summary="What there is: for browsers the page, for everybody else the routes",
        responses={**_INDEX, **openapi.problems()},
    )
    async def get_index(request: Request) -> Response:
        if page.is_wanted(request.headers):
            return page.answer(page.INDEX, request.headers)
        return _answer(
            {
                "name": "gc-sidecar",
                "version": __version__,
                "routes": [
                    *(f"{action.method} {action.path}" for action in ACTIONS),
                    *(f"POST {path}" for path in (OPENING, CLOSING)),
                    *(f"GET {path}" for path in READS),
                ],
                "openapi": "/openapi.json",
            },
            headers={"Vary": "Accept"},
        )

    @router.get(
        "/page/{name}",
        summary="A file of the page",
        response_class=Response,
        responses={
            200: {"content": {kind: {"schema": {"type": "string"}} for kind in page.MEDIA_TYPES}},
            304: {"description": "It is the one that the caller has (If-None-Match)"},
            **openapi.problems(*openapi.OF_IDS),
        },
    )
    async def get_page_file(
        request: Request, name: Annotated[str, Path(json_schema_extra={"enum": page.file_names()})]
    ) -> Response:
        return page.answer("" if name == page.INDEX else name, request.headers)

    _add_events(router, live)
    _add_pauses(router, coordinator)
    _add_windows(router, windows)
    router.include_router(open_router(coordinator, windows, tally))
    return router


def open_router(coordinator: Coordinator, windows: Windows, tally: Tally) -> APIRouter:
    """The routes for kubelet and Prometheus."""
    router = APIRouter(redirect_slashes=False)

    @router.get(
        "/healthz",
        summary="Whether the sidecar itself lives",
        responses={**openapi.answer(answers.Health), **openapi.problems()},
    )
    async def get_health() -> Response:
        return _answer({"status": "ok"})

    @router.get(
        "/readyz",
        summary="Whether the engine can be seen and reached, and why not",
        responses={**openapi.answer(answers.Readiness), **openapi.problems("not_ready")},
    )
    async def get_readiness() -> Response:
        return await _readiness(coordinator)

    @router.get(
        "/metrics",
        summary="Metrics for Prometheus",
        response_class=Response,
        responses={
            200: {
                "content": {
                    **openapi.TEXT,
                    "application/openmetrics-text": {"schema": {"type": "string"}},
                }
            },
            **openapi.problems(),
        },
    )
    async def get_metrics(request: Request) -> Response:
        await coordinator.watch.look()
        accept = request.headers.get("accept")
        body, content_type = render(coordinator.knowledge, windows.open_count, tally, accept)
        return Response(body, headers={"Content-Type": content_type})

    return router


def _add_events(router: APIRouter, live: Live) -> None:
    @router.get(
        "/gc/events",
        summary="Everything that happens, as server-sent events; first of all the last hour",
        response_class=Response,
        openapi_extra={
            "parameters": [
                *openapi.query_parameters(requests.WatchFields, has_format=False),
                {
                    "name": "Last-Event-ID",
                    "in": "header",
                    "required": False,
                    "schema": {"type": "string"},
                    "description": "of an earlier stream: nothing is told again that was told up to there",
                },
            ]
        },
        responses={
            200: {"content": {EVENT_STREAM: {"schema": EVENT_SCHEMA}}},
            **openapi.problems("too_many_viewers", "sidecar_stopping", *openapi.OF_PARAMETERS),
        },
    )
    async def get_events(request: Request) -> Response:
        fields = requests.read_filter(request, requests.WatchFields)
        last_event_id = request.headers.get("last-event-id", "")
        return await live.watch(last_event_id, fields.for_s, request.state.may_stay)


def _add_pauses(router: APIRouter, coordinator: Coordinator) -> None:
    @router.get(
        "/gc/pauses",
        summary="Recent pauses, newest first",
        openapi_extra={"parameters": openapi.query_parameters(requests.PauseFilter)},
        responses={
            **openapi.answer_or_table(answers.Pauses),
            **openapi.problems(*openapi.OF_PARAMETERS),
        },
    )
    async def get_pauses(request: Request) -> Response:
        style = requests.read_format(request, others=True)
        wanted = requests.read_filter(request, requests.PauseFilter)
        await coordinator.watch.look()
        view = pauses_view(coordinator.knowledge.sight.log, wanted)
        return _answer(view, show_pauses(dict(view)) if style == "table" else None)


def _add_windows(router: APIRouter, windows: Windows) -> None:
    @router.post(
        OPENING,
        status_code=201,
        summary="Open a measured window",
        openapi_extra=openapi.described_fields(requests.WindowFields),
        responses={
            **openapi.answer_or_table(
                answers.WindowAnswer, description="It was open already, under this id"
            ),
            **openapi.answer_or_table(answers.WindowAnswer, 201, headers=openapi.LOCATION),
            **openapi.problems("window_id_reused", "too_many_windows", *openapi.OF_FIELDS),
        },
    )
    async def post_window(request: Request) -> Response:
        style = requests.read_format(request, others=True)
        fields = await requests.read_fields(request, requests.WindowFields)
        window_id = fields.window_id or new_id("window")
        window, is_new = await windows.open(
            window_id, fields.name, fields.limits, fields.abandon_after_s
        )
        return await answer_window(window, style, 201 if is_new else 200)

    @router.post(
        CLOSING,
        summary="Close a window and judge it",
        openapi_extra=openapi.described_fields(requests.ClosingFields),
        responses={
            **openapi.answer_or_table(answers.WindowAnswer),
            **openapi.problems("window_not_found", *openapi.OF_IDS, *openapi.OF_FIELDS),
        },
    )
    async def close_window(request: Request, window_id: str) -> Response:
        style = requests.read_format(request, others=True)
        await requests.read_fields(request, requests.ClosingFields)
        return await answer_window(await windows.close(window_id), style)

    @router.get(
        "/gc/windows/{window_id}",
        summary="A window, judged as if it were closed now",
        openapi_extra=openapi.READS_FORMAT,
        responses={
            **openapi.answer_or_table(answers.WindowAnswer),
            **openapi.problems("window_not_found", *openapi.OF_IDS, *openapi.OF_PARAMETERS),
        },
    )
    async def get_window(request: Request, window_id: str) -> Response:
        style = requests.read_format(request)
        return await answer_window(windows.get(window_id), style)

    @router.get(
        "/gc/windows",
        summary="All windows, newest first",
        openapi_extra=openapi.READS_FORMAT,
        responses={
            **openapi.answer_or_table(answers.Windows),
            **openapi.problems(*openapi.OF_PARAMETERS),
        },
    )
    async def get_windows(request: Request) -> Response:
        style = requests.read_format(request)
        view = {"windows": [window_line(window) for window in windows.all()]}
        return _answer(view, show_windows(view) if style == "table" else None)

    async def answer_window(window: Window, style: str, status: int = 200) -> Response:
        path = f"/gc/windows/{quote(window.id, safe='')}"
        view = {"window": window_view(window, await windows.judge_now(window))}
        headers = {"Location": path} if status == 201 else {}
        return _answer(view, show_window(view) if style == "table" else None, status, headers)


async def _readiness(coordinator: Coordinator) -> Response:
    obstacles = readiness.obstacles(coordinator, await coordinator.watch.look())
    told = [obstacle_view(each) for each in obstacles]
    first = next((each for each in obstacles if each.blocking), None)
    if first is not None:
        raise Problem("not_ready", first.detail, first.remedy, {"ready": False, "reasons": told})
    return _answer({"ready": True, "reasons": told})


def _add_action(router: APIRouter, coordinator: Coordinator, action: Action) -> None:
    async def act(request: Request) -> Response:
        style = requests.read_format(request, others=True)
        deadline_s = maintain_deadline_s(coordinator.knowledge)
        change = await requests.read_change(request, action.fields, action.kind, deadline_s)
        operation = await coordinator.submit(change)
        view = change_view(operation, _base_url(request))
        return _operation_answer(operation, view, style)

    router.add_api_route(
        action.path,
        act,
        methods=[action.method],
        summary=action.summary,
        name=f"{action.method.lower()}_{action.path.rpartition('/')[2]}",
        responses={
            **openapi.answer_or_table(answers.ChangeAnswer),
            **(_GOES_ON if action.kind == "maintain" else {}),
            **openapi.problems(*openapi.OF_CHANGES, *action.own_problems),
        },
        openapi_extra=openapi.described_fields(action.fields),
    )


_GOES_ON = openapi.answer_or_table(
    answers.ChangeAnswer,
    202,
    description="It goes on: ask at Location",
    headers={**openapi.LOCATION, **openapi.RETRY_AFTER},
)


_INDEX = openapi.answer(answers.Index, headers={"Vary": {"schema": {"type": "string"}}})
_INDEX[200]["content"] |= openapi.HTML


def _operation_answer(
    operation: Operation, view: Mapping[str, Any], style: str, status: int | None = None
) -> Response:
    path = f"/gc/operations/{quote(operation.id, safe='')}"
    if operation.is_running:
        headers = {"Location": path, "Retry-After": RETRY_AFTER_S}
        status = 202 if status is None else status
    else:
        headers = {}
        if operation.problem is not None and status is None:
            problem = operation.problem
            extra = {**problem.extra, "operation": view["operation"]}
            raise Problem(problem.code, problem.detail, problem.remedy, extra, problem.headers)
    table = show_change(dict(view)) if style == "table" else None
    return _answer(view, table, status or 200, headers)


def _answer(
    document: Mapping[str, Any],
    table: str | None = None,
    status: int = 200,
    headers: dict[str, str] | None = None,
) -> Response:
    if table is not None:
        return PlainTextResponse(f"{table}\n", status, headers)
    return Response(to_json(document), status, headers, media_type="application/json")


def show_operations(document: Mapping[str, Any]) -> str:
    """One line for each operation."""
    rows = [
        [
            word(each["id"]),
            word(each["kind"]),
            word(each["state"]),
            word(each["owner"]),
            word(each["requested_at"]),
            seconds(each["duration_s"]),
            f"{each['done']} of {each['asked']}",
        ]
        for each in document["operations"]
    ]
    header = ("ID", "KIND", "STATE", "OWNER", "REQUESTED", "TOOK", "DONE BY")
    return table(header, rows, left=5) if rows else "no operation has been asked for"


def _base_url(request: Request) -> str:
    return f"{request.url.scheme}://{request.headers.get('host', 'localhost')}"


# --- errors that the framework finds ---


async def show_problem(_request: Request, error: Exception) -> Response:
    """A Problem as its answer."""
    assert isinstance(error, Problem)
    return problem_response(error)


async def show_mistake(_request: Request, error: Exception) -> Response:
    """Whatever we did not think of; the traceback is in the log."""
    return problem_response(Problem("internal_error", type(error).__name__))


async def show_http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, with what to do instead."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code != 405:
        detail = f"there is no route {path[:200]!r}"
        return problem_response(Problem("not_found", detail))
    # The router names the methods of one route; this path has two.
    allowed = "POST, GET" if path == OPENING else (error.headers or {}).get("Allow") or "GET"
    method = allowed.partition(",")[0]
    query = request.url.query
    for action in ACTIONS:
        needed = action.example.partition("=")[0]
        if (action.method, action.path) == (method, path) and needed not in request.query_params:
            query = "&".join(filter(None, (query, action.example)))
    query = f"?{query}" if query else ""
    flag = "" if method == "GET" else f"-X {method} "
    line = f"curl {flag}{shlex.quote(_base_url(request) + path + query)}"
    return problem_response(
        Problem(
            "method_not_allowed",
            f"{path} takes {allowed}, not {request.method}",
            remedy=line,
            headers={"Allow": allowed},
        )
    )
