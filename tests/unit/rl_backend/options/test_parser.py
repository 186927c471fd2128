"""The parser of all commands: refusals in a sentence, the flag that was meant, numbers below 0."""

from __future__ import annotations

import argparse
import re

import pytest

from rl_backend.options.parser import CommandError, CommandParser


def parser() -> CommandParser:
    made = CommandParser(prog="tool")
    made.add_argument("--model", required=True)
    made.add_argument("--size", type=int)
    made.add_argument("--rate", type=float)
    made.add_argument("--kind", choices=["one", "two"])
    made.add_argument("--quiet", action="store_true")
    return made


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model m --rate x", "argument --rate: invalid float value: 'x'; see tool --help"),
        ("--model m --kind three", "argument --kind: invalid choice: 'three' (choose from 'one', 'two'); see tool --help"),
        ("--model m --quiet=yes", "argument --quiet: ignored explicit argument 'yes'; see tool --help"),
        ("--model m --rate", "argument --rate: expected one argument; see tool --help"),
        ("--rate 1", "the following arguments are required: --model; see tool --help"),
        ("--model m extra", "unrecognized arguments: extra; see tool --help"),
        ("--mod m", "the following arguments are required: --model; see tool --help"),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_sentence(words: str, message: str) -> None:
    with pytest.raises(CommandError) as caught:
        parser().parse_args(words.split())
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["--mdel", "m"], "--mdel"),
        (["--rate", "1", "--mdel=m"], "--mdel"),
        (["--mod", "m"], "--mod"),
        (["--rate", "-1", "-.5", "-1e3", "-inf", "-Infinity"], None),
        (["--", "--mdel"], None),
        (["--a text of several words"], None),
        (["-", "--", "word"], None),
    ],
)
def test_a_flag_that_is_not_there_is_refused_before_one_that_is_missing(words: list[str], refused: str | None) -> None:
    if refused is None:
        parser().refuse_unknown(words)
        return
    with pytest.raises(CommandError, match=f"^{refused}: there is no such flag"):
        parser().refuse_unknown(words)
    takes_all = CommandParser(prog="tool")
    takes_all.add_argument("options", nargs=argparse.REMAINDER)
    takes_all.refuse_unknown(words)


def test_the_flag_that_was_meant_is_named() -> None:
    for flag, meant, advice in (
        ("--qiet", None, "did you mean --quiet?"),
        ("--zzzz", None, "see tool --help"),
        ("--qiet", lambda flag: f"{flag}s", "did you mean --qiets?"),
        ("--qiet", lambda flag: None, "see tool --help"),
    ):
        with pytest.raises(CommandError, match=f"^{flag}: there is no such flag; {re.escape(advice)}$"):
            parser().refuse_unknown([flag], meant)


def test_numbers_below_0_are_values() -> None:
    for number in ("-1", "-.5", "-1e-4", "-inf"):
        assert parser().parse_args(["--model", "m", "--rate", number]).rate == float(number)


def test_all_flags_are_listed_with_the_values_that_they_can_have() -> None:
    made = parser()
    made.add_argument("--dtype", metavar="{auto,float32}")
    made.add_argument("--hidden", help=argparse.SUPPRESS)
    made.add_argument("shell", choices=["bash", "zsh"])
    expected = {"--kind": ("one", "two"), "--dtype": ("auto", "float32"), "bash": (), "zsh": ()}
    assert made.choices_of() == dict.fromkeys(("--help", "--model", "--size", "--rate", "--quiet"), ()) | expected
