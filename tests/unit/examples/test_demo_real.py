"""The demo on a pretrained model: the commands that it types, and the answers that it shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples import demo_real
from rl_backend.cli.check import config_type
from rl_backend.options.command_line import parse_config


def test_it_types_commands_that_a_user_could_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed: list[tuple[str, ...]] = []
    run = tmp_path / "run"

    def type_command(*words: str) -> None:
        typed.append(words)
        if words[0] == "grpo":
            run.mkdir()
            (run / "summary.json").write_text('{"held_out_reward_before": 0.25, "held_out_reward_after": 0.5}')
            lines = [
                {"step": step, "prompt": PROMPT, "ground_truth": "15", "reward": reward, "response": response}
                for step, reward, response in ((0, 0.2, "It is 15, I think."), (3, 1.0, "15"))
            ]
            (run / "held_out.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    monkeypatch.setattr(demo_real, "type_command", type_command)
    monkeypatch.setattr(demo_real, "MODEL", tmp_path / "none")
    demo_real.main(["--run-dir", str(run), "--steps", "3", "--lr=1e-4"])
    assert [words[0] for words in typed] == ["import", "check", "grpo"]
    assert typed[1][1:] == typed[2]
    config = parse_config(config_type("grpo"), "", typed[2][1:])
    assert (config.steps, config.train.backend_cfg.optimizer.lr, config.dtype) == (3, 1e-4, "bfloat16")
    assert config.run_dir == str(run) and config.reward == "rl_backend.data.gym:score_last_number"
    printed = capsys.readouterr().out
    assert "\nState: 7 + 8 =   (answer: 15)\n    before  0.20  'It is 15, I think.'\n    after   1.00  '15'\n" in printed
    assert "held-out reward  0.250 -> 0.500" in printed


def test_a_command_that_fails_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        demo_real.type_command("import", "--gguf", "none.gguf")
    assert ended.value.code == 2 and "$ rl-backend import --gguf none.gguf" in capsys.readouterr().out


PROMPT = (
    "<|im_start|>system\nAnswer with the number only.<|im_end|>\n"
    "<|im_start|>user\nState: 7 + 8 =<|im_end|>\n<|im_start|>assistant\n"
)
