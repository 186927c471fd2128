"""Rectangles and texts, as SVG or as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl_backend.cli.errors import CommandError
from rl_backend.report.html import Html, tag

PNG_SCALE = 2
"""Pixels of a PNG for one of the picture."""

type Anchor = Literal["start", "middle", "end"]


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
    """``x`` is where ``anchor`` says, ``y`` the middle of the line."""

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

    def svg(self) -> Html:
        """An SVG element that also stands alone in a file."""
        return tag(
            "svg",
            tag("title", self.title),
            tag("rect", width=_number(self.width), height=_number(self.height), fill="#ffffff"),
            *(_element(shape) for shape in self.shapes),
            xmlns="http://www.w3.org/2000/svg",
            width=_number(self.width),
            height=_number(self.height),
            viewBox=f"0 0 {_number(self.width)} {_number(self.height)}",
            font_family="system-ui, 'DejaVu Sans', sans-serif",
            role="img",
        )

    def save_png(self, path: Path) -> None:
        """Writes a PNG at twice the size.

        Raises:
            CommandError: Pillow is not installed.
        """
        try:
            from PIL import Image, ImageDraw, ImageFont
        except ImportError:
            raise CommandError(
                f"--draw {path}: a PNG needs Pillow, which comes with the extras examples and vllm (pip install pillow); "
                ".svg and .html need nothing"
            ) from None
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


def _element(shape: Rectangle | Text) -> Html:
    if isinstance(shape, Text):
        return tag(
            "text",
            shape.content,
            x=_number(shape.x),
            # Half of a digit's height below the middle; not every program knows dominant-baseline.
            y=_number(shape.y + 0.36 * shape.size),
            fill=shape.fill,
            font_size=_number(shape.size),
            text_anchor=shape.anchor,
            pointer_events="none",
        )
    return tag(
        "rect",
        tag("title", shape.tip) if shape.tip is not None else None,
        x=_number(shape.x),
        y=_number(shape.y),
        width=_number(shape.width),
        height=_number(shape.height),
        fill=shape.fill,
    )


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
