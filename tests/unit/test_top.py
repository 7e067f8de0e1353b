"""`gc-sidecar top`: what one frame shows, on a screen of any size, and how it asks and ends."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from gc_sidecar.__main__ import main
from gc_sidecar.commands import top
from gc_sidecar.commands.top import Model, frame
from gc_sidecar_agent.client import ClientError
from gc_sidecar_agent.commands.pauses import time_text
from tests.unit.agent.test_client import PROBLEM
from tests.unit.agent.test_commands import STATUS, process
from tests.unit.answering import AnsweringSidecar, no_variables_of_ours, pause

SOURCE = Path(__file__).resolve().parents[2] / "sidecar"
NOW = 1_767_225_720.0  # two minutes past midnight, UTC
SIZES = [(80, 24), (200, 50)]

_no_variables = pytest.fixture(autouse=True)(no_variables_of_ours)


def ago(seconds: float, **rest: Any) -> dict[str, Any]:
    """A pause that began so long before NOW."""
    return pause(started_at=time_text(NOW - seconds), **rest)


def model_of(*pauses: dict[str, Any], **status: Any) -> Model:
    model = Model("http://localhost:9470")
    model.answered({**STATUS, **status}, pauses, NOW)
    return model


def shown(model: Model, width: int = 80, height: int | None = 24, **rest: Any) -> list[str]:
    """The lines of a frame, which fit."""
    lines = frame(model, NOW, width, height, **rest)
    assert all(text.cell_len <= width for text in lines)
    assert height is None or len(lines) <= height
    return [text.plain.rstrip() for text in lines]


def line_of(lines: list[str], beginning: str) -> str:
    return next(line for line in lines if line.startswith(beginning))


def many(count: int, **by_rank: dict[str, Any]) -> list[dict[str, Any]]:
    """Workers, of which some are special: `r7={"state": "stale"}`."""
    return [process("worker", rank, **by_rank.get(f"r{rank}", {})) for rank in range(count)]


# --- one frame ---


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_it_shows_policy_coverage_and_every_process(width: int, height: int) -> None:
    last = ago(30, duration_s=0.25, dp_rank=0, rank=1, pid=5426)
    lines = shown(model_of(last), width, height)
    assert line_of(lines, "policy").split(maxsplit=1)[1] == (
        "freeze, since 00:00:00, until 01:00:00 (58 min left), by bench-1"
    )
    assert line_of(lines, "coverage") == "coverage  2 of 2 processes, transport plugin"
    header, row = line_of(lines, "ROLE").split(), line_of(lines, "worker ").split()
    assert {"STATE", "NOW", "FULL", "LAST", "LONGEST", "MEMORY", "GROWTH"} <= set(header)
    text = " ".join(row)
    assert "applied" in text
    assert "250 ms" in text, "the last full collection"
    assert "335 ms" in text, "the longest"
    assert "1.68 GiB +12.0 MiB" in text
    assert ("PID" in header) == ("5426" in row) == (width == 200)


@pytest.mark.parametrize("answer", ["yes", "no", "unknown", "?"])
def test_whether_it_is_safe_to_measure_comes_first(answer: str) -> None:
    safe = {"answer": answer, "word": "Perhaps.", "why": "One may hope."}
    lines = shown(model_of(safe_to_measure=safe))
    assert lines[1] == "measure?  Perhaps. One may hope."


def test_what_is_cut_ends_in_an_ellipsis_and_a_plain_frame_cuts_nothing() -> None:
    safe = {"answer": "no", "word": "No.", "why": "because " * 20 + "of that."}
    on_screen, plain = (
        shown(model_of(safe_to_measure=safe), 80, 24),
        [text.plain for text in frame(model_of(safe_to_measure=safe), NOW, 80, None)],
    )
    assert on_screen[1].endswith("\u2026")
    assert plain[1].endswith("of that.")


def test_a_process_without_a_policy_has_normal_gc() -> None:
    assert "normal GC" in line_of(shown(model_of(processes=[process(mode="off")])), "worker ")


def test_a_lease_that_is_over_is_told() -> None:
    policy = {**STATUS["policy"], "lease_expires_at": "2026-01-01T00:01:00Z"}
    assert "until 00:01:00 (over)" in line_of(shown(model_of(policy=policy)), "policy")


def test_what_is_not_normal_is_told() -> None:
    lines = shown(
        model_of(
            policy={"mode": "budget", "pause_budget_ms": 5.0, "owner": "x" * 128},
            coverage={"acknowledged": 1, "expected": 2},
            operation={"id": "op-7", "kind": "maintain", "state": "running"},
            reasons=[{"code": "rpc_desync", "detail": "out of step", "blocking": True}],
            processes=[process(collecting_for_s=1.25), process(rank=1, state="stale")],
        )
    )
    assert line_of(lines, "policy").startswith("policy    budget of 5.00 ms, by xxxx")
    assert "1 of 2 processes" in line_of(lines, "coverage")
    assert line_of(lines, "operation") == "operation maintain running (op-7)"
    assert line_of(lines, "note") == "note      out of step (rpc_desync)"
    rows = [line.split() for line in lines if line.startswith("worker ")]
    assert [row[2:6] for row in rows] == [
        ["0", "applied", "GC", "1.25"],
        ["1", "stale", "-", "3"],
    ]


def test_a_process_that_is_gone_does_not_collect() -> None:
    gone = process(state="gone", collecting_for_s=1.25)
    assert "GC 1.25 s" not in "".join(shown(model_of(processes=[gone])))


@pytest.mark.parametrize(
    "status",
    [
        {"policy": None, "coverage": None, "processes": None, "reasons": None},
        {"processes": [{}, None, {"role": "worker", "memory": None, "pauses": {"gen2": None}}]},
        {"policy": {"mode": "off"}, "coverage": {}, "reasons": ["?"], "operation": {}},
    ],
)
def test_what_is_not_known_is_a_dash(status: dict[str, Any]) -> None:
    assert "- of -" in "".join(shown(model_of({}, **{**status, "coverage": None})))


def test_before_the_first_answer_it_says_so() -> None:
    assert "policy    not known yet" in shown(Model("http://localhost:9470"))


def test_text_of_a_process_does_nothing_to_the_terminal() -> None:
    evil = process(state="\x1b[2J", roles=["\x07"], mode="\n")
    lines = shown(model_of(pause(trigger="\x1b]0;x\x07"), processes=[evil]), 200, 50)
    assert not {"\x1b", "\x07"} & set("".join(lines))


def test_the_latest_pauses_stand_below_the_newest_first() -> None:
    pauses = [ago(seconds, collected_objects=seconds) for seconds in range(1, 40)]
    lines = shown(model_of(*pauses))
    at = next(index for index, line in enumerate(lines) if line.startswith("LATEST PAUSES"))
    below = lines[at + 1 :]
    assert below[0] == "00:01:59.000  worker 0 0       gen2  auto       335 ms  1 collected"
    assert [line.split()[-2] for line in below] == [str(n) for n in range(1, len(below) + 1)]
    assert len(lines) == 24, "they fill the screen"


def test_a_time_of_another_day_has_its_day() -> None:
    yesterday = ago(86400)
    assert "2025-12-31 00:02:00.000" in "".join(shown(model_of(yesterday)))


def test_sparklines_show_pauses_by_their_order_of_magnitude_and_memory_as_it_changes() -> None:
    model = model_of(ago(250, duration_s=0.002), ago(5, duration_s=9.0))
    for seconds in range(-100, 0, 10):
        grown = process(memory={"anonymous_bytes": 2_000_000_000 + 5_000_000 * seconds})
        model.answered({**STATUS, "processes": [grown]}, [], NOW + seconds)
    lines = shown(model)
    pauses, memory = line_of(lines, "pauses"), line_of(lines, "memory")
    assert pauses.endswith("longest 9.00 s in the last 5 min")
    bars = pauses.split("longest")[0].split(None, 1)[1].rstrip()
    assert (bars[0], bars[-1], set(bars[1:-1])) == (top.BARS[0], top.BARS[-1], {" "})
    heights = [top.BARS.index(bar) for bar in memory.split("  ")[-2].strip() if bar != " "]
    assert heights == sorted(heights)
    assert heights[0] < heights[-1]
    assert "meanwhile" in memory


def test_sparklines_are_plain_characters_where_the_terminal_has_no_others() -> None:
    assert "".join(shown(model_of(ago(5)), bars=top.PLAIN_BARS)).isascii()


def test_what_is_older_than_the_sparkline_is_not_in_it() -> None:
    lines = shown(model_of(ago(400)))
    assert line_of(lines, "pauses").endswith("none in the last 5 min")


def test_a_broken_connection_is_shown_over_what_was_seen_last() -> None:
    model = model_of()
    model.answered(STATUS, [], NOW - 9)
    model.failed(ClientError("unreachable", "no sidecar answers"))
    model.failed(ClientError("unreachable", "no sidecar answers"))
    lines = shown(model)
    assert lines[1] == "NO ANSWER for 9 s, trying again: no sidecar answers"
    assert line_of(lines, "worker ")
    model.answered(STATUS, [], NOW)
    assert "NO ANSWER" not in "".join(shown(model))


@pytest.mark.parametrize(
    ("silent_s", "interval_s", "is_told"), [(5, 1, False), (7, 1, True), (7, 5, False)]
)
def test_an_answer_that_does_not_come_is_told_before_anybody_gives_up(
    silent_s: float, interval_s: float, is_told: bool
) -> None:
    model = Model("http://localhost:9470", interval_s=interval_s)
    model.answered(STATUS, [], NOW - silent_s)
    lines = shown(model)
    assert lines[1].startswith("NO ANSWER for 7 s, trying again: the sidecar has not") == is_told


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/gc", {**STATUS, "policy": {"mode": "budget", "pause_budget_ms": "5"}}),
        ("/gc", {**STATUS, "processes": [process(memory={"anonymous_bytes": 10**400})]}),
        ("/gc", {**STATUS, "processes": [process(pid=[1])]}),
        ("/gc/pauses", {"pauses": [pause(pid={"a": 1})]}),
        ("/gc/pauses", {"pauses": [pause(rank=[1])]}),
        ("/gc/pauses", {"pauses": [pause(duration_s=float("nan"))]}),
    ],
)
def test_an_answer_that_cannot_be_shown_is_told_and_the_next_one_is_shown(
    sidecar: AnsweringSidecar, path: str, body: dict[str, Any]
) -> None:
    args = argparse.Namespace(url=sidecar.url, token_file=None, json=False)
    model = Model(sidecar.url)
    watching = top.Watching(args, model)
    in_order = sidecar.answers[path]
    sidecar.answers[path] = body
    watching.look()
    frame(model, model.now_s(), 80, 24)
    if model.error is not None:
        assert "cannot be read" in model.error.detail
    sidecar.answers[path] = in_order
    watching.look()
    assert model.error is None
    assert model.status == sidecar.answers["/gc"]


# --- more processes than lines ---


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_of_many_processes_those_where_something_happens_are_shown_and_the_others_summed_up(
    width: int, height: int
) -> None:
    processes = many(64, r40={"state": "stale"}, r63={"collecting_for_s": 2.0})
    lines = shown(model_of(ago(3, rank=50, pid=5475), processes=processes), width, height)
    rows = [line for line in lines if line.startswith("worker  ")]
    ranks = [int(line.split()[2]) for line in rows]
    assert {40, 50, 63} <= set(ranks)
    assert ranks == sorted(ranks), "they stay in their order"
    left_out = 64 - len(rows)
    summary = line_of(lines, f"{left_out} more, all calm; arrows scroll: longest 335 ms, ")
    assert summary.endswith(f"{left_out * 1.8e9 / 2**30:.1f} GiB, +{left_out * 12} MiB")
    assert line_of(lines, "LATEST PAUSES")


def test_all_of_them_can_be_scrolled_through() -> None:
    model, seen = model_of(processes=many(64)), set()
    for offset in range(0, 64, 5):
        lines = shown(model, offset=offset)
        seen |= {int(line.split()[2]) for line in lines if line.startswith("worker  ")}
        assert "of 64; Home" in "".join(lines)
    assert seen == set(range(64))


def test_that_busy_ones_are_left_out_is_told() -> None:
    lines = shown(model_of(processes=many(64, **STALE)))
    assert any(re.match(r"\d+ more, \d+ of them busy; ", line) for line in lines)


STALE = {f"r{rank}": {"state": "stale"} for rank in range(64)}


@pytest.mark.parametrize("height", range(1, 30))
@pytest.mark.parametrize("width", [20, 40, 80, 132])
def test_nothing_is_longer_or_higher_than_the_screen(width: int, height: int) -> None:
    shown(model_of(*(ago(n) for n in range(9)), processes=many(64)), width, height)


def test_without_a_screen_every_process_is_shown() -> None:
    lines = shown(model_of(processes=many(64)), height=None)
    assert sum(line.startswith("worker  ") for line in lines) == 64


# --- keys ---


def test_keys_are_told_apart_though_they_come_together() -> None:
    assert top._split_keys(b"\x1b[A\x1b[6~jq") == [b"\x1b[A", b"\x1b[6~", b"j", b"q"]
    assert top._split_keys(b"\x1b[Zx") == [b"\x1b", b"[", b"Z", b"x"]


# --- how it asks and ends ---


@pytest.fixture
def sidecar(monkeypatch: pytest.MonkeyPatch) -> Iterator[AnsweringSidecar]:
    with AnsweringSidecar() as stand_in:
        stand_in.answers = {"/gc": STATUS, "/gc/pauses": {"pauses": [pause()]}}
        monkeypatch.setenv("GC_SIDECAR_URL", stand_in.url)
        monkeypatch.setenv("COLUMNS", "80")
        yield stand_in


def test_once_prints_one_plain_frame(
    sidecar: AnsweringSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--once"]) == 0
    out = capsys.readouterr().out
    assert "coverage  2 of 2 processes" in out
    assert "\x1b" not in out
    assert "q quits" not in out
    head, processes, *_ = out.split("\n\n")
    assert max(map(len, processes.splitlines())) <= 80
    assert "by bench-1\n" in head, "nothing of it is cut"


@pytest.mark.parametrize("flags", [["--once"], ["--once", "--json"]])
def test_once_exits_like_status(flags: list[str], sidecar: AnsweringSidecar) -> None:
    sidecar.answers["/gc"] = {**STATUS, "coverage": {"acknowledged": 1, "expected": 2}}
    assert main(["top", *flags]) == 4
    sidecar.failure = 401, {**PROBLEM, "status": 401}
    assert main(["top", *flags]) == 1
    assert main(["top", *flags, "--url", "http://127.0.0.1:1"]) == 3


def test_once_with_json_is_the_status_untouched(
    sidecar: AnsweringSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS
    assert sidecar.paths == ["/gc"]


@pytest.mark.parametrize("flags", [["--json"], ["--url", "localhost:9470"], ["--interval", "x"]])
def test_wrong_usage_is_exit_code_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *flags]) == 2
    assert capsys.readouterr().err


def test_the_last_full_collection_of_long_ago_is_known_and_young_ones_are_of_the_last_minutes(
    sidecar: AnsweringSidecar,
) -> None:
    main(["top", "--once"])
    status, young, full = sidecar.paths
    assert status == "/gc"
    assert "min_duration_s=0.005" in young
    assert "since=" in young
    assert "gc_generation=2" in full
    assert "since=" not in full


def test_without_a_terminal_plain_frames_go_on_at_most_once_a_second(
    sidecar: AnsweringSidecar, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []

    def wait(wait_s: float) -> None:
        waited.append(wait_s)
        if len(waited) == 2:
            sidecar.failure = 503, {**PROBLEM, "status": 503}
        if len(waited) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", wait)
    assert main(["top", "--interval", "1ms"]) == 130
    out = capsys.readouterr().out
    assert out.count("coverage  2 of 2 processes") == 3
    assert out.count("NO ANSWER") == 1
    assert "\x1b" not in out
    assert waited == [1.0, 1.0, 1.0]


def test_a_reader_that_has_seen_enough_is_no_error(sidecar: AnsweringSidecar) -> None:
    command = f"{sys.executable} -m gc_sidecar top | head -1"
    done = subprocess.run(
        ["sh", "-c", command],
        env={"PYTHONPATH": str(SOURCE), "PATH": os.environ["PATH"], "GC_SIDECAR_URL": sidecar.url},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.startswith("gc-sidecar top")
    assert done.stderr == ""


def test_styles_are_only_styles() -> None:
    lines = frame(model_of(processes=many(3, r1={"state": "stale"})), NOW, 80, 24)
    assert all(isinstance(line, Text) for line in lines)
    assert any("red" in str(span.style) for line in lines for span in line.spans)
