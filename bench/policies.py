"""Our policies beside CPython's own GC and beside what people do instead, in one run on heaps of several sizes.

Each is measured in a fresh process, in rounds over all of them, so that whatever else the machine does hits all
alike. `make bench` prints the tables, and whether the limits hold.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path

from bench.peers import PEERS, STEPS_PER_COLLECT, TICKS_PER_RUN
from bench.policy_subject import BUDGET_MS, FREEZE_INTERVAL_S, OURS, Outcome, Task
from bench.progress import show_progress
from scripts.agent_tests import find_python

REPOSITORY = Path(__file__).resolve().parents[1]

MAXIMUM_PAUSE_MS = 7.5
MAXIMUM_GROWTH = 1.15
MINIMUM_RATE = 0.98

OFF, DISABLED, FREEZE, BUDGET = "off", "gc.disable()", "freeze", "budget"
POLICIES = (OFF, *OURS, *(name for name in PEERS if name != OFF))

# A step is as an embedded engine's if nobody says otherwise: 5 ms, here all of them work.
RETAIN, GARBAGE_OBJECTS = 100, 100
STEPS_TO_RUNG = 200
OTHER_VERSIONS = ("3.13",)


@dataclass(frozen=True)
class Garbage:
    """What cyclic garbage the steps make."""

    name: str
    objects: int
    lifetime_steps: int


YOUNG = Garbage("dies young (after 1 step)", GARBAGE_OBJECTS, 1)
LONG_LIVED = Garbage("lives for 300 steps", GARBAGE_OBJECTS, 300)
NONE = Garbage("none", 0, 0)


@dataclass(frozen=True)
class Scale:
    """A heap's size, in how many rounds it is measured, and the policies that are compared on it: where garbage
    dies young, and where it lives long."""

    heap_objects: int
    rounds: int
    young: tuple[str, ...]
    long_lived: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What is measured: the heaps, the steps of each process, and a step's work."""

    scales: tuple[Scale, ...]
    steps: int
    work: int


# What a heap of 10 million objects costs is to fill it.
FULL = Plan(
    (
        Scale(1_000_000, 2, POLICIES, POLICIES),
        Scale(5_000_000, 1, POLICIES, (OFF, *OURS)),
        Scale(10_000_000, 1, (OFF, *OURS, DISABLED), (BUDGET,)),
    ),
    steps=1_000,
    work=380_000,
)
# Memory tells only after many freezes, and does not mind how long a step takes.
MEMORY_POLICIES = (OFF, *OURS, DISABLED)
MEMORY = Plan((Scale(1_000_000, 1, MEMORY_POLICIES, MEMORY_POLICIES),), steps=10_000, work=20_000)
QUICK = Plan((Scale(300_000, 1, POLICIES, POLICIES),), steps=250, work=20_000)


@dataclass(frozen=True)
class Subject:
    """One process to measure; `version` is its interpreter's."""

    version: str
    heap_objects: int
    garbage: Garbage
    policy: str


@dataclass(frozen=True)
class Row:
    """What a subject measured in all of its rounds: the longest of all, percentiles over all, else medians."""

    version: str
    heap_objects: int
    garbage: str
    policy: str
    rounds: int
    longest_ms: float
    longest_cpu_ms: float
    """Of that same pause: what is missing, the machine took away."""
    longest_by_cpu_ms: float
    pauses_over: int
    longest_asked_ms: float
    longest_gen1_ms: float
    pause_p99_ms: float
    gc_percent: float
    rate: float
    """Steps per second, relative to gc.disable() in the same round; NaN where that was not measured."""
    even_rate: float
    """The same as if all processes had run equally fast and undisturbed."""
    step_p50_ms: float
    step_p99_ms: float
    step_p999_ms: float
    growth_mib: float
    growth: float
    """Relative to that of the live heap in the same round; NaN where that was not measured."""
    full_collections: int
    freezes: int


@dataclass(frozen=True)
class Verdict:
    """Whether a limit is kept, and by what."""

    limit: str
    measured: str
    kept: bool


Outcomes = dict[Subject, list[Outcome]]


# --- measuring ---


def subjects_of(scale: Scale, own: str, others: Iterable[str]) -> list[Subject]:
    """Who is measured on one heap."""
    compared = [
        (own, NONE, (DISABLED,)),
        (own, YOUNG, scale.young),
        (own, LONG_LIVED, scale.long_lived),
        *((other, YOUNG, (OFF, BUDGET)) for other in others),
    ]
    return [
        Subject(version, scale.heap_objects, garbage, policy)
        for version, garbage, policies in compared
        for policy in policies
    ]


def order_of(plan: Plan, own: str, others: Sequence[str]) -> Iterator[Subject]:
    """The subjects in the order in which they are measured. In each round another is the first."""
    for number in range(max(scale.rounds for scale in plan.scales)):
        for scale in plan.scales:
            if number < scale.rounds:
                here = subjects_of(scale, own, others)
                start = number * len(here) // scale.rounds
                yield from here[start:] + here[:start]


def measure(subject: Subject, plan: Plan, python: str) -> Outcome:
    """Run one subject."""
    task = Task(
        policy=subject.policy,
        heap_objects=subject.heap_objects,
        steps=plan.steps,
        retain=RETAIN,
        garbage=subject.garbage.objects,
        lifetime_steps=subject.garbage.lifetime_steps,
        work=plan.work,
        steps_to_rung=STEPS_TO_RUNG,
    )
    result = subprocess.run(
        [python, "-m", "bench.policy_subject", json.dumps(asdict(task))],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYTHONPATH": f"{REPOSITORY / 'sidecar'}:{REPOSITORY}",
            "PYTHONHASHSEED": "0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise RuntimeError(f"{subject} ended with {result.returncode}: {result.stderr}")
    return Outcome(**json.loads(result.stdout))


def measure_all(plan: Plan, pythons: dict[str, str], own: str) -> Outcomes:
    """Every round of every subject."""
    order = list(order_of(plan, own, [version for version in pythons if version != own]))
    outcomes: Outcomes = {subject: [] for subject in order}
    for number, subject in enumerate(order):
        outcomes[subject].append(measure(subject, plan, pythons[subject.version]))
        show_progress("subject", number + 1, len(order))
    return outcomes


# --- the figures ---


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def pauses_of(
    outcomes: Iterable[Outcome], *, automatic: bool = True, generation: int | None = None
) -> list[tuple[float, float]]:
    """How long each collection took in milliseconds, and how long its thread had the CPU meanwhile."""
    return [
        (taken_ns / 1e6, cpu_ns / 1e6)
        for outcome in outcomes
        for taken_ns, cpu_ns, of_generation, was_automatic in zip(
            outcome.pauses_ns,
            outcome.pauses_cpu_ns,
            outcome.generations,
            outcome.automatic,
            strict=True,
        )
        if bool(was_automatic) is automatic and generation in (None, of_generation)
    ]


def longest_of(pauses: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return max(pauses, default=(0.0, 0.0))


def steps_ms(outcomes: Iterable[Outcome]) -> list[float]:
    """How long each step of these took."""
    return [step_ns / 1e6 for outcome in outcomes for step_ns in outcome.steps_ns]


def ratio(
    those: Sequence[Outcome], to: Sequence[Outcome], value: Callable[[Outcome], float]
) -> float:
    """The median of the rounds' ratios; NaN where there is nothing to compare with."""
    ratios = [value(one) / value(other) for one, other in zip(those, to, strict=False)]
    return statistics.median(ratios) if ratios else float("nan")


def steps_per_s(outcome: Outcome) -> float:
    return len(outcome.steps_ns) / sum(outcome.steps_ns) * 1e9


def even_steps(outcome: Outcome) -> float:
    """Steps in the thread's own time, whose unit is a step's work: processes that do the same differ by some
    percent, and the machine takes the CPU away now and then."""
    return len(outcome.steps_ns) * outcome.work_ns / outcome.cpu_ns


def table_order(subjects: Iterable[Subject]) -> list[Subject]:
    """Those that tables show, in their order."""
    order = (YOUNG, LONG_LIVED)
    return sorted(
        (subject for subject in subjects if subject.garbage in order),
        key=lambda subject: (
            *(subject.version, subject.heap_objects),
            *(order.index(subject.garbage), POLICIES.index(subject.policy)),
        ),
    )


def disabled_of(subject: Subject) -> Subject:
    """The subject that its steps are compared with. Where nothing is collected, it makes no difference for how
    long garbage is in use."""
    return replace(subject, garbage=YOUNG, policy=DISABLED)


def live_of(subject: Subject) -> Subject:
    """The subject whose heap grows by what is kept alone."""
    return replace(subject, garbage=NONE, policy=DISABLED)


def row_of(subject: Subject, outcomes: Outcomes) -> Row:
    """The figures of one subject."""
    own = outcomes[subject]
    disabled = outcomes.get(disabled_of(subject), [])
    live = outcomes.get(live_of(subject), [])
    automatic = pauses_of(own)
    longest_ms, longest_cpu_ms = longest_of(automatic)
    steps = steps_ms(own)
    in_gc_ns = sum(sum(outcome.pauses_ns) for outcome in own)
    return Row(
        version=subject.version,
        heap_objects=subject.heap_objects,
        garbage=subject.garbage.name,
        policy=subject.policy,
        rounds=len(own),
        longest_ms=longest_ms,
        longest_cpu_ms=longest_cpu_ms,
        longest_by_cpu_ms=max((cpu_ms for _, cpu_ms in automatic), default=0.0),
        pauses_over=sum(taken_ms > MAXIMUM_PAUSE_MS for taken_ms, _ in automatic),
        longest_asked_ms=longest_of(pauses_of(own, automatic=False))[0],
        longest_gen1_ms=longest_of(pauses_of(own, generation=1))[0],
        pause_p99_ms=percentile([taken_ms for taken_ms, _ in automatic], 0.99),
        gc_percent=100 * in_gc_ns / 1e6 / sum(steps),
        rate=ratio(own, disabled, steps_per_s),
        even_rate=ratio(own, disabled, even_steps),
        step_p50_ms=percentile(steps, 0.5),
        step_p99_ms=percentile(steps, 0.99),
        step_p999_ms=percentile(steps, 0.999),
        growth_mib=statistics.median(outcome.growth_bytes for outcome in own) / 2**20,
        growth=ratio(own, live, lambda outcome: outcome.growth_bytes),
        full_collections=round(statistics.median(outcome.generations.count(2) for outcome in own)),
        freezes=round(statistics.median(outcome.freezes for outcome in own)),
    )


def rows_of(outcomes: Outcomes) -> list[Row]:
    """The figures of all subjects that tables show."""
    return [row_of(subject, outcomes) for subject in table_order(outcomes)]


# --- the verdicts ---


def judge(rows: Sequence[Row], outcomes: Outcomes, own: str) -> list[Verdict]:
    """All limits."""
    return [
        *judge_pauses(rows),
        *judge_growth(rows),
        *judge_rate(outcomes, own),
        *judge_steps(outcomes, own),
    ]


def judge_pauses(rows: Sequence[Row]) -> Iterator[Verdict]:
    """The budget is kept at every size, while CPython's own pauses grow with the heap."""
    for row in rows:
        if row.policy == BUDGET:
            yield Verdict(
                f"budget, {title(row)}: longest automatic pause at most {MAXIMUM_PAUSE_MS} ms",
                f"{row.longest_ms:.2f} ms, of which on the CPU {row.longest_cpu_ms:.2f}; "
                f"longest by CPU {row.longest_by_cpu_ms:.2f}; {row.pauses_over} over the limit",
                row.longest_ms <= MAXIMUM_PAUSE_MS,
            )
    for version in sorted({row.version for row in rows}):
        those = [
            row
            for row in rows
            if (row.version, row.policy, row.garbage) == (version, OFF, YOUNG.name)
        ]
        longest_ms = [row.longest_ms for row in sorted(those, key=lambda row: row.heap_objects)]
        if len(longest_ms) > 1:
            yield Verdict(
                f"off, CPython {version}: the longest automatic pause grows with the heap",
                ", ".join(f"{pause_ms:.0f} ms" for pause_ms in longest_ms),
                all(smaller < larger for smaller, larger in pairwise(longest_ms)),
            )


def judge_growth(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Under budget memory follows the live heap."""
    for row in rows:
        # A comparison with NaN is false: what has no live growth beside it is not judged.
        if (row.policy, row.garbage) == (BUDGET, YOUNG.name) and row.growth >= 0:
            yield Verdict(
                f"budget, {title(row)}: growth at most {MAXIMUM_GROWTH} of the live heap's",
                f"{row.growth:.3f}",
                row.growth <= MAXIMUM_GROWTH,
            )


def judge_rate(outcomes: Outcomes, own: str) -> Iterator[Verdict]:
    """Over all heaps and rounds: single processes differ by more than what is asked."""
    for garbage in (YOUNG, LONG_LIVED):
        for policy in OURS:
            pairs = [
                pair
                for subject, those in outcomes.items()
                if (subject.version, subject.garbage, subject.policy) == (own, garbage, policy)
                for pair in zip(those, outcomes.get(disabled_of(subject), []), strict=False)
            ]
            if not pairs:
                continue
            rates = [steps_per_s(one) / steps_per_s(other) for one, other in pairs]
            even = [even_steps(one) / even_steps(other) for one, other in pairs]
            yield Verdict(
                f"{policy}, garbage {garbage.name}: steps at least {MINIMUM_RATE} of {DISABLED}'s",
                f"{statistics.median(even):.3f} ({min(even):.3f} to {max(even):.3f}); as measured "
                f"{statistics.median(rates):.3f} ({min(rates):.3f} to {max(rates):.3f})",
                statistics.median(even) >= MINIMUM_RATE,
            )


def judge_steps(outcomes: Outcomes, own: str) -> Iterator[Verdict]:
    """Over all heaps, for a single process has too few steps for such a percentile."""

    def of(policy: str) -> list[Outcome]:
        return [
            outcome
            for subject, those in outcomes.items()
            if (subject.version, subject.garbage, subject.policy) == (own, YOUNG, policy)
            for outcome in those
        ]

    frozen_ms, disabled_ms = (
        percentile(steps_ms(of(policy)), 0.999) for policy in (FREEZE, DISABLED)
    )
    gen1_ms = longest_of(pauses_of(of(FREEZE), generation=1))[0]
    yield Verdict(
        f"freeze, garbage {YOUNG.name}: p99.9 step at most {DISABLED}'s and the longest gen1 pause",
        f"{frozen_ms:.2f} ms; {disabled_ms:.2f} + {gen1_ms:.2f} ms",
        frozen_ms <= disabled_ms + gen1_ms,
    )


# --- telling ---


def title(row: Row) -> str:
    return f"CPython {row.version}, {row.heap_objects:,} objects, garbage {row.garbage}"


COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("longest", lambda row: f"{row.longest_ms:.2f}"),
    ("on CPU", lambda row: f"{row.longest_cpu_ms:.2f}"),
    ("p99", lambda row: f"{row.pause_p99_ms:.2f}"),
    ("asked", lambda row: f"{row.longest_asked_ms:.1f}"),
    ("GC %", lambda row: f"{row.gc_percent:.2f}"),
    ("steps/s", lambda row: f"{row.rate:.3f}"),
    ("evenly", lambda row: f"{row.even_rate:.3f}"),
    ("p50", lambda row: f"{row.step_p50_ms:.2f}"),
    ("p99", lambda row: f"{row.step_p99_ms:.2f}"),
    ("p99.9", lambda row: f"{row.step_p999_ms:.2f}"),
    ("growth", lambda row: f"{row.growth_mib:.1f}"),
    ("/ live", lambda row: f"{row.growth:.2f}"),
    ("full", lambda row: f"{row.full_collections}"),
    ("freezes", lambda row: f"{row.freezes}"),
)
WIDTH = 9
LEGEND = f"""\
longest, on CPU, p99   automatic pauses of any GC generation, ms; what is not on the CPU, the machine took away
asked                  the longest full collection that the policy itself asked for, ms
GC %                   all collections' share of the time
steps/s, evenly        relative to {DISABLED}: as measured, and as if all had run undisturbed and equally fast
p50, p99, p99.9        steps, ms
growth, / live         of anonymous memory, MiB, and relative to what the objects that are kept take by themselves
full                   full collections, automatic or asked for"""


def print_tables(rows: Sequence[Row]) -> None:
    """A table for each interpreter, heap and garbage."""
    for name, those in groupby(rows, key=title):
        group = list(those)
        print(f"\n{name}; rounds: {group[0].rounds}")
        print(f"{'':26}" + "".join(f"{name:>{WIDTH}}" for name, _ in COLUMNS))
        for row in group:
            cells = (cell(row).replace("nan", "-") for _, cell in COLUMNS)
            print(f"{row.policy:26}" + "".join(f"{cell:>{WIDTH}}" for cell in cells))


def print_legend(plan: Plan) -> None:
    """What was done, and what the columns mean."""
    ticks = plan.steps // TICKS_PER_RUN
    print(
        f"Each process takes {plan.steps:,} steps. A step keeps {RETAIN} objects for good and makes"
        f" {GARBAGE_OBJECTS} in cycles. The budget is {BUDGET_MS:g} ms.\n"
        f"Our freeze comes every {FREEZE_INTERVAL_S:g} s. Scaled to so short a run: the published policy's minute"
        f" is {ticks} steps, the second of\n"
        f"gc.collect() each second {STEPS_PER_COLLECT}.\n\n{LEGEND}"
    )


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    print()
    for verdict in verdicts:
        print(f"{'kept' if verdict.kept else 'NOT KEPT':9}{verdict.limit}: {verdict.measured}")


def find_pythons(own: str) -> dict[str, str]:
    """The interpreters by version, our own first."""
    found = {own: sys.executable}
    for version in OTHER_VERSIONS:
        python = find_python(version)
        if python is None:
            print(f"CPython {version} is not on this machine: NOT MEASURED on it")
        else:
            found.setdefault(version, str(python))
    return found


def main() -> int:
    """Print the tables and the verdicts; 1 where a limit is not kept."""
    parser = argparse.ArgumentParser(description="GC policies compared.")
    parser.add_argument("--quick", action="store_true", help="a smoke test: small, and soon over")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and verdicts there")
    args = parser.parse_args()
    plan = QUICK if args.quick else FULL
    own = ".".join(platform.python_version_tuple()[:2])
    started = time.monotonic()
    outcomes = measure_all(plan, find_pythons(own), own)
    took_s = time.monotonic() - started
    rows = rows_of(outcomes)
    verdicts = judge(rows, outcomes, own)
    print_legend(plan)
    print_tables(rows)
    if not args.quick:
        memory_rows = rows_of(measure_all(MEMORY, {own: sys.executable}, own))
        print(f"\n\nMemory: {MEMORY.steps:,} steps, each of them short.")
        print_tables(memory_rows)
        rows += memory_rows
        verdicts += judge_growth(memory_rows)
    print_verdicts(verdicts)
    processes = sum(len(those) for those in outcomes.values())
    print(f"\n{processes} processes in {took_s:.0f} s")
    if args.json is not None:
        told = {
            "pythons": sorted({outcome.python for those in outcomes.values() for outcome in those}),
            "plan": asdict(plan),
            "took_s": took_s,
            "rows": [asdict(row) for row in rows],
            "verdicts": [asdict(verdict) for verdict in verdicts],
        }
        args.json.write_text(json.dumps(told, indent=2) + "\n")
    # A smoke test is too short to judge by.
    return 0 if args.quick or all(verdict.kept for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
