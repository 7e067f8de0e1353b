"""Write the table of values in the chart's README from values.yaml and its comments, or fail where it differs
(--check).

A comment that begins with `# --` describes the key below it; the lines of comment after it belong to it. What
stands above a top-level key without dashes introduces its section.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[1] / "helm" / "gc-sidecar"
VALUES, README = CHART / "values.yaml", CHART / "README.md"
BEGIN, END = "<!-- values: written by `make chart` -->", "<!-- end of values -->"
KEY = re.compile(r"(?P<indent> *)(?P<name>[A-Za-z_][\w.-]*):(?P<rest>.*)")
# A default that is longer than this is better read in values.yaml.
LONGEST_DEFAULT = 60


@dataclass(frozen=True)
class Value:
    """One row of the table, or the head of a section, which has no default."""

    path: tuple[str, ...]
    default: Any
    description: str
    introduction: str


def without_dashes(lines: list[str]) -> str:
    return " ".join(line.strip().lstrip("#").strip() for line in lines)


def split_comment(comment: list[str]) -> tuple[str, str]:
    """The introduction and the description in the lines of comment above a key."""
    for number, line in enumerate(comment):
        if line.strip().startswith("# --"):
            described = without_dashes(comment[number:]).removeprefix("--").strip()
            return without_dashes(comment[:number]), described
    return without_dashes(comment), ""


def keys(text: str) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Every key of the file by its path, with the comment that stands right above it."""
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        if line.strip().startswith("#"):
            comment.append(line)
            continue
        match = KEY.fullmatch(line)
        if match is not None:
            indent = len(match["indent"])
            path = [(i, name) for i, name in path if i < indent] + [(indent, match["name"])]
            yield tuple(name for _, name in path), comment
        comment = []


def values(text: str) -> Iterator[Value]:
    """The values in the order of the file. A map whose keys are described themselves is no value, and one that a
    user fills freely (it is empty, or has a description) is."""
    defaults = yaml.safe_load(text)
    whole: tuple[str, ...] | None = None
    for path, comment in keys(text):
        if whole is not None and path[: len(whole)] == whole:
            continue
        whole = None
        default = defaults
        for name in path:
            default = default[name]
        introduction, description = split_comment(comment)
        is_head = isinstance(default, dict) and default and not description
        if not is_head:
            whole = path
        if len(path) == 1 or not is_head:
            yield Value(path, None if is_head else default, description, introduction)


def shown(default: Any) -> str:
    text = json.dumps(default)
    if len(text) > LONGEST_DEFAULT:
        return "see values.yaml"
    return f"`{text}`"


def section(value: Value) -> str:
    """The heading that a value stands under: its map's name, and one for all that stand alone."""
    return value.path[0] if len(value.path) > 1 or value.default is None else "On their own"


def table(text: str) -> str:
    """The values as Markdown, a table for each section."""
    lines: list[str] = []
    for heading, group in itertools.groupby(values(text), section):
        rows = list(group)
        lines += [f"### {heading}", ""]
        if rows[0].default is None:
            introduction = rows.pop(0).introduction
            lines += [introduction, ""] if introduction else []
        lines += ["| value | default | |", "|---|---|---|"]
        for row in rows:
            description = row.description.replace("|", "\\|")
            lines.append(f"| `{'.'.join(row.path)}` | {shown(row.default)} | {description} |")
        lines.append("")
    return "\n".join(lines).strip()


def generated() -> str:
    """The README with its table as values.yaml has it now."""
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(VALUES.read_text())}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where it differs")
    wanted = generated()
    if parser.parse_args().check:
        if README.read_text() != wanted:
            sys.exit(f"{README} does not say what values.yaml says: make chart")
        return
    README.write_text(wanted)


if __name__ == "__main__":
    main()
