"""Keeps the wall between the packages: what goes into vLLM needs nothing that its image may lack.

Every import of `gc_sidecar_agent` is read, those inside functions too, and held against the
standard library.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

AGENT = Path(__file__).resolve().parents[2] / "sidecar" / "gc_sidecar_agent"

# The engine's own modules: (module of the agent, what it imports). They are there when the function
# runs, and only then, so each import stands in a function and not at the top of its module.
ENGINE_IMPORTS = {
    ("endpoint", "starlette"),
}


@dataclass(frozen=True)
class Import:
    module: str
    """The agent's module that imports, relative to the package: `page`, `rpc.worker`."""
    line: int
    name: str
    """The top-level name that is imported."""
    in_function: bool


def imports_of(tree: ast.Module, module: str) -> Iterator[Import]:
    """Every import in the module; a relative one is an import of the agent itself."""

    def walk(node: ast.AST, in_function: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, node.lineno, alias.name.split(".")[0], in_function)
        elif isinstance(node, ast.ImportFrom):
            name = node.module.split(".")[0] if node.module and not node.level else AGENT.name
            yield Import(module, node.lineno, name, in_function)
        elif isinstance(node, ast.Call):
            # importlib.import_module("x") and __import__("x"), where the name is written out.
            called = node.func.attr if isinstance(node.func, ast.Attribute) else None
            called = node.func.id if isinstance(node.func, ast.Name) else called
            if called in ("import_module", "__import__") and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    name = first.value.split(".")[0] or AGENT.name
                    yield Import(module, node.lineno, name, in_function)
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, in_function or function)

    yield from walk(tree, False)


def faults_of(found: Import, allowed: set[tuple[str, str]]) -> list[str]:
    where = f"gc_sidecar_agent/{found.module.replace('.', '/')}.py:{found.line}"
    if found.name in sys.stdlib_module_names or found.name == AGENT.name:
        return []
    if (found.module, found.name) not in allowed:
        return [
            f"{where} imports {found.name}: not the standard library, and not in ENGINE_IMPORTS"
        ]
    if not found.in_function:
        return [f"{where} imports {found.name} outside a function, where the image may lack it"]
    return []


def all_imports() -> list[Import]:
    found: list[Import] = []
    for path in sorted(AGENT.rglob("*.py")):
        module = ".".join(path.relative_to(AGENT).with_suffix("").parts)
        found += imports_of(ast.parse(path.read_text(), str(path)), module)
    return found


def test_the_agent_imports_only_the_standard_library_and_itself() -> None:
    found = all_imports()
    assert found, f"no import was found in {AGENT}: this test looks at the wrong place"
    assert [fault for one in found for fault in faults_of(one, ENGINE_IMPORTS)] == []


def test_the_agent_never_imports_the_sidecar() -> None:
    assert [one for one in all_imports() if one.name == "gc_sidecar"] == []
    assert "gc_sidecar" not in {name for _, name in ENGINE_IMPORTS}


def test_no_exception_is_left_over() -> None:
    used = {(one.module, one.name) for one in all_imports()}
    assert used >= ENGINE_IMPORTS, "ENGINE_IMPORTS allows what nobody imports any more"


@pytest.mark.parametrize(
    ("source", "faulty"),
    [
        ("import os, json.decoder\nfrom collections import abc", False),
        ("from . import page\nfrom .page import Page\nimport gc_sidecar_agent.page", False),
        ("def f():\n    from vllm.v1 import engine", False),
        ("class C:\n    async def f(self):\n        import vllm", False),
        ("import vllm", True),
        ("class C:\n    import vllm", True),
        ("try:\n    import vllm\nexcept ImportError:\n    pass", True),
        ("if TYPE_CHECKING:\n    from vllm import LLM", True),
        ("def f():\n    import torch", True),
        ("import numpy", True),
        ("import gc_sidecar", True),
        ("def f():\n    from gc_sidecar.server import app", True),
        ("importlib.import_module('gc_sidecar.server')", True),
        ("def f():\n    __import__('gc_sidecar')", True),
        ("def f():\n    importlib.import_module('vllm.v1')", False),
    ],
)
def test_the_wall_itself(source: str, faulty: bool) -> None:
    found = imports_of(ast.parse(source), "example")
    faults = [fault for one in found for fault in faults_of(one, {("example", "vllm")})]
    assert bool(faults) == faulty
