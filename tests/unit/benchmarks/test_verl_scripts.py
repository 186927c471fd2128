"""The benchmark of verl's own scripts finds what they run, and makes it small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
from omegaconf import OmegaConf

from benchmarks.verl_script_commands import recorded_commands
from benchmarks.verl_script_roles import megatron_scripts, refusal
from benchmarks.verl_script_small import make_small
from benchmarks.verl_script_steps import problem_of
from tests.support.verl_configs import write_config

SCRIPTS = {
    "examples/a/run_ppo.sh": 'set -eu\nnvidia-smi\npython3 -m verl.trainer.main_ppo a="$HDFS_ROOT/b c" "$@"',
    "examples/b/run_sft.sh": "cd $HOME && git clone https://x.y/z/Repo && cd Repo\n"
    "torchrun --nproc-per-node=8 -m verl.trainer.sft_trainer engine=$BACKEND",
    "examples/c/run_job.sh": "ray job submit -- python3 -m verl.trainer.main_ppo x=1\npython3 -m verl.trainer.main_ppo x=2",
    "examples/d/run_broken.sh": "set -eu\npython3 -m verl.trainer.main_ppo $NOBODY_SETS_THIS",
    "examples/e/other.sh": "python3 -m verl.other.module x=1",
    "tests/special_e2e/run_device.sh": "device=$(python3 - <<'EOF'\nfrom verl.utils.device import get_device_name\nEOF\n)\n"
    '[ "$device" = cuda ] && python3 -m verl.trainer.main_ppo d=1',
    "recipe/not_looked_at.sh": "python3 -m verl.trainer.main_ppo x=1",
}


def test_commands_are_those_that_the_scripts_run(tmp_path: Path) -> None:
    for name, text in SCRIPTS.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    commands, ended_early = recorded_commands(tmp_path)
    assert [(each.script, each.trainer.rpartition(".")[2], *each.overrides) for each in commands] == [
        ("examples/a/run_ppo.sh", "main_ppo", "a=/data/b c"),
        ("examples/b/run_sft.sh", "sft_trainer", "engine=megatron"),
        ("examples/c/run_job.sh", "main_ppo", "x=1"),
        ("tests/special_e2e/run_device.sh", "main_ppo", "d=1"),
    ]
    assert (
        list(ended_early) == ["examples/d/run_broken.sh"] and "NOBODY_SETS_THIS" in ended_early["examples/d/run_broken.sh"]
    )
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {Path(name).name for name in SCRIPTS}
    assert not list(tmp_path.rglob("Repo"))


@pytest.fixture
def scripts(tmp_path: Path) -> tuple[list[Any], dict[str, str]]:
    """Composed with the installed verl's own yaml in the place of a release's, to which a field is added."""
    import verl

    release = tmp_path / "verl/trainer"
    release.mkdir(parents=True)
    (release / "config").symlink_to(Path(verl.__file__).parent / "trainer/config")
    megatron = "actor_rollout_ref.actor.megatron"
    actor = "model_engine=megatron actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 algorithm.adv_estimator=grpo"
    texts = {
        "megatron": f"{actor} {megatron}.pipeline_model_parallel_size=8 "
        f"+{megatron}.override_transformer_config.num_layers_in_first_pipeline_stage=3",
        "lora": f"{actor} actor_rollout_ref.model.lora.rank=8 actor_rollout_ref.model.lora.type=vlm_lora",
        "fsdp": "model_engine=dp",
        "wrong": "model_engine=megatron nothing.like.this=1",
    }
    (tmp_path / "examples").mkdir()
    for name, overrides in texts.items():
        (tmp_path / "examples" / f"{name}.sh").write_text(f"python3 -m verl.trainer.main_ppo {overrides}")
    return megatron_scripts(tmp_path, recorded_commands(tmp_path)[0])


def test_scripts_whose_roles_are_megatrons_are_switched_and_tried(
    scripts: tuple[list[Any], dict[str, str]], tmp_path: Path
) -> None:
    found, broken = scripts
    assert [Path(each.command.script).stem for each in found] == ["lora", "megatron"]
    assert [Path(name).stem for name in broken] == ["wrong"]
    model = write_config("qwen3", "Qwen3ForCausalLM", tmp_path / "model", num_hidden_layers=24)
    path = f"actor_rollout_ref.model.path={model}"
    no_tokenizer = "+actor_rollout_ref.model.load_tokenizer=False"
    lora, megatron = (refusal(each.switched("native", path, no_tokenizer)) for each in found)
    assert lora is not None and "vlm_lora" in lora and megatron is None


def test_a_script_is_made_small_and_keeps_what_it_divides_by(
    scripts: tuple[list[Any], dict[str, str]], tmp_path: Path
) -> None:
    config = next(each for each in scripts[0] if "lora" not in each.command.script).config
    assert make_small(config, tmp_path / "model", tmp_path, tmp_path) == "pp"
    engine = config.actor_rollout_ref.actor.megatron
    assert engine.pipeline_model_parallel_size == 2
    assert engine.override_transformer_config.num_layers_in_first_pipeline_stage == 1
    assert config.actor_rollout_ref.ref.megatron.pipeline_model_parallel_size == 2
    assert OmegaConf.select(config, "trainer.n_gpus_per_node") == 2


def test_a_step_counts_that_has_a_finite_loss_and_a_gradient() -> None:
    assert problem_of({"actor/loss": 0.0, "actor/grad_norm": 0.5}) is None
    for wrong in (
        {},
        {"actor/loss": 1.0},
        {"actor/loss": 1.0, "actor/grad_norm": 0.0},
        {"a/loss": float("nan"), "a/grad_norm": 1.0},
    ):
        assert "no step was trained" in str(problem_of(wrong))
