"""What a scrape costs with 8, 64 and 256 pages, and the sidecar between scrapes: memory and processor time.

The pages are real, the processes behind them stand-ins: one program writes all of them ten times a second, as
agents do, with one young collection a second in each: an idle engine has hardly any.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from gc_sidecar_agent.page import (
    NUMBER_INDEX,
    NUMBER_NAMES,
    RECORD_WORDS,
    RING_BYTES,
    RING_RECORDS,
    YOUNG_RING_OFFSET,
    PageWriter,
    create_page,
    page_name,
)
from tests.embedded.engine import run_directory
from tests.sidecar_process import SidecarProcess, wait_for
from tests.vllm.real_vllm import free_port

PAGES = (8, 64, 256)
SCRAPES = 30
IDLE_S = 20.0
PUBLISH_S = 0.1
LIMIT_64_MS = 100.0
LIMIT_64_RSS_BYTES = 90e6
LIMIT_64_IDLE_SHARE = 0.01
# Four times the pages: linear is four times the time, and no more than this.
LIMIT_GROWTH = 6.0


@dataclass(frozen=True)
class Row:
    """What was measured with so many pages."""

    pages: int
    series: int
    scrape_ms: float
    longest_scrape_ms: float
    resident_bytes: int
    idle_share: float
    # Of an idle uvicorn that serves nothing, in the same seconds.
    empty_server_share: float


class StandInProcess:
    """A page that is kept as an agent keeps it, for a process that is not there."""

    def __init__(self, run_dir: str, role: str, rank: int, workers: int) -> None:
        self._words = array.array("q", [0] * len(NUMBER_NAMES))
        self._ring = array.array("q", bytes(RING_BYTES))
        for name in ("full_ring_next", "young_ring_next"):
            self._words[NUMBER_INDEX[name]] = 1
        self._description = {
            "identity": {
                "roles": [role], "dp_rank": 0, "rank": rank, "pid": 1000 + rank,
                "host": "stand-in", "token": f"{role}{rank}", "started_at": time.time(),
                "python": "3.12.1", "collector": "generational", "engine": "stand-in",
                "agent": "0.1.0", "page_error": None, "agent_error": None,
            },
            "topology": {"dp_ranks": [0], "workers": workers, "api_servers": 0},
            "state": {"ready": True, "mode": "off", "generation": 0},
        }  # fmt: skip
        name = page_name(role, 0, rank, int(time.time()))
        self._page = create_page(run_dir, name, self._fill)

    def _fill(self, page: PageWriter) -> None:
        page.write_description(self._description)
        page.write_numbers(memoryview(self._words))

    def publish(self) -> None:
        """A heartbeat; once a second a young collection too."""
        words = self._words
        words[NUMBER_INDEX["heartbeat"]] += 1
        if words[NUMBER_INDEX["heartbeat"]] % round(1 / PUBLISH_S) == 0:
            self._collect()
        words[NUMBER_INDEX["clock_offset_ns"]] = time.time_ns() - time.monotonic_ns()
        self._page.write_numbers(memoryview(words))

    def _collect(self) -> None:
        words = self._words
        sequence = words[NUMBER_INDEX["young_ring_next"]]
        start, length, objects = time.monotonic_ns(), 100_000 << 8, 0
        slot = sequence % RING_RECORDS * RECORD_WORDS
        self._ring[slot : slot + RECORD_WORDS] = array.array(
            "q", (sequence, start, length, objects, sequence ^ start ^ length ^ objects)
        )
        words[NUMBER_INDEX["young_ring_next"]] = sequence + 1
        words[NUMBER_INDEX["gen0_count"]] += 1
        self._page.write_ring(YOUNG_RING_OFFSET, memoryview(self._ring))


def write_pages(run_dir: str, count: int) -> NoReturn:
    """Keep `count` pages until this program is ended."""
    workers = count - 1
    processes = [StandInProcess(run_dir, "engine_core", 0, workers)]
    processes += [StandInProcess(run_dir, "worker", rank, workers) for rank in range(workers)]
    print("ready", flush=True)
    while True:
        for process in processes:
            process.publish()
        time.sleep(PUBLISH_S)


def processor_s(pid: int) -> float:
    """Processor time of a process so far."""
    # As clock_getcpuclockid(3) makes it: in nanoseconds, where /proc counts in hundredths of a second.
    return time.clock_gettime(~pid << 3 | 2)


@contextlib.contextmanager
def empty_server(port: int) -> Iterator[int]:
    """The pid of a uvicorn that serves nothing: what any idle server costs on this machine at this time."""
    code = f"import uvicorn; uvicorn.run(lambda *_: None, port={port}, lifespan='off', log_level='error')"
    with subprocess.Popen([sys.executable, "-c", code]) as server:
        try:
            wait_for("the empty server", lambda: is_listening(port), 60)
            yield server.pid
        finally:
            server.kill()


def is_listening(port: int) -> bool:
    """Whether somebody takes connections there."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def core_shares(pids: Sequence[int], seconds: float) -> list[float]:
    """The share of a core that each process takes in the next `seconds`."""
    before, started = [processor_s(pid) for pid in pids], time.monotonic()
    time.sleep(seconds)
    passed_s = time.monotonic() - started
    return [(processor_s(pid) - past) / passed_s for pid, past in zip(pids, before, strict=True)]


def resident_bytes(pid: int) -> int:
    """Its resident memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def measure(pages: int, directory: Path) -> Row:
    """The row for so many pages."""
    with run_directory() as run_dir:
        command = [sys.executable, __file__, "--write-pages", str(pages), str(run_dir)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            try:
                assert writer.stdout is not None
                assert writer.stdout.readline() == "ready\n"
                with SidecarProcess(run_dir=run_dir, log_path=directory / "sidecar.log") as sidecar:
                    sidecar.wait_for_coverage(pages)
                    times, samples = [], 0
                    for _ in range(SCRAPES):
                        started = time.perf_counter()
                        with urllib.request.urlopen(f"{sidecar.url}/metrics") as answer:
                            body = answer.read()
                        times.append((time.perf_counter() - started) * 1000)
                        samples = sum(not line.startswith(b"#") for line in body.splitlines())
                    with empty_server(free_port()) as empty:
                        idle, floor = core_shares((sidecar.pid, empty), IDLE_S)
                    return Row(
                        pages=pages,
                        series=samples,
                        scrape_ms=statistics.median(times),
                        longest_scrape_ms=max(times),
                        resident_bytes=resident_bytes(sidecar.pid),
                        idle_share=idle,
                        empty_server_share=floor,
                    )
            finally:
                writer.kill()


def judge(rows: dict[int, Row]) -> list[tuple[str, bool]]:
    """Each limit in words, and whether it is kept."""
    at_64, at_256 = rows[64], rows[256]
    return [
        (f"64 pages: a scrape of at most {LIMIT_64_MS:g} ms", at_64.scrape_ms <= LIMIT_64_MS),
        (
            f"256 pages: at most {LIMIT_GROWTH:g} times as long as 64",
            at_256.scrape_ms <= LIMIT_GROWTH * at_64.scrape_ms,
        ),
        (
            f"64 pages: RSS of at most {LIMIT_64_RSS_BYTES / 1e6:g} MB",
            at_64.resident_bytes <= LIMIT_64_RSS_BYTES,
        ),
        (
            f"64 pages: idle below {100 * LIMIT_64_IDLE_SHARE:g} % of a core more than an empty server",
            at_64.idle_share - at_64.empty_server_share < LIMIT_64_IDLE_SHARE,
        ),
    ]


def print_table(rows: Iterable[Row], verdicts: Iterable[tuple[str, bool]]) -> None:
    """The rows and the verdicts, for eyes."""
    print(
        f"{'pages':>5}{'series':>8}{'scrape':>11}{'longest':>11}{'RSS':>10}{'idle':>9}"
        "  (an empty server)"
    )
    for row in rows:
        print(
            f"{row.pages:5}{row.series:8}{row.scrape_ms:8.1f} ms"
            f"{row.longest_scrape_ms:8.1f} ms{row.resident_bytes / 1e6:7.1f} MB"
            f"{100 * row.idle_share:7.2f} %{100 * row.empty_server_share:9.2f} %"
        )
    for text, kept in verdicts:
        print(f"{'kept' if kept else 'NOT KEPT':8} {text}")


def main() -> int:
    """Print the rows; 1 where a limit is not kept."""
    parser = argparse.ArgumentParser(description="What a scrape costs, and the sidecar when idle.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    # How this program starts itself, as the processes that write.
    parser.add_argument("--write-pages", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write_pages:
        count, run_dir = args.write_pages
        write_pages(run_dir, int(count))
    rows = {}
    for pages in PAGES:
        with tempfile.TemporaryDirectory() as directory:
            rows[pages] = measure(pages, Path(directory))
    verdicts = judge(rows)
    if args.json:
        told = {"rows": [asdict(row) for row in rows.values()], "verdicts": dict(verdicts)}
        print(json.dumps(told, indent=2))
    else:
        print_table(rows.values(), verdicts)
    return 0 if all(kept for _, kept in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
