"""The file that a sweep grows in: a line for its plan, and one for each block that has ended.

A block counts when its line is whole. So a sweep that was killed goes on after its last whole block.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gc_sidecar.sweep.driver import Sample
from gc_sidecar.sweep.plan import Block, Plan, PlanError, Point

NAME, LOCK_NAME = "sweep.jsonl", ".lock"
FORMAT = "gc-sidecar.sweep/v1"


@dataclass(frozen=True)
class Pause:
    """A collection, of the engine or of this client. Dates in seconds; `trigger` as in GET /gc/pauses."""

    started_s: float
    duration_s: float
    gc_generation: int
    trigger: str
    process: str


@dataclass(frozen=True)
class Memory:
    """Anonymous memory of all processes of the engine together, and when it was read (a date in seconds)."""

    read_s: float
    anonymous_bytes: int


@dataclass(frozen=True)
class BlockRecord:
    """What came of one block. Samples are on the monotonic clock; `clock_offset_s` added makes them dates."""

    number: int
    policy: str
    clock_offset_s: float
    points: tuple[tuple[Point, tuple[Sample, ...]], ...]
    pauses: tuple[Pause, ...]
    client_pauses: tuple[Pause, ...]
    lost_pauses: int
    memory: tuple[Memory, ...]
    verdict: dict[str, Any]


class Journal:
    """The journal in `directory`, begun for `plan` or gone on with. Raises PlanError if it is another plan's."""

    def __init__(
        self, directory: Path, plan: Plan, about: dict[str, Any], fresh: bool = False
    ) -> None:
        self.path = directory / NAME
        self.records: list[BlockRecord] = []
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = (directory / LOCK_NAME).open("w")  # until this process ends
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PlanError(f"another sweep is at work in {directory}") from None
        if fresh:
            self.path.unlink(missing_ok=True)
        if self.path.exists():
            try:
                self.about = self._read(plan)
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                if isinstance(error, PlanError):
                    raise
                raise PlanError(
                    f"{self.path} is damaged ({type(error).__name__}); take another directory, or --fresh"
                ) from None
        else:
            self.about = about
            self._append(
                {"format": FORMAT, "plan": asdict(plan), "id": plan.fingerprint, "about": about}
            )

    def close(self) -> None:
        """Leave it to another sweep."""
        self._lock.close()

    def missing(self, plan: Plan) -> list[Block]:
        """The blocks that have not been run."""
        done = {record.number for record in self.records}
        return [block for block in plan.blocks() if block.number not in done]

    def add(self, record: BlockRecord) -> None:
        """Keep a block that has ended."""
        self.records.append(record)
        self._append(asdict(record))

    def _append(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":"))
        with self.path.open("a", encoding="utf-8") as out:
            out.write(f"{text}\n")
            out.flush()
            os.fsync(out.fileno())

    def _read(self, plan: Plan) -> dict[str, Any]:
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        head = _json(lines[0]) if lines else None
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise PlanError(f"{self.path} is not the journal of a sweep; take another directory")
        if head.get("id") != plan.fingerprint:
            raise PlanError(
                f"{self.path} is the journal of a sweep with other points or settings: repeat them to go on with"
                " it, take another directory, or begin anew with --fresh"
            )
        whole = [line for line in lines[1:] if line.endswith("\n") and _json(line) is not None]
        self.records = [_record(json.loads(line)) for line in whole]
        if len(whole) < len(lines) - 1:  # cut off in the middle of a line
            with self.path.open("w", encoding="utf-8") as out:
                out.writelines([lines[0], *whole])
        return dict(head.get("about") or {})


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _record(line: dict[str, Any]) -> BlockRecord:
    points = tuple(
        (Point(**point), tuple(Sample(s["started_s"], tuple(s["tokens_s"])) for s in samples))
        for point, samples in line.pop("points")
    )
    return BlockRecord(
        points=points,
        pauses=tuple(Pause(**each) for each in line.pop("pauses")),
        client_pauses=tuple(Pause(**each) for each in line.pop("client_pauses")),
        memory=tuple(Memory(**each) for each in line.pop("memory")),
        **line,
    )
