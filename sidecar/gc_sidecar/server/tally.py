"""What the server counts about itself, for /metrics: operations, their lengths, desynchronised replies.

Plain numbers: prometheus_client gets them at a scrape, and nothing before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

OPERATIONS = ("freeze", "budget", "maintain", "restore", "lease")
RESULTS = ("applied", "partial", "rolled_back", "failed", "unknown")
LENGTH_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass
class Lengths:
    """A histogram: `counts` has one more entry than LENGTH_BOUNDS, for the rest."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LENGTH_BOUNDS) + 1))
    total_s: float = 0.0

    def add(self, length_s: float) -> None:
        """Count one length."""
        self.counts[sum(length_s > bound for bound in LENGTH_BOUNDS)] += 1
        self.total_s += length_s


@dataclass
class Tally:
    """Everything starts at 0, so that the first event is an increase."""

    operations: dict[tuple[str, str], int] = field(
        default_factory=lambda: {(kind, result): 0 for kind in OPERATIONS for result in RESULTS}
    )
    lengths: dict[str, Lengths] = field(
        default_factory=lambda: {kind: Lengths() for kind in OPERATIONS}
    )
    desyncs: int = 0

    def count_operation(self, kind: str, result: str, length_s: float) -> None:
        """One operation ended."""
        self.operations[kind, result] = self.operations.get((kind, result), 0) + 1
        self.lengths.setdefault(kind, Lengths()).add(length_s)

    def count_desync(self, ranks: Iterable[str]) -> None:
        """Replies with another operation's id came, one of each of `ranks`."""
        self.desyncs += len(tuple(ranks))
