"""The embedded engine: an engine without a model, for the demo, for tests and for a first look.

It has what gc-sidecar acts on and nothing else: real processes with real, growing Python heaps, that step in
lockstep and have a vLLM server's RPC and HTTP surface as far as we use it, its traps included. It is not vLLM.
"""

from __future__ import annotations

from gc_sidecar import __version__

ENGINE_NAME = f"embedded {__version__}"
