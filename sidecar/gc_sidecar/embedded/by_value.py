"""Functions that travel between processes by value, as vLLM sends them with cloudpickle.

The receiver needs no module of the sender's: it gets the code itself. What the function uses must be arguments,
builtins or constants in its closure; its module's globals do not travel.
"""

from __future__ import annotations

import builtins
import marshal
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any


@dataclass(frozen=True)
class FunctionByValue:
    """A function taken apart."""

    code: bytes
    name: str
    defaults: tuple[Any, ...] | None
    closure: tuple[Any, ...]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionByValue:
        """Take `function` apart. Raises TypeError where it is not a Python function."""
        if not isinstance(function, FunctionType):
            raise TypeError(f"{function!r} cannot be sent by value")
        closure = tuple(cell.cell_contents for cell in function.__closure__ or ())
        return cls(
            marshal.dumps(function.__code__), function.__name__, function.__defaults__, closure
        )

    def build(self) -> Callable[..., Any]:
        """The function, in this process."""
        cells = tuple(CellType(value) for value in self.closure)
        names = {"__builtins__": builtins.__dict__}
        return FunctionType(marshal.loads(self.code), names, self.name, self.defaults, cells)
