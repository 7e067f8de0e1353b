"""`gc-sidecar export` against a stand-in sidecar: what comes into the trace, where, and by which clock."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from gc_sidecar.__main__ import main
from gc_sidecar.commands import export
from tests.unit.answering import AnsweringSidecar, no_variables_of_ours, pause

BEGAN = "2026-12-01T09:00:00.500Z"
BEGAN_NS = 1_796_115_600_500_000_000
OPERATION = {
    "id": "op-1",
    "kind": "freeze",
    "state": "applied",
    "owner": "bench-1",
    "requested_at": BEGAN,
    "duration_s": 1.5,
    "done": 4,
    "asked": 4,
}
WINDOW = {
    "id": "w-1",
    "name": "sweep 7",
    "state": "closed",
    "opened_at": BEGAN,
    "duration_s": 2.0,
    "clean": False,
}
VERDICT = {"clean": False, "reasons": [{"code": "pause_over_limit", "detail": "it took 90 ms"}]}

_no_variables = pytest.fixture(autouse=True)(no_variables_of_ours)


@pytest.fixture
def sidecar(monkeypatch: pytest.MonkeyPatch) -> Iterator[AnsweringSidecar]:
    with AnsweringSidecar() as stand_in:
        stand_in.answers = {
            "/gc/pauses": {
                "pauses": [pause(started_at=BEGAN)],
                "matching": 1,
                "lost": 0,
                "complete_since": "2026-12-01T08:00:00Z",
            },
            "/gc/operations": {"operations": [OPERATION]},
            "/gc/windows": {"windows": [WINDOW]},
            "/gc/windows/w-1": {"window": {**WINDOW, "verdict": VERDICT}},
        }
        monkeypatch.setenv("GC_SIDECAR_URL", stand_in.url)
        yield stand_in


def exported(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["export", *words]) == 0
    trace: dict[str, Any] = json.loads(capsys.readouterr().out, parse_float=Decimal)
    return trace


def slices(trace: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("cat") == category]


def test_a_pause_is_a_slice_on_the_track_of_its_process(
    sidecar: AnsweringSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = exported(capsys)
    (found,) = slices(trace, "gc")
    told = sidecar.answers["/gc/pauses"]["pauses"][0]
    assert (found["ph"], found["name"], found["pid"]) == ("X", "GC gen2 auto", 5425)
    assert found["dur"] == Decimal("335000.001"), "to the nanosecond"
    assert {**found["args"], "duration_s": float(found["args"]["duration_s"])} == told
    names = {
        (event["name"], event["pid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] in ("process_name", "thread_name")
    }
    assert names["process_name", 5425] == "worker dp0 rank0"
    assert names["thread_name", 5425] == "GC pauses"


def test_times_are_microseconds_of_the_wall_clock(
    sidecar: AnsweringSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = exported(capsys)
    assert trace["baseTimeNanoseconds"] == 0
    assert slices(trace, "gc")[0]["ts"] == Decimal(BEGAN_NS) / 1000


@pytest.mark.parametrize("name", ["rank0.json", "rank0.json.gz"])
def test_times_count_from_where_a_trace_of_the_profiler_does(
    name: str, sidecar: AnsweringSidecar, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base_ns = 1_790_857_026_000_000_000
    text = json.dumps({"traceEvents": [], "baseTimeNanoseconds": base_ns}).encode()
    data = gzip.compress(text) if name.endswith("gz") else text
    (tmp_path / name).write_bytes(data)
    trace = exported(capsys, "--base-time", str(tmp_path / name))
    assert trace["baseTimeNanoseconds"] == base_ns
    assert slices(trace, "gc")[0]["ts"] == Decimal(BEGAN_NS - base_ns) / 1000


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_the_base_time_is_found_wherever_it_stands_and_however_the_file_is_read(
    chunk: int, is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "CHUNK", chunk)
    rest = {"traceEvents": [{"ph": "X", "name": "x" * 300}]}
    base = {"baseTimeNanoseconds": 1_790_857_026_000_000_000}
    document = {**base, **rest} if is_first else {**rest, **base}
    (tmp_path / "t.json").write_text(json.dumps(document))
    assert export._base_time(str(tmp_path / "t.json")) == 1_790_857_026_000_000_000


def test_times_before_the_base_are_negative(
    sidecar: AnsweringSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = exported(capsys, "--base-time", str(BEGAN_NS + 1500))
    assert slices(trace, "gc")[0]["ts"] == Decimal("-1.500")


@pytest.mark.parametrize("given", ["soon", "/nonexistent", "-5"])
def test_what_is_no_base_time_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", f"--base-time={given}"]) == 2
    assert "--base-time" in capsys.readouterr().err


def test_a_file_that_says_no_base_time_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.json").write_text('{"traceEvents": []}')
    assert main(["export", "--base-time", str(tmp_path / "t.json")]) == 2
    assert "does not say what its times count from" in capsys.readouterr().err


def test_operations_and_windows_have_tracks_and_windows_their_verdicts(
    sidecar: AnsweringSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = exported(capsys)
    (operation,), (window,) = slices(trace, "operation"), slices(trace, "window")
    assert (operation["name"], operation["dur"]) == ("freeze applied", 1_500_000)
    assert (operation["args"]["owner"], operation["args"]["done"]) == ("bench-1", 4)
    assert (window["name"], window["dur"]) == ("sweep 7: NOT clean", 2_000_000)
    assert window["args"]["reasons"] == ["pause_over_limit: it took 90 ms"]
    assert operation["pid"] == window["pid"] != 5425
    assert operation["tid"] != window["tid"]


def test_what_goes_on_reaches_until_now(
    sidecar: AnsweringSidecar,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = {**OPERATION, "state": "running", "duration_s": None}
    sidecar.answers["/gc/operations"] = {"operations": [running]}
    monkeypatch.setattr(export.time, "time_ns", lambda: BEGAN_NS + 7_000_000_000)
    (operation,) = slices(exported(capsys), "operation")
    assert (operation["name"], operation["dur"]) == ("freeze running", 7_000_000)


def test_a_window_that_was_forgotten_meanwhile_is_shown_as_it_was_listed(
    sidecar: AnsweringSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    del sidecar.answers["/gc/windows/w-1"]
    (window,) = slices(exported(capsys), "window")
    assert (window["args"]["clean"], window["args"]["reasons"]) == (False, [])


def test_slices_that_overlap_come_into_lanes_for_viewers_draw_none_across_another(
    sidecar: AnsweringSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = ["09:00:00.000", "09:00:00.200", "09:00:00.400", "09:00:05.000"]
    pauses = [pause(started_at=f"2026-12-01T{start}Z") for start in starts]
    sidecar.answers["/gc/pauses"] = {"pauses": pauses[::-1], "matching": 4}
    found = slices(exported(capsys), "gc")
    assert len(found) == 4
    ends: dict[int, Decimal] = {}
    for each in sorted(found, key=lambda each: each["ts"]):
        assert each["ts"] >= ends.get(each["tid"], 0)
        ends[each["tid"]] = each["ts"] + each["dur"]
    assert len(ends) == 2


def test_processes_of_different_machines_with_one_pid_are_two(
    sidecar: AnsweringSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses = [pause(), pause(dp_rank=1), pause(dp_rank=2, pid=None)]
    sidecar.answers["/gc/pauses"] = {"pauses": pauses, "matching": 3}
    assert len({each["pid"] for each in slices(exported(capsys), "gc")}) == 3


def test_what_ended_before_is_left_out(
    sidecar: AnsweringSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = exported(capsys, "--since", "2026-12-01T09:00:02.200Z", "--full")
    assert slices(trace, "operation") == []
    assert len(slices(trace, "window")) == 1, "it ended later"
    query = next(path for path in sidecar.paths if path.startswith("/gc/pauses"))
    assert parse_qs(urlsplit(query).query) == {
        "since": ["2026-12-01T09:00:02.200Z"],
        "gc_generation": ["2"],
        "limit": ["10000"],
    }


MOST = 2
PLACES = [("worker", 0, 0), ("worker", 0, 1), ("engine_core", 0, 0)]


def tells_at_most(
    sidecar: AnsweringSidecar, pauses: list[dict[str, Any]], rows: list[tuple[str, int, int]]
) -> None:
    """Let it answer like a sidecar that tells MOST at once, of an engine with these processes."""
    names = ("role", "dp_rank", "rank", "gc_generation")

    def answer(query: dict[str, list[str]]) -> dict[str, Any]:
        asked = {name: query[name][0] for name in names if name in query}
        found = [
            each
            for each in pauses
            if all(
                value in (each["roles"] if name == "role" else [str(each[name])])
                for name, value in asked.items()
            )
        ]
        newest = sorted(found, key=lambda each: str(each["started_at"]), reverse=True)
        since = "2026-12-01T08:00:00.000Z"
        return {"pauses": newest[:MOST], "matching": len(found), "complete_since": since}

    sidecar.answers["/gc/pauses"] = answer
    processes = [dict(zip(names, row, strict=False)) for row in rows]
    sidecar.answers["/gc"] = {"processes": processes}


def numbered(number: int, role: str, dp_rank: int, rank: int, **rest: Any) -> dict[str, Any]:
    place = {"role": role, "roles": [role], "dp_rank": dp_rank, "rank": rank}
    return pause(started_at=f"2026-12-01T09:00:{number:02d}.000Z", **{**place, **rest})


def test_all_that_the_sidecar_has_is_asked_for_by_generation_and_by_process(
    sidecar: AnsweringSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    generations = [0, 2] * len(PLACES)
    pauses = [
        numbered(number, *place, gc_generation=generation)
        for number, (place, generation) in enumerate(zip(2 * PLACES, generations, strict=True))
    ]
    # Whoever is in two roles is asked for twice, and told once.
    pauses.append(numbered(30, "engine_core", 0, 0, roles=["engine_core", "worker"]))
    tells_at_most(sidecar, pauses, PLACES)
    assert main(["export"]) == 0
    captured = capsys.readouterr()
    trace = json.loads(captured.out)
    assert len(slices(trace, "gc")) == len(pauses)
    assert "left out" not in captured.err
    assert trace["otherData"]["complete_since"] == "2026-12-01T08:00:00.000Z"


def test_what_the_sidecar_does_not_tell_is_left_out_and_it_is_told_from_when_on_all_is_there(
    sidecar: AnsweringSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses = [numbered(number, *PLACES[0]) for number in range(5)]
    tells_at_most(sidecar, [*pauses, numbered(1, *PLACES[1])], PLACES)
    assert main(["export"]) == 0
    captured = capsys.readouterr()
    trace = json.loads(captured.out)
    assert len(slices(trace, "gc")) == MOST + 1
    assert "3 older pauses are left out" in captured.err
    assert "complete from 2026-12-01T09:00:03.000Z on" in captured.err
    assert trace["otherData"]["complete_since"] == "2026-12-01T09:00:03.000Z"


def test_where_a_process_is_gone_whose_place_nobody_knows_the_newest_are_taken(
    sidecar: AnsweringSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses = [numbered(number, *PLACES[number > 2]) for number in range(5)]
    tells_at_most(sidecar, pauses, [])
    assert main(["export", "--full"]) == 0
    captured = capsys.readouterr()
    assert [each["args"]["rank"] for each in slices(json.loads(captured.out), "gc")] == [1, 1]
    assert "3 older pauses are left out" in captured.err
    assert "complete from 2026-12-01T09:00:03.000Z on" in captured.err


@pytest.mark.parametrize("name", ["gc.json", "gc.json.gz"])
def test_a_file_is_written_and_what_is_in_it_is_told(
    name: str, sidecar: AnsweringSidecar, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "--out", str(tmp_path / name)]) == 0
    data = (tmp_path / name).read_bytes()
    trace = json.loads(gzip.decompress(data) if name.endswith("gz") else data)
    assert len(slices(trace, "gc")) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert (
        "has 1 pauses, 1 operations, 1 windows; complete from 2026-12-01T08:00:00Z on"
        in captured.err
    )


def test_a_file_that_cannot_be_written_is_exit_code_1(
    sidecar: AnsweringSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "--out", "/nonexistent/gc.json"]) == 1
    assert "No such file" in capsys.readouterr().err


def test_another_format_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--format", "svg"]) == 2
    assert "perfetto" in capsys.readouterr().err


def test_no_sidecar_is_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--url", "http://127.0.0.1:1"]) == 3
    assert capsys.readouterr().out == ""


def test_nothing_that_is_remembered_is_a_trace_without_slices(
    sidecar: AnsweringSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    sidecar.answers |= {path: {} for path in ("/gc/pauses", "/gc/operations", "/gc/windows")}
    assert all(event["ph"] == "M" for event in exported(capsys)["traceEvents"])
