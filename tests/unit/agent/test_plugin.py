"""The plugin's hooks, in stand-ins for vLLM's classes (tests/vllm has the real ones)."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gc_sidecar_agent import agent as agent_module
from gc_sidecar_agent import plugin
from gc_sidecar_agent.agent import RUN_DIR_VARIABLE, Topology, this_process
from gc_sidecar_agent.board import Board, Lease, write_board
from gc_sidecar_agent.command import METHOD, Command
from gc_sidecar_agent.page import list_pages, read_page
from gc_sidecar_agent.plugin import HOOKS, register
from gc_sidecar_agent.rules import HELD_OFF
from tests.unit.agent.own_process import in_own_process
from tests.unit.agent.stand_in_vllm import vllm_on_path
from tests.unit.agent.waiting import wait_until

WORKER_BASE, CORE, ASYNC_LLM = (
    "vllm.v1.worker.worker_base",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
)


def config(**parallel: Any) -> Any:
    return SimpleNamespace(parallel_config=SimpleNamespace(**{"world_size": 2, **parallel}))


class StandInExecutor:
    """Runs what collective_rpc is given in each of its workers, as vLLM's executors do."""

    def __init__(self, *workers: Any) -> None:
        self.workers = workers
        self.calls: list[Any] = []

    def collective_rpc(
        self,
        method: Any,
        timeout: Any = None,
        args: Any = (),
        kwargs: Any = None,
        non_block: bool = False,
    ) -> Any:
        self.calls.append((method, timeout, non_block))
        replies = [
            method(worker, *args) if callable(method) else getattr(worker, method)(*args)
            for worker in self.workers
        ]
        future: Future[list[Any]] = Future()
        future.set_result(replies)
        return future if non_block else replies


def request(kind: str, generation: int = 1, **fields: Any) -> dict[str, Any]:
    return Command(kind, f"{kind}-{generation}", generation, **fields).to_dict()


def started_worker(module: ModuleType, rank: int = 1) -> Any:
    wrapper = module.WorkerWrapperBase(rank)
    wrapper.init_worker(config(data_parallel_index=0))
    return wrapper


def is_hooked(module: ModuleType) -> bool:
    functions = [
        f for owner in vars(module).values() for f in getattr(owner, "__dict__", {}).values()
    ]
    return any(hasattr(function, "__gc_sidecar__") for function in functions)


# --- how the hooks come in ---


@pytest.mark.parametrize("name", list(HOOKS))
@in_own_process
def test_a_module_that_vllm_imports_later_is_hooked_then(tmp_path: Path, name: str) -> None:
    vllm_on_path(tmp_path)
    register()
    # Nothing of vLLM is imported for our sake: that would change the order of its imports.
    assert not any(module.startswith("vllm") for module in sys.modules)
    assert is_hooked(importlib.import_module(name))


@pytest.mark.parametrize("name", list(HOOKS))
@in_own_process
def test_a_module_that_is_imported_already_is_hooked_at_once(tmp_path: Path, name: str) -> None:
    vllm_on_path(tmp_path)
    module = importlib.import_module(name)
    assert not is_hooked(module)
    register()
    assert is_hooked(module)


@in_own_process
def test_registering_again_changes_nothing(tmp_path: Path) -> None:
    vllm_on_path(tmp_path)
    register()
    modules = [importlib.import_module(name) for name in HOOKS]

    def hooked() -> list[Any]:
        owners = [owner for module in modules for owner in vars(module).values()]
        return [dict(owner.__dict__) for owner in owners if isinstance(owner, type)]

    finders = list(sys.meta_path)
    before = hooked()
    for _ in range(5):
        register()
    assert hooked() == before
    assert sys.meta_path == finders


@in_own_process
def test_a_hooked_function_looks_like_the_original(tmp_path: Path) -> None:
    vllm_on_path(tmp_path)
    register()
    core = importlib.import_module(CORE)
    assert core.EngineCore.collective_rpc.__name__ == "collective_rpc"
    assert core.EngineCore.collective_rpc.__doc__ == "vLLM's own docstring."


@in_own_process
def test_a_module_is_what_it_would_be_without_us(tmp_path: Path) -> None:
    vllm_on_path(tmp_path)
    register()
    core = importlib.import_module(CORE)
    assert core.__spec__ is not None
    assert core.__spec__.name == core.__name__ == CORE
    assert core.__file__ == str(tmp_path / "vllm/v1/engine/core.py")
    assert importlib.reload(core) is core
    assert is_hooked(core)


@pytest.mark.parametrize(
    "change", [{"worker_base": ""}, {"core": "EngineCore = 1"}, {"async_llm": "class AsyncLLM: 1"}]
)
@in_own_process
def test_a_vllm_without_these_classes_is_imported_as_if_we_were_not_there(
    tmp_path: Path, change: dict[str, str]
) -> None:
    vllm_on_path(tmp_path, **change)
    register()
    for name in HOOKS:
        importlib.import_module(name)
    register()


@in_own_process
def test_a_module_that_is_missing_is_missing_as_without_us(tmp_path: Path) -> None:
    register()
    for name in HOOKS:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name
        assert missing == "vllm"
    vllm_on_path(tmp_path)
    (tmp_path / "vllm/v1/engine/core.py").unlink()
    importlib.invalidate_caches()
    try:
        importlib.import_module(CORE)
    except ModuleNotFoundError as error:
        missing = error.name
    assert missing == CORE


@in_own_process
def test_a_module_that_fails_to_import_fails_with_its_own_error(tmp_path: Path) -> None:
    vllm_on_path(tmp_path, core="raise RuntimeError('no CUDA')")
    register()
    try:
        importlib.import_module(CORE)
    except RuntimeError as error:
        message = str(error)
    assert message == "no CUDA"
    assert CORE not in sys.modules


@in_own_process
def test_an_import_that_was_forbidden_or_emptied_is_no_reason_to_fail() -> None:
    for strange in (None, ModuleType("vllm.strange")):
        for name in HOOKS:
            sys.modules[name] = strange  # type: ignore[assignment]
        register()


@in_own_process
def test_registering_alone_starts_nothing(tmp_path: Path) -> None:
    # vLLM loads plugins in helper processes too: those get no page and no thread.
    os.environ[RUN_DIR_VARIABLE] = str(tmp_path)
    callbacks, threads = list(gc.callbacks), threading.active_count()
    register()
    assert list(tmp_path.iterdir()) == []
    assert gc.callbacks == callbacks
    assert threading.active_count() == threads


# --- workers ---


@in_own_process
def test_a_worker_that_is_made_starts_the_agent_and_answers(tmp_path: Path) -> None:
    os.environ[RUN_DIR_VARIABLE] = str(tmp_path / "run")
    (tmp_path / "run").mkdir()
    vllm_on_path(tmp_path)
    register()
    worker = started_worker(importlib.import_module(WORKER_BASE), rank=3)
    agent = this_process()
    assert (agent.roles, agent.rank, agent.engine) == (["worker"], 3, "vllm 9.9.9")
    assert len(list_pages(str(tmp_path / "run"))) == 1
    assert not agent.ready
    reply = getattr(worker, METHOD)(request("freeze"))
    assert reply["outcome"]["ok"]
    assert agent.ready
    assert gc.get_threshold()[2] == HELD_OFF
    # vLLM refuses a worker extension with an attribute that the worker class has: ours is on the wrapper.
    assert not hasattr(worker.worker, METHOD)


@in_own_process
def test_an_agent_that_cannot_start_keeps_no_worker_from_starting(tmp_path: Path) -> None:
    vllm_on_path(tmp_path)
    register()
    module = importlib.import_module(WORKER_BASE)
    worker = module.WorkerBase(SimpleNamespace(parallel_config=None), rank="none")
    assert worker.rank == "none"
    assert this_process().roles == []


# --- engine cores ---


def engine_core(tmp_path: Path, kind: str = "EngineCoreProc") -> tuple[Any, StandInExecutor]:
    vllm_on_path(tmp_path)
    register()
    worker = started_worker(importlib.import_module(WORKER_BASE))
    executor = StandInExecutor(worker)
    core = getattr(importlib.import_module(CORE), kind)
    return core(config(data_parallel_index=0, data_parallel_size=1), executor), executor


@pytest.mark.parametrize("kind", ["EngineCoreProc", "DPEngineCoreProc"])
@in_own_process
def test_the_begin_of_the_busy_loop_makes_the_engine_ready(tmp_path: Path, kind: str) -> None:
    core, executor = engine_core(tmp_path, kind)
    agent = this_process()
    assert not agent.ready
    assert core.run_busy_loop().startswith("stepped")
    assert agent.ready
    assert agent.roles == ["engine_core", "worker"]
    # It told its workers, without a timeout, and did its own part meanwhile.
    ((method, timeout, non_block),) = executor.calls
    assert callable(method)
    assert (timeout, non_block) == (None, True)


@in_own_process
def test_our_method_is_carried_out_in_the_core_and_its_workers(tmp_path: Path) -> None:
    core, executor = engine_core(tmp_path)
    replies = core.collective_rpc(METHOD, args=(request("freeze"),))
    assert [reply["outcome"]["ok"] for reply in replies] == [True, True]
    assert [reply["operation_id"] for reply in replies] == ["freeze-1", "freeze-1"]
    assert gc.get_threshold()[2] == HELD_OFF
    assert len(executor.calls) == 1


@in_own_process
def test_every_other_call_is_vllms_own(tmp_path: Path) -> None:
    core, executor = engine_core(tmp_path)
    executor.workers[0].check = lambda *args: ["checked", *args]
    assert core.collective_rpc("check", 5, (1, 2)) == [["checked", 1, 2]]
    assert executor.calls == [("check", 5, False)]


@in_own_process
def test_a_worker_without_the_agent_answers_so_with_its_rank(tmp_path: Path) -> None:
    core, executor = engine_core(tmp_path)
    executor.workers = (executor.workers[0], SimpleNamespace(global_rank=7))
    own, first, second = core.collective_rpc(METHOD, args=(request("observe"),))
    assert own["outcome"]["ok"]
    assert first["outcome"]["ok"]
    assert second["outcome"]["code"] == "no_agent"
    assert "rank 7" in second["outcome"]["detail"]
    assert second["operation_id"] == second["outcome"]["operation_id"] == "observe-1"


@in_own_process
def test_what_workers_run_carries_nothing_of_ours_with_it() -> None:
    # It travels by value into a process that may not have our package: no global of ours, no closure.
    forward = plugin._forward_function()
    assert "<locals>" in forward.__qualname__
    assert forward.__closure__ is None
    names = set(forward.__code__.co_names)
    assert names <= {"getattr", "get"}, names


@pytest.mark.parametrize("when", ["at once", "later"])
@in_own_process
def test_a_call_to_the_workers_that_fails_is_a_reply_with_a_code(tmp_path: Path, when: str) -> None:
    core, executor = engine_core(tmp_path)
    future: Future[list[Any]] = Future()
    future.set_exception(RuntimeError("a worker died"))

    def fail(*_: Any, **__: Any) -> Any:
        if when == "at once":
            raise RuntimeError("a worker died")
        return future

    executor.collective_rpc = fail  # type: ignore[method-assign]
    own, failure = core.collective_rpc(METHOD, args=(request("freeze"),))
    assert own["outcome"]["ok"]
    assert failure["outcome"]["code"] == "worker_rpc_failed"
    assert "a worker died" in failure["outcome"]["detail"]
    assert failure["operation_id"] == "freeze-1"


@pytest.mark.parametrize("args", [(), (None,), (["freeze"],), ("freeze",)])
@in_own_process
def test_a_request_that_is_none_is_answered_and_not_sent_on(tmp_path: Path, args: Any) -> None:
    core, executor = engine_core(tmp_path)
    (reply,) = core.collective_rpc(METHOD, args=tuple(args))
    assert reply["outcome"]["code"] == "bad_command"
    assert executor.calls == []


@in_own_process
def test_a_command_on_the_board_is_carried_out_by_the_busy_loop_over_rpc(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    os.environ[RUN_DIR_VARIABLE] = str(run_dir)
    agent_module.POLL_S = 0.005
    agent_module.BOARD_GRACE_S = 60
    core, executor = engine_core(tmp_path)
    core.run_busy_loop()
    policy = Command("freeze", "b-1", 1)
    write_board(str(run_dir), Board(policy, lease=Lease(1, 60, time.time() + 60)))
    # The loop waits for work, as it does where the engine is idle: it is woken.
    core.handle_one()
    assert this_process().policy.mode == "freeze"
    assert len(executor.calls) == 2  # ready, and this one
    outcome = this_process().policy.outcome_of(policy)
    assert outcome is not None
    assert outcome.ok
    (page,) = (read_page(str(run_dir), name) for name in list_pages(str(run_dir)))
    assert page.description["state"]["generation"] == 1


@in_own_process
def test_what_the_busy_loop_comes_to_too_late_is_not_begun(tmp_path: Path) -> None:
    core, executor = engine_core(tmp_path)
    core.run_busy_loop()
    before = len(executor.calls)
    post = this_process().busy_loop
    assert post is not None
    late, in_time = Command("maintain", "late", 0), Command("maintain", "in-time", 0)
    post(late.to_dict(), time.time() - 0.001)
    post(in_time.to_dict(), time.time() + 60)
    post(in_time.to_dict(), None)  # it lies there already
    core.handle_one()
    assert len(executor.calls) == before + 1
    assert this_process().policy.outcome_of(late) is None
    assert this_process().policy.outcome_of(in_time) is not None


@in_own_process
def test_a_core_that_cannot_be_woken_follows_the_board_all_the_same(tmp_path: Path) -> None:
    # Engines before the request type WAKEUP.
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    os.environ[RUN_DIR_VARIABLE] = str(run_dir)
    agent_module.POLL_S = 0.005
    agent_module.BOARD_GRACE_S = 0.02
    vllm_on_path(tmp_path)
    register()
    engine = importlib.import_module("vllm.v1.engine")
    engine.EngineCoreRequestType = SimpleNamespace(ADD=b"a")  # type: ignore[attr-defined]
    core_module = importlib.import_module(CORE)
    core = core_module.EngineCoreProc(config(), StandInExecutor())
    core.run_busy_loop()
    write_board(str(run_dir), Board(Command("freeze", "b-1", 1)))
    wait_until(lambda: this_process().policy.mode == "freeze")
    assert core.input_queue.empty()


@in_own_process
def test_a_fault_of_ours_keeps_no_busy_loop_from_running(tmp_path: Path) -> None:
    vllm_on_path(tmp_path)
    register()
    core = importlib.import_module(CORE).EngineCoreProc(None, None)
    assert core.run_busy_loop() == "stepped"


# --- API servers ---


class StandInClient:
    """An API server's client with `engines` engine cores, each with one worker, asked as vLLM 0.32 does."""

    def __init__(self, engines: int, methods: tuple[str, ...] = (METHOD,)) -> None:
        self.engines = engines
        self.methods = list(methods)
        self.calls: list[Any] = []

    async def call_utility_all_async(self, name: str, method: str, *args: Any) -> list[Any]:
        self.calls.append((name, method, *args))
        await asyncio.sleep(0)
        return [self.answer(engine, method, args[1]) for engine in range(self.engines)]

    def answer(self, engine: int, method: str, args: tuple[Any, ...]) -> list[Any]:
        if method == "__dir__":
            return [self.methods]
        return [{"operation_id": args[0]["operation_id"], "engine": engine}]


class StandInOlderClient(StandInClient):
    """The same, asked engine by engine as before 0.32."""

    call_utility_all_async: Any = property()  # hasattr() says no

    def __init__(self, engines: int, methods: tuple[str, ...] = (METHOD,)) -> None:
        super().__init__(engines, methods)
        self.core_engines = list(range(engines))

    async def _call_utility_async(self, name: str, method: str, *args: Any, engine: int) -> Any:
        self.calls.append((name, method, *args))
        return self.answer(engine, method, args[1])


class StandInOldestClient:
    """One engine, and no way to ask each."""

    async def collective_rpc_async(self, method: str, timeout: Any, args: Any, kwargs: Any) -> Any:
        assert timeout is None
        return StandInClient(1).answer(0, method, args)


def api_server(tmp_path: Path, engine_core: Any, **parallel: Any) -> Any:
    vllm_on_path(tmp_path)
    register()
    module = importlib.import_module(ASYNC_LLM)
    return module.AsyncLLM(config(**parallel), engine_core, client_index=parallel.get("index"))


@in_own_process
def test_an_api_server_starts_the_agent_when_it_has_its_client(tmp_path: Path) -> None:
    api_server(tmp_path, StandInClient(1), _api_process_count=4, _api_process_rank=2)
    agent = this_process()
    assert (agent.roles, agent.rank, agent.ready) == (["api_server"], 2, True)
    assert agent.topology == Topology((0,), 2, 4)


@pytest.mark.parametrize("kind", ["StandInClient", "StandInOlderClient"])
@in_own_process
def test_every_engine_answers_and_the_api_server_too(tmp_path: Path, kind: str) -> None:
    client = globals()[kind](3)
    server = api_server(tmp_path, client)
    replies = asyncio.run(server.collective_rpc(METHOD, args=(request("freeze"),)))
    assert [reply.get("engine") for reply in replies] == [0, 1, 2, None]
    assert replies[-1]["outcome"]["ok"]
    assert gc.get_threshold()[2] == HELD_OFF
    assert all(call[2] is None for call in client.calls), "a timeout would desynchronise replies"


@in_own_process
def test_an_engine_whose_client_asks_one_is_asked_so(tmp_path: Path) -> None:
    server = api_server(tmp_path, StandInOldestClient())
    replies = asyncio.run(server.collective_rpc(METHOD, args=(request("freeze"),)))
    assert [reply.get("engine") for reply in replies] == [0, None]


@in_own_process
def test_whether_workers_have_our_method_is_asked_once(tmp_path: Path) -> None:
    client = StandInClient(2)
    server = api_server(tmp_path, client)
    for generation in (1, 2, 3):
        asyncio.run(server.collective_rpc(METHOD, args=(request("freeze", generation),)))
    assert [call[1] for call in client.calls] == ["__dir__", METHOD, METHOD, METHOD]


@in_own_process
def test_where_a_worker_lacks_our_method_nothing_is_sent(tmp_path: Path) -> None:
    client = StandInClient(2, methods=("init_worker",))
    server = api_server(tmp_path, client)
    failure, own = asyncio.run(server.collective_rpc(METHOD, args=(request("observe"),)))
    assert failure["outcome"]["code"] == "no_agent"
    assert failure["operation_id"] == "observe-1"
    assert own["outcome"]["ok"]
    assert [call[1] for call in client.calls] == ["__dir__"]


@in_own_process
def test_where_the_engines_cannot_be_asked_the_api_servers_own_reply_is_told(
    tmp_path: Path,
) -> None:
    class Dead:
        async def collective_rpc_async(self, *_: Any) -> Any:
            raise RuntimeError("EngineCore encountered an issue")

    server = api_server(tmp_path, Dead())
    failure, own = asyncio.run(server.collective_rpc(METHOD, args=(request("freeze"),)))
    assert failure["outcome"]["code"] == "worker_rpc_failed"
    assert "encountered an issue" in failure["outcome"]["detail"]
    assert own["outcome"]["ok"]


@in_own_process
def test_an_engine_that_dies_while_it_is_asked_keeps_no_request_waiting(tmp_path: Path) -> None:
    class Dying:
        async def collective_rpc_async(self, *_: Any) -> Any:
            server.errored = True
            await asyncio.Event().wait()  # as vLLM leaves it

    server = api_server(tmp_path, Dying())
    failure, own = asyncio.run(server.collective_rpc(METHOD, args=(request("freeze"),)))
    assert failure["outcome"]["code"] == "worker_rpc_failed"
    assert "the engine died" in failure["outcome"]["detail"]
    assert own["outcome"]["ok"]


@in_own_process
def test_other_calls_of_the_api_server_are_vllms_own(tmp_path: Path) -> None:
    class Client:
        async def collective_rpc_async(self, *call: Any) -> Any:
            return call

    server = api_server(tmp_path, Client())
    call = asyncio.run(server.collective_rpc("sleep", 7, (1,), {"level": 2}))
    assert call == ("sleep", 7, (1,), {"level": 2})


# --- what the configuration says ---


@pytest.mark.parametrize(
    ("parallel", "dp_rank", "topology"),
    [
        ({}, 0, Topology((0,), 1, 1)),
        ({"world_size": 8}, 0, Topology((0,), 8, 1)),
        ({"data_parallel_size": 4, "data_parallel_index": 2}, 2, Topology((0, 1, 2, 3), 1, 1)),
        ({"data_parallel_size": 2, "data_parallel_rank": 1}, 1, Topology((0, 1), 1, 1)),
        ({"data_parallel_size": 1, "data_parallel_index": 3}, 3, Topology((3,), 1, 1)),
        (
            {"data_parallel_size": 4, "data_parallel_index": 2, "local_engines_only": True},
            2,
            Topology((2,), 1, None),
        ),
        (
            {
                "data_parallel_size": 8,
                "data_parallel_index": 4,
                "local_engines_only": True,
                "data_parallel_size_local": 2,
            },
            4,
            Topology((4, 5), 1, None),
        ),
        ({"_api_process_count": 3}, 0, Topology((0,), 1, 3)),
    ],
)
def test_the_processes_that_a_configuration_tells_of(
    monkeypatch: pytest.MonkeyPatch, parallel: dict[str, Any], dp_rank: int, topology: Topology
) -> None:
    monkeypatch.setattr(sys, "argv", ["vllm"])
    monkeypatch.delenv("VLLM_USE_RUST_FRONTEND", raising=False)
    parallel_config = SimpleNamespace(**parallel)
    assert plugin._dp_rank(parallel_config) == dp_rank
    assert plugin._topology(parallel_config) == topology


def test_with_a_load_balancer_outside_only_api_servers_know_how_many_they_are() -> None:
    local = SimpleNamespace(
        data_parallel_size=4, data_parallel_index=2, local_engines_only=True, _api_process_count=2
    )
    assert plugin._topology(local).api_servers is None
    assert plugin._topology(local, is_api_server=True) == Topology((2,), 1, 2)


@in_own_process
def test_an_api_server_behind_a_load_balancer_has_its_engines_rank(tmp_path: Path) -> None:
    api_server(
        tmp_path,
        StandInClient(1),
        data_parallel_size=4,
        data_parallel_index=3,
        local_engines_only=True,
    )
    agent = this_process()
    assert (agent.roles, agent.dp_rank, agent.rank) == (["api_server"], 3, 0)


@pytest.mark.parametrize(
    "elsewhere",
    [
        lambda patch: patch.setattr(sys, "argv", ["vllm", "serve", "--headless"]),
        lambda patch: patch.setenv("VLLM_USE_RUST_FRONTEND", "1"),
    ],
)
def test_api_servers_that_live_elsewhere_are_not_expected(
    monkeypatch: pytest.MonkeyPatch, elsewhere: Callable[[pytest.MonkeyPatch], None]
) -> None:
    elsewhere(monkeypatch)
    assert plugin._topology(SimpleNamespace()).api_servers == 0


# --- the worker extension ---


@in_own_process
def test_the_worker_extension_installs_the_hooks_and_has_no_attribute(tmp_path: Path) -> None:
    vllm_on_path(tmp_path)
    module = importlib.import_module(WORKER_BASE)
    extension = importlib.import_module("gc_sidecar_agent.extension")
    assert is_hooked(module)
    own = {name for name in vars(extension.GcWorkerExtension) if not name.startswith("__")}
    assert own == set()


@in_own_process
def test_a_worker_answers_whatever_it_is_called_with() -> None:
    # A call that raises in one worker leaves the replies of the others in their queues, for ever.
    command = plugin._worker_command
    for args, kwargs in (((), {}), ((1, 2, 3), {}), (({},), {"request": 1}), ((None,), {"x": []})):
        reply = command(object(), *args, **kwargs)
        assert reply["outcome"]["code"] == "bad_command"
        assert reply["operation_id"] == ""
