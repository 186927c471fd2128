"""Nested configurations: places and short names, values that follow, and what is merged with what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import pytest
from pydantic import Field, model_validator

from actors.run.options import Follows, Options, at, declared, get, has, merged, sections_of
from rl_backend.contracts import BaseConfig, ConfigError


class Inner(BaseConfig):
    size: int = 3
    name: str = "inner"


class Wide(Inner):
    width: int = 9


class Middle(BaseConfig):
    inner: Inner = Inner()
    depth: int = 2
    extra: dict[str, Any] = Field(default_factory=dict)


class Base(Options):
    short: ClassVar[Mapping[str, str]] = {"depth": "middle.depth", "size": "middle.inner.size"}
    renamed: ClassVar[Mapping[str, str]] = {"deep": "middle.depth", "last": "middle.inner.name"}
    preset: ClassVar[Mapping[str, Any]] = {"middle.depth": 5}
    help_groups: ClassVar[Mapping[str, Sequence[str]]] = {"model": ("depth",), "more": ("size",)}

    middle: Middle = Middle()
    last: Inner = Inner()
    steps: int = 10
    checked: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.steps == 13:
            raise ConfigError.of("Base.steps", 13, "is unlucky")
        return self


class Mine(Base):
    follows: ClassVar[Mapping[str, Follows]] = {
        "middle.inner.name": Follows(lambda config: f"of {config.steps}", shown=lambda config: "shown"),
        "last.size": Follows(lambda config: 2 * config.steps, "is twice the steps", until=1),
        "last.name": Follows(lambda config: config.checked or "unchecked", until="until"),
        "middle.nothing": Follows(lambda config: 1),
    }
    help_groups: ClassVar[Mapping[str, Sequence[str]]] = {"model": ("steps",), "own": ("checked",)}

    @classmethod
    def fitted(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"middle.depth": 6} if has(given, "middle.inner.size") else {}


def test_places_of_nested_values_are_read_and_made() -> None:
    assert at("a", 1) == {"a": 1} and at("a.b.c", {"d": 2}) == {"a": {"b": {"c": {"d": 2}}}}
    values = {"a": {"b": Inner(size=4)}, "none": None, "zero": 0}
    assert (get(values, "a.b.size"), get(values, "zero"), get(values, "none")) == (4, 0, None)
    assert all(has(values, path) for path in ("a", "a.b", "a.b.size", "a.b.name", "none", "zero"))
    assert not any(has(values, path) for path in ("b", "a.c", "a.b.length", "none.x", "zero.a", "a.b.size.more"))


def test_merged_values_are_those_above_and_neither_argument_changes() -> None:
    below = {"a": {"x": 1, "y": {"p": 1, "q": 2}}, "kept": [1], "plain": 3, "left": {"z": 1}}
    above = {"a": {"y": {"q": 5, "r": 6}}, "plain": {"new": 1}, "left": 7, "late": None}
    copies = repr(below), repr(above)
    expected = {
        "a": {"x": 1, "y": {"p": 1, "q": 5, "r": 6}},
        "kept": [1],
        "plain": {"new": 1},
        "left": 7,
        "late": None,
    }
    assert merged(below, above) == expected
    assert (repr(below), repr(above)) == copies
    assert merged({"a": {"size": 1, "name": "n"}}, {"a": Inner(size=3)}) == {"a": {"size": 3, "name": "n"}}, "what was given"


def test_a_dictionary_that_is_no_section_is_one_value() -> None:
    below = {"middle": {"extra": {"x": 1}, "inner": {"size": 1, "name": "n"}}}
    above = {"middle": {"extra": {"y": 2}, "inner": {"size": 4}}}
    sections = dict(sections_of(Base, {}))
    assert merged(below, above, sections) == {"middle": {"extra": {"y": 2}, "inner": {"size": 4, "name": "n"}}}
    assert merged(below, above) == {"middle": {"extra": {"x": 1, "y": 2}, "inner": {"size": 4, "name": "n"}}}


def test_sections_are_nested_configurations_of_the_types_that_were_chosen() -> None:
    assert list(sections_of(Base, {})) == [
        ("", Base),
        ("middle.", Middle),
        ("middle.inner.", Inner),
        ("last.", Inner),
    ]
    chosen = dict(sections_of(Base, {"middle.inner": Wide}))
    assert (chosen["middle.inner."], chosen["last."]) == (Wide, Inner)
    assert list(sections_of(Middle, {}, "m.")) == [("m.", Middle), ("m.inner.", Inner)]
    assert declared(Mine) is Mine and declared(Inner) is Options


def test_short_names_win_over_places_whatever_their_order() -> None:
    for values in ({"middle": {"depth": 1}, "depth": 7}, {"depth": 7, "middle": {"depth": 1}}):
        assert Base.nest(values) == {"middle": {"depth": 7}}
    assert Base.nest({"middle.inner": {"size": 1}, "size": 8, "steps": 2}) == {"middle": {"inner": {"size": 8}}, "steps": 2}
    assert Base(**{"middle.inner.size": 8}).middle.inner.size == 8


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"deep": 1}, r"^Base\.deep=1: is middle\.depth now; set that$"),
        ({"deep": {"a": 1}}, r"^Base\.deep=\{'a': 1\}: is middle\.depth now; set that$"),
        ({"last": "x"}, r"^Base\.last='x': is middle\.inner\.name now; set that$"),
    ],
)
def test_options_of_an_earlier_version_are_refused_with_their_place(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Base.nest(values)


def test_a_section_of_the_name_of_an_earlier_option_is_taken() -> None:
    assert Base.nest({"last": {"size": 4}}) == {"last": {"size": 4}}
    assert Base(last=Inner(size=4)).last == Inner(size=4)


def test_presets_are_below_fitted_defaults_and_both_below_what_is_given() -> None:
    assert Base().middle.depth == 5 and Middle().depth == 2
    assert Mine(size=4).middle.depth == 6  # type: ignore[call-arg]
    assert Mine(size=4, depth=1).middle.depth == 1  # type: ignore[call-arg]
    assert Mine().middle.depth == 5


def test_of_two_sets_of_values_the_upper_wins_by_place_or_short_name() -> None:
    below = {"size": 4, "middle": {"extra": {"x": 1}, "depth": 8}, "steps": 3}
    config = Base.overlaid(below, {"middle.inner.name": "n", "middle": {"extra": {"y": 2}}, "depth": 9})
    assert config.middle == Middle(inner=Inner(size=4, name="n"), depth=9, extra={"y": 2})
    assert config.steps == 3
    with pytest.raises(ConfigError, match=r"Base\.steps=13: is unlucky"):
        Base.overlaid({"steps": 3}, {"steps": 13})


def test_values_that_follow_are_filled_and_are_no_values_that_were_given() -> None:
    config = Mine(steps=4)
    assert config.last == Inner(size=8, name="unchecked"), "a stand-in is replaced when all is known"
    assert config.middle.inner.name == "inner", "what needs Ray waits"
    assert config.filled("middle").inner == Inner(name="of 4") and config.middle.inner.name == "inner"
    filled = merged({}, {"inner": config.filled("middle").inner})
    assert filled == {"inner": {"name": "of 4"}}, "whoever is handed the section takes it for given"
    assert config.filled("last") == config.last
    assert dict(config.followed()) == {"middle.inner.name": "shown", "last.size": 8, "last.name": "unchecked"}
    assert not any(config.gives(path) for path in ("last.size", "last.name", "middle.inner.name"))
    saved = config.model_dump()
    assert saved["last"] == {} and saved["middle"]["inner"] == {"size": 3}
    assert Mine(**saved) == config
    longer = config.replace(steps=6)
    assert (longer.last.size, longer.filled("middle").inner.name) == (12, "of 6")


def test_a_value_that_was_given_is_kept_shown_and_saved_or_refused() -> None:
    config = Mine(**{"middle.inner.name": "inner", "last.name": "mine", "last.size": 20})
    assert config.filled("middle").inner.name == "inner", "even where it is the default"
    assert (config.last.name, config.last.size) == ("mine", 20), "what follows anyway may be said"
    saved = config.model_dump()
    assert saved["middle"]["inner"] == {"size": 3, "name": "inner"} and saved["last"]["name"] == "mine"
    assert "middle.inner.name" not in dict(config.followed())
    assert Mine(**{"last.size": 3}).last.size == 20, "the default stands for nothing given"
    with pytest.raises(ConfigError, match=r"^Mine\.last\.size=7: is twice the steps$"):
        Mine(**{"last.size": 7})


def test_a_value_is_looked_up_with_its_default_by_short_name_or_place() -> None:
    config = Mine(steps=4, depth=1)  # type: ignore[call-arg]
    assert config.value_and_default("depth") == config.value_and_default("middle.depth") == (1, 2)
    assert config.value_and_default("size") == (3, 3)
    assert config.value_and_default("steps") == (4, 10)
    assert config.value_and_default("middle.extra") == ({}, {})
    for nothing in ("speed", "middle.speed", "steps.more"):
        assert config.value_and_default(nothing) == (None, None)
    assert [Mine.name_of(path) for path in ("middle.depth", "middle.inner.size", "last.size", "steps")] == [
        "depth",
        "size",
        "last.size",
        "steps",
    ]


def test_groups_of_help_are_those_of_all_classes_in_their_order() -> None:
    assert Mine.all_groups() == {"model": ("depth", "steps"), "more": ("size",), "own": ("checked",)}
    assert Base.all_groups() == {"model": ("depth",), "more": ("size",)}
    assert list(Mine.all_groups()) == ["model", "more", "own"]
