"""A composed configuration of verl's with models, data, lengths, nodes and parallel sizes made small."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

RANKS, LAYERS, PROMPTS, SAMPLES = 2, 4, 4, 2
_MOST_TOKENS = 256
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}
_STAGES: Mapping[str, Any] = {
    "num_layers_in_first_pipeline_stage": 1,
    "num_layers_in_last_pipeline_stage": LAYERS - 1,
    "pipeline_model_parallel_layout": "Et|tttL",
}


def make_small(config: DictConfig, model: Path, task: Path, folder: Path) -> str:
    """Changes ``config`` for a run on ``RANKS`` ranks; returns the dimension with two ranks.

    Args:
        model: a directory of ``LAYERS`` layers, for every role.
        task: folder of the demo's parquet files, for SFT.
        folder: for what is saved.
    """
    if "actor_rollout_ref" in config:
        return _rl(config, model)
    _set(config, "model.path", str(model))
    _set(config, "data", {"train_files": str(task / "demonstrations.parquet"), "val_files": None, "train_max_samples": 16})
    _set(config, "data", {"train_batch_size": 8, "max_length": 64, "max_token_len_per_gpu": 128, "num_workers": 0})
    _set(config, "data", {"micro_batch_size_per_gpu": 2, "messages_key": "messages", "train_max_samples": 16})
    _set(config, "data.ignore_input_ids_mismatch", True)
    _set(config, "trainer", {"nnodes": 1, "n_gpus_per_node": RANKS, "device": "cpu", "total_epochs": 1})
    _set(config, "trainer", {"total_training_steps": 1, "save_freq": -1, "test_freq": -1, "logger": ["file"]})
    _set(config, "trainer", {"default_local_dir": str(folder / "checkpoints"), "resume_mode": "disable"})
    _set(config, "optim", {"total_training_steps": 100, "lr_warmup_steps": 0, "lr_warmup_steps_ratio": 0.0})
    return _layout(config.engine)


def _rl(config: DictConfig, model: Path) -> str:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    _set(config, "actor_rollout_ref.model.path", str(model))
    _set(config, "critic.model.path", str(model))
    _set(config, "data.train_batch_size", PROMPTS)
    _set(config, "trainer", {"nnodes": 1, "n_gpus_per_node": RANKS, "device": "cpu"})
    _set(rollout, "n", SAMPLES)
    batch = {"ppo_mini_batch_size": PROMPTS, "ppo_epochs": 1, "ppo_micro_batch_size": None}
    for role in (actor, rollout, config.actor_rollout_ref.ref, config.critic):
        # Profilers are of a machine: those of NPUs cannot be imported here.
        _set(role, "profiler", {"enable": False, "tool": "torch"})
    for role in (actor, config.critic):
        _set(role, "", {**batch, "ppo_micro_batch_size_per_gpu": 1, "ppo_max_token_len_per_gpu": _MOST_TOKENS})
        _set(role, "optim.total_training_steps", 100)
    _set(config.critic, "", {"ppo_infer_max_token_len_per_gpu": _MOST_TOKENS, "ppo_infer_micro_batch_size_per_gpu": 1})
    for role in (rollout, config.actor_rollout_ref.ref):
        sizes = {"log_prob_micro_batch_size": None, "log_prob_micro_batch_size_per_gpu": 1}
        _set(role, "", {**sizes, "log_prob_max_token_len_per_gpu": _MOST_TOKENS})
    kept = _layout(actor.megatron)
    for role in (config.actor_rollout_ref.ref, config.critic):
        for name in _SIZES.values():
            _set(role, f"megatron.{name}", actor.megatron[name])
        _set(role, "megatron.virtual_pipeline_model_parallel_size", actor.megatron.virtual_pipeline_model_parallel_size)
        _small_stages(role.megatron)
        etp = role.megatron.expert_tensor_parallel_size
        _set(role, "megatron.expert_tensor_parallel_size", etp and 1)
    for role in (actor, config.actor_rollout_ref.ref, config.critic):
        if role.megatron.use_dist_checkpointing:
            _set(role, "megatron.dist_checkpointing_path", str(model))
    return kept


def _layout(engine: DictConfig) -> str:
    """Two ranks for what the script divides by, stages first where it says more about them."""
    uneven = any(name in engine.override_transformer_config for name in _STAGES)
    order = ("pp", "ep", "cp", "tp") if uneven or engine.virtual_pipeline_model_parallel_size else ("cp", "ep", "pp", "tp")
    kept = next((name for name in order if engine[_SIZES[name]] > 1), "dp")
    for name, field in _SIZES.items():
        _set(engine, field, RANKS if name == kept else 1)
        if field in engine.override_transformer_config:
            _set(engine, f"override_transformer_config.{field}", engine[field])
    if engine.expert_tensor_parallel_size is not None:
        _set(engine, "expert_tensor_parallel_size", 1)
    if kept != "pp":
        _set(engine, "virtual_pipeline_model_parallel_size", None)
    _small_stages(engine)
    vpp = engine.virtual_pipeline_model_parallel_size
    return kept if vpp in (None, 1) else f"{kept}, vpp={vpp}"


def _small_stages(engine: DictConfig) -> None:
    for name, value in _STAGES.items():
        if engine.override_transformer_config.get(name) is not None:
            _set(engine, f"override_transformer_config.{name}", value)
    if engine[_SIZES["pp"]] == 1:
        with open_dict(engine):
            for name in [name for name in engine.override_transformer_config if "pipeline" in str(name)]:
                del engine.override_transformer_config[name]


def _set(config: DictConfig, path: str, value: Any) -> None:
    """Sets one value, or each of a dictionary at ``path``."""
    values = (
        {f"{path}.{name}".strip("."): each for name, each in value.items()} if isinstance(value, dict) else {path: value}
    )
    for name, each in values.items():
        OmegaConf.update(config, name, each, force_add=True)
