"""The client verbs as people and scripts meet them: flags, tables, JSON and exit codes.

Each runs in this process against `StandInSidecar`; one test starts `python -m gc_sidecar_agent`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gc_sidecar_agent.cli import PACKAGE_VERBS, VERBS, main
from gc_sidecar_agent.commands import output
from gc_sidecar_agent.commands.options import duration, size
from tests.unit.agent.test_client import PROBLEM, Reply, StandInSidecar

SOURCE = Path(__file__).resolve().parents[3] / "sidecar"

# Those that ask a sidecar; doctor asks the engine.
# `run` has errors and exit codes of its own: tests/readme/test_run.py.
CLIENT_VERBS = [
    "window open" if verb == "window" else verb for verb in VERBS if verb not in ("doctor", "run")
]


def process(role: str = "worker", rank: int = 0, **rest: Any) -> dict[str, Any]:
    return {
        "role": role,
        "roles": [role],
        "dp_rank": 0,
        "rank": rank,
        "pid": 5425 + rank,
        "state": "applied",
        "mode": "freeze",
        "observed_generation": 7,
        "gc": {"enabled": True, "threshold": [700, 10, 1 << 30]},
        "pauses": {"gen2": {"count": 3, "total_s": 0.9, "max_s": 0.335}},
        "memory": {"anonymous_bytes": 1_800_000_000, "growth_bytes": 12_582_912},
        **rest,
    }


STATUS: dict[str, Any] = {
    "policy": {
        "mode": "freeze",
        "generation": 7,
        "owner": "bench-1",
        "entered_at": "2026-01-01T00:00:00Z",
        "lease_expires_at": "2026-01-01T01:00:00Z",
        "interval_s": 60.0,
        "pause_budget_ms": None,
        "max_rss_growth_bytes": None,
    },
    "coverage": {"acknowledged": 2, "expected": 2},
    "transport": "plugin",
    "operation": None,
    "processes": [process("engine_core"), process("worker", 1)],
}

DONE: dict[str, Any] = {
    "operation": {
        "id": "op-1",
        "kind": "freeze",
        "state": "applied",
        "generation": 7,
        "duration_s": 1.42,
        "processes": [
            {
                "role": "worker",
                "dp_rank": 0,
                "rank": 0,
                "pid": 5425,
                "ok": True,
                "code": None,
                "detail": None,
                "pause_s": 0.335,
                "collected_objects": 1234,
                "resident_delta_bytes": -1_048_576,
            }
        ],
    }
}


def failing(code: str, detail: str) -> dict[str, Any]:
    """The same operation, with a second process that says no."""
    no = {"role": "worker", "rank": 1, "pid": 9, "ok": False, "code": code, "detail": detail}
    operation = DONE["operation"]
    return {"operation": {**operation, "processes": [*operation["processes"], no]}}


@pytest.fixture(autouse=True)
def _no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GC_SIDECAR_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def sidecar(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInSidecar]:
    with StandInSidecar(Reply(body=DONE)) as stand_in:
        monkeypatch.setenv("GC_SIDECAR_URL", stand_in.url)
        yield stand_in


# --- flags ---


def test_every_flag_of_freeze_is_a_field_of_the_route(sidecar: StandInSidecar) -> None:
    flags = "--interval 90s --lease 1h30m --owner bench-1 --max-rss-growth-bytes 2GiB"
    switches = "--no-collect-first --allow-partial --force --deadline 5 --operation-id mine"
    assert main(["freeze", *flags.split(), *switches.split()]) == 0
    assert sidecar.requests[0].body == {
        "interval_s": 90.0,
        "lease_s": 5400.0,
        "owner": "bench-1",
        "max_rss_growth_bytes": 2 << 30,
        "collect_first": False,
        "allow_partial": True,
        "force": True,
        "deadline_s": 5.0,
        "operation_id": "mine",
    }


@pytest.mark.parametrize("verb", ["freeze", "maintain", "restore"])
def test_what_nobody_said_is_left_to_the_sidecar(sidecar: StandInSidecar, verb: str) -> None:
    assert main([verb]) == 0
    assert sidecar.requests[0].path == f"/gc/{verb}"
    # A maintenance may take longer than usual where nothing is said, so how long both ends wait is said.
    assert sidecar.requests[0].body == ({"deadline_s": 30} if verb == "maintain" else {})


def test_maintain_and_restore_send_their_own_fields(sidecar: StandInSidecar) -> None:
    assert main(["maintain", "--when", "now", "--trim", "--owner", "bench-1"]) == 0
    assert main(["restore", "--owner", "bench-1", "--force"]) == 0
    body = {"when": "now", "trim": True, "owner": "bench-1", "deadline_s": 30}
    assert sidecar.requests[0].body == body
    assert sidecar.requests[1].body == {"owner": "bench-1", "force": True}


def test_maintain_waits_for_an_idle_moment_as_long_as_it_would_wait_at_all(
    sidecar: StandInSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["maintain", "--when", "idle"]) == 0
    assert main(["maintain", "--when", "idle", "--wait", "5m"]) == 0
    assert main(["maintain", "--when", "idle", "--deadline", "5s"]) == 0
    assert [request.body["deadline_s"] for request in sidecar.requests] == [600, 300, 5]
    assert "waiting until the engine is idle, at most 300 s" in capsys.readouterr().err


def test_flags_come_from_the_environment_and_a_flag_wins(
    sidecar: StandInSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GC_SIDECAR_OWNER", "from-the-environment")
    monkeypatch.setenv("GC_SIDECAR_LEASE", "15m")
    monkeypatch.setenv("GC_SIDECAR_ALLOW_PARTIAL", "yes")
    monkeypatch.setenv("GC_SIDECAR_NO_COLLECT_FIRST", "0")
    assert main(["freeze", "--lease", "20m"]) == 0
    assert sidecar.requests[0].body == {
        "owner": "from-the-environment",
        "lease_s": 1200.0,
        "allow_partial": True,
    }


def test_force_and_the_operation_id_are_decisions_for_one_call(
    sidecar: StandInSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GC_SIDECAR_FORCE", "1")
    monkeypatch.setenv("GC_SIDECAR_OPERATION_ID", "again")
    assert main(["restore"]) == 0
    assert sidecar.requests[0].body == {}


@pytest.mark.parametrize(
    ("variable", "value"), [("LEASE", "soon"), ("ALLOW_PARTIAL", "perhaps"), ("INTERVAL", "-1")]
)
def test_a_wrong_variable_is_named(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"GC_SIDECAR_{variable}", value)
    assert main(["freeze"]) == 2
    assert f"GC_SIDECAR_{variable}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["thaw"],
        ["freeze", "--unknown"],
        ["freeze", "--interval", "nan"],
        ["freeze", "--lease", "-5"],
        ["freeze", "--max-rss-growth-bytes", "lots"],
        ["maintain", "--when", "later"],
        ["status", "--url", "localhost:9470"],
        ["status", "--token-file", "/no/such/file"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize("verb", ["status", "windows", "run"])
def test_an_address_without_a_scheme_is_told_with_it(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--", "true"] if verb == "run" else []
    assert main([verb, "--url", "localhost:19478", *command]) in (2, 125)
    assert "write http://localhost:19478" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("90s", 90), ("15m", 900), ("1h30m", 5400), ("500ms", 0.5), ("1.5h", 5400)],
)
def test_durations_are_written_as_people_write_them(text: str, expected: float) -> None:
    assert duration(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "s", "1x", "1h 30m", "-1s", "inf", "nan", "1e9", "90 s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        duration(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1048576", 1 << 20),
        ("2GiB", 2 << 30),
        ("2Gi", 2 << 30),
        ("2G", 2 * 10**9),
        ("500MB", 500 * 10**6),
        ("1.5 KiB", 1536),
        ("0", 0),
    ],
)
def test_sizes_are_written_as_kubernetes_writes_them(text: str, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "nan", "2PiB", "0x10"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        size(text)


# --- what is printed ---


def test_status_shows_the_policy_and_a_line_for_every_process(
    sidecar: StandInSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    sidecar.replies = [Reply(body=STATUS)]
    assert main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        *("policy", "freeze,", "policy", "generation", "7,", "owner", "bench-1,"),
        *("young", "survivors", "frozen", "every", "60", "s,", "since", "2026-01-01T00:00:00Z"),
    ]
    assert lines[1].split()[:4] == ["lease", "ends", "at", "2026-01-01T01:00:00Z"]
    assert lines[2].split() == ["coverage", "2", "of", "2", "processes"]
    assert lines[3].split() == ["transport", "plugin"]
    assert lines[6].split() == [
        *("engine_core", "applied", "freeze", "0", "0", "5425", "7", "700,10,1<<30"),
        *("3", "335", "ms", "1.68", "GiB", "+12.0", "MiB"),
    ]
    assert lines[7].startswith("worker ")


def test_status_says_first_whether_it_is_safe_to_measure(
    sidecar: StandInSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    safe = {"answer": "yes", "word": "Yes.", "why": "No automatic full collection runs."}
    sidecar.replies = [Reply(body={**STATUS, "safe_to_measure": safe})]
    assert main(["status"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.split(maxsplit=1) == ["measure?", "Yes. No automatic full collection runs."]


def test_status_says_what_happens_every_minute_and_under_a_budget_nothing_does(
    sidecar: StandInSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = {**STATUS["policy"], "mode": "budget", "pause_budget_ms": 5.0}
    sidecar.replies = [Reply(body=STATUS), Reply(body={**STATUS, "policy": budget})]
    main(["status"])
    assert "young survivors frozen every 60 s" in capsys.readouterr().out
    main(["status"])
    under_budget = capsys.readouterr().out
    assert "pause budget 5 ms" in under_budget
    assert "every" not in under_budget


def test_the_generation_of_the_policy_cannot_be_taken_for_one_of_gc(
    sidecar: StandInSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    sidecar.replies = [Reply(body=STATUS)]
    main(["status"])
    lines = capsys.readouterr().out.splitlines()
    assert "policy generation 7" in lines[0]
    header = next(line for line in lines if line.startswith("ROLE"))
    assert "  POLICY GEN  " in header


def test_status_says_why_and_what_to_do(
    sidecar: StandInSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = {"code": "no_pages", "detail": "the run directory is empty", "remedy": "mount it"}
    refused = process(state="refused", reason="this CPython ignores the third threshold")
    sidecar.replies = [Reply(body={**STATUS, "reasons": [reason], "processes": [refused]})]
    assert main(["status"]) == 4
    out = capsys.readouterr().out
    assert "the run directory is empty (no_pages)" in out
    assert "what to do: mount it" in out
    assert "worker dp 0 rank 0 (pid 5425): this CPython ignores the third threshold" in out


def test_status_tells_what_is_under_way(
    sidecar: StandInSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {
        **STATUS,
        "operation": {"id": "op-1", "kind": "maintain", "state": "running"},
        "processes": [process(collecting_for_s=0.25), process(rank=1, collect_pending=True)],
    }
    sidecar.replies = [Reply(body=document)]
    main(["status"])
    out = capsys.readouterr().out
    assert "maintain running (op-1)" in out
    assert "rank 0 (pid 5425): collecting for 250 ms" in out
    assert "rank 1 (pid 5426): restored, but its collection has not come yet" in out


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"policy": None, "coverage": None, "processes": None, "reasons": None},
        {"processes": [{}, None, {"role": "worker", "memory": None, "pauses": {"gen2": None}}]},
        {"policy": {"mode": "off"}, "coverage": {}, "reasons": ["?"], "operation": {}},
    ],
)
def test_status_shows_what_is_not_known_as_a_dash(
    document: dict[str, Any], sidecar: StandInSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    sidecar.replies = [Reply(body=document)]
    assert main(["status"]) == 4
    assert "- of - processes" in capsys.readouterr().out


def test_a_process_with_two_roles_shows_both(
    sidecar: StandInSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    both = process("engine_core", roles=["engine_core", "worker"])
    sidecar.replies = [Reply(body={**STATUS, "processes": [both]})]
    main(["status"])
    assert "engine_core+worker" in capsys.readouterr().out


def test_a_change_shows_what_each_process_did(
    sidecar: StandInSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["freeze"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "freeze applied by 1 of 1 processes in 1.42 s (policy generation 7, operation op-1)"
    )
    assert lines[3].split() == [
        *("worker", "ok", "0", "0", "5425", "335", "ms", "1,234", "-1.00", "MiB")
    ]


# `pauses` prints one object a line: tests/unit/agent/test_pauses_verb.py.
@pytest.mark.parametrize("verb", [verb for verb in CLIENT_VERBS if verb != "pauses"])
def test_json_is_the_answer_of_the_sidecar_untouched(
    verb: str, sidecar: StandInSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    text = '{"operation":   {"id": "x", "state": "applied"}, "surprise": [1,  2]}\n'
    sidecar.replies = [Reply(body=text)]
    main([*verb.split(), "--json"])
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.00 us"), (32e-6, "32.0 us"), (0.0041, "4.10 ms"), (0.335, "335 ms"), (8.9, "8.90 s")],
)
def test_lengths_of_time_have_three_digits(value: float, text: str) -> None:
    assert output.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (-1_048_576, "-1.00 MiB"), (1.7 * 2**30, "1.70 GiB")],
)
def test_bytes_have_the_unit_that_fits(value: float, text: str) -> None:
    assert output.size(value) == text


def test_columns_are_aligned() -> None:
    lines = output.table(("NAME", "N"), [["a", "1"], ["longer", "1,000"]]).splitlines()
    assert lines == ["NAME        N", "a           1", "longer  1,000"]


# --- exit codes ---


@pytest.mark.parametrize(
    ("verb", "reply", "code"),
    [
        ("status", Reply(body=STATUS), 0),
        ("status", Reply(body={**STATUS, "coverage": {"acknowledged": 1, "expected": 2}}), 4),
        ("status", Reply(body={**STATUS, "coverage": {"acknowledged": 0, "expected": 0}}), 4),
        ("status", Reply(body={**STATUS, "processes": [process(state="stale")]}), 4),
        ("status", Reply(401, {**PROBLEM, "status": 401, "code": "token_missing"}), 1),
        ("freeze", Reply(body=DONE), 0),
        ("freeze", Reply(body=failing("refused", "no")), 4),
        ("maintain", Reply(body={"operation": {"state": "unknown"}}), 1),
        ("freeze", Reply(409, PROBLEM), 1),
        ("freeze", Reply(502, {**PROBLEM, "status": 502, "code": "not_applied"}), 1),
        ("freeze", Reply(422, {**PROBLEM, "status": 422, "code": "bad_request"}), 2),
        ("freeze", Reply(413, {**PROBLEM, "status": 413, "code": "too_large"}), 2),
        ("freeze", Reply(404, {"detail": "Not Found"}), 1),
        ("maintain", Reply(body={"operation": {"state": "failed"}}), 1),
        ("freeze", Reply(body={"operation": {"state": "partial", "processes": [{}]}}), 4),
        ("restore", Reply(body=DONE), 0),
    ],
)
def test_exit_codes(verb: str, reply: Reply, code: int, sidecar: StandInSidecar) -> None:
    sidecar.replies = [reply]
    assert main([verb]) == code


@pytest.mark.parametrize("verb", CLIENT_VERBS)
def test_no_sidecar_is_exit_code_3_and_says_what_to_do(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*verb.split(), "--url", "http://127.0.0.1:1"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "what to do: start one with `gc-sidecar serve" in captured.err


def test_a_refusal_is_told_with_its_code_its_remedy_and_its_processes(
    sidecar: StandInSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = {**PROBLEM, **failing("collector_busy", "another collection runs")}
    sidecar.replies = [Reply(409, problem)]
    main(["freeze"])
    err = capsys.readouterr().err
    assert "freeze: the policy belongs to bench-1 (HTTP 409, owned_by_another)" in err
    assert "what to do: wait for its lease to end, or use force" in err
    assert "worker  collector_busy" in err
    assert "worker rank 1 (pid 9): another collection runs" in err


@pytest.mark.parametrize(
    ("words", "detail", "said"),
    [
        (
            "budget --pause-budget 1ms",
            "pause_budget_ms: Input should be greater than or equal to 2",
            "budget: --pause-budget must be greater than or equal to 2 ms (HTTP 422, invalid_field)",
        ),
        (
            "freeze --lease 0",
            "lease_s: Input should be greater than or equal to 1",
            "--lease must be greater than or equal to 1 s",
        ),
        ("freeze", "owner: must be printable characters", "--owner must be printable characters"),
        (
            "freeze",
            "owner: String should have at least 1 character",
            "--owner must have at least 1 character (",
        ),
        ("window open x", "window_id: must be 1 to 64 letters", "ID must be 1 to 64 letters"),
        ("freeze", "later: must be less than 2", "freeze: later: must be less than 2 ("),
    ],
)
def test_a_field_that_is_refused_is_told_by_its_flag_and_with_its_unit(
    words: str,
    detail: str,
    said: str,
    sidecar: StandInSidecar,
    capsys: pytest.CaptureFixture[str],
) -> None:
    problem = {"status": 422, "code": "invalid_field", "detail": detail}
    sidecar.replies = [Reply(422, {**PROBLEM, **problem})]
    assert main(words.split()) == 2
    assert said in capsys.readouterr().err


def test_run_says_the_least_budget_by_its_flag_before_it_asks_for_anything(
    sidecar: StandInSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "run --policy budget --pause-budget 1ms -- true"
    assert main(words.split()) == 125
    assert "--pause-budget must be at least 2ms" in capsys.readouterr().err
    assert sidecar.requests == []


@pytest.mark.parametrize(
    ("words", "code", "remedy"),
    [
        ("window show nope", "window_not_found", "`gc-sidecar windows` lists them"),
        ("window open mine", "window_id_reused", "choose another ID"),
        ("window open", "too_many_windows", "`gc-sidecar window close ID`"),
        ("maintain", "pause_too_long", "add --force"),
        ("restore", "operation_running", "`gc-sidecar restore --force`"),
    ],
)
def test_a_remedy_speaks_of_verbs_and_flags_and_not_of_the_api(
    words: str,
    code: str,
    remedy: str,
    sidecar: StandInSidecar,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = "GET /gc/windows, window_id, force=true"
    sidecar.replies = [Reply(409, {**PROBLEM, "code": code, "remedy": told})]
    assert main(words.split()) == 1
    err = capsys.readouterr().err
    assert remedy in err
    assert told not in err


def test_what_a_sidecar_calls_a_flag_is_a_flag_of_some_verb(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*CLIENT_VERBS, "window show"]
    for verb in words:
        assert main([*verb.split(), "--help"]) == 0
    told = capsys.readouterr().out
    assert [flag for flag, _ in output.FLAGS.values() if f"{flag} " not in told] == []


@pytest.mark.parametrize(
    ("rolled_back", "said"),
    [(True, "was rolled back"), (False, "NOT everything"), ("unknown", "not known"), (None, "")],
)
def test_a_freeze_that_failed_says_what_became_of_what_it_had_changed(
    rolled_back: Any, said: str, sidecar: StandInSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    code = {"code": "incomplete_coverage", "remedy": "allow_partial=true"}
    sidecar.replies = [Reply(502, {**PROBLEM, **code, "rolled_back": rolled_back})]
    assert main(["freeze"]) == 1
    err = capsys.readouterr().err
    assert said in err
    assert "what to do: --allow-partial accepts what can be had" in err
    assert ("rolled back" in err) == (rolled_back is not None)


def test_a_freeze_says_when_its_lease_ends(
    sidecar: StandInSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    lease = {"expires_at": "2026-01-01T01:00:00Z", "renew": "curl ..."}
    sidecar.replies = [Reply(body={**DONE, "lease": lease})]
    assert main(["freeze"]) == 0
    assert "the lease ends at 2026-01-01T01:00:00Z" in capsys.readouterr().out


def test_a_refusal_with_json_prints_the_problem_too(
    sidecar: StandInSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    sidecar.replies = [Reply(409, PROBLEM)]
    assert main(["freeze", "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out) == PROBLEM
    assert "owned_by_another" in captured.err


def test_maintain_waits_for_the_operation_and_shows_that_it_does(
    sidecar: StandInSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    running = {"operation": {**DONE["operation"], "state": "running", "processes": []}}
    sidecar.replies = [Reply(202, running, {"Retry-After": "0"}), Reply(body=DONE)]
    assert main(["maintain"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("maintain running (")
    assert "1 of 1 processes" in captured.out


def test_maintain_that_fails_while_we_wait_is_told_like_a_refusal(
    sidecar: StandInSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    running = {"operation": {**DONE["operation"], "state": "running", "processes": []}}
    failed = failing("collector_busy", "another collection runs")
    failed["operation"] |= {"state": "failed", "code": "collector_busy", "detail": "1 of 2 did it"}
    sidecar.replies = [Reply(202, running, {"Retry-After": "0"}), Reply(body=failed)]
    assert main(["maintain"]) == 1
    err = capsys.readouterr().err
    assert "maintain: 1 of 2 did it (collector_busy)" in err
    assert "worker rank 1 (pid 9): another collection runs" in err


def test_text_of_a_process_does_nothing_to_the_terminal(
    sidecar: StandInSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = process(reason="\x1b]0;title\x07", mode="\x1b[2J", host="\n")
    sidecar.replies = [Reply(body={**STATUS, "processes": [evil]})]
    main(["status"])
    assert "\x1b" not in capsys.readouterr().out


def test_maintain_stops_waiting_when_it_was_told_to(
    sidecar: StandInSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    running = {"operation": {**DONE["operation"], "state": "running", "processes": []}}
    sidecar.replies = [Reply(202, running, {"Retry-After": "9"})]
    assert main(["maintain", "--wait", "0"]) == 4
    assert "/gc/operations/op-1" in capsys.readouterr().err
    assert main(["maintain", "--no-wait"]) == 0
    assert len(sidecar.requests) == 2


# --- help, and how it is started ---


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "doctor"])
def test_help_teaches_with_examples_and_exit_codes(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"  gc-sidecar {verb}" in out
    assert "exit codes:" in out
    assert "GC_SIDECAR_" in out


SENT = ("freeze", "budget", "maintain", "restore")


@pytest.mark.parametrize(
    "verb", [*CLIENT_VERBS, "window", "window close", "window show"], ids=lambda verb: verb
)
def test_help_tells_the_exit_codes_that_the_verb_has(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*verb.split(), "--help"]) == 0
    codes = capsys.readouterr().out.partition("exit codes:")[2]
    assert ("an operation" in codes) == (verb in SENT)
    assert ("\n  4  incomplete" in codes) == (verb in (*SENT, "status"))
    assert ("--require-clean" in codes) == (verb in ("window", "window close"))
    assert all(f"\n  {code}  " in codes for code in (0, 1, 2, 3, 130))


@pytest.mark.parametrize("action", ["open", "close", "show"])
def test_each_action_on_a_window_says_what_it_does_with_examples(
    action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["window", action, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"gc-sidecar window {action}" in out.partition("examples:")[2]
    assert f"\n{action.capitalize()} a measured window" in out


@pytest.mark.parametrize("verb", ["freeze", "budget"])
def test_help_says_from_when_on_the_lease_counts(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "--help"]) == 0
    assert "The lease counts from the request" in capsys.readouterr().out


@pytest.mark.parametrize("verb", PACKAGE_VERBS)
def test_a_verb_of_the_package_says_where_it_is(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "--help"]) == 2
    err = capsys.readouterr().err
    assert f"`gc-sidecar {verb}` comes with the sidecar's package or image" in err
    assert "here are: run, status" in err


def test_it_runs_as_a_module_and_loads_only_the_verb_that_was_asked_for() -> None:
    code = (
        "import sys; from gc_sidecar_agent.cli import main;"
        "code = main(['status', '--url', 'http://127.0.0.1:1']);"
        "print(code, *sorted(name for name in sys.modules if name.startswith('gc_sidecar')))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    code_seen, *modules = result.stdout.split()
    assert code_seen == "3"
    assert "gc_sidecar_agent.commands.status" in modules
    assert "gc_sidecar_agent.commands.freeze" not in modules
    assert not [name for name in modules if name.split(".")[0] == "gc_sidecar"]

    module = [sys.executable, "-m", "gc_sidecar_agent", "--version"]
    result = subprocess.run(
        module, env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith("gc-sidecar ")


def test_a_reader_that_has_seen_enough_is_no_error(sidecar: StandInSidecar) -> None:
    sidecar.replies = [Reply(body={**STATUS, "processes": [process()] * 2000})]
    command = f"{sys.executable} -m gc_sidecar_agent status | head -1"
    result = subprocess.run(
        ["sh", "-c", command],
        env={"PYTHONPATH": str(SOURCE), "PATH": os.environ["PATH"], "GC_SIDECAR_URL": sidecar.url},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith("policy")
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [(">&-", 0, ""), (">/dev/full", 1, "cannot write to standard output: No space left on device")],
)
def test_an_output_that_takes_nothing_is_no_traceback(
    sidecar: StandInSidecar, output: str, code: int, said: str
) -> None:
    sidecar.replies = [Reply(body=STATUS)]
    result = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m gc_sidecar_agent status {output}"],
        env={"PYTHONPATH": str(SOURCE), "PATH": os.environ["PATH"], "GC_SIDECAR_URL": sidecar.url},
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (code, "")
    assert said in result.stderr
    assert "Traceback" not in result.stderr
