"""Pages and replies are not trusted: whatever they hold is an error with a reason, or a None."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gc_sidecar.server.desired import Desired
from gc_sidecar.server.reports import ReportError, check_replies, parse_report
from gc_sidecar.server.roster import take_roll
from gc_sidecar.server.sight import Snapshot
from gc_sidecar_agent.command import Outcome


def description(**parts: Any) -> dict[str, Any]:
    return {
        "identity": {"roles": ["worker"], "dp_rank": 0, "rank": 1, "token": "abcd", "pid": 5},
        "topology": {"dp_ranks": [0], "workers": 2, "api_servers": 1},
        "state": {"ready": True, "mode": "off", "generation": 3},
        **parts,
    }


def reply(token: str = "abcd", operation_id: str = "op", **outcome: Any) -> dict[str, Any]:
    described = description()
    described["identity"] = {**described["identity"], "token": token}
    fields = {"ok": True, "pause_s": 0.1, **outcome}
    return {
        "version": 1,
        "operation_id": operation_id,
        "outcome": Outcome("op", "maintain", 3, **fields).to_dict(),
        "report": {"description": described, "numbers": {}, "collecting_since_ns": 0},
    }


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner),
    max_leaves=12,
)


@given(
    part=st.sampled_from(["identity", "topology", "state"]),
    name=st.sampled_from(
        [
            "roles",
            "dp_rank",
            "rank",
            "token",
            "pid",
            "started_at",
            "dp_ranks",
            "workers",
            "api_servers",
            "mode",
            "generation",
            "owner",
            "entered_at",
            "reason",
            "refused",
            "exits",
            "operation",
            "interval_s",
        ]
    ),
    value=JSON_VALUES,
    numbers=JSON_VALUES,
)
def test_any_value_anywhere_is_read_or_refused_and_can_be_shown(
    part: str, name: str, value: Any, numbers: Any
) -> None:
    described = description()
    described[part] = {**described[part], name: value}
    try:
        report = parse_report(described, numbers, value)
    except ReportError:
        return
    roster = take_roll(Snapshot(), [report], Desired(), {}, 5.0)
    from gc_sidecar.server.views import row_view

    for row in roster.rows:
        json.dumps(row_view(row), allow_nan=False)


@given(value=JSON_VALUES)
def test_a_description_may_be_anything(value: Any) -> None:
    for whole in (value, description(identity=value), description(state=value)):
        with contextlib.suppress(ReportError):
            parse_report(whole, {}, 0)


@given(results=st.lists(JSON_VALUES, max_size=5))
def test_results_may_be_anything(results: list[Any]) -> None:
    checked = check_replies(results, "op")
    assert len(checked.malformed) + len(checked.desynced) == len(results)


def test_a_huge_topology_is_refused() -> None:
    huge = {"dp_ranks": list(range(4096)), "workers": 4096, "api_servers": 1}
    with pytest.raises(ReportError, match="too many"):
        parse_report(description(topology=huge), {}, 0)


def test_a_generation_that_leaves_no_room_above_it_is_refused() -> None:
    state = {"mode": "off", "generation": (1 << 53) - 1}
    with pytest.raises(ReportError, match="generation"):
        parse_report(description(state=state), {}, 0)


def test_a_reply_with_another_id_is_out_of_step_and_named_by_rank() -> None:
    checked = check_replies([reply("a"), reply("b", operation_id="before")], "op")
    assert [r.report.identity.token for r in checked.replies if r.report] == ["a"]
    assert checked.desynced == ("worker dp0 rank 1",)


def test_an_outcome_of_another_operation_inside_is_malformed() -> None:
    broken = reply("a")
    broken["outcome"]["operation_id"] = "before"
    assert len(check_replies([broken], "op").malformed) == 1


def test_two_replies_of_one_process_are_one_and_a_failure_is_not_lost() -> None:
    both = check_replies([reply(pause_s=None), reply(pause_s=0.5)], "op")
    assert [r.outcome.pause_s for r in both.replies] == [0.5]
    failed = check_replies([reply(), reply(ok=False, code="freeze_failed")], "op")
    assert [r.outcome.code for r in failed.replies] == ["freeze_failed"]
    failed = check_replies([reply(ok=False, code="freeze_failed"), reply()], "op")
    assert [r.outcome.code for r in failed.replies] == ["freeze_failed"]


def test_a_reply_that_cannot_say_who_it_is_is_kept_as_such() -> None:
    anonymous = {**reply(ok=False, code="no_agent"), "report": None}
    checked = check_replies([anonymous], "op")
    assert checked.replies[0].report is None
    assert checked.replies[0].outcome.code == "no_agent"
