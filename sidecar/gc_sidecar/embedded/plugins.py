"""Names that are looked up when the embedded engine starts: its plugins, and the workers' extension.

vLLM calls the entry points of `vllm.general_plugins` once in every process; here they are named by a flag.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any


def load_plugins(names: Iterable[str]) -> None:
    """Call each `MODULE:FUNCTION` in this process."""
    for name in names:
        resolve(name)()


def resolve(name: str) -> Any:
    """What `MODULE:NAME` or `MODULE.NAME` stands for."""
    module, colon, attribute = name.partition(":")
    if not colon:
        module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
