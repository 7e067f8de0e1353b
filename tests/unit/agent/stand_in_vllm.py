"""A stand-in for vLLM: the classes that our hooks take hold of, with the behaviour that matters to them.

No model and no sockets; `vllm_on_path(directory)` writes it as a package `vllm` that can be imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

WORKER_BASE = """
class WorkerBase:
    def __init__(self, vllm_config, rank):
        self.vllm_config = vllm_config
        self.rank = rank


class WorkerWrapperBase:
    def __init__(self, global_rank):
        self.global_rank = global_rank
        self.worker = None

    def init_worker(self, vllm_config):
        self.worker = WorkerBase(vllm_config, rank=self.global_rank)
"""

ENGINE = """
import enum


class EngineCoreRequestType(enum.Enum):
    ADD = b"a"
    WAKEUP = b"w"
"""

CORE = '''
import queue

from vllm.v1.engine import EngineCoreRequestType


class EngineCore:
    def __init__(self, vllm_config, model_executor):
        self.vllm_config = vllm_config
        self.model_executor = model_executor

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        """vLLM's own docstring."""
        return self.model_executor.collective_rpc(method, timeout, args, kwargs)


class EngineCoreProc(EngineCore):
    def __init__(self, vllm_config, model_executor):
        super().__init__(vllm_config, model_executor)
        self.input_queue = queue.Queue()
        self.handled = []

    def run_busy_loop(self):
        return "stepped"

    def handle_one(self):
        self._handle_client_request(*self.input_queue.get(timeout=10))

    def _handle_client_request(self, request_type, request):
        self.handled.append(request_type)


class DPEngineCoreProc(EngineCoreProc):
    def run_busy_loop(self):
        return "stepped together"
'''

ASYNC_LLM = """
class AsyncLLM:
    def __init__(self, vllm_config, engine_core, client_index=0):
        self.vllm_config = vllm_config
        self.engine_core = engine_core

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return await self.engine_core.collective_rpc_async(method, timeout, args, kwargs)
"""


def vllm_on_path(directory: Path, **changes: str) -> None:
    """Write the package into `directory` and put that on sys.path. `changes` are other sources, by the module's
    last name: `worker_base=""` is a vLLM whose classes are elsewhere."""
    sources = {
        "vllm/__init__.py": '__version__ = "9.9.9"',
        "vllm/v1/__init__.py": "",
        "vllm/v1/worker/__init__.py": "",
        "vllm/v1/worker/worker_base.py": WORKER_BASE,
        "vllm/v1/engine/__init__.py": ENGINE,
        "vllm/v1/engine/core.py": CORE,
        "vllm/v1/engine/async_llm.py": ASYNC_LLM,
    }
    for path, source in sources.items():
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(changes.get(file.stem, source))
    sys.path.insert(0, str(directory))
