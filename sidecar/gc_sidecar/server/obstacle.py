"""Something that stands in the way of seeing, reaching or changing the engine, and what to do about it.

An Obstacle is what the sidecar found; what a process says about itself is a `Reason`, in `reports`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Obstacle:
    """One of the `reasons` of GET /gc and /readyz. `blocking` ones keep the sidecar from being ready."""

    code: str
    detail: str
    remedy: str | None = None
    blocking: bool = False
