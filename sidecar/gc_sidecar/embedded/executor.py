"""The engine core's side of its workers: starts them, broadcasts to them, collects what they reply.

RPC replies carry no tag and wait in a queue per worker, as in vLLM: a call that fails or times out leaves replies
behind, and from then on a worker answers each call with its reply to an earlier one. Steps are acknowledged on a
pipe of their own and stay right.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from gc_sidecar.embedded.by_value import FunctionByValue
from gc_sidecar.embedded.channels import Channel, ChannelClosed, encode
from gc_sidecar.embedded.processes import fork, send_signal
from gc_sidecar.embedded.settings import EngineConfig
from gc_sidecar.embedded.worker import STEP_DONE, SUCCESS, run_worker

WORKER_DIED = -1


class Executor:
    """The workers of one engine core."""

    def __init__(self, config: EngineConfig, foreign: Iterable[socket.socket]) -> None:
        """Fork the workers; none of them keeps a socket of `foreign`."""
        parallel = config.parallel_config
        pairs = [socket.socketpair() for _ in range(parallel.world_size)]
        self._steps_done, step_done = os.pipe()
        self._report_death = step_done
        self._pids: list[int] = []
        for rank, (_, theirs) in enumerate(pairs):

            def main(rank: int = rank, theirs: socket.socket = theirs) -> None:
                for end in (*foreign, *(end for pair in pairs for end in pair)):
                    if end is not theirs:
                        end.close()
                os.close(self._steps_done)
                run_worker(config, rank, Channel(theirs), step_done)

            title = f"embedded worker dp{parallel.data_parallel_index} r{rank}"
            self._pids.append(fork(title, main))
        for _, theirs in pairs:
            theirs.close()
        self._channels = [Channel(ours) for ours, _ in pairs]
        self._futures: deque[_ReplyFuture] = deque()
        self.is_failed = False

    def wait_until_ready(self) -> None:
        """Wait until every worker has its heap. Raises RuntimeError when one ends instead."""
        for rank, channel in enumerate(self._channels):
            try:
                channel.receive()
            except ChannelClosed:
                raise RuntimeError(f"worker {rank} ended while it started") from None

    def watch(self, on_failure: Callable[[], None]) -> None:
        """From now on, notice when a worker dies: `on_failure` is called on a thread of ours."""

        def wait() -> None:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                return
            rank = self._pids.index(pid)
            print(f"worker {rank} (pid {pid}) ended with status {status}", flush=True)
            self.is_failed = True
            on_failure()
            # A step may be waiting for the dead one's word.
            os.write(self._report_death, STEP_DONE.pack(rank, WORKER_DIED, 0))

        threading.Thread(target=wait, name="worker-watch", daemon=True).start()

    def shutdown(self) -> None:
        """End the workers. What they did is lost, and nobody needs it."""
        for pid in self._pids:
            send_signal(pid, signal.SIGKILL)

    def execute_model(self, number: int) -> int:
        """One step in all workers; returns when the last one has done its share. The number of objects
        that the worker of rank 0 retains now."""
        self._broadcast(number)
        waiting = len(self._channels)
        retained = 0
        while waiting:
            # Whole records only, so a read of whole records never ends inside one.
            data = os.read(self._steps_done, STEP_DONE.size * waiting)
            for rank, done, kept in STEP_DONE.iter_unpack(data):
                if done == WORKER_DIED:
                    raise RuntimeError(f"worker {rank} died")
                if rank == 0:
                    retained = kept
                waiting -= 1
        return retained

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """Call `method` in every worker: a list of results, or with `non_block` a future of it.

        Raises at the first rank that failed or timed out; the replies of those behind it stay where they are.
        """
        if self.is_failed:
            raise RuntimeError("Executor failed.")
        deadline = None if timeout is None else time.monotonic() + timeout
        send = method if isinstance(method, str) else FunctionByValue.of(method)
        self._broadcast((send, args, kwargs or {}, unique_reply_rank))
        channels = self._channels
        if unique_reply_rank is not None:
            channels = [channels[unique_reply_rank]]

        def collect() -> Any:
            results = []
            for channel in channels:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                try:
                    status, result = channel.receive(left)
                except TimeoutError:
                    raise TimeoutError(f"RPC call to {method} timed out.") from None
                if status != SUCCESS:
                    raise RuntimeError(
                        f"Worker failed with error '{result}', please check the stack trace above for the root"
                        " cause"
                    )
                results.append(result)
            return results if unique_reply_rank is None else results[0]

        future = _ReplyFuture(self._futures, collect)
        return future if non_block else future.result()

    def _broadcast(self, message: Any) -> None:
        data = encode(message)
        for channel in self._channels:
            channel.send_encoded(data)


class _ReplyFuture(Future[Any]):
    """Replies are read when somebody waits for them, those of earlier calls first."""

    def __init__(self, queue: deque[_ReplyFuture], collect: Callable[[], Any]) -> None:
        super().__init__()
        self._queue = queue
        self._collect = collect
        queue.appendleft(self)

    def result(self, timeout: float | None = None) -> Any:
        """The results; `timeout` is not for this future."""
        if timeout is not None:
            raise RuntimeError("timeout not implemented")
        while not self.done():
            self._queue.pop()._wait()
        return super().result()

    def _wait(self) -> None:
        try:
            replies = self._collect()
        except Exception as error:
            with suppress(InvalidStateError):
                self.set_exception(error)
        else:
            with suppress(InvalidStateError):
                self.set_result(replies)
