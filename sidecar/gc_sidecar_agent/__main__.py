"""`python -m gc_sidecar_agent VERB`: the verbs that need nothing but the standard library.

The injected tree's `bin/gc-sidecar` runs the same.
"""

from __future__ import annotations

import sys

from gc_sidecar_agent.cli import main

if __name__ == "__main__":
    sys.exit(main())
