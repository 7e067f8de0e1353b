"""Writes the Grafana dashboards as JSON beside this file, or fails where the files differ (--check).

Run it as `python deploy/grafana/dashboards.py [--check]`; fleet.py and engine.py say what is on them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana import engine, fleet

DIRECTORY = Path(__file__).resolve().parent


# The library writes these unasked: options that Grafana 10.4 or 12.4 does not know, and a place in a menu,
# where nobody would find them, for links and for the switches of annotations.
UNASKED = (
    ("allowCustomValue", True),
    ("auto", False),
    ("auto_count", 30),
    ("auto_min", "10s"),
    ("footer", {"countRows": False, "reducer": [], "show": False}),
    ("perPage", 20),
    ("percentChangeColorMode", "standard"),
    ("placement", "inControlsMenu"),
    ("selectionMode", "x"),
)


def as_json(dashboard: Dashboard) -> dict[str, object]:
    def without_unasked(fields: dict[str, object]) -> dict[str, object]:
        return {name: value for name, value in fields.items() if (name, value) not in UNASKED}

    text = json.dumps(dashboard, cls=JSONEncoder)
    cleaned: dict[str, object] = json.loads(text, object_hook=without_unasked)
    return cleaned


def generated() -> dict[Path, str]:
    """The text of every dashboard, by the file that it belongs into."""
    return {
        DIRECTORY / f"{dashboard.uid}.json": json.dumps(
            as_json(dashboard), indent=2, sort_keys=True, ensure_ascii=False
        )
        + "\n"
        for dashboard in (fleet.dashboard(), engine.dashboard())
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a file differs"
    )
    check = parser.parse_args(arguments).check
    status = 0
    for path, text in generated().items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if check:
            print(f"{path.name} is not what {Path(__file__).name} writes: run it", file=sys.stderr)
            status = 1
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.name}")
    return status


if __name__ == "__main__":
    sys.exit(main())
