"""The environment gate: only exact values act, a wrong one is an error that says what it may hold, and an old
board does not beat it."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from gc_sidecar_agent import agent as agent_module
from gc_sidecar_agent.agent import Agent, Topology
from gc_sidecar_agent.board import Board, Lease, write_board
from gc_sidecar_agent.command import Command
from gc_sidecar_agent.gate import Gate, GateError, read_gate
from tests.unit.agent.own_process import in_own_process
from tests.unit.agent.waiting import wait_until


def no_dynamo() -> bool:
    return False


def test_unset_and_off_ask_for_nothing() -> None:
    assert read_gate({}) == Gate()
    assert read_gate({"GC_SIDECAR_POLICY": "off", "GC_SIDECAR_INTERVAL_S": "7"}) == Gate()
    assert Gate().command("t") is None


def test_freeze_asks_for_a_policy_with_the_usual_interval_and_lease() -> None:
    command = read_gate({"GC_SIDECAR_POLICY": "freeze"}).command("0a1b")
    assert command is not None
    assert (command.kind, command.interval_s, command.lease_s) == ("freeze", 60.0, 3600.0)
    assert (command.owner, command.operation_id) == ("environment", "environment-0a1b")


@pytest.mark.parametrize("value", ["Freeze", "1", "true", "on", "", " freeze", "frozen"])
@pytest.mark.parametrize("variable", ["GC_SIDECAR_POLICY", "DYN_FPM_GC_POLICY"])
def test_any_other_value_is_an_error_that_names_the_variable(variable: str, value: str) -> None:
    with pytest.raises(GateError, match=variable) as caught:
        read_gate({variable: value}, no_dynamo)
    assert "is not a policy: it may be off, freeze or budget, or unset" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "budget_ms"), [({}, 5.0), ({"GC_SIDECAR_PAUSE_BUDGET_MS": "12.5"}, 12.5)]
)
def test_budget_has_its_pause(given: dict[str, str], budget_ms: float) -> None:
    command = read_gate({"GC_SIDECAR_POLICY": "budget", **given}).command("t")
    assert command is not None
    assert (command.kind, command.pause_budget_ms) == ("budget", budget_ms)
    freeze = read_gate({"GC_SIDECAR_POLICY": "freeze", **given}).command("t")
    assert freeze is not None
    assert freeze.pause_budget_ms is None


@pytest.mark.parametrize("text", ["5ms", "0.1", "1e9", "nan", ""])
def test_a_budget_that_no_agent_takes_is_an_error_that_names_the_variable(text: str) -> None:
    environment = {"GC_SIDECAR_POLICY": "budget", "GC_SIDECAR_PAUSE_BUDGET_MS": text}
    with pytest.raises(GateError, match=r"GC_SIDECAR_PAUSE_BUDGET_MS=.* from 2 to 60000"):
        read_gate(environment)
    assert read_gate(environment | {"GC_SIDECAR_POLICY": "freeze"}).pause_budget_ms is None


def test_a_lease_with_a_unit_is_warned_of_and_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    environment = {"GC_SIDECAR_POLICY": "freeze", "GC_SIDECAR_LEASE_S": "2h"}
    with caplog.at_level(logging.WARNING):
        assert read_gate(environment).lease_s == 3600.0
    assert "GC_SIDECAR_LEASE_S='2h' is not a plain number of seconds, e.g. 3600" in caplog.text


@pytest.mark.parametrize("text", ["sixty", "nan", "inf", "-inf", ""])
@pytest.mark.parametrize("variable", ["GC_SIDECAR_INTERVAL_S", "DYN_FPM_GC_FREEZE_INTERVAL_S"])
def test_an_interval_that_is_no_number_is_warned_of_and_sixty(
    caplog: pytest.LogCaptureFixture, variable: str, text: str
) -> None:
    policy = "GC_SIDECAR_POLICY" if variable.startswith("GC_") else "DYN_FPM_GC_POLICY"
    with caplog.at_level(logging.WARNING):
        assert read_gate({policy: "freeze", variable: text}, no_dynamo).interval_s == 60.0
    assert variable in caplog.text


@pytest.mark.parametrize("text", ["0.2", "0", "-5"])
def test_an_interval_below_one_second_is_one(text: str) -> None:
    gate = read_gate({"GC_SIDECAR_POLICY": "freeze", "GC_SIDECAR_INTERVAL_S": text})
    assert gate.interval_s == 1.0


def test_the_published_names_act_where_dynamo_is_not_installed() -> None:
    environment = {"DYN_FPM_GC_POLICY": "freeze", "DYN_FPM_GC_FREEZE_INTERVAL_S": "5"}
    assert read_gate(environment, no_dynamo) == Gate("freeze", interval_s=5.0)


def test_our_own_names_win_over_the_published_ones() -> None:
    environment = {
        "GC_SIDECAR_POLICY": "freeze",
        "GC_SIDECAR_INTERVAL_S": "7",
        "DYN_FPM_GC_POLICY": "nonsense",
        "DYN_FPM_GC_FREEZE_INTERVAL_S": "5",
    }
    assert read_gate(environment, no_dynamo).interval_s == 7.0


def test_beside_dynamo_the_published_names_are_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environment = {"DYN_FPM_GC_POLICY": "freeze"}
    with caplog.at_level(logging.INFO, logger="vllm.gc_sidecar_agent"):
        assert read_gate(environment, lambda: True) == Gate()
    assert len(caplog.records) == 1
    assert "GC_SIDECAR_POLICY" in caplog.text
    assert (
        read_gate({**environment, "GC_SIDECAR_POLICY": "freeze"}, lambda: True).policy == "freeze"
    )


# --- at the gate: an agent, and a board that somebody may have left ---


def pass_gate(run_dir: Path, role: str = "worker") -> tuple[Agent, list[str]]:
    """An agent of this process that has passed the gate, but for an API server, and what it logs."""
    agent_module.POLL_S = 0.005
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(  # type: ignore[method-assign]
        f"{record.levelname} {record.getMessage()}"
    )
    agent_module.logger.addHandler(handler)
    agent_module.logger.setLevel(logging.INFO)
    agent = Agent(str(run_dir), Gate("freeze"))
    agent.start(role, 0, 0, Topology((0,), 1, 1), "stand-in")
    agent.set_ready()
    return agent, logged


def come_round(agent: Agent, polls: int = 20) -> None:
    """Until the agent's thread has looked at the board so often."""
    since = agent._polls
    wait_until(lambda: agent._polls > since + polls)


def board(kind: str, generation: int, lease: Lease | None = None) -> Board:
    return Board(Command(kind, f"{kind}-{generation}", generation, owner="bench-1"), lease=lease)


@in_own_process
def test_without_a_board_the_policy_is_entered(tmp_path: Path) -> None:
    agent, logged = pass_gate(tmp_path)
    assert (agent.policy.mode, agent.policy.generation) == ("freeze", 0)
    assert "INFO gc-sidecar: policy freeze by the environment: in force for 3600 s" in logged


@in_own_process
def test_a_restore_left_on_the_board_does_not_cancel_it(tmp_path: Path) -> None:
    write_board(str(tmp_path), board("restore", 7))
    agent, logged = pass_gate(tmp_path)
    come_round(agent)
    assert (agent.policy.mode, agent.policy.generation) == ("freeze", 8)
    assert not [line for line in logged if line.startswith("WARNING")]


@in_own_process
def test_an_api_server_passes_later_and_enters_the_same_generation(tmp_path: Path) -> None:
    agent_module.GATE_POLLS = 60
    write_board(str(tmp_path), board("restore", 7))
    agent, _ = pass_gate(tmp_path, "api_server")
    assert agent.policy.mode == "off"
    wait_until(lambda: agent.policy.mode == "freeze")
    come_round(agent)
    assert (agent.policy.mode, agent.policy.generation) == ("freeze", 8)


@in_own_process
def test_what_a_sidecar_says_before_an_api_server_has_passed_is_newer(tmp_path: Path) -> None:
    agent_module.GATE_POLLS = 60
    write_board(str(tmp_path), board("restore", 7))
    agent, logged = pass_gate(tmp_path, "api_server")
    restore = Command("restore", "by-hand", 8)
    assert agent.handle(restore.to_dict())["outcome"]["ok"]
    wait_until(lambda: agent._gate_polls >= agent_module.GATE_POLLS)
    come_round(agent)
    assert (agent.policy.mode, agent.policy.generation) == ("off", 8)
    (line,) = [line for line in logged if "by the environment" in line]
    assert line.startswith("WARNING")
    assert "a sidecar has asked for generation 8" in line


@in_own_process
def test_a_lease_that_ended_long_ago_does_not_cancel_it_either(tmp_path: Path) -> None:
    write_board(str(tmp_path), board("freeze", 7, Lease(1, 60.0, time.time() - 5)))
    agent, _ = pass_gate(tmp_path)
    come_round(agent)
    assert (agent.policy.mode, agent.policy.generation) == ("freeze", 8)
    settings: Any = agent.policy.settings
    assert settings.owner == "environment"


@in_own_process
def test_a_policy_whose_lease_runs_wins_and_the_log_says_so(tmp_path: Path) -> None:
    write_board(str(tmp_path), board("freeze", 7, Lease(1, 60.0, time.time() + 60)))
    agent, logged = pass_gate(tmp_path, "api_server")
    wait_until(lambda: agent.policy.generation == 7)
    assert agent.policy.mode == "freeze"
    settings: Any = agent.policy.settings
    assert settings.owner == "bench-1"
    (line,) = [line for line in logged if "by the environment" in line]
    assert line.startswith("WARNING")
    assert "freeze by bench-1, whose lease still runs" in line


@in_own_process
def test_a_policy_that_cannot_be_entered_is_a_warning(tmp_path: Path) -> None:
    agent_module.collector_kind = lambda: "incremental"
    agent, logged = pass_gate(tmp_path)
    assert agent.policy.mode == "off"
    (line,) = [line for line in logged if "by the environment" in line]
    assert line.startswith("WARNING")


@in_own_process
def test_the_end_of_its_lease_is_logged(tmp_path: Path) -> None:
    agent, logged = pass_gate(tmp_path)
    agent.policy.renew_lease(0.01, 0)
    wait_until(lambda: any("policy freeze ended" in line for line in logged))
    assert "INFO gc-sidecar: policy freeze ended: the lease ended without a renewal" in logged
