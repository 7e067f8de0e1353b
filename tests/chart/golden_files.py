"""Writes the golden files, what each preset renders: `python -m tests.chart.golden_files`, or `make chart`."""

from __future__ import annotations

from pathlib import Path

from tests.chart.rendering import PRESETS, render_text

DIRECTORY = Path(__file__).with_name("golden")


def golden(preset: str) -> Path:
    return DIRECTORY / f"{preset}.yaml"


def main() -> None:
    for preset in PRESETS:
        golden(preset).write_text(render_text(preset=preset))


if __name__ == "__main__":
    main()
