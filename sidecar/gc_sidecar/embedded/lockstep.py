"""Keeps data-parallel ranks in step: a step ends in all of them before the next one begins in any.

In vLLM the ranks of a mixture of experts meet inside the forward pass; here their engine cores meet at its end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from gc_sidecar.embedded.channels import Channel, ChannelClosed

START, GONE = "start", "gone"


class Lockstep:
    """The meeting of one rank with its peers: `start` and `finish` round every step."""

    def __init__(self, peers: Sequence[Channel], on_start: Callable[[], None]) -> None:
        """`on_start` is called on a thread of ours when a peer begins to step."""
        self._peers = peers
        self._on_start = on_start
        self._running = False
        # From each peer: START when it begins after rest, then at the end of each step whether it has more.
        self._inboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in peers]
        for peer, inbox in zip(peers, self._inboxes, strict=True):
            threading.Thread(target=self._listen, args=(peer, inbox), daemon=True).start()

    def is_started(self) -> bool:
        """Whether a peer has begun to step while we rested."""
        return not self._running and any(not inbox.empty() for inbox in self._inboxes)

    def start(self) -> None:
        """Begin a step; after a rest the peers are told, so that they step as well."""
        if not self._running:
            self._running = True
            self._tell(START)

    def finish(self, has_more: bool) -> bool:
        """Wait until all peers have ended the step. Whether any rank has more to do, the same in all."""
        self._tell(has_more)
        any_has_more = has_more
        for inbox in self._inboxes:
            while (word := inbox.get()) == START:
                continue
            if word == GONE:
                raise RuntimeError("another data-parallel rank is gone")
            any_has_more = any_has_more or bool(word)
        self._running = any_has_more
        return any_has_more

    def _tell(self, word: Any) -> None:
        for peer in self._peers:
            peer.send(word)

    def _listen(self, peer: Channel, inbox: queue.SimpleQueue[Any]) -> None:
        while True:
            try:
                word = peer.receive()
            except ChannelClosed:
                word = GONE
            inbox.put(word)
            if word in (START, GONE) and isinstance(word, str):
                self._on_start()
            if word == GONE:
                return
