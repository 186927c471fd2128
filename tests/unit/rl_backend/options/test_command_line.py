"""Flags as they are given, and messages with the flags that a user knows."""

from __future__ import annotations

import sys
from typing import Any, ClassVar, Literal

import pytest
from pydantic import Field, model_validator

from rl_backend.contracts import BaseConfig, ConfigError, RLBackendError
from rl_backend.options.command_line import in_flags, parse_config
from rl_backend.options.option_set import OptionSet, read_options


class Part(BaseConfig):
    size: int = 3
    rate: float = Field(default=0.5, le=1)


class Finer(Part):
    pass


class Deeper(BaseConfig):
    part: Finer = Finer()
    depth: float = 1.0


class Mine(BaseConfig):
    option_set: ClassVar[OptionSet] = OptionSet(
        short={"size": "part.size", "names": "deeper_names"}, repeated=("deeper_names", "words")
    )
    _read = model_validator(mode="wrap")(read_options)

    part: Part = Part()
    deeper: Deeper = Deeper()
    deeper_names: tuple[str, ...] = ()
    words: tuple[str, ...] = ("w",)
    run_dir: str = "x"
    shift: float = 0.0
    loud: bool = True


class Many(BaseConfig):
    texts: tuple[str, ...] | None = ()
    either: str | dict[str, Any] | None = "e"
    named: dict[str, Any] = Field(default_factory=dict)
    always: tuple[str, ...] = ("x",)
    kind: Literal["none", "full"] = "full"


def read(*arguments: str) -> Mine:
    return parse_config(Mine, "", arguments)


def test_flags_are_read_with_dashes_signs_and_repeats() -> None:
    config = read(
        *("--run-dir=a-b=c", "--size", "7", "--deeper.part.rate", "0.25", "--no-loud", "--shift", "-1.5e-3"),
        *("--names", "one, two", "--names=--three", "--words=-x", "--deeper.depth", "-inf"),
    )
    assert (config.run_dir, config.part.size, config.deeper.part.rate) == ("a-b=c", 7, 0.25)
    assert (config.loud, config.shift, config.deeper.depth) == (False, -1.5e-3, float("-inf"))
    assert (config.deeper_names, config.words) == (("one, two", "--three"), ("-x",))
    assert read("--shift", "-.5").shift == -0.5 and read("--shift=-2").shift == -2
    assert read() == Mine()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--deeper.part.rate", "2"), '--deeper.part.rate="2": input should be less than or equal to 1'),
        (("--rate", "2"), "--rate: there is no such flag; did you mean --"),
        (("--size=x",), '--size="x": input should be a valid integer'),
        (("--names",), "argument --names/--deeper-names: expected one argument; see "),
        (("--names", "--loud"), "argument --names/--deeper-names: expected one argument; see "),
        (("--run-dir",), "argument --run-dir: expected one argument; see "),
        (("--loud=1",), "argument --loud/--no-loud: ignored explicit argument '1'; see "),
        (("-1.5",), "unrecognized arguments: -1.5; see "),
        (("--sizes", "1", "--run-dir", "x"), "--sizes: there is no such flag; did you mean --size?"),
    ],
)
def test_wrong_flags_are_refused_as_they_were_given(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(*arguments)
    assert str(refused.value).startswith(message)


def test_a_section_takes_an_object() -> None:
    assert read("--deeper", '{"depth": 2}').deeper.depth == 2


def test_messages_have_flags_in_place_of_the_fields_that_they_blame() -> None:
    config = read("--size", "4")

    def said(field: str) -> str:
        return in_flags(ConfigError.of(field, 3, "no; see Mine.run_dir"), config)

    assert said("Mine.run_dir") == "--run-dir=3: no; see Mine.run_dir"
    assert (said("Part.size"), said("run_dir")) == ("--size=3: no; see Mine.run_dir", "--run-dir=3: no; see Mine.run_dir")
    assert said("Finer.rate").startswith("--deeper.part.rate=3:"), "its base is another section"
    assert said("Deeper.part.size").startswith("--deeper.part.size=3:")
    assert said("AMine.size").startswith("AMine.size=3:") and said("Other").startswith("Other=3:")
    assert (
        in_flags(RLBackendError("Mine.run_dir"), config) == in_flags(ConfigError("Mine.run_dir"), config) == "Mine.run_dir"
    )
    assert in_flags(ConfigError.of("Mine.run_dir", 3, "no"), None) == "Mine.run_dir=3: no"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (("1,2",), ("1", "2")),
        (("1", "2, 3"), ("1", "2", "3")),
        (('["a,b"]', "c"), ("a,b", "c")),
        (("none",), None),
        (("",), ()),
    ],
)
def test_a_list_is_given_by_commas_as_json_or_piece_by_piece(words: tuple[str, ...], value: object) -> None:
    assert parse_config(Many, "", [f"--texts={word}" for word in words]).texts == value


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (("a=1,b=x=y",), {"a": "1", "b": "x=y"}),
        (("a=1", '{"b": 2}'), {"a": "1", "b": 2}),
        (("plain",), "plain"),
        (("none",), None),
    ],
)
def test_an_object_is_given_by_names_as_json_or_piece_by_piece(words: tuple[str, ...], value: object) -> None:
    assert parse_config(Many, "", [f"--either={word}" for word in words]).either == value


def test_none_is_nothing_or_the_choice_of_that_name() -> None:
    config = parse_config(Many, "", ["--always=a", "--always=none", "--named=none", "--kind=none"])
    assert (config.always, config.named, config.kind) == ((), {}, "none")


@pytest.mark.parametrize(
    ("word", "message"),
    [("--named=x", '--named="x": input should be a valid dictionary'), ("--named={x", "--named {x: not JSON: ")],
)
def test_what_is_no_object_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        parse_config(Many, "", [word])


@pytest.mark.parametrize(
    ("called", "argv", "program"),
    [
        (["python", "/bin/rl-backend", "grpo", "--lr", "1"], ["rl-backend grpo", "--lr", "1"], "rl-backend grpo"),
        (["python", "-m", "examples.grpo", "--lr", "1"], ["/x/grpo.py", "--lr", "1"], "python -m examples.grpo"),
        (["/usr/bin/python3", "examples/grpo.py"], ["examples/grpo.py"], "python examples/grpo.py"),
        (["python", "-X", "dev", "mine.py", "--a"], ["mine.py", "--a"], "python -X dev mine.py"),
    ],
)
def test_help_has_the_words_that_the_program_was_called_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], called: list[str], argv: list[str], program: str
) -> None:
    monkeypatch.setattr(sys, "orig_argv", called)
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as end:
        parse_config(Mine, "text", ["--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {program} [--config FILE] [--FLAG VALUE ...]\n\ntext\n")


def test_arguments_are_the_process_s_where_none_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mine.py", "--size", "9"])
    assert parse_config(Mine, "").part.size == 9 and parse_config(Mine, "", []).part.size == 3
