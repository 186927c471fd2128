"""The tables of docs/reference/claims.md: each line is a claim that tests carry as ``@pytest.mark.shows("area: claim")``.

python -m tests.support.claims      writes the tables into docs/reference/claims.md
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tests.support.matrix import LEFT_OUT

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "claims.md"
START, END = "<!-- what works: from tests -->", "<!-- end -->"
RUN_BY = ("", " (`make test-all`)", " (run by name)")
"""What a link says of a file: `make test` runs it, `make test-all` alone does, or neither has time for it."""


@cache
def claims(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Claim -> test files that show it, in order of appearance, and which of :data:`RUN_BY` runs them."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for path in sorted((root / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        long_file = any(_is_long(node.value) for node in tree.body if isinstance(node, ast.Assign))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                # A case of a parametrised test that is long leaves others to `make test`.
                long = long_file or any(map(_is_long, filter(_is_mark, node.decorator_list)))
                for claim in filter(None, map(_claim, node.decorator_list)):
                    name = str(path.relative_to(root))
                    run_by = 2 if _is_left_out(name, node) else int(long)
                    found[claim][name] = min(found[claim].get(name, run_by), run_by)
    return dict(found)


def tables(root: Path = ROOT) -> str:
    """A heading and a table in Markdown for each area (the words before the colon), and links to all of them above."""
    areas: dict[str, list[str]] = defaultdict(list)
    for claim, files in sorted(claims(root).items()):
        area, _, text = claim.partition(": ")
        links = ", ".join(
            f"[{Path(name).stem.removeprefix('test_')}](../../{name}){RUN_BY[run_by]}" for name, run_by in files.items()
        )
        areas[area].append(f"| {text} | {links} |")
    parts = ["Areas: " + ",\n".join(f"[{area}](#{_anchor(area)})" for area in areas) + "."]
    for area, rows in areas.items():
        parts.append("\n".join([f"## {area}", "| what works | shown by |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def page_with_tables() -> str:
    """docs/reference/claims.md with the tables between its markers brought up to date."""
    head, rest = PAGE.read_text().split(START)
    _, tail = rest.split(END)
    return f"{head}{START}\n{tables()}\n{END}{tail}"


def _anchor(heading: str) -> str:
    """What a link to the heading ends in."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _is_left_out(file: str, test: ast.FunctionDef, left_out: Mapping[str, str] = LEFT_OUT) -> bool:
    """Whether ``make test-all`` leaves out all cases of a test."""
    name, cases = f"{file}::{test.name}", 1
    for decorator in test.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.parametrize":
            values = decorator.args[1]
            # Cases that are computed cannot be counted here; none of these tests is left out whole.
            cases *= len(values.elts) if isinstance(values, ast.List) else len(left_out) + 1
    return sum(case == name or case.startswith(f"{name}[") for case in left_out) == cases


def _is_long(mark: ast.expr) -> bool:
    """Of a decorator, or of what a file gives ``pytestmark``."""
    return any(ast.unparse(node) == "pytest.mark.long" for node in ast.walk(mark) if isinstance(node, ast.Attribute))


def _is_mark(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Attribute)


def _claim(decorator: ast.expr) -> str | None:
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.shows":
        argument = decorator.args[0]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            return argument.value
    return None


if __name__ == "__main__":
    PAGE.write_text(page_with_tables())
