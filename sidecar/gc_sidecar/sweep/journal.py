"""The file that a sweep grows in: a line for its plan, and one for each block that has ended.

A block counts when its line is whole. So a sweep that was killed goes on after its last whole block.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from gc_sidecar.sweep.driver import Sample
from gc_sidecar.sweep.files import naming
from gc_sidecar.sweep.plan import Block, Plan, PlanError, Point

NAME, LOCK_NAME = "sweep.jsonl", ".lock"
FORMAT = "gc-sidecar.sweep/v1"
# What is the same for all of a sweep, beside its plan.
SAME = {"engine_url": "of the engine", "model": "of the model", "seed": "with the seed"}


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
    """Anonymous memory of all processes of the engine together, None where one's is not known, and when it was
    read (a date in seconds)."""

    read_s: float
    anonymous_bytes: int | None


@dataclass(frozen=True)
class Reason:
    """Something that speaks against a block, and a code for it."""

    code: str
    detail: str


@dataclass(frozen=True)
class BlockRecord:
    """What came of one block. Samples are on the monotonic clock; `clock_offset_s` added makes them dates.

    With a `disturbance` it counts for nothing, and is run again when the sweep is gone on with; a `doubt` is told.
    `pause_count` is of all pauses, `lost_pauses` of those of which nothing more is known.
    """

    number: int
    policy: str
    clock_offset_s: float
    points: tuple[tuple[Point, tuple[Sample, ...]], ...]
    pauses: tuple[Pause, ...]
    client_pauses: tuple[Pause, ...]
    lost_pauses: int
    pause_count: int
    memory: tuple[Memory, ...]
    disturbances: tuple[Reason, ...] = ()
    doubts: tuple[Reason, ...] = ()


class Journal:
    """The journal in `directory`, to be begun for `plan` or gone on with. Raises PlanError if it is of
    another plan, or of another engine or seed than `about` tells.

    `fresh` throws it away first, and the `reports` that were made of it.
    """

    def __init__(
        self,
        directory: Path,
        plan: Plan,
        about: dict[str, Any],
        fresh: bool = False,
        reports: Iterable[str] = (),
    ) -> None:
        self.path = directory / NAME
        self._plan = plan
        self.records: list[BlockRecord] = []
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = (directory / LOCK_NAME).open("w")  # until this process ends
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PlanError(f"another sweep is at work in {directory}") from None
        if fresh:
            for path in (self.path, *(directory / report for report in reports)):
                path.unlink(missing_ok=True)
        # Without a whole first line nothing has been measured: it was killed while it began.
        if self.path.exists() and b"\n" in self.path.read_bytes():
            try:
                self.about = self._read(about)
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                if isinstance(error, PlanError):
                    raise
                raise PlanError(
                    f"{self.path} is damaged ({type(error).__name__}); take another directory, or --fresh"
                ) from None
        else:
            self.path.unlink(missing_ok=True)
            self.about = about

    def begin(self, model: str | None) -> None:
        """Begin it with this model, or go on; None is whichever it was. Raises PlanError if it was another."""
        if not self.path.exists():
            self.about = {**self.about, "model": model}
            plan = self._plan
            self._append(
                {
                    "format": FORMAT,
                    "plan": asdict(plan),
                    "id": plan.fingerprint,
                    "about": self.about,
                }
            )
        elif model is not None:
            self._compare(self.about, {"model": model})

    def close(self) -> None:
        """Leave it to another sweep."""
        self._lock.close()

    def missing(self, plan: Plan) -> list[Block]:
        """The blocks that have not been run, or were disturbed."""
        done = {record.number for record in self.records if not record.disturbances}
        return [block for block in plan.blocks() if block.number not in done]

    def add(self, record: BlockRecord) -> None:
        """Keep a block that has ended, in place of one that was disturbed."""
        self.records = [*(each for each in self.records if each.number != record.number), record]
        self._append(asdict(record))

    def _append(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":"))
        with naming(self.path), self.path.open("a", encoding="utf-8") as out:
            out.write(f"{text}\n")
            out.flush()
            os.fsync(out.fileno())

    def _read(self, given: dict[str, Any]) -> dict[str, Any]:
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        try:
            head = _json(lines[0])
        except ValueError:
            head = None
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise PlanError(f"{self.path} is not the journal of a sweep; take another directory")
        if head.get("id") != self._plan.fingerprint:
            raise PlanError(
                f"{self.path} is the journal of a sweep with other points or settings: repeat them to go on with"
                " it, take another directory, or begin anew with --fresh"
            )
        about = dict(head["about"])
        if not {*SAME} <= about.keys():
            raise PlanError(
                f"{self.path} was begun by an older gc-sidecar, which did not note model and seed: take another"
                " directory, or begin anew with --fresh"
            )
        self._compare(about, {name: given[name] for name in ("engine_url", "seed")})
        if not lines[-1].endswith("\n"):  # cut off in the middle of a line
            cut = len(lines.pop().encode())
            os.truncate(self.path, self.path.stat().st_size - cut)
        records = [_record(_json(line)) for line in lines[1:]]
        self.records = list({record.number: record for record in records}.values())
        return about

    def _compare(self, begun: dict[str, Any], given: dict[str, Any]) -> None:
        for name, value in given.items():
            if value != begun[name]:
                raise PlanError(
                    f"{self.path} is the journal of a sweep {SAME[name]} {_word(begun[name])}, not"
                    f" {_word(value)}: take another directory, or begin anew with --fresh"
                )


def _word(value: Any) -> Any:
    return "none" if value is None else value


def _json(line: str) -> Any:
    return json.loads(line, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number that was measured")


def _record(line: dict[str, Any]) -> BlockRecord:
    points = tuple(
        (
            Point(**point),
            tuple(Sample(s["started_s"], tuple(s["tokens_s"]), s["together"]) for s in samples),
        )
        for point, samples in line.pop("points")
    )
    return BlockRecord(
        points=points,
        pauses=tuple(Pause(**each) for each in line.pop("pauses")),
        client_pauses=tuple(Pause(**each) for each in line.pop("client_pauses")),
        memory=tuple(Memory(**each) for each in line.pop("memory")),
        disturbances=tuple(Reason(**each) for each in line.pop("disturbances")),
        doubts=tuple(Reason(**each) for each in line.pop("doubts")),
        **line,
    )
