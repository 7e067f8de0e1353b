"""What a sweep says of its samples: which are outliers, and what each of them was."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import accumulate

import pytest

from gc_sidecar.sweep.analysis import CLIENT, FIRST, NOT_GC, PolicyResult, judge, quantile
from gc_sidecar.sweep.driver import Sample
from gc_sidecar.sweep.journal import Reason
from gc_sidecar.sweep.reporting import document, show
from tests.unit.sweep.samples import MEBIBYTE, POINT, STEP_S, block, pause, sample

STALL_S = 0.1


def judged(*args: object, **more: object) -> PolicyResult:
    (result,) = judge([block(*args, **more)])  # type: ignore[arg-type]
    return result


def test_every_token_is_a_measurement_and_the_first_has_a_coordinate_of_its_own() -> None:
    result = judged([sample(0.0), sample(10.0)])
    assert len(result.measurements) == 200
    assert [each.index for each in result.measurements if each.kind == FIRST] == [0, 100]
    assert result.quantiles_s["p50"] == pytest.approx(STEP_S)
    assert result.outliers == ()


def test_an_outlier_under_a_pause_is_blamed_on_the_process_that_paused_longest() -> None:
    stalled = sample(0.0, {50: STALL_S})
    pauses = [
        pause(0.252, 0.09),
        pause(0.252, 0.02, "engine_core dp0 rank 0"),
        pause(0.1, 0.0006, "engine_core dp0 rank 0", gc_generation=1),
    ]
    result = judged([stalled], pauses)
    (outlier,) = result.outliers
    assert outlier.cause == "worker dp0 rank 1"
    assert outlier.measurement.index == 50
    assert outlier.measurement.duration_s == pytest.approx(STEP_S + STALL_S)
    assert outlier.median_s == pytest.approx(STEP_S)
    assert result.gc_outliers == 1
    assert (result.pause_count, result.longest_pause_s) == (3, 0.09)


def test_an_outlier_that_a_pause_only_touches_is_not_blamed_on_it() -> None:
    result = judged([sample(0.0, {50: STALL_S})], [pause(0.26, 0.01), pause(0.9, 0.2)])
    assert [outlier.cause for outlier in result.outliers] == [NOT_GC]


def test_pauses_of_several_processes_at_the_same_time_count_once() -> None:
    pauses = [pause(0.26 + i / 1000, 0.03, f"worker dp0 rank {i}") for i in range(4)]
    result = judged([sample(0.0, {50: STALL_S})], pauses)
    assert [outlier.cause for outlier in result.outliers] == [NOT_GC], "33 ms of 100, not 120"


def test_an_outlier_of_this_clients_own_gc_is_not_the_engines() -> None:
    result = judged(
        [sample(0.0, {50: STALL_S})], [pause(0.252, 0.1)], [pause(0.252, 0.1, "this client")]
    )
    assert [outlier.cause for outlier in result.outliers] == [CLIENT]
    assert result.gc_outliers == 0


def test_pauses_of_entering_and_restoring_are_outside() -> None:
    before, after, inside = pause(-1.0, 0.5), pause(2.0, 0.5), pause(0.2, 0.01)
    asked_for = pause(0.1, 0.3, trigger="maintain")
    result = judged([sample(0.0)], [before, asked_for, inside, after])
    assert result.pauses == (inside,), "and what somebody asked for is nobody's fate"
    assert result.longest_pause_s == 0.01


def test_blocks_of_a_policy_are_judged_together_and_growth_adds_up() -> None:
    records = [
        block([sample(0.0)], policy="off", number=0),
        block([sample(10.0)], policy="freeze", number=1, growth_bytes=5 * MEBIBYTE),
        block([sample(20.0)], policy="off", number=2, lost=7),
    ]
    off, freeze = judge(records)
    assert (off.policy, len(off.measurements), off.growth_bytes) == ("off", 200, 2 * MEBIBYTE)
    assert (freeze.policy, freeze.growth_bytes) == ("freeze", 5 * MEBIBYTE)
    assert (off.lost_pauses, freeze.lost_pauses) == (7, 0)


def test_a_block_in_which_something_else_happened_is_named() -> None:
    ended = Reason("policy_ended", "worker left freeze")
    stalled, pauses = sample(0.0, {50: STALL_S}), [pause(0.252, 0.1)]
    records = [
        block([sample(9.0)], number=2),
        block([stalled], pauses, number=3, disturbances=[ended], lost=4, growth_bytes=1),
    ]
    (result,) = judge(records)
    assert result.disturbed == ("block 4: policy_ended: worker left freeze",)
    assert "LEFT OUT, NOT VALID: block 4: policy_ended" in show([result])
    # And counts for nothing.
    assert replace(result, disturbed=()) == judge(records[:1])[0]
    (nothing,) = judge(records[1:])
    assert (nothing.measurements, nothing.growth_bytes) == ((), 0)
    assert "LEFT OUT" in show([nothing])


def test_a_policy_of_which_nothing_was_measured_has_no_result() -> None:
    ended = Reason("policy_ended", "worker left freeze")
    (nothing,) = judge([block([sample(0.0)], policy="freeze", disturbances=[ended])])
    text = show([nothing])
    assert text.splitlines()[1].split() == ["freeze", "0", *["-"] * 9]
    assert "freeze: nothing measured" in text
    assert "no outlier" not in text
    (row,) = document([nothing], {})["policies"]
    assert (row["measurements"], row["longest_s"], row["p99_s"]) == (0, None, None)


def test_a_pause_between_two_points_or_in_a_warm_up_counts_for_nothing() -> None:
    between, inside = pause(0.9, 0.3), pause(0.2, 0.01)
    record = block([sample(0.0)], [inside, between])
    points = (*record.points, (POINT, (sample(2.0),)))
    (result,) = judge([replace(record, points=points)])
    assert result.pauses == (inside,)
    assert (result.full_collections, result.longest_pause_s) == (1, 0.01)


def test_a_doubt_is_told_and_the_block_counts() -> None:
    result = judged([sample(0.0)], doubts=[Reason("other_engine", "hardly any")])
    assert len(result.measurements) == 100
    assert "IN DOUBT: block 1: hardly any" in show([result])


def test_tokens_that_come_in_bursts_are_no_measure_of_the_engine() -> None:
    times = [step * 0.05 + number * 0.00002 for step in range(1, 11) for number in range(10)]
    result = judged([Sample(0.0, tuple(times))])
    assert "91 % of the tokens came right behind another" in " ".join(result.doubts)
    assert judged([sample(0.0)]).doubts == ()


def test_a_sweep_of_many_tokens_is_judged_in_time_that_grows_with_them_alone() -> None:
    many = [sample(10.0 * number) for number in range(600)]
    began_s = time.process_time()
    (result,) = judge([block(many)])
    assert len(result.measurements) == 60_000
    assert time.process_time() - began_s < 10


def test_more_events_than_tokens_are_a_doubt() -> None:
    result = judged([sample(0.0, tokens=102), sample(5.0)])
    assert "sent 2 more events than it made tokens" in " ".join(result.doubts)


@pytest.mark.parametrize(
    ("stalls", "told"), [({50: 0.1}, "1 outlier:"), ({40: 0.1, 50: 0.1}, "2 outliers:")]
)
def test_outliers_are_counted_in_plain_english(stalls: dict[int, float], told: str) -> None:
    assert f"off: {told}" in show([judged([sample(0.0, stalls)])])


def test_a_stall_that_engine_and_client_caused_together_is_of_who_took_more_of_it() -> None:
    stalled = sample(0.0, {50: STALL_S})
    own = [pause(0.300, 0.04, "this client")]
    result = judged([stalled], [pause(0.255, 0.045)], own)
    assert [outlier.cause for outlier in result.outliers] == ["worker dp0 rank 1"]
    result = judged([stalled], [pause(0.255, 0.03)], own)
    assert [outlier.cause for outlier in result.outliers] == [CLIENT]


def test_memory_that_is_not_known_is_no_growth() -> None:
    record = block([sample(0.0)])
    unknown = replace(record.memory[1], anonymous_bytes=None)
    (result,) = judge([replace(record, memory=(record.memory[0], unknown))])
    assert result.growth_bytes is None
    assert "100" in show([result])


@pytest.mark.parametrize(("ratio", "is_one"), [(1.25, True), (1.0, False), (1.6, False)])
def test_a_ladder_is_full_collections_whose_gaps_grow_as_cpythons_rule_has_it(
    ratio: float, is_one: bool
) -> None:
    gaps_s = [0.2 * ratio**rung for rung in range(6)]
    pauses = [pause(start_s, 0.001) for start_s in accumulate(gaps_s)]
    result = judged([sample(0.0, tokens=2_000)], pauses)
    assert result.ladder is not None
    assert len(result.ladder.indices) == 6
    assert result.ladder.ratio == pytest.approx(ratio, rel=0.05)
    assert result.ladder.is_one is is_one


def test_a_rung_between_two_points_is_one_of_its_ladder() -> None:
    starts_s = [*accumulate(0.2 * 1.25**rung for rung in range(6))]
    record = block([sample(0.0, tokens=300)], [pause(start_s, 0.001) for start_s in starts_s])
    # The first point ends at 1.5 s, between the fifth rung and the sixth.
    assert starts_s[4] > 1.5 < starts_s[5]
    points = (*record.points, (POINT, (sample(1.75, tokens=300),)))
    (result,) = judge([replace(record, points=points)])
    assert result.ladder is not None
    assert len(result.ladder.indices) == 6
    assert result.full_collections == 5


def test_gaps_that_go_up_and_down_are_no_ladder() -> None:
    starts_s = [0.5, 1.0, 2.0, 2.5, 3.0, 4.25]
    result = judged([sample(0.0, tokens=2_000)], [pause(start_s, 0.001) for start_s in starts_s])
    assert result.ladder is not None
    assert not result.ladder.is_one, result.ladder


def test_a_ladder_is_found_beside_a_process_that_collects_more_often() -> None:
    ladder = [pause(at_s, 0.001) for at_s in accumulate(0.2 * 1.25**rung for rung in range(6))]
    even = [pause(0.2 * n, 0.001, "api_server dp0 rank 0") for n in range(1, 12)]
    result = judged([sample(0.0, tokens=2_000)], [*ladder, *even])
    assert result.ladder is not None
    assert (result.ladder.process, result.ladder.is_one) == ("worker dp0 rank 1", True)


def test_a_few_full_collections_are_no_ladder() -> None:
    assert judged([sample(0.0)], [pause(0.1, 0.001), pause(0.3, 0.001)]).ladder is None


def test_quantiles_are_measured_values() -> None:
    values = [float(i) for i in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile(values, 1.0)) == (51, 100, 100)
    assert quantile([], 0.5) is None
