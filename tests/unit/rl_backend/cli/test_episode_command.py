"""``rl-backend episode``: the options of a run, and what it prints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rl_backend.cli.main import main


def test_an_episode_is_played_with_modules_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Any, int]] = []

    def show(config: Any, row: int) -> str:
        asked.append((config, row))
        return "what was played"

    (tmp_path / "plugin_of_test.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])
    monkeypatch.setattr("actors.run.evaluation.show_episode", show)
    options = ["--model", "m", "--dataset", "d.jsonl", "--environment", "plugin_of_test:Game", "--run-dir", "x"]
    assert main(["episode", "2", *options, "--plugins", "plugin_of_test"]) == 0
    assert capsys.readouterr().out == "what was played\n"
    ((config, row),) = asked
    assert (row, config.model, config.environment) == (2, "m", "plugin_of_test:Game")
    assert config.train.plugins == ("plugin_of_test",) and "plugin_of_test" in sys.modules
