"""Which collector this interpreter has: found out by asking it, with nothing changed afterwards."""

from __future__ import annotations

import gc
import sys
import sysconfig
from collections.abc import Iterator

import pytest

from gc_sidecar_agent.collector import (
    FREE_THREADED,
    GENERATIONAL,
    INCREMENTAL,
    UNSUPPORTED_REASONS,
    collector_kind,
    is_heap_frozen,
)
from tests.unit.agent.own_process import in_own_process


@pytest.fixture(autouse=True)
def _thresholds_as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_the_first_patches_of_3_14_are_incremental_and_every_other_cpython_is_generational() -> (
    None
):
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert collector_kind() == FREE_THREADED
    elif (3, 14, 0) <= sys.version_info < (3, 14, 5):
        assert collector_kind() == INCREMENTAL
    else:
        assert collector_kind() == GENERATIONAL


@pytest.mark.parametrize("thresholds", [(700, 10, 10), (2000, 10, 0), (0, 0, 0), (50, 3, 7)])
def test_the_thresholds_are_left_as_they_were(thresholds: tuple[int, int, int]) -> None:
    gc.set_threshold(*thresholds)
    collector_kind()
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("thresholds", [(700, 10, 10), (2000, 10, 0)])
def test_one_that_ignores_its_third_threshold_is_incremental(
    monkeypatch: pytest.MonkeyPatch, thresholds: tuple[int, int, int]
) -> None:
    state = [*thresholds[:2], 0]

    def set_threshold(a: int, b: int, _: int) -> None:
        state[:2] = [a, b]

    monkeypatch.setattr(gc, "set_threshold", set_threshold)
    monkeypatch.setattr(gc, "get_threshold", lambda: tuple(state))
    assert collector_kind() == INCREMENTAL
    assert state == [*thresholds[:2], 0]


def test_a_build_without_the_gil_is_free_threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    assert collector_kind() == FREE_THREADED


def test_a_third_threshold_of_0_is_no_proof_of_an_incremental_one() -> None:
    gc.set_threshold(700, 10, 0)
    assert collector_kind() != INCREMENTAL or sys.version_info >= (3, 14)


def test_every_unsupported_collector_has_a_reason_for_people() -> None:
    assert set(UNSUPPORTED_REASONS) == {INCREMENTAL, FREE_THREADED}
    assert "3.14.5" in UNSUPPORTED_REASONS[INCREMENTAL]


@in_own_process
def test_a_heap_is_frozen_between_freeze_and_unfreeze() -> None:
    # On CPython 3.12 every collection puts its immortal objects where the frozen ones are.
    for _ in range(2):
        gc.collect()
        assert not is_heap_frozen()
        gc.freeze()
        assert is_heap_frozen()
        gc.unfreeze()
        assert not is_heap_frozen()
