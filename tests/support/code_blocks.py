"""Every code block of README and docs, fenced or indented."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.claims import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("make", "rl-backend", "pip", "ray", "chmod", "unzip", "export", "python", ".venv/bin/python")


@dataclass(frozen=True)
class CodeBlock:
    """Attributes:
    page: relative to the repository.
    line: of the first line of code, from 1.
    language: what follows the fence; empty where nothing does, and for indented blocks.
    text: without the indentation.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def first(self) -> str:
        return self.text.partition("\n")[0].strip()

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command, without comments; empty unless all lines are commands."""
        joined = [line.strip() for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]
        if self.language or any(line.split()[0] not in PROGRAMS for line in joined):
            return []
        return [shlex.split(line, comments=True) for line in joined]


def code_blocks(page: Path) -> Iterator[CodeBlock]:
    """Fenced blocks whole; indented ones from one blank line to the next. Items of a list indent by 2, code by 4 or more."""
    name, lines, number = str(page.relative_to(ROOT)), page.read_text().splitlines(), 0
    while number < len(lines):
        start = number
        if fence := re.fullmatch(r" *```(\w*)", lines[number]):
            number = next(index for index in range(start + 1, len(lines)) if lines[index].strip() == "```")
            yield CodeBlock(name, start + 2, fence[1], "\n".join(lines[start + 1 : number]))
        elif re.match(r" {4,}\S", lines[number]) and (number == 0 or not lines[number - 1].strip()):
            while number < len(lines) and re.match(r" {4,}\S", lines[number]):
                number += 1
            width = min(len(line) - len(line.lstrip()) for line in lines[start:number])
            yield CodeBlock(name, start + 1, "", "\n".join(line[width:] for line in lines[start:number]))
        number += 1
