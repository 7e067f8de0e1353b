"""`gc-sidecar pauses` and `windows` against a stand-in sidecar: lines, flags, and following what comes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import pytest

from gc_sidecar_agent.cli import main
from gc_sidecar_agent.client import Answer, Client
from gc_sidecar_agent.commands import pauses
from gc_sidecar_agent.commands.pauses import PauseFeed, microseconds_of
from tests.unit.agent.test_client import PROBLEM
from tests.unit.answering import AnsweringSidecar, no_variables_of_ours, pause

SOURCE = Path(__file__).resolve().parents[3] / "sidecar"
SINCE = "2026-12-01T08:00:00.000Z"

_no_variables = pytest.fixture(autouse=True)(no_variables_of_ours)


@pytest.fixture
def sidecar(monkeypatch: pytest.MonkeyPatch) -> Iterator[AnsweringSidecar]:
    with AnsweringSidecar() as stand_in:
        stand_in.answers["/gc/pauses"] = told(pause())
        monkeypatch.setenv("GC_SIDECAR_URL", stand_in.url)
        yield stand_in


def told(*oldest_first: dict[str, Any], **rest: Any) -> dict[str, Any]:
    """An answer of the route."""
    return {
        "pauses": list(reversed(oldest_first)),
        "lost": 0,
        "matching": len(oldest_first),
        "complete_since": SINCE,
        **rest,
    }


def at(second: float, **rest: Any) -> dict[str, Any]:
    """A pause that began so many seconds after nine."""
    return pause(started_at=f"2026-12-01T09:00:{second:06.3f}Z", **rest)


def query(sidecar: AnsweringSidecar) -> dict[str, list[str]]:
    return parse_qs(urlsplit(sidecar.paths[-1]).query)


# --- what is recorded ---


def test_there_is_a_line_for_each_pause_and_the_oldest_comes_first(
    sidecar: AnsweringSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    both = pause(roles=["engine_core", "worker"], gc_generation=0, duration_s=0.00001)
    sidecar.answers["/gc/pauses"] = told(at(1), {**both, "started_at": "2026-12-01T09:00:02Z"})
    assert main(["pauses"]) == 0
    captured = capsys.readouterr()
    first, second = captured.out.splitlines()
    assert first == (
        "2026-12-01T09:00:01.000Z  worker       dp0 rank0   pid 5425    gen2  auto       335 ms"
        "  1,234 collected"
    )
    assert "engine_core+worker" in second
    assert captured.err == ""


def test_json_is_one_object_a_line(
    sidecar: AnsweringSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    sidecar.answers["/gc/pauses"] = told(at(1), at(2))
    assert main(["pauses", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert list(map(json.loads, lines)) == [at(1), at(2)]


def test_every_flag_is_a_parameter_of_the_route(sidecar: AnsweringSidecar) -> None:
    flags = "--full --role worker --min-duration 5ms --limit 7 --since 2026-12-01T09:00:00Z"
    assert main(["pauses", *flags.split()]) == 0
    assert query(sidecar) == {
        "gc_generation": ["2"],
        "role": ["worker"],
        "min_duration_s": ["0.005"],
        "limit": ["7"],
        "since": ["2026-12-01T09:00:00Z"],
    }
    assert main(["pauses"]) == 0
    assert query(sidecar) == {}


def test_since_may_be_how_long_ago(
    sidecar: AnsweringSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pauses.time, "time", lambda: 1_796_115_600.25)
    assert main(["pauses", "--since", "5m"]) == 0
    assert query(sidecar) == {"since": ["2026-12-01T08:55:00.250000Z"]}


@pytest.mark.parametrize(
    "flags",
    [
        ["--since", "yesterday"],
        ["--since", "2026-12-01T09:00:00"],
        ["--min-duration", "5"],
        ["--limit", "0"],
        ["--limit", "10001"],
        ["--url", "localhost:9470"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pauses", *flags]) == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({}, "no such pause has been recorded"),
        (told(at(1), matching=41), "40 older ones match too; --limit asks for more"),
        (told(at(1), lost=3), "of 3 others no record came"),
    ],
)
def test_what_is_missing_is_told_on_standard_error(
    document: dict[str, Any],
    said: str,
    sidecar: AnsweringSidecar,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sidecar.answers["/gc/pauses"] = document
    assert main(["pauses"]) == 0
    captured = capsys.readouterr()
    assert said in captured.err
    assert "gc-sidecar" not in captured.out


def test_text_of_a_process_does_nothing_to_the_terminal(
    sidecar: AnsweringSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    sidecar.answers["/gc/pauses"] = told(pause(trigger="\x1b[2J", roles=["\x07"]))
    assert main(["pauses"]) == 0
    assert not {"\x1b", "\x07"} & set(capsys.readouterr().out)


@pytest.mark.parametrize("follow", [[], ["--follow"]])
def test_a_refusal_ends_it(
    follow: list[str], sidecar: AnsweringSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    sidecar.failure = 422, {**PROBLEM, "status": 422, "code": "invalid_field"}
    assert main(["pauses", *follow]) == 2
    assert "invalid_field" in capsys.readouterr().err


# --- each one once ---


@pytest.fixture
def ask(sidecar: AnsweringSidecar) -> Callable[..., pauses.News]:
    feed, client = PauseFeed({}), Client(sidecar.url)

    def ask(*oldest_first: dict[str, Any], **rest: Any) -> pauses.News:
        sidecar.answers["/gc/pauses"] = told(*oldest_first, **rest)
        return feed.ask(client)

    return ask


def test_a_pause_is_told_once_however_often_it_is_answered(
    ask: Callable[..., pauses.News],
) -> None:
    assert ask(at(1), at(2)).pauses == [at(1), at(2)]
    assert ask(at(1), at(2), at(3)).pauses == [at(3)]
    assert ask(at(1), at(2), at(3)).pauses == []


def test_it_is_the_same_where_its_beginning_is_derived_a_little_differently(
    ask: Callable[..., pauses.News],
) -> None:
    ask(at(1))
    assert ask(at(1.004)).pauses == []
    assert ask(at(0.999)).pauses == []


def test_two_alike_are_two(ask: Callable[..., pauses.News]) -> None:
    assert len(ask(at(1)).pauses) == 1
    assert len(ask(at(1), at(1.5)).pauses) == 1
    assert ask(at(1), at(1.5)).pauses == []


def test_one_that_comes_late_is_told(ask: Callable[..., pauses.News]) -> None:
    ask(at(5))
    assert ask(at(4, rank=1), at(5)).pauses == [at(4, rank=1)]


def test_only_what_may_be_new_is_asked_for(
    ask: Callable[..., pauses.News], sidecar: AnsweringSidecar
) -> None:
    ask(at(30))
    ask()
    assert query(sidecar)["since"] == ["2026-12-01T09:00:27.335000Z"]


def test_what_was_told_is_forgotten_when_it_is_not_asked_for_any_more(
    sidecar: AnsweringSidecar,
) -> None:
    feed, client = PauseFeed({}), Client(sidecar.url)
    for second in range(50):
        sidecar.answers["/gc/pauses"] = told(at(second, duration_s=second / 1000))
        feed.ask(client)
    assert len(feed._known) < 10


def test_records_that_were_lost_meanwhile_are_told_and_those_of_before_once(
    ask: Callable[..., pauses.News],
) -> None:
    assert "of 2 pauses no record came" in ask(lost=2).notes[0]
    assert ask(lost=2).notes == []
    assert "of 3 pauses no record came" in ask(lost=5).notes[0]
    assert "of 1 pauses no record came" in ask(lost=1).notes[0], "of a sidecar that was restarted"


def test_a_restart_is_told_with_the_time_of_which_some_may_be_missing(
    ask: Callable[..., pauses.News],
) -> None:
    ask(at(1, duration_s=0.5))
    (note,) = ask(at(1, duration_s=0.5), complete_since="2026-12-01T09:00:09Z").notes
    assert "between 2026-12-01T09:00:01.500000Z and 2026-12-01T09:00:09Z some may be" in note
    assert ask(complete_since="2026-12-01T09:00:09Z").notes == []


def test_what_the_sidecar_has_forgotten_after_it_was_told_is_not_missing(
    ask: Callable[..., pauses.News],
) -> None:
    ask(at(30))
    assert ask(at(30), complete_since="2026-12-01T09:00:12Z").notes == []


def test_more_than_can_be_told_at_once_is_told(
    ask: Callable[..., pauses.News], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pauses, "MOST", 2)
    assert ask(at(1), at(2), matching=9).notes == [], "those of before were not asked for"
    (note,) = ask(at(11), at(12), matching=5).notes
    assert "3 pauses are left out" in note
    assert ask(at(12), at(13), matching=5).notes == [], "the others are known"


@pytest.mark.parametrize(("told_s", "said"), [(3600.4, "forward"), (-3600.4, "back")])
def test_when_the_clock_of_the_sidecar_is_set_each_is_told_once_all_the_same(
    told_s: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    feed, client = PauseFeed({"since": "2026-12-01T11:00:00Z"}), cast(Client, clock)
    clock.pauses = [1.0, 2.0]
    assert len(feed.ask(client).pauses) == 2
    clock.ahead_s += told_s
    clock.pauses.append(3.0)
    news = feed.ask(client)
    assert [each["duration_s"] for each in news.pauses] == [3.0]
    assert news.notes == [f"the sidecar's clock was set {said} by 3600 s"]
    clock.pauses.append(4.0)
    assert [each["duration_s"] for each in feed.ask(client).pauses] == [4.0]
    assert feed.ask(client) == pauses.News([], [])


def test_a_date_that_is_told_late_is_no_clock_that_was_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    feed, client = PauseFeed({}), cast(Client, clock)
    clock.pauses = [1.0, 2.0]
    feed.ask(client)
    clock.date_late_s = 9.0
    assert feed.ask(client) == pauses.News([], [])


class Clock:
    """A sidecar whose clock can be set: pauses that began so many seconds after it, and last as long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pauses: list[float] = []
        self.ahead_s = microseconds_of("2026-12-01T12:00:00Z") / 1e6  # type: ignore[operator]
        self.date_late_s = 0.0
        monkeypatch.setattr(pauses, "_elapsed_s", lambda: 100.0)

    def request(self, _method: str, path: str) -> Answer:
        """As the real one; `since` is heeded."""
        (since,) = parse_qs(urlsplit(path).query).get("since", ["1970-01-01T00:00:00Z"])
        document = [
            pause(started_at=pauses.time_text(self.ahead_s + each), duration_s=each)
            for each in self.pauses
        ]
        later = [
            each
            for each in document
            if (pauses.end_of(each) or 0.0) > (pauses.time_of(since) or 0.0)
        ]
        date_s = float(int(self.ahead_s + 10.0 - self.date_late_s))
        return Answer(200, "", told(*later, complete_since=None), date_s=date_s)


# --- following ---


class Interrupted:
    """Instead of waiting: the next step of a story, and Ctrl-C after the last."""

    def __init__(self, *steps: Callable[[], None]) -> None:
        self._steps = list(steps)

    def __call__(self, _wait_s: float) -> None:
        if not self._steps:
            raise KeyboardInterrupt
        self._steps.pop(0)()


def test_following_tells_what_comes_also_after_the_connection_broke(
    sidecar: AnsweringSidecar,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def breaks() -> None:
        sidecar.failure = 503, {**PROBLEM, "status": 503, "code": "sidecar_stopping"}

    def heals() -> None:
        sidecar.failure = None
        sidecar.answers["/gc/pauses"] = told(at(1), at(2))

    steps = Interrupted(lambda: None, breaks, lambda: None, heals)
    monkeypatch.setattr(pauses, "_wait", steps)
    sidecar.answers["/gc/pauses"] = told(at(1))
    assert main(["pauses", "--follow", "--json"]) == 130
    captured = capsys.readouterr()
    assert list(map(json.loads, captured.out.splitlines())) == [at(1), at(2)]
    broken, healed = captured.err.splitlines()
    assert "trying again every 1 s" in broken
    assert "answered again" in healed


def test_following_begins_with_the_newest_of_what_is_recorded(
    sidecar: AnsweringSidecar,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(pauses, "_wait", Interrupted(lambda: None))
    sidecar.answers["/gc/pauses"] = told(at(1), at(2), at(3))
    assert main(["pauses", "--follow", "--json", "--limit", "2"]) == 130
    assert list(map(json.loads, capsys.readouterr().out.splitlines())) == [at(2), at(3)]


def test_following_ends_when_nobody_reads_any_more_even_if_nothing_comes(
    sidecar: AnsweringSidecar,
) -> None:
    command = f"{sys.executable} -m gc_sidecar_agent pauses --follow | head -1"
    done = subprocess.run(
        ["sh", "-c", command],
        env={"PYTHONPATH": str(SOURCE), "PATH": os.environ["PATH"], "GC_SIDECAR_URL": sidecar.url},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.startswith("2026-12-01T09:00:00.500Z  worker")
    assert done.stderr == ""


# --- windows ---


def test_windows_are_listed_a_line_each(
    sidecar: AnsweringSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    common = {"opened_at": SINCE, "duration_s": 2.5}
    sidecar.answers["/gc/windows"] = {
        "windows": [
            {"id": "w-2", "name": "b", "state": "open", "clean": None, **common},
            {"id": "w-1", "name": None, "state": "closed", "clean": False, **common},
        ]
    }
    assert main(["windows"]) == 0
    header, newest, oldest = capsys.readouterr().out.splitlines()
    assert header.split() == ["ID", "STATE", "VERDICT", "NAME", "OPENED", "LENGTH"]
    assert newest.split() == ["w-2", "open", "none", "yet", "b", SINCE, "2.50", "s"]
    assert oldest.split() == ["w-1", "closed", "NOT", "clean", "-", SINCE, "2.50", "s"]


def test_that_there_is_no_window_is_said_and_how_to_open_one(
    sidecar: AnsweringSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    sidecar.answers["/gc/windows"] = {"windows": []}
    assert main(["windows"]) == 0
    assert "no window has been opened: `gc-sidecar window open`" in capsys.readouterr().out
