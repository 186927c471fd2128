"""Where a fault stands, and where the tests are that are named for it: found by names, so that a move costs nothing."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.mutations.source import Scope, Span, definitions, find, may_replace, parse, read_code, replace

_PACKAGES = ("rl_backend", "actors", "adapters", "examples", "benchmarks")


class Place(NamedTuple):
    """The one place of a fault.

    Attributes:
        file: that has it.
        where: module and qualified name; those of the fault, unless its code has moved.
        scopes: the function; or those that share the name, as a property and its setter do; or the class or module.
        text: the file's, with the fault.
    """

    file: Path
    where: str
    scopes: tuple[Scope, ...]
    text: str


def find_place(root: Path, where: str, old: str, new: str) -> Place:
    """Finds the one place of ``old`` and puts ``new`` there. Writes nothing.

    Args:
        root: of the tree.
        where: ``module:qualname``; without a name, the module itself. A function has all that stands inside of it; a class
            or module what is not inside of a function or class of its own. If the tree has no such module or name, others
            are searched: first those of the same qualified name, then those whose last name is the same, the module's first.
        old: statements, an expression, or the first line of a compound statement up to its colon; compared as syntax.
        new: what to write instead. If both are expressions, ``old`` may be a part of a statement.

    Raises:
        SyntaxError: ``old`` or ``new`` is no Python.
        ValueError: ``old`` does not stand in one place.
    """
    code, other = read_code(old), read_code(new)
    if not may_replace(code, other):
        raise ValueError(f"{other.kind} cannot stand in the place of {code.kind}")
    as_expression = code.kind == other.kind == "expression"

    def found_in(files: Iterable[Path], is_it: Callable[[str], bool]) -> list[tuple[Path, str, Span]]:
        return [
            (file, name, span)
            for file in files
            for text in [file.read_text()]
            for name, scopes in _scopes(text).items()
            if is_it(name)
            for scope in scopes
            for span in find(code, scope, text, as_expression=as_expression)
        ]

    module, _, name = where.partition(":")
    here = [
        file for file in (root / f"{module.replace('.', '/')}{end}" for end in (".py", "/__init__.py")) if file.is_file()
    ]
    if any(name in _scopes(file.read_text()) for file in here):
        found = found_in(here, lambda each: each == name)
    else:
        last = name.rpartition(".")[2]
        found = (
            found_in(_files(root), lambda each: each == name)
            or found_in(here, lambda each: each.rpartition(".")[2] == last)
            or found_in(_files(root), lambda each: each.rpartition(".")[2] == last)
        )
    if len(found) != 1:
        places = sorted({_where(root, file, each) for file, each, _ in found})
        raise ValueError(f"the code stands {len(found)} times in {', '.join(places) or where}; it must stand there once")
    file, name, span = found[0]
    text = file.read_text()
    return Place(
        file, _where(root, file, name), _scopes(text)[name], replace(text, span, other, as_expression=as_expression)
    )


def find_test(root: Path, test: str) -> str:
    """The pytest id of a test that is named by its function, with or without parameters.

    If several files have a function of this name, the end of the file's path precedes it: ``test_turns.py::test_name``.

    Raises:
        ValueError: there is not one such test.
    """
    file, _, function = test.rpartition("::")
    name, *_ = function.partition("[")
    files = [each for each in _tests(root).get(name, ()) if not file or f"/{each}".endswith(f"/{file}")]
    if len(files) != 1:
        listed = f" ({', '.join(files)}): say which, as in {Path(files[0]).name}::{name}" if files else ""
        raise ValueError(f"{len(files)} tests are called {test}{listed}")
    return f"{files[0]}::{function}"


def used_by(root: Path, tests: Iterable[str]) -> Iterator[ast.AST]:
    """Of pytest ids: the test functions, and what their files have beside tests."""
    for file, functions in _by_file(tests).items():
        for node in parse((root / file).read_text()).body:
            is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            if not is_test or node.name in functions:
                yield node


def _by_file(tests: Iterable[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for test in tests:
        file, _, function = test.partition("::")
        found.setdefault(file, set()).add(function.partition("[")[0])
    return found


def _files(root: Path) -> Iterator[Path]:
    for package in _PACKAGES:
        yield from sorted((root / package).rglob("*.py"))


def _where(root: Path, file: Path, name: str) -> str:
    module = file.relative_to(root).with_suffix("").as_posix().removesuffix("/__init__").replace("/", ".")
    return f"{module}:{name}"


@cache
def _scopes(text: str) -> dict[str, tuple[Scope, ...]]:
    """Qualified name -> what has it; the module has the empty name."""
    module = parse(text)
    found: dict[str, tuple[Scope, ...]] = {"": (module,)}
    for name, scope in definitions(module):
        found[name] = (*found.get(name, ()), scope)
    return found


@cache
def _tests(root: Path) -> dict[str, list[str]]:
    """Test function -> the files that have one of this name."""
    found: dict[str, list[str]] = {}
    for file in sorted((root / "tests").rglob("test_*.py")):
        for node in parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append(file.relative_to(root).as_posix())
    return found
