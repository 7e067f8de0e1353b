"""A sidecar that remembers an hour which never was: 64 stand-in processes, 10,000 pauses, memory every 5 s.

The pages in the run directory are real, and kept by bench/scrape.py as agents would keep them; the hour is put
into the history as if it had been seen. Run it as `python -m tests.page.replayed_hour PORT RUN_DIR`.
"""

from __future__ import annotations

import contextlib
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gc_sidecar.server.app import Services, make_services
from gc_sidecar.server.history import MEMORY_EVERY_S, SPAN_S, History
from gc_sidecar.server.listeners import serve
from gc_sidecar.server.logs import configure_logs
from gc_sidecar.server.pauses import SeenPause
from gc_sidecar.server.reports import Identity
from gc_sidecar.server.settings import load_settings

REPOSITORY = Path(__file__).resolve().parents[2]
PROCESSES, PAUSES = 64, 10_000


@contextlib.contextmanager
def stand_in_pages(run_dir: Path, count: int = PROCESSES) -> Iterator[None]:
    """So many pages that are kept up to date, until the end."""
    command = [sys.executable, "bench/scrape.py", "--write-pages", str(count), str(run_dir)]
    environment = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'sidecar'}"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, env=environment
    ) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            yield
        finally:
            writer.kill()


def identities(count: int) -> list[Identity]:
    """The processes of `stand_in_pages`."""
    workers = [
        Identity(("worker",), 0, rank, f"worker{rank}", 1000 + rank) for rank in range(count - 1)
    ]
    return [Identity(("engine_core",), 0, 0, "engine_core0", 1000), *workers]


def replay(history: History, processes: int = PROCESSES, pauses: int = PAUSES) -> None:
    """Let an hour go by, up to now: pauses that grow in every process, and memory that does."""
    chance = random.Random(8)
    who = identities(processes)
    at = start = time.time() - SPAN_S + 10
    history._clock = lambda: at
    history._own_clock = lambda: at
    length = SPAN_S - 20
    moments = sorted(chance.random() * length for _ in range(pauses))
    next_memory = 0.0
    for index, moment in enumerate(moments):
        while next_memory <= moment:
            at = start + next_memory
            history.add_memory([_page(each, next_memory) for each in who])
            next_memory += MEMORY_EVERY_S
        at = start + moment
        trigger = ("auto", "auto", "auto", "maintain", "explicit")[index % 5]
        duration_s = 0.01 * math.exp(4 * moment / length + chance.gauss(0, 0.3))
        history.add_pause(SeenPause(who[index % processes], at, duration_s, 2, trigger, index))
    history._clock, history._own_clock = time.time, time.monotonic


def _page(who: Identity, passed_s: float) -> Any:
    size = int((1.4e9 + 3e5 * passed_s) * (1 + who.rank / 500))
    report = SimpleNamespace(identity=who, numbers={"anonymous_bytes": size}, number=lambda _: 0)
    return SimpleNamespace(alive=True, report=report)


def services(port: int, run_dir: str) -> Services:
    """A sidecar for the run directory, with the hour behind it."""
    made = make_services(load_settings({"port": port, "run_dir": run_dir}))
    replay(made.live.history)
    return made


if __name__ == "__main__":
    configure_logs("info", "json")
    serve(services(int(sys.argv[1]), sys.argv[2]))
