"""What a sweep sends: points of load, in blocks, and the policies alternating between the blocks.

Every policy gets every point equally often, and the order turns from round to round: whatever drifts on the
machine meanwhile hits all policies alike.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

POLICIES = ("off", "freeze", "budget")
POINT_FIELDS = ("prompt_tokens", "output_tokens", "concurrency")


class PlanError(ValueError):
    """A plan that cannot be made; `str()` of it says why."""


@dataclass(frozen=True)
class Point:
    """A coordinate of the sweep: lengths in tokens, and how many requests run side by side."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.prompt_tokens}/{self.output_tokens}x{self.concurrency}"


@dataclass(frozen=True)
class Block:
    """A stretch under one policy: all points, in this order, one after the other."""

    number: int
    policy: str
    points: tuple[Point, ...]

    @property
    def name(self) -> str:
        """As people read it."""
        return f"block {self.number + 1} ({self.policy})"


@dataclass(frozen=True)
class Plan:
    """A whole sweep. At each point of each block `requests` are sent, after `warm_up` that count for nothing.

    `pause_budget_ms` is None where no policy has one.
    """

    points: tuple[Point, ...]
    policies: tuple[str, ...]
    rounds: int
    requests: int
    warm_up: int
    pause_budget_ms: float | None

    def __post_init__(self) -> None:
        """Raises PlanError where a point's concurrency can never be reached."""
        widest = max(point.concurrency for point in self.points)
        if widest > self.requests:
            raise PlanError(
                f"a concurrency of {widest} needs at least {widest} requests at each point (--requests)"
            )

    def blocks(self) -> list[Block]:
        """All blocks in the order in which they are run."""
        blocks: list[Block] = []
        for turn in range(self.rounds):
            shift = turn % len(self.policies)
            for policy in (*self.policies[shift:], *self.policies[:shift]):
                points = self.points if turn % 2 == 0 else self.points[::-1]
                blocks.append(Block(len(blocks), policy, points))
        return blocks

    @property
    def fingerprint(self) -> str:
        """The same for the same plan, so that a sweep is only ever gone on with as it was begun."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def grid(
    prompts: Sequence[int], outputs: Sequence[int], widths: Sequence[int]
) -> tuple[Point, ...]:
    """Every combination."""
    return tuple(Point(*each) for each in itertools.product(prompts, outputs, widths))


def read_points(path: Path) -> tuple[Point, ...]:
    """The points in a CSV file with a header, or a JSON file with a list of objects. Raises PlanError, OSError."""
    try:
        text = path.read_text(
            encoding="utf-8-sig"
        )  # what Excel saves begins with a byte order mark
    except UnicodeDecodeError:
        raise PlanError(f"{path} is not UTF-8") from None
    if path.suffix == ".json":
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{path} is not JSON: {error}") from None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise PlanError(f"{path} must hold a list of objects with {', '.join(POINT_FIELDS)}")
    else:
        reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
        rows = list(reader)
        missing = [name for name in POINT_FIELDS if name not in (reader.fieldnames or ())]
        if missing:
            raise PlanError(
                f"{path} has no column {', '.join(missing)}: its first line must be {','.join(POINT_FIELDS)}, with"
                " commas between them"
            )
    points = tuple(_point(row, f"{path}, point {number}") for number, row in enumerate(rows, 1))
    if not points:
        raise PlanError(f"{path} holds no point")
    return points


def _point(row: dict[str, object], where: str) -> Point:
    values = []
    for name in POINT_FIELDS:
        try:
            value = int(str(row.get(name)))
        except ValueError:
            raise PlanError(f"{where}: {name} is {row.get(name)!r}, not a whole number") from None
        if value < 1:
            raise PlanError(f"{where}: {name} is {value}, and must be at least 1")
        values.append(value)
    return Point(*values)


def check_policies(policies: Iterable[str]) -> tuple[str, ...]:
    """`policies`, each once and known. Raises PlanError."""
    found = tuple(dict.fromkeys(policy.strip() for policy in policies))
    unknown = [policy for policy in found if policy not in POLICIES]
    if unknown or not found:
        raise PlanError(
            f"{', '.join(unknown) or 'nothing'} is no policy: take some of {', '.join(POLICIES)}"
        )
    return found
