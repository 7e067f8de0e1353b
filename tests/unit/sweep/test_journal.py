"""The journal: a sweep that was killed goes on after its last whole block, and only ever with its own plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gc_sidecar.sweep.journal import NAME, Journal, Reason
from gc_sidecar.sweep.plan import PlanError
from tests.unit.sweep.samples import block, pause, sample
from tests.unit.sweep.test_plan import PLAN

ABOUT = {"engine_url": "http://a:8000", "seed": 7}
MODEL = "model-a"


def begun(directory: Path, about: dict[str, Any] = ABOUT) -> Journal:
    journal = Journal(directory, PLAN, about)
    journal.begin(MODEL)
    return journal


def test_what_was_kept_is_read_as_it_was(tmp_path: Path) -> None:
    about = {**ABOUT, "machine": "x"}
    journal = begun(tmp_path / "out", about)
    records = [
        block([sample(0.0, {3: 0.1})], [pause(0.1, 0.2)], [pause(0.2, 0.1)], number=n)
        for n in (0, 1)
    ]
    for record in records:
        journal.add(record)
    journal.close()
    again = Journal(tmp_path / "out", PLAN, {**ABOUT, "machine": "another"})
    assert again.records == records
    assert again.about == {**about, "model": MODEL}
    assert [each.number for each in again.missing(PLAN)] == list(range(2, 9))


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_block_that_was_cut_off_is_run_again(tmp_path: Path, cut: int) -> None:
    journal = begun(tmp_path)
    for number in range(2):
        journal.add(block([sample(0.0)], number=number))
    journal.close()
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes()[:-cut])
    again = Journal(tmp_path, PLAN, ABOUT)
    assert [record.number for record in again.records] == [0]
    again.add(block([sample(0.0)], number=1))
    again.close()
    assert [record.number for record in Journal(tmp_path, PLAN, ABOUT).records] == [0, 1]


def test_the_journal_of_another_plan_is_refused_and_kept(tmp_path: Path) -> None:
    begun(tmp_path).close()
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(PlanError, match=r"other points or settings.*--fresh"):
        Journal(tmp_path, replace(PLAN, rounds=5), ABOUT)
    assert (tmp_path / NAME).read_bytes() == before


def test_a_disturbed_block_is_run_again_and_takes_the_place_of_the_first(tmp_path: Path) -> None:
    journal = begun(tmp_path)
    disturbed = block([sample(0.0)], number=0, disturbances=[Reason("policy_ended", "x")])
    journal.add(disturbed)
    assert journal.missing(PLAN)[0].number == 0
    whole = block([sample(5.0)], number=0)
    journal.add(whole)
    assert journal.records == [whole]
    journal.close()
    again = Journal(tmp_path, PLAN, ABOUT)
    assert again.records == [whole]
    assert again.missing(PLAN)[0].number == 1


def test_one_that_begins_anew_leaves_nothing_of_the_one_before(tmp_path: Path) -> None:
    begun(tmp_path).close()
    (tmp_path / "report.html").write_text("old")
    Journal(tmp_path, replace(PLAN, rounds=5), ABOUT, fresh=True, reports=["report.html", "none"])
    assert not (tmp_path / "report.html").exists()


def test_damage_in_the_middle_is_refused_and_kept(tmp_path: Path) -> None:
    journal = begun(tmp_path)
    for number in range(2):
        journal.add(block([sample(0.0)], number=number))
    journal.close()
    path = tmp_path / NAME
    first, second, third = path.read_text().splitlines(keepends=True)
    path.write_text(f"{first}{second[:50]}\n{third}")
    before = path.read_bytes()
    with pytest.raises(PlanError, match="is damaged"):
        Journal(tmp_path, PLAN, ABOUT)
    assert path.read_bytes() == before


@pytest.mark.parametrize("line", ['{"a":1}', "5", "[]"])
def test_a_damaged_journal_is_refused(tmp_path: Path, line: str) -> None:
    begun(tmp_path).close()
    with (tmp_path / NAME).open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(PlanError, match="is damaged"):
        Journal(tmp_path, PLAN, ABOUT)


@pytest.mark.parametrize("kept", [0, 1, 60])
def test_one_that_was_cut_off_in_its_first_line_begins_anew(tmp_path: Path, kept: int) -> None:
    begun(tmp_path).close()
    path = tmp_path / NAME
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    assert begun(tmp_path).records == []
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"engine_url": "http://b:8000"}, "of the engine http://a:8000, not http://b:8000"),
        ({"seed": 8}, "with the seed 7, not 8"),
        ({"seed": None}, "with the seed 7, not none"),
    ],
)
def test_the_journal_of_another_engine_or_seed_is_refused_and_kept(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    begun(tmp_path).close()
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(PlanError, match=f"a sweep {told}"):
        Journal(tmp_path, PLAN, {**ABOUT, **change})
    assert (tmp_path / NAME).read_bytes() == before


def test_a_journal_goes_on_with_its_own_model_only(tmp_path: Path) -> None:
    begun(tmp_path).close()
    again = Journal(tmp_path, PLAN, ABOUT)
    for model in (MODEL, None):
        again.begin(model)
    with pytest.raises(PlanError, match="a sweep of the model model-a, not model-b"):
        again.begin("model-b")
    assert len((tmp_path / NAME).read_text().splitlines()) == 1


@pytest.mark.parametrize("name", ["model", "seed"])
def test_the_journal_of_an_older_release_that_did_not_note_them_is_refused(
    tmp_path: Path, name: str
) -> None:
    begun(tmp_path).close()
    path = tmp_path / NAME
    head = json.loads(path.read_text())
    del head["about"][name]
    path.write_text(json.dumps(head) + "\n")
    with pytest.raises(PlanError, match="older gc-sidecar, which did not note model and seed"):
        Journal(tmp_path, PLAN, ABOUT)


def test_a_number_that_is_none_is_damage(tmp_path: Path) -> None:
    journal = begun(tmp_path)
    journal.add(block([sample(0.0)], number=0))
    journal.close()
    path = tmp_path / NAME
    path.write_text(path.read_text().replace('"started_s":0.0', '"started_s":NaN'))
    with pytest.raises(PlanError, match="is damaged"):
        Journal(tmp_path, PLAN, ABOUT)


def test_two_sweeps_do_not_write_to_one_journal(tmp_path: Path) -> None:
    first = Journal(tmp_path, PLAN, ABOUT)
    with pytest.raises(PlanError, match="another sweep is at work"):
        Journal(tmp_path, PLAN, ABOUT)
    first.close()
    Journal(tmp_path, PLAN, ABOUT)


@pytest.mark.parametrize("text", ["{}\n", "not json\n", '["list"]\n'])
def test_a_file_that_is_no_journal_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(PlanError, match="not the journal of a sweep"):
        Journal(tmp_path, PLAN, ABOUT)
