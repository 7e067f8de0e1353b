"""What people may send, and what they are told when it is wrong. Nothing wrong changes anything."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from gc_sidecar.server.requests import PolicyFields
from gc_sidecar_agent.command import DEFAULT_BUDGET_MS, Command, parse_command
from gc_sidecar_agent.commands.status import show as show_status
from gc_sidecar_agent.gate import POLICIES
from tests.unit.server.conftest import Sidecar, StartSidecar
from tests.unit.server.stand_in import StandInEngine

pytestmark = pytest.mark.anyio

StartEngine = Callable[..., StandInEngine]
JSON = {"Content-Type": "application/json"}
ACTIONS = ("/gc/freeze", "/gc/maintain", "/gc/restore", "/gc/lease")


@pytest.fixture
async def seen(start_engine: StartEngine, start_sidecar: StartSidecar) -> Sidecar:
    sidecar = await start_sidecar(start_engine(workers=1))
    await sidecar.until_seen("plugin", 3)
    return sidecar


def assert_problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.text.endswith("}\n")
    problem = answer.json()
    assert problem["code"] == code, problem
    assert problem["status"] == status
    assert problem["title"]
    assert problem["detail"]
    assert problem["type"] == f"urn:gc-sidecar:problem:{code}"
    return dict(problem)


BAD_FREEZES = [
    ('{"interval_s": NaN}', 422, "invalid_field"),
    ('{"interval_s": Infinity}', 422, "invalid_field"),
    ('{"lease_s": -Infinity}', 422, "invalid_field"),
    ('{"max_rss_growth_bytes": NaN}', 422, "invalid_field"),
    ('{"owner": NaN}', 422, "invalid_field"),
    ('{"force": NaN}', 422, "invalid_field"),
    ("NaN", 422, "invalid_field"),
    ('{"interval_s": 1e999}', 422, "invalid_field"),
    ('{"interval_s": -1}', 422, "invalid_field"),
    ('{"interval_s": 0.5}', 422, "invalid_field"),
    ('{"interval_s": "60"}', 422, "invalid_field"),
    ('{"interval_s": true}', 422, "invalid_field"),
    ('{"interval_s": null}', 422, "invalid_field"),
    ('{"interval_s": [60]}', 422, "invalid_field"),
    ('{"interval_s": 1e300}', 422, "invalid_field"),
    (f'{{"interval_s": 1{"0" * 400}}}', 422, "invalid_field"),
    (f'{{"interval_s": 1{"0" * 5000}}}', 400, "bad_json"),
    ('{"lease_s": 0}', 422, "invalid_field"),
    ('{"lease_s": 1e12}', 422, "invalid_field"),
    ('{"deadline_s": 0}', 422, "invalid_field"),
    ('{"deadline_s": 1e9}', 422, "invalid_field"),
    ('{"max_rss_growth_bytes": 1.5}', 422, "invalid_field"),
    ('{"max_rss_growth_bytes": -1}', 422, "invalid_field"),
    ('{"max_rss_growth_bytes": 99999999999999999999}', 422, "invalid_field"),
    ('{"collect_first": 1}', 422, "invalid_field"),
    ('{"collect_first": "false"}', 422, "invalid_field"),
    ('{"force": "yes"}', 422, "invalid_field"),
    ('{"owner": ""}', 422, "invalid_field"),
    ('{"owner": 5}', 422, "invalid_field"),
    ('{"owner": "a\\nb"}', 422, "invalid_field"),
    (json.dumps({"owner": "x" * 129}), 422, "invalid_field"),
    ('{"operation_id": "a b"}', 422, "invalid_field"),
    ('{"operation_id": "a\\n"}', 422, "invalid_field"),
    (json.dumps({"operation_id": "x" * 65}), 422, "invalid_field"),
    ('{"mode": "freeze"}', 422, "unknown_field"),
    ('{"intervall_s": 60}', 422, "unknown_field"),
    ('{"owner": "a", "owner": "b"}', 400, "bad_json"),
    ("[]", 422, "invalid_field"),
    ("5", 422, "invalid_field"),
    ("null", 422, "invalid_field"),
    ('"freeze"', 422, "invalid_field"),
    ("{", 400, "bad_json"),
    ("{'owner': 'a'}", 400, "bad_json"),
    ("[" * 60_000, 400, "bad_json"),
    ("\xff\xfe", 400, "bad_json"),
]


@pytest.mark.parametrize(("body", "status", "code"), BAD_FREEZES, ids=lambda value: str(value)[:40])
async def test_a_bad_body_is_named_and_changes_nothing(
    start_sidecar: StartSidecar, body: str, status: int, code: str
) -> None:
    sidecar = await start_sidecar()
    data = body.encode("latin-1")
    problem = assert_problem(
        await sidecar.client.post("/gc/freeze", content=data, headers=JSON), status, code
    )
    if code == "invalid_field" and body.startswith("{"):
        field = next(iter(json.loads(body)))
        assert problem["errors"][0]["field"] == field
        assert problem["detail"].startswith(f"{field}: ")
    after = await sidecar.status()
    assert after["policy"]["generation"] == 0
    assert sidecar.services.tally.operations["freeze", "failed"] == 0


BAD_QUERIES = [
    ("interval_s=nan", "invalid_field"),
    ("interval_s=inf", "invalid_field"),
    ("interval_s=-1", "invalid_field"),
    ("interval_s=", "invalid_field"),
    ("interval_s=sixty", "invalid_field"),
    ("max_rss_growth_bytes=1.5", "invalid_field"),
    ("collect_first=maybe", "invalid_field"),
    ("owner=", "invalid_field"),
    ("owner=a&owner=b", "invalid_field"),
    ("operation_id=a%20b", "invalid_field"),
    ("interval=60", "unknown_field"),
    ("format=xml", "invalid_field"),
]


@pytest.mark.parametrize(("query", "code"), BAD_QUERIES)
async def test_a_bad_query_is_named(start_sidecar: StartSidecar, query: str, code: str) -> None:
    sidecar = await start_sidecar()
    assert_problem(await sidecar.client.post(f"/gc/freeze?{query}"), 422, code)


async def test_a_whole_number_may_be_written_in_any_way_that_json_has(seen: Sidecar) -> None:
    for number in ("1000000000", "1e9", "1000000000.0", "10.0E+8"):
        body = f'{{"max_rss_growth_bytes": {number}}}'.encode()
        answer = await seen.client.post("/gc/freeze", content=body, headers=JSON)
        assert answer.status_code == 200, answer.text
        assert (await seen.status())["policy"]["max_rss_growth_bytes"] == 1_000_000_000


async def test_a_body_of_blanks_is_no_json(start_sidecar: StartSidecar) -> None:
    sidecar = await start_sidecar()
    answer = await sidecar.client.post("/gc/freeze", content=b" \n", headers=JSON)
    assert_problem(answer, 400, "bad_json")


async def test_an_unknown_field_is_answered_with_the_known_ones(
    start_sidecar: StartSidecar,
) -> None:
    sidecar = await start_sidecar()
    problem = assert_problem(
        await sidecar.client.post("/gc/freeze", json={"intervall_s": 60}), 422, "unknown_field"
    )
    assert "'intervall_s'" in problem["detail"]
    assert "interval_s" in problem["detail"].split("takes:")[1]
    assert problem["errors"][0]["field"] == "intervall_s"


@pytest.mark.parametrize("path", ACTIONS)
async def test_every_action_refuses_fields_of_others(
    start_sidecar: StartSidecar, path: str
) -> None:
    sidecar = await start_sidecar()
    answer = await sidecar.client.post(path, json={"pause_budget_ms": 5})
    assert_problem(answer, 422, "unknown_field")


async def test_fields_may_come_as_json_or_as_query_but_not_as_both(seen: Sidecar) -> None:
    problem = assert_problem(
        await seen.client.post("/gc/freeze?interval_s=5", json={"owner": "a"}), 422, "fields_twice"
    )
    assert "remedy" in problem
    answer = await seen.client.post("/gc/freeze?interval_s=5&owner=me&collect_first=false")
    assert answer.status_code == 200
    policy = (await seen.status())["policy"]
    assert (policy["interval_s"], policy["owner"]) == (5.0, "me")
    answer = await seen.client.post("/gc/freeze", json={"interval_s": 7, "owner": "me"})
    assert answer.status_code == 200
    assert (await seen.status())["policy"]["interval_s"] == 7.0


async def test_the_format_may_be_asked_for_beside_a_body(seen: Sidecar) -> None:
    answer = await seen.client.post("/gc/freeze?format=table", json={"owner": "me"})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text.startswith("freeze applied by 3 of 3 processes in ")
    assert "worker" in answer.text
    table = (await seen.client.get("/gc?format=table")).text
    status = (await seen.client.get("/gc")).json()
    # The date on which a lease ends is worked out anew each time, to the millisecond.
    of_table, of_status = (
        re.sub(r"(ends at .*)\.\d+Z", r"\1", text) for text in (table, show_status(status))
    )
    assert of_table.splitlines()[:4] == of_status.splitlines()[:4], "as `gc-sidecar status`"
    assert "freeze, policy generation 1, owner me" in table
    assert table.endswith("\n")


async def test_what_a_process_says_cannot_command_a_terminal(
    start_engine: StartEngine, start_sidecar: StartSidecar
) -> None:
    error = {"page_error": "a\x1b[2Jb\nc"}
    sidecar = await start_sidecar(start_engine(processes={"worker-0-1": error}))
    await sidecar.until(lambda s: [r["code"] for r in s["reasons"]] == ["page_error"])
    table = (await sidecar.client.get("/gc?format=table")).text
    assert "a?[2Jb?c" in table


def test_the_modes_that_may_be_asked_for_are_those_of_the_agent() -> None:
    modes = PolicyFields.model_json_schema()["properties"]["mode"]["enum"]
    assert tuple(modes) == POLICIES


@pytest.mark.parametrize("budget", [1.9, 2, 60_000, 60_001])
def test_a_pause_budget_is_taken_where_the_agent_takes_it(budget: float) -> None:
    command = Command("budget", "id", 1, pause_budget_ms=budget).to_dict()
    accepted = []
    for check in (
        lambda: PolicyFields(mode="budget", pause_budget_ms=budget),
        lambda: parse_command(command),
    ):
        try:
            check()
            accepted.append(True)
        except ValueError:
            accepted.append(False)
    assert accepted[0] == accepted[1]


def test_a_budget_has_the_pause_of_the_command_and_of_the_environment_where_none_is_given() -> None:
    def budget_ms(kind: str, **fields: str) -> float | None:
        # As in a query: everything is text.
        asked = PolicyFields.model_validate_strings({"mode": kind, **fields})
        return asked.to_change(kind, 30.0).pause_budget_ms

    assert budget_ms("budget") == DEFAULT_BUDGET_MS
    assert budget_ms("budget", pause_budget_ms="8") == 8
    assert budget_ms("freeze") is None


async def test_a_body_that_starts_with_a_brace_is_json_under_the_default_type_of_curl(
    seen: Sidecar,
) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = await seen.client.post("/gc/freeze", content=b'{"owner": "me"}', headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"Content-Type": "application/x-www-form-urlencoded"}, b"owner=me"),
        ({"Content-Type": "text/plain"}, b'{"owner": "me"}'),
        ({"Content-Type": "multipart/form-data; boundary=x"}, b'{"owner": "me"}'),
        (
            {
                "Content-Type": "application/x-www-form-urlencoded",
                "Origin": "http://localhost:9470",
            },
            b'{"owner": "me"}',
        ),
        (
            {
                "Content-Type": "application/x-www-form-urlencoded",
                "Sec-Fetch-Site": "same-origin",
            },
            b'{"owner": "me"}',
        ),
    ],
)
async def test_other_types_and_forms_of_browsers_are_refused(
    start_sidecar: StartSidecar, headers: dict[str, str], body: bytes
) -> None:
    sidecar = await start_sidecar()
    answer = await sidecar.client.post("/gc/freeze", content=body, headers=headers)
    assert_problem(answer, 415, "unsupported_media_type")


async def test_a_huge_body_is_refused_before_it_is_read(start_sidecar: StartSidecar) -> None:
    sidecar = await start_sidecar()
    declared = await sidecar.client.post("/gc/freeze", content=b" " * 65537, headers=JSON)
    assert_problem(declared, 413, "body_too_large")

    async def chunks() -> Any:
        for _ in range(100):
            yield b"x" * 1024

    chunked = await sidecar.client.post("/gc/freeze", content=chunks(), headers=JSON)
    assert_problem(chunked, 413, "body_too_large")


@pytest.mark.parametrize("path", ACTIONS)
async def test_get_on_an_action_tells_the_line_to_type(
    start_sidecar: StartSidecar, path: str
) -> None:
    sidecar = await start_sidecar()
    answer = await sidecar.client.get(f"{path}?owner=me&force=true")
    problem = assert_problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"
    assert problem["remedy"] == f"curl -X POST 'http://localhost:9470{path}?owner=me&force=true'"


async def test_the_wrong_method_elsewhere_tells_the_right_one(start_sidecar: StartSidecar) -> None:
    sidecar = await start_sidecar()
    policy = await sidecar.client.post("/gc/policy")
    assert assert_problem(policy, 405, "method_not_allowed")["remedy"] == (
        "curl -X PUT 'http://localhost:9470/gc/policy?mode=off'"
    )
    for query, told in (("owner=me", "owner=me&mode=off"), ("mode=freeze", "mode=freeze")):
        policy = await sidecar.client.get(f"/gc/policy?{query}")
        problem = assert_problem(policy, 405, "method_not_allowed")
        assert problem["remedy"] == f"curl -X PUT 'http://localhost:9470/gc/policy?{told}'"
    windows = await sidecar.client.put("/gc/windows")
    assert_problem(windows, 405, "method_not_allowed")
    assert windows.headers["allow"] == "POST, GET", "both"
    status = await sidecar.client.post("/gc")
    assert assert_problem(status, 405, "method_not_allowed")["remedy"] == (
        "curl http://localhost:9470/gc"
    )
    assert status.headers["allow"] == "GET"


async def test_unknown_routes_and_operations_are_404(start_sidecar: StartSidecar) -> None:
    sidecar = await start_sidecar()
    for path in ("/gc/", "/gc/freez", "/docs", "/redoc", "/v1/models"):
        assert_problem(await sidecar.client.get(path), 404, "not_found")
    assert_problem(await sidecar.client.get("/gc/operations/nobody"), 404, "operation_not_found")


async def test_reading_routes_refuse_parameters_that_they_do_not_know(
    start_sidecar: StartSidecar,
) -> None:
    sidecar = await start_sidecar()
    assert_problem(await sidecar.client.get("/gc?formt=table"), 422, "unknown_field")
    assert_problem(await sidecar.client.get("/gc?format=csv"), 422, "invalid_field")


BAD_FILTERS = [
    ("since=yesterday", "invalid_field"),
    ("since=", "invalid_field"),
    ("since=2026-12-01T09:00:00", "invalid_field"),
    ("since=2026-12-01", "invalid_field"),
    ("since=2026-13-01T09:00:00Z", "invalid_field"),
    ("since=1e400", "invalid_field"),
    ("since=nan", "invalid_field"),
    ("min_duration_s=-1", "invalid_field"),
    ("min_duration_s=nan", "invalid_field"),
    ("min_duration_s=inf", "invalid_field"),
    ("min_duration_s=1e999", "invalid_field"),
    ("min_duration_s=long", "invalid_field"),
    ("role=driver", "invalid_field"),
    ("role=", "invalid_field"),
    ("dp_rank=-1", "invalid_field"),
    ("rank=1.5", "invalid_field"),
    (f"rank=1{'0' * 5000}", "invalid_field"),
    ("gc_generation=3", "invalid_field"),
    ("gc_generation=gen2", "invalid_field"),
    ("trigger=running", "invalid_field"),
    ("limit=0", "invalid_field"),
    ("limit=10001", "invalid_field"),
    ("limit=5&limit=6", "invalid_field"),
    ("format=csv", "invalid_field"),
    ("generation=2", "unknown_field"),
    ("role=worker&pid=5", "unknown_field"),
]


@pytest.mark.parametrize(("query", "code"), BAD_FILTERS, ids=lambda value: str(value)[:40])
async def test_a_filter_that_makes_no_sense_is_named(
    start_sidecar: StartSidecar, query: str, code: str
) -> None:
    sidecar = await start_sidecar()
    problem = assert_problem(await sidecar.client.get(f"/gc/pauses?{query}"), 422, code)
    name = query.partition("&")[2].partition("=")[0] or query.partition("=")[0]
    assert name in problem["detail"]


async def test_a_time_without_a_zone_is_told_what_it_needs(start_sidecar: StartSidecar) -> None:
    sidecar = await start_sidecar()
    answer = await sidecar.client.get("/gc/pauses?since=2026-12-01T09:00:00")
    problem = assert_problem(answer, 422, "invalid_field")
    assert problem["detail"] == "since: must be a time with its zone: 2026-12-01T09:00:00Z"


async def test_reading_routes_take_no_other_method(start_sidecar: StartSidecar) -> None:
    sidecar = await start_sidecar()
    problem = assert_problem(
        await sidecar.client.post("/gc/pauses?role=worker"), 405, "method_not_allowed"
    )
    assert problem["remedy"] == "curl 'http://localhost:9470/gc/pauses?role=worker'"
    problem = assert_problem(
        await sidecar.client.get("/gc/windows/w/close"), 405, "method_not_allowed"
    )
    assert problem["remedy"] == "curl -X POST http://localhost:9470/gc/windows/w/close"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "invalid_field"),
        ({"mode": "froze"}, "invalid_field"),
        ({"mode": "off", "pause_budget_ms": 5}, "invalid_field"),
        ({"mode": "budget", "pause_budget_ms": 1}, "invalid_field"),
        ({"mode": "freeze", "pause_budget_ms": 5}, "invalid_field"),
        ({"mode": "off", "when": "idle"}, "unknown_field"),
    ],
)
async def test_a_policy_that_makes_no_sense_is_refused(
    start_sidecar: StartSidecar, body: dict[str, Any], code: str
) -> None:
    sidecar = await start_sidecar()
    assert_problem(await sidecar.client.put("/gc/policy", json=body), 422, code)


async def test_a_policy_may_be_put_declaratively(seen: Sidecar) -> None:
    answer = await seen.client.put("/gc/policy", json={"mode": "freeze", "interval_s": 9})
    assert answer.json()["operation"]["kind"] == "freeze"
    assert (await seen.status())["policy"]["interval_s"] == 9.0
    answer = await seen.client.put("/gc/policy?mode=off")
    assert answer.json()["operation"]["kind"] == "restore"
    assert (await seen.status())["policy"]["mode"] == "off"


async def test_the_index_version_and_openapi_are_there(seen: Sidecar) -> None:
    index = (await seen.client.get("/")).json()
    assert "POST /gc/freeze" in index["routes"]
    version = (await seen.client.get("/version")).json()
    assert version["agents"] == ["0.1.0"]
    assert version["engines"] == ["vllm 0.32.0"]
    openapi = (await seen.client.get("/openapi.json")).json()
    freeze = openapi["paths"]["/gc/freeze"]["post"]
    schema = freeze["requestBody"]["content"]["application/json"]["schema"]
    assert schema["additionalProperties"] is False
    assert "interval_s" in {parameter["name"] for parameter in freeze["parameters"]}
    window = openapi["paths"]["/gc/windows"]["post"]
    schema = window["requestBody"]["content"]["application/json"]["schema"]
    assert "max_pause_ms" in schema["properties"]
    pauses = openapi["paths"]["/gc/pauses"]["get"]
    assert {"since", "min_duration_s", "role", "trigger", "format"} <= {
        parameter["name"] for parameter in pauses["parameters"]
    }
    assert {"GET /gc/pauses", "POST /gc/windows", "POST /gc/windows/{window_id}/close"} <= set(
        index["routes"]
    )


async def test_a_mistake_of_ours_is_a_problem_too(
    start_sidecar: StartSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = await start_sidecar()

    def fail(*_: object) -> None:
        raise RuntimeError("made to fail")

    monkeypatch.setattr("gc_sidecar.server.routes.status_view", fail)
    sidecar.client._transport.raise_app_exceptions = False  # type: ignore[attr-defined]
    assert_problem(await sidecar.client.get("/gc"), 500, "internal_error")
