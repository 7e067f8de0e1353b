"""Meters the GC of a benchmark's own Python processes (`gc-sidecar run --observe-client`), for their pauses look
like late tokens too.

The directory of this module goes first on the command's PYTHONPATH: CPython then runs the `sitecustomize` in it at
start-up, which writes a line for each long pause into a file that all these processes share.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

FILE_VARIABLE = "GC_SIDECAR_CLIENT_PAUSES"
# The longest that are told one by one.
LISTED = 100


@dataclass(frozen=True)
class ClientPause:
    """A collection in a process of the command; `started_s` is a date in seconds."""

    pid: int
    started_s: float
    duration_s: float
    gc_generation: int


@dataclass(frozen=True)
class ClientPauses:
    """All of them that took at least half a millisecond, and in how many processes anything was metered."""

    processes: int
    pauses: tuple[ClientPause, ...]


def environment_of_observed(environment: dict[str, str], path: str) -> dict[str, str]:
    """`environment` for a command whose pauses go to the file at `path`."""
    directory = os.path.dirname(os.path.abspath(__file__))
    theirs = environment.get("PYTHONPATH")
    return {
        **environment,
        FILE_VARIABLE: path,
        "PYTHONPATH": f"{directory}{os.pathsep}{theirs}" if theirs else directory,
    }


def read_pauses(path: str) -> ClientPauses:
    """What the command's processes have written; a line that is none is left out. Raises OSError."""
    pids: set[int] = set()
    pauses = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                pid, started_s, duration_s, generation = json.loads(line)
                pause = ClientPause(int(pid), float(started_s), float(duration_s), int(generation))
            except (ValueError, TypeError, OverflowError):
                continue
            pids.add(pause.pid)
            if pause.gc_generation >= 0:
                pauses.append(pause)
    return ClientPauses(len(pids), tuple(pauses))
