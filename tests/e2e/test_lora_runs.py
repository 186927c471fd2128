"""Runs of LoRA adapters on the demo's task: learned, resumed, several users at once; with real Ray and vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.run import RunResult
from actors.run.session import Session, open_session
from examples import grpo, ppo, sft, tenants
from examples.demo.__main__ import DemoConfig, demo_settings
from examples.demo.task import has_carry
from rl_backend.checkpoint.peft_files import read_peft_directory
from tests.support.runs import of_the_run

STEPS = 60
LORA = {"lora.rank": 16, "lora.alpha": 32.0, "lr": 3e-3, "trace": False}


class StopEarlyError(Exception):
    """Ends a run whose schedule depends on the number of its steps."""


def lines(path: Path, last: int = STEPS) -> list[dict[str, Any]]:
    """Up to a step, without what the machine decides and what only a last step has."""
    found = [json.loads(line) for line in path.read_text().splitlines() if json.loads(line)["step"] <= last]
    return [
        {name: line[name] for name in of_the_run(line) if not name.startswith(("held_out_reward", "eval/"))}
        for line in found
    ]


@pytest.fixture(scope="module")
def careless(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The opposite task: sums with a carry, whose answers always forget it."""
    folder = tmp_path_factory.mktemp("careless")
    for name in ("train.jsonl", "held_out.jsonl"):
        prompts = [json.loads(line)["prompt"] for line in (task / name).read_text().splitlines()]
        pairs = [tuple(map(int, prompt.rstrip("=").split("+"))) for prompt in prompts]
        kept = [index for index, pair in enumerate(pairs) if has_carry(*pair)]
        prompts, pairs = [prompts[index] for index in kept], [pairs[index] for index in kept]
        answers = [str((first + second) % 10) + str(first // 10 + second // 10)[::-1] for first, second in pairs]
        rows = ({"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, answers, strict=True))
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def settings(task: Path, warm_model: Path) -> dict[str, Any]:
    return demo_settings(DemoConfig(steps=STEPS), task, warm_model, task.parent) | LORA


@pytest.fixture(scope="module")
def two_users(settings: dict[str, Any], careless: Path, tmp_path_factory: pytest.TempPathFactory) -> tenants.TenantsConfig:
    of_second = {"dataset": str(careless / "train.jsonl"), "eval_dataset": str(careless / "held_out.jsonl")}
    changes = {"run_dir": str(tmp_path_factory.mktemp("users")), "steps": 50, "lr_decay_style": "constant"}
    users = {"careful": {}, "careless": {**of_second, "lora": {"rank": 8, "alpha": 16.0}, "lr": 6e-3, "steps": 60}}
    return tenants.TenantsConfig(**{**settings, **changes, "users": users})


@pytest.fixture(scope="module")
def session(two_users: tenants.TenantsConfig) -> Iterator[Session]:
    with open_session(two_users) as opened:
        yield opened


@pytest.fixture(scope="module")
def learned(settings: dict[str, Any], session: Session, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunResult, Path]:
    """A run of GRPO with adapters, and its folder."""
    folder = tmp_path_factory.mktemp("learned") / "grpo"
    config = grpo.GRPOConfig(**{**settings, "run_dir": str(folder), "kl_coef": 1e-3, "lora.save_merged": True})
    return grpo.train(config, session), folder


@pytest.mark.long
@pytest.mark.shows("lora: GRPO with adapters of rank 16, served by vLLM, learns the demo task to at least 0.8")
def test_grpo_with_adapters_learns_the_task(learned: tuple[RunResult, Path], warm_model: Path) -> None:
    result, folder = learned
    assert result.held_out_reward_before is not None and 0.2 <= result.held_out_reward_before <= 0.6
    assert result.held_out_reward_after is not None and result.held_out_reward_after >= 0.8
    assert result.max_log_prob_gap <= 1e-5
    metrics = lines(folder / "metrics.jsonl")[1:]
    assert metrics[0]["kl"] == 0 < metrics[-1]["kl"]
    merged = AutoModelForCausalLM.from_pretrained(folder / "model_merged").state_dict()
    base = AutoModelForCausalLM.from_pretrained(warm_model).state_dict()
    adapter = read_peft_directory(folder / "model")
    for module, parts in adapter.parts.items():
        expected = base[f"{module}.weight"] + adapter.scales[module] * parts["B"] @ parts["A"]
        torch.testing.assert_close(merged[f"{module}.weight"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.shows(
    "lora: GRPO with adapters stopped and resumed draws the samples of an uninterrupted run, and learns the same"
)
def test_a_stopped_run_of_adapters_goes_on_as_if_it_had_not_been(
    learned: tuple[RunResult, Path], session: Session, tmp_path: Path
) -> None:
    options = json.loads((learned[1] / "config.json").read_text())
    changes = {"run_dir": str(tmp_path / "run"), "save_every": 2, "resume": "auto", "async_save": False}
    config = grpo.GRPOConfig(**{**options, **changes})
    for last in (3, 6):

        def on_step(step: int, metrics: dict[str, float], last: int = last) -> None:
            if step == last:
                raise StopEarlyError

        with pytest.raises(StopEarlyError):
            grpo.train(config, session, on_step)
    for name in ("metrics.jsonl", "samples.jsonl", "held_out.jsonl"):
        assert lines(tmp_path / "run" / name, 6) == lines(learned[1] / name, 6), name
    saved = sum(file.stat().st_size for file in (tmp_path / "run/checkpoints/step-6/policy").rglob("*"))
    weights = sum(file.stat().st_size for file in (learned[1] / "model").glob("*.safetensors"))
    assert saved < 4 * weights, "the base is in no checkpoint"


@pytest.mark.long
@pytest.mark.shows(
    "lora: two users at once, with opposite tasks over one base, both learn, and each as it does alone, bit for bit"
)
def test_users_at_once_learn_as_each_does_alone(two_users: tenants.TenantsConfig, session: Session, tmp_path: Path) -> None:
    results = tenants.train(two_users, session)
    for name, result in results.items():
        assert result.held_out_reward_after is not None and result.held_out_reward_after >= 0.7, name
        # Of the samples: the most probable answer is careless before any training; it could only rise for one.
        rewards = [line["reward"] for line in lines(Path(two_users.run_dir) / name / "metrics.jsonl")[1:]]
        assert sum(rewards[-5:]) / 5 >= sum(rewards[:3]) / 3 + 0.1, name
        assert result.max_log_prob_gap <= 1e-5
    alone = two_users.replace(run_dir=str(tmp_path), steps=6, users={"careful": {}})
    tenants.train(alone, session)
    name = "careless"
    tenants.train(two_users.replace(run_dir=str(tmp_path), users={name: {**two_users.users[name], "steps": 6}}), session)
    for name in two_users.users:
        for file in ("metrics.jsonl", "samples.jsonl"):
            assert lines(tmp_path / name / file, 6) == lines(Path(two_users.run_dir) / name / file, 6), (name, file)
    assert (Path(two_users.run_dir) / "report.html").exists()
    assert "careful" in tenants.table(two_users, results)
    assert not session.rollout.adapters  # type: ignore[union-attr]


@pytest.mark.long
@pytest.mark.shows("lora: PPO trains actor and critic as two tenants of one base, which is the reference")
def test_ppo_trains_actor_and_critic_on_one_base(settings: dict[str, Any], session: Session, tmp_path: Path) -> None:
    changes = {"run_dir": str(tmp_path / "ppo"), "steps": 8, "critic_lr": 3e-3, "kl_coef": 1e-3}
    ppo.train(ppo.PPOConfig(**{**settings, **changes}), session)
    metrics = lines(tmp_path / "ppo" / "metrics.jsonl")[1:]
    assert metrics[-1]["reward"] > metrics[0]["reward"]
    assert metrics[-1]["value_loss"] < metrics[0]["value_loss"]
    assert metrics[0]["kl"] == 0 < metrics[-1]["kl"]
    for name in ("model", "critic"):
        assert (tmp_path / "ppo" / name / "adapter_config.json").exists()


@pytest.mark.long
@pytest.mark.shows("lora: merged weights are pushed where engines serve no adapters, and sample as the adapter does")
def test_merged_pushes_train_as_adapters_do(
    learned: tuple[RunResult, Path], demo_session: Session, settings: dict[str, Any], tmp_path: Path
) -> None:
    changes = {"run_dir": str(tmp_path / "run"), "engines": 2, "kl_coef": 1e-3}
    config = grpo.GRPOConfig(**settings | changes)
    assert config.lora.push == "auto"

    def on_step(step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            raise StopEarlyError

    with pytest.raises(StopEarlyError):
        grpo.train(config, demo_session, on_step)
    mine, of_adapters = lines(tmp_path / "run" / "metrics.jsonl")[1:], lines(learned[1] / "metrics.jsonl", 2)[1:]
    assert [line["reward"] for line in mine] == pytest.approx([line["reward"] for line in of_adapters], abs=0.02)
    assert all(line["log_prob_gap"] <= 1e-5 for line in mine)


def test_sft_trains_an_adapter(task: Path, demo_session: Session, tmp_path: Path) -> None:
    options = {"model": str(task / "model"), "dataset": str(task / "train.jsonl"), "run_dir": str(tmp_path / "sft")}
    config = sft.SFTConfig(**options, **{"lora.rank": 16, "lr": 1e-2, "steps": 12, "dtype": "float32"})
    path = sft.train(config, demo_session)
    metrics = lines(tmp_path / "sft" / "metrics.jsonl")
    assert metrics[-1]["nll"] < metrics[0]["nll"]
    assert read_peft_directory(path).parts
