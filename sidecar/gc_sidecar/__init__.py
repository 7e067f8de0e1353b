"""The half of gc-sidecar that runs beside vLLM: the REST server, its client commands and the demo.

What runs inside vLLM's own processes is `gc_sidecar_agent`, which imports nothing from here.
"""

__version__ = "0.1.0"
