"""`python -m gc_sidecar.embedded`: start an embedded engine, and end it with Ctrl-C or SIGTERM."""

from __future__ import annotations

import sys

from gc_sidecar.embedded.launcher import main

if __name__ == "__main__":
    sys.exit(main())
