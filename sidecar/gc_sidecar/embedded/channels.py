"""Messages between the processes of the embedded engine: pickled, with their length, over a socket pair.

Nothing but these processes ever holds an end, so what comes out is what one of them put in.
"""

from __future__ import annotations

import asyncio
import pickle
import select
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!I")


class ChannelClosed(EOFError):
    """The process at the other end is gone."""


def encode(message: Any) -> bytes:
    """The bytes of one message."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Channel:
    """One end of a socket pair. One thread may send while another receives."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def send(self, message: Any) -> None:
        """Send one message. Raises ChannelClosed."""
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Send what `encode` made, which may go to many."""
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message. Raises TimeoutError when none has begun to come in time, ChannelClosed."""
        if timeout_s is not None and not select.select([self.socket], [], [], timeout_s)[0]:
            raise TimeoutError
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return pickle.loads(self._exactly(length))

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                piece = self.socket.recv(count - len(data))
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not piece:
                raise ChannelClosed("the other end is gone")
            data += piece
        return bytes(data)


async def receive(reader: asyncio.StreamReader) -> Any:
    """The next message that an asyncio stream brings. Raises ChannelClosed."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError) as error:
        raise ChannelClosed(str(error)) from None
