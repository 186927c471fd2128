"""Tables and numbers of the pages that are made of results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def number(value: float | None) -> str:
    """With one digit."""
    return "not finite" if value is None else f"{value:.0e}"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown, with the line break behind it."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
