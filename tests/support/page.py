"""An HTML page as a tree, for tests that look at what it says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "br", "hr", "img", "link", "input"}


@dataclass
class Element:
    """One element; ``children`` are elements and texts."""

    name: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list[Element | str] = field(default_factory=list)

    def all(self, name: str = "", **attributes: str) -> list[Element]:
        """Elements below this one with that name and attributes; ``class_`` matches one of several classes."""
        return [element for element in self._below() if element._is(name, attributes)]

    def one(self, name: str = "", **attributes: str) -> Element:
        found = self.all(name, **attributes)
        assert len(found) == 1, f"{len(found)} of {name} {attributes}"
        return found[0]

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def _below(self) -> Iterator[Element]:
        for child in self.children:
            if isinstance(child, Element):
                yield child
                yield from child._below()

    def _is(self, name: str, attributes: dict[str, str]) -> bool:
        own = self.attributes
        return (not name or self.name == name) and all(
            value in own.get("class", "").split() if key == "class_" else own.get(key) == value
            for key, value in attributes.items()
        )


class _Tree(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("root")
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].name == tag, f"</{tag}> closes <{self._open[-1].name}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)


def read_page(path: Path) -> Element:
    """The page's tree; fails when an element is not closed where it was opened."""
    tree = _Tree()
    tree.feed(path.read_text(encoding="utf-8"))
    tree.close()
    assert len(tree._open) == 1, f"<{tree._open[-1].name}> is not closed"
    return tree.root
