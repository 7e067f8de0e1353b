"""What stands in a meter's private rings, as a publisher would bring it onto a page."""

from __future__ import annotations

from gc_sidecar_agent.meter import PauseMeter
from gc_sidecar_agent.page import (
    FULL_RING_OFFSET,
    RECORD,
    RING_RECORDS,
    YOUNG_RING_OFFSET,
    Pause,
    decode_records,
)
from gc_sidecar_agent.publisher import Publisher


def full_pauses(meter: PauseMeter) -> tuple[Pause, ...]:
    """The records of full collections in order; AssertionError where one is missing."""
    return _pauses(meter, FULL_RING_OFFSET)


def young_pauses(meter: PauseMeter) -> tuple[Pause, ...]:
    """The same of young collections."""
    return _pauses(meter, YOUNG_RING_OFFSET)


def _pauses(meter: PauseMeter, offset: int) -> tuple[Pause, ...]:
    publisher = Publisher(None, meter, lambda: None, dict, lambda: 0)
    (ring,) = (ring for ring in publisher._rings if ring.offset == offset)
    following = meter.words[ring.next_index]
    ring.encode(meter.words, following)
    first = max(1, following - RING_RECORDS)
    start = first % RING_RECORDS * RECORD.size
    pauses = decode_records(bytes(ring.encoded[start:]) + bytes(ring.encoded[:start]), first)
    assert [pause.sequence for pause in pauses] == list(range(first, following))
    return pauses
