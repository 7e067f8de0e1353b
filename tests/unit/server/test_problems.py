"""Errors: every code that clients may rely on is documented, and says best what went wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gc_sidecar.server.attempt import Attempt, problem_of
from gc_sidecar.server.engine_http import EngineFault
from gc_sidecar.server.engines import CallResult
from gc_sidecar.server.obstacle import Obstacle
from gc_sidecar.server.operations import Line
from gc_sidecar.server.problems import KINDS
from gc_sidecar.server.reports import Key

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "api.md"
NOBODY = Obstacle("no_pages", "no page is there")


def line(rank: int, **fields: object) -> Line:
    values = {"ok": False, "code": "no_answer", "detail": "its page does not show it", **fields}
    return Line(Key("worker", 0, rank), ("worker",), 5, **values)


def test_the_documentation_has_every_code_with_its_status() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d{3}) \|", DOCUMENT.read_text(), re.MULTILINE)
    assert {code: int(status) for code, status in rows} == {
        code: kind.status for code, kind in KINDS.items()
    }


def test_what_a_process_says_itself_comes_first_and_the_others_are_named() -> None:
    lines = (
        line(0, code="collector_busy", detail="in a finalizer", own_code=True),
        line(1),
        line(2, ok=True),
    )
    problem = problem_of(Attempt(lines, None, False, True), NOBODY, True, {})
    assert problem.code == "collector_busy"
    assert problem.detail == (
        "1 of 3 processes did it; worker dp0 rank 0: in a finalizer;"
        " nor did worker dp0 rank 1 (no_answer)"
    )


@pytest.mark.parametrize(
    ("has_run_dir", "lines", "code"),
    [
        (True, (line(0),), "incomplete_coverage"),
        (False, (line(0),), "engine_hung_up"),
        (True, (), "engine_hung_up"),
    ],
)
def test_a_failed_rpc_is_the_answer_only_where_nothing_else_could_have_done_it(
    has_run_dir: bool, lines: tuple[Line, ...], code: str
) -> None:
    result = CallResult(faults=(EngineFault("engine_hung_up", "POST /x: hung up"),))
    problem = problem_of(Attempt(lines, result, False, True), NOBODY, has_run_dir, {})
    assert problem.code == code
    assert "hung up" in problem.detail


def test_with_nobody_there_it_says_why() -> None:
    problem = problem_of(Attempt((), None, False, True), NOBODY, True, {})
    assert problem.code == "engine_not_seen"
    assert problem.detail == "nobody is there to do it: no page is there"


@pytest.mark.parametrize(
    ("fault", "final", "pending", "state"),
    [
        (None, True, False, "failed"),
        (None, False, False, "unknown"),
        (None, True, True, "unknown"),
        ("engine_timeout", True, False, "unknown"),
        ("engine_http_500", True, False, "failed"),
    ],
)
def test_it_failed_only_if_nothing_may_still_happen(
    fault: str | None, final: bool, pending: bool, state: str
) -> None:
    result = CallResult(faults=(EngineFault(fault, "x"),)) if fault else None
    assert Attempt((line(0, final=final),), result, pending, True).failed_state == state
