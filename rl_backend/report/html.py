"""HTML and SVG as nested calls that escape every text."""

from __future__ import annotations

import html
import re

_VOID = {"meta", "br", "hr"}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DIRECTION = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def text(value: object) -> Html:
    """``value`` as text: escaped, with control characters made visible and lone surrogates replaced.

    Characters that change the direction of what follows are made visible too, as they would reorder the page.
    """
    characters = str(value).encode("utf-8", "replace").decode("utf-8")
    characters = _DIRECTION.sub(lambda found: f"<U+{ord(found.group()):04X}>", characters)
    return Html(html.escape(_CONTROL.sub(_picture, characters)))


def tag(name: str, /, *children: Html | str | None, **attributes: object) -> Html:
    """An element; strings among ``children`` are escaped unless they are :class:`Html`.

    Args:
        attributes: ``class_`` is ``class``, ``data_x`` is ``data-x``; those that are None are left out.
    """
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items() if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{named}>")
    return Html(f"<{name}{named}>{join(*children)}</{name}>")


def _picture(found: re.Match[str]) -> str:
    code = ord(found.group())
    return chr(0x2400 + code) if code < 0x20 else f"<U+{code:04X}>"


def join(*children: Html | str | None) -> Html:
    """Elements and texts one after the other."""
    return Html("".join(child if isinstance(child, Html) else text(child) for child in children if child is not None))
