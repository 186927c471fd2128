"""Python source, compared as syntax: layout, quotes and comments do not count."""

from __future__ import annotations

import ast
import copy
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Literal, NamedTuple

type Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

type Kind = Literal["statements", "expression", "header", "items", "nothing"]
"""An expression may stand as a statement. A header is the first line of a compound statement, up to its colon. Items are
arguments of a call, or elements of a list, tuple, set or dict; each ends with a comma."""

_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BODIES = ("body", "orelse", "finalbody", "handlers", "cases", "decorator_list")
_HEADED = (
    *_DEFINITIONS,
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.With,
    ast.AsyncWith,
    ast.ExceptHandler,
    ast.match_case,
)
_AROUND = ("{}", "try: pass\n{}", "match 0:\n {}")
"""What a header stands in: the last two are those of ``except`` and ``case``."""


class Span(NamedTuple):
    """Bytes of a source text; ``column`` is how far its first line is indented."""

    start: int
    end: int
    column: int = 0


class Code(NamedTuple):
    """A piece of code that is looked for, or written in the place of another.

    Attributes:
        text: without the indentation that its lines share.
        kind: of what it is.
        nodes: what was parsed.
    """

    text: str
    kind: Kind
    nodes: tuple[ast.AST, ...]


@cache
def parse(text: str) -> ast.Module:
    """The module; it is shared, and nobody may change it."""
    return ast.parse(text)


def read_code(text: str) -> Code:
    """Raises :class:`SyntaxError` for what is nothing of all this."""
    text = textwrap.dedent(text).strip("\n").rstrip()
    if not text:
        return Code(text, "nothing", ())
    if text.endswith(","):
        return Code(text, "items", tuple(_items_of(_container(text))))
    if text.endswith(":"):
        text = re.sub(r"^elif\b", "if", text)
        return Code(text, "header", (_header_node(text),))
    body = ast.parse(text).body
    if len(body) == 1 and isinstance(body[0], ast.Expr):
        return Code(text, "expression", (body[0].value,))
    return Code(text, "statements", tuple(body))


def _container(text: str) -> ast.expr:
    try:
        return ast.parse(f"_({text})", mode="eval").body
    except SyntaxError:
        return ast.parse(f"{{{text}}}", mode="eval").body


def _header_node(text: str) -> ast.AST:
    for around in _AROUND:
        try:
            (node,) = ast.parse(around.format(f"{text} pass")).body
        except SyntaxError:
            continue
        inner = [*getattr(node, "handlers", ()), *getattr(node, "cases", ())]
        if inner or isinstance(node, _HEADED):
            return inner[0] if inner else node
    raise SyntaxError(f"{text!r} is not the first line of a statement that Python has")


def definitions(scope: ast.AST, prefix: str = "") -> Iterator[tuple[str, Scope]]:
    """Each function and class inside of ``scope``, with its qualified name; nested ones too."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, _DEFINITIONS):
            yield f"{prefix}{child.name}", child
            yield from definitions(child, f"{prefix}{child.name}.")
        elif not isinstance(child, ast.expr):
            yield from definitions(child, prefix)


def same(nodes: Iterable[ast.AST]) -> str:
    """A text that is equal for equal syntax, wherever it stands; names that are read, written or deleted are equal."""
    return "\n".join(re.sub(r"ctx=(Store|Del)\(\)", "ctx=Load()", ast.dump(node)) for node in nodes)


@cache
def meaning(node: ast.AST) -> str:
    """A text that is equal for code that does the same, but for its imports: docstrings and layout do not count."""
    bare = _Bare().visit(copy.deepcopy(node))
    return ast.dump(bare) if bare else ""


class _Bare(ast.NodeTransformer):
    """Takes imports out, and strings that stand as statements."""

    def visit_Import(self, node: ast.Import) -> None: ...
    def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node


def may_replace(code: Code, other: Code) -> bool:
    """Whether the second may stand where the first does."""
    if code.kind == "items":
        return other.kind in ("items", "nothing")
    if code.kind == "header":
        return other.kind == "header"
    return code.kind != "nothing" and other.kind in ("statements", "expression")


def find(code: Code, scope: Scope, text: str, *, as_expression: bool) -> list[Span]:
    """Where the code stands in a function; of a class or module, in what is not inside of a function or class of its own.

    Args:
        text: the source that ``scope`` was parsed from.
        as_expression: an expression is looked for everywhere, not only where it is a statement.
    """
    lines = _Lines(text)
    if code.kind == "header":
        wanted = _header(code.nodes[0])
        return [lines.of_header(node) for node in _walk(scope) if isinstance(node, _HEADED) and _header(node) == wanted]
    wanted = same(code.nodes)
    if code.kind == "items":
        runs = (_items_of(node) for node in _walk(scope))
        return [lines.of_items(run) for items in runs for run in _windows(items, len(code.nodes)) if same(run) == wanted]
    if code.kind == "expression" and as_expression:
        kind = type(code.nodes[0])
        parts = {id(part) for node in _walk(scope) if isinstance(node, ast.JoinedStr) for part in node.values}
        found = [node for node in _walk(scope) if type(node) is kind and id(node) not in parts and same([node]) == wanted]
        return [lines.of(node, node) for node in found]
    kinds = [type(node) for node in code.nodes] if code.kind == "statements" else [ast.Expr]
    spans = []
    for run in (run for block in _blocks(scope) for run in _windows(block, len(kinds))):
        if [type(node) for node in run] == kinds:
            values = [node.value for node in run if isinstance(node, ast.Expr)] if code.kind == "expression" else run
            if same(values) == wanted:
                spans.append(lines.of(run[0], run[-1]))
    return spans


def replace(text: str, span: Span, code: Code, *, as_expression: bool) -> str:
    """The source with other code in the place of a span."""
    source = text.encode()
    new = code.text
    if as_expression and not isinstance(code.nodes[0], (ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Starred)):
        new = f"({new})"
    elif code.kind == "header" and source[span.start :].startswith(b"elif"):
        new = re.sub(r"^if\b", "elif", new)
    elif code.kind in ("statements", "expression") and not as_expression:
        new = _indented(new, span.column)
    return (source[: span.start] + new.encode() + source[span.end :]).decode()


def _indented(text: str, column: int) -> str:
    """Lines inside of a string stay as they are."""
    strings = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Constant, ast.JoinedStr))]
    inside = {line for node in strings for line in range(node.lineno + 1, (node.end_lineno or 0) + 1)}
    lines = text.splitlines(keepends=True)
    first, rest = lines[0], enumerate(lines[1:], 2)
    return first + "".join(line if number in inside or not line.strip() else " " * column + line for number, line in rest)


def _walk(scope: Scope) -> Iterator[ast.AST]:
    """The nodes of a function; those of a class or module without the functions and classes in it."""
    if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield from ast.walk(scope)
        return
    pending: list[ast.AST] = [scope]
    while pending:
        yield (node := pending.pop())
        pending.extend(child for child in ast.iter_child_nodes(node) if not isinstance(child, _DEFINITIONS))


def _blocks(scope: Scope) -> Iterator[list[ast.stmt]]:
    for node in _walk(scope):
        for name in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, name, None), list):
                yield block


def _windows[T](items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(len(items) - size + 1):
        yield items[start : start + size]


def _items_of(node: ast.AST) -> list[ast.AST]:
    """As expressions and keywords; an item of a dict is a slice from its key to its value."""
    if isinstance(node, ast.Call):
        return sorted([*node.args, *node.keywords], key=lambda item: (item.lineno, item.col_offset))
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return list(node.elts)
    if isinstance(node, ast.Dict):
        return [_pair(key, value) for key, value in zip(node.keys, node.values, strict=True)]
    return []


def _pair(key: ast.expr | None, value: ast.expr) -> ast.AST:
    first = key or value
    pair = ast.Slice(key, value) if key else ast.keyword(None, value)
    place = {"lineno": first.lineno, "col_offset": first.col_offset - (0 if key else len("**"))}
    for name, number in {**place, "end_lineno": value.end_lineno, "end_col_offset": value.end_col_offset}.items():
        setattr(pair, name, number)
    return pair


def _header(node: ast.AST) -> str:
    return type(node).__name__ + same(_parts_of_header(node)) + str(getattr(node, "name", ""))


def _parts_of_header(node: ast.AST) -> list[ast.AST]:
    parts = [value for name, value in ast.iter_fields(node) if name not in _BODIES]
    listed = [each for part in parts for each in (part if isinstance(part, list) else [part])]
    return [each for each in listed if isinstance(each, ast.AST)]


class _Lines:
    """Turns lines and columns, which count bytes, into offsets in bytes."""

    def __init__(self, text: str) -> None:
        self._source = text.encode()
        self._starts = [0]
        for line in self._source.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    def of(self, first: ast.AST, last: ast.AST) -> Span:
        above = [first, *getattr(first, "decorator_list", ())]
        line = min(node.lineno for node in above)
        column = first.col_offset
        return Span(self._starts[line - 1] + column, self._end(last), column)

    def of_items(self, items: Sequence[ast.AST]) -> Span:
        """With the comma behind them, if there is one."""
        end = self._end(items[-1])
        comma = re.compile(rb"(?:\s|#.*)*,").match(self._source, end)
        return Span(self._start(items[0]), comma.end() if comma else end)

    def of_header(self, node: ast.AST) -> Span:
        start = self._start(node)
        ends = [self._end(part) for top in _parts_of_header(node) for part in ast.walk(top) if hasattr(part, "end_lineno")]
        rest = self._source[(after := max([start, *ends])) :]
        colon = next(found.start() for found in re.finditer(rb"#.*|:", rest) if found[0] == b":")
        return Span(start, after + colon + 1)

    def _start(self, node: ast.AST) -> int:
        if not hasattr(node, "lineno"):
            # A case has no place of its own, but its pattern has.
            pattern = self._start(node.pattern)
            return self._source.rindex(b"case", 0, pattern)
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.AST) -> int:
        return self._starts[node.end_lineno - 1] + node.end_col_offset
