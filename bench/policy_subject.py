"""One process under one GC policy: it fills a heap, takes a fixed number of steps, and prints what GC did to them.

bench/policies.py runs it, with whichever interpreter: the standard library and our own two packages are enough.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import sys
import threading
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from time import monotonic_ns, thread_time_ns

from bench.peers import PEERS, Peer
from gc_sidecar.embedded.heap import Heap
from gc_sidecar_agent.collection import MainThreadCollector, collect_here
from gc_sidecar_agent.collector import collector_kind
from gc_sidecar_agent.command import Command
from gc_sidecar_agent.memory import read_memory
from gc_sidecar_agent.meter import PauseMeter
from gc_sidecar_agent.page import NUMBER_INDEX
from gc_sidecar_agent.policy import OFF, Policy

BUDGET_MS = 5.0
# The shortest that it allows.
FREEZE_INTERVAL_S = 1.0
POLL_S = 0.1
OURS = ("freeze", "budget")


@dataclass(frozen=True)
class Task:
    """What a subject is to do. A step keeps `retain` objects for good, makes `garbage` objects in cycles that are
    let go `lifetime_steps` later, and counts up to `work`."""

    policy: str
    heap_objects: int
    steps: int
    retain: int
    garbage: int
    lifetime_steps: int
    work: int
    steps_to_rung: int
    """After so many steps CPython's next full collection is due at the earliest."""


@dataclass(frozen=True)
class Outcome:
    """What it measured. The four lists of pauses belong together; `automatic` is 1 where nobody asked for it."""

    python: str
    thresholds: list[int]
    steps_ns: list[int]
    cpu_ns: int
    work_ns: int
    """The thread's own time for the part of a step that is work alone, the median: how fast this process ran."""
    growth_bytes: int
    retained_objects: int
    freezes: int
    generations: list[int]
    pauses_ns: list[int]
    pauses_cpu_ns: list[int]
    automatic: list[int]


class Recorder:
    """Two GC callbacks round all others: a pause is measured as the steps feel it, our meter's part included.

    Beside the time that passed it takes the thread's own: the difference is what the machine took away. It keeps
    numbers in arrays, which GC does not track.
    """

    def __init__(self, was_asked: Callable[[], bool]) -> None:
        self.generations, self.automatic = array("q"), array("q")
        self.pauses_ns, self.pauses_cpu_ns = array("q"), array("q")
        self._was_asked = was_asked
        self._started_ns = self._started_cpu_ns = 0

    def attach(self) -> None:
        gc.callbacks.insert(0, self.begin)
        gc.callbacks.append(self.end)

    def detach(self) -> None:
        gc.callbacks.remove(self.begin)
        gc.callbacks.remove(self.end)

    def begin(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started_cpu_ns = thread_time_ns()
            self._started_ns = monotonic_ns()

    def end(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            self.pauses_ns.append(monotonic_ns() - self._started_ns)
            self.pauses_cpu_ns.append(thread_time_ns() - self._started_cpu_ns)
            self.generations.append(info["generation"])
            self.automatic.append(0 if self._was_asked() else 1)


class Ours(Peer):
    """Our policy of this name, held by the agent's own code, with a thread that polls as the agent's does."""

    def __init__(self, mode: str, steps: int) -> None:
        super().__init__(steps)
        self._mode = mode
        self._meter = PauseMeter()
        self._policy = Policy(self._meter, collector_kind())
        self._collector = MainThreadCollector(self._meter)
        self._requested = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def enter(self) -> None:
        self._meter.attach()
        budget_ms = BUDGET_MS if self._mode == "budget" else None
        command = Command(
            self._mode, "bench", 1, interval_s=FREEZE_INTERVAL_S, pause_budget_ms=budget_ms
        )
        outcome = self._policy.run(command, partial(collect_here, self._meter))
        assert outcome.ok, outcome
        self._requested = self._meter.requested_collections
        self._thread.start()

    def leave(self) -> None:
        self._end.set()
        self._thread.join()
        assert self._policy.mode == self._mode != OFF, self._policy.reason
        self.freezes = self._meter.words[NUMBER_INDEX["freezes"]]

    def was_asked(self) -> bool:
        before, self._requested = self._requested, self._meter.requested_collections
        return self._requested != before

    def _poll(self) -> None:
        while not self._end.wait(POLL_S):
            self._policy.poll(read_memory().anonymous_bytes, self._collector.collect)


def make_policy(task: Task) -> Peer:
    """The policy that `task` names."""
    if task.policy in OURS:
        return Ours(task.policy, task.steps)
    return PEERS[task.policy](task.steps)


def fill(task: Task) -> list[Heap]:
    """The heap as it is a little before CPython's next full collection, so that few steps meet one at any size:
    that comes when a quarter is new since the last one. The first heap is the one to step."""
    old = task.heap_objects * 4 // 5
    per_step = task.retain + task.garbage
    heap = Heap(task.retain, task.garbage, task.lifetime_steps)
    heap.fill(old)
    newer = Heap(max(0, old // 4 - task.steps_to_rung * per_step), 0, 0)
    gc.disable()
    newer.step()
    gc.enable()
    # As often as gen1 has to be collected before.
    for _ in range(gc.get_threshold()[2]):
        gc.collect(1)
    return [heap, newer]


def run(task: Task) -> Outcome:
    """Fill, enter the policy, step."""
    heaps = fill(task)
    heap, policy = heaps[0], make_policy(task)
    policy.enter()
    recorder = Recorder(policy.was_asked)
    # Of its full size from the start: what it holds is no growth.
    steps_ns, works_ns = array("q", [1]) * task.steps, array("q", [1]) * task.steps
    recorder.attach()
    before_bytes = read_memory().anonymous_bytes
    cpu_ns = thread_time_ns()
    for number in range(task.steps):
        started_ns = monotonic_ns()
        heap.step()
        work_started_ns = thread_time_ns()
        for _ in range(task.work):
            pass
        works_ns[number] = thread_time_ns() - work_started_ns
        policy.after_step(number + 1)
        steps_ns[number] = monotonic_ns() - started_ns
    cpu_ns = thread_time_ns() - cpu_ns
    after_bytes = read_memory().anonymous_bytes
    recorder.detach()
    policy.leave()
    assert before_bytes is not None
    assert after_bytes is not None
    return Outcome(
        python=platform.python_version(),
        thresholds=list(gc.get_threshold()),
        steps_ns=steps_ns.tolist(),
        cpu_ns=cpu_ns,
        work_ns=round(statistics.median(works_ns)),
        growth_bytes=after_bytes - before_bytes,
        retained_objects=sum(each.retained_objects for each in heaps),
        freezes=policy.freezes,
        generations=recorder.generations.tolist(),
        pauses_ns=recorder.pauses_ns.tolist(),
        pauses_cpu_ns=recorder.pauses_cpu_ns.tolist(),
        automatic=recorder.automatic.tolist(),
    )


def main() -> None:
    """Do the task that the first argument holds as JSON, and print the outcome."""
    outcome = run(Task(**json.loads(sys.argv[1])))
    print(json.dumps(asdict(outcome)), flush=True)
    # Without taking a heap of millions of objects apart first.
    os._exit(0)


if __name__ == "__main__":
    main()
