"""The command line as it is read: flags, values and their refusals."""

from __future__ import annotations

import argparse
import importlib
import re
import signal
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field

from rl_backend.cli import command, doctor
from rl_backend.cli import main as main_module
from rl_backend.cli.main import main
from rl_backend.contracts import BaseConfig, BatchError, ConfigError, RLBackendError
from rl_backend.options.parser import CommandError, CommandParser


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
    def said(error: RLBackendError, *owners: str) -> str:
        return command.in_flags(error, *owners)

    odd = ConfigError.of("Workload.num_micro_batches", 0, "not with Other.calculate_entropy=True")
    assert said(odd, "Workload", "Other") == "--micro-batches 0: not with Other.calculate_entropy=True"
    assert said(odd, "Other") == said(odd) == str(odd), "of another configuration"
    assert said(ConfigError.of("pp", 0, "odd")) == "--pp 0: odd"
    with pytest.raises(ConfigError) as refused:
        Options(num_sequences="x", rate="y")  # type: ignore[arg-type]
    assert said(refused.value, "Options").startswith('--sequences "x": input should be a valid integer')
    assert '; --rate "y": input should be a valid number' in said(refused.value, "Options")
    assert said(BatchError("3 micro-batches: odd"), "Workload") == "3 micro-batches: odd"


def test_a_value_of_json_is_an_object() -> None:
    parser = CommandParser(prog="tool")
    parser.add_argument("--options", type=command.json_object)
    assert parser.parse_args(["--options", '{"a": [1]}']).options == {"a": [1]}
    for given in ("{", "[1]"):
        with pytest.raises(CommandError, match=f"^argument --options: invalid json_object value: {re.escape(repr(given))}"):
            parser.parse_args(["--options", given])


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


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("gguf", "the package gguf is not installed: pip install gguf"),
        ("reasoning_gym", "the package reasoning_gym is not installed: pip install reasoning-gym"),
        ("yaml", "the package yaml is not installed: pip install pyyaml"),
    ],
)
def test_a_package_that_is_missing_is_one_sentence(
    missing: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(doctor, "run", lambda arguments: importlib.import_module(missing))
    monkeypatch.setattr(main_module, "run_example", lambda name, options: importlib.import_module(missing))
    for command_line in (["doctor"], ["grpo"]):
        assert main(command_line) == 2
        assert capsys.readouterr() == ("", f"error: {said}\n")
    with pytest.raises(ModuleNotFoundError):
        main(["doctor", "--debug"])


@pytest.mark.parametrize("name", ["yaml.nothing", "rl_backend", None])
def test_a_module_that_is_missing_from_a_package_is_a_mistake(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise ModuleNotFoundError("no module", name=name)

    monkeypatch.setattr(main_module, "run_example", fail)
    with pytest.raises(ModuleNotFoundError):
        main(["grpo"])


def test_the_status_of_a_command_is_that_of_its_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    monkeypatch.setattr(doctor, "run", lambda arguments: 7 if arguments.quick and not arguments.debug else 8)
    assert [main(["doctor", "--quick"]), main(["doctor", "--quick", "--debug"])] == [7, 8]
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("rl-backend ")
