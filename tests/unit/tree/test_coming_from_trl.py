"""The page for users of TRL: every name in its tables is one of TRL's options or of ours."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_backend.cli.check import config_type
from rl_backend.data.rewards import RewardCall, RewardConfig
from rl_backend.options.command_line import parse_config
from tests.support.claims import ROOT

TEXT = (ROOT / "docs" / "coming_from_trl.md").read_text()


def rows(heading: str) -> list[tuple[list[str], list[str]]]:
    """Names of TRL and flags of ours, in each row of the table of a section."""
    section = re.split(r"\n##+ ", TEXT.partition(f"\n## {heading}\n")[2])[0]
    cells = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    assert len(cells) > 5
    return [(re.findall(r"`(\w+)`", theirs), re.findall(r"`(--[\w.-]+)`", ours)) for theirs, ours in cells]


def flags(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit):
        parse_config(config_type(command), "", ["--help"])
    return {f"--{name}" for name in re.findall(r"--(?:\[no-\])?([\w.-]+)", capsys.readouterr().out)}


@pytest.mark.parametrize(("heading", "command"), [("GRPOConfig", "grpo"), ("SFTConfig", "sft")])
def test_every_name_in_a_table_exists_on_both_sides(heading: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    theirs = {each.name for each in dataclasses.fields(getattr(trl, heading))}
    known = flags(command, capsys)
    for names, ours in rows(heading):
        assert names and ours
        assert set(names) - theirs == set()
        assert set(ours) - known == set()


def test_the_example_runs_on_both_sides(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    given: dict[str, Any] = {}
    trainer = SimpleNamespace(train=lambda: None)
    names: dict[str, Any] = {
        "GRPOConfig": lambda **options: given.update(options),
        "GRPOTrainer": lambda model, reward, *, args, train_dataset: trainer,
        "load_dataset": lambda kind, *, data_files: {"train": None},
    }
    exec(compile(code, "coming_from_trl.md", "exec"), names)
    assert given.keys() <= {each.name for each in dataclasses.fields(trl.GRPOConfig)}
    (tmp_path / "my_reward.py").write_text(code.partition("\n\n\nconfig")[0])
    asked = [{"role": "user", "content": "2 + 2 ="}]
    calls = [RewardCall("s", text, None, None, asked, columns={"answer": "4"}) for text in ("4", "5")]
    scores = RewardConfig(functions=f"{tmp_path}/my_reward.py:exact").load().score(calls)
    assert [score.value for score in scores] == [1, 0]


def test_every_option_that_trl_adds_for_grpo_is_on_the_page() -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from transformers import TrainingArguments

    added = {each.name for each in dataclasses.fields(trl.GRPOConfig)}
    added -= {each.name for each in dataclasses.fields(TrainingArguments)}
    assert sorted(name for name in added if f"`{name}`" not in TEXT) == []


def test_defaults_are_those_that_the_page_names() -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    theirs = {each.name: each.default for each in dataclasses.fields(trl.GRPOConfig)}
    ours = parse_config(config_type("grpo"), "", ["--model", "m", "--dataset", "d", "--reward", "r.py:f"])
    optimizer = ours.train.backend_cfg.optimizer
    assert (theirs["num_generations"], theirs["max_completion_length"]) == (ours.sampling.n, ours.sampling.max_new_tokens)
    assert (theirs["learning_rate"], theirs["beta"]) == (optimizer.lr, ours.kl_coef)
    assert (theirs["max_grad_norm"], theirs["adam_epsilon"]) == (optimizer.clip_grad, optimizer.eps)
    assert (theirs["weight_decay"], optimizer.weight_decay) == (0.0, 0.01)
    assert (theirs["lr_scheduler_type"], optimizer.lr_decay_style) == ("linear", "constant")
    assert (theirs["loss_type"], theirs["epsilon"], theirs["scale_rewards"]) == ("dapo", 0.2, "group")
    assert (theirs["vllm_importance_sampling_clip_max"], ours.importance_cap) == (3.0, 2.0)
    assert (theirs["vllm_gpu_memory_utilization"], ours.rollout.gpu_memory_utilization) == (0.3, 0.9)
