"""The `vllm.general_plugins` entry point: installs hooks into vLLM's classes and does nothing else.

vLLM calls it in every process it starts, helpers included. The agent begins when a hook fires: a worker is
made, an engine core enters its busy loop, an API server has its engine client.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from gc_sidecar_agent.agent import Topology, reply_dict, this_process
from gc_sidecar_agent.command import (
    INTERNAL_KINDS,
    METHOD,
    OPERATION_KINDS,
    Command,
    CommandError,
    Outcome,
    echoed_id,
    parse_command,
)
from gc_sidecar_agent.gate import this_gate

logger = logging.getLogger("vllm.gc_sidecar_agent")

SENDING_S = 0.003
# How often a call that waits looks whether its engine has died.
ENGINE_LOOK_S = 0.5


def register() -> None:
    """Install the hooks, now or when vLLM imports the module in question. Idempotent.

    Raises nothing but GateError: an environment that asks for a policy which does not exist.
    """
    this_gate()
    for module_name, install in HOOKS.items():
        module = sys.modules.get(module_name)
        if module is not None:
            _install(install, module)
    if not any(isinstance(finder, _HookOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _HookOnImport())


def _install(install: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        install(module)
    except Exception as error:
        logger.info("gc-sidecar: cannot hook %s: %s", module.__name__, error)


class _HookOnImport(importlib.abc.MetaPathFinder):
    """Installs a hook right after vLLM itself imports the module: importing it for vLLM would change the order
    of its imports and cost every helper process time."""

    def __init__(self) -> None:
        self._looking_for: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        install = HOOKS.get(fullname)
        if install is None or fullname in self._looking_for:
            return None
        self._looking_for.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking_for.discard(fullname)
        loader = spec.loader if spec is not None else None
        if loader is None:
            return None
        execute = loader.exec_module

        def execute_then_install(module: ModuleType) -> None:
            execute(module)
            _install(install, module)

        loader.exec_module = execute_then_install  # type: ignore[method-assign]
        return spec


def _wrap(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace `owner.name` by what `make` builds round it, once."""
    original = owner.__dict__.get(name)
    if original is None or hasattr(original, "__gc_sidecar__"):
        return
    wrapper = functools.wraps(original)(make(original))
    wrapper.__gc_sidecar__ = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)


def _quietly(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:
        logger.info("gc-sidecar: %s: %s", type(error).__name__, error)


# --- workers ---


def hook_worker_base(module: ModuleType) -> None:
    """vllm.v1.worker.worker_base: the method that collective_rpc calls, and the worker's start."""
    engine = _engine_name(module)
    setattr(module.WorkerWrapperBase, METHOD, _worker_command)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            _quietly(lambda: _start_worker(self, engine))

        return __init__

    _wrap(module.WorkerBase, "__init__", make)


def _worker_command(_worker: Any, *args: Any, **_kwargs: Any) -> dict[str, Any]:
    # Any arguments will do: a call that raises would leave the other workers' replies in their queues.
    return this_process().handle(args[0] if args else None)


def _start_worker(worker: Any, engine: str) -> None:
    config = worker.vllm_config.parallel_config
    this_process().start("worker", _dp_rank(config), int(worker.rank), _topology(config), engine)


def _forward_function() -> Callable[..., Any]:
    """What the engine core runs in each worker. A local function travels by value, so a worker in which our
    package is missing answers with a code; a method name that it lacks would desynchronise its replies."""

    def forward(worker: Any, method: str, request: Any) -> Any:
        command = getattr(worker, method, None)
        if command is None:
            return {
                "version": request.get("version"),
                "operation_id": request.get("operation_id"),
                "outcome": {
                    "operation_id": request.get("operation_id"),
                    "kind": request.get("kind"),
                    "generation": 0,
                    "ok": False,
                    "code": "no_agent",
                    "detail": f"worker rank {getattr(worker, 'global_rank', '?')} runs without the agent",
                },
                "report": None,
            }
        return command(request)

    return forward


# --- engine cores ---


def hook_engine_core(module: ModuleType) -> None:
    """vllm.v1.engine.core: the call that fans out, the busy loop's begin, and a way to wake it."""
    engine = _engine_name(module)
    # Older engines have no such request: their idle busy loop waits for the next one.
    wakeup = getattr(module.EngineCoreRequestType, "WAKEUP", None)

    def make_busy_loop(original: Callable[..., Any]) -> Callable[..., Any]:
        def run_busy_loop(self: Any) -> Any:
            _quietly(lambda: _start_engine_core(self, engine, wakeup))
            return original(self)

        return run_busy_loop

    _wrap(module.EngineCore, "collective_rpc", _make_core_rpc)
    for core in (module.EngineCoreProc, getattr(module, "DPEngineCoreProc", None)):
        if core is not None:
            _wrap(core, "run_busy_loop", make_busy_loop)
    _wrap(module.EngineCoreProc, "_handle_client_request", _make_handle_client_request)


def _make_core_rpc(original: Callable[..., Any]) -> Callable[..., Any]:
    def collective_rpc(
        self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        if method != METHOD:
            return original(self, method, timeout, args, kwargs)
        request = args[0] if args else None
        return _command_all(self, request)

    return collective_rpc


def _command_all(core: Any, request: Any) -> list[Any]:
    """Carry out a command in this engine core and its workers, side by side. Never raises."""
    try:
        parse_command(request)
    except CommandError:
        return [this_process().handle(request)]  # which says what is wrong with it
    arguments = (METHOD, request)
    try:
        future = core.model_executor.collective_rpc(
            _forward_function(), args=arguments, non_block=True
        )
    except Exception as error:
        return [this_process().handle(request), _rpc_failure(request, error)]
    own = this_process().handle(request)
    try:
        replies = list(future.result())
    except Exception as error:
        replies = [_rpc_failure(request, error)]
    return [own, *replies]


def _failure(request: Any, code: str, detail: str) -> dict[str, Any]:
    """The reply of processes that cannot say themselves what happened."""
    kind = request.get("kind") if isinstance(request, dict) else None
    known = kind if kind in (*OPERATION_KINDS, *INTERNAL_KINDS) else "unknown"
    outcome = Outcome(echoed_id(request), known, 0, ok=False, code=code, detail=detail)
    return reply_dict(outcome, None)


def _rpc_failure(request: Any, error: Exception) -> dict[str, Any]:
    return _failure(request, "worker_rpc_failed", f"{type(error).__name__}: {error}"[:500])


class _BusyLoopMail:
    """Commands that the agent's thread leaves for the busy loop to carry out on its own thread."""

    def __init__(self, core: Any, wakeup: Any) -> None:
        self._core = core
        self._wakeup = wakeup
        # In their order, each once: by what an agent knows that it has carried a command out already.
        self._requests: dict[tuple[Any, ...], tuple[dict[str, Any], float | None]] = {}

    def post(self, request: dict[str, Any], until: float | None) -> None:
        """Leave `request`, not to begin after `until`, and wake the loop."""
        identity = tuple(request[name] for name in ("operation_id", "kind", "generation"))
        self._requests.setdefault(identity, (request, until))
        self.wake()

    def wake(self) -> None:
        """Have a loop that waits for work come round once."""
        self._core.input_queue.put_nowait((self._wakeup, None))

    def take(self) -> None:
        """On the busy loop: carry out what was left."""
        for identity in list(self._requests):
            request, until = self._requests.pop(identity)
            if until is None or time.time() < until:
                _command_all(self._core, request)


def _start_engine_core(core: Any, engine: str, wakeup: Any) -> None:
    config = core.vllm_config.parallel_config
    agent = this_process()
    agent.start("engine_core", _dp_rank(config), 0, _topology(config), engine)
    if wakeup is not None:
        mail = _BusyLoopMail(core, wakeup)
        core.gc_sidecar_mail = mail
        agent.busy_loop = mail.post
        agent.main_thread.wake = mail.wake
    # The busy loop is about to begin, so start-up is over in this process and in its workers.
    _command_all(core, Command("ready", f"ready-{uuid.uuid4().hex[:12]}", 0).to_dict())


def _make_handle_client_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def _handle_client_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        mail = getattr(self, "gc_sidecar_mail", None)
        if mail is not None:
            _quietly(mail.take)
        return original(self, *args, **kwargs)

    return _handle_client_request


# --- API servers ---


def hook_async_llm(module: ModuleType) -> None:
    """vllm.v1.engine.async_llm: the API server's start, and a call that reaches every engine core."""
    engine = _engine_name(module)

    def make_init(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            _quietly(lambda: _start_api_server(self, kwargs.get("client_index"), engine))

        return __init__

    def make_rpc(original: Callable[..., Any]) -> Callable[..., Any]:
        async def collective_rpc(
            self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
        ) -> Any:
            if method != METHOD:
                return await original(self, method, timeout, args, kwargs)
            return await _command_every_engine(self, original, args[0] if args else None)

        return collective_rpc

    _wrap(module.AsyncLLM, "__init__", make_init)
    _wrap(module.AsyncLLM, "collective_rpc", make_rpc)


def _start_api_server(client: Any, client_index: int | None, engine: str) -> None:
    config = client.vllm_config.parallel_config
    rank = client_index if client_index is not None else getattr(config, "_api_process_rank", 0)
    # With a load balancer outside, each launch has an API server of its own and the same rank 0.
    dp_rank = _dp_rank(config) if getattr(config, "local_engines_only", False) else 0
    topology = _topology(config, is_api_server=True)
    agent = this_process()
    agent.start("api_server", dp_rank, max(0, int(rank)), topology, engine)
    agent.set_ready()


async def _command_every_engine(
    client: Any, original: Callable[..., Any], request: Any
) -> list[Any]:
    """Carry out a command in every engine core, in their workers, and in this API server meanwhile.

    vLLM's own call returns the first engine's results only.
    """
    engines = asyncio.ensure_future(_ask_each_engine(client, original, request))
    # A collection here holds up this loop: let the calls go out first, so that all pauses run side by side.
    await asyncio.wait([engines], timeout=SENDING_S)
    # Not on this loop's own thread: it may have to wait for an operation that the agent's thread runs.
    own = await asyncio.to_thread(this_process().handle, request)
    try:
        answers = await _unless_dead(client, engines)
        return [*(reply for replies in answers for reply in replies), own]
    except Exception as error:  # the engine died, say; what was done here is told nevertheless
        return [_rpc_failure(request, error), own]


async def _unless_dead(client: Any, engines: asyncio.Future[list[list[Any]]]) -> list[list[Any]]:
    """What the engines answer. Raises RuntimeError where they have died: vLLM would leave the call waiting for
    ever, and its server, which waits for our request before it ends, with it."""
    while not (await asyncio.wait([engines], timeout=ENGINE_LOOK_S))[0]:
        if getattr(client, "errored", False):
            engines.cancel()
            raise RuntimeError("the engine died")
    return engines.result()


async def _ask_each_engine(
    client: Any, original: Callable[..., Any], request: Any
) -> list[list[Any]]:
    # Proven once per client: calling a method that a worker lacks would leave replies in its queues for ever.
    engine_core = client.engine_core
    if not getattr(client, "_gc_sidecar_method_is_there", False):
        names = await _call_each_engine(engine_core, client, original, "__dir__", ())
        if not all(METHOD in worker for engine in names for worker in engine):
            detail = "a worker runs without the agent; nothing was sent"
            return [[_failure(request, "no_agent", detail)]]
        client._gc_sidecar_method_is_there = True
    return await _call_each_engine(engine_core, client, original, METHOD, (request,))


async def _call_each_engine(
    engine_core: Any, client: Any, original: Callable[..., Any], method: str, args: tuple[Any, ...]
) -> list[list[Any]]:
    if hasattr(engine_core, "call_utility_all_async"):
        results = await engine_core.call_utility_all_async(
            "collective_rpc", method, None, args, None
        )
        return list(results)
    if hasattr(engine_core, "_call_utility_async") and hasattr(engine_core, "core_engines"):
        calls = [
            engine_core._call_utility_async("collective_rpc", method, None, args, None, engine=e)
            for e in engine_core.core_engines
        ]
        return list(await asyncio.gather(*calls))
    return [await original(client, method, None, args, None)]


# --- what vLLM's configuration says ---


def _dp_rank(config: Any) -> int:
    index = getattr(config, "data_parallel_index", None)
    return int(index if index is not None else getattr(config, "data_parallel_rank", 0))


def _topology(config: Any, is_api_server: bool = False) -> Topology:
    """The processes that this configuration tells of.

    An engine core of a dense model with data parallelism sees itself alone (vLLM reconfigures it so); its API
    servers see all ranks. With a load balancer outside, each launch has its own ranks only, and only its API
    servers know under which rank they go.
    """
    size = int(getattr(config, "data_parallel_size", 1))
    own = _dp_rank(config)
    local_only = bool(getattr(config, "local_engines_only", False))
    dp_ranks = tuple(range(size))
    if size == 1:
        dp_ranks = (own,)
    elif local_only:
        dp_ranks = tuple(range(own, own + int(getattr(config, "data_parallel_size_local", 1))))
    api_servers: int | None = int(getattr(config, "_api_process_count", 1))
    if "--headless" in sys.argv or os.environ.get("VLLM_USE_RUST_FRONTEND", "0") == "1":
        api_servers = 0  # they live elsewhere, or are not Python
    elif local_only and not is_api_server:
        api_servers = None
    return Topology(dp_ranks, int(getattr(config, "world_size", 1)), api_servers)


def _engine_name(module: ModuleType) -> str:
    """What engine the hooked module is of, as `vllm 0.32.0`."""
    package = module.__name__.partition(".")[0]
    version = getattr(sys.modules.get(package), "__version__", "unknown")
    return getattr(module, "ENGINE_NAME", f"{package} {version}")


HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "vllm.v1.worker.worker_base": hook_worker_base,
    "vllm.v1.engine.core": hook_engine_core,
    "vllm.v1.engine.async_llm": hook_async_llm,
}
