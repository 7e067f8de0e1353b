"""What those who watch the page cost the sidecar: processor time and memory, with 64 pages and an hour behind it.

The pages are kept by bench/scrape.py, the hour is replayed (tests/page/replayed_hour.py); viewers read what comes
and do nothing with it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.scrape import core_shares, empty_server, resident_bytes
from tests.embedded.engine import run_directory
from tests.page.replayed_hour import PAUSES, PROCESSES, stand_in_pages
from tests.sidecar_process import wait_for
from tests.vllm.real_vllm import free_port

VIEWERS = (0, 1, 10)
# In turn, so that what else the machine does hits all alike.
ROUNDS = 5
MEASURED_S = 8.0
SETTLING_S = 2.0
LIMIT_SHARE = 0.01
LIMIT_RSS_BYTES = 120e6


@dataclass(frozen=True)
class Row:
    """What the sidecar took with so many viewers: medians of the rounds."""

    viewers: int
    core_share: float
    # Of an idle uvicorn that serves nothing, in the same seconds.
    empty_server_share: float
    resident_bytes: int


@dataclass(frozen=True)
class Greeting:
    """All that is kept, which a new viewer is told first; and how long another request waited meanwhile."""

    size_bytes: int
    took_s: float
    longest_wait_s: float


def history(url: str) -> tuple[int, float]:
    """Size of all that is kept, and how long it took to get it."""
    started = time.perf_counter()
    with urllib.request.urlopen(f"{url}/gc/events?for_s=0") as answer:
        size = len(answer.read())
    return size, time.perf_counter() - started


def longest_wait_s(url: str) -> float:
    """The longest that /healthz took while somebody was told the history."""
    asked = threading.Thread(target=history, args=(url,))
    longest_s = 0.0
    asked.start()
    while asked.is_alive():
        started = time.perf_counter()
        with urllib.request.urlopen(f"{url}/healthz") as answer:
            answer.read()
        longest_s = max(longest_s, time.perf_counter() - started)
    return longest_s


@contextlib.contextmanager
def watching(port: int, count: int) -> Iterator[None]:
    """So many viewers."""

    def watch(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while connection.recv(1 << 20):
                pass

    connections = []
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(b"GET /gc/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        threading.Thread(target=watch, args=(connection,), daemon=True).start()
        connections.append(connection)
    yield
    for connection in connections:
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()


def measure(port: int, pid: int, empty: int) -> list[Row]:
    """A row for each number of viewers."""
    shares: dict[int, list[list[float]]] = {viewers: [] for viewers in VIEWERS}
    resident = dict.fromkeys(VIEWERS, 0)
    for _ in range(ROUNDS):
        for viewers in VIEWERS:
            with watching(port, viewers):
                time.sleep(SETTLING_S)
                shares[viewers].append(core_shares((pid, empty), MEASURED_S))
                resident[viewers] = max(resident[viewers], resident_bytes(pid))
    rows = []
    for viewers, measured in shares.items():
        own, floor = map(statistics.median, zip(*measured, strict=True))
        rows.append(Row(viewers, own, floor, resident[viewers]))
    return rows


def is_there(url: str) -> bool:
    """Whether the sidecar sees all pages."""
    try:
        with urllib.request.urlopen(f"{url}/gc") as answer:
            return bool(json.load(answer)["coverage"]["expected"] == PROCESSES)
    except OSError:
        return False


def main() -> int:
    """Measure, print, and tell whether it stayed within its limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    port = free_port()
    with (
        run_directory() as run_dir,
        stand_in_pages(run_dir),
        tempfile.TemporaryDirectory() as directory,
        (Path(directory) / "sidecar.log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "tests.page.replayed_hour", str(port), str(run_dir)],
            stdout=log,
            stderr=log,
        ) as sidecar,
        empty_server(free_port()) as empty,
    ):
        try:
            wait_for("the sidecar", lambda: is_there(f"http://127.0.0.1:{port}"), 60)
            rows = measure(port, sidecar.pid, empty)
            url = f"http://127.0.0.1:{port}"
            greeting = Greeting(*history(url), longest_wait_s(url))
        finally:
            sidecar.terminate()
    idle, one, ten = rows
    each = {row.viewers: (row.core_share - idle.core_share) / row.viewers for row in (one, ten)}
    worst = max(each.values())
    most = max(row.resident_bytes for row in rows)
    is_within = worst < LIMIT_SHARE and most < LIMIT_RSS_BYTES
    if args.json:
        told = {"rows": [asdict(row) for row in rows], "share_of_a_viewer": each}
        print(json.dumps({**told, "greeting": asdict(greeting)}))
        return 0 if is_within else 1
    print(f"{PROCESSES} pages, {PAUSES} pauses and an hour of memory in the history\n")
    print(f"viewers  core     RSS      an empty server (medians of {ROUNDS} rounds)")
    for row in rows:
        print(
            f"{row.viewers:7}  {100 * row.core_share:5.2f} %  {row.resident_bytes / 1e6:4.0f} MB"
            f"  {100 * row.empty_server_share:5.2f} %"
        )
    print(
        f"\na viewer costs {100 * each[1]:.2f} % of a core alone and {100 * each[10]:.2f} % as one of ten"
        f" (limit {100 * LIMIT_SHARE:g} %); at most {most / 1e6:.0f} MB (limit {LIMIT_RSS_BYTES / 1e6:g} MB)"
        f"\na new one is told {greeting.size_bytes / 1e3:.0f} kB in {1000 * greeting.took_s:.0f} ms,"
        f" and another request waits {1000 * greeting.longest_wait_s:.1f} ms for it at most"
    )
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
