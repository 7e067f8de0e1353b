"""How long an engine's steps were held up by anything at all, by vLLM's own latency histogram.

Between two readings of vLLM's metrics: tokens that took several times as long as the typical one, and by how much.
Buckets are coarse, so what comes of it is an estimate and is called one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

INTER_TOKEN_METRIC = "vllm:inter_token_latency_seconds"
STEPS_METRIC = "vllm:iteration_tokens_total"
# A token is late when it took this many times as long as the typical one.
LATE_FACTOR = 3.0
# With fewer tokens nothing can be said.
LEAST_TOKENS = 50
# What is said from which share of the stalled time on.
SAYINGS = (
    (0.5, "mostly the server's GC"),
    (0.2, "partly the server's GC"),
    (0.0, "not the server's GC"),
)
# With so many times as much pause as stalled time the two cannot be compared; buckets are coarse.
MUCH_MORE = 2.0
# Lengths of pauses that are summed up apart: which of them make tokens late is known only at the end.
LENGTHS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
# Less stalled time than this share of the window, or than the histogram can tell, is none.
WORTH_TELLING = 0.001
WORTH_TELLING_S = 0.02


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


@dataclass(frozen=True)
class Stalled:
    """How long tokens were late, in seconds of the engine's time, and the typical time of one token."""

    stalled_s: float
    typical_s: float
    tokens: int


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
    late = [(low, high, n) for low, high, n in slices if low >= LATE_FACTOR * typical_s]
    late_s = sum(n * (_middle(low, high) - typical_s) for low, high, n in late)
    # All requests of a step wait together: what counts once for the engine counts once for each of them.
    steps = after.steps - before.steps
    together = max(1.0, tokens / steps) if steps > 0 else 1.0
    if not math.isfinite(late_s + typical_s):
        return None
    return Stalled(late_s / together, typical_s, round(tokens))


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
    stalled: Mapping[int, Stalled], late_pauses: Mapping[float, float], duration_s: float
) -> LatencyVerdict:
    """What is said of it. `stalled` is by data-parallel rank, `late_pauses` the time that pauses of at least so
    many seconds (LENGTHS_S) held up any of them."""
    if not stalled:
        return LatencyVerdict(
            f"unknown: fewer than {LEAST_TOKENS} tokens were made, or the engine does not tell"
        )
    # Ranks that run in lockstep are held up together: adding them up would count one stall for each.
    stalled_s = max(each.stalled_s for each in stalled.values())
    typical_s = max(each.typical_s for each in stalled.values())
    tokens = sum(each.tokens for each in stalled.values())
    # A pause that makes no token late explains none, and there are thousands of those.
    least_s = (LATE_FACTOR - 1) * typical_s
    length_s = max((each for each in LENGTHS_S if each <= least_s), default=LENGTHS_S[0])
    gc_s = late_pauses.get(length_s, 0.0)
    worth_s = max(WORTH_TELLING_S, WORTH_TELLING * duration_s)
    explained = None
    if gc_s > max(worth_s, MUCH_MORE * stalled_s):
        says = "unknown: GC paused for longer than tokens were late, so somewhere nobody waited for one"
    elif stalled_s < worth_s:
        says = "tokens came evenly"
    else:
        explained = min(1.0, gc_s / stalled_s)
        says = next(text for share, text in SAYINGS if explained >= share)
    return LatencyVerdict(says, stalled_s, gc_s, explained, typical_s, tokens)
