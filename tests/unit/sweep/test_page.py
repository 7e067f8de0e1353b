"""The report: one file that asks no other host for anything, with nothing of anybody's text in its markup."""

from __future__ import annotations

import csv
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from gc_sidecar.sweep import page, reporting
from gc_sidecar.sweep.analysis import judge
from tests.unit.sweep.samples import block, pause, sample

RESULTS = judge(
    [
        block([sample(0.0, {50: 0.1, 70: 0.03})], [pause(0.252, 0.09)], number=0),
        block([sample(9.0)], policy="budget", number=1),
    ]
)


def test_the_page_needs_no_other_host_and_says_what_the_table_says() -> None:
    text = page.write(RESULTS, {"engine_url": "http://x/<script>alert(1)</script>"})
    assert "<script" not in text
    assert not re.search(r"\b(src|href)=|url\(|@import", text)
    for line in reporting.show(RESULTS).splitlines():
        assert line.replace("'", "&#x27;") in text


def test_every_plot_is_well_formed_and_has_what_it_tells_of() -> None:
    text = page.write(RESULTS, {})
    plots = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(plots) == 4, "a latency for each policy, the distribution, memory"
    for plot in plots:
        root = ElementTree.fromstring(plot)
        assert root.findall("{http://www.w3.org/2000/svg}polyline")
    assert plots[0].count("<circle") == 2
    assert plots[0].count("<path") == 1


def test_what_machines_read_has_every_outlier_and_every_measurement(tmp_path: Path) -> None:
    document = json.loads(json.dumps(reporting.document(RESULTS, {"machine": "x"})))
    off, budget = document["policies"]
    assert off["outliers_by_cause"] == {"worker dp0 rank 1": 1, "something else": 1}
    assert (off["gc_outliers"], budget["gc_outliers"]) == (1, 0)
    reporting.write_csv(RESULTS, tmp_path / "m.csv")
    with (tmp_path / "m.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 200
    assert {row["block"] for row in rows} == {"1", "2"}, "as they are named everywhere else"
    assert [row["outlier_cause"] for row in rows if row["outlier_cause"]] == [
        "worker dp0 rank 1",
        "something else",
    ]


def test_long_notes_are_wrapped_and_the_table_is_not() -> None:
    text = page.write(RESULTS, {})
    table, notes = re.findall("<pre.*?</pre>", text, re.DOTALL)
    assert table.startswith("<pre>POLICY")
    assert notes.startswith('<pre class="notes">off: 2 outliers')
    assert ".notes { white-space: pre-wrap }" in text
