"""A block of a sweep: whose tokens they were, whose pauses are known, and whether its lease lasted."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import pytest

from gc_sidecar.sweep import session as session_module
from gc_sidecar.sweep.driver import DriveError, Driver, Sample
from gc_sidecar.sweep.plan import Point
from gc_sidecar.sweep.session import EnginePauses, Session, _uninterrupted, doubts
from gc_sidecar_agent.client import Answer, Client, ClientError
from tests.sidecar_process import wait_for
from tests.unit.sweep.samples import POINT, sample
from tests.unit.sweep.test_plan import PLAN

POINTS = [(POINT, [sample(0.0), sample(1.0)])]
BEGAN_S = 1_700_000_000.0


class StandInClient(Client):
    """A sidecar that answers as a test says."""

    def __init__(self, answer: Callable[[str, str], dict[str, Any]]) -> None:
        super().__init__("http://localhost:1")
        self._answer = answer
        self.sent: list[tuple[str, Any]] = []

    def request(self, method: str, path: str, fields: Any = None, timeout_s: float = 1.0) -> Answer:
        self.sent.append((path, fields))
        return Answer(200, "", self._answer(method, path))


class StandInDriver(Driver):
    """An engine of which one request is measured at each point."""

    def __init__(self) -> None:
        super().__init__("http://a", "model", None)

    async def drive(self, point: Point, requests: int, warm_up: int) -> list[Sample]:
        return [sample(0.0)]


# --- whose tokens they were ---


@pytest.mark.parametrize("seen", [100, 198])
def test_tokens_that_the_sidecar_has_seen_are_of_its_engine(seen: int) -> None:
    assert doubts(seen, POINTS, "http://b:8000") == []


@pytest.mark.parametrize("seen", [0, 90])
def test_tokens_of_another_engine_than_the_sidecars_are_refused(seen: int) -> None:
    with pytest.raises(DriveError, match="198 tokens came from http://b:8000, but"):
        doubts(seen, POINTS, "http://b:8000")


def test_where_the_sidecar_cannot_tell_it_is_in_doubt() -> None:
    (doubt,) = doubts(None, POINTS, "http://b:8000")
    assert doubt.code == "other_engine"
    assert doubts(None, [(POINT, [sample(0.0, tokens=50)])], "http://b:8000") == []


# --- whose pauses are known ---


def date(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, timezone.utc).isoformat().replace("+00:00", "Z")


def pauses_body(*starts_s: float, complete_since_s: float, matching: int | None = None) -> Any:
    pauses = [
        {
            "started_at": date(start_s), "duration_s": 0.1, "gc_generation": 2, "trigger": "auto",
            "roles": ["worker"], "dp_rank": 0, "rank": 1,
        }
        for start_s in starts_s
    ]  # fmt: skip
    return {
        "pauses": pauses, "matching": matching or len(pauses), "lost": 77,
        "complete_since": date(complete_since_s),
    }  # fmt: skip


def test_pauses_are_read_as_the_block_goes_on_and_each_is_kept_once() -> None:
    bodies = [
        pauses_body(BEGAN_S + 2, BEGAN_S + 1, complete_since_s=BEGAN_S - 100),
        pauses_body(BEGAN_S + 3, BEGAN_S + 2, complete_since_s=BEGAN_S - 50),
    ]
    pauses = EnginePauses(StandInClient(lambda method, path: bodies.pop(0)), BEGAN_S)
    pauses.read()
    pauses.read()
    assert [pause.started_s - BEGAN_S for pause in pauses.found] == [1, 2, 3]
    assert (pauses.left_out, pauses.doubts()) == (0, [])


def test_pauses_that_were_forgotten_or_are_too_many_are_told() -> None:
    body = pauses_body(BEGAN_S + 2, complete_since_s=BEGAN_S + 1, matching=5)
    pauses = EnginePauses(StandInClient(lambda method, path: body), BEGAN_S)
    pauses.read()
    assert pauses.left_out == 4
    (doubt,) = pauses.doubts()
    assert "had forgotten some pauses before 22:13:21Z" in doubt.detail


# --- whether its lease lasted ---


@pytest.mark.parametrize(("failures", "is_lost"), [(1, False), (1_000, True)])
def test_a_lease_is_lost_where_no_renewal_comes_through_in_time(
    failures: int, is_lost: bool
) -> None:
    asked: list[str] = []

    def answer(method: str, path: str) -> dict[str, Any]:
        if path == "/gc/lease":
            asked.append(path)
            if len(asked) <= failures:
                raise ClientError("unreachable", "no sidecar answers")
        return {"policy": {"mode": "off", "owner": None}}

    driver = Driver("http://a", "model", None)
    session = Session(StandInClient(answer), driver, PLAN, "owner", lambda line: None, lease_s=0.3)
    with session._policy("freeze") as lost:
        wait_for("it has been renewed", lambda: len(asked) > 3)
        wait_for("it is lost", lambda: bool(lost) or not is_lost)
        assert bool(lost) is is_lost
        lost.clear()


# --- its window ---


def test_a_window_is_asked_for_so_often_that_only_one_of_a_killed_sweep_is_abandoned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert session_module.WINDOW_PATIENCE_S <= 300
    monkeypatch.setattr(session_module, "WINDOW_PATIENCE_S", 0.2)
    client = StandInClient(lambda method, path: {})
    session = Session(client, Driver("http://a", "model", None), PLAN, "owner", lambda line: None)
    with session._window(PLAN.blocks()[0]) as window_id:
        asked = (f"/gc/windows/{window_id}", None)
        wait_for("it is asked for", lambda: client.sent.count(asked) > 3)
    (_, opened), (closed, _) = client.sent[0], client.sent[-1]
    assert (opened["window_id"], opened["abandon_after_s"]) == (window_id, 0.2)
    assert closed == f"/gc/windows/{window_id}/close"


@pytest.mark.parametrize("state", ["open", "closed"])
def test_a_block_whose_window_somebody_closed_is_left_out(state: str) -> None:
    verdict: dict[str, Any] = {
        "reasons": [], "lost_records": 0, "processes": [], "latency": {"tokens": None},
    }  # fmt: skip
    body = {
        "policy": {"mode": "off", "owner": None},
        "processes": [],
        "window": {"state": state, "verdict": verdict},
        **pauses_body(complete_since_s=BEGAN_S),
    }
    client = StandInClient(lambda method, path: body)
    session = Session(client, StandInDriver(), PLAN, "owner", lambda line: None)
    record = session.run_block(PLAN.blocks()[0])
    codes = [reason.code for reason in record.disturbances]
    assert codes == ([] if state == "open" else ["window_closed"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_a_restore_counts_when_that_is_done(number: int) -> None:
    done = []
    before = signal.getsignal(number)

    def restore() -> None:
        with _uninterrupted():
            os.kill(os.getpid(), number)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        restore()
    assert done
    assert signal.getsignal(number) is before
