"""Which kind of garbage collector this interpreter has, found out by probing, not from the version string.

Only a generational collector obeys its third threshold, and only then can a policy hold full collections off.
"""

from __future__ import annotations

import gc
import sysconfig

GENERATIONAL = "generational"
INCREMENTAL = "incremental"
FREE_THREADED = "free_threaded"

UNSUPPORTED_REASONS = {
    INCREMENTAL: "this CPython has the incremental collector (3.14.0 to 3.14.4), which ignores the third"
    " threshold: full collections cannot be held off. Use 3.14.5 or later, or 3.13",
    FREE_THREADED: "free-threaded CPython has no generations and scans frozen objects too: freezing does not"
    " shorten its collections",
}


# CPython 3.12 moves its immortal objects, 375 of them, among the frozen ones at every collection. A heap that
# somebody froze has many times as many: the modules of this package alone are more.
_IMMORTAL_AT_MOST = 1000


def is_heap_frozen() -> bool:
    """Whether somebody froze the heap. Walks the list of what is frozen: 62 to 177 ms in an engine."""
    return gc.get_freeze_count() > _IMMORTAL_AT_MOST


def collector_kind() -> str:
    """GENERATIONAL, INCREMENTAL or FREE_THREADED. Leaves the thresholds as they were."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return FREE_THREADED
    threshold0, threshold1, threshold2 = gc.get_threshold()
    if threshold2:
        return GENERATIONAL  # the incremental collector always reads 0 here
    gc.set_threshold(threshold0, threshold1, 1)
    obeyed = gc.get_threshold()[2] == 1
    gc.set_threshold(threshold0, threshold1, threshold2)
    return GENERATIONAL if obeyed else INCREMENTAL
