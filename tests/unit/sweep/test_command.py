"""The flags of `gc-sidecar sweep`: what the sidecar would refuse is refused before anything runs."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator

import pytest

from gc_sidecar.commands import sweep
from gc_sidecar.sweep.plan import PlanError
from gc_sidecar_agent.cli import EXIT_FAILED, EXIT_USAGE
from gc_sidecar_agent.client import ClientError
from gc_sidecar_agent.supervise import ENDING


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    sweep.add_arguments(parser)
    return parser.parse_args(["--out=x", *flags])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--pause-budget=1ms"], "--pause-budget is 1ms, and must be from 2ms to 60000ms"),
        (["--pause-budget=90s"], "--pause-budget is 90000ms"),
        (["--owner=a\nb"], "--owner 'a.nb': must be printable"),
        (["--owner=" + "x" * 500], "at most 128 characters"),
        (["--owner="], "at least 1 character"),
        (["--policies="], "nothing is no policy"),
        (["--policies=off,,budget"], "nothing is no policy"),
    ],
)
def test_what_the_sidecar_would_refuse_is_refused_before_anything_runs(
    flags: list[str], told: str
) -> None:
    with pytest.raises(PlanError, match=told):
        sweep.make_plan(arguments(*flags))


def test_blanks_between_policies_do_not_matter() -> None:
    assert sweep.make_plan(arguments("--policies=off, budget")).policies == ("off", "budget")


def test_a_budget_that_no_policy_has_makes_no_other_plan() -> None:
    plans = [
        sweep.make_plan(arguments("--policies=off,freeze", *flags))
        for flags in ([], ["--pause-budget=1ms"], ["--pause-budget=10ms"])
    ]
    assert len({plan.fingerprint for plan in plans}) == 1
    with_budget = [
        sweep.make_plan(arguments(*flags)).fingerprint for flags in ([], ["--pause-budget=10ms"])
    ]
    assert len({*with_budget}) == 2


def test_nobody_is_told_to_repeat_what_the_sidecar_does_not_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    refused = ClientError("invalid_field", "lease_s: too small", status=422)
    assert sweep._report_failure(refused) == EXIT_USAGE
    told = capsys.readouterr().err
    assert "lease_s: too small; its policy is ended" in told
    assert "repeat" not in told
    assert sweep._report_failure(ClientError("incomplete", "no", status=409)) == EXIT_FAILED
    assert "repeat the command" in capsys.readouterr().err


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_whatever_would_end_it_interrupts_it_but_for_what_is_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    sweep.catch_signals()
    signal.raise_signal(signal.SIGHUP)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)


def test_help_says_what_json_prints_and_when_the_exit_code_is_1() -> None:
    parser = argparse.ArgumentParser()
    sweep.add_arguments(parser)
    text = parser.format_help()
    assert "print what is in report.json" in text
    assert "sidecar's JSON answer" not in text
    assert "until then the exit code is 1" in " ".join(text.split())
