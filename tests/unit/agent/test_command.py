"""Commands and outcomes: every field is checked, and what is wrong is said by name."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from gc_sidecar_agent.command import (
    INTERNAL_KINDS,
    MAXIMUM_GENERATION,
    MAXIMUM_SECONDS,
    OPERATION_KINDS,
    PROTOCOL_VERSION,
    Command,
    CommandError,
    Outcome,
    parse_command,
    parse_outcome,
)

HUGE = 10**400  # a JSON number that no float can hold
NAN, INF = math.nan, math.inf

SMALLEST = {"version": PROTOCOL_VERSION, "kind": "freeze", "operation_id": "op-1", "generation": 1}
FULL = Command(
    kind="budget",
    operation_id="a.B:c_d-9",
    generation=MAXIMUM_GENERATION,
    owner="bench 1 (München)",
    interval_s=1.5,
    lease_s=0,
    pause_budget_ms=5,
    max_rss_growth_bytes=1 << 40,
    collect_first=False,
    trim=True,
    deadline_s=0.25,
)


@pytest.mark.parametrize("kind", [*OPERATION_KINDS, *INTERNAL_KINDS])
def test_every_kind_arrives_as_it_was_sent(kind: str) -> None:
    sent = Command(kind, "op-1", 3)
    assert parse_command(json.loads(json.dumps(sent.to_dict()))) == sent


def test_every_field_arrives_as_it_was_sent() -> None:
    assert parse_command(json.loads(json.dumps(FULL.to_dict()))) == FULL


def test_what_is_left_out_has_its_default() -> None:
    command = parse_command(SMALLEST)
    assert command == Command("freeze", "op-1", 1)
    assert (command.interval_s, command.lease_s, command.collect_first) == (60.0, 3600.0, True)
    assert (command.owner, command.trim, command.max_rss_growth_bytes) == ("anonymous", False, None)


NO_NUMBERS: list[Any] = [None, "1", True, False, NAN, INF, -INF, HUGE, -HUGE, -1, [], {}, 1j]
BAD = {
    "kind": [
        "",
        "Freeze",
        "freeze ",
        "off",
        None,
        1,
        True,
        ["freeze"],
        {"freeze": 1},
        "x" * 99_999,
    ],
    "operation_id": [
        *("", " ", "-first", ".first", "a b", "a\n", "op-1\n", "ä", "a/b", "x" * 65, "\ud800"),
        *(None, 1, True, NAN, [], {}),
    ],
    "generation": [None, "1", True, 1.0, NAN, -1, MAXIMUM_GENERATION + 1, HUGE, [], {}],
    "owner": ["", "x" * 129, "line\nbreak", "\x00", "\x1b[31m", "\ud800", None, 1, True, [], {}],
    "interval_s": [*NO_NUMBERS, 0, 0.999, MAXIMUM_SECONDS + 1],
    "lease_s": [*NO_NUMBERS, -0.001, MAXIMUM_SECONDS + 1],
    "pause_budget_ms": [*NO_NUMBERS[1:], 0, 1.999, 60_001],
    "max_rss_growth_bytes": [*NO_NUMBERS[1:], 1.0, (1 << 50) + 1],
    "collect_first": [None, 0, 1, "true", "False", NAN, [], {}],
    "trim": [None, 0, 1, "true", "False", NAN, [], {}],
    "deadline_s": [*NO_NUMBERS, -0.001, MAXIMUM_SECONDS + 1],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in BAD.items() for value in values],
    ids=lambda value: value[:12] if isinstance(value, str) else type(value).__name__,
)
def test_a_bad_value_is_refused_and_its_field_named(name: str, value: Any) -> None:
    with pytest.raises(CommandError) as refused:
        parse_command({**SMALLEST, name: value})
    assert str(refused.value).startswith(f"{name} must be ")
    assert len(str(refused.value)) < 200


def test_bad_values_cover_every_field() -> None:
    assert set(BAD) == set(Command.__dataclass_fields__)


GOOD: dict[str, list[Any]] = {
    "operation_id": ["a", "0", "x" * 64, "A-b.c:d_e"],
    "generation": [0, MAXIMUM_GENERATION],
    "owner": ["x", "x" * 128, "名前", "🙂" * 128],
    "interval_s": [1, 1.0, MAXIMUM_SECONDS],
    "lease_s": [0, 0.0, MAXIMUM_SECONDS],
    "pause_budget_ms": [None, 2, 60_000],
    "max_rss_growth_bytes": [None, 0, 1 << 50],
    "deadline_s": [0, MAXIMUM_SECONDS],
}


@pytest.mark.parametrize(("name", "values"), GOOD.items(), ids=list(GOOD))
def test_what_lies_just_inside_is_taken(name: str, values: list[Any]) -> None:
    for value in values:
        assert getattr(parse_command({**SMALLEST, name: value}), name) == value


@pytest.mark.parametrize("name", ["kind", "operation_id", "generation"])
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(CommandError, match=f"^{name} is missing$"):
        parse_command({key: value for key, value in SMALLEST.items() if key != name})


@pytest.mark.parametrize("name", ["timeout", "Kind", "", "x" * 99_999, 7, None, b"kind", (1, 2)])
def test_an_unknown_field_is_named(name: Any) -> None:
    with pytest.raises(CommandError, match="unknown field") as refused:
        parse_command({**SMALLEST, name: 1})
    assert len(str(refused.value)) < 200


def test_unknown_fields_of_different_types_are_refused_as_well() -> None:
    with pytest.raises(CommandError, match="unknown field"):
        parse_command({**SMALLEST, 7: 1, "seven": 1, None: 1})


@pytest.mark.parametrize(
    "version",
    # The last but one is longer than what CPython turns into digits.
    [None, 0, 2, "1", [], NAN, 10**5000, "x" * 99_999],
    ids=lambda value: type(value).__name__,
)
def test_another_protocol_version_is_refused_with_a_remedy(version: Any) -> None:
    with pytest.raises(CommandError, match="from the same release") as refused:
        parse_command({**SMALLEST, "version": version})
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("request_", [None, 1, "freeze", [], [SMALLEST], b"{}", True, NAN])
def test_what_is_no_object_is_refused(request_: Any) -> None:
    with pytest.raises(CommandError, match="JSON object"):
        parse_command(request_)


def test_no_request_whatever_raises_anything_else() -> None:
    chance = random.Random(20)
    names = [*Command.__dataclass_fields__, "version", "other", 7, None]
    values = [value for values in [*BAD.values(), *GOOD.values()] for value in values]
    taken = 0
    for _ in range(20_000):
        request = {
            **SMALLEST,
            **{chance.choice(names): chance.choice(values) for _ in range(chance.randrange(4))},
        }
        try:
            parse_command(request)
            taken += 1
        except CommandError:
            pass
    assert 1_000 < taken < 19_000


# --- outcomes ---

OUTCOME = Outcome("op-1", "maintain", 7, True, None, "done", 0.5, 12, -4096, 0)


def test_an_outcome_arrives_as_it_was_sent() -> None:
    assert parse_outcome(json.loads(json.dumps(OUTCOME.to_dict()))) == OUTCOME


def test_fields_that_a_later_release_adds_are_passed_over() -> None:
    assert parse_outcome({**OUTCOME.to_dict(), "later": [1]}) == OUTCOME


@pytest.mark.parametrize("value", [None, 1, "x", [], [OUTCOME.to_dict()], {}, {"ok": True}])
def test_what_is_no_outcome_is_none(value: Any) -> None:
    assert parse_outcome(value) is None


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("operation_id", [None, 1, [], {}]),
        ("kind", [None, 1, [], {}]),
        ("generation", [None, "1", 1.5, True, -1, HUGE, NAN]),
        ("ok", [None, 0, 1, "True", "False"]),
        ("code", [1, [], {}]),
        ("detail", [1, [], {}]),
        ("pause_s", ["0.1", True, -1, NAN, INF, HUGE, []]),
        ("collected_objects", ["1", 1.5, True, -1, NAN, HUGE]),
        ("resident_delta_bytes", ["1", 1.5, NAN, HUGE, -HUGE, []]),
        ("device_delta_bytes", ["1", 1.5, NAN, HUGE, -HUGE, []]),
    ],
)
def test_an_outcome_with_a_malformed_field_is_none(name: str, values: list[Any]) -> None:
    for value in values:
        assert parse_outcome({**OUTCOME.to_dict(), name: value}) is None, value
