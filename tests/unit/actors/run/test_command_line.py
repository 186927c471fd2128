"""Flags as they are given, exit statuses, and messages with the flags that a user knows."""

from __future__ import annotations

import os
import sys
from typing import Any, ClassVar

import pytest
from pydantic import Field, model_validator

from actors.cluster.session import RunStopped, RunTerminated
from actors.folder.start import RunFinishedError
from actors.run import command_line
from actors.run.command_line import in_flags, parse_config, run_command
from rl_backend.contracts import BaseConfig, ClusterLostError, ConfigError, EngineDeadError, RLBackendError
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


def read(*arguments: str) -> Mine:
    return parse_config(Mine, "", arguments)


def test_flags_are_read_with_dashes_signs_and_repeats() -> None:
    config = read(
        *("--run-dir=a-b=c", "--size", "7", "--deeper.part.rate", "0.25", "--no-loud", "--shift", "-1.5e-3"),
        *("--names", "one, two", "--names=--three", "--words", "-x", "--deeper.depth", "-inf"),
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
        (("--rate", "2"), "--rate 2: there is no such flag; did you mean --"),
        (("--size=x",), '--size="x": input should be a valid integer'),
        (("--names",), "--names: needs a value; see --help"),
        (("--names", "--loud"), "--names: needs a value; see --help"),
        (("--run-dir",), "--run-dir: needs a value; see --help"),
        (("--loud=1",), "--loud: takes no value; give the flag, or --no- and its name"),
        (("-1.5",), "-1.5: is not a flag; flags begin with --, see --help"),
        (("--sizes", "1", "--run-dir", "x"), "--sizes 1: there is no such flag; did you mean --size?"),
    ],
)
def test_wrong_flags_are_refused_as_they_were_given(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(*arguments)
    assert str(refused.value).startswith(message)


def test_a_section_takes_an_object() -> None:
    assert read("--deeper", '{"depth": 2}').deeper.depth == 2


def test_messages_have_flags_in_place_of_fields() -> None:
    read("--size", "4")
    assert in_flags("Mine.run_dir='x': no; Part.size=3") == "--run-dir='x': no; --size=3"
    assert in_flags("Finer.size=3, Part.rate=2") == "--deeper.part.size=3, --part.rate=2", "one is the base of the other"
    assert in_flags("run_dir='x': no; see run_dir") == "--run-dir='x': no; see run_dir"
    assert in_flags("Deeper.depth=3 and Deeper.part.size=4") == "--deeper.depth=3 and --deeper.part.size=4"
    assert in_flags("the size=3 of AMine.size=4") == "the size=3 of AMine.size=4"
    assert in_flags("BaseConfigs") == "BaseConfigs"


def ended(error: BaseException) -> int | None:
    def main() -> None:
        raise error

    try:
        run_command(main)
    except SystemExit as end:
        return int(str(end.code))
    return None


@pytest.mark.parametrize(
    ("error", "status", "out", "err"),
    [
        (RunFinishedError("the run is done"), None, "nothing left to do: the run is done\n", ""),
        (ConfigError("run_dir='x': is used"), 2, "", "error: --run-dir='x': is used\n"),
        (RLBackendError("engine: restart it"), 2, "", "error: engine: restart it\n"),
        (EngineDeadError("dead; restart it"), 2, "", f"error: dead; {command_line.RUN_AGAIN}\n"),
        (RunTerminated("after step 3"), 143, "", "stopped by SIGTERM\n"),
        (RunStopped("Ctrl-C after step 3"), 130, "", "stopped\n"),
        (KeyboardInterrupt(), 130, "", "stopped\n"),
    ],
)
def test_a_command_ends_with_one_message_and_its_status(
    error: BaseException, status: int | None, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    read()
    assert ended(error) == status
    assert tuple(capsys.readouterr()) == (out, err)
    with pytest.raises(ZeroDivisionError):
        ended(ZeroDivisionError())


def test_notes_of_an_error_are_a_part_of_its_message(capsys: pytest.CaptureFixture[str]) -> None:
    error = RLBackendError("first")
    error.add_note("second")
    error.add_note("third")
    assert ended(error) == 2 and capsys.readouterr().err == "error: first; second; third\n"


@pytest.mark.parametrize(
    ("error", "lost", "status"),
    [
        (ClusterLostError("Ray is lost"), None, 2),
        (RunTerminated(), ClusterLostError("gone"), 143),
        (KeyboardInterrupt(), ClusterLostError("gone"), 130),
        (RLBackendError("mine"), ClusterLostError("gone"), None),
    ],
)
def test_where_ray_is_lost_its_exit_handlers_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, lost: Any, status: int | None
) -> None:
    class Left(BaseException):
        pass

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(command_line, "cluster_loss", lambda: lost)
    if status is None:
        assert ended(error) == 2
        return
    with pytest.raises(Left) as left:
        ended(error)
    assert left.value.args == (status,)


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
