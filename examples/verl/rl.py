"""GRPO, or PPO with a critic, by verl's own trainer, ``verl.trainer.main_ppo``, on our engine, with vLLM.

    python -m examples.verl.rl                                    # GRPO, on the demo's model and task
    python -m examples.verl.rl --algorithm ppo --model Qwen/Qwen3-4B --train-files gsm8k/train.parquet \\
        --val-files gsm8k/test.parquet --ranks 8 --batch-size 256 --samples-per-prompt 1 --tp 2 --rollout-tp 2

The command that it runs is printed, to be copied.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from actors.run.command_line import run_command
from actors.train.model import RouterReplayMode
from examples.demo import task as demo_task
from examples.verl import sft
from examples.verl.options import VerlOptions
from rl_backend.contracts import ConfigError, HasEffect

_GRPO = HasEffect(lambda options: options.algorithm == "grpo", "only algorithm='grpo' has a KL in its loss here")
_PPO = HasEffect(lambda options: options.algorithm == "ppo", "only algorithm='ppo' has a critic")


class RLOptions(VerlOptions):
    """Options of a run. A row of the files has ``prompt``, ``data_source`` and ``reward_model.ground_truth``."""

    algorithm: Literal["grpo", "ppo"] = Field(default="grpo", description="compares responses to a prompt, or has a critic")
    run_dir: str = Field(default="", description="folder for metrics.jsonl and checkpoints; none: runs/verl_<algorithm>")
    reward: str | None = Field(default=None, description="FILE.py with compute_score; none: verl's own for the data_source")
    batch_size: int = Field(default=32, ge=1, description="prompts in each step")
    samples_per_prompt: int = Field(default=8, ge=1, description="responses to each prompt")
    updates_per_step: int = Field(default=1, ge=1, description="optimizer steps in each training step")
    max_prompt_tokens: int = Field(default=512, ge=1, description="longest prompt")
    max_response_tokens: int = Field(default=1024, ge=1, description="longest response")
    max_tokens_per_rank: int = Field(default=16384, ge=1, description="most tokens of a micro-batch")
    nodes: int = Field(default=1, ge=1, description="nodes, of `ranks` ranks each")
    lr: float = Field(default=1e-6, gt=0, description="learning rate")
    lr_warmup_steps: int = Field(default=0, ge=0, description="steps up to it")
    kl_coef: Annotated[float, _GRPO] = Field(default=1e-3, ge=0, description="weight of the KL to the initial policy")
    critic_lr: Annotated[float, _PPO] = Field(default=1e-5, gt=0, description="learning rate of the critic")
    critic_warmup: Annotated[int, _PPO] = Field(default=0, ge=0, description="first steps, which train the critic alone")
    rollout_tp: int = Field(default=1, ge=1, description="tensor-parallel ranks of vLLM")
    router_replay: RouterReplayMode = Field(
        default="off", description="for mixtures of experts: R2, routes of the old policy's pass; R3, routes of vLLM"
    )
    eval_every: int = Field(default=-1, description="steps between evaluations; -1: before the first and after the last")

    @model_validator(mode="before")
    @classmethod
    def _name_run_dir(cls, given: Any) -> Any:
        # GRPO and PPO each have a folder, because verl resumes from any checkpoint that it finds.
        return {**given, "run_dir": given.get("run_dir") or f"runs/verl_{given.get('algorithm', 'grpo')}"}

    @model_validator(mode="after")
    def _check(self) -> Self:
        wrong = {}
        if self.batch_size % self.updates_per_step:
            wrong["updates_per_step"] = f"must divide batch_size={self.batch_size}"
        # The engine refuses it too, but only after the minutes of a warm start.
        if self.router_replay != "off" and self.model is None and self.demo_model not in demo_task.MIXTURES:
            dense = self.demo_model
            wrong["router_replay"] = f"the demo's {dense} is dense and routes nothing; use {dense}_moe"
        ConfigError.refuse_all([(f"RLOptions.{field}", getattr(self, field), wrong[field]) for field in wrong])
        return self


def train(options: RLOptions) -> Path:
    task, options = demo_options(options)
    return options.run(["-m", "verl.trainer.main_ppo"], overrides(options, task))


def demo_options(options: RLOptions) -> tuple[Path | None, RLOptions]:
    """The demo's task, with what suits it in place of defaults; its model is warmed up by verl's SFT trainer."""
    task = options.files_of_task
    if task is None:
        return None, options
    suited: dict[str, Any] = {
        "max_prompt_tokens": 8,
        "max_response_tokens": 8,
        "lr": 3e-4,
        "lr_warmup_steps": 5,
        "updates_per_step": 2,
    }
    suited |= {"reward": demo_task.__file__, **({"critic_lr": 1e-3} if options.algorithm == "ppo" else {})}
    options = RLOptions(**{**suited, **options.model_dump(exclude_unset=True)})
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
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
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
        f"{rollout}.max_model_len={options.max_prompt_tokens + options.max_response_tokens}",
        *([f"reward.custom_reward_function.path={Path(options.reward).resolve()}"] if options.reward else []),
        *options.trainer(),
        f"trainer.nnodes={options.nodes}",
        f"trainer.test_freq={options.eval_every if options.eval_every > 0 else options.steps}",
        *(_replay(options, actor, rollout) if options.router_replay != "off" else []),
        *(_on_cpu(options, rollout) if options.on_cpu else []),
        *(_critic(options) if options.algorithm == "ppo" else _grpo(options, actor)),
    ]


def _grpo(options: RLOptions, actor: str) -> list[str]:
    return [
        "algorithm.adv_estimator=grpo",
        *options.engine("actor_rollout_ref.ref.megatron"),
        f"{actor}.use_kl_loss={options.kl_coef > 0}",
        f"{actor}.kl_loss_coef={options.kl_coef}",
    ]


def _critic(options: RLOptions) -> list[str]:
    return [
        "algorithm.adv_estimator=gae",
        *options.engine("critic.megatron"),
        f"critic.model.path={options.model}",
        f"critic.optim.lr={options.critic_lr}",
        f"critic.ppo_max_token_len_per_gpu={options.max_tokens_per_rank}",
        f"trainer.critic_warmup={options.critic_warmup}",
    ]


def _replay(options: RLOptions, actor: str, rollout: str) -> list[str]:
    return [
        f"{actor}.megatron.router_replay.mode={options.router_replay}",
        f"{rollout}.enable_rollout_routing_replay={options.router_replay == 'R3'}",
    ]


def _on_cpu(options: RLOptions, rollout: str) -> list[str]:
    return [
        "trainer.device=cpu",
        f"{rollout}.dtype=float32",
        # Graphs, and the sleep of engines that gives memory to training, need a GPU.
        f"{rollout}.enforce_eager=True",
        f"{rollout}.free_cache_engine=False",
        f"+{rollout}.enable_sleep_mode=False",
        f"{rollout}.enable_chunked_prefill=False",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=256",
        # One helper process of each kind: more would take the cores that compute.
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


def main(options: RLOptions) -> None:
    print(f"metrics: {train(options)}")


if __name__ == "__main__":
    run_command(main, RLOptions, "GRPO, or PPO with a critic, by verl's trainer.")
