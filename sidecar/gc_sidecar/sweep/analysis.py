"""What a sweep's samples say: outliers, what caused each, the ladder of full collections, memory.

A measurement is one token of one request: how long the first took from the sending on, and any other from the one
before. Its coordinate is the point and which of the two it is; outliers are held against the coordinate's median.
"""

from __future__ import annotations

import bisect
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gc_sidecar.sweep.journal import BlockRecord, Memory, Pause
from gc_sidecar.sweep.plan import Point

FIRST, NEXT = "first token", "next token"
# A measurement that took more than so many times its coordinate's median is an outlier.
OUTLIER = 3.0
# Pauses caused an outlier where they cover at least this share of what it took beyond the median.
CAUSED = 0.5
# Dates of pauses are told to the millisecond.
CLOCK_S = 0.001
NOT_GC, CLIENT = "something else", "this client's own GC"
# A ladder has at least so many rungs, and its gaps grow by a ratio in this range.
LEAST_RUNGS = 4
LADDER_RATIOS = (1.15, 1.35)
MOSTLY = 0.75
# Tokens that came in so small a part of the mean time came in a burst, and so many of them make a doubt.
BURST, BURSTS = 0.1, 0.1


@dataclass(frozen=True)
class Measurement:
    """One token. `index` counts the measurements of its policy; `started_s` is a date."""

    policy: str
    block: int
    index: int
    point: Point
    kind: str
    started_s: float
    duration_s: float


@dataclass(frozen=True)
class Outlier:
    """A measurement far beyond its coordinate's median, and the process whose pauses caused it."""

    measurement: Measurement
    median_s: float
    cause: str


@dataclass(frozen=True)
class Ladder:
    """Full collections of one process in a row: at which measurements, the ratio by which their gaps grow from
    one to the next (geometric mean), and the share of gaps that are longer than the one before."""

    process: str
    indices: tuple[int, ...]
    pauses_s: tuple[float, ...]
    ratio: float
    grown: float

    @property
    def is_one(self) -> bool:
        """Whether it is CPython's: gaps that grow as its 25 % rule has it."""
        return LADDER_RATIOS[0] <= self.ratio <= LADDER_RATIOS[1] and self.grown >= MOSTLY


@dataclass(frozen=True)
class PolicyResult:
    """Everything about one policy. Pauses are the automatic ones while something was measured; lengths in seconds.

    Blocks that were disturbed are named and count for nothing; of nothing the lengths of measurements are None.
    `pause_count` is of pauses of any length and trigger, in the whole of the blocks. `together` is how many tokens
    came along with another, and are no measurement of their own.
    """

    policy: str
    measurements: tuple[Measurement, ...]
    outliers: tuple[Outlier, ...]
    quantiles_s: dict[str, float | None]
    longest_s: float | None
    pauses: tuple[Pause, ...]
    pause_count: int
    longest_pause_s: float
    lost_pauses: int
    growth_bytes: int | None
    memory: tuple[tuple[Memory, ...], ...]
    ladder: Ladder | None
    disturbed: tuple[str, ...]
    doubts: tuple[str, ...]
    together: int

    @property
    def causes(self) -> Counter[str]:
        """How many outliers each process, this client, or something else than GC caused."""
        return Counter(outlier.cause for outlier in self.outliers)

    @property
    def full_collections(self) -> int:
        """How many full collections CPython ran by itself."""
        return sum(pause.gc_generation == 2 for pause in self.pauses)

    @property
    def gc_outliers(self) -> int:
        """How many the engine's GC caused."""
        return sum(outlier.cause not in (NOT_GC, CLIENT) for outlier in self.outliers)


def judge(records: Iterable[BlockRecord]) -> list[PolicyResult]:
    """One result for each policy, in the order in which they first ran."""
    by_policy: dict[str, list[BlockRecord]] = {}
    for record in sorted(records, key=lambda each: each.number):
        by_policy.setdefault(record.policy, []).append(record)
    return [_judge(policy, blocks) for policy, blocks in by_policy.items()]


def _judge(policy: str, all_blocks: Sequence[BlockRecord]) -> PolicyResult:
    blocks = [block for block in all_blocks if not block.disturbances]
    measurements = tuple(_measurements(policy, blocks))
    pauses = [pause for block in blocks for pause in _pauses_in(block, _spans(block))]
    client_pauses = [pause for block in blocks for pause in block.client_pauses]
    automatic = tuple(pause for pause in pauses if pause.trigger == "auto")
    durations = sorted(each.duration_s for each in measurements)
    return PolicyResult(
        policy=policy,
        measurements=measurements,
        outliers=tuple(_outliers(measurements, pauses, client_pauses)),
        quantiles_s={
            f"p{100 * share:g}": quantile(durations, share) for share in (0.5, 0.99, 0.999)
        },
        longest_s=durations[-1] if durations else None,
        pauses=automatic,
        pause_count=sum(block.pause_count for block in blocks),
        longest_pause_s=max((pause.duration_s for pause in automatic), default=0.0),
        lost_pauses=sum(block.lost_pauses for block in blocks),
        growth_bytes=_growth_bytes(blocks),
        memory=tuple(block.memory for block in blocks),
        ladder=_longest_ladder(blocks, measurements),
        disturbed=tuple(
            f"block {block.number + 1}: {reason.code}: {reason.detail}"
            for block in all_blocks
            for reason in block.disturbances
        ),
        doubts=(
            *(
                f"block {block.number + 1}: {each.detail}"
                for block in blocks
                for each in block.doubts
            ),
            *_bursts(measurements),
            *_surplus(blocks),
        ),
        together=sum(
            sample.together for block in blocks for _, samples in block.points for sample in samples
        ),
    )


def _bursts(measurements: Sequence[Measurement]) -> list[str]:
    """A doubt where many tokens came right behind another: they had waited, and not for the engine."""
    lengths = [each.duration_s for each in measurements if each.kind == NEXT]
    if not lengths:
        return []
    short_s = BURST * statistics.fmean(lengths)
    share = sum(each < short_s for each in lengths) / len(lengths)
    if share < BURSTS:
        return []
    return [
        f"{100 * share:.0f} % of the tokens came right behind another: this client or the API server lacks CPU,"
        " and medians and outliers are theirs, not the engine's"
    ]


def _surplus(blocks: Iterable[BlockRecord]) -> list[str]:
    """A doubt where more came than the engine says it made: some of it holds no token."""
    surplus = sum(
        max(0, len(sample.tokens_s) - point.output_tokens)
        for block in blocks
        for point, samples in block.points
        for sample in samples
    )
    if not surplus:
        return []
    return [
        f"the engine sent {surplus:,} more events than it made tokens: some measurements are of no token, and"
        " which is not known"
    ]


def _growth_bytes(blocks: Iterable[BlockRecord]) -> int | None:
    grown = 0
    for block in blocks:
        before, after = block.memory[0].anonymous_bytes, block.memory[-1].anonymous_bytes
        if before is None or after is None:
            return None
        grown += after - before
    return grown


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The value below which that share of the `ordered` ones lies; None where there are none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _measurements(policy: str, blocks: Iterable[BlockRecord]) -> Iterable[Measurement]:
    found: list[tuple[float, int, Point, str, float]] = []
    for block in blocks:
        for point, samples in block.points:
            for sample in samples:
                ends = (sample.started_s, *sample.tokens_s)
                for number, (start_s, end_s) in enumerate(pairwise(ends)):
                    kind = NEXT if number else FIRST
                    date_s = start_s + block.clock_offset_s
                    found.append((date_s, block.number, point, kind, end_s - start_s))
    found.sort(key=lambda each: each[0])
    for index, (date_s, number, point, kind, duration_s) in enumerate(found):
        yield Measurement(policy, number, index, point, kind, date_s, duration_s)


def _outliers(
    measurements: Sequence[Measurement],
    engine_pauses: Sequence[Pause],
    client_pauses: Sequence[Pause],
) -> Iterable[Outlier]:
    engine, client = _Cover(engine_pauses), _Cover(client_pauses)
    both = _Cover([*engine_pauses, *client_pauses])
    by_coordinate: dict[tuple[Point, str], list[float]] = defaultdict(list)
    for each in measurements:
        by_coordinate[each.point, each.kind].append(each.duration_s)
    medians = {key: statistics.median(values) for key, values in by_coordinate.items()}
    for each in measurements:
        median_s = medians[each.point, each.kind]
        if each.duration_s <= OUTLIER * median_s:
            continue
        needed_s = CAUSED * (each.duration_s - median_s)
        start_s, end_s = each.started_s - CLOCK_S, each.started_s + each.duration_s + CLOCK_S
        own_s, engine_s = client.covered_s(start_s, end_s), engine.covered_s(start_s, end_s)
        cause = NOT_GC
        if own_s >= needed_s:
            cause = CLIENT
        elif engine_s >= needed_s or both.covered_s(start_s, end_s) >= needed_s:
            cause = CLIENT if own_s > engine_s else engine.longest_process(start_s, end_s)
        yield Outlier(each, median_s, cause)


class _Cover:
    """Pauses by their time, and how much of a stretch they cover together, those that overlap counted once."""

    def __init__(self, pauses: Sequence[Pause]) -> None:
        self._pauses = sorted(pauses, key=lambda pause: pause.started_s)
        self._starts = [pause.started_s for pause in self._pauses]
        self._longest_s = max((pause.duration_s for pause in pauses), default=0.0)

    def _within(self, start_s: float, end_s: float) -> list[Pause]:
        first = bisect.bisect_left(self._starts, start_s - self._longest_s)
        last = bisect.bisect_right(self._starts, end_s)
        return [p for p in self._pauses[first:last] if p.started_s + p.duration_s > start_s]

    def covered_s(self, start_s: float, end_s: float) -> float:
        """For how much of it at least one process paused."""
        covered_s, reached_s = 0.0, start_s
        for pause in self._within(start_s, end_s):
            pause_end_s = min(pause.started_s + pause.duration_s, end_s)
            covered_s += max(0.0, pause_end_s - max(pause.started_s, reached_s))
            reached_s = max(reached_s, pause_end_s)
        return covered_s

    def longest_process(self, start_s: float, end_s: float) -> str:
        """Whose pauses take most of it."""
        taken: Counter[str] = Counter()
        for pause in self._within(start_s, end_s):
            pause_end_s = pause.started_s + pause.duration_s
            taken[pause.process] += min(pause_end_s, end_s) - max(pause.started_s, start_s)  # type: ignore[assignment]
        return taken.most_common(1)[0][0]


def _spans(block: BlockRecord) -> list[tuple[float, float]]:
    """When something was measured, as dates: each point from its first request to its last token. Between them are
    warm-up, entering and restoring, which hold up nothing that counts."""
    return [
        (
            min(sample.started_s for sample in samples) + block.clock_offset_s,
            max(sample.tokens_s[-1] for sample in samples) + block.clock_offset_s,
        )
        for _, samples in block.points
        if samples
    ]


def _pauses_in(block: BlockRecord, spans: Sequence[tuple[float, float]]) -> list[Pause]:
    return [
        pause
        for pause in block.pauses
        if any(
            pause.started_s < end_s and pause.started_s + pause.duration_s > begin_s
            for begin_s, end_s in spans
        )
    ]


def _longest_ladder(
    blocks: Sequence[BlockRecord], measurements: Sequence[Measurement]
) -> Ladder | None:
    """The longest ladder that any process climbed in any block, or else the longest row of full collections."""
    starts = [each.started_s for each in measurements]
    ladders: list[Ladder] = []
    for block in blocks:
        by_process: dict[str, list[Pause]] = defaultdict(list)
        # Also those between two points: a ladder without one of its rungs would look like none.
        spans = _spans(block)
        whole = [(spans[0][0], spans[-1][1])] if spans else []
        for pause in _pauses_in(block, whole):
            if pause.gc_generation == 2 and pause.trigger == "auto":
                by_process[pause.process].append(pause)
        for process, pauses in by_process.items():
            if len(pauses) < LEAST_RUNGS:
                continue
            indices = tuple(bisect.bisect_right(starts, pause.started_s) - 1 for pause in pauses)
            gaps = [after - before for before, after in pairwise(indices)]
            if min(gaps) > 0:
                lengths = tuple(pause.duration_s for pause in pauses)
                grown = sum(after > before for before, after in pairwise(gaps)) / (len(gaps) - 1)
                ratio = (gaps[-1] / gaps[0]) ** (1 / (len(gaps) - 1))
                ladders.append(Ladder(process, indices, lengths, ratio, grown))
    return max(ladders, key=lambda each: (each.is_one, len(each.indices)), default=None)
