"""A minute of soak.py: nothing grows that has no reason to, in the sidecar or in the engine."""

from __future__ import annotations

from pathlib import Path

from tests.faults.soak import SIDECAR, Record, Sample, allowed_growth, soak, thirds

SECONDS = 60.0


def test_a_minute_of_operations_under_load_leaves_nothing_behind(tmp_path: Path) -> None:
    record = soak(SECONDS, tmp_path)
    assert record.cycles >= 3, "it got somewhere"
    assert not record.complaints, "\n".join(record.complaints)


def test_a_leak_is_more_than_is_allowed() -> None:
    cycles = 40
    leaking = [Sample(10, 5, (50 << 20) + cycle * (512 << 10)) for cycle in range(cycles)]
    record = Record(cycles, {SIDECAR: leaking}, pauses=list(range(cycles)))
    first, last = thirds(leaking)
    assert last - first > allowed_growth(record)
