"""The unit tests of ``make check``: those that import nothing heavy and start no process.

python -m tests.support.light [ARGUMENTS OF PYTEST]
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.claims import ROOT

HEAVY = frozenset({"megatron", "ray", "transformers", "verl", "vllm"})
"""Packages whose import takes seconds."""
STARTS = frozenset({"multiprocessing", "subprocess"})
PRELOADS = ("tests.mutations.child", "tests.support.errors")
"""Modules that import, when they are used, what their forks need, or everything."""
FIXTURES = frozenset({"tied_model", "untied_model"})
"""Of ``tests/conftest.py``, written with transformers."""


def light_tests(root: Path = ROOT) -> list[Path]:
    """Files of ``tests/unit`` of which no function imports anything heavy, nor what they import, at whatever distance."""
    return [file for file in sorted((root / "tests" / "unit").rglob("test_*.py")) if is_light(file, root)]


def is_light(file: Path, root: Path = ROOT) -> bool:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    mine = set(_imported(nodes))
    arguments = {node.arg for node in nodes if isinstance(node, ast.arg)}
    # pytest.importorskip("verl"), a loss "package.module:function" and the like
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    mine |= {text.replace(":", ".") for text in texts if re.fullmatch(r"\w+(\.\w+)*(:\w+)?", text)}
    direct = {name.partition(".")[0] for name in mine}
    if any(name.startswith(PRELOADS) for name in mine):
        return False
    return not (direct & (HEAVY | STARTS) or reached(mine, root) & HEAVY or arguments & FIXTURES)


def reached(names: Iterable[str], root: Path = ROOT) -> set[str]:
    """Packages from outside that are imported with these modules, as far as statements outside of functions say."""
    found: set[str] = set()
    seen: set[Path | str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        files = _files(name, root)
        if not files:
            found.add(name.partition(".")[0])
        for file in files:
            now, later = _of_module(file, file.stat().st_mtime_ns)
            waiting += [later[last] for last in [name.rpartition(".")[2]] if last in later]
            if file not in seen:
                seen.add(file)
                waiting += now
    return found


@cache
def _files(name: str, root: Path) -> list[Path]:
    """What importing a dotted name reads of this tree; the last part may be a name in a module."""
    parts = name.split(".")
    places = [root.joinpath(*parts[: length + 1]) for length in range(len(parts))]
    each = (file for place in places for file in (place / "__init__.py", place.with_suffix(".py")))
    return [file for file in each if file.is_file()]


@cache
def _of_module(file: Path, changed: int) -> tuple[list[str], dict[str, str]]:
    """What a module imports when it is imported, and what when one of its names is used, by that name."""
    body = ast.parse(file.read_text()).body
    typed = [inner for node in body if _for_types(node) for inner in ast.walk(node)]
    return list(_imported(_outside_functions(body))), {name.rpartition(".")[2]: name for name in _imported(typed)}


def _for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _outside_functions(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and _for_types(node):
            yield from _outside_functions(node.orelse)
            continue
        for field in ("body", "orelse", "finalbody", "handlers"):
            for inner in getattr(node, field, []):
                yield from _outside_functions(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def main(arguments: list[str]) -> int:
    files = [str(file.relative_to(ROOT)) for file in light_tests()]
    status = pytest.main([*files, "-q", *arguments])
    if heavy := sorted(HEAVY & sys.modules.keys()):
        print(
            f"error: a test of make check has imported {', '.join(heavy)}; tests/support/light.py must leave them out",
            file=sys.stderr,
        )
        return status or 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
