"""Freeze, maintain and restore in a loop, under load, on an embedded engine beside a sidecar in its own process.

`python -m tests.faults.soak --seconds 1800` prints how it goes and a table, and fails where anything grew that has
no reason to: descriptors or threads of any process, or the sidecar's memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

from tests.embedded.engine import EmbeddedEngine, run_directory
from tests.sidecar_process import SidecarProcess
from tests.vllm.real_vllm import wait_until

ENGINE_FLAGS = ("--workers=2", "--heap-objects=50000", "--retain-per-step=0", "--step-ms=10")
SIDECAR = "sidecar"
# Cycles in which pools fill, connections are made and modules are imported. What counts comes after them.
WARM_UP_CYCLES = 3
# How long a process may take to let go of what it needed for a cycle: an idle connection is kept for 5 s.
SETTLING_S = 15.0
# A cycle has a pause, so that CI does not spend its cores on it.
BETWEEN_S = 0.5
# What the sidecar remembers by design grows until it is full, so its memory may grow by that from the first third
# of the cycles to the last, and by what malloc and CPython open late.
SLACK_BYTES = 2 << 20
KEPT_PAUSES, BYTES_OF_PAUSE = 2 * 20_000, 300
# asyncio's pool of threads starts one more whenever all are busy, up to this many, and ends none.
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
OTHER_THREADS = 3


@dataclass(frozen=True)
class Memory:
    """Something of which the last so many are remembered: how many a cycle makes, and how large one is, measured
    with tracemalloc on four processes and rounded up."""

    kept: int
    a_cycle: int
    bytes_each: int


REMEMBERED = (
    Memory(kept=256, a_cycle=3, bytes_each=6_000),  # operations
    Memory(kept=256, a_cycle=1, bytes_each=10_000),  # windows
    # What pages describe, decoded: each of four processes shows something else after each of three operations.
    Memory(kept=512, a_cycle=12, bytes_each=7_000),
)


@dataclass(frozen=True)
class Sample:
    """What one process holds."""

    descriptors: int
    threads: int
    resident_bytes: int


@dataclass
class Record:
    """The samples of every process, one after each cycle that counts."""

    cycles: int = 0
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    pauses: list[int] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def table(self) -> str:
        """First, last and highest of everything, a line for each process."""
        lines = [
            f"{'PROCESS':<24}{'DESCRIPTORS':>14}{'THREADS':>12}{'ANONYMOUS MEMORY, MIB':>30}",
            f"{'':<24}{'first last max':>14}{'f l max':>12}{'first third  last third':>30}",
        ]
        for name, samples in self.samples.items():
            counts = [
                " ".join(str(each) for each in (values[0], values[-1], max(values)))
                for values in (
                    [sample.descriptors for sample in samples],
                    [sample.threads for sample in samples],
                )
            ]
            first, last = thirds(samples)
            memory = f"{first / (1 << 20):.2f}  {last / (1 << 20):.2f}"
            lines.append(f"{name:<24}{counts[0]:>14}{counts[1]:>12}{memory:>30}")
        return "\n".join(lines)


def thirds(samples: Sequence[Sample]) -> tuple[float, float]:
    """The medians of the memory in the first and in the last third."""
    resident = [sample.resident_bytes for sample in samples]
    third = max(1, len(resident) // 3)
    return statistics.median(resident[:third]), statistics.median(resident[-third:])


def sample(pid: int) -> Sample:
    """What a process holds now."""
    process = Path(f"/proc/{pid}")
    status = dict(
        line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line
    )
    return Sample(
        descriptors=len(list((process / "fd").iterdir())),
        threads=int(status["Threads"]),
        resident_bytes=int(status["RssAnon"].split()[0]) << 10,
    )


def allowed_growth(record: Record) -> float:
    """By how much the sidecar's memory may grow from the first to the last third."""
    cycles = record.cycles - record.cycles // 3
    pauses = min(record.pauses[-1] - record.pauses[0], KEPT_PAUSES)
    remembered = sum(min(each.kept, cycles * each.a_cycle) * each.bytes_each for each in REMEMBERED)
    return SLACK_BYTES + pauses * BYTES_OF_PAUSE + remembered


def soak(seconds: float, directory: Path, output: TextIO = sys.stdout) -> Record:
    """Run cycles for so long. What went wrong is in the record's complaints; an operation that fails raises."""
    with (
        run_directory() as run_dir,
        EmbeddedEngine(*ENGINE_FLAGS, run_dir=run_dir, log_path=directory / "engine.log") as engine,
        SidecarProcess(
            engine_urls=[engine.url], run_dir=run_dir, log_path=directory / "sidecar.log"
        ) as sidecar,
    ):
        status = sidecar.wait_for_coverage(4)
        pids = {SIDECAR: sidecar.pid}
        for process in engine.processes():
            pids[process.title.removeprefix("embedded ")[-24:].strip()] = process.pid
        assert {row["pid"] for row in status["processes"]} <= set(pids.values())
        record = Record(samples={name: [] for name in pids})
        for _ in range(WARM_UP_CYCLES):
            one_cycle(engine, sidecar)
        allowed = allowances({name: sample(pid) for name, pid in pids.items()})
        started = said = time.monotonic()
        while time.monotonic() - started < seconds:
            one_cycle(engine, sidecar)
            record.cycles += 1
            record.pauses.append(pauses_seen(sidecar))
            for name, now in settled(allowed, pids).items():
                record.samples[name].append(now)
                for what in ("descriptors", "threads"):
                    most, has = getattr(allowed[name], what), getattr(now, what)
                    if has > most:
                        record.complaints.append(
                            f"cycle {record.cycles}: {name} has {has} {what}, more than {most}"
                        )
            if time.monotonic() - said > max(5.0, seconds / 60):
                said = time.monotonic()
                print(progress(record, said - started, seconds), file=output, flush=True)
            if len(record.complaints) > 20:
                break
        grew = thirds(record.samples[SIDECAR])
        may_grow = allowed_growth(record)
        print(record.table(), file=output)
        print(
            f"{record.cycles} cycles in {time.monotonic() - started:.0f} s; the sidecar's memory grew by"
            f" {(grew[1] - grew[0]) / 1024:.0f} KiB, of {may_grow / 1024:.0f} that it may",
            file=output,
            flush=True,
        )
        if grew[1] - grew[0] > may_grow:
            record.complaints.append(
                f"the sidecar's memory grew by {grew[1] - grew[0]:.0f} bytes,"
                f" more than the {may_grow:.0f} that it remembers by design"
            )
        return record


def one_cycle(engine: EmbeddedEngine, sidecar: SidecarProcess) -> None:
    """A measured window with every operation in it, while completions stream. Raises AssertionError."""
    with streaming(engine):
        code, opened = sidecar.post("/gc/windows")
        assert code == 201, opened
        for path in ("/gc/freeze", "/gc/maintain", "/gc/restore"):
            code, answer = sidecar.post(path)
            assert code == 200, answer
            code, _ = sidecar.get("/metrics", parse=False)
            assert code == 200
        code, closed = sidecar.post(f"/gc/windows/{opened['window']['id']}/close")
        assert code == 200, closed
    time.sleep(BETWEEN_S)


@contextlib.contextmanager
def streaming(engine: EmbeddedEngine) -> Iterator[None]:
    """Two clients that stream one completion after the other; all of them must run to their end."""
    enough = threading.Event()

    def stream() -> None:
        while not enough.is_set():
            engine.stream_completions(1, max_tokens=8, concurrency=1)

    with ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(stream) for _ in range(2)]
        try:
            yield
        finally:
            enough.set()
        for client in clients:
            client.result()


def allowances(first: Mapping[str, Sample]) -> dict[str, Sample]:
    """What each process may hold after any cycle: what it held at first, and whoever runs on asyncio its pool."""
    return {
        name: replace(held, threads=max(held.threads, POOL_THREADS + OTHER_THREADS))
        if name == SIDECAR or name.startswith("api_server")
        else held
        for name, held in first.items()
    }


def settled(allowed: Mapping[str, Sample], pids: Mapping[str, int]) -> dict[str, Sample]:
    """The samples of all processes, once none holds more than it may, or when they had time enough."""
    now: dict[str, Sample] = {}

    def are_settled() -> bool:
        now.update({name: sample(pid) for name, pid in pids.items()})
        return all(
            now[name].descriptors <= allowed[name].descriptors
            and now[name].threads <= allowed[name].threads
            for name in pids
        )

    wait_until(are_settled, SETTLING_S)
    return now


def pauses_seen(sidecar: SidecarProcess) -> int:
    """How many single pauses the sidecar keeps."""
    return int(sidecar.get("/gc/pauses?limit=1")[1]["matching"])


def progress(record: Record, elapsed_s: float, seconds: float) -> str:
    """One line."""
    now = record.samples[SIDECAR][-1]
    return (
        f"{elapsed_s:6.0f} of {seconds:.0f} s, {record.cycles:5d} cycles: the sidecar has"
        f" {now.descriptors} descriptors, {now.threads} threads, {now.resident_bytes / (1 << 20):.2f} MiB"
        f" and {record.pauses[-1]} pauses; {len(record.complaints)} complaints"
    )


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=1800.0, help="how long (default 1800)")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory(prefix="gc-sidecar-soak-") as name:
        record = soak(seconds, Path(name))
    for complaint in record.complaints:
        print(complaint)
    return 1 if record.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
