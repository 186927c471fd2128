"""PPO with a critic on a local Hugging Face model: actor, critic and reference in Ray actors, rollouts in vLLM.

    python -m examples.ppo --model DIR --dataset train.jsonl --reward my_reward.py:compute_score --steps 200

The models are handles on one training group, or with ``--groups each`` on a group each, and then they work at the same
time. Every option is a field of ``PPOConfig``. With ``RAY_ADDRESS`` set it runs on that cluster, else on this machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from actors import Loss, RolloutGroup, TrainGroup, WeightSync
from actors.run.trace import TraceSource
from examples.common.clock import Clock
from examples.common.cluster import Share, ray_session, require_paths, share_cluster
from examples.common.collect import Collector
from examples.common.command_line import parse_config, run_command
from examples.common.inputs import load_inputs
from examples.common.models import Model, update_metrics
from examples.common.result import RunResult
from examples.common.rl_config import RLConfig
from examples.common.run_folder import RunFolder
from examples.common.run_lock import RunLock
from examples.common.run_log import OnStep, RunLog
from examples.common.run_saver import RunSaver, stream_position
from examples.common.run_start import find_start
from examples.common.sample_stream import SampleStream
from examples.common.sequences import rewards_of_tokens, to_sequences, with_outputs, with_packed_fields
from rl_backend import TokenSequence
from rl_backend.algorithm import (
    explained_variance,
    gae_advantages,
    kl_penalty,
    masked_sum,
    masked_whiten,
    zero_masked,
)
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import ConfigError


class PPOConfig(RLConfig):
    """All options of a run."""

    may_change: ClassVar[frozenset[str]] = RLConfig.may_change | {"groups"}
    contents: ClassVar[tuple[str, ...]] = (*RLConfig.contents, "critic_model")

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
        if self.kl_place != "reward" and not self.kl_coef:
            raise ConfigError.of("PPOConfig.kl_place", self.kl_place, "kl_coef=0 has no KL to place")
        return self

    @property
    def kl_in_reward(self) -> float:
        """Weight of the KL that is taken off the rewards."""
        return self.kl_coef if self.kl_place == "reward" else 0.0

    @property
    def optimizer_steps(self) -> int:
        return (self.steps - self.critic_warmup_steps) * self.updates_per_step * self.epochs

    @property
    def training_groups(self) -> int:
        return 1 if self.groups == "one" else 3 if self.kl_coef else 2

    def actor_loss(self) -> Loss:
        return Loss(
            "rl_backend.algorithm:grpo_loss",
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
            kl_coef=self.kl_coef - self.kl_in_reward,
            entropy_coef=self.entropy_coef,
            **self.importance_options(),
        )

    def critic_loss(self) -> Loss:
        return Loss("rl_backend.algorithm:value_loss", cliprange_value=self.cliprange_value)


class Models(NamedTuple):
    """``reference`` is None without a KL."""

    actor: Model
    critic: Model
    reference: Model | None


def train(config: PPOConfig, on_step: OnStep | None = None) -> RunResult:
    """Runs PPO and leaves the trained models in ``run_dir/model`` and ``run_dir/critic``."""
    start = find_start(config)
    inputs = load_inputs(config)
    read_hf_config(config.critic_model or config.model)
    actor_loss, critic_loss = config.actor_loss(), config.critic_loss()
    meta = config.meta()
    all_ranks = config.ranks * config.training_groups
    with ExitStack() as stack:
        lock = stack.enter_context(RunLock(config.run_dir))
        stack.enter_context(ray_session(all_ranks, config.engines))
        share = share_cluster(all_ranks, config.engines, take_turns=not config.batches_ahead)
        groups = open_groups(config, share, stack)
        rollout = stack.enter_context(RolloutGroup(config.rollout_config(share)))
        traced: list[TraceSource] = [*groups, rollout] if config.trace else []
        folder = stack.enter_context(RunFolder(config.run_dir, config, start=start, trace=traced, lock=lock))
        for group in groups:
            require_paths(group, config.model, folder.path)
        actor, critic, reference = build_models(config, groups)
        saver = stack.enter_context(RunSaver(config, folder, {"actor": actor, "critic": critic}, start))
        log = RunLog(config, inputs, rollout, folder, on_step, start)
        sync = stack.enter_context(WeightSync(actor.group, rollout, actor.handle, transport=config.transport))
        stream = stack.enter_context(
            SampleStream(
                rollout,
                inputs.batches,
                inputs.sampling,
                seed=config.seed,
                ahead=config.batches_ahead,
                start=stream_position(start),
            )
        )
        collector = Collector(config, stream, inputs, start=start)
        pushed = sync.push()
        collector.pushed(pushed.version, start.step)
        log.start("PPO", [f"{len(groups)} training group(s)", f"weights by {pushed.transport}"])

        for step in range(start.step + 1, config.steps + 1):
            clock = Clock()
            batch = collector.collect(step, clock)

            sequences = to_sequences(batch.samples, routes=config.router_replay == "R3")
            old_policy = actor.submit_old_policy(sequences, meta)
            outputs = {"old_values": critic.submit_output("values", sequences, meta)}
            if reference:
                outputs["ref_log_probs"] = reference.submit_output("log_probs", sequences, meta)
            sequences = with_outputs(sequences, old_policy() | {name: output() for name, output in outputs.items()})
            clock.lap("outputs")

            sequences, metrics = with_gae(sequences, batch.rewards, config)
            actor_updates, critic_updates = [], []
            for _ in range(config.epochs):
                for first in range(0, len(sequences), config.sequences_per_update):
                    update = sequences[first : first + config.sequences_per_update]
                    critic_update = critic.submit_update(update, critic_loss, meta)
                    if step > config.critic_warmup_steps:
                        actor_updates.append(actor.submit_update(update, actor_loss, meta)())
                    critic_updates.append(critic_update())
            of_critic = update_metrics(critic_updates)
            metrics |= {
                name if "value" in name or "return" in name else f"critic_{name}": of_critic[name] for name in of_critic
            }
            metrics |= update_metrics(actor_updates) if actor_updates else {"step_ok": of_critic["step_ok"]}
            clock.lap("train")
            with stream.between_batches():
                if config.batches_ahead:
                    clock.lap("wait_for_samples")
                pushed = sync.push()
                collector.pushed(pushed.version, step)
            clock.lap("sync")
            saver.save(step, clock)
            log.step(step, batch.metrics | metrics, batch, pushed.version, clock)
            saver.commit(step, log.state | collector.state, stream.position)

        saver.finish()
        actor.group.save_checkpoint(actor.handle, folder.place("model"), hf=True)
        critic.group.save_checkpoint(critic.handle, folder.place("critic"), hf=True)
        return log.finish()


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
        Model(actor, actor.build_model(name="actor"), config.router_replay),
        Model(
            critic,
            critic.build_model(
                name="critic",
                head="values",
                hf_path=config.critic_model,
                optimizer=config.optimizer_config(config.critic_lr, config.steps * config.updates_per_step * config.epochs),
            ),
        ),
        Model(reference, reference.build_model(name="reference", forward_only=True)) if config.kl_coef else None,
    )


def with_gae(
    sequences: Sequence[TokenSequence], rewards: Sequence[float], config: PPOConfig
) -> tuple[list[TokenSequence], dict[str, float]]:
    """Adds ``advantages``, whitened, and ``returns``.

    Metrics: ``explained_variance`` of the critic, unless all returns are equal, and ``kl``, in nats, where it is taken off
    the rewards.
    """

    def estimate(fields: dict[str, Tensor], seq_lens: Tensor) -> dict[str, Tensor]:
        mask = fields["loss_mask"]
        of_tokens = rewards_of_tokens(fields, seq_lens, rewards, config.kl_in_reward)
        advantages, returns = gae_advantages(of_tokens, fields["old_values"], mask, seq_lens, config.gamma, config.lam)
        return {"advantages": masked_whiten(advantages, mask), "returns": returns}

    estimated = with_packed_fields(sequences, estimate)
    fields = {name: torch.cat([each.token_fields[name] for each in estimated]) for name in estimated[0].token_fields}
    mask = fields["loss_mask"]
    metrics = {}
    explained = explained_variance(fields["old_values"], fields["returns"], mask)
    if math.isfinite(explained):
        metrics["explained_variance"] = explained
    if config.kl_in_reward:
        kl = kl_penalty(zero_masked(fields["old_log_probs"], mask), zero_masked(fields["ref_log_probs"], mask), "k3")
        metrics["kl"] = float(masked_sum(kl, mask) / mask.sum())
    return estimated, metrics


def main() -> None:
    config = parse_config(PPOConfig, "PPO with a critic on a local Hugging Face model.")
    result = train(config)
    if result.accuracy_after is not None:
        print(f"held-out accuracy: {result.accuracy_before:.3f} before, {result.accuracy_after:.3f} after")
    print(f"run folder: {config.run_dir} (report.html, trained models in {config.run_dir}/model and /critic)")


if __name__ == "__main__":
    run_command(main)
