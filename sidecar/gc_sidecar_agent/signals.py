"""Gives back what a signal handler raised while a callback of ours ran: CPython drops it there.

A SIGTERM that arrives during a collection is handled at the next bytecode, which is the callback's; the handler's
`raise SystemExit` then becomes "Exception ignored in ..." and the server would not stop when it is told to.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import Any

_EXITS = (SystemExit, KeyboardInterrupt)


class LostExits:
    """Notes exits that were dropped in `callbacks`, until `deliver` raises them in the main thread again."""

    def __init__(self, *callbacks: Callable[..., Any]) -> None:
        self._codes = {getattr(each, "__func__", each).__code__ for each in callbacks}
        self._lost: type[BaseException] | None = None
        self._watching = False

    def watch(self) -> None:
        """Look at what CPython reports as ignored; everything that is not ours goes on as before."""
        if self._watching:
            return
        self._watching = True
        previous = sys.unraisablehook

        def unraisablehook(unraisable: sys.UnraisableHookArgs) -> None:
            # By where it passed first: CPython 3.14 and later do not name the callback any more.
            passed = unraisable.exc_traceback
            is_ours = passed is not None and passed.tb_frame.f_code in self._codes
            if is_ours and issubclass(unraisable.exc_type, _EXITS):
                self._lost = unraisable.exc_type
            else:
                previous(unraisable)

        sys.unraisablehook = unraisablehook

    def deliver(self) -> None:
        """Called on the agent's thread, every poll."""
        lost, self._lost = self._lost, None
        if lost is not None:
            main = threading.main_thread().ident
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(main or 0), ctypes.py_object(lost)
            )
