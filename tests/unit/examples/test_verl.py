"""The overrides of examples/verl are ones that verl and our engine take, for a CPU and for GPUs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from examples.demo.task import layers_for
from examples.verl import sft
from examples.verl.options import VerlOptions, write_verl_task
from examples.verl.rl import RLOptions, demo_options, overrides
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

    from adapters.verl.options.settings import engine_settings

    options = sft.SFTOptions(model=str(task / "model"), **FILES, device=device, backend=backend, tp=2)
    config = composed("sft_trainer_engine", sft.overrides(options, None))
    parts = [omega_conf_to_dataclass(each) for each in (config.model, config.engine, config.optim, config.checkpoint)]
    runtime = engine_settings(*parts, model_type="language_model").runtime
    assert (runtime.backend, runtime.backend_cfg.parallel.tp) == (backend, 2)
    assert runtime.backend_cfg.param_dtype == ("float32" if device == "cpu" else "bfloat16")


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_verl_and_our_engine_take_the_overrides_of_rl(task: Path, device: Any, algorithm: Any) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    from adapters.verl.options.settings import engine_settings

    layout = {"backend": "bridge", "ranks": 4, "tp": 2, "rollout_tp": 2}
    given = RLOptions(algorithm=algorithm, model=str(task / "model"), **FILES, device=device, **layout)
    config = composed("ppo_trainer", overrides(given, None))
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    assert need_critic(config) is (algorithm == "ppo")
    assert need_reference_policy(config) is (algorithm == "grpo")
    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    settings = engine_settings(model, actor.engine, actor.optim, actor.checkpoint, model_type="language_model")
    assert settings.runtime.backend == "bridge"
    if algorithm == "ppo":
        critic = omega_conf_to_dataclass(config.critic)
        settings = engine_settings(critic.model, critic.engine, critic.optim, critic.checkpoint, model_type="value_model")
        assert settings.head == "values"


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_verl_and_our_engine_take_the_overrides_of_router_replay(tmp_path: Path, mode: Any) -> None:
    from verl.utils.config import omega_conf_to_dataclass

    from adapters.verl.options.settings import engine_settings

    write_verl_task(tmp_path, model="qwen3_moe")
    given = RLOptions(model=str(tmp_path / "model"), **FILES, router_replay=mode, batch_size=8, updates_per_step=2)
    config = composed("ppo_trainer", overrides(given, None))
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    settings = engine_settings(model, actor.engine, actor.optim, actor.checkpoint, model_type="language_model")
    assert settings.router_replay == mode
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay is (mode == "R3")
    assert config.actor_rollout_ref.ref.megatron.router_replay.mode == "disabled"
    assert config.data.train_batch_size == 2 * config.actor_rollout_ref.actor.ppo_mini_batch_size == 8


def test_router_replay_on_the_demos_dense_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="dense and routes nothing; use qwen3_moe"):
        RLOptions(router_replay="R3")
    assert any("replay" in each for each in overrides(RLOptions(router_replay="R3", demo_model="qwen3_moe"), None))


def test_updates_that_do_not_divide_a_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"RLOptions\.updates_per_step=3.*must divide batch_size=32"):
        RLOptions(updates_per_step=3)


def test_files_here_are_named_so_that_other_nodes_find_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.parquet").touch()
    options = VerlOptions(run_dir="run", model="Qwen/Qwen3-4B", train_files="here.parquet", val_files="s3://there.parquet")
    assert (options.model, options.val_files) == ("Qwen/Qwen3-4B", "s3://there.parquet")
    assert options.train_files == str(tmp_path / "here.parquet")


def test_files_without_a_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"missing: \['model'\]"):
        _ = VerlOptions(run_dir="run", **FILES).files_of_task


def test_each_algorithm_has_a_folder_and_refuses_the_options_of_the_other() -> None:
    assert [RLOptions(algorithm=each).run_dir for each in ("grpo", "ppo")] == ["runs/verl_grpo", "runs/verl_ppo"]
    with pytest.raises(ConfigError, match=r"critic_lr=0\.1: only algorithm='ppo' has a critic"):
        RLOptions(critic_lr=0.1)
    with pytest.raises(ConfigError, match=r"kl_coef=0\.1: only algorithm='grpo' has a KL"):
        RLOptions(algorithm="ppo", kl_coef=0.1)


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


def test_the_demos_model_is_refused_beside_a_model_of_ones_own() -> None:
    with pytest.raises(ConfigError, match=r"RLOptions\.demo_model='qwen3_moe': model is trained instead"):
        RLOptions(model="mine", **FILES, demo_model="qwen3_moe")


def test_the_demos_model_has_layers_for_every_stage_of_a_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def num_layers(model: Path) -> int:
        found: int = json.loads((model / "config.json").read_text())["num_hidden_layers"]
        return found

    assert [layers_for(stages) for stages in (1, 2, 3, 4, 8)] == [3, 4, 3, 4, 8]
    options = sft.SFTOptions(run_dir=str(tmp_path / "sft"), backend="bridge", pp=2, ranks=2)
    folder = options.files_of_task
    assert folder is not None and num_layers(folder / "model") == 4
    write_verl_task(tmp_path / "chosen", num_layers=5)
    assert num_layers(tmp_path / "chosen" / "model") == 5
    with pytest.raises(ConfigError, match=r"SFTOptions\.demo_layers=5: model is trained instead"):
        sft.SFTOptions(model="mine", **FILES, demo_layers=5)

    def train(warm_up: sft.SFTOptions) -> Path:
        trained = sft.trained_model(warm_up)
        found = warm_up.files_of_task
        assert found is not None
        shutil.copytree(found / "model", trained)
        return trained

    monkeypatch.setattr(sft, "train", train)
    task, warm = demo_options(RLOptions(run_dir=str(tmp_path / "grpo"), backend="bridge", pp=2, ranks=2))
    assert task is not None and warm.model is not None
    assert num_layers(task / "model") == num_layers(Path(warm.model)) == 4
