"""A sweep's plan: every policy gets every point equally often, and what cannot be planned says why."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from gc_sidecar.sweep.plan import Plan, PlanError, Point, check_policies, grid, read_points

PLAN = Plan(grid((16, 32), (8,), (1, 2)), ("off", "freeze", "budget"), 3, 10, 2, 5.0)


def test_every_policy_runs_every_point_equally_often() -> None:
    counts = Counter((block.policy, point) for block in PLAN.blocks() for point in block.points)
    assert counts == {(policy, point): 3 for policy in PLAN.policies for point in PLAN.points}


def test_blocks_alternate_and_no_policy_always_comes_first() -> None:
    blocks = PLAN.blocks()
    assert [block.number for block in blocks] == list(range(9))
    firsts = {block.policy for block in blocks if block.number % 3 == 0}
    assert firsts == set(PLAN.policies)
    assert blocks[0].points == blocks[3].points[::-1], "and the order of points turns"


def test_another_plan_has_another_fingerprint() -> None:
    assert PLAN.fingerprint == replace(PLAN).fingerprint
    for change in ({"rounds": 4}, {"points": PLAN.points[:1]}, {"pause_budget_ms": 6.0}):
        assert replace(PLAN, **change).fingerprint != PLAN.fingerprint  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("points.csv", "prompt_tokens,output_tokens,concurrency\n16,8,1\n32,8,2\n"),
        ("points.csv", "\ufeffprompt_tokens, output_tokens, concurrency\r\n16, 8, 1\r\n32, 8, 2\r\n"),
        ("points.json", '[{"prompt_tokens": 16, "output_tokens": 8, "concurrency": 1},'
         ' {"prompt_tokens": 32, "output_tokens": 8, "concurrency": 2}]'),
    ],
)  # fmt: skip
def test_points_are_read_from_a_file(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert read_points(path) == (Point(16, 8, 1), Point(32, 8, 2))


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("p.csv", "prompt_tokens,output_tokens,concurrency\n", "holds no point"),
        ("p.csv", "prompt_tokens,output_tokens\n16,8\n", "has no column concurrency"),
        ("p.csv", "prompt_tokens;output_tokens;concurrency\n16;8;1\n", "no column prompt_tokens.*commas"),
        ("p.csv", "", "has no column"),
        ("p.csv", "prompt_tokens,output_tokens,concurrency\n16,8\n", "point 1: concurrency is None"),
        ("p.csv", "prompt_tokens,output_tokens,concurrency\n16,0,1\n", "output_tokens is 0"),
        ("p.csv", "prompt_tokens,output_tokens,concurrency\n16,8,1\nmany,8,1\n", "point 2: prompt_tokens"),
        ("p.json", "[", "is not JSON"),
        ("p.json", '{"prompt_tokens": 1}', "must hold a list"),
        ("p.json", "[1]", "must hold a list"),
    ],
)  # fmt: skip
def test_points_that_are_none_are_an_error_that_says_where(
    tmp_path: Path, name: str, text: str, told: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(PlanError, match=told):
        read_points(path)


def test_a_concurrency_that_is_never_reached_is_refused() -> None:
    with pytest.raises(PlanError, match=r"concurrency of 2 needs at least 2 requests.*--requests"):
        replace(PLAN, requests=1)


def test_policies_are_known_and_each_is_taken_once() -> None:
    assert check_policies(["budget", " off", "budget "]) == ("budget", "off")
    with pytest.raises(PlanError, match="melt is no policy: take some of off, freeze, budget"):
        check_policies(["off", "melt"])
