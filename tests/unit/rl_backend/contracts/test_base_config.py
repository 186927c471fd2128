"""What every configuration does: refuses with its fields' names, copies, says what is set, and documents its fields."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import Field

from rl_backend.contracts import BaseConfig, ConfigError, HasEffect


class Inner(BaseConfig):
    """An inner one.

    Attributes:
        size: how large.
    """

    size: int = Field(default=2, ge=1)


class Outer(BaseConfig):
    """One with all kinds of fields.

    Attributes:
        width, height: in
            ``pixels``, both.
        inner: another.
        names: any.
        grows: by how much, where it is ``wide``.
    """

    width: int
    height: int = 3
    inner: Inner = Inner()
    names: list[str] = Field(default_factory=lambda: ["a"])
    grows: Annotated[float, HasEffect(lambda config: config.width > 5, "width={0.width} is too small; leave it out")] = 0.0


class Derived(Outer):
    """Attributes:
    depth: a third.
    """

    depth: int = 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "Outer.width: required field is missing"),
        ({"width": 1, "wide": 2}, "Outer.wide=2: unknown field; Outer has grows, height, inner, names, width"),
        ({"width": "x"}, 'Outer.width="x": input should be a valid integer'),
        ({"width": 1, "inner": {"size": 0}}, "Inner.size=0: input should be greater than or equal to 1"),
        ({"width": object}, "Outer.width=<class 'object'>: input should be"),
        ({"width": 5, "grows": 1.5}, "Outer.grows=1.5: width=5 is too small; leave it out"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name_and_value(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Outer(**fields)
    assert str(refused.value).startswith(message)


def test_all_wrong_fields_are_named_and_long_values_cut() -> None:
    with pytest.raises(ConfigError) as refused:
        Outer(height="y", other=1)  # type: ignore[call-arg]
    assert "Outer.width: required" in str(refused.value) and 'Outer.height="y"' in str(refused.value)
    assert "Outer.other=1: unknown" in str(refused.value) and str(refused.value).count("; Outer") >= 2
    assert refused.value.details["config"] == "Outer"
    assert [field for field, _ in refused.value.details["blamed"]] == ["Outer.width", "Outer.height", "Outer.other"]
    assert refused.value.told(str.lower, " is ").startswith('outer.width: required field is missing; outer.height is "y": ')
    for length, shown in ((118, f'"{"z" * 118}"'), (119, f'"{"z" * 116}...')):
        with pytest.raises(ConfigError) as refused:
            Outer(width="z" * length)
        assert str(refused.value).startswith(f"Outer.width={shown}: ")


def test_an_effect_is_asked_for_only_where_a_field_is_set() -> None:
    assert Outer(width=6, grows=1.5).grows == 1.5
    assert Outer(width=5, grows=0.0).grows == 0.0, "a default that is spelt out asks for nothing"
    with pytest.raises(ConfigError, match=r"Outer\.grows=1\.5: width=4"):
        Outer(width=6, grows=1.5).replace(width=4)


def test_what_is_set_differs_from_its_default() -> None:
    config = Outer(width=0, height=3, names=["a"], inner=Inner(size=4))
    assert [name for name in Outer.model_fields if config.is_set(name)] == ["width", "inner"]
    assert Outer(width=1, names=[]).is_set("names") and Outer(width=1, height=0).is_set("height")


def test_a_copy_changes_what_it_is_told_and_no_more() -> None:
    config = Derived(width=7, grows=2.0, inner=Inner(size=5), depth=4)
    copy = config.replace(height=9, depth=1)
    assert type(copy) is Derived and config.height == 3 and config.depth == 4
    assert copy == Derived(width=7, grows=2.0, inner=Inner(size=5), height=9, depth=1)
    with pytest.raises(ConfigError, match="unknown field"):
        config.replace(wide=1)
    with pytest.raises((ConfigError, ValueError), match="frozen"):
        config.width = 1  # type: ignore[misc]


def test_the_text_of_each_field_is_in_the_docstring_of_its_class_or_a_base() -> None:
    texts = Outer.documented()
    assert {name: texts[name] for name in Outer.model_fields} == {
        "width": "in pixels, both",
        "height": "in pixels, both",
        "inner": "another",
        "names": "any",
        "grows": "by how much, where it is wide",
    }
    assert Inner.documented()["size"] == "how large"
    assert set(Derived.documented()) >= set(Outer.model_fields)
