"""Options as rows of a table: flags, groups, kinds of values, defaults."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field

from rl_backend.contracts import BaseConfig
from rl_backend.options.help import OptionRow, option_rows
from rl_backend.options.option_set import Follows, OptionSet, sections_of

type Kind = Literal["a", "b"]


class Part(BaseConfig):
    """A part.

    Attributes:
        size: how large.
        kind: which of both.
    """

    size: int
    kind: Kind | None = None


class Whole(BaseConfig):
    option_set: ClassVar[OptionSet] = OptionSet(
        short={"part_size": "part.size", "odd.name": "part.kind"},
        preset={"part.size": 7},
        follows={"rate": Follows(lambda config: 1.0), "hidden": Follows(lambda config: 1, "it follows")},
        groups={"late": ("names",), "first": ("part.", "switch")},
        metavars={"names": "NAME,..."},
    )

    needed: str = Field(description="must be there")
    rate: float = 0.5
    hidden: int = 3
    switch: bool = True
    names: tuple[str, ...] = ("x", "y")
    part: Part = Part(size=1)


def rows_of(kind: type[BaseConfig]) -> list[OptionRow]:
    return [row for row in option_rows(kind, dict(sections_of(kind, {}))) if row.group]


def test_a_row_says_all_that_help_and_completion_show() -> None:
    assert rows_of(Whole) == [
        OptionRow("names", ("names",), "late", "NAME,...", "", "x,y"),
        OptionRow("part.size", ("part-size", "part.size"), "first", "INT", "how large", "7"),
        OptionRow("part.kind", ("odd.name", "part.kind"), "first", "{a,b}", "which of both", "none"),
        OptionRow("switch", ("switch",), "first", "", "", "true"),
        OptionRow("needed", ("needed",), "training", "TEXT", "must be there", None),
        OptionRow("rate", ("rate",), "training", "FLOAT", "", "follows from other options"),
    ]


def test_a_configuration_without_groups_names_its_sections() -> None:
    class Plain(BaseConfig):
        part: Part
        steps: int = 3

    found = rows_of(Plain)
    assert [(row.flags, row.group, row.default) for row in found] == [
        (("steps",), "options", "3"),
        (("part.size",), "part (Part)", None),
        (("part.kind",), "part (Part)", "none"),
    ]


@pytest.mark.parametrize(
    ("annotation", "default", "metavar", "shown"),
    [
        (bool, False, "", "false"),
        (int, 0, "INT", "0"),
        (int | None, None, "INT", "none"),
        (float, 0.0, "FLOAT", "0.0"),
        (Annotated[str, Field(min_length=0)], "", "TEXT", "none"),
        (Literal[1, 2], 2, "{1,2}", "2"),
        (tuple[float, ...], (), "FLOAT,...", "none"),
        (tuple[Annotated[int, Field(ge=1)], ...], (1, 20), "JSON", "1,20"),
        (list[int], [1, 2], "INT,...", "[1, 2]"),
        (tuple[tuple[int, ...], ...] | None, None, "JSON", "none"),
        (int | str, 1, "JSON", "1"),
        (dict[str, int], {}, "JSON", "none"),
        (int | str | None, None, "JSON", "none"),
    ],
    ids=str,
)
def test_a_kind_of_value_has_a_word_and_its_default_is_shown_as_it_is_given(
    annotation: Any, default: Any, metavar: str, shown: str
) -> None:
    one = type("One", (BaseConfig,), {"__annotations__": {"value": annotation}, "value": default, "__module__": __name__})
    (row,) = option_rows(one, {"": one})
    assert (row.metavar, row.default) == (metavar, shown)
