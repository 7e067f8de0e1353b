"""Server-sent events: whatever a server may write they are found, and only where one ends."""

from __future__ import annotations

import pytest

from gc_sidecar.sweep.events import EventReader


def read(*chunks: bytes) -> list[str]:
    reader = EventReader()
    found = [text for chunk in chunks for text in reader.feed(chunk)]
    return [*found, *reader.end()]


def pieces(stream: bytes, size: int) -> list[bytes]:
    return [stream[begin : begin + size] for begin in range(0, len(stream), size)]


@pytest.mark.parametrize("character", "\u2028\u2029\u0085\u000b\u000c\u001c")
def test_a_character_that_ends_lines_elsewhere_ends_no_event(character: str) -> None:
    assert read(f'data: {{"text": "a{character}b"}}\n\n'.encode()) == [
        f'{{"text": "a{character}b"}}'
    ]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 1_000])
def test_events_are_the_same_however_lines_end_and_bytes_arrive(end: bytes, size: int) -> None:
    lines = ["data: é\u2028", "", ": comment", "", "event: x", "data:b", "id: 7", "", "data: c", ""]
    stream = end.join(line.encode() for line in [*lines, ""])
    assert read(*pieces(stream, size)) == ["é\u2028", "b", "c"]


def test_the_blank_may_be_missing_and_an_event_may_have_several_lines() -> None:
    assert read(b'data:{"a":\ndata:  1,\ndata\ndata: "b": 2}\n\n') == ['{"a":\n 1,\n\n"b": 2}']


def test_an_event_is_given_as_soon_as_it_is_whole() -> None:
    reader = EventReader()
    assert list(reader.feed(b"data: a\r\n")) == []
    assert list(reader.feed(b"\r")) == ["a"]
    assert list(reader.feed(b"\ndata: b\n\n")) == ["b"]


def test_what_came_before_the_stream_was_cut_off_is_given_too() -> None:
    assert read(b"data: a\n\ndata: b") == ["a", "b"]
