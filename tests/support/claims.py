"""The table of docs/claims.md: each line is a claim that tests carry as ``@pytest.mark.shows("...")``.

python -m tests.support.claims      writes the table into docs/claims.md
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "claims.md"
START, END = "<!-- what works: from tests -->", "<!-- end -->"


def claims(root: Path = ROOT) -> dict[str, dict[str, bool]]:
    """Claim -> test files that show it, in order of appearance, and whether they do so in ``make test-all`` alone."""
    found: dict[str, dict[str, bool]] = defaultdict(dict)
    for path in sorted((root / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        long_file = any(_is_long(node.value) for node in tree.body if isinstance(node, ast.Assign))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                # A case of a parametrised test that is long leaves others to `make test`.
                long = long_file or any(map(_is_long, filter(_is_mark, node.decorator_list)))
                for claim in filter(None, map(_claim, node.decorator_list)):
                    name = str(path.relative_to(root))
                    found[claim][name] = found[claim].get(name, True) and long
    return dict(found)


def table(root: Path = ROOT) -> str:
    """The table in Markdown, claims in alphabetical order of their area (the words before the colon)."""
    rows = ["| area | what works | shown by |", "|---|---|---|"]
    for claim, files in sorted(claims(root).items()):
        area, _, text = claim.partition(": ")
        links = ", ".join(
            f"[{Path(name).stem.removeprefix('test_')}](../{name}){' (`make test-all`)' if long else ''}"
            for name, long in files.items()
        )
        rows.append(f"| {area} | {text} | {links} |")
    return "\n".join(rows)


def page_with_table() -> str:
    """docs/claims.md with the table between its markers brought up to date."""
    head, rest = PAGE.read_text().split(START)
    _, tail = rest.split(END)
    return f"{head}{START}\n{table()}\n{END}{tail}"


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
    PAGE.write_text(page_with_table())
