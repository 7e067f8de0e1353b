"""The environment gate: a policy for those who have no sidecar, entered when the engine has started.

Only exact values act. A wrong one stops the engine at its start, with the variable's name and what it may hold,
for a benchmark that silently ran without its policy would be worth nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gc_sidecar_agent.board import Board, still_wanted
from gc_sidecar_agent.command import (
    DEFAULT_BUDGET_MS,
    DEFAULT_INTERVAL_S,
    DEFAULT_LEASE_S,
    MAXIMUM_BUDGET_MS,
    MAXIMUM_SECONDS,
    MINIMUM_BUDGET_MS,
    MINIMUM_INTERVAL_S,
    Command,
)

logger = logging.getLogger("vllm.gc_sidecar_agent")

POLICY_VARIABLE = "GC_SIDECAR_POLICY"
INTERVAL_VARIABLE = "GC_SIDECAR_INTERVAL_S"
LEASE_VARIABLE = "GC_SIDECAR_LEASE_S"
BUDGET_VARIABLE = "GC_SIDECAR_PAUSE_BUDGET_MS"
# The names under which the policy was published. Where dynamo itself runs, it acts on them.
PUBLISHED_POLICY_VARIABLE = "DYN_FPM_GC_POLICY"
PUBLISHED_INTERVAL_VARIABLE = "DYN_FPM_GC_FREEZE_INTERVAL_S"

# The modes that pages and metrics speak of, and that the environment may ask for.
POLICIES = ("off", "freeze", "budget")
POLICY_CHOICES = f"{', '.join(POLICIES[:-1])} or {POLICIES[-1]}"
OWNER = "environment"


class GateError(ValueError):
    """An environment variable that cannot be acted on; stops the engine at its start."""


@dataclass(frozen=True)
class Gate:
    """What the environment asks for. `policy` is one of POLICIES; `pause_budget_ms` belongs to budget."""

    policy: str = "off"
    pause_budget_ms: float | None = None
    interval_s: float = DEFAULT_INTERVAL_S
    lease_s: float = DEFAULT_LEASE_S

    def command(self, token: str) -> Command | None:
        """The command that a process gives itself, None where the policy is off."""
        if self.policy == "off":
            return None
        return Command(
            kind=self.policy,
            operation_id=f"{OWNER}-{token}",
            generation=0,
            owner=OWNER,
            pause_budget_ms=self.pause_budget_ms,
            interval_s=self.interval_s,
            lease_s=self.lease_s,
        )


def beside_board(command: Command, board: Board) -> Command | None:
    """The gate's command, newer than what a sidecar before this engine left on the board; None where a policy
    stands there whose lease runs, which wins."""
    left = board.policy
    if left is None:
        return command
    if left.kind != "restore" and still_wanted(left, board.lease) is not None:
        return None
    return replace(command, generation=left.generation + 1)


def read_gate(environment: Mapping[str, str], has_dynamo: Callable[[], bool] | None = None) -> Gate:
    """What `environment` asks for. Raises GateError."""
    policy_variable, interval_variable = POLICY_VARIABLE, INTERVAL_VARIABLE
    if POLICY_VARIABLE not in environment and PUBLISHED_POLICY_VARIABLE in environment:
        if (has_dynamo or _has_dynamo)():
            logger.info(
                "gc-sidecar: %s is left to dynamo, which is installed here; to have gc-sidecar act, set %s",
                PUBLISHED_POLICY_VARIABLE,
                POLICY_VARIABLE,
            )
            return Gate()
        policy_variable = PUBLISHED_POLICY_VARIABLE
        if INTERVAL_VARIABLE not in environment:
            interval_variable = PUBLISHED_INTERVAL_VARIABLE
    policy = environment.get(policy_variable, "off")
    if policy not in POLICIES:
        raise GateError(
            f"{policy_variable}={policy!r} is not a policy: it may be {POLICY_CHOICES}, or unset, which is off"
        )
    if policy == "off":
        return Gate()
    budget_ms = _budget_ms(environment) if policy == "budget" else None
    return Gate(
        policy,
        budget_ms,
        interval_s=_seconds(environment, interval_variable, DEFAULT_INTERVAL_S, MINIMUM_INTERVAL_S),
        lease_s=_seconds(environment, LEASE_VARIABLE, DEFAULT_LEASE_S, 1.0),
    )


@functools.cache
def this_gate() -> Gate:
    """What this process's environment asks for, read once. Raises GateError."""
    return read_gate(os.environ)


def _budget_ms(environment: Mapping[str, str]) -> float:
    text = environment.get(BUDGET_VARIABLE, f"{DEFAULT_BUDGET_MS:g}")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not MINIMUM_BUDGET_MS <= value <= MAXIMUM_BUDGET_MS:
        raise GateError(
            f"{BUDGET_VARIABLE}={text!r} is not a plain number of milliseconds from {MINIMUM_BUDGET_MS:g} to"
            f" {MAXIMUM_BUDGET_MS:g}"
        )
    return value


def _seconds(
    environment: Mapping[str, str], variable: str, default: float, minimum: float
) -> float:
    text = environment.get(variable)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        logger.warning(
            "gc-sidecar: %s=%r is not a plain number of seconds, e.g. %g; %g is used",
            variable,
            text,
            default,
            default,
        )
        return default
    return min(max(value, minimum), MAXIMUM_SECONDS)


def _has_dynamo() -> bool:
    try:
        return importlib.util.find_spec("dynamo") is not None
    except (ImportError, ValueError):
        return False
