"""The engine client in an API server: requests, streams of tokens and calls into the engine cores.

With data parallelism `collective_rpc` runs everywhere and returns the first engine's results only, as in vLLM. The
classes have vLLM's names where the agent's hooks for vLLM look for them.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gc_sidecar.embedded import ENGINE_NAME as ENGINE_NAME
from gc_sidecar.embedded.channels import ChannelClosed, encode, receive
from gc_sidecar.embedded.core import (
    Dead,
    EngineCoreRequestType,
    Ready,
    Statistics,
    Tokens,
    UtilityResult,
)
from gc_sidecar.embedded.histogram import Histogram, inter_token_histogram
from gc_sidecar.embedded.scheduler import Token
from gc_sidecar.embedded.settings import EngineConfig

NO_STATISTICS = Statistics(0, 0, 0, 0.0)


class EngineDeadError(RuntimeError):
    """An engine core is gone; this engine does not come back."""

    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue; see its log for the cause")


@dataclass(eq=False)
class CoreConnection:
    """The way to one engine core."""

    index: int
    writer: asyncio.StreamWriter
    statistics: Statistics = NO_STATISTICS
    # This API server's that are not finished yet, and when the core made the latest token of each.
    requests: dict[str, float | None] = field(default_factory=dict)
    # Steps that made tokens for this API server, and those tokens.
    iterations: int = 0
    iteration_tokens: int = 0
    inter_token_s: Histogram = field(default_factory=inter_token_histogram)


class CoreClient:
    """The engine cores as an API server sees them."""

    def __init__(self, client_index: int) -> None:
        self.core_engines: list[CoreConnection] = []
        self.is_dead = False
        self._client_index = client_index
        self._call_ids = itertools.count()
        self._request_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[str, asyncio.Queue[Token | None]] = {}
        self._readers: list[asyncio.Task[None]] = []

    async def connect(self, sockets: Sequence[socket.socket]) -> None:
        """Take up the connections and wait until every engine core is ready. Raises EngineDeadError."""
        streams = [await asyncio.open_unix_connection(sock=end) for end in sockets]
        for index, (reader, writer) in enumerate(streams):
            connection = CoreConnection(index, writer)
            try:
                ready = await receive(reader)
            except ChannelClosed:
                raise EngineDeadError from None
            if not isinstance(ready, Ready):
                raise EngineDeadError
            self.core_engines.append(connection)
            self._readers.append(asyncio.create_task(self._listen(reader, connection)))

    # --- calls ---

    async def collective_rpc_async(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `method` in the workers of every engine core; the first engine's results."""
        results = await self.call_utility_all_async("collective_rpc", method, timeout, args, kwargs)
        return results[0]

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every engine core: one result per engine."""
        calls = (self._call_utility_async(method, *args, engine=e) for e in self.core_engines)
        return list(await asyncio.gather(*calls))

    async def _call_utility_async(self, method: str, *args: Any, engine: CoreConnection) -> Any:
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            request = (self._client_index, call_id, method, args)
            self._send(engine, EngineCoreRequestType.UTILITY, request)
            return await future
        finally:
            self._calls.pop(call_id, None)

    # --- completions ---

    async def stream(self, max_tokens: int) -> AsyncIterator[Token]:
        """The tokens of a new request, as they are made."""
        engine = min(self.core_engines, key=lambda e: (len(e.requests), e.index))
        request_id = f"{self._client_index}-{next(self._request_ids)}"
        tokens = self._streams[request_id] = asyncio.Queue()
        engine.requests[request_id] = None
        finished = False
        try:
            request = (request_id, self._client_index, max_tokens)
            self._send(engine, EngineCoreRequestType.ADD, request)
            while not finished:
                token = await tokens.get()
                if token is None:
                    raise EngineDeadError
                finished = token.finish_reason is not None
                yield token
        finally:
            del self._streams[request_id]
            del engine.requests[request_id]
            if not finished and not self.is_dead:
                self._send(engine, EngineCoreRequestType.ABORT, request_id)

    def _send(self, engine: CoreConnection, kind: EngineCoreRequestType, request: Any) -> None:
        if self.is_dead:
            raise EngineDeadError
        engine.writer.write(encode((kind, request)))

    # --- what comes back ---

    async def _listen(self, reader: asyncio.StreamReader, connection: CoreConnection) -> None:
        try:
            while not isinstance(message := await receive(reader), Dead):
                self._take(message, connection)
        except ChannelClosed:
            pass
        self._die()

    def _take(self, message: Any, connection: CoreConnection) -> None:
        if isinstance(message, Tokens):
            connection.iterations += 1
            connection.iteration_tokens += len(message.tokens)
            for token in message.tokens:
                stream = self._streams.get(token.request_id)
                if stream is not None:
                    # By the core's clock, as in vLLM: a pause of this process makes no token late.
                    last_s = connection.requests[token.request_id]
                    if last_s is not None:
                        connection.inter_token_s.observe(message.made_s - last_s)
                    connection.requests[token.request_id] = message.made_s
                    stream.put_nowait(token)
        elif isinstance(message, UtilityResult):
            future = self._calls.get(message.call_id)
            if future is not None and not future.done():
                if message.failure is None:
                    future.set_result(message.result)
                else:
                    future.set_exception(RuntimeError(message.failure))
        elif isinstance(message, Statistics):
            connection.statistics = message

    def _die(self) -> None:
        self.is_dead = True
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError())
        for stream in self._streams.values():
            stream.put_nowait(None)


class AsyncLLM:
    """What the API server's routes call."""

    def __init__(
        self, vllm_config: EngineConfig, engine_core: CoreClient, *, client_index: int
    ) -> None:
        self.vllm_config = vllm_config
        self.engine_core = engine_core
        self.client_index = client_index

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `method` in every worker; the first engine's results."""
        return await self.engine_core.collective_rpc_async(method, timeout, args, kwargs)

    async def check_health(self) -> None:
        """Raises EngineDeadError."""
        if self.engine_core.is_dead:
            raise EngineDeadError

    def generate(self, max_tokens: int) -> AsyncIterator[Token]:
        """The tokens of a new request."""
        return self.engine_core.stream(max_tokens)
