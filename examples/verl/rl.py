"""Options that GRPO and PPO share, and verl's overrides for actor, reference and vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from actors.train.model import RouterReplayMode
from examples.demo import task as demo_task
from examples.verl import sft
from examples.verl.options import VerlOptions
from rl_backend.contracts import ConfigError


class RLOptions(VerlOptions):
    """Options of a run. A row of the files has ``prompt``, ``data_source`` and ``reward_model.ground_truth``."""

    reward: str | None = Field(default=None, description="FILE.py with compute_score; none: verl's own for the data_source")
    batch_size: int = Field(default=32, ge=1, description="prompts in each step")
    samples_per_prompt: int = Field(default=8, ge=1, description="responses to each prompt")
    updates_per_step: int = Field(default=1, ge=1, description="optimizer steps in each training step")
    max_prompt_tokens: int = Field(default=512, ge=1, description="longest prompt")
    max_response_tokens: int = Field(default=1024, ge=1, description="longest response")
    max_tokens_per_rank: int = Field(default=16384, ge=1, description="most tokens of a micro-batch")
    lr: float = Field(default=1e-6, gt=0, description="learning rate")
    lr_warmup_steps: int = Field(default=0, ge=0, description="steps up to it")
    rollout_tp: int = Field(default=1, ge=1, description="tensor-parallel ranks of vLLM")
    router_replay: RouterReplayMode = Field(
        default="off", description="for mixtures of experts: R2, routes of the old policy's pass; R3, routes of vLLM"
    )
    eval_every: int = Field(default=-1, description="steps between evaluations; -1: before the first and after the last")

    @model_validator(mode="after")
    def _check(self) -> Self:
        name = type(self).__name__
        if self.batch_size % self.updates_per_step:
            raise ConfigError.of(
                f"{name}.updates_per_step", self.updates_per_step, f"must divide batch_size={self.batch_size}"
            )
        if self.router_replay != "off" and self.model is None and self.demo_model not in demo_task.MIXTURES:
            raise ConfigError.of(
                f"{name}.router_replay",
                self.router_replay,
                f"the demo's {self.demo_model} is dense and routes nothing; use {self.demo_model}_moe",
            )
        return self

    @property
    def replay(self) -> list[str]:
        """verl's overrides for router replay."""
        if self.router_replay == "off":
            return []
        return [
            f"actor_rollout_ref.actor.megatron.router_replay.mode={self.router_replay}",
            f"actor_rollout_ref.rollout.enable_rollout_routing_replay={self.router_replay == 'R3'}",
        ]


def demo_options[O: RLOptions](options: O, **more: object) -> tuple[Path | None, O]:
    """The demo's task, with what suits it in place of defaults; its model is warmed up by verl's SFT trainer."""
    task = options.files_of_task
    if task is None:
        return None, options
    lengths = {"max_prompt_tokens": 8, "max_response_tokens": 8}
    rates = {"lr": 3e-4, "lr_warmup_steps": 5, "updates_per_step": 2}
    chosen = {**lengths, **rates, "reward": demo_task.__file__, **more}
    given = {name: getattr(options, name) for name in options.model_fields_set}
    options = type(options)(**{**chosen, **given, "run_dir": options.run_dir})
    if options.model is None:
        warm_up = sft.SFTOptions(
            run_dir=f"{options.run_dir}/warm_start_{options.demo_model}_{options.layers}_layers",
            demo_model=options.demo_model,
            demo_layers=options.layers,
            backend=options.backend,
            device=options.device,
        )
        if not sft.trained_model(warm_up).exists():
            sft.train(warm_up)
        options = options.model_copy(update={"model": str(sft.trained_model(warm_up))})
    return task, options


def overrides(options: RLOptions, task: Path | None) -> list[str]:
    """verl's configuration without the algorithm, as overrides of its ``ppo_trainer.yaml``."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    tokens = options.max_prompt_tokens + options.max_response_tokens
    return [
        "model_engine=megatron",
        *options.engine(f"{actor}.megatron"),
        f"actor_rollout_ref.model.path={options.model}",
        f"data.train_files={options.train_files or (task and task / 'train.parquet')}",
        f"data.val_files={options.val_files or (task and task / 'held_out.parquet')}",
        f"data.train_batch_size={options.batch_size}",
        f"data.max_prompt_length={options.max_prompt_tokens}",
        f"data.max_response_length={options.max_response_tokens}",
        f"{actor}.ppo_mini_batch_size={options.batch_size // options.updates_per_step}",
        f"{actor}.use_dynamic_bsz=True",
        f"{actor}.ppo_max_token_len_per_gpu={options.max_tokens_per_rank}",
        f"{actor}.optim.lr={options.lr}",
        f"{actor}.optim.lr_warmup_steps={min(options.lr_warmup_steps, options.steps - 1)}",
        f"{rollout}.name=vllm",
        f"{rollout}.n={options.samples_per_prompt}",
        f"{rollout}.tensor_model_parallel_size={options.rollout_tp}",
        f"{rollout}.max_model_len={tokens}",
        *([f"reward.custom_reward_function.path={Path(options.reward).resolve()}"] if options.reward else []),
        f"trainer.total_training_steps={options.steps}",
        f"trainer.total_epochs={options.steps}",
        f"trainer.save_freq={options.save_every}",
        f"trainer.test_freq={options.eval_every if options.eval_every > 0 else options.steps}",
        f"trainer.default_local_dir={Path(options.run_dir).resolve() / 'checkpoints'}",
        "trainer.logger=[console,file]",
        f"trainer.nnodes={options.nodes}",
        f"trainer.n_gpus_per_node={options.ranks}",
        *options.replay,
        *(_on_cpu(options, rollout) if options.on_cpu else []),
    ]


def _on_cpu(options: RLOptions, rollout: str) -> list[str]:
    """Without sleep and graphs, which need a GPU, and with one helper process of each kind."""
    return [
        "trainer.device=cpu",
        f"{rollout}.dtype=float32",
        f"{rollout}.enforce_eager=True",
        f"{rollout}.free_cache_engine=False",
        f"+{rollout}.enable_sleep_mode=False",
        f"{rollout}.enable_chunked_prefill=False",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=256",
        f"{rollout}.agent.num_workers=1",
        "reward.num_workers=1",
        "data.dataloader_num_workers=0",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        # Processes take the place of GPUs, which Ray is told of.
        "+ray_kwargs.ray_init.address=local",
        f"+ray_kwargs.ray_init.num_gpus={options.ranks}",
        f"ray_kwargs.ray_init.num_cpus={8 + 8 * options.ranks}",
        "+ray_kwargs.ray_init.include_dashboard=False",
    ]
