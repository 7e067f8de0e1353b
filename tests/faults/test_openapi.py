"""The OpenAPI document against a sidecar that runs: what it allows is taken, what it forbids is refused, and every
answer has a status, a content type and a shape that it names.

GC_SIDECAR_OPENAPI_EXAMPLES=1000 asks each route so often, with other requests every time; without it CI asks a
fixed few.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.leaving_out import leave_out

if sys.version_info < (3, 11):
    leave_out("schemathesis needs Python 3.11 or later")

import hypothesis
import schemathesis
from hypothesis import strategies as st
from schemathesis import config, openapi
from schemathesis.checks import not_a_server_error
from schemathesis.core import NOT_SET
from schemathesis.specs.openapi import checks

from gc_sidecar.server.app import make_control_app
from gc_sidecar.server.openapi import EVERYWHERE
from gc_sidecar.server.problems import KINDS
from gc_sidecar_agent.command import OPERATION_ID
from tests.sidecar_process import SidecarProcess, wait_for
from tests.unit.server.stand_in import StandInEngine
from tests.unit.server.test_access import app_of

# One stand-in engine and one sidecar for all of them.
pytestmark = pytest.mark.xdist_group("openapi")

EXAMPLES = int(os.environ.get("GC_SIDECAR_OPENAPI_EXAMPLES", "0"))
IS_TRUE = (
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
)
# Of a request: the machine may have much else to do.
PATIENCE_S = 120
CHANGES = ("/gc/freeze", "/gc/policy", "/gc/maintain", "/gc/restore", "/gc/lease")
RESTORE = ("/gc/restore", "operation")
POSITIVE, NEGATIVE = schemathesis.GenerationMode


def document() -> dict[str, Any]:
    """The document as the app makes it, before any sidecar runs."""
    return dict(app_of(make_control_app).openapi())


ROUTES = [
    (method.upper(), path, bool(operation.get("parameters")))
    for path, operations in document()["paths"].items()
    for method, operation in operations.items()
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandInEngine]:
    run_dir = tmp_path_factory.mktemp("run")
    engine = StandInEngine(
        run_dir=str(run_dir), token_file=str(run_dir / "endpoint.token"), workers=1
    )
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def sidecar(
    engine: StandInEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SidecarProcess]:
    base = tmp_path_factory.getbasetemp()
    run_dir = next(base.glob("run*"))
    with SidecarProcess(
        engine_urls=[engine.url], run_dir=run_dir, log_path=base / "sidecar.log"
    ) as sidecar:
        wait_for(
            "the engine is seen and reached", lambda: sidecar.status()["transport"] == "plugin"
        )
        sidecar.wait_for_coverage(3)
        yield sidecar
        assert '"internal_error"' not in sidecar.log_text()


@pytest.fixture(scope="module")
def schema(sidecar: SidecarProcess) -> Any:
    # Latin-1, for which the pattern of an owner is exact.
    generation = config.GenerationConfig(codec="latin-1", allow_x00=False)
    expected = config.ChecksConfig(
        # 504: an operation may be asked for with a deadline that nobody can keep.
        not_a_server_error=config.NotAServerErrorConfig(expected_statuses=["2xx", "4xx", "504"]),
        positive_data_acceptance=config.PositiveDataAcceptanceConfig(
            expected_statuses=["2xx", "404", "409", "504"]
        ),
    )
    project = config.ProjectConfig(generation=generation, checks=expected)
    return openapi.from_url(
        f"{sidecar.url}/openapi.json",
        config=config.SchemathesisConfig(projects=config.ProjectsConfig(default=project)),
    )


def settings(examples: int) -> Any:
    return hypothesis.settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate, hypothesis.Phase.shrink),
    )


@pytest.mark.parametrize(("method", "path"), [route[:2] for route in ROUTES])
def test_what_the_document_allows_is_taken_and_answered_as_it_says(
    schema: Any, sidecar: SidecarProcess, method: str, path: str
) -> None:
    operation = schema[path][method]

    @settings(8)
    @hypothesis.given(
        case=operation.as_strategy(generation_mode=POSITIVE),
        in_the_query=st.booleans(),
        is_known=st.booleans(),
    )
    def ask(case: Any, in_the_query: bool, is_known: bool) -> None:
        # Both at once are refused, which the document can only say in words; and a query needs what a body needs.
        if in_the_query:
            case.body = NOT_SET
        if case.body is not NOT_SET:
            case.query = {}
        elif path == "/gc/policy":
            case.query = {**case.query, "mode": "off"}
            case.query.pop("pause_budget_ms", None)
        if path == "/gc/events":
            case.query = {**case.query, "for_s": 0}  # it has no end that a test can wait for
        if is_known and case.path_parameters and path != "/page/{name}":
            name = next(iter(case.path_parameters))
            path_of, told = ("/gc/windows", "window") if name == "window_id" else RESTORE
            code, answer = sidecar.post(path_of, {} if told == "window" else {"force": True})
            assert code in (200, 201), answer
            case.path_parameters[name] = answer[told]["id"]
        make_new(case)
        response = case.call(timeout=PATIENCE_S)
        case.validate_response(
            response,
            checks=[*IS_TRUE, not_a_server_error, checks.positive_data_acceptance],
        )
        if is_known and case.path_parameters:
            assert response.status_code == 200
        tidy_up(sidecar)

    ask()


@pytest.mark.parametrize(("method", "path"), [route[:2] for route in ROUTES if route[2]])
def test_what_the_document_forbids_is_refused_and_answered_as_it_says(
    schema: Any, sidecar: SidecarProcess, method: str, path: str
) -> None:
    operation = schema[path][method]

    @settings(12)
    @hypothesis.given(case=operation.as_strategy(generation_mode=NEGATIVE))
    def ask(case: Any) -> None:
        make_new(case)
        case.call_and_validate(
            checks=[*IS_TRUE, not_a_server_error, checks.negative_data_rejection],
            timeout=PATIENCE_S,
        )
        tidy_up(sidecar)

    ask()


NUMBERS = itertools.count()


def make_new(case: Any) -> None:
    """An operation or a window that may be asked for is another one than all before: those are not done again."""
    for fields in (case.query, case.body):
        for name in ("operation_id", "window_id"):
            given = fields.get(name) if isinstance(fields, dict) else None
            if isinstance(given, str) and OPERATION_ID.fullmatch(given):
                fields[name] = f"{given[:50]}-{next(NUMBERS)}"


def tidy_up(sidecar: SidecarProcess) -> None:
    """No policy is left to be somebody else's, and no window open: there may be 16 of them."""
    if sidecar.status()["policy"]["mode"] != "off":
        assert sidecar.post("/gc/restore", {"force": True})[0] == 200
    for window in sidecar.get("/gc/windows")[1]["windows"]:
        if window["state"] == "open":
            assert sidecar.post(f"/gc/windows/{window['id']}/close")[0] == 200


FAULTS: Mapping[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "it refuses": ({"fail": {"code": "collector_busy", "kinds": ["freeze", "maintain"]}}, (502,)),
    "it says nothing": ({"deaf": True}, (504,)),
    # On a slow machine the others may not be there before the deadline either.
    "it is gone": ({"dead": True}, (502, 504)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("path", ["/gc/freeze", "/gc/maintain"])
def test_failures_of_the_engine_are_answered_as_the_document_says(
    schema: Any, sidecar: SidecarProcess, engine: StandInEngine, fault: str, path: str
) -> None:
    behaviour, statuses = FAULTS[fault]
    engine.set_process("worker-0-0", **behaviour)
    try:
        case = schema[path]["POST"].Case(body={"deadline_s": 1}, media_type="application/json")
        response = case.call()
        case.validate_response(response, checks=list(IS_TRUE))
        assert response.status_code in statuses, response.text
        ready = schema["/readyz"]["GET"].Case()
        ready.call_and_validate(checks=list(IS_TRUE))
    finally:
        engine.set_process("worker-0-0", **dict.fromkeys(behaviour))
        if fault == "it is gone":
            engine.restart("worker-0-0")
        sidecar.post("/gc/restore", {"force": True})
        sidecar.wait_for_coverage(3)


def test_a_sidecar_without_an_engine_answers_as_the_document_says(tmp_path: Path) -> None:
    with SidecarProcess(run_dir=tmp_path, log_path=tmp_path / "sidecar.log") as sidecar:
        schema = openapi.from_url(f"{sidecar.url}/openapi.json")
        for path in CHANGES:
            method = "PUT" if path == "/gc/policy" else "POST"
            query = {"mode": "freeze"} if path == "/gc/policy" else {}
            case = schema[path][method].Case(query=query)
            response = case.call()
            case.validate_response(response, checks=list(IS_TRUE))
            assert response.status_code == (409 if path == "/gc/lease" else 503), response.text
        ready = schema["/readyz"]["GET"].Case()
        assert ready.call_and_validate(checks=list(IS_TRUE)).status_code == 503


def test_every_problem_is_in_the_document_under_its_status() -> None:
    told = {
        (int(status), code)
        for operations in document()["paths"].values()
        for operation in operations.values()
        for status, response in operation["responses"].items()
        if int(status) >= 400
        for code in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", response["description"])
    }
    # A document of routes has no place for what is no request, or none for a route.
    unrouted = {"bad_http", "method_not_allowed"}
    wanted = {(kind.status, code) for code, kind in KINDS.items() if code not in unrouted}
    assert told == wanted
    assert set(EVERYWHERE) <= set(KINDS)
