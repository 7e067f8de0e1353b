"""CPython runs this at start-up where its directory is on the path: see the package that it lies in.

It stands by itself, for here the package cannot be imported, and it does what a `sitecustomize` of the image or of
the user would have done.
"""

import gc
import os
import sys
import time

# Any CPython 3 that a benchmark may bring has to read this file.
if False:
    from collections.abc import Callable

LEAST_S = 0.0005


def _meter(path: str) -> None:
    started_s = 0.0

    def write(duration_s: float, generation: int) -> None:
        began_s = time.time() - duration_s
        line = f"[{os.getpid()},{began_s:.6f},{duration_s:.6f},{generation}]\n"
        try:
            # Opened for each line: a process that closes what it does not know would use the number for its own.
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                os.write(descriptor, line.encode())  # in one call: other processes append too
            finally:
                os.close(descriptor)
        except OSError:
            pass

    def callback(
        phase: str, info: "dict[str, int]", now: "Callable[[], float]" = time.monotonic
    ) -> None:
        nonlocal started_s
        if phase == "start":
            started_s = now()
            return
        duration_s = now() - started_s
        if duration_s >= LEAST_S and started_s:
            write(duration_s, info["generation"])

    # So that a process without a long pause is known to have been metered.
    write(0.0, -1)
    gc.callbacks.append(callback)


def _run_the_next_one() -> None:
    import importlib.machinery
    import importlib.util

    # Where one run observes another, its directory comes next, and then ours must not come again.
    seen = sys.__dict__.setdefault("_gc_sidecar_observe", [])
    seen.append(os.path.dirname(os.path.abspath(__file__)))
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") not in seen]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_path = os.environ.get("GC_SIDECAR_CLIENT_PAUSES")
if _path and not hasattr(sys, "_gc_sidecar_observe"):
    _meter(_path)
_run_the_next_one()
