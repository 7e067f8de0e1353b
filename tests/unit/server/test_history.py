"""The last hour as it is kept: what is in it, in which order, and that it never grows beyond its bounds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from gc_sidecar.server import history
from gc_sidecar.server.history import KEPT_MEMORY, KEPT_PAUSES, SPAN_S, History
from gc_sidecar.server.pauses import SeenPause
from gc_sidecar.server.reports import Identity, Key

EPOCH, OWN = 1_800_000_000.0, 5000.0
WORKER = Identity(("worker",), 0, 1, "worker", 12)
CORE = Identity(("engine_core", "worker"), 2, 0, "core", 11)


class Clock:
    """Both clocks of a history, which go on when they are told to."""

    def __init__(self) -> None:
        self.passed_s = 0.0
        self.history = History(lambda: EPOCH + self.passed_s, lambda: OWN + self.passed_s)

    def pause(
        self,
        who: Identity = WORKER,
        ago_s: float = 1.0,
        duration_s: float = 0.5,
        generation: int = 2,
    ) -> None:
        start_s = OWN + self.passed_s - ago_s
        self.history.add_pause(SeenPause(who, start_s, duration_s, generation, "auto", 7))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def read(entries: Iterable[str]) -> list[Any]:
    return [json.loads(entry) for entry in entries]


def page(who: Identity, size: int | None, alive: bool = True) -> Any:
    numbers = {"anonymous_bytes": size}
    report = SimpleNamespace(identity=who, numbers=numbers, number=lambda _: 0)
    return SimpleNamespace(alive=alive, report=report)


def test_a_pause_is_told_by_place_and_date(clock: Clock) -> None:
    clock.pause(WORKER, 2.0, 0.1234567)
    clock.pause(CORE, 1.0)
    assert read(clock.history.pauses()) == [
        [0, EPOCH - 2, 0.123457, 2, "auto", 7, 12],
        [1, EPOCH - 1, 0.5, 2, "auto", 7, 11],
    ]
    assert list(clock.history.places) == [Key("worker", 0, 1), Key("engine_core", 2, 0)]


def test_of_young_collections_only_those_are_kept_that_somebody_might_feel(clock: Clock) -> None:
    for generation, duration_s in ((0, 0.0009), (1, 0.001), (2, 0.0001), (0, 0.002)):
        clock.pause(duration_s=duration_s, generation=generation)
    kept = [(pause[3], pause[2]) for pause in read(clock.history.pauses())]
    assert kept == [(1, 0.001), (2, 0.0001), (0, 0.002)]


def test_an_hour_is_kept_and_no_more(clock: Clock) -> None:
    clock.pause(ago_s=SPAN_S + 1)
    assert clock.history.pauses() == [], "it was read too late"
    clock.pause(ago_s=0)
    clock.history.add_memory([page(WORKER, 1 << 20)])
    clock.passed_s = SPAN_S - 1
    assert len(clock.history.pauses()) == len(clock.history.memory()) == 1
    clock.passed_s = SPAN_S + 1
    assert clock.history.pauses() == clock.history.memory() == []


def test_many_pauses_push_out_the_oldest_of_their_kind_alone(clock: Clock) -> None:
    clock.pause(ago_s=100)
    for _ in range(KEPT_PAUSES + 5):
        clock.pause(generation=0)
    pauses = read(clock.history.pauses())
    assert len(pauses) == KEPT_PAUSES + 1
    assert pauses[0][3] == 2
    for _ in range(KEPT_PAUSES):
        clock.pause()
    pauses = read(clock.history.pauses())
    assert len(pauses) == 2 * KEPT_PAUSES
    assert EPOCH - 100 not in [pause[1] for pause in pauses]


def test_what_was_seen_is_not_told_again(clock: Clock) -> None:
    clock.pause(generation=0)
    clock.pause()
    seen = clock.history.sequence
    assert clock.history.pauses(seen) == clock.history.memory(seen) == []
    clock.pause(ago_s=3)
    clock.history.add_memory([page(WORKER, 1 << 20)])
    clock.pause(generation=1, ago_s=2)
    assert [pause[3] for pause in read(clock.history.pauses(seen))] == [2, 1]
    assert len(clock.history.memory(seen)) == 1
    assert len(clock.history.pauses()) == 4


def test_memory_is_told_of_each_living_process(clock: Clock) -> None:
    history = clock.history
    history.add_memory([page(WORKER, 3 << 19), page(CORE, None)])
    history.add_memory([page(CORE, 1 << 30)])
    history.add_memory([page(CORE, 1 << 30, alive=False)])
    assert read(history.memory()) == [[EPOCH, [1.5]], [EPOCH, [None, 1024.0]]]
    for _ in range(KEPT_MEMORY + 5):
        history.add_memory([page(WORKER, 1 << 20)])
    assert len(history.memory()) == KEPT_MEMORY


def test_names_of_pages_that_nobody_can_have_are_bounded(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MAXIMUM_PLACES", 3)
    for rank in range(5):
        clock.pause(Identity(("worker",), 0, rank, f"w{rank}"))
    clock.pause(Identity(("worker",), 0, 1, "w1"))
    assert len(clock.history.places) == 3
    assert [pause[0] for pause in read(clock.history.pauses())] == [0, 1, 2, 1]


def test_two_histories_do_not_take_each_other_for_the_same() -> None:
    assert History().instance != History().instance
