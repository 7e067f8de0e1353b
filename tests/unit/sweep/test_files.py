"""Files of a sweep are whole or as they were, and errors name them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gc_sidecar.sweep.files import naming, replacing


def test_a_file_is_as_it_was_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    with replacing(path) as out:
        out.write("new")
        out.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["report.json"]


def test_one_that_could_not_be_written_is_named_and_leaves_the_old(tmp_path: Path) -> None:
    path = tmp_path / "measurements.csv"
    path.write_text("old")

    def fill_the_disk() -> None:
        with replacing(path) as out:
            out.write("half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=r"No space left.*measurements\.csv"):
        fill_the_disk()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["measurements.csv"]


def test_an_error_without_a_file_gets_its_name() -> None:
    with pytest.raises(OSError, match=r"/data/sweep\.jsonl"), naming(Path("/data/sweep.jsonl")):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
