"""Checks of what the environment says of GC: who else may set it, what lengthens pauses, and our own gate.

They go by variables and flags, so they work before a start too. What GC is like in processes that run is in
`page_checks`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator

from gc_sidecar_agent import gate
from gc_sidecar_agent.board import BOARD_NAME, Board, BoardError, read_board
from gc_sidecar_agent.doctor.findings import Finding, error, ok, warning
from gc_sidecar_agent.doctor.site import RUN_DIR_VARIABLE, Site

LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|\[?::1\]?")


def check_dev_mode(site: Site) -> Iterator[Finding]:
    if site.environment.get("VLLM_SERVER_DEV_MODE", "").strip() in ("", "0"):
        yield ok("dev_mode", "vLLM's dev mode is off")
        return
    remedy = (
        "bind vLLM to this pod alone: --host 127.0.0.1; or use the endpoint plugin (vLLM 0.28 and later)"
        " and unset VLLM_SERVER_DEV_MODE"
    )
    if site.engine is None:
        yield warning(
            "dev_mode",
            "VLLM_SERVER_DEV_MODE is set: /collective_rpc will take any method from anybody who reaches the"
            " port",
            remedy,
        )
        return
    host, socket_path = site.engine.flag("--host"), site.engine.flag("--uds")
    if socket_path or (host and LOOPBACK.fullmatch(host)):
        yield ok("dev_mode", f"dev mode is on, and only {socket_path or host} is listened on")
        return
    yield warning(
        "dev_mode",
        f"VLLM_SERVER_DEV_MODE is set, and the engine listens on {host or 'every address'}: /collective_rpc"
        " takes any method from anybody who reaches the port",
        remedy,
    )


def check_gc_debug(site: Site) -> Iterator[Finding]:
    value = site.environment.get("VLLM_GC_DEBUG", "")
    if value.strip() in ("", "0"):
        yield ok("gc_debug", "VLLM_GC_DEBUG is off")
    else:
        yield warning(
            "gc_debug",
            f"VLLM_GC_DEBUG={value}: vLLM lists every object at each collection, which lengthens the pause that"
            " it reports",
            "unset VLLM_GC_DEBUG: the sidecar measures pauses without that",
        )


def check_gc_variables(site: Site) -> Iterator[Finding]:
    names = sorted(n for n in site.environment if re.match(r"PYTHON_?GC", n, re.IGNORECASE))
    if names:
        yield warning(
            "gc_variables",
            f"{', '.join(names)}: CPython reads no such variable; whatever reads it may set GC beside us",
            f"unset {names[0]}, or find out what reads it",
        )


def check_gate(site: Site) -> Iterator[Finding]:
    """The policy that the environment asks for, and whether dynamo acts on its published names."""
    environment = site.environment
    has_dynamo = bool(site.facts.get("dynamo"))
    published = environment.get(gate.PUBLISHED_POLICY_VARIABLE)
    remarks = _Remarks()
    gate.logger.addHandler(remarks)
    propagate, gate.logger.propagate = gate.logger.propagate, False
    try:
        wanted = gate.read_gate(environment, lambda: has_dynamo)
    except gate.GateError as failure:
        yield error(
            "gate",
            f"{failure}: the engine does not start",
            f"set {gate.POLICY_VARIABLE} to {gate.POLICY_CHOICES}, or unset it and use the sidecar",
        )
        return
    finally:
        gate.logger.propagate = propagate
        gate.logger.removeHandler(remarks)
    for remark in remarks.warnings:
        reason = remark.removeprefix("gc-sidecar: ")
        example = "3600" if reason.startswith(gate.LEASE_VARIABLE) else "60"
        yield warning(
            "gate",
            reason,
            f"give plain seconds, without a unit: {reason.partition('=')[0]}={example}",
        )
    if has_dynamo and published is not None:
        yield warning(
            "dynamo",
            f"{gate.PUBLISHED_POLICY_VARIABLE}={published}: dynamo is installed here and acts on it itself, so"
            " two may set GC",
            f"unset {gate.PUBLISHED_POLICY_VARIABLE}, and let the sidecar or {gate.POLICY_VARIABLE} do it",
        )
    if wanted.policy == "off":
        yield ok("gate", f"the environment asks for no policy ({gate.POLICY_VARIABLE})")
    elif not remarks.warnings or site.engine is None:
        yield _beside_board(site, wanted)


def _beside_board(site: Site, wanted: gate.Gate) -> Finding:
    """What becomes of the gate's policy, where no engine has passed it yet."""
    reason = f"the environment asks for {wanted.policy}, entered when the engine has started"
    run_dir, command = site.environment.get(RUN_DIR_VARIABLE), wanted.command("doctor")
    if site.engine is not None or run_dir is None or command is None:
        return ok("gate", reason)
    try:
        board = read_board(run_dir)
    except (BoardError, OSError):
        board = Board()
    left = board.policy
    if left is None:
        return ok("gate", reason)
    if gate.beside_board(command, board) is None:
        return warning(
            "gate",
            f"the environment asks for {wanted.policy}, but the board in {run_dir} has {left.kind} by"
            f" {left.owner}, whose lease still runs: the board wins",
            "let its sidecar restore it, or wait for the end of its lease; where that sidecar is gone for good:"
            f" rm {os.path.join(run_dir, BOARD_NAME)}",
        )
    return ok(
        "gate",
        f"{reason}; what an earlier sidecar left on the board ({left.kind}) does not keep it",
    )


class _Remarks(logging.Handler):
    """What the gate would log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())
