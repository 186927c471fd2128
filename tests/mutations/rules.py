"""Faults by rule: small changes of the statements of a function, of the kinds that readers think of."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import Any

from tests.mutations.source import Scope

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "reversed": "iter", "sum": "max"}
_UNCHANGED = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
"""Statements of which only those inside are changed: what an error says is no test's business."""
_LOGS = ("logger.", "warnings.")
_OF_MESSAGES = ("strict", "stacklevel")
"""Keywords that only matter where something else is wrong already."""
_HEADS = (ast.If, ast.While, ast.For, ast.AsyncFor, ast.With, ast.AsyncWith)


def changes(scope: Scope) -> Iterator[tuple[str, str, str]]:
    """(old, new, kind) of each change; old and new as :func:`~tests.mutations.places.find_place` takes them."""
    for node in ast.walk(scope):
        if isinstance(node, ast.stmt) and not isinstance(node, (*_UNCHANGED, ast.Try, ast.Match)):
            old = _shown(node)
            if old.startswith(_LOGS) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                continue
            for other, kind in _of_statement(node):
                yield old, _shown(other), kind
            # Expressions are put into a copy one by one, and taken out again.
            part = copy.deepcopy(_head(node))
            for parent in list(ast.walk(part)):
                if isinstance(parent, ast.JoinedStr | ast.FormattedValue) or getattr(parent, "arg", None) in _OF_MESSAGES:
                    continue
                for name, value in list(ast.iter_fields(parent)):
                    if name != "annotation":
                        yield from ((old, new, kind) for new, kind in _with_each(part, parent, name, value))


def _with_each(part: ast.stmt, parent: ast.AST, name: str, value: Any) -> Iterator[tuple[str, str]]:
    """The statement with each change of what stands in one field of one node in it."""
    listed = value if isinstance(value, list) else [value]
    for place, child in enumerate(listed):
        for other, kind in _of_expression(child):
            setattr(parent, name, [*listed[:place], other, *listed[place + 1 :]] if isinstance(value, list) else other)
            yield _shown(part), kind
        setattr(parent, name, value)


def _head(node: ast.stmt) -> ast.stmt:
    """A compound statement without its blocks."""
    if not isinstance(node, _HEADS):
        return node
    head = copy.copy(node)
    head.body = [ast.Pass()]
    if not isinstance(head, ast.With | ast.AsyncWith):
        head.orelse = []
    return head


def _shown(node: ast.stmt) -> str:
    return ast.unparse(ast.fix_missing_locations(_head(node))).removesuffix("\n    pass")


def _first(iterable: ast.expr) -> ast.expr:
    return ast.Subscript(ast.Call(ast.Name("list"), [iterable], []), ast.Slice(None, ast.Constant(1)), ast.Load())


def _changed(node: Any, **fields: Any) -> Any:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def _of_statement(node: ast.stmt) -> Iterator[tuple[ast.stmt, str]]:
    match node:
        case ast.Expr(value=ast.Call() | ast.Await() | ast.YieldFrom()):
            yield ast.Pass(), "statement dropped"
        case ast.Assign(targets=[ast.Attribute()]):
            yield ast.Pass(), "state not kept"
        case ast.AugAssign():
            yield ast.Assign([node.target], node.value), "overwritten, not added to"
        case ast.Continue():
            yield ast.Break(), "break for continue"
        case ast.If():
            yield _changed(node, test=ast.Constant(value=False)), "branch never taken"
        case ast.For():
            yield _changed(node, iter=_first(node.iter)), "only the first"


def _of_expression(node: Any) -> Iterator[tuple[ast.expr, str]]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARED:
            yield _changed(node, ops=[_COMPARED[type(op)]()]), "other comparison"
        case ast.BoolOp():
            for index in range(len(node.values)):
                left = node.values[:index] + node.values[index + 1 :]
                yield left[0] if len(left) == 1 else _changed(node, values=left), "condition dropped"
            yield _changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And()), "or for and"
        case ast.UnaryOp(op=ast.Not()):
            yield ast.Call(ast.Name("bool"), [node.operand], []), "not dropped"
        case ast.BinOp() if type(node.op) in _COMPUTED and not _is_text(node.left) and not _is_text(node.right):
            yield _changed(node, op=_COMPUTED[type(node.op)]()), "other arithmetic"
            yield node.left, "missing term"
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value), "wrong flag"
        case ast.Constant(value=int()):
            yield ast.Constant(node.value + 1), "off by one"
        case ast.Constant(value=float()):
            yield ast.Constant(2 * node.value + 0.1), "other number"
        case ast.Call():
            for each in node.keywords if len(node.args) + len(node.keywords) > 1 else ():
                if each.arg and each.arg not in _OF_MESSAGES:
                    kept = [keyword for keyword in node.keywords if keyword is not each]
                    yield _changed(node, keywords=kept), "argument not handed on"
            if isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
                yield _changed(node, func=ast.Name(_FUNCTIONS[node.func.id])), "other function"
        case ast.IfExp():
            yield node.body, "condition dropped"
            yield node.orelse, "condition dropped"
        case ast.Subscript(slice=ast.Slice(), ctx=ast.Load()):
            yield node.value, "slice dropped"
        case ast.List(elts=[_, *_, _], ctx=ast.Load()):
            yield _changed(node, elts=node.elts[:-1]), "missing element"
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            first, *rest = node.generators
            if first.ifs:
                yield _changed(node, generators=[_changed(first, ifs=[]), *rest]), "filter dropped"
            yield _changed(node, generators=[_changed(first, iter=_first(first.iter)), *rest]), "only the first"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
