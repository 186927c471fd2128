"""The overrides of examples/verl are ones that verl and our engine take, for a CPU and for GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from examples.verl import grpo, ppo, sft
from examples.verl.options import VerlOptions
from examples.verl.task import write_verl_task
from rl_backend.contracts import ConfigError

FILES = {"train_files": "train.parquet", "val_files": "test.parquet"}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_verl_task(folder)
    return folder


def composed(name: str, overrides: list[str]) -> Any:
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(name, overrides=overrides)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("backend", ["native", "bridge"])
def test_verl_and_our_engine_take_the_overrides_of_sft(task: Path, device: Any, backend: Any) -> None:
    from verl.utils.config import omega_conf_to_dataclass

    from adapters.verl.settings import engine_settings

    options = sft.SFTOptions(model=str(task / "model"), **FILES, device=device, backend=backend, tp=2)
    config = composed("sft_trainer_engine", sft.overrides(options, None))
    parts = [omega_conf_to_dataclass(each) for each in (config.model, config.engine, config.optim, config.checkpoint)]
    runtime = engine_settings(*parts, model_type="language_model").runtime
    assert (runtime.backend, runtime.backend_cfg.parallel.tp) == (backend, 2)
    assert runtime.backend_cfg.param_dtype == ("float32" if device == "cpu" else "bfloat16")


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize(("script", "options"), [(grpo, grpo.GRPOOptions), (ppo, ppo.PPOOptions)])
def test_verl_and_our_engine_take_the_overrides_of_rl(task: Path, device: Any, script: Any, options: Any) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    from adapters.verl.settings import engine_settings

    given = options(model=str(task / "model"), **FILES, device=device, backend="bridge", ranks=4, tp=2, rollout_tp=2)
    config = composed("ppo_trainer", script.overrides(given, None))
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    assert need_critic(config) is (script is ppo)
    assert need_reference_policy(config) is (script is grpo)
    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    settings = engine_settings(model, actor.engine, actor.optim, actor.checkpoint, model_type="language_model")
    assert settings.runtime.backend == "bridge"
    if script is ppo:
        critic = omega_conf_to_dataclass(config.critic)
        settings = engine_settings(critic.model, critic.engine, critic.optim, critic.checkpoint, model_type="value_model")
        assert settings.head == "values"


def test_files_without_a_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"missing: \['model'\]"):
        _ = VerlOptions(run_dir="run", **FILES).files_of_task


def test_sft_on_several_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match="starts the ranks of one node"):
        sft.SFTOptions(nodes=2)


def test_the_demos_task_is_in_verls_files(task: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    conversation = pyarrow.parquet.read_table(task / "demonstrations.parquet").to_pylist()[0]["messages"]
    prompt, whole = (
        tokenizer.apply_chat_template(messages, return_dict=False) for messages in (conversation[:1], conversation)
    )
    assert whole == [*prompt, *tokenizer.encode(conversation[1]["content"]), tokenizer.eos_token_id]
    rows = pyarrow.parquet.read_table(task / "train.parquet").to_pylist()
    lines = [json.loads(line) for line in (task / "train.jsonl").read_text().splitlines()]
    assert [(row["prompt"][0]["content"], row["reward_model"]["ground_truth"]) for row in rows] == [
        (line["prompt"], line["answer"]) for line in lines
    ]
