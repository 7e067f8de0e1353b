"""Takes docs/images/page-*.png: the page in light, in dark and on a phone, of a run on the embedded engine.

It starts an engine whose heaps grow, freezes it by the page's own button, measures a window, maintains, restores,
and lets it go on; every picture is of what then stands on the page. Run it as `make screenshots`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.embedded.engine import EmbeddedEngine, run_directory
from tests.page.browser import PHONE, Browser, Tab, chromium, tab
from tests.sidecar_process import SidecarProcess

DEFAULT_OUT = Path(__file__).resolve().parents[1] / "docs" / "images"
FLAGS = (
    "--workers=2", "--heap-objects=300000", "--retain-per-step=400", "--step-ms=50", "--free-running",
)  # fmt: skip
PROCESSES = 4
# How long each part of the run lasts.
NORMAL_S, MEASURED_S, AFTER_S = 70.0, 35.0, 25.0
# Down to the pauses, without what is below.
DESKTOP = {"width": 960, "height": 935}
MAXIMUM_BYTES = 150_000


def play(shown: Tab, sidecar: SidecarProcess) -> None:
    """Normal GC, then a benchmark under freeze with a maintenance between two windows, and normal GC again."""
    time.sleep(NORMAL_S)
    shown.press("freeze", owner="bench-1")
    shown.confirm()
    for window in ("prefill", "decode"):
        post(sidecar, f"/gc/windows?window_id={window}&max_pause_ms=250&max_stall_share=0.2")
        time.sleep(MEASURED_S)
        post(sidecar, f"/gc/windows/{window}/close")
        shown.press("maintain")
        shown.confirm()
    shown.press("restore")
    shown.confirm()
    post(sidecar, "/gc/windows?window_id=without-a-policy&max_pause_ms=250")
    time.sleep(AFTER_S)
    post(sidecar, "/gc/windows/without-a-policy/close")
    shown.press("freeze", owner="bench-1")
    shown.confirm()
    time.sleep(5)


def post(sidecar: SidecarProcess, path: str) -> None:
    """What the page has no button for."""
    status, answer = sidecar.post(path)
    if status not in (200, 201):
        raise RuntimeError(f"{path} answered {status}: {answer}")


def take(browser: Browser, url: str, out: Path) -> list[Path]:
    """The pictures."""
    taken = []
    for name, options in {
        "light": {"viewport": DESKTOP, "color_scheme": "light"},
        "dark": {"viewport": DESKTOP, "color_scheme": "dark"},
        "phone": {"viewport": PHONE, "color_scheme": "light"},
    }.items():
        with tab(browser, url, **options) as shown:
            shown.open()
            shown.page.click("[data-span='300']")
            shown.page.wait_for_timeout(1500)
            shown.page.mouse.move(0, 0)
            shown.page.evaluate("scrollTo(0, 0)")
            path = out / f"page-{name}.png"
            shown.page.screenshot(path=path)
            taken.append(path)
    return taken


def main(argv: Sequence[str] | None = None) -> int:
    """Play, take the pictures, and tell whether they are small enough to keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="default: docs/images")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as directory,
        run_directory() as run_dir,
        EmbeddedEngine(*FLAGS, run_dir=run_dir, log_path=Path(directory) / "engine.log") as engine,
        SidecarProcess(
            engine_urls=[engine.url], run_dir=run_dir, log_path=Path(directory) / "sidecar.log"
        ) as sidecar,
        chromium() as browser,
    ):
        sidecar.wait_for_coverage(PROCESSES)
        with tab(browser, sidecar.url) as shown:
            play(shown.open(), sidecar)
        taken = take(browser, sidecar.url, args.out)
    too_large = [path for path in taken if path.stat().st_size > MAXIMUM_BYTES]
    for path in taken:
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
