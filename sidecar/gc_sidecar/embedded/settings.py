"""The embedded engine's flags, and the configuration that its processes see.

Each flag has a variable of the same name (`--heap-objects` is GC_SIDECAR_HEAP_OBJECTS). Host and port alone are
GC_SIDECAR_EMBEDDED_HOST and _PORT: without the middle word they are the sidecar's own.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from gc_sidecar import __version__
from gc_sidecar_agent.commands.options import add_option, add_switch, boolean

RUN_DIR_VARIABLE = "GC_SIDECAR_RUN_DIR"

DESCRIPTION = """\
Start an embedded engine: an engine without a model, to try gc-sidecar on. It is not vLLM. What is real about it:
API servers, engine cores and workers are processes of their own with growing Python heaps, so CPython's full
collections come at growing intervals and take ever longer; and all of them step in lockstep, so a pause in one
holds up all. It answers the HTTP routes and the RPC of a vLLM server as far as gc-sidecar uses them.
"""

EPILOG = """\
examples:
  # four workers, and a sidecar beside them
  mkdir -p /dev/shm/gc
  python -m gc_sidecar.embedded --run-dir /dev/shm/gc --workers 4
  gc-sidecar serve --run-dir /dev/shm/gc --engine-url http://localhost:8000

  # watch pauses grow without sending a request
  python -m gc_sidecar.embedded --run-dir /dev/shm/gc --heap-objects 400000 --retain-per-step 2000 --free-running

  # data parallel, two API servers on one port, vLLM's /collective_rpc
  python -m gc_sidecar.embedded --run-dir /dev/shm/gc --data-parallel 2 --api-servers 2 --dev-mode

  # one streamed completion; every token is a step
  curl -N localhost:8000/v1/completions -d '{"prompt": "hello", "max_tokens": 8, "stream": true}'

Each flag is also read from the environment (--heap-objects is GC_SIDECAR_HEAP_OBJECTS); --host and --port from
GC_SIDECAR_EMBEDDED_HOST and GC_SIDECAR_EMBEDDED_PORT, for GC_SIDECAR_PORT is the sidecar's. A flag wins.
"""

FROZEN_CHOICES = ("none", "core", "all")


@dataclass(frozen=True)
class Settings:
    """See the flags' help."""

    host: str = "127.0.0.1"
    port: int = 8000
    run_dir: str | None = None
    workers: int = 4
    data_parallel: int = 1
    independent_dp: bool = False
    api_servers: int = 1
    heap_objects: int = 100_000
    retain_per_step: int = 100
    garbage_per_step: int = 100
    garbage_lifetime_steps: int = 100
    step_ms: float = 5.0
    free_running: bool = False
    max_num_seqs: int = 256
    start_frozen: str = "core"
    dev_mode: bool = False
    endpoint: bool = True
    worker_extension_cls: str | None = None
    without_agent: bool = False
    worker_without_agent: tuple[int, ...] = ()
    plugin: tuple[str, ...] = ()


@dataclass(frozen=True)
class ParallelConfig:
    """The shape of the engine as one of its processes sees it, under the names that vLLM has for it."""

    world_size: int
    data_parallel_size: int
    data_parallel_rank: int
    data_parallel_index: int
    _api_process_count: int
    _api_process_rank: int = -1


@dataclass(frozen=True)
class EngineConfig:
    """What workers, engine cores and API servers carry as `vllm_config`: the agent reads it there."""

    settings: Settings
    parallel_config: ParallelConfig


def engine_config(settings: Settings, dp_rank: int, api_server: int | None = None) -> EngineConfig:
    """The configuration as an engine core and its workers see it, or as an API server does.

    Independent ranks know themselves alone, as those of a dense model in vLLM; API servers know all.
    """
    alone = settings.independent_dp and api_server is None
    return EngineConfig(
        settings,
        ParallelConfig(
            world_size=settings.workers,
            data_parallel_size=1 if alone else settings.data_parallel,
            data_parallel_rank=0 if alone else dp_rank,
            data_parallel_index=dp_rank,
            _api_process_count=settings.api_servers,
            _api_process_rank=-1 if api_server is None else api_server,
        ),
    )


def parse_settings(argv: Sequence[str] | None = None) -> Settings:
    """The settings in `argv`; ends the process as argparse does where they are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m gc_sidecar.embedded",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"embedded engine {__version__}")
    _add_arguments(parser)
    args = parser.parse_args(argv)
    given = {
        field.name: value
        for field in fields(Settings)
        if (value := getattr(args, field.name)) is not None
    }
    for name, (variable, convert) in _VARIABLES.items():
        if name not in given and os.environ.get(variable):
            try:
                given[name] = convert(os.environ[variable])
            except argparse.ArgumentTypeError as error:
                parser.error(f"{variable}: {error}")
    settings = Settings(**given)
    if settings.run_dir is not None and not os.path.isdir(settings.run_dir):
        parser.error(f"--run-dir {settings.run_dir}: there is no such directory")
    if settings.without_agent and settings.worker_without_agent:
        parser.error("--worker-without-agent says nothing new beside --without-agent")
    return settings


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    shape = parser.add_argument_group("where and how many")
    shape.add_argument("--host", help="the address to listen on (default 127.0.0.1)")
    shape.add_argument("--port", type=_port, help="the port to listen on (default 8000)")
    _option(
        shape, "--run-dir", str, "DIR",
        "the directory that engine and sidecar share; it must exist (default: none, so no pages and no board)",
    )  # fmt: skip
    _option(shape, "--workers", _positive, "N", "workers of each data-parallel rank (default 4)")
    _option(
        shape, "--data-parallel", _positive, "N",
        "data-parallel ranks, each an engine core with its workers (default 1)",
    )  # fmt: skip
    _switch(
        shape, "--independent-dp",
        "let each rank step by itself, as those of a dense model in vLLM do; by default all ranks step in"
        " lockstep, as those of a mixture of experts do",
    )  # fmt: skip
    _option(
        shape, "--api-servers", _positive, "N",
        "API server processes, which share the port (default 1)",
    )  # fmt: skip
    _option(
        shape, "--max-num-seqs", _positive, "N",
        "requests that run at the same time in a rank; more wait (default 256)",
    )  # fmt: skip

    heap = parser.add_argument_group("the heap and the steps of each engine core and worker")
    _option(
        heap, "--heap-objects", _count, "N",
        "objects tracked by the collector at the start (default 100000). A vLLM worker has about 700000",
    )  # fmt: skip
    _option(
        heap, "--retain-per-step", _count, "N",
        "objects that each step adds for good: what makes pauses grow (default 100)",
    )  # fmt: skip
    _option(
        heap, "--garbage-per-step", _count, "N",
        "objects in cycles that each step makes and that only a collection can free (default 100)",
    )  # fmt: skip
    _option(
        heap, "--garbage-lifetime-steps", _count, "N",
        "for how many steps those stay in use before they are garbage (default 100). A freeze that meets them"
        " alive keeps them from every collection until a maintain",
    )  # fmt: skip
    _option(
        heap, "--step-ms", _milliseconds, "MS", "the shortest time that a step takes (default 5)"
    )
    _switch(heap, "--free-running", "step all the time, not only while requests run")
    _option(
        heap, "--start-frozen", _frozen, "WHO",
        "which heaps are frozen once at the end of the start: none, core (API servers and engine cores, as"
        " vLLM does on a CPU; the default) or all (workers too, as vLLM does on a GPU)",
    )  # fmt: skip

    control = parser.add_argument_group("how it can be controlled")
    _toggle(
        control, "--dev-mode",
        "whether /collective_rpc and /server_info are there, as with VLLM_SERVER_DEV_MODE=1 (default no)",
    )  # fmt: skip
    _toggle(
        control, "--endpoint",
        "whether the agent's own route is there, as with VLLM_PLUGINS=gc_sidecar (default yes)",
    )  # fmt: skip
    _option(
        control, "--worker-extension-cls", str, "MODULE.CLASS",
        "a class that every worker inherits from as well, as with vLLM's flag of that name",
    )  # fmt: skip
    _switch(control, "--without-agent", "load no agent: an engine without gc-sidecar")
    control.add_argument(
        "--worker-without-agent", type=_count, action="append", metavar="RANK",
        help="load no agent in the workers of this rank; may be repeated",
    )  # fmt: skip
    control.add_argument(
        "--plugin", action="append", metavar="MODULE:FUNCTION",
        help="a function to call once in every process that starts, as vLLM calls its general plugins; may be"
        " repeated",
    )  # fmt: skip


def _option(group: Any, flag: str, convert: Callable[[str], Any], metavar: str, help: str) -> None:
    add_option(group, flag, convert, metavar=metavar, help=help)


def _switch(group: Any, flag: str, help: str) -> None:
    add_switch(group, flag, help)


def _toggle(group: Any, flag: str, help: str) -> None:
    """A flag with an opposite, `--no-...`."""
    group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=help)


def _number(text: str, minimum: int, maximum: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = minimum - 1
    if not minimum <= number <= maximum:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number from {minimum} to {maximum}"
        )
    return number


def _port(text: str) -> int:
    return _number(text, 0, 65535)


def _positive(text: str) -> int:
    return _number(text, 1, 1024)


def _count(text: str) -> int:
    return _number(text, 0, 1 << 40)


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 60_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of milliseconds up to 60000")
    return value


def _frozen(text: str) -> str:
    if text not in FROZEN_CHOICES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(FROZEN_CHOICES)}")
    return text


# Those that `add_option` cannot read, because of their names or because they have an opposite.
_VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "host": ("GC_SIDECAR_EMBEDDED_HOST", str),
    "port": ("GC_SIDECAR_EMBEDDED_PORT", _port),
    "dev_mode": ("GC_SIDECAR_DEV_MODE", boolean),
    "endpoint": ("GC_SIDECAR_ENDPOINT", boolean),
}
