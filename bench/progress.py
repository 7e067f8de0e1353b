"""How far a bench has come: a line on the terminal that is rewritten, and nothing where there is no terminal."""

from __future__ import annotations

import sys


def show_progress(what: str, done: int, total: int) -> None:
    """`what` has been done so many times of so many."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r  {what} {done} of {total}", end=end, file=sys.stderr, flush=True)
