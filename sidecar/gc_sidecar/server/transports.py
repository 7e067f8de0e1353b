"""The ways of sending a command into an engine over HTTP, and finding out which of them it has.

A third transport, `board`, needs no HTTP: the coordinator writes the board and the pages answer.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from gc_sidecar.server.engine_http import Answer, EngineFault, ask
from gc_sidecar.server.obstacle import Obstacle
from gc_sidecar_agent.command import METHOD, Command
from gc_sidecar_agent.endpoint import PATH as ENDPOINT_PATH

FLOOR = (0, 25)
NOT_AN_ENGINE = "not_an_engine"
_RELEASE = re.compile(r"(\d+)\.(\d+)(\.\d+)?([.+-].*|(rc|a|b)\d+.*)?")

# A list that names ours alone shuts out all others, vLLM's own among them.
NAME_IT = "add gc_sidecar to VLLM_PLUGINS, beside the plugins that you use"

# The secret of our route; None where there is none, or an EngineFault that says where it should be.
Secret = Callable[[], "str | None"]


@dataclass(frozen=True)
class Processes:
    """The tokens of the living processes that pages show; empty where no page is seen."""

    all: frozenset[str] = frozenset()
    cores: frozenset[str] = frozenset()


NOBODY = Processes()


class Transport(Protocol):
    """One way into one engine."""

    name: str

    async def call(self, command: Command, timeout_s: float, processes: Processes) -> list[Any]:
        """Send `command`; the results as they came. `processes` are those that are there now.

        Raises EngineFault.
        """


class PluginTransport:
    """Our route on the engine's own port, loaded by vLLM's endpoint plugins."""

    name = "plugin"

    def __init__(self, http: httpx.AsyncClient, url: str, secret: Secret) -> None:
        self._http = http
        self._url = url
        self._secret = secret

    async def call(self, command: Command, timeout_s: float, processes: Processes) -> list[Any]:
        """See Transport."""
        secret = self._secret()
        if secret is None:
            raise _secret_missing()
        answer = await ask(
            self._http,
            "POST",
            self._url + ENDPOINT_PATH,
            timeout_s,
            command.to_dict(),
            {"Authorization": f"Bearer {secret}"},
        )
        return _results(answer, ENDPOINT_PATH)


class DevTransport:
    """vLLM's own route, open in dev mode only."""

    name = "dev"

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self._http = http
        self._url = url
        self._proven_for = NOBODY

    async def call(self, command: Command, timeout_s: float, processes: Processes) -> list[Any]:
        """See Transport. No `timeout` is ever sent: one that passes leaves replies in vLLM's queues."""
        deadline = time.monotonic() + timeout_s
        if not processes.all or processes != self._proven_for:
            # Other processes than those that were asked, or none that we could compare.
            await self.prove(timeout_s, processes)
        body = {"method": METHOD, "args": [command.to_dict()]}
        left_s = max(0.01, deadline - time.monotonic())
        answer = await ask(self._http, "POST", f"{self._url}/collective_rpc", left_s, body)
        return _results(answer, "/collective_rpc")

    async def prove(self, timeout_s: float, processes: Processes) -> None:
        """Make sure that our method is in every worker, for a call to a missing one desynchronises vLLM's
        reply queues for ever. `__dir__` is a method of every object. Raises EngineFault."""
        answer = await ask(
            self._http, "POST", f"{self._url}/collective_rpc", timeout_s, {"method": "__dir__"}
        )
        if answer.status in (404, 405):
            raise EngineFault(
                "dev_mode_off",
                f"the engine has no /collective_rpc (HTTP {answer.status})",
                f"load the endpoint plugin (vLLM 0.28 and later: {NAME_IT}) or start vLLM with"
                " VLLM_SERVER_DEV_MODE=1; without them the board is used",
                sent=False,
            )
        names = _results(answer, "/collective_rpc")
        if not names or not all(isinstance(each, list) and METHOD in each for each in names):
            raise EngineFault(
                "agent_not_loaded",
                "a worker of this engine has no agent, so nothing is sent to it",
                "start vLLM with `DIR/bin/with-agent`, DIR written by `gc-sidecar install-agent`",
                sent=False,
            )
        self._proven_for = processes


@dataclass(frozen=True)
class Discovery:
    """What asking one engine found. `reachable` is whether it answers HTTP at all."""

    transport: Transport | None
    obstacles: tuple[Obstacle, ...] = ()
    version: str | None = None
    reachable: bool = False


async def discover(
    http: httpx.AsyncClient,
    url: str,
    secret: Secret,
    timeout_s: float,
    processes: Processes = NOBODY,
) -> Discovery:
    """Ask the engine at `url`: its version, then for the plugin, then for dev mode. Never raises."""
    try:
        version = await _ask_version(http, url, timeout_s)
    except EngineFault as fault:
        return Discovery(None, (fault.as_obstacle(),))
    if version is not None and is_too_old(version):
        obstacle = Obstacle(
            "engine_too_old",
            f"vLLM {version} is older than {FLOOR[0]}.{FLOOR[1]}; nothing is sent to it",
            "upgrade vLLM, or use the board (--run-dir)",
        )
        return Discovery(None, (obstacle,), version, reachable=True)
    try:
        return Discovery(await _find_plugin(http, url, secret, timeout_s), (), version, True)
    except EngineFault as fault:
        no_plugin = fault.as_obstacle()
    try:
        return Discovery(await _find_dev(http, url, timeout_s, processes), (), version, True)
    except EngineFault as fault:
        return Discovery(None, (no_plugin, fault.as_obstacle()), version, reachable=True)


def is_too_old(version: str) -> bool:
    """Whether `version` is a release below the floor. Development builds count as new: theirs say little."""
    match = _RELEASE.fullmatch(version)
    if match is None or "dev" in version:
        return False
    return (int(match[1]), int(match[2])) < FLOOR


async def ask_contact(http: httpx.AsyncClient, url: str, timeout_s: float) -> EngineFault | None:
    """Why the engine at `url` does not answer HTTP; None where it does. Costs it no step."""
    try:
        await ask(http, "GET", f"{url}/version", timeout_s)
    except EngineFault as fault:
        return fault
    return None


async def _ask_version(http: httpx.AsyncClient, url: str, timeout_s: float) -> str | None:
    """The engine's version; None for a frontend that has no such route. Raises EngineFault."""
    answer = await ask(http, "GET", f"{url}/version", timeout_s)
    body = answer.json() if answer.status == 200 else None
    if isinstance(body, dict) and "agents" in body:
        raise EngineFault(
            NOT_AN_ENGINE,
            f"{url} is a gc-sidecar, not an engine",
            "give the engine's own address: --engine-url",
            sent=False,
        )
    version = body.get("version") if isinstance(body, dict) else None
    return version[:100] if isinstance(version, str) else None


async def _find_plugin(
    http: httpx.AsyncClient, url: str, secret: Secret, timeout_s: float
) -> Transport:
    answer = await ask(http, "GET", url + ENDPOINT_PATH, timeout_s)
    if answer.status != 200:
        raise EngineFault(
            "plugin_not_loaded",
            f"the engine has no route {ENDPOINT_PATH} (HTTP {answer.status})",
            f"install the agent with --endpoint-plugin, and {NAME_IT}",
        )
    body = answer.json()
    method = body.get("method") if isinstance(body, dict) else None
    if method != METHOD:
        raise EngineFault(
            "plugin_not_ours",
            f"{ENDPOINT_PATH} offers the method {str(method)[:60]!r}, not {METHOD!r}",
            "install the agent and the sidecar from the same release",
        )
    if secret() is None:
        raise _secret_missing()
    return PluginTransport(http, url, secret)


async def _find_dev(
    http: httpx.AsyncClient, url: str, timeout_s: float, processes: Processes
) -> Transport:
    transport = DevTransport(http, url)
    await transport.prove(timeout_s, processes)
    return transport


def _results(answer: Answer, path: str) -> list[Any]:
    """The `results` of an answer. Raises EngineFault."""
    body = answer.json()
    if answer.status == 200:
        results = body.get("results") if isinstance(body, dict) else None
        if isinstance(results, list):
            return results
        raise EngineFault("engine_answer_malformed", f"POST {path}: an answer without results")
    # What our own route says is more than its status tells.
    code = body.get("code") if isinstance(body, dict) else None
    detail = body.get("detail") if isinstance(body, dict) else None
    refused = 400 <= answer.status < 500 or answer.status in (501, 503)
    raise EngineFault(
        code if isinstance(code, str) and code.isidentifier() else f"engine_http_{answer.status}",
        f"POST {path}: HTTP {answer.status}{f': {str(detail)[:500]}' if detail else ''}",
        _REMEDIES.get(answer.status),
        sent=not refused,
    )


_REMEDIES = {
    401: "the sidecar and the engine must share the run directory, or the file of --engine-token-file",
    404: "the engine was started without the route: GET /gc says which transport is left",
    501: "this frontend does not forward collective_rpc: use the board (--run-dir)",
    503: "the engine is not ready, or finds no secret: see the detail",
}


def _secret_missing() -> EngineFault:
    return EngineFault(
        "endpoint_token_missing",
        "the endpoint plugin is loaded, but the sidecar has no secret for it",
        "share the run directory (--run-dir), or give --engine-token-file",
        sent=False,
    )
