"""PPO with a critic on a local Hugging Face model: actor, critic and reference in Ray actors, rollouts in vLLM.

    python -m examples.ppo --model DIR --dataset train.jsonl --reward my_reward.py:compute_score --steps 200

The models are handles on one training group, or with ``--groups each`` on a group each, and then they work at the same
time. Every option is a field of ``PPOConfig``. With ``RAY_ADDRESS`` set it runs on that cluster, else on this machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from actors import Loss, RolloutGroup, TrainGroup, WeightSync
from actors.trace import TraceSource
from adapters.verl.reward import load_reward_function
from examples.common.clock import Clock
from examples.common.cluster import Share, ray_session, require_paths, share_cluster
from examples.common.collect import Collector
from examples.common.command_line import parse_config, run_command
from examples.common.models import Model
from examples.common.progress import print_start, print_step
from examples.common.prompts import endless_batches, load_prompts, load_tokenizer
from examples.common.result import RunResult
from examples.common.rl_config import RLConfig
from examples.common.run_folder import RunFolder, require_new_run
from examples.common.sample_stream import SampleStream
from examples.common.scoring import HeldOut, describe
from examples.common.sequences import to_sequences, with_field, with_packed_fields
from rl_backend import TokenSequence
from rl_backend.algorithm import (
    explained_variance,
    gae_advantages,
    kl_in_reward,
    kl_penalty,
    masked_whiten,
    token_rewards,
)
from rl_backend.contracts import ConfigError, RLBackendError, merge_metrics


class PPOConfig(RLConfig):
    """All options of a run."""

    run_dir: str = Field(default="runs/ppo", description="new folder for metrics, samples and the trained models")
    prompts_per_step: int = Field(default=256, ge=1, description="prompts sampled in each step")
    samples_per_prompt: int = Field(default=1, ge=1, description="responses per prompt")
    epochs: int = Field(
        default=1, ge=1, description="passes over a step's samples, each of updates_per_step optimizer steps"
    )
    groups: Literal["one", "each"] = Field(
        default="one", description="one training group for all models, or one of `ranks` ranks for each"
    )
    critic_model: str | None = Field(default=None, description="directory that the critic starts from; none: model")
    critic_lr: float = Field(default=1e-5, gt=0, description="peak learning rate of the critic")
    critic_warmup_steps: int = Field(default=0, ge=0, description="first steps, in which only the critic is trained")
    gamma: float = Field(default=1.0, ge=0, le=1, description="discount of later rewards")
    lam: float = Field(default=1.0, ge=0, le=1, description="lambda of generalised advantage estimation")
    clip_ratio_low: float = Field(default=0.2, ge=0, description="clip range of the policy ratio below 1")
    clip_ratio_high: float = Field(default=0.2, ge=0, description="clip range of the policy ratio above 1")
    cliprange_value: float | None = Field(default=0.5, gt=0, description="clip range of values; none: no clip")
    kl_coef: float = Field(default=0.0, ge=0, description="weight of the KL to the initial policy; 0 builds no reference")
    kl_place: Literal["reward", "loss"] = Field(default="reward", description="KL taken off the rewards, or in the loss")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.critic_warmup_steps >= self.steps:
            raise ConfigError.of(
                "PPOConfig.critic_warmup_steps", self.critic_warmup_steps, f"leaves none of steps={self.steps} to the actor"
            )
        self.actor_loss(), self.critic_loss()
        return self

    @property
    def optimizer_steps(self) -> int:
        return self.steps * self.updates_per_step * self.epochs

    @property
    def training_groups(self) -> int:
        return 1 if self.groups == "one" else 3 if self.kl_coef else 2

    def actor_loss(self) -> Loss:
        return Loss(
            "rl_backend.algorithm:grpo_loss",
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
            kl_coef=self.kl_coef if self.kl_place == "loss" else 0.0,
            **self.importance_options(),
        )

    def critic_loss(self) -> Loss:
        return Loss("rl_backend.algorithm:value_loss", cliprange_value=self.cliprange_value)


class Models(NamedTuple):
    """``reference`` is None without a KL."""

    actor: Model
    critic: Model
    reference: Model | None


def train(config: PPOConfig, on_step: Callable[[int, dict[str, float]], None] | None = None) -> RunResult:
    """Runs PPO and leaves the trained models in ``run_dir/model`` and ``run_dir/critic``."""
    started = time.perf_counter()
    require_new_run(config.run_dir)
    tokenizer = load_tokenizer(config.model)
    reward = load_reward_function(config.reward)
    prompts = load_prompts(config.dataset, tokenizer, config.max_prompt_tokens)
    eval_prompts = load_prompts(config.eval_dataset, tokenizer, config.max_prompt_tokens) if config.eval_dataset else []
    batches = endless_batches(prompts, config.prompts_per_step, config.seed)
    sampling = config.sampling_config(tokenizer.eos_token_id)
    actor_loss, critic_loss = config.actor_loss(), config.critic_loss()
    meta = {"temperature": config.temperature}
    all_ranks = config.ranks * config.training_groups

    with ExitStack() as stack:
        stack.enter_context(ray_session(all_ranks, config.engines))
        share = share_cluster(all_ranks, config.engines, take_turns=not config.batches_ahead)
        groups = open_groups(config, share, stack)
        rollout = stack.enter_context(RolloutGroup(config.rollout_config(share)))
        traced: list[TraceSource] = [*groups, rollout] if config.trace else []
        folder = stack.enter_context(RunFolder(config.run_dir, config, trace=traced))
        for group in groups:
            require_paths(group, config.model, folder.path)
        actor, critic, reference = build_models(config, groups)
        sync = stack.enter_context(WeightSync(actor.group, rollout, actor.handle, transport=config.transport))
        stream = stack.enter_context(SampleStream(rollout, batches, sampling, seed=config.seed, ahead=config.batches_ahead))
        collector = Collector(config, stream, tokenizer, reward)
        pushed = sync.push()
        collector.pushed(pushed.version, 0)
        held_out = HeldOut(eval_prompts, rollout, sampling, tokenizer, reward, folder)
        accuracy_before = held_out.accuracy(0)
        facts = [f"{len(prompts)} prompts", *config.facts(), f"{len(groups)} training group(s)"]
        print_start("PPO", [*facts, f"weights by {pushed.transport}"], accuracy_before, len(eval_prompts))
        max_gap, steps_started = 0.0, time.perf_counter()

        for step in range(1, config.steps + 1):
            clock = Clock()
            batch = collector.collect(step, clock)

            sequences = to_sequences(batch.samples)
            outputs = {
                "old_log_probs": actor.submit_output("log_probs", sequences, meta),
                "old_values": critic.submit_output("values", sequences, meta),
            }
            if reference:
                outputs["ref_log_probs"] = reference.submit_output("log_probs", sequences, meta)
            for name, output in outputs.items():
                sequences = with_field(sequences, name, output())
            clock.lap("outputs")

            sequences, estimated = with_gae(sequences, batch.rewards, config)
            actor_updates, critic_updates = [], []
            for _ in range(config.epochs):
                for start in range(0, len(sequences), config.sequences_per_update):
                    update = sequences[start : start + config.sequences_per_update]
                    critic_update = critic.submit_update(update, critic_loss, meta)
                    if step > config.critic_warmup_steps:
                        actor_updates.append(actor.submit_update(update, actor_loss, meta)())
                    critic_updates.append(critic_update())
            updates = [*actor_updates, *critic_updates]
            metrics = batch.metrics | estimated
            metrics |= {name: metric.mean for name, metric in merge_metrics([each.metrics for each in updates]).items()}
            metrics |= {"step_ok": float(all(each.ok for each in updates))}
            metrics |= {"critic_grad_norm": critic_updates[-1].grad_norm, "critic_next_lr": critic_updates[-1].next_lr}
            if actor_updates:
                metrics |= {"grad_norm": actor_updates[-1].grad_norm, "next_lr": actor_updates[-1].next_lr}
            clock.lap("train")
            with stream.between_batches():
                if config.batches_ahead:
                    clock.lap("wait_for_samples")
                collector.pushed(sync.push().version, step)
            clock.lap("sync")

            gap = metrics.get("log_prob_gap", 0.0)
            if not math.isfinite(gap):
                raise RLBackendError(f"step {step}: the log-prob gap between trainer and vLLM is {gap}")
            max_gap = max(max_gap, gap)
            step_seconds = time.perf_counter() - steps_started
            accuracy = held_out.accuracy(step) if config.evaluates_after(step) else None
            if accuracy is not None:
                metrics["accuracy"] = accuracy
            folder.log(step, metrics | clock.seconds | {"weight_version": actor.group.weight_version(actor.handle)})
            folder.log_samples(step, describe(batch.samples, batch.prompts, batch.rewards, tokenizer))
            print_step(step, config.steps, metrics, clock.seconds)
            if on_step:
                on_step(step, metrics)

        result = RunResult(accuracy_before, accuracy, max_gap, time.perf_counter() - started, step_seconds)
        actor.group.save_checkpoint(actor.handle, folder.path / "model", hf=True)
        critic.group.save_checkpoint(critic.handle, folder.path / "critic", hf=True)
        folder.write_summary(vars(result))
    return result


def open_groups(config: PPOConfig, share: Share, stack: ExitStack) -> list[TrainGroup]:
    """Starts the training groups; ``stack`` ends them."""
    runtime = config.runtime_config()
    return [
        stack.enter_context(TrainGroup(runtime, config.ranks, share.cores_per_rank, share.gpus, placement=config.placement))
        for _ in range(config.training_groups)
    ]


def build_models(config: PPOConfig, groups: Sequence[TrainGroup]) -> Models:
    """Actor, critic and reference on the first, second and third group, or all on the only one."""
    actor, critic, reference = (groups[min(index, len(groups) - 1)] for index in range(3))
    return Models(
        Model(actor, actor.build_model(name="actor")),
        Model(
            critic,
            critic.build_model(
                name="critic",
                head="values",
                hf_path=config.critic_model,
                optimizer=config.optimizer_config(config.critic_lr),
            ),
        ),
        Model(reference, reference.build_model(name="reference", forward_only=True)) if config.kl_coef else None,
    )


def with_gae(
    sequences: Sequence[TokenSequence], rewards: Sequence[float], config: PPOConfig
) -> tuple[list[TokenSequence], dict[str, float]]:
    """Adds ``advantages``, whitened, and ``returns``; also the critic's explained variance and the KL to the reference."""

    def estimate(fields: dict[str, Tensor], seq_lens: Tensor) -> dict[str, Tensor]:
        mask = fields["loss_mask"]
        token = token_rewards(torch.tensor(rewards), mask, seq_lens)
        if config.kl_coef and config.kl_place == "reward":
            log_probs = fields["old_log_probs"], fields["ref_log_probs"]
            token = kl_in_reward(token, *log_probs, mask, kl_coef=config.kl_coef)
        advantages, returns = gae_advantages(token, fields["old_values"], mask, seq_lens, config.gamma, config.lam)
        return {"advantages": masked_whiten(advantages, mask), "returns": returns}

    estimated = with_packed_fields(sequences, estimate)
    fields = {name: torch.cat([each.token_fields[name] for each in estimated]) for name in estimated[0].token_fields}
    mask = fields["loss_mask"]
    metrics = {"explained_variance": explained_variance(fields["old_values"], fields["returns"], mask)}
    if "ref_log_probs" in fields:
        kl = kl_penalty(fields["old_log_probs"], fields["ref_log_probs"], "k3")
        metrics["kl"] = float((kl * mask).sum() / mask.sum())
    return estimated, metrics


def main() -> None:
    config = parse_config(PPOConfig, "PPO with a critic on a local Hugging Face model.")
    result = train(config)
    if result.accuracy_after is not None:
        print(f"held-out accuracy: {result.accuracy_before:.3f} before, {result.accuracy_after:.3f} after")
    print(f"run folder: {config.run_dir} (report.html, trained models in {config.run_dir}/model and /critic)")


if __name__ == "__main__":
    run_command(main)
