"""``rl-backend grpo`` and its like: the examples as commands."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from rl_backend.cli.example import EXAMPLES, example_file
from rl_backend.cli.main import COMMANDS, EXIT_BROKEN_PIPE, main

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(autouse=True)
def process_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command sets what only its own process has."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.shows(
    "commands: rl-backend grpo, ppo, sft, tenants and eval run the files of the examples, from a clone or from pip"
)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_command_runs_the_file_of_the_example_with_its_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, str, list[str]]] = []
    monkeypatch.setattr(runpy, "run_path", lambda file, run_name: ran.append((file, run_name, list(sys.argv))))
    options = ["--model", "doctor", "--debug", "--help"]
    assert main([name, *options]) == 0
    file = str(ROOT / "examples" / f"{name}.py")
    assert ran == [(file, "__main__", [file, *options])]
    assert main(["example", name, *options]) == 0
    assert ran[1] == ran[0]
    assert os.getcwd() in sys.path


@pytest.mark.parametrize("name", EXAMPLES)
def test_its_help_is_that_of_the_example_under_the_commands_name(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, shown in (
        (["python3.12", "/usr/bin/rl-backend", name], f"rl-backend {name}"),
        (["python3.12", "/usr/bin/rl-backend", "example", name], f"rl-backend example {name}"),
        (["python", "-m", "rl_backend.cli", name], f"python -m rl_backend.cli {name}"),
        (["python", "mine.py"], "python mine.py"),
    ):
        monkeypatch.setattr(sys, "orig_argv", [*words, "--help"])
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: {shown} [--config FILE]")


def test_its_errors_are_those_of_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sft", "--modle", "x"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("error: --modle: there is no such flag; did you mean --model?\n")


def test_the_list_of_commands_has_them_and_needs_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    script = (
        "import sys\nfrom rl_backend.cli.main import main\nmain([])\nsys.exit(any(n in sys.modules for n in sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, "torch", "pydantic", "ray", "yaml"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(f"    {name} " in listed for name in EXAMPLES)
    assert "rl-backend grpo --model DIR --dataset train.jsonl --reward my_reward.py:compute_score" in listed


@pytest.mark.parametrize(("arguments", "unbuffered"), [("example", "1"), ("example", ""), ("--help", "")])
def test_a_reader_that_leaves_ends_a_command_without_a_traceback(arguments: str, unbuffered: str) -> None:
    """As ``head -1`` does."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "rl_backend.cli", *arguments.split()]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=write, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (EXIT_BROKEN_PIPE, "")


def test_every_example_is_where_its_command_looks() -> None:
    assert all(example_file(name).is_file() for name in EXAMPLES)


def test_the_page_lists_every_command() -> None:
    _, _, table = (ROOT / "docs" / "getting_started.md").read_text().partition("| command | what it does |")
    rows = table.partition("\n\n")[0].splitlines()
    listed = [name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1] if "|" in row else "")]
    assert sorted(listed) == sorted([*EXAMPLES, *COMMANDS])


def test_the_list_of_examples_says_where_each_is_and_where_the_recipes_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["example"]) == 0
    *examples, recipes = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in examples] == list(EXAMPLES)
    assert all(Path(line.rpartition(": ")[2]).is_file() for line in examples)
    names, _, path = recipes.removeprefix("recipes  for grpo --config, of ").partition(": ")
    assert "dapo" in names.split(", ")
    assert all(Path(path.replace("NAME", name)).is_file() for name in names.split(", "))
