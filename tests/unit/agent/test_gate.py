"""The environment gate: only exact values act, and a wrong one is an error that says what it may hold."""

from __future__ import annotations

import logging

import pytest

from gc_sidecar_agent.gate import Gate, GateError, read_gate


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
    assert "off, freeze, budget" in str(caught.value)


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


@pytest.mark.parametrize("text", ["1.9", "nan", "60001", "five"])
def test_a_pause_budget_out_of_range_is_an_error(text: str) -> None:
    with pytest.raises(GateError, match="GC_SIDECAR_PAUSE_BUDGET_MS"):
        read_gate({"GC_SIDECAR_POLICY": "budget", "GC_SIDECAR_PAUSE_BUDGET_MS": text})
