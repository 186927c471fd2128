"""verl's ``main_ppo``, unedited, on its default V1 trainer with vLLM: GRPO with a reference, and PPO with a critic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

from examples.verl.options import write_verl_task
from examples.verl.rl import RLOptions, train
from tests.support import verl_reward
from tests.support.verl_runs import Metrics, files_of, run_trainer

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.accelerator.is_available(), reason="for verl's CPU platform; this machine has an accelerator"),
]

QUICK = "trainer.val_before_train=False trainer.test_freq=-1"
LORA = "actor_rollout_ref.model.lora.rank=8 actor_rollout_ref.model.lora.alpha=16"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    task = tmp_path_factory.mktemp("verl_task")
    write_verl_task(task)
    return {
        **files_of(task, "train", "held_out"),
        "reward": verl_reward.__file__,
        "steps": 2,
        "batch_size": 8,
        "samples_per_prompt": 4,
        "max_prompt_tokens": 8,
        "max_response_tokens": 8,
        "lr": 1e-3,
    }


def check_steps(found: Metrics) -> None:
    assert set(found) == {1, 2}
    for metrics in found.values():
        assert metrics["actor/grad_norm"] > 0
        # vLLM's log-probs are the trainer's: verl's own sync brought the weights of the step before.
        assert metrics["training/rollout_probs_diff_max"] < 1e-4


def check_kl(found: Metrics) -> None:
    assert found[1]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert found[2]["actor/kl_loss"] > 1e-6


def check_critic(found: Metrics) -> None:
    for metrics in found.values():
        assert metrics["critic/grad_norm"] > 0
        assert metrics["critic/vf_loss"] >= 0


@pytest.mark.long
@pytest.mark.shows(
    "verl: main_ppo trains PPO with a native actor and reference and a critic on the bridge, and writes checkpoints"
)
def test_ppo_trains_on_both_runtimes_and_leaves_a_checkpoint(options: dict[str, Any], tmp_path: Path) -> None:
    changes = [
        QUICK,
        "++critic.megatron.backend=bridge",
        *RLOptions(**options, algorithm="ppo", run_dir=str(tmp_path), backend="native").engine(
            "actor_rollout_ref.ref.megatron"
        ),
        "actor_rollout_ref.actor.use_kl_loss=True",
        *(f"{role}.checkpoint.async_save=True" for role in ("actor_rollout_ref.actor", "critic")),
        # The data end before the steps: verl's trainer does not know that the save of step 2 is the last.
        *("data.train_max_samples=16", "trainer.total_epochs=1", "trainer.total_training_steps=100"),
    ]
    given = RLOptions(
        **options,
        algorithm="ppo",
        run_dir=str(tmp_path),
        backend="native",
        critic_lr=1e-3,
        save_every=2,
        overrides=" ".join(changes),
    )
    found = run_trainer(train, given)
    check_steps(found)
    check_kl(found)
    check_critic(found)
    for role in ("actor", "critic"):
        assert (tmp_path / f"checkpoints/global_step_2/{role}/training_state/manifest.json").is_file()
    assert (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "2"


@pytest.mark.long
@pytest.mark.shows("verl: main_ppo trains GRPO with a KL reference and vLLM, and writes a checkpoint")
def test_grpo_trains_and_leaves_a_checkpoint(options: dict[str, Any], tmp_path: Path) -> None:
    given = RLOptions(**options, run_dir=str(tmp_path), backend="native", save_every=2, overrides=QUICK)
    found = run_trainer(train, given)
    check_steps(found)
    check_kl(found)
    assert (tmp_path / "checkpoints/global_step_2/actor/training_state/manifest.json").is_file()


@pytest.mark.long
@pytest.mark.shows("verl: main_ppo trains a LoRA adapter with a KL reference, and vLLM serves it, apart or merged")
@pytest.mark.parametrize("merge", [False, True])
def test_grpo_trains_an_adapter_that_vllm_serves(options: dict[str, Any], tmp_path: Path, merge: bool) -> None:
    changes = f"{QUICK} {LORA} actor_rollout_ref.model.lora.merge={merge}"
    given = RLOptions(**{**options, "lr": 1e-2}, run_dir=str(tmp_path), backend="native", save_every=2, overrides=changes)
    found = run_trainer(train, given)
    check_steps(found)
    # The reference is the actor without its adapter.
    check_kl(found)
    actor = tmp_path / "checkpoints/global_step_2/actor"
    assert sorted(path.name for path in actor.iterdir()) == ["lora_adapter", "training_state"]


@pytest.mark.long
@pytest.mark.shows("verl: main_ppo trains PPO with LoRA for the actor and for the critic, on both runtimes")
def test_ppo_trains_adapters_of_actor_and_critic(options: dict[str, Any], tmp_path: Path) -> None:
    # The reference is the actor without its adapter; the critic keeps its own.
    critic = "critic.model.lora.rank=4 ++critic.megatron.backend=bridge"
    changes = f"{QUICK} {LORA} {critic} actor_rollout_ref.actor.use_kl_loss=True"
    given = RLOptions(
        **{**options, "lr": 1e-2},
        algorithm="ppo",
        run_dir=str(tmp_path),
        backend="native",
        critic_lr=1e-2,
        save_every=2,
        overrides=changes,
    )
    found = run_trainer(train, given)
    check_steps(found)
    check_kl(found)
    check_critic(found)
    assert found[2]["critic/values/max"] > found[2]["critic/values/min"]
    for role in ("actor", "critic"):
        assert (tmp_path / f"checkpoints/global_step_2/{role}/lora_adapter/adapter_config.json").is_file()


WHOLE = " ".join(f"+actor_rollout_ref.{role}.megatron.backend_options.share_prefixes=off" for role in ("actor", "ref"))
GROUPER = "actor_rollout_ref.actor.use_prefix_grouper=True +actor_rollout_ref.ref.megatron.use_prefix_grouper=True"
COMPARED = ("actor/grad_norm", "actor/loss", "actor/kl_loss", "actor/entropy")


@pytest.mark.long
@pytest.mark.timeout(1200)  # two runs
@pytest.mark.shows("verl: main_ppo with actor.use_prefix_grouper takes the steps of whole sequences, on the same samples")
def test_grpo_with_groups_computed_once_takes_the_steps_of_whole_sequences(options: dict[str, Any], tmp_path: Path) -> None:
    # Prompts of 46 tokens, of which all have the first 40.
    rows = pyarrow.parquet.read_table(options["train_files"]).to_pylist()
    for row in rows:
        row["prompt"][0]["content"] = "10+20=03" * 5 + row["prompt"][0]["content"]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    changed = {"train_files": str(tmp_path / "train.parquet"), "max_prompt_tokens": 48, "max_tokens_per_rank": 500}
    # verl's sampling has no seed for a request: the second run is given the samples of the first.
    samples = f"skip.rollout_tq.enable=True skip.rollout_tq.dump_dir={tmp_path / 'samples'} skip.rollout_tq.steps=[1,2]"
    runs = []
    for name, how in (("whole", WHOLE), ("groups", GROUPER)):
        given = {"run_dir": str(tmp_path / name), "kl_coef": 0.1, "overrides": f"{QUICK} {samples} {how}"}
        runs.append(run_trainer(train, RLOptions(**{**options, **changed}, backend="native", **given)))
        check_kl(runs[-1])
    whole, groups = runs
    for step in (1, 2):
        for metric in COMPARED:
            assert groups[step][metric] == pytest.approx(whole[step][metric], rel=1e-4, abs=1e-6), (step, metric)
        assert "actor/shared_prefixes/computed_fraction" not in whole[step]
        assert groups[step]["actor/shared_prefixes/computed_fraction"] < 0.4


@pytest.mark.long
@pytest.mark.shows("verl: main_ppo trains PPO with a critic on the bridge")
def test_ppo_trains_actor_and_critic(options: dict[str, Any], tmp_path: Path) -> None:
    given = RLOptions(**options, algorithm="ppo", run_dir=str(tmp_path), backend="bridge", critic_lr=1e-3, overrides=QUICK)
    found = run_trainer(train, given)
    check_steps(found)
    check_critic(found)
