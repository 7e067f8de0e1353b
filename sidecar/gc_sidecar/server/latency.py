"""How long an engine's steps were held up by anything at all, by vLLM's own latency histogram.

Between two readings of vLLM's metrics: tokens that took several times as long as the typical one, and by how much.
Buckets are coarse, so what comes of it is an estimate and is called one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from gc_sidecar.server.pauses import Stretch

INTER_TOKEN_METRIC = "vllm:inter_token_latency_seconds"
STEPS_METRIC = "vllm:iteration_tokens_total"
# A token is late when it took this many times as long as the typical one.
LATE_FACTOR = 3.0
# With fewer tokens nothing can be said.
LEAST_TOKENS = 50
# What is said from which share of the stalled time on.
MOSTLY, PARTLY = 0.5, 0.2
# Pauses that take at least this share of a late token's time explain it, where none is longer than that, as far as
# lengths are known.
FITS, TO_WITHIN = 0.5, 1.05
# With so many times as much pause as stalled time some of it fell where nobody waited.
MUCH_MORE = 2.0
# Less stalled time than this share of the window, or than the histogram can tell, is none.
WORTH_TELLING = 0.001
WORTH_TELLING_S = 0.02
# A token that took so long is told of, however long the window.
WORTH_TELLING_ALONE_S = 0.1


@dataclass(frozen=True)
class EngineLatency:
    """What one engine (data-parallel rank) has counted so far. `buckets` are upper bound and cumulative count."""

    buckets: tuple[tuple[float, float], ...]
    steps: float

    @property
    def bounds(self) -> tuple[float, ...]:
        """The upper bounds of its buckets."""
        return tuple(bound for bound, _ in self.buckets)

    @property
    def is_histogram(self) -> bool:
        """Whether one can reckon with it."""
        return (
            bool(self.buckets)
            and self.bounds[0] > 0
            and math.isinf(self.bounds[-1])
            and all(math.isfinite(count) for _, count in self.buckets)
        )


Latencies = Mapping[int, EngineLatency]
# How often a rank was held up by each kind of stretch of pauses.
Pauses = Mapping[Stretch, int]


@dataclass(frozen=True)
class Late:
    """Tokens of one bucket that were late: how long they took, and by how much they were late in all."""

    low_s: float
    high_s: float
    late_s: float


@dataclass(frozen=True)
class Stalled:
    """The late tokens of one engine, the typical time of one, how many there were in all, and how many a step made
    on average."""

    late: tuple[Late, ...]
    typical_s: float
    tokens: int
    together: float = 1.0

    @property
    def late_s(self) -> float:
        """By how much tokens were late, all together."""
        return sum(each.late_s for each in self.late)

    @property
    def stalled_s(self) -> float:
        """How long that held up the engine: once for all tokens of a step. Right on average only; where more or
        fewer requests ran at a stall than usual, it is not."""
        return self.late_s / self.together

    def share_that_fits(self, pauses: Pauses) -> float:
        """The share of the late time that fell on tokens which took as long as one of these pauses makes them."""
        if not self.late_s:
            return 0.0
        fitting_s = sum(
            each.late_s for each in self.late if any(_fits(stretch, each) for stretch in pauses)
        )
        return fitting_s / self.late_s

    def explained_by(self, pauses: Pauses) -> float:
        """The share of the stalled time for which there are pauses of that length, each counted once."""
        left_s = {
            stretch: stretch.paused_s * count
            for stretch, count in pauses.items()
            # Of many short pauses in a row that took far longer, most did not make these tokens late.
            if stretch.paused_s <= MUCH_MORE * self.stalled_s
            or stretch.paused_s == stretch.longest_s
        }
        explained_s = 0.0
        for late in self.late:
            wanted_s = late.late_s / self.together
            for stretch in left_s:
                if _fits(stretch, late):
                    taken_s = min(wanted_s, left_s[stretch])
                    left_s[stretch] -= taken_s
                    wanted_s -= taken_s
                    explained_s += taken_s
        return explained_s / self.stalled_s if explained_s else 0.0


def _fits(stretch: Stretch, late: Late) -> bool:
    return FITS * late.low_s <= stretch.length_s and stretch.longest_s <= TO_WITHIN * late.high_s


def read_latencies(exposition: str) -> Latencies:
    """The engines in vLLM's exposition, by data-parallel rank; empty where it has no such metrics.

    Raises ValueError where it is no exposition.
    """
    buckets: dict[int, dict[float, float]] = {}
    steps: dict[int, float] = {}
    # Only their lines: the rest may be megabytes, and the parser is thorough.
    ours = "\n".join(
        line
        for line in exposition.splitlines()
        if line.startswith((INTER_TOKEN_METRIC, STEPS_METRIC))
    )
    for family in text_string_to_metric_families(ours + "\n"):
        for sample in family.samples:
            engine = sample.labels.get("engine", "0")
            if not engine.isdecimal():
                continue
            rank = int(engine)
            if sample.name == f"{INTER_TOKEN_METRIC}_bucket":
                bound = float(sample.labels.get("le", "nan"))
                counts = buckets.setdefault(rank, {})
                counts[bound] = counts.get(bound, 0.0) + sample.value
            elif sample.name == f"{STEPS_METRIC}_count":
                steps[rank] = steps.get(rank, 0.0) + sample.value
    found = {
        rank: EngineLatency(tuple(sorted(counts.items())), steps.get(rank, 0.0))
        for rank, counts in buckets.items()
    }
    return {rank: latency for rank, latency in found.items() if latency.is_histogram}


def stalled_between(before: Latencies, after: Latencies) -> dict[int, Stalled]:
    """How long each engine was held up between two readings; without those of which it cannot be said."""
    found = {}
    for rank, later in after.items():
        earlier = before.get(rank)
        if earlier is None or earlier.bounds != later.bounds:
            continue
        stalled = _stalled(earlier, later)
        if stalled is not None:
            found[rank] = stalled
    return found


def _stalled(before: EngineLatency, after: EngineLatency) -> Stalled | None:
    cumulative = [
        (bound, count - earlier)
        for (bound, count), (_, earlier) in zip(after.buckets, before.buckets, strict=True)
    ]
    tokens = cumulative[-1][1]
    slices = list(_slices(cumulative))
    if tokens < LEAST_TOKENS or any(count < 0 for _, _, count in slices):
        return None  # too few, or another engine that began at 0 again
    typical_s = _median(slices, tokens)
    late = tuple(
        Late(low, high, n * (_middle(low, high) - typical_s))
        for low, high, n in slices
        if n and low >= LATE_FACTOR * typical_s
    )
    steps = after.steps - before.steps
    together = max(1.0, tokens / steps) if steps > 0 else 1.0
    if not math.isfinite(sum(each.late_s for each in late) + typical_s + together):
        return None
    return Stalled(late, typical_s, round(tokens), together)


def _slices(cumulative: Iterable[tuple[float, float]]) -> Iterable[tuple[float, float, float]]:
    low, below = 0.0, 0.0
    for high, count in cumulative:
        yield low, high, count - below
        low, below = high, count


def _median(slices: Iterable[tuple[float, float, float]], tokens: float) -> float:
    below = 0.0
    for low, high, count in slices:
        if below + count >= tokens / 2 and count > 0:
            if math.isinf(high):
                return low
            return low + (high - low) * (tokens / 2 - below) / count
        below += count
    return 0.0


def _middle(low: float, high: float) -> float:
    return low if math.isinf(high) else math.sqrt(low * high)


# --- what is said of it ---


EVENLY = "tokens came evenly"
NOT_GC = "not the server's GC"
NOBODY_WAITED = (
    "unknown: GC paused for longer than tokens were late, so somewhere nobody waited for one"
)
PERHAPS = (
    "perhaps the server's GC: it paused for as long as tokens were late, but in another rank, or it is not known"
    " how many waited"
)


@dataclass(frozen=True)
class LatencyVerdict:
    """What vLLM's own latency says of a window: `stalled_s` by anything, `gc_s` by pauses long enough to make a
    token late, `explained` the share of the one in the other."""

    says: str
    stalled_s: float | None = None
    gc_s: float | None = None
    explained: float | None = None
    typical_s: float | None = None
    tokens: int | None = None


def latency_verdict(
    stalled: Mapping[int, Stalled], pauses: Mapping[int, Pauses], duration_s: float
) -> LatencyVerdict:
    """What is said of it; `stalled` and `pauses` are by data-parallel rank.

    How long late tokens and pauses were is known well enough to say what was not GC. That it was GC is said where
    the time agrees too: a histogram tells neither when a token was late nor how many waited together.
    """
    if not stalled:
        return LatencyVerdict(
            f"unknown: fewer than {LEAST_TOKENS} tokens were made, or the engine does not tell"
        )
    # Ranks that run in lockstep are held up together: adding them up would count one stall for each.
    stalled_s = max(each.stalled_s for each in stalled.values())
    typical_s = max(each.typical_s for each in stalled.values())
    tokens = sum(each.tokens for each in stalled.values())
    late = [late for each in stalled.values() for late in each.late]
    # A pause that makes no token late explains none, and there are thousands of those.
    gc_s = _longest_time(pauses, (LATE_FACTOR - 1) * typical_s)
    worth_s = max(WORTH_TELLING_S, WORTH_TELLING * duration_s)
    alone_s = min(worth_s, WORTH_TELLING_ALONE_S)
    worst = [rank for rank, each in stalled.items() if each.stalled_s >= stalled_s / 2]
    explained = max(stalled[rank].explained_by(pauses.get(rank, {})) for rank in worst)
    fits = max(stalled[rank].share_that_fits(of) for rank in worst for of in (*pauses.values(), {}))
    # Longer than any token took: nobody waited, or for what never came.
    unnoticed_s = _longest_time(
        pauses, max([TO_WITHIN * each.high_s for each in late], default=LATE_FACTOR * typical_s)
    )
    if stalled_s < worth_s and all(each.low_s < alone_s for each in late):
        says = EVENLY
    elif explained >= PARTLY:
        says = f"{'mostly' if explained >= MOSTLY else 'partly'} the server's GC"
    elif fits >= PARTLY:
        says = PERHAPS
    else:
        says = NOT_GC
    if says in (EVENLY, NOT_GC) and unnoticed_s > max(worth_s, MUCH_MORE * stalled_s):
        says = NOBODY_WAITED
    known = None if says in (EVENLY, NOBODY_WAITED, PERHAPS) else explained
    return LatencyVerdict(says, stalled_s, gc_s, known, typical_s, tokens)


def _longest_time(pauses: Mapping[int, Pauses], least_s: float) -> float:
    """For how long pauses that were at least so long, alone or in a row, held up the rank that they did most."""
    return max(
        (
            sum(each.paused_s * count for each, count in of.items() if each.length_s >= least_s)
            for of in pauses.values()
        ),
        default=0.0,
    )
