"""The command line as it is read: flags, values and their refusals."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field

from rl_backend.cli import command, doctor
from rl_backend.cli import main as main_module
from rl_backend.cli.command import CommandError
from rl_backend.cli.main import main
from rl_backend.cli.parser import CommandParser
from rl_backend.contracts import BaseConfig, ConfigError


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
        ("--model m --rate x", "--rate x: expected a number"),
        ("--model m --size 1.5", "--size 1.5: expected a whole number"),
        ("--model m --kind three", "--kind three: expected one of one, two"),
        ("--model m --quiet=yes", "--quiet: takes no value; see tool --help"),
        ("--model m --rate", "--rate: needs a value; see tool --help"),
        ("--rate 1", "--model: must be given; see tool --help"),
        ("--model m extra", "extra: is one argument too many; see tool --help"),
        ("--model m --qiet", "--qiet: there is no such flag; did you mean --quiet?"),
        ("--model m --zzzz 3", "--zzzz: there is no such flag; see tool --help"),
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
        (["-x"], "-x"),
        (["--mod", "m"], None),
        (["--rate", "-1", "-.5", "-1e3", "-inf", "-Infinity"], None),
        (["--", "--mdel"], None),
        (["-a text of several words"], None),
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


class Options(BaseConfig):
    """Options of a test.

    Attributes:
        num_sequences: how many, in 100 % of all cases.
        rate: of something.
        kind: which one.
        plugins: a module.
    """

    num_sequences: int = 3
    rate: float | None = Field(default=None)
    kind: Literal["one", "two"] = "two"
    plugins: str = "none"


def test_flags_have_the_names_types_defaults_and_texts_of_their_fields() -> None:
    made = argparse.ArgumentParser(prog="tool")
    fields = ("num_sequences", "rate", "kind", "plugins")
    command.add_fields(made, Options, fields)
    command.add_fields(made, Options, ("rate", "num_sequences"), "other_")
    parsed = made.parse_args(["--sequences", "0", "--kind", "one", "--other-rate", "0.5"])
    assert command.given(parsed, fields) == {"num_sequences": 0, "kind": "one"}
    assert command.given(parsed, ("rate", "num_sequences"), "other_") == {"rate": 0.5}
    text = " ".join(made.format_help().split())
    assert "--sequences N how many, in 100 % of all cases (default 3)" in text
    assert "--rate X of something" in text and "--kind {one,two} which one (default two)" in text
    assert "--plugin X a module (default none)" in text and "None" not in text
    with pytest.raises(SystemExit):
        made.parse_args(["--sequences", "1.5"])


def test_errors_are_in_the_terms_of_the_command_line() -> None:
    pattern = r"(?:Workload|Other)\.(\w+)"
    message = "Workload.num_micro_batches=0: not with Other.calculate_entropy=True; MyWorkload.rate=1"
    expected = "--micro-batches 0: not with --entropy True; MyWorkload.rate=1"
    assert command.in_flags(message, pattern) == expected
    assert command.in_flags("-3 micro-batches: too few", pattern) == "--micro-batches -3: too few"
    assert command.in_flags("3 micro-batches: odd", pattern, "microbatches") == "--microbatches 3: odd"
    assert command.in_flags("of 3 micro-batches: odd", pattern) == "of 3 micro-batches: odd"


def test_a_value_of_json_is_an_object() -> None:
    assert command.json_object("options", '{"a": [1]}') == {"a": [1]}
    for given, message in (("{", "--options {: not JSON: "), ("[1]", r"--options \[1\]: expected an object of fields")):
        with pytest.raises(CommandError, match=f"^{message}"):
            command.json_object("options", given)


def test_an_output_is_a_file_in_a_directory_that_exists(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    for name in ("new", "old"):
        command.check_output("json", tmp_path / name)
    for path in (tmp_path, tmp_path / "none" / "new", tmp_path / "old" / "new"):
        with pytest.raises(CommandError, match=r"^--json .*: must be a file in a directory that exists$"):
            command.check_output("json", path)


def test_a_signal_ends_a_command_in_order_once_and_is_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    cleaned = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            cleaned.append(True)

    with pytest.raises(SystemExit) as ended, command.exit_on_sigterm():
        work()
    assert ended.value.code == 143 and cleaned and signal.getsignal(signal.SIGTERM) is before
    with command.exit_on_sigterm():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interrupted_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module, "run_example", interrupt)
    assert main(["grpo"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


@pytest.mark.parametrize(("error", "status"), [(ConfigError("odd"), 2), (ZeroDivisionError(), None)])
def test_errors_of_an_example_are_a_message_if_they_are_ours(
    error: Exception, status: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Any] = []

    def fail(name: str, options: Any) -> int:
        given.append((name, list(options)))
        raise error

    monkeypatch.setattr(main_module, "run_example", fail)
    if status is None:
        with pytest.raises(type(error)):
            main(["sft", "--debug", "plan"])
    else:
        assert main(["sft", "--debug", "plan"]) == status
        assert capsys.readouterr().err == "error: odd\n"
    assert given == [("sft", ["--debug", "plan"])]


def test_the_status_of_a_command_is_that_of_its_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    monkeypatch.setattr(doctor, "run", lambda arguments: 7 if arguments.quick and not arguments.debug else 8)
    assert [main(["doctor", "--quick"]), main(["doctor", "--quick", "--debug"])] == [7, 8]
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("rl-backend ")
