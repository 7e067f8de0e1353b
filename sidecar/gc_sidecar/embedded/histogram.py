"""A Prometheus histogram of the embedded engine's: which buckets, and how it is written."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

INTER_TOKEN_S = (0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Histogram:
    """Counts by upper bound, as Prometheus wants them."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._help = help
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def header(self) -> Iterator[str]:
        """What stands once before the samples of all histograms of its name."""
        yield f"# HELP {self._name} {self._help}"
        yield f"# TYPE {self._name} histogram"

    def samples(self, labels: str) -> Iterator[str]:
        """Its part of the exposition."""
        bounds = (*map(str, self._bounds), "+Inf")
        for bound, count in zip(bounds, accumulate(self._counts), strict=True):
            yield f'{self._name}_bucket{{{labels},le="{bound}"}} {count}'
        yield f"{self._name}_sum{{{labels}}} {self._sum}"
        yield f"{self._name}_count{{{labels}}} {sum(self._counts)}"


def inter_token_histogram() -> Histogram:
    """One for each engine core."""
    return Histogram("vllm:inter_token_latency_seconds", "Time between two tokens.", INTER_TOKEN_S)
