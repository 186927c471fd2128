"""``rl-backend completion``: its script, run by bash."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rl_backend.cli.main import main


@pytest.mark.shows("commands: rl-backend completion has bash complete commands, options and their values")
def test_bash_completes_commands_options_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "train.jsonl").touch()

    def completed(*words: str) -> list[str]:
        ask = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _rl_backend; printf "%s\\n" "${COMPREPLY[@]}"'
        command = ["bash", "--norc", "-c", ask, "bash", str(script), "rl-backend", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()

    assert completed("gr") == ["grpo"]
    assert {"grpo", "sft", "doctor", "export"} <= set(completed(""))
    assert completed("grpo", "--dty") == ["--dtype"]
    assert completed("grpo", "--dtype", "") == ["auto", "float32", "bfloat16"]
    assert completed("grpo", "--dtype", "f") == ["float32"]
    assert completed("check", "sft", "--train.backend_cfg.activation_checkpointing", "") == ["none", "selective", "full"]
    assert "--no-trace" in completed("ppo", "--no-")
    assert completed("ppo", "--dataset", "tr") == ["train.jsonl"]
    assert completed("schedule", "--schedule", "zb") == ["zb-h1", "zb-h2", "zbv"]
    assert "ppo" in completed("example", "")
    assert main(["completion", "zsh"]) == 0
    assert "bashcompinit\n_rl_backend()" in capsys.readouterr().out
