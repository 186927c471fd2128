"""Numbers as people and programs read them, and pictures made of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from markupsafe import Markup

from rl_backend.lab.picture import Axis, Picture, Rectangle, Text, linear_axis, log_axis, path, visible
from rl_backend.lab.text import as_number, count, duration, finite, json_text, short, table


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.38712, "0.3871"),
        (-0.001, "-0.001"),
        (0.00099994, "9.999e-4"),
        (3.2e-7, "3.2e-7"),
        (120.0, "120"),
        (9999.0, "9999"),
        (10000.0, "10k"),
        (-12345.0, "-12.35k"),
        (9.99e6, "9990k"),
        (1e7, "1e7"),
        (-2.5e10, "-2.5e10"),
        (math.inf, "+inf"),
        (-math.inf, "-inf"),
        (math.nan, "NaN"),
    ],
)
def test_a_number_has_four_digits(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.8, "0.8 s"),
        (59.94, "59.9 s"),
        (60, "1 min 00 s"),
        (252.4, "4 min 12 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (90061, "25 h 01 min"),
    ],
)
def test_a_duration_has_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_nouns_agree_with_their_numbers() -> None:
    found = [count(*each) for each in ((1, "rank"), (0, "rank"), (2, "rank"), (1, "micro-batch"), (3, "micro-batch"))]
    assert found == ["1 rank", "0 ranks", "2 ranks", "1 micro-batch", "3 micro-batches"]
    assert table("{:3}|{:>3}", [("a", 1), ("bc", 22)]) == ["a  |  1", "bc | 22"]


def test_json_has_python_numbers_and_words_for_what_is_none() -> None:
    value = {
        "nested": [math.nan, (math.inf, {"low": -math.inf})],
        "numpy": np.float32(1.5),
        "flag": np.bool_(True),
        "whole": np.int64(3),
        "torch": torch.tensor(2),
        "text": "NaN",
        "none": None,
        "np_nan": np.float64(math.nan),
    }
    before = repr(value)
    expected = {
        "nested": ["NaN", ["Infinity", {"low": "-Infinity"}]],
        "numpy": 1.5,
        "flag": True,
        "whole": 3,
        "torch": 2,
        "text": "NaN",
        "none": None,
        "np_nan": "NaN",
    }
    assert json.loads(json_text(value)) == expected and repr(value) == before
    assert finite([1.0, math.nan, -math.inf]) == [1.0, None, None]
    assert json_text({"a": [1]}, indent=1) == '{\n "a": [\n  1\n ]\n}'
    assert json_text("ä", ensure_ascii=False) == '"ä"' and json_text("ä") == '"\\u00e4"'
    assert json_text("a\ud800b\ud800", ensure_ascii=False) == '"a\\ud800b\\ud800"'
    with pytest.raises(TypeError):
        json_text({"tensor": torch.ones(2)})


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3.0),
        (-2.5, -2.5),
        (0, 0.0),
        ("Infinity", math.inf),
        ("-Infinity", -math.inf),
        (10**400, math.inf),
        (-(10**400), -math.inf),
        ("3", None),
        ("nan", None),
        (None, None),
        ([1], None),
    ],
)
def test_what_was_written_for_a_number_is_read_as_one(value: Any, number: float | None) -> None:
    assert as_number(value) == number


def test_nan_is_read_as_a_number() -> None:
    found = as_number("NaN")
    assert found is not None and math.isnan(found)


def ticks(axis: Axis) -> list[float]:
    return [round(tick, 9) for tick in axis.ticks]


@pytest.mark.parametrize(
    ("low", "high", "options", "expected", "ends"),
    [
        (0.13, 0.87, {}, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0], (0.0, 1.0)),
        (0.0, 1.0, {}, [0.0, 0.25, 0.5, 0.75, 1.0], (0.0, 1.0)),
        (-3.0, 1.0, {}, [-3.0, -2.0, -1.0, 0.0, 1.0], (-3.0, 1.0)),
        (0.0, 100.0, {"about": 10}, [10.0 * n for n in range(11)], (0.0, 100.0)),
        (2.0, 2.0, {}, [1.0, 1.5, 2.0, 2.5, 3.0], (1.0, 3.0)),
        (-2.0, -2.0, {}, [-3.0, -2.5, -2.0, -1.5, -1.0], (-3.0, -1.0)),
        (0.0, 0.0, {}, [0.0, 0.25, 0.5, 0.75, 1.0], (0.0, 1.0)),
        (3, 3, {"whole": True}, [3], (2, 4)),
        (1, 4, {"whole": True}, [1, 2, 3, 4], (1, 4)),
        (3, 38, {"whole": True, "about": 7}, [5, 10, 15, 20, 25, 30, 35], (3, 38)),
        (0, 1, {"whole": True}, [0, 1], (0, 1)),
    ],
)
def test_an_axis_has_round_ticks(
    low: float, high: float, options: dict[str, Any], expected: list[float], ends: tuple[float, float]
) -> None:
    axis = linear_axis(low, high, 10.0, 110.0, **options)
    assert ticks(axis) == expected and (round(axis.low, 9), round(axis.high, 9)) == ends
    assert (axis.start, axis.end, axis.log) == (10.0, 110.0, False)


def test_a_value_lies_on_its_share_of_the_axis() -> None:
    axis = Axis(2.0, 6.0, 100.0, 20.0, ())
    assert [axis.at(value) for value in (2.0, 3.0, 6.0, 1.0, 7.0)] == [100.0, 80.0, 20.0, 100.0, 20.0]
    decades = log_axis(0.02, 30.0, 0.0, 80.0)
    assert decades.log and decades.ticks == (0.01, 0.1, 1.0, 10.0, 100.0)
    assert [decades.at(value) for value in (0.01, 1.0, 10.0, 1000.0, 0.001)] == pytest.approx([0.0, 40.0, 60.0, 80.0, 0.0])
    assert log_axis(1.0, 1.0, 0.0, 1.0).ticks == (1.0, 10.0)
    assert log_axis(1e-8, 1.0, 0.0, 1.0).ticks == pytest.approx((1e-8, 1e-6, 1e-4, 1e-2, 1.0))


def test_a_path_breaks_where_there_is_nothing() -> None:
    assert path([(1, 2), (3.04, 4), None, None, (5, 6), None, (7, 8), (9, 10.06)]) == (
        "M1.0 2.0h0L3.0 4.0M5.0 6.0h0M7.0 8.0h0L9.0 10.1"
    )
    assert path([]) == path([None]) == ""


def test_text_shows_what_would_hide_or_turn_it() -> None:
    assert visible("a\x01\x7f\u202e\ud800\tb\n") == "a\u2401<U+007F><U+202E>?\tb\n"
    assert (visible(None), visible(3)) == ("", "3")
    markup = Markup("<b>\x01</b>")
    assert visible(markup) is markup


def test_a_picture_is_drawn_in_order_at_twice_its_size(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    shapes: list[Rectangle | Text] = [
        Rectangle(2, 3, 10, 4, "#ff0000"),
        Rectangle(4, 3, 2, 2, "#0000ff", tip="inner <tip>"),
        Rectangle(15, 1, 0.1, 0.1, "#00ff00"),
        Text(15, 12, "I", "#000000", 8, "middle"),
    ]
    picture = Picture(20, 16, "some <title>", shapes)
    picture.save_png(tmp_path / "a.png")
    drawn = image.open(tmp_path / "a.png")
    assert drawn.size == (40, 32)
    blue, red, white = (0, 0, 255), (255, 0, 0), (255, 255, 255)
    places = {(4, 6): red, (8, 6): blue, (11, 9): blue, (12, 6): red, (23, 13): red, (24, 13): white, (23, 14): white}
    assert {place: drawn.getpixel(place) for place in places} == places
    assert drawn.getpixel((30, 2)) == (0, 255, 0), "a thin one is a pixel all the same"
    dark = [(x, y) for x in range(40) for y in range(16, 32) if sum(drawn.getpixel((x, y))) < 300]
    assert dark and sum(x for x, _ in dark) / len(dark) == pytest.approx(30, abs=2)
    svg = picture.svg()
    assert "some &lt;title&gt;" in svg and "inner &lt;tip&gt;" in svg and svg.index("#ff0000") < svg.index("#0000ff")
