"""The half of gc-sidecar that runs inside vLLM's processes: GC policy, pause meter, page and board.

Standard library only, and nothing of `gc_sidecar`: `tests/unit/test_wall.py` keeps it so.
"""

__version__ = "0.1.0"
