"""Nested configurations: places and short names, values that follow, and what is merged with what."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import pytest
from pydantic import Field, model_serializer, model_validator

from rl_backend.contracts import BaseConfig, ConfigError
from rl_backend.options.option_set import (
    Follows,
    OptionSet,
    at,
    filled,
    followed,
    get,
    gives,
    has,
    merged,
    options_of,
    overlaid,
    read_options,
    sections_of,
    value_and_default,
    write_options,
)


class Inner(BaseConfig):
    size: int = 3
    name: str = "inner"


class Wide(Inner):
    width: int = 9


class Middle(BaseConfig):
    inner: Inner = Inner()
    depth: int = 2
    extra: dict[str, Any] = Field(default_factory=dict)


class Base(BaseConfig):
    option_set: ClassVar[OptionSet] = OptionSet(
        short={"depth": "middle.depth", "size": "middle.inner.size"},
        preset={"middle.depth": 5},
        groups={"model": ("depth",), "more": ("size",)},
    )
    _read = model_validator(mode="wrap")(read_options)
    _write = model_serializer(mode="wrap")(write_options)

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
    option_set: ClassVar[OptionSet] = Base.option_set | OptionSet(
        follows={
            "middle.inner.name": Follows(lambda config: f"of {config.steps}", shown=lambda config: "shown"),
            "last.size": Follows(lambda config: 2 * config.steps, "is twice the steps", until=1),
            "last.name": Follows(lambda config: config.checked or "unchecked", until="until"),
            "middle.nothing": Follows(lambda config: 1),
        },
        fitted=lambda _, given: {"middle.depth": 6} if has(given, "middle.inner.size") else {},
        groups={"model": ("steps",), "own": ("checked",)},
    )


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
    assert options_of(Mine) is Mine.option_set and options_of(Inner) == OptionSet()


def test_short_names_win_over_places_whatever_their_order() -> None:
    for values in ({"middle": {"depth": 1}, "depth": 7}, {"depth": 7, "middle": {"depth": 1}}):
        assert Base.option_set.nest(values) == {"middle": {"depth": 7}}
    assert Base.option_set.nest({"middle.inner": {"size": 1}, "size": 8, "steps": 2}) == {
        "middle": {"inner": {"size": 8}},
        "steps": 2,
    }
    assert Base(**{"middle.inner.size": 8}).middle.inner.size == 8


def test_presets_are_below_fitted_defaults_and_both_below_what_is_given() -> None:
    assert Base().middle.depth == 5 and Middle().depth == 2
    assert Mine(size=4).middle.depth == 6  # type: ignore[call-arg]
    assert Mine(size=4, depth=1).middle.depth == 1  # type: ignore[call-arg]
    assert Mine().middle.depth == 5


def test_of_two_sets_of_values_the_upper_wins_by_place_or_short_name() -> None:
    below = {"size": 4, "middle": {"extra": {"x": 1}, "depth": 8}, "steps": 3}
    config = overlaid(Base, below, {"middle.inner.name": "n", "middle": {"extra": {"y": 2}}, "depth": 9})
    assert config.middle == Middle(inner=Inner(size=4, name="n"), depth=9, extra={"y": 2})
    assert config.steps == 3
    with pytest.raises(ConfigError, match=r"Base\.steps=13: is unlucky"):
        overlaid(Base, {"steps": 3}, {"steps": 13})
    assert overlaid(Base, {"middle": Middle(depth=1)}, {"size": 4}).middle == Middle(depth=1, inner=Inner(size=4))
    for below, above, wrong in (
        ({"middle": 5}, {"size": 4}, "middle=5"),
        ({"size": 4}, {"middle": 5}, "middle=5"),
        ({"middle": {"inner": "x"}}, {"size": 4}, "middle.inner='x'"),
        ({"middle.inner": None, "size": 4}, {}, "middle.inner=None"),
    ):
        with pytest.raises(ConfigError, match=rf"^Base\.{wrong}: these are several options; give each its own value"):
            overlaid(Base, below, above)


def test_values_that_follow_are_filled_and_are_no_values_that_were_given() -> None:
    config = Mine(steps=4)
    assert config.last == Inner(size=8, name="unchecked"), "a stand-in is replaced when all is known"
    assert config.middle.inner.name == "inner", "what needs Ray waits"
    assert filled(config, "middle").inner == Inner(name="of 4") and config.middle.inner.name == "inner"
    taken = merged({}, {"inner": filled(config, "middle").inner})
    assert taken == {"inner": {"name": "of 4"}}, "whoever is handed the section takes it for given"
    assert filled(config, "last") == config.last
    assert dict(followed(config)) == {"middle.inner.name": "shown", "last.size": 8, "last.name": "unchecked"}
    assert not any(gives(config, path) for path in ("last.size", "last.name", "middle.inner.name"))
    saved = config.model_dump()
    assert saved["last"] == {} and saved["middle"]["inner"] == {"size": 3}
    assert Mine(**saved) == config
    longer = config.replace(steps=6)
    assert (longer.last.size, filled(longer, "middle").inner.name) == (12, "of 6")


def test_a_value_that_was_given_is_kept_shown_and_saved_or_refused() -> None:
    config = Mine(**{"middle.inner.name": "inner", "last.name": "mine", "last.size": 20})
    assert filled(config, "middle").inner.name == "inner", "even where it is the default"
    assert (config.last.name, config.last.size) == ("mine", 20), "what follows anyway may be said"
    saved = config.model_dump()
    assert saved["middle"]["inner"] == {"size": 3, "name": "inner"} and saved["last"]["name"] == "mine"
    assert "middle.inner.name" not in dict(followed(config))
    assert Mine(**{"last.size": 3}).last.size == 20, "the default stands for nothing given"
    with pytest.raises(ConfigError, match=r"^Mine\.last\.size=7: is twice the steps$"):
        Mine(**{"last.size": 7})


def test_a_value_is_looked_up_with_its_default_by_short_name_or_place() -> None:
    config = Mine(steps=4, depth=1)  # type: ignore[call-arg]
    assert value_and_default(config, "depth") == value_and_default(config, "middle.depth") == (1, 2)
    assert value_and_default(config, "size") == (3, 3)
    assert value_and_default(config, "steps") == (4, 10)
    assert value_and_default(config, "middle.extra") == ({}, {})
    for nothing in ("speed", "middle.speed", "steps.more"):
        assert value_and_default(config, nothing) == (None, None)
    assert [Mine.option_set.name_of(path) for path in ("middle.depth", "middle.inner.size", "last.size", "steps")] == [
        "depth",
        "size",
        "last.size",
        "steps",
    ]


def test_what_two_configurations_say_is_joined_and_the_second_wins() -> None:
    assert Mine.option_set.groups == {"model": ("depth", "steps"), "more": ("size",), "own": ("checked",)}
    assert list(Mine.option_set.groups) == ["model", "more", "own"]
    assert Mine.option_set.short == Base.option_set.short and Mine.option_set.preset == {"middle.depth": 5}
    first = OptionSet(
        short={"a": "x.a"}, repeated=("x",), metavars={"a": "A", "b": "B"}, example="first", fitted=lambda _, __: {"x": 1}
    )
    second = OptionSet(short={"a": "y.a"}, repeated=("y",), metavars={"b": "C"}, section_types=lambda _: {"x": Inner})
    both = first | second
    assert (both.short, both.repeated, both.metavars) == ({"a": "y.a"}, ("x", "y"), {"a": "A", "b": "C"})
    assert (both.example, (first | OptionSet(example="second")).example) == ("first", "second")
    assert (both.fitted(Inner, {}), both.section_types({})) == ({"x": 1}, {"x": Inner})


def test_a_name_in_a_file_is_a_short_name_a_place_or_a_place_in_a_section_of_a_short_name() -> None:
    options = OptionSet(short={"tp": "train.parallel.tp", "loss": "train.loss", "odd.name": "train.odd"})
    names = ("tp", "loss.name", "odd.name", "train.tp")
    assert [options.place_of(name) for name in names] == ["train.parallel.tp", "train.loss.name", "train.odd", "train.tp"]
