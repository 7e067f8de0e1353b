"""The journal: a sweep that was killed goes on after its last whole block, and only ever with its own plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gc_sidecar.sweep.journal import NAME, Journal
from gc_sidecar.sweep.plan import PlanError
from tests.unit.sweep.samples import block, pause, sample
from tests.unit.sweep.test_plan import PLAN


def test_what_was_kept_is_read_as_it_was(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out", PLAN, {"machine": "x"})
    records = [
        block([sample(0.0, {3: 0.1})], [pause(0.1, 0.2)], [pause(0.2, 0.1)], number=n)
        for n in (0, 1)
    ]
    for record in records:
        journal.add(record)
    journal.close()
    again = Journal(tmp_path / "out", PLAN, {"machine": "another"})
    assert again.records == records
    assert again.about == {"machine": "x"}
    assert [each.number for each in again.missing(PLAN)] == list(range(2, 9))


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_block_that_was_cut_off_is_run_again(tmp_path: Path, cut: int) -> None:
    journal = Journal(tmp_path, PLAN, {})
    for number in range(2):
        journal.add(block([sample(0.0)], number=number))
    journal.close()
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes()[:-cut])
    again = Journal(tmp_path, PLAN, {})
    assert [record.number for record in again.records] == [0]
    again.add(block([sample(0.0)], number=1))
    again.close()
    assert [record.number for record in Journal(tmp_path, PLAN, {}).records] == [0, 1]


def test_the_journal_of_another_plan_is_refused_and_kept(tmp_path: Path) -> None:
    Journal(tmp_path, PLAN, {}).close()
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(PlanError, match=r"other points or settings.*--fresh"):
        Journal(tmp_path, replace(PLAN, rounds=5), {})
    assert (tmp_path / NAME).read_bytes() == before


@pytest.mark.parametrize("line", ['{"a":1}', "5", "[]"])
def test_a_damaged_journal_is_refused(tmp_path: Path, line: str) -> None:
    Journal(tmp_path, PLAN, {}).close()
    with (tmp_path / NAME).open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(PlanError, match="is damaged"):
        Journal(tmp_path, PLAN, {})


def test_two_sweeps_do_not_write_to_one_journal(tmp_path: Path) -> None:
    first = Journal(tmp_path, PLAN, {})
    with pytest.raises(PlanError, match="another sweep is at work"):
        Journal(tmp_path, PLAN, {})
    first.close()
    Journal(tmp_path, PLAN, {})


@pytest.mark.parametrize("text", ["", "{}\n", "not json\n", '["list"]\n'])
def test_a_file_that_is_no_journal_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(PlanError, match="not the journal of a sweep"):
        Journal(tmp_path, PLAN, {})
