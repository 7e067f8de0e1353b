"""The command `gc-sidecar`, also `python -m gc_sidecar`: server, client verbs and demo.

The frame and the client verbs come from `gc_sidecar_agent`, for they run inside the engine too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gc_sidecar import __version__
from gc_sidecar_agent.cli import VERBS as CLIENT_VERBS
from gc_sidecar_agent.cli import Verb, dispatch

VERBS = {
    "serve": Verb("gc_sidecar.commands.serve", "run the sidecar beside an engine"),
    **CLIENT_VERBS,
    "top": Verb("gc_sidecar.commands.top", "watch policy, processes and pauses on the terminal"),
    "export": Verb("gc_sidecar.commands.export", "pauses, operations and windows as a trace"),
    "doctor": Verb("gc_sidecar.commands.doctor", "find what keeps sidecar and engine apart"),
    "install-agent": Verb(
        "gc_sidecar.commands.install_agent", "write the directory that vLLM loads the agent from"
    ),
    "sweep": Verb(
        "gc_sidecar.commands.sweep", "the same load under each policy: which outliers were GC"
    ),
    "demo": Verb("gc_sidecar.commands.demo", "the whole story on the terminal, engine included"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    return dispatch(VERBS, argv, version=__version__)


if __name__ == "__main__":
    sys.exit(main())
