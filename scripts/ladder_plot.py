"""Draws docs/images/ladder.svg: at which size of its heap a worker collects fully, and for how long it pauses.

It starts an embedded engine whose heap grows, lets it climb CPython's ladder, freezes it, and lets it grow on. Run
it as `PYTHONPATH=. .venv/bin/python scripts/ladder_plot.py`. It climbs several times and draws the shortest pause
of each rung: the rungs are the same every time, and what else the machine does can only lengthen a pause.
"""

from __future__ import annotations

import argparse
import gc
import math
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from tests.embedded.engine import EmbeddedEngine, run_directory
from tests.readme.ladder import Rung, read_ladder
from tests.sidecar_process import SidecarProcess, wait_for

DEFAULT_OUT = Path(__file__).resolve().parents[1] / "docs" / "images" / "ladder.svg"
# A quarter of the heap must be more than what the thresholds alone keep between two full collections.
THRESHOLD0, THRESHOLD1, THRESHOLD2 = gc.get_threshold()
OBJECTS = int(1.2 * 4 * THRESHOLD0 * (THRESHOLD1 + 1) * (THRESHOLD2 + 1))
FLAGS = ("--workers=1", f"--heap-objects={OBJECTS}", "--retain-per-step=2000", "--free-running")
RUNGS = 8
FROZEN_GROWTH = 1.25**2
DEADLINE_S = 120.0

WIDTH, HEIGHT = 760, 340
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 56, 52
INK, FAINT, PAUSE, FROZEN = "#24292f", "#8c959f", "#b3261e", "#dbe9f6"


def climb(directory: Path) -> tuple[list[Rung], int, int]:
    """The rungs under normal GC, the objects at the freeze, and the objects at the end."""
    with (
        run_directory() as run_dir,
        EmbeddedEngine(*FLAGS, run_dir=run_dir, log_path=directory / "engine.log") as engine,
        SidecarProcess(
            engine_urls=[engine.url], run_dir=run_dir, log_path=directory / "sidecar.log"
        ) as sidecar,
    ):
        sidecar.wait_for_coverage(3)
        wait_for("the rungs", lambda: len(read_ladder(engine, run_dir)) >= RUNGS, DEADLINE_S)
        status, answer = sidecar.post("/gc/freeze")
        if status != 200:
            raise RuntimeError(f"freeze answered {status}: {answer}")
        rungs = read_ladder(engine, run_dir)
        newest, _, _, frozen_at = engine.steps()[0][-1]

        def objects() -> int:
            steps = engine.steps(newest)[0]
            return steps[-1][3] if steps else frozen_at

        wait_for("growth", lambda: objects() >= frozen_at * FROZEN_GROWTH, DEADLINE_S)
        if read_ladder(engine, run_dir) != rungs:
            raise RuntimeError("a full collection ran while frozen")
        return rungs, frozen_at, objects()


def draw(rungs: Sequence[Rung], frozen_at: int, end: int, climbs: int) -> str:
    """The SVG."""
    highest_ms = _round_up(max(rung.pause_s for rung in rungs) * 1000)

    first = rungs[0].retained_objects / 1.25

    def x(objects: float) -> float:
        """On a logarithmic axis, where a constant ratio is a constant distance."""
        return LEFT + math.log(objects / first) / math.log(end / first) * (WIDTH - LEFT - RIGHT)

    def y(pause_ms: float) -> float:
        return HEIGHT - BOTTOM - pause_ms / highest_ms * (HEIGHT - TOP - BOTTOM)

    def parts() -> Iterator[str]:
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
            f' height="{HEIGHT}" font-family="system-ui, sans-serif" font-size="12" fill="{INK}">'
        )
        yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
        yield _text(LEFT, 24, "Full collections of one worker while its heap grows", size=15)
        yield _text(
            LEFT,
            42,
            f"embedded engine, CPython {platform.python_version()}; the shortest of {climbs} runs",
            fill=FAINT,
        )
        # What was frozen.
        yield (
            f'<rect x="{x(frozen_at):.1f}" y="{TOP}" width="{x(end) - x(frozen_at):.1f}"'
            f' height="{HEIGHT - TOP - BOTTOM}" fill="{FROZEN}"/>'
        )
        middle = (x(frozen_at) + x(end)) / 2
        yield _text(middle, TOP + 20, "frozen: none at all", anchor="middle")
        # Axes.
        for number in range(5):
            value = highest_ms * number / 4
            yield _line(LEFT, y(value), WIDTH - RIGHT, y(value), "#eaeef2" if number else FAINT)
            yield _text(LEFT - 8, y(value) + 4, f"{value:.0f} ms", anchor="end", fill=FAINT)
        for objects in (500_000, 1_000_000, 2_000_000, 4_000_000):
            if first < objects < end:
                yield _line(x(objects), y(0), x(objects), y(0) + 4, FAINT)
                text = f"{objects / 1_000_000:g} M"
                yield _text(x(objects), y(0) + 18, text, anchor="middle", fill=FAINT)
        yield _text(
            WIDTH - RIGHT, HEIGHT - 12, "objects retained (logarithmic)", anchor="end", fill=FAINT
        )
        # The ladder.
        for rung in rungs:
            at, top = x(rung.retained_objects), y(rung.pause_s * 1000)
            yield _line(at, y(0), at, top, PAUSE, width=2)
            yield f'<circle cx="{at:.1f}" cy="{top:.1f}" r="4" fill="{PAUSE}"/>'
        for rung, later in pairwise(rungs):
            ratio = later.retained_objects / rung.retained_objects
            between = x(math.sqrt(rung.retained_objects * later.retained_objects))
            yield _text(between, y(0) - 6, f"x{ratio:.2f}", anchor="middle", size=10)
        yield "</svg>"

    return "\n".join(parts()) + "\n"


def _round_up(value: float) -> int:
    """The next number above `value` that four lines divide nicely."""
    powers = (10, 100, 1000, 10_000)
    steps = (leading * power for power in powers for leading in (1, 2, 3, 4, 5, 6, 8))
    return 4 * next(step for step in steps if 4 * step > value)


def _text(
    x: float, y: float, text: str, anchor: str = "start", size: int = 12, fill: str = INK
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">'
        f"{text}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: int = 1) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"'
        f' stroke-width="{width}"/>'
    )


def main() -> int:
    """Climb, draw, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="where the SVG goes")
    parser.add_argument("--climbs", type=int, default=5, help="how often to climb (default 5)")
    args = parser.parse_args()
    climbs = []
    for number in range(args.climbs):
        print(f"\rclimb {number + 1} of {args.climbs}", end="", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as directory:
            climbs.append(climb(Path(directory)))
    print(file=sys.stderr)
    # A climb may have had one rung more before it was frozen.
    every = zip(*(rungs[:RUNGS] for rungs, _, _ in climbs), strict=True)
    rungs = [min(same, key=lambda rung: rung.pause_s) for same in every]
    _, frozen_at, end = climbs[0]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(draw(rungs, frozen_at, end, args.climbs))
    before: Rung | None = None
    for rung in rungs:
        ratio = f"x{rung.retained_objects / before.retained_objects:.2f}" if before else ""
        print(f"{rung.retained_objects:10,} objects {ratio:>6}  {rung.pause_s * 1000:6.0f} ms")
        before = rung
    print(f"{frozen_at:10,} objects: frozen; no full collection up to {end:,}")
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
