"""The first process of an embedded engine: it makes all the others, watches them, and takes them with it.

Nothing heavy is imported before the forks, so that workers stay small and the start is fast.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from itertools import combinations

from gc_sidecar.embedded import ENGINE_NAME
from gc_sidecar.embedded.core import run_engine_core
from gc_sidecar.embedded.processes import fork, send_signal, set_title
from gc_sidecar.embedded.settings import (
    RUN_DIR_VARIABLE,
    Settings,
    engine_config,
    parse_settings,
)

# vLLM's API server goes on for a moment when its engine has died, so that clients see why.
LAST_WORDS_S = 2.0
STOP_DEADLINE_S = 5.0
LOG_FORMAT = "%(levelname)s %(asctime)s [pid %(process)d] %(message)s"
WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


def main(argv: Sequence[str] | None = None) -> int:
    """Start an embedded engine and return when it has ended: 0 when it was told to."""
    settings = parse_settings(argv)
    if settings.run_dir is not None:
        os.environ[RUN_DIR_VARIABLE] = os.path.abspath(settings.run_dir)
    try:
        listener = _bind(settings)
    except OSError as error:
        print(
            f"embedded engine: cannot listen on {settings.host}:{settings.port}: {error.strerror}",
            file=sys.stderr,
        )
        return 1
    host, port = listener.getsockname()[:2]
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stdout)
    if not settings.without_agent:
        # Once for all processes, which hook it into their own modules; until then it does nothing.
        from gc_sidecar_agent.plugin import register

        try:
            register()
        except ValueError as error:  # an environment that it cannot act on stops vLLM, too
            print(f"embedded engine: {error}", file=sys.stderr)
            return 1
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    engine = _Engine(settings, listener)
    set_title("embedded launcher")
    print(
        f"{ENGINE_NAME}: http://{host}:{port}, {settings.api_servers} API server(s),"
        f" {settings.data_parallel} engine core(s) with {settings.workers} worker(s) each",
        flush=True,
    )
    return engine.watch()


class _Engine:
    """The API servers and engine cores, children of this process."""

    def __init__(self, settings: Settings, listener: socket.socket) -> None:
        # One socket pair for each API server and engine core, and one for each two engine cores.
        ranks = range(settings.data_parallel)
        servers = range(settings.api_servers)
        links = {(server, rank): socket.socketpair() for server in servers for rank in ranks}
        lockstep = settings.data_parallel > 1 and not settings.independent_dp
        meetings = {
            pair: socket.socketpair() for pair in (combinations(ranks, 2) if lockstep else ())
        }
        every = [end for pair in (*links.values(), *meetings.values()) for end in pair]
        every.append(listener)

        def core(rank: int) -> None:
            clients = [links[server, rank][1] for server in servers]
            peers = [ends[pair.index(rank)] for pair, ends in meetings.items() if rank in pair]
            _close_all_but([*clients, *peers], every)
            run_engine_core(engine_config(settings, rank), clients, peers)

        def api_server(index: int) -> None:
            cores = [links[index, rank][0] for rank in ranks]
            _close_all_but([listener, *cores], every)
            # Only here: workers have no use for a web server.
            from gc_sidecar.embedded.api import run_api_server

            run_api_server(engine_config(settings, 0, index), index, listener, cores)

        self._titles: dict[int, str] = {}
        # API servers first: their imports take longest.
        for index in servers:
            title = f"embedded api_server {index}"
            self._titles[fork(title, lambda index=index: api_server(index))] = title  # type: ignore[misc]
        for rank in ranks:
            title = f"embedded engine_core dp{rank}"
            self._titles[fork(title, lambda rank=rank: core(rank))] = title  # type: ignore[misc]
        _close_all_but([], every)

    def watch(self) -> int:
        """Wait until we are told to stop or a process ends; the exit status."""
        while True:
            number = signal.sigwait(WATCHED)
            if number != signal.SIGCHLD:
                self._stop()
                return 0
            ended = self._reap()
            if not ended:
                continue
            print(
                f"embedded engine: {', '.join(ended)} ended; stopping", file=sys.stderr, flush=True
            )
            if not any("api_server" in title for title in ended):
                # Not sleep: we may be told to stop meanwhile.
                signal.sigtimedwait((signal.SIGTERM, signal.SIGINT), LAST_WORDS_S)
            self._stop()
            return 1

    def _reap(self) -> list[str]:
        ended = []
        for pid in list(self._titles):
            if os.waitpid(pid, os.WNOHANG)[0]:
                ended.append(self._titles.pop(pid))
        return ended

    def _stop(self) -> None:
        """End what is left: politely, then for certain."""
        for pid in self._titles:
            send_signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_DEADLINE_S
        while self._titles and (left := deadline - time.monotonic()) > 0:
            signal.sigtimedwait((signal.SIGCHLD,), left)
            self._reap()
        for pid in self._titles:
            send_signal(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _bind(settings: Settings) -> socket.socket:
    """A socket that every API server accepts on; they listen when they are ready."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # Connections inherit it: without it tokens wait for the acknowledgement of those before, 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((settings.host, settings.port))
    return listener


def _close_all_but(kept: Sequence[socket.socket], every: Sequence[socket.socket]) -> None:
    for end in every:
        if all(end is not one for one in kept):
            end.close()
