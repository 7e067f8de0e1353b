"""`?format=table`: aligned, and without anything that a terminal would obey."""

from __future__ import annotations

from gc_sidecar.server.tables import align, printable, seconds, size


def test_columns_are_as_wide_as_they_need() -> None:
    assert align(("role", "pid"), [("worker", 5), ("engine_core", None)]) == (
        "role         pid\nworker       5\nengine_core  -"
    )


def test_what_a_page_says_cannot_command_a_terminal() -> None:
    assert printable("a\x1b[2Jb\n\x07") == "a?[2Jb\n?"
    assert "\n" not in align(("x",), [("two\nlines",)]).partition("\n")[2]


def test_values_have_the_unit_that_fits() -> None:
    assert [seconds(v) for v in (None, 0.00003, 0.335, 1.5)] == ["-", "30 us", "335 ms", "1.50 s"]
    assert size(None) == "-"
    assert size(-1 << 20) == "-1.0 MiB"
