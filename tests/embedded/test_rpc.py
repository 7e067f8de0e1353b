"""collective_rpc as vLLM has it, its traps included: what gc-sidecar avoids must be there to be avoided."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.embedded.engine import EmbeddedEngine

RANKS = 3


FLAGS = (f"--workers={RANKS}", "--heap-objects=1000", "--dev-mode")


@pytest.fixture(scope="module")
def sound_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEngine]:
    """One that every test leaves with its replies in step."""
    with EmbeddedEngine(*FLAGS, log_path=tmp_path_factory.mktemp("sound") / "log") as running:
        yield running


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EmbeddedEngine]:
    with EmbeddedEngine(*FLAGS, log_path=tmp_path / "log") as running:
        yield running


def echoed(engine: EmbeddedEngine, value: str) -> list[str]:
    """What each rank answers when it is asked to say `value`."""
    return [reply["value"] for reply in engine.rpc("echo", [value])]


def status_of(engine: EmbeddedEngine, **body: object) -> int:
    """The status of an RPC over HTTP."""
    return engine.request("POST", "/collective_rpc", body)[0]


@pytest.mark.xdist_group("rpc")
def test_results_come_in_the_order_of_ranks(sound_engine: EmbeddedEngine) -> None:
    replies = sound_engine.rpc("echo", ["A"])
    assert replies == [{"rank": rank, "value": "A"} for rank in range(RANKS)]
    nested = {"nested": [1, None]}
    assert sound_engine.rpc("echo", [], {"value": nested})[0]["value"] == nested


@pytest.mark.xdist_group("rpc")
def test_what_is_no_dict_list_or_none_arrives_as_its_text(sound_engine: EmbeddedEngine) -> None:
    assert sound_engine.rpc("check_health") == [None] * RANKS
    assert sound_engine.rpc("__eq__", [1]) == ["NotImplemented"] * RANKS
    assert sound_engine.rpc("__hash__")[0].isdigit()
    assert "check_health" not in sound_engine.rpc("__dir__")[0], (
        "the wrapper's own names, not its worker's"
    )


def test_a_missing_method_leaves_the_replies_of_the_ranks_behind(engine: EmbeddedEngine) -> None:
    assert status_of(engine, method="nobody_has_this") == 500
    assert status_of(engine, method="echo", args=["A"]) == 500, (
        "rank 1 still answers the call before"
    )
    assert status_of(engine, method="echo", args=["B"]) == 500, "rank 2 does"
    assert echoed(engine, "C") == ["C", "B", "A"]
    assert echoed(engine, "D") == ["D", "C", "B"], "and so for ever"


def test_a_method_that_raises_in_one_rank_leaves_those_behind_it(engine: EmbeddedEngine) -> None:
    assert status_of(engine, method="fail_on", args=[1]) == 500
    assert echoed(engine, "A") == ["A", "A", "failed on 1"]
    assert echoed(engine, "B") == ["B", "B", "A"]


def test_a_call_that_times_out_leaves_its_replies(engine: EmbeddedEngine) -> None:
    assert status_of(engine, method="sleep_on", args=[0, 0.5], timeout=0.05) == 500
    assert echoed(engine, "A") == ["slept on 0"] * RANKS
    assert echoed(engine, "B") == ["A"] * RANKS


def test_steps_stay_right_when_replies_are_out_of_step(engine: EmbeddedEngine) -> None:
    assert status_of(engine, method="fail_on", args=[0]) == 500
    assert engine.complete("hello", 5) == " 1 2 3 4 5"
    assert engine.metric("embedded_steps_total") == 5


def test_with_data_parallelism_every_engine_runs_it_and_the_first_one_answers(
    tmp_path: Path,
) -> None:
    flags = ("--workers=2", "--data-parallel=2", "--heap-objects=100", "--dev-mode")
    with EmbeddedEngine(*flags, log_path=tmp_path / "log") as engine:
        pids = [reply["pid"] for reply in engine.rpc("gc_state")]
        assert pids == engine.pids("worker dp0")
        engine.rpc("stall_next_step", [0, 0.2])
        engine.complete("hello", 2)
        assert all(steps[0][2] >= 0.2e9 for steps in engine.steps()), "it ran in both"
