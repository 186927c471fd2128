"""The shape of the product: chains of classes, imports within a folder, and code against text."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("rl_backend", "actors", "adapters", "examples")
MOST_LAYERS = {"rl_backend/model": 8, "rl_backend/runtime/native": 8, "rl_backend/runtime/bridge": 8}
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def trees() -> dict[Path, ast.Module]:
    return {
        file.relative_to(ROOT): ast.parse(file.read_text()) for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")
    }


@cache
def classes() -> dict[str, tuple[Path, list[str]]]:
    """Class -> its file, and its bases that are the product's; classes of one name count as one."""
    found: dict[str, tuple[Path, list[str]]] = {}
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
                found.setdefault(node.name, (file, [base for base in bases if base != node.name]))
    return {name: (file, [base for base in bases if base in found]) for name, (file, bases) in found.items()}


def ancestors(name: str) -> set[str]:
    return {name}.union(*(ancestors(base) for base in classes()[name][1]))


def only_children() -> set[str]:
    """Bases with one subclass, which is in another file."""
    children = defaultdict(set)
    for name, (_, bases) in classes().items():
        for base in bases:
            children[base].add(name)
    return {base for base, (child, *more) in children.items() if not more and classes()[child][0] != classes()[base][0]}


def test_no_chain_of_classes_is_deeper_than_three() -> None:
    def depth(name: str) -> int:
        return 1 + max(map(depth, classes()[name][1]), default=0)

    assert [name for name in classes() if depth(name) > 3] == []


def test_a_class_is_defined_in_one_file() -> None:
    lonely = only_children()
    bases = {base for _, found in classes().values() for base in found}
    leaves = [name for name in classes() if name not in bases and ancestors(name) & lonely]
    sliced = [name for name in leaves if len({classes()[each][0] for each in ancestors(name)}) >= 3]
    assert len(sliced) <= 3, sliced
    assert len(lonely) <= 10, sorted(lonely)


def loaded(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """What is imported when a file is loaded: a name that may be a module, and the module that it else is of."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", node.module) for alias in node.names)
        elif isinstance(node, ast.If | ast.Try | ast.With) and not ast.unparse(node).startswith("if TYPE_CHECKING"):
            for inner in (node.body, getattr(node, "orelse", []), *(each.body for each in getattr(node, "handlers", []))):
                yield from loaded(inner)


def layers(folder: str, *, below: bool) -> int:
    """Files on the longest way of imports inside of a folder."""
    files = [file for file in trees() if file.is_relative_to(folder) and (below or file.parent == Path(folder))]
    modules = {".".join(file.with_suffix("").parts).removesuffix(".__init__"): file for file in files}

    @cache
    def height(module: str) -> int:
        imported = (next(filter(modules.__contains__, names), module) for names in loaded(trees()[modules[module]].body))
        inside = set(imported) - {module}
        return 1 + max(map(height, inside), default=0)

    return max(map(height, modules), default=0)


def test_imports_have_few_layers() -> None:
    deep = {}
    for folder in sorted({str(file.parent) for file in trees()}):
        most = max((number for start, number in MOST_LAYERS.items() if Path(folder).is_relative_to(start)), default=6)
        if (found := layers(folder, below=False)) > most:
            deep[folder] = found
    assert deep == {}
    assert layers("actors", below=True) <= 17
    assert layers("rl_backend", below=True) <= 24


def test_most_lines_are_code_and_some_say_why() -> None:
    lines = of_code = of_comments = 0
    for file, tree in trees().items():
        source = (ROOT / file).read_text()
        code, comments, text = set(), set(), set()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                comments.add(token.start[0])
            elif token.type not in LAYOUT:
                code.update(range(token.start[0], token.end[0] + 1))
        for node in ast.walk(tree):
            # Neither docstrings nor imports count as code.
            said = node.body[0] if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) else node
            if said is not node or isinstance(node, ast.Import | ast.ImportFrom):
                text.update(range(said.lineno, said.end_lineno + 1))
        lines += source.count("\n")
        of_code += len(code - text)
        of_comments += len(comments - code)
    assert of_code / lines >= 0.62
    assert of_comments / lines >= 0.02
