"""Server-sent events, taken out of the bytes of a stream as they come."""

from __future__ import annotations

from collections.abc import Iterator


class EventReader:
    """One stream's events. Lines end at CR, LF or CRLF and nowhere else: str.splitlines, and with it httpx, knows
    more ends (U+2028, say), which may stand in the JSON of an event."""

    def __init__(self) -> None:
        self._begun = b""
        self._data: list[bytes] = []
        self._ended_in_cr = False

    def feed(self, chunk: bytes) -> Iterator[str]:
        """The data of each event that is whole with this chunk. Fields other than data, and comments, are none."""
        if self._ended_in_cr:
            chunk = chunk.removeprefix(b"\n")  # the other half of a CRLF
        self._ended_in_cr = chunk.endswith(b"\r")
        lines = (self._begun + chunk).splitlines(keepends=True)
        self._begun = lines.pop() if lines and not lines[-1].endswith((b"\r", b"\n")) else b""
        for line in lines:
            line = line.rstrip(b"\r\n")
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data).decode(errors="replace")
                self._data = []

    def end(self) -> Iterator[str]:
        """The event that was not ended when the stream was."""
        return self.feed(b"\n\n")
