"""Pictures: templates, axes, and shapes that become SVG or PNG."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Literal

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from rl_backend.lab.text import short

PNG_SCALE = 2
# Values below cannot be told from 0: what is computed with them would be denormal.
TINY = 1e-290

type Anchor = Literal["start", "middle", "end"]

# Also those that change the direction of what follows, which would reorder the page.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(value: object) -> str:
    """``value`` as text, with control characters made visible and lone surrogates replaced; markup stays."""
    if value is None or isinstance(value, Markup):
        return value or ""
    characters = str(value).encode("utf-8", "replace").decode("utf-8")
    return _HIDDEN.sub(_visible, characters)


def template_text(name: str) -> str:
    return resources.files("rl_backend.lab").joinpath("templates", name).read_text(encoding="utf-8")


def render(template: str, **values: object) -> Markup:
    return Markup(_ENVIRONMENT.get_template(template).render(values))


@dataclass(frozen=True)
class Axis:
    """A range of values and the pixels that it is drawn on."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        low, high, value = (
            (math.log10(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        share = min(max((value - low) / (high - low), 0.0), 1.0)
        return self.start + share * (self.end - self.start)


def linear_axis(low: float, high: float, start: float, end: float, *, about: int = 4, whole: bool = False) -> Axis:
    """An axis over ``low`` to ``high`` that begins and ends at round numbers.

    Args:
        about: number of ticks to aim for.
        whole: ticks at whole numbers alone, and the range left as it is.
    """
    if high - low < 1e-12 * max(abs(low), abs(high), TINY):
        if whole:
            return Axis(low - 1, low + 1, start, end, (low,))
        pad = abs(low) * 0.5
        low, high = (low, low + 1.0) if abs(low) < TINY else (low - pad, high + pad)
    step = _round_step((high - low) / about, (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10))
    if whole:
        step = max(1.0, step)
        first, last = math.ceil(low / step), math.floor(high / step)
    else:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        low, high = first * step, last * step
    return Axis(low, high, start, end, tuple(n * step for n in range(first, last + 1)))


def log_axis(low: float, high: float, start: float, end: float) -> Axis:
    """A logarithmic axis over whole decades; ``low`` > 0."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    every = math.ceil((last - first) / 5)
    return Axis(10.0**first, 10.0**last, start, end, tuple(10.0**n for n in range(first, last + 1, every)), log=True)


def path(coordinates: Sequence[tuple[float, float] | None]) -> str:
    """An SVG path; None breaks the line, and a point between two breaks becomes a dot by its round cap."""
    pieces = []
    for drawn, run in groupby(coordinates, key=bool):
        if drawn:
            first, *rest = [f"{x:.1f} {y:.1f}" for x, y in filter(None, run)]
            pieces.append(f"M{first}h0" + "".join(f"L{place}" for place in rest))
    return "".join(pieces)


@dataclass(frozen=True)
class Rectangle:
    """Filled; ``tip`` is what a browser shows under the pointer."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    tip: str | None = None


@dataclass(frozen=True)
class Text:
    x: float
    y: float
    content: str
    fill: str = "#1c2330"
    size: float = 12
    anchor: Anchor = "start"


@dataclass(frozen=True)
class Picture:
    """What is drawn, in order, on white."""

    width: float
    height: float
    title: str
    shapes: Sequence[Rectangle | Text]

    def svg(self) -> Markup:
        """An SVG element that also stands alone in a file."""
        return render("picture.svg", **vars(self))

    def save_png(self, path: Path) -> None:
        from PIL import Image, ImageDraw, ImageFont

        image = Image.new("RGB", (round(self.width * PNG_SCALE), round(self.height * PNG_SCALE)), "#ffffff")
        draw = ImageDraw.Draw(image)
        anchors = {"start": "lm", "middle": "mm", "end": "rm"}
        for shape in self.shapes:
            x, y = shape.x * PNG_SCALE, shape.y * PNG_SCALE
            if isinstance(shape, Text):
                font = ImageFont.load_default(shape.size * PNG_SCALE)
                draw.text((x, y), shape.content, fill=shape.fill, font=font, anchor=anchors[shape.anchor])
            else:
                # A rectangle of Pillow contains its last pixel.
                right, bottom = (shape.x + shape.width) * PNG_SCALE - 1, (shape.y + shape.height) * PNG_SCALE - 1
                draw.rectangle((x, y, max(x, right), max(y, bottom)), fill=shape.fill)
        image.save(path, format="PNG")


def _visible(found: re.Match[str]) -> str:
    code = ord(found.group())
    return chr(0x2400 + code) if code < 0x20 else f"<U+{code:04X}>"


def _round_step(rough: float, factors: tuple[float, ...]) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in factors if factor * power >= rough * (1 - 1e-9))


_ENVIRONMENT = Environment(
    loader=FunctionLoader(lambda name: template_text(name).replace("\n", "")),
    autoescape=True,
    finalize=visible,
    undefined=StrictUndefined,
)
_ENVIRONMENT.filters |= {
    "px": lambda value: f"{value:.1f}",
    "short": short,
    "trimmed": lambda value: f"{value:.2f}".rstrip("0").rstrip("."),
}
