"""A worker of the embedded engine: carries out what its engine core broadcasts, one thing after the other.

The classes have vLLM's names, so that the agent's hooks for vLLM fit. Standard library only: 64 of them run on a
laptop.
"""

from __future__ import annotations

import gc
import os
import struct
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from gc_sidecar.embedded import ENGINE_NAME as ENGINE_NAME
from gc_sidecar.embedded.by_value import FunctionByValue
from gc_sidecar.embedded.channels import Channel, ChannelClosed
from gc_sidecar.embedded.heap import make_heap
from gc_sidecar.embedded.plugins import load_plugins, resolve
from gc_sidecar.embedded.settings import EngineConfig

# What a worker says at the end of a step: its rank, the step's number, how many objects it retains. Small
# enough for a pipe to take it in one piece from many writers.
STEP_DONE = struct.Struct("=iqq")

SUCCESS, FAILURE = "success", "failure"


class WorkerBase:
    """What the agent's hook waits for: its __init__ tells that this process is a worker, and which."""

    def __init__(self, vllm_config: EngineConfig, rank: int) -> None:
        self.vllm_config = vllm_config
        self.rank = rank


class Worker(WorkerBase):
    """The methods that collective_rpc can call, and its share of every step."""

    def __init__(self, vllm_config: EngineConfig, rank: int) -> None:
        super().__init__(vllm_config, rank)
        settings = vllm_config.settings
        self.heap = make_heap(settings)
        self._step_s = settings.step_ms / 1000
        self._stall_s = 0.0

    def load_model(self) -> None:
        """There is no model: what a start leaves behind is a heap."""
        settings = self.vllm_config.settings
        self.heap.fill(settings.heap_objects)
        if settings.start_frozen == "all":
            gc.freeze()

    def execute_model(self) -> None:
        """Its share of one step. Whatever holds it up here holds up every process."""
        ends_at = time.monotonic() + self._step_s
        self.heap.step()
        stall_s, self._stall_s = self._stall_s, 0.0
        time.sleep(max(0.0, ends_at - time.monotonic()) + stall_s)

    def check_health(self) -> None:
        """Nothing, as in vLLM: what a bare call costs."""

    def gc_state(self) -> dict[str, Any]:
        """GC's true state here, for those who doubt the page. Walks the list of what is frozen."""
        return {
            "pid": os.getpid(),
            "rank": self.rank,
            "enabled": gc.isenabled(),
            "threshold": list(gc.get_threshold()),
            "frozen": gc.get_freeze_count(),
            "retained": self.heap.retained_objects,
        }

    def echo(self, value: Any) -> dict[str, Any]:
        """`value` and the rank: shows whose reply came back, and to which call."""
        return {"rank": self.rank, "value": value}

    def sleep_on(self, rank: int, seconds: float) -> dict[str, Any]:
        """Take long in the worker of `rank`, at once in the others."""
        if self.rank == rank:
            time.sleep(seconds)
        return {"rank": self.rank, "value": f"slept on {rank}"}

    def fail_on(self, rank: int) -> dict[str, Any]:
        """Raise in the worker of `rank`, answer in the others."""
        if self.rank == rank:
            raise RuntimeError(f"rank {rank} was asked to fail")
        return {"rank": self.rank, "value": f"failed on {rank}"}

    def stall_next_step(self, rank: int, seconds: float, dp_rank: int | None = None) -> None:
        """Hold up the next step by `seconds` in the worker of `rank`, of one engine core or of each."""
        own = self.vllm_config.parallel_config.data_parallel_index
        if self.rank == rank and dp_rank in (None, own):
            self._stall_s = seconds


class WorkerWrapperBase:
    """What RPC methods are looked up on; what it lacks is looked up on its worker, as in vLLM."""

    def __init__(self, rpc_rank: int = 0, global_rank: int | None = None) -> None:
        self.rpc_rank = rpc_rank
        self.global_rank = rpc_rank if global_rank is None else global_rank
        self.worker: Worker

    def init_worker(self, config: EngineConfig, worker_class: type[Worker]) -> None:
        """Make the worker."""
        self.worker = worker_class(config, self.rpc_rank)

    def __getattr__(self, name: str) -> Any:
        if name == "worker":  # not made yet
            raise AttributeError(name)
        return getattr(self.worker, name)


def run_worker(config: EngineConfig, rank: int, channel: Channel, step_done: int) -> None:
    """The whole life of a worker process, until its engine core is gone."""
    settings = config.settings
    load_plugins(settings.plugin)
    if not settings.without_agent and rank not in settings.worker_without_agent:
        _hook()
    wrapper = WorkerWrapperBase(rank)
    wrapper.init_worker(config, _worker_class(settings.worker_extension_cls))
    wrapper.worker.load_model()
    try:
        channel.send((SUCCESS, "ready"))
        while True:
            request = channel.receive()
            if isinstance(request, int):
                wrapper.worker.execute_model()
                retained = wrapper.worker.heap.retained_objects
                os.write(step_done, STEP_DONE.pack(rank, request, retained))
            else:
                _answer(wrapper, request, channel)
    except (ChannelClosed, BrokenPipeError):
        return


def _answer(wrapper: WorkerWrapperBase, request: tuple[Any, ...], channel: Channel) -> None:
    """Carry out one RPC. The reply bears no mark of the call that it answers: that is vLLM's, too."""
    method, args, kwargs, output_rank = request
    try:
        function: Callable[..., Any]
        if isinstance(method, FunctionByValue):
            function = partial(method.build(), wrapper)
        else:
            function = getattr(wrapper, method)
        reply = (SUCCESS, function(*args, **kwargs))
    except Exception as error:
        traceback.print_exc()
        reply = (FAILURE, str(error))
    if output_rank is None or output_rank == wrapper.rpc_rank:
        channel.send(reply)


def _worker_class(extension: str | None) -> type[Worker]:
    """The worker's class, with the extension mixed in under vLLM's condition."""
    if extension is None:
        return Worker
    extension_class = resolve(extension)
    for name in dir(extension_class):
        if not name.startswith("__") and hasattr(Worker, name):
            raise AssertionError(
                f"Worker class {Worker} already has an attribute {name}, which conflicts with the worker"
                f" extension class {extension_class}."
            )
    # The agent's own extension looks for vLLM's modules by their names; ours has another.
    if "gc_sidecar_agent.plugin" in sys.modules and extension.startswith("gc_sidecar_agent."):
        _hook()
    return type("Worker", (Worker, extension_class), {})


def _hook() -> None:
    from gc_sidecar_agent.plugin import hook_worker_base

    hook_worker_base(sys.modules[__name__])
