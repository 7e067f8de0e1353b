"""The engine's own latency: how much of it was stalled, and whether GC explains that."""

from __future__ import annotations

import bisect
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping

import pytest

from gc_sidecar.server.latency import (
    Latencies,
    LatencyVerdict,
    Stalled,
    latency_verdict,
    read_latencies,
    stalled_between,
)
from gc_sidecar.server.pauses import Stretch

# vLLM's own.
BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip


def exposition(gaps: Mapping[int, Iterable[float]], steps: Mapping[int, int] | None = None) -> str:
    """What vLLM shows after tokens that came after `gaps`, by engine."""
    lines = [
        'vllm:num_requests_running{engine="0",model_name="a b"} 3.0',
        "# HELP vllm:inter_token_latency_seconds Histogram of inter-token latency in seconds.",
        "# TYPE vllm:inter_token_latency_seconds histogram",
    ]
    for engine, of_engine in gaps.items():
        labels = f'engine="{engine}",model_name="a b"'
        counts = [0] * (len(BOUNDS) + 1)
        total = 0.0
        for gap in of_engine:
            counts[bisect.bisect_left(BOUNDS, gap)] += 1
            total += gap
        below = 0
        for bound, count in zip((*BOUNDS, math.inf), counts, strict=True):
            below += count
            told = "+Inf" if math.isinf(bound) else str(bound)
            lines.append(
                f'vllm:inter_token_latency_seconds_bucket{{{labels},le="{told}"}} {below}.0'
            )
        lines.append(f"vllm:inter_token_latency_seconds_sum{{{labels}}} {total}")
        lines.append(f"vllm:inter_token_latency_seconds_count{{{labels}}} {below}.0")
        lines.append(f"vllm:inter_token_latency_seconds_created{{{labels}}} 1.7e9")
    lines += ["# TYPE vllm:iteration_tokens_total histogram"]
    for engine, count in (steps or {}).items():
        labels = f'engine="{engine}",model_name="a b"'
        lines.append(f'vllm:iteration_tokens_total_bucket{{{labels},le="+Inf"}} {count}.0')
        lines.append(f"vllm:iteration_tokens_total_sum{{{labels}}} 9999.0")
        lines.append(f"vllm:iteration_tokens_total_count{{{labels}}} {count}.0")
    return "\n".join(lines) + "\n"


def latencies(gaps: Iterable[float], steps: int = 0) -> Latencies:
    return read_latencies(exposition({0: gaps}, {0: steps} if steps else {}))


NOTHING = latencies(())


def stalled(before: Latencies, after: Latencies) -> Stalled:
    found = stalled_between(before, after)
    assert list(found) == [0]
    return found[0]


def test_the_typical_time_is_the_median_by_interpolation() -> None:
    # 25 below 10 ms, 75 in (10, 25] ms: the 50th of 100 is a third into the second bucket.
    found = stalled(NOTHING, latencies([0.005] * 25 + [0.02] * 75, 100))
    assert found.typical_s == pytest.approx(0.015)
    assert found.tokens == 100
    assert found.stalled_s == 0


def test_only_what_came_between_the_two_readings_counts() -> None:
    before = [0.005] * 500 + [30.0] * 10
    found = stalled(latencies(before, 510), latencies([*before, *[0.02] * 60], 570))
    assert (found.tokens, found.stalled_s) == (60, 0)
    assert found.typical_s == pytest.approx(0.0175)


@pytest.mark.parametrize("requests", [1, 8])
def test_one_long_gap_is_one_stall_however_many_requests_wait(requests: int) -> None:
    gaps = [0.02] * (requests * 400) + [0.9] * requests
    found = stalled(NOTHING, latencies(gaps, 401))
    assert found.stalled_s == pytest.approx(0.88, rel=0.15)


def test_eight_requests_tell_what_one_tells() -> None:
    one = stalled(NOTHING, latencies([0.02] * 400 + [3.0], 401))
    eight = stalled(NOTHING, latencies([0.02] * 3200 + [3.0] * 8, 401))
    assert eight.stalled_s == pytest.approx(one.stalled_s)


def test_without_steps_each_late_token_counts_for_itself() -> None:
    found = stalled(NOTHING, latencies([0.02] * 800 + [3.0] * 2))
    assert found.stalled_s == pytest.approx(2 * math.sqrt(2.5 * 5.0), rel=0.02)


def test_tokens_beyond_the_last_bucket_are_late_by_at_least_its_bound() -> None:
    found = stalled(NOTHING, latencies([0.02] * 100 + [500.0], 101))
    assert found.stalled_s == pytest.approx(80, abs=1)


def test_an_engine_whose_tokens_all_fall_beyond_has_its_last_bound_as_typical() -> None:
    found = stalled(NOTHING, latencies([500.0] * 60, 60))
    assert (found.typical_s, found.stalled_s) == (80.0, 0)


def test_with_too_few_tokens_nothing_is_said() -> None:
    assert stalled_between(NOTHING, latencies([0.02] * 49, 49)) == {}
    assert stalled_between(NOTHING, latencies([0.02] * 50, 50)) != {}
    assert stalled_between(NOTHING, NOTHING) == {}


def test_an_engine_that_began_at_zero_again_is_unknown() -> None:
    before = latencies([0.02] * 1000, 1000)
    assert stalled_between(before, latencies([0.02] * 100, 100)) == {}
    # More of them in all, but fewer short ones.
    assert stalled_between(before, latencies([0.02] * 100 + [3.0] * 1000, 1100)) == {}


def test_each_data_parallel_engine_is_told_by_itself() -> None:
    before = read_latencies(exposition({0: [], 1: [], 3: []}, {0: 0, 1: 0, 3: 0}))
    gaps = {0: [0.02] * 100, 1: [0.02] * 100 + [3.0], 2: [0.02] * 100, 3: [0.02] * 3}
    after = read_latencies(exposition(gaps, {0: 100, 1: 101, 2: 100, 3: 3}))
    found = stalled_between(before, after)
    assert list(found) == [0, 1], "2 was not there before, 3 has too few"
    assert found[0].stalled_s == 0
    assert found[1].stalled_s > 2


def test_several_api_servers_or_models_of_one_engine_add_up() -> None:
    text = exposition({0: [0.02] * 30}, {0: 30})
    other = text.replace('model_name="a b"', 'model_name="c"')
    found = stalled(NOTHING, read_latencies(text + other))
    assert found.tokens == 60


def test_other_buckets_than_before_are_another_engine() -> None:
    text = exposition({0: [0.02] * 100}, {0: 100})
    assert stalled_between(NOTHING, read_latencies(text.replace('"0.01"', '"0.011"'))) == {}
    without = "\n".join(line for line in text.splitlines() if '"0.01"' not in line)
    assert stalled_between(NOTHING, read_latencies(without)) == {}


@pytest.mark.parametrize("text", ["", "nothing here\n", "vllm:num_requests_running 3\n"])
def test_an_exposition_without_latency_has_none(text: str) -> None:
    assert read_latencies(text) == {}


BUCKET = 'vllm:inter_token_latency_seconds_bucket{engine="0",le='


@pytest.mark.parametrize(
    "lines",
    [
        f'{BUCKET}"0.01"}} NaN\n{BUCKET}"+Inf"}} NaN',
        f'{BUCKET}"0.01"}} 5\n{BUCKET}"+Inf"}} +Inf',
        f'{BUCKET}"nan"}} 5\n{BUCKET}"+Inf"}} 9',
        f'{BUCKET}"-1"}} 5\n{BUCKET}"+Inf"}} 9',
        f'{BUCKET}"0.01"}} 5\n{BUCKET}"0.1"}} 9',
        'vllm:inter_token_latency_seconds_bucket{engine="0"} 5',
        'vllm:inter_token_latency_seconds_bucket{engine="x",le="+Inf"} 5',
        'vllm:inter_token_latency_seconds_bucket{engine="-1",le="+Inf"} 5',
    ],
)
def test_what_is_no_histogram_is_passed_over(lines: str) -> None:
    assert read_latencies(lines + "\n") == {}


def test_whatever_an_engine_shows_can_be_reckoned_with_or_is_refused() -> None:
    chance = random.Random(5)
    plausible = ["1e-300", "0.5", "60", "1e300", "1e308"]
    odd = ["NaN", "+Inf", "-Inf", "-7", "0"]
    known = 0
    for _ in range(3000):
        numbers = plausible if chance.random() < 0.7 else [*plausible, *odd]
        bounds = [*chance.choices(numbers, k=3), "+Inf"]
        readings = []
        for _ in range(2):
            counts = sorted(chance.choices(numbers, k=4), key=float)
            lines = [f'{BUCKET}"{b}"}} {n}' for b, n in zip(bounds, counts, strict=True)]
            lines.append(f"vllm:iteration_tokens_total_count {chance.choice(numbers)}")
            readings.append(read_latencies("\n".join(lines) + "\n"))
        found = stalled_between(*readings)
        known += len(found)
        for each in found.values():
            assert math.isfinite(each.stalled_s)
            assert math.isfinite(each.typical_s)
    assert known > 20


@pytest.mark.parametrize("text", [f"{BUCKET}", f'{BUCKET}"0.1"}} five\n', f'{BUCKET}"x"}} 5\n'])
def test_what_is_no_exposition_is_an_error_of_one_kind(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_latencies(text)


# --- what is said of it ---


STEP_S = 0.006


def verdict_on(
    gaps: Mapping[int, Iterable[float]], steps: int, pauses: Mapping[int, list[float]]
) -> LatencyVerdict:
    """The verdict where the tokens of each rank came after `gaps`, in so many steps, and pauses were so long."""
    before = read_latencies(exposition({rank: () for rank in gaps}, dict.fromkeys(gaps, 0)))
    after = read_latencies(exposition(gaps, dict.fromkeys(gaps, steps)))
    stretches = {
        rank: Counter(Stretch(each, each, each) for each in lengths)
        for rank, lengths in pauses.items()
    }
    return latency_verdict(stalled_between(before, after), stretches, duration_s=10.0)


def run(requests: int, tokens: int, *late: float) -> list[float]:
    """The gaps of so many requests at a time: each waits for each of `late`."""
    return [STEP_S] * (requests * tokens) + list(late) * requests


# What was done to a real engine, and what must be said: how many requests ran was not the same all the time.
@pytest.mark.parametrize(
    ("gaps", "steps", "pause_s", "says"),
    [
        (run(20, 200, 0.578), 201, [0.57], "mostly the server's GC"),
        (run(20, 200, 0.578), 201, [], "not the server's GC"),
        # Most tokens were made while few ran, and many waited; or the other way round.
        (run(1, 500) + run(20, 60, 0.411), 561, [0.403], "perhaps the server's GC"),
        (run(20, 200) + run(1, 150, 0.411), 351, [0.405], "mostly the server's GC"),
        (run(20, 200) + run(1, 150, 0.404), 351, [], "not the server's GC"),
        (run(20, 200) + run(1, 150, 0.407), 351, [0.04], "not the server's GC"),
        # A pause that is longer than any late token was while nobody waited.
        (run(4, 200, 0.49), 201, [0.604], "not the server's GC"),
        (run(4, 200, 0.49), 201, [3.0], "unknown: GC paused for longer than tokens were late"),
        (run(4, 200), 200, [3.0], "unknown: GC paused for longer than tokens were late"),
        (run(4, 200), 200, [0.001] * 500, "tokens came evenly"),
        # One of three stalls of the same length, and one of seven.
        (run(4, 200, 0.45, 0.45, 0.45), 203, [0.45], "partly the server's GC"),
        (run(4, 200, *[0.45] * 7), 207, [0.45], "perhaps the server's GC"),
        # One that is as long as they, and very much that was while nobody waited.
        (run(4, 200, *[0.06] * 25), 225, [0.06, 3.0], "perhaps the server's GC"),
        (run(4, 200, 1.5, 1.5), 202, [0.06] * 100, "not the server's GC"),
        # One that explains most of its gap, and none of a far longer one.
        (run(4, 200, 0.5), 201, [0.3], "mostly the server's GC"),
        (run(4, 200, 0.5, 4.0), 202, [0.45], "not the server's GC"),
    ],
)
def test_the_verdict_says_what_the_lengths_of_late_tokens_and_of_pauses_allow(
    gaps: list[float], steps: int, pause_s: list[float], says: str
) -> None:
    verdict = verdict_on({0: gaps}, steps, {0: pause_s})
    assert verdict.says.startswith(says), verdict
    known = says.startswith(("mostly", "partly", "not"))
    assert (verdict.explained is not None) == known
    assert verdict.tokens == len(gaps)


@pytest.mark.parametrize(
    ("typical_s", "gc_s"), [(0.004, 9.5), (0.0125, 9.5), (0.03, 9.0), (0.1, 5.0)]
)
def test_pauses_too_short_to_make_a_token_late_explain_nothing(
    typical_s: float, gc_s: float
) -> None:
    pauses = {
        0: {
            Stretch(length_s, length_s, length_s): count
            for length_s, count in ((0.001, 10_000), (0.05, 10), (0.1, 40), (5.0, 1))
        }
    }
    verdict = latency_verdict({0: Stalled((), typical_s, 500)}, pauses, duration_s=60.0)
    assert verdict.gc_s == pytest.approx(gc_s)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_ranks_that_wait_for_one_another_are_held_up_once(ranks: int) -> None:
    gaps = {rank: run(2, 100, 0.5) for rank in range(ranks)}
    verdict = verdict_on(gaps, 101, {0: [0.45]})
    assert verdict.says == "mostly the server's GC"
    assert verdict.stalled_s == pytest.approx(0.44, rel=0.1)
    assert verdict.tokens == ranks * 202


def test_many_short_pauses_in_a_row_make_tokens_late_like_a_long_one() -> None:
    # In one of them no step comes in between, in the other one some do.
    for gaps in (run(4, 100, 0.8), run(4, 100, *[0.09] * 9)):
        before = read_latencies(exposition({0: ()}, {0: 0}))
        after = read_latencies(exposition({0: gaps}, {0: len(gaps) // 4}))
        stretches = {Stretch(0.81, 0.8, 0.02): 1}
        verdict = latency_verdict(stalled_between(before, after), {0: stretches}, duration_s=10.0)
        assert verdict.says == "mostly the server's GC"


def test_many_short_pauses_in_a_row_do_not_explain_what_they_far_outlast() -> None:
    after = read_latencies(exposition({0: run(4, 100, 2.0)}, {0: 101}))
    before = read_latencies(exposition({0: ()}, {0: 0}))
    pauses = {0: {Stretch(30.0, 21.0, 0.005): 1}}
    verdict = latency_verdict(stalled_between(before, after), pauses, duration_s=60.0)
    assert verdict.says.startswith("perhaps")


@pytest.mark.parametrize("duration_s", [10.0, 3_600.0, 86_400.0])
def test_a_single_long_stall_is_told_however_long_the_window(duration_s: float) -> None:
    after = read_latencies(exposition({0: run(1, 1000, 2.0)}, {0: 1001}))
    before = read_latencies(exposition({0: ()}, {0: 0}))
    stalled = stalled_between(before, after)
    pauses = {0: {Stretch(1.9, 1.9, 1.9): 1}}
    assert latency_verdict(stalled, pauses, duration_s).says == "mostly the server's GC"
    assert latency_verdict(stalled, {}, duration_s).says == "not the server's GC"


def test_a_pause_of_another_rank_may_have_held_up_this_one_or_not() -> None:
    gaps = {0: run(1, 100, 0.49), 1: run(1, 100)}
    verdict = verdict_on(gaps, 101, {1: [0.5]})
    assert verdict.says.startswith("perhaps the server's GC")


def test_without_latency_it_is_unknown_and_no_number_is_made_up() -> None:
    verdict = latency_verdict({}, {0: {Stretch(3.0, 3.0, 3.0): 1}}, duration_s=60.0)
    assert verdict.says.startswith("unknown")
    assert (verdict.stalled_s, verdict.gc_s, verdict.explained) == (None, None, None)
